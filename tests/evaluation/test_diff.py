"""Test the comparison of two models on the same images: values, order, snapshots and conditions."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import nn

import gradcam
from gradcam.errors import GradcamError, ModelError, OutputError
from gradcam.evaluation import Diff, ImageDiff, Snapshot, diff, read_snapshot, take_snapshot
from gradcam.evaluation.snapshots.gate import check_conditions, parse_condition
from gradcam.evaluation.snapshots.result import compare_entries
from gradcam.evaluation.snapshots.snapshot import Origin, SnapshotEntry

Photo = Callable[[str], Path]
NAMES = ("koala.webp", "coffee.jpg", "panda.webp", "cat_and_espresso.jpg")


def perturb(classifier: gradcam.Classifier, amount: float) -> gradcam.Classifier:
    """Return a copy with perturbed last layers: the same classes, and maps that differ."""
    model = copy.deepcopy(classifier.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith(("layer4", "head")) and weight.ndim > 1:
                weight += torch.randn(weight.shape, generator=generator) * weight.std() * amount
    return replace(classifier, model=model)


@pytest.fixture(scope="module")
def perturbed(classifier: gradcam.Classifier) -> gradcam.Classifier:
    return perturb(classifier, 0.25)


@pytest.fixture(scope="module")
def paths(photo: Photo) -> list[Path]:
    return [photo(name) for name in NAMES]


@pytest.fixture(scope="module")
def comparison(classifier: gradcam.Classifier, perturbed: gradcam.Classifier, paths: list[Path]) -> Diff:
    return diff(classifier, perturbed, paths)


@pytest.fixture(scope="module")
def snapshot(classifier: gradcam.Classifier, paths: list[Path]) -> Snapshot:
    return take_snapshot(classifier, paths)


# Values against SciPy and NumPy


def test_the_numbers_are_those_of_both_models_heatmaps(
    comparison: Diff, classifier: gradcam.Classifier, perturbed: gradcam.Classifier, photo: Photo
) -> None:
    assert {row.image for row in comparison.rows} == set(NAMES)
    for row in comparison.rows:
        old = classifier.explain(photo(row.image))
        index = int(old.classes[0, 0])
        new = perturbed.explain(photo(row.image), target=index)
        probabilities = new.probabilities()[0]
        assert (row.old.index, row.new.index) == (index, int(probabilities.argmax()))
        assert (row.old.label, row.new.label) == (classifier.labels[index], classifier.labels[row.new.index])
        # `diff` explains images in batches, so the last digits differ.
        np.testing.assert_allclose(row.old.probability, float(old.probabilities()[0].max()), atol=1e-4)
        np.testing.assert_allclose(row.new.probability, float(probabilities.max()), atol=1e-4)
        np.testing.assert_allclose(row.old_class_probability, probabilities[index], atol=1e-4)
        assert row.drop == row.old.probability - row.old_class_probability
        assert row.agree is (index == int(probabilities.argmax()))
        old_map, new_map = (explanation.heatmaps[0, 0].double().numpy() for explanation in (old, new))
        assert row.correlation == pytest.approx(spearmanr(old_map.ravel(), new_map.ravel()).statistic, abs=2e-3)
        assert row.overlap == pytest.approx(count_both(old_map, new_map), abs=5e-3)
        assert row.moved == pytest.approx(measure(old_map, new_map), abs=1e-3)
        assert 0.5 < row.correlation < 0.999  # The maps differ, so the assertions above can fail.
        assert row.moved > 0.005
    assert {row.agree for row in comparison.rows} == {True, False}


def count_both(old: NDArray[Any], new: NDArray[Any]) -> float:
    """Return the share of pixels above one map's 70th percentile that are also above the other's."""
    tops = [set(np.argsort(-heatmap.ravel())[: round(0.3 * heatmap.size)].tolist()) for heatmap in (old, new)]
    return len(tops[0] & tops[1]) / len(tops[0])


def measure(old: NDArray[Any], new: NDArray[Any]) -> float:
    """Return the distance between the centres of mass, as a share of the image's diagonal."""
    rows, columns = np.mgrid[: old.shape[0], : old.shape[1]]
    moves = [(axis * old).sum() / old.sum() - (axis * new).sum() / new.sum() for axis in (rows, columns)]
    return math.hypot(*moves) / math.hypot(*old.shape)


# Values by hand

ORIGIN = Origin("m", "w", "a", "float32", "p", "gradcam", "l", "logit", 4, None, {})
FULL_REGION = (0, 0, 224, 224)


def compare(
    old: NDArray[Any], new: NDArray[Any], region: Any = FULL_REGION, region_of_new: Any = None, **more: Any
) -> ImageDiff:
    def see(values: NDArray[Any], region: Any, predicted: int) -> SnapshotEntry:
        size = (region[0] + region[2] + 50, region[1] + region[3] + 50) if "size" not in more else more["size"]
        return SnapshotEntry("a.png", "0" * 64, predicted, 0.75, 1, 0.5, size, region, values.astype(np.float16))

    first, second = see(old, region, 1), see(new, region_of_new or region, more.get("predicted", 1))
    return compare_entries(first, second, (ORIGIN, ORIGIN), 0.9, lambda: np.zeros((*first.size, 3), np.uint8))


def spot(row: int, column: int) -> NDArray[Any]:
    values = np.zeros((224, 224))
    values[row, column] = 1
    return values


def test_a_spot_that_moves_by_30_and_40_pixels_moves_by_50() -> None:
    row = compare(spot(10, 20), spot(40, 60))
    assert row.moved == pytest.approx(50 / math.hypot(224, 224), abs=1e-6)
    wide = compare(spot(10, 20), spot(40, 60), (7, 9, 112, 448))  # the spot moves 15 pixels down and 80 across
    assert wide.moved == pytest.approx(math.hypot(15, 80) / math.hypot(112, 448), abs=1e-6)


def test_the_top_30_percent_of_stripes() -> None:
    ramp = np.tile(np.arange(1, 225) / 224, (224, 1))
    row = compare(ramp, ramp[:, ::-1])
    assert (row.correlation, row.overlap, row.change) == (pytest.approx(-1), 0, "map")
    # The top of the ramp moves; the last 55 columns keep their order.
    below = np.where(np.arange(224) < 112, ramp + 0.5, ramp) / 1.5
    assert compare(ramp, ramp[::-1]).values == {"agree": 1, "correlation": 1, "overlap": 1, "moved": 0, "drop": 0.25}
    assert 0 < compare(ramp, below).overlap < 1


def test_constant_and_blank_maps_are_as_rank_correlation_says() -> None:
    blank, constant, spotted = np.zeros((7, 7)), np.ones((7, 7)), np.eye(7)
    for flat in (blank, constant):
        both, single = compare(flat, flat), compare(flat, spotted)
        assert (both.correlation, both.overlap, both.moved, both.change) == (1, 1, 0, "none")
        assert (single.correlation, single.change) == (0, "map")
        assert single.moved == pytest.approx(0, abs=1e-6)  # both centres of mass are the middle
    assert compare(blank, spot(0, 0)).moved == pytest.approx(0.5, abs=0.005)


def test_grids_of_two_sizes_are_laid_on_the_same_points() -> None:
    coarse, fine = (np.add.outer(np.arange(n), 2 * np.arange(n)) / (3 * n) for n in (7, 14))
    row = compare(coarse, fine)
    assert row.correlation > 0.995
    assert row.moved < 0.02


def test_maps_of_two_crops_are_compared_where_both_look() -> None:
    """Two models see different crops of one slope over the image. In the common part their maps are equal."""
    slope = np.add.outer(np.arange(300), 3 * np.arange(300)) / 1200
    wide, narrow = slope[20:220, 30:290], slope[60:260, 10:210]  # the crops share rows 60 to 220 and columns 30 to 210
    row = compare(wide, narrow, (20, 30, 200, 260), (60, 10, 200, 200), size=(300, 300))
    assert row.correlation > 0.999
    assert row.draw()["image"].shape == (160, 180, 3)
    shifted = compare(wide, narrow, (20, 30, 200, 260), (20, 30, 200, 260), size=(300, 300))
    assert shifted.correlation > 0.99  # ranks on a slope do not change with the position
    step = np.where(np.arange(300) < 150, 0.0, 1.0) * np.ones((300, 1))
    right = compare(step[:, 30:290], step[:, 10:210], (0, 30, 300, 260), (0, 10, 300, 200), size=(300, 300))
    wrong = compare(step[:, 30:290], step[:, 10:210], (0, 30, 300, 260), (0, 30, 300, 260), size=(300, 300))
    assert right.overlap > wrong.overlap
    assert right.moved < 0.01 < wrong.moved


def test_positions_are_those_of_the_image_whichever_region_is_seen() -> None:
    """A spot at row 150, column 122 of the image stays there on a grid of 2 x 4 pixels per cell and on one of 4 x 2."""
    first, second = np.zeros((100, 65)), np.zeros((50, 100))
    first[(150 - 20) // 2, (122 - 30) // 4] = 1
    second[(150 - 60) // 4, (122 - 10) // 2] = 1
    row = compare(first, second, (20, 30, 200, 260), (60, 10, 200, 200), size=(300, 300))
    assert row.moved < 0.01
    # The second region starts 20 rows higher.
    elsewhere = compare(first, second, (20, 30, 200, 260), (40, 10, 200, 200), size=(300, 300))
    assert elsewhere.moved == pytest.approx(20 / math.hypot(180, 180), abs=0.01)


def test_regions_without_a_common_pixel_are_reported() -> None:
    with pytest.raises(GradcamError, match="OLD and NEW see do not overlap"):
        compare(np.eye(7), np.eye(7), (0, 0, 50, 50), (60, 60, 50, 50), size=(200, 200))


def test_which_kind_of_change_it_is() -> None:
    top_left, bottom_right = spot(10, 10), spot(200, 200)
    assert compare(top_left, bottom_right).change == "map"
    assert compare(top_left, bottom_right, predicted=2).change == "class"
    assert compare(top_left, top_left, predicted=2).change == "class"
    assert compare(top_left, top_left).change == "none"


# Order, means and words


def test_the_same_class_with_another_map_comes_first(
    classifier: gradcam.Classifier, perturbed: gradcam.Classifier, paths: list[Path]
) -> None:
    comparison = diff(classifier, perturbed, paths, alike=0.95)
    changes = [row.change for row in comparison.rows]
    assert changes == sorted(changes, key=["map", "class", "none"].index)
    assert set(changes) > {"class"}
    for kind in set(changes):
        correlations = [row.correlation for row in comparison.rows if row.change == kind]
        assert correlations == sorted(correlations)
    for row in comparison.rows:
        same = "map" if row.correlation < 0.95 else "none"
        assert row.change == (same if row.old.index == row.new.index else "class")
    assert comparison.first_row is comparison.rows[0]
    with pytest.warns(FutureWarning, match="Diff.worst is now first_row"):
        assert comparison.worst is comparison.rows[0]
    for name in ("correlation", "overlap", "moved", "drop", "agree"):
        assert comparison.means[name] == pytest.approx(np.mean([getattr(row, name) for row in comparison.rows]))
    counts = re.findall(r"\d+(?= with| alike| images)", comparison.summary)
    assert counts == [str(count) for count in (4, *map(changes.count, ("map", "class", "none")))]


def test_a_model_is_like_itself(classifier: gradcam.Classifier, photo: Photo) -> None:
    comparison = diff(classifier, classifier, photo("koala.webp"), alike=1)
    assert comparison.rows[0].values == {"agree": 1, "correlation": 1, "overlap": 1, "moved": 0, "drop": 0}
    assert comparison.notes == ("OLD and NEW have the same weights and the same precision.",)
    assert re.match("1 image: 0 with the same class .*, 0 with a different class, 1 alike;", comparison.summary)


def test_bfloat16_looks_where_float32_does(classifier: gradcam.Classifier, photo: Photo) -> None:
    low = gradcam.load_classifier(device="cpu", precision="bf16")
    comparison = diff(classifier, low, photo("koala.webp"))
    assert (comparison.old.dtype, comparison.new.dtype, comparison.notes) == ("float32", "bfloat16", ())
    assert 0.99 < comparison.first_row.correlation < 1
    assert 0 < abs(comparison.first_row.drop) < 0.03


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_a_quantised_head(classifier: gradcam.Classifier, photo: Photo) -> None:
    quantization = pytest.importorskip("torch.ao.quantization")  # quantisation is moving from torch to torchao
    quantised = quantization.quantize_dynamic(copy.deepcopy(classifier.model), {nn.Linear})
    comparison = diff(classifier, replace(classifier, model=quantised), photo("koala.webp"))
    assert comparison.first_row.correlation > 0.99
    assert comparison.first_row.drop != 0


def test_the_record_is_json_and_has_all_numbers(comparison: Diff) -> None:
    record = json.loads(json.dumps(comparison.to_record(), allow_nan=False))
    assert [entry["image"] for entry in record["images"]] == [row.image for row in comparison.rows]
    first = record["images"][0]
    assert {name: first[name] for name in comparison.means} == comparison.rows[0].values
    assert (record["old"]["model"], record["old"]["layer"]) == ("efficientnet_lite0", "layer4")
    assert record["means"] == comparison.means


def test_what_is_drawn(comparison: Diff, classifier: gradcam.Classifier, photo: Photo) -> None:
    row = next(row for row in comparison.rows if row.image == "coffee.jpg")
    drawn = row.draw()
    assert list(drawn) == ["image", "old", "new", "difference"]
    y0, x0, height, width = classifier.region(*gradcam.read_image(photo("coffee.jpg")).shape[:2])
    expected = gradcam.read_image(photo("coffee.jpg"))[y0 : y0 + height, x0 : x0 + width]
    assert np.array_equal(drawn["image"], expected)
    overlay = classifier.explain(photo("coffee.jpg")).overlay(outline=False)[y0 : y0 + height, x0 : x0 + width]
    assert abs(drawn["old"].astype(int) - overlay).max() <= 6  # the snapshot's map has float16 precision
    assert row.panel(height=64).shape[0] < row.panel(height=100).shape[0]


def test_red_is_where_the_new_map_is_stronger() -> None:
    row = compare(spot(20, 20) + spot(21, 21), spot(200, 200) + spot(201, 201))
    drawn = row.draw()["difference"].astype(int)
    red, blue = drawn[200, 200], drawn[20, 20]
    assert red[0] > red[2] + 50
    assert blue[2] > blue[0] + 50


def test_a_broken_picture_does_not_stop_the_others(
    classifier: gradcam.Classifier, perturbed: gradcam.Classifier, photo: Photo, tmp_path: Path
) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    steps: list[tuple[int, int]] = []
    inputs = [tmp_path / "broken.jpg", photo("koala.webp")]
    comparison = diff(classifier, perturbed, inputs, progress=lambda *step: steps.append(step))
    assert len(comparison.rows) == 1
    assert comparison.rows[0].image.endswith("koala.webp")
    ((name, reason),) = comparison.failures.items()
    assert name.endswith("broken.jpg")
    assert "is not an image" in reason
    assert "1 image, 1 failed" in comparison.summary
    assert [count for count, _ in steps] == [1, 2, 3]
    assert steps[-1] == (3, 3)


def test_pictures_in_other_forms_have_the_same_numbers(
    comparison: Diff, classifier: gradcam.Classifier, perturbed: gradcam.Classifier, photo: Photo
) -> None:
    image = gradcam.read_image(photo("koala.webp"))
    (row,) = diff(classifier, perturbed, [image]).rows
    expected = next(row for row in comparison.rows if row.image == "koala.webp")
    assert row.image == "inputs[0]"
    np.testing.assert_allclose([*row.values.values()], [*expected.values.values()], atol=3e-3)
    snapshot = take_snapshot(classifier, [image])
    assert diff(snapshot, perturbed, [image]).rows[0].values == row.values


# Models that cannot be compared


def small(classes: int = 4, **options: Any) -> gradcam.Classifier:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
    return gradcam.load_classifier(nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), head), size=64, **options)


def test_other_classes_are_refused_in_one_line(photo: Photo) -> None:
    with pytest.raises(ModelError, match="has 4 classes and NEW, .*, has 5: give two models with the same classes.$"):
        diff(small(4), small(5), photo("koala.webp"))
    first, second = small(labels=["a", "b", "c", "d"]), small(labels=["A", "b", "x", "y"])
    with pytest.raises(ModelError, match=r"Class 2 is 'c' in OLD, .*, and 'x' in NEW, .* \(2 .* differ\).*--labels"):
        diff(first, second, photo("koala.webp"))
    assert diff(small(), second, photo("koala.webp")).rows  # one of the models has no labels
    for models in ((small(), second), (second, small())):  # the names of one model hold for both
        (row,) = diff(*models, photo("koala.webp")).rows
        assert row.old.label == "Abxy"[row.old.index]
        assert row.new.label == "Abxy"[row.new.index]
        assert "class " not in row.describe()


def test_only_classifiers_are_compared(classifier: gradcam.Classifier, photo: Photo) -> None:
    with pytest.raises(ModelError, match="Expected a classifier, received"):
        diff(classifier, classifier.model, photo("koala.webp"))


def test_two_sizes_of_input_and_two_architectures_are_compared(photo: Photo) -> None:
    torch.manual_seed(1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    larger = gradcam.load_classifier(nn.Sequential(nn.Conv2d(3, 6, 5, 2), nn.ReLU(), *head), size=96, crop=1.0)
    comparison = diff(small(), larger, photo("koala.webp"))
    assert len(comparison.rows) == 1
    messages = " ".join(comparison.notes)
    assert "OLD and NEW have different preprocessing" in messages
    assert "see different parts of 1 of 1 images" in messages


def test_alike_is_a_correlation(classifier: gradcam.Classifier, photo: Photo) -> None:
    for alike in (1.5, -1.5):
        with pytest.raises(GradcamError, match=f"alike is {alike}, expected a rank correlation"):
            diff(classifier, classifier, photo("koala.webp"), alike=alike)


# Snapshots


def test_a_snapshot_gives_the_numbers_of_the_model(
    comparison: Diff, snapshot: Snapshot, perturbed: gradcam.Classifier, paths: list[Path], tmp_path: Path
) -> None:
    snapshot.save(tmp_path / "base")
    again = diff(read_snapshot(tmp_path / "base"), perturbed, paths)
    assert again.to_record() == comparison.to_record()
    snapshot.save(tmp_path / "other.npz")
    assert (tmp_path / "base").read_bytes() == (tmp_path / "other.npz").read_bytes()


def test_the_file_has_the_documented_format(
    snapshot: Snapshot, classifier: gradcam.Classifier, photo: Photo, tmp_path: Path
) -> None:
    snapshot.save(tmp_path / "base.npz")
    with np.load(tmp_path / "base.npz") as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"]))
    assert (about["kind"], about["schema"], about["model"]) == ("gradcam snapshot", 1, "efficientnet_lite0")
    assert (about["method"], about["layer"], about["score"], about["classes"]) == ("gradcam", "layer4", "logit", 1000)
    assert about["versions"]["torch"] == torch.__version__
    assert about["labels"] == list(classifier.labels)
    assert arrays["maps"].dtype == np.float16
    ends = np.cumsum(arrays["grid"].prod(1))
    for i, name in enumerate(NAMES):
        explanation = classifier.explain(photo(name))
        assert arrays["names"][i] == name
        assert arrays["sha256"][i] == hashlib.sha256(photo(name).read_bytes()).hexdigest()
        assert arrays["predicted"][i] == int(explanation.classes[0, 0])
        assert tuple(arrays["size"][i]) == gradcam.read_image(photo(name)).shape[:2]
        assert tuple(arrays["region"][i]) == explanation.regions[0]
        values = arrays["maps"][ends[i] - 49 : ends[i]].reshape(7, 7)
        expected = explanation.maps[0, 0].numpy()
        np.testing.assert_allclose(values, expected / expected.max(), atol=2e-3)
    assert (tmp_path / "base.npz").stat().st_size < 20_000


def test_images_are_identified_by_their_content(
    snapshot: Snapshot, perturbed: gradcam.Classifier, photo: Photo, tmp_path: Path
) -> None:
    for name, content in {"renamed.webp": "koala.webp", "coffee.jpg": "rocket.jpg", "new.jpg": "flower.jpg"}.items():
        (tmp_path / name).write_bytes(photo(content).read_bytes())
    comparison = diff(snapshot, perturbed, tmp_path)
    assert [row.image for row in comparison.rows] == ["renamed.webp"]
    assert dict(comparison.failures) == {
        "coffee.jpg": "coffee.jpg: has changed since the snapshot was taken",
        "new.jpg": "new.jpg: is not in the snapshot",
    }
    assert "3 of the snapshot's 4 images were missing or changed." in comparison.notes


def test_a_snapshot_with_other_settings_is_noted(
    snapshot: Snapshot, classifier: gradcam.Classifier, photo: Photo
) -> None:
    path = photo("koala.webp")
    at_layer3 = replace(classifier, layer="layer3")
    assert "OLD is explained at layer4 and NEW at layer3." in diff(snapshot, at_layer3, path).notes
    changed = replace(snapshot, origin=replace(snapshot.origin, architecture="0", versions={"torch": "1.0"}))
    notes = " ".join(diff(changed, classifier, path).notes)
    assert "The models have different architectures" in notes
    assert "taken with other versions (gradcam None, torch 1.0" in notes
    with pytest.raises(GradcamError, match="the method gradcam, not layercam: leave the method out"):
        diff(snapshot, classifier, path, method="layercam")
    with pytest.raises(GradcamError, match="the score logit, not contrast"):
        diff(snapshot, classifier, path, score="contrast")


def test_method_and_score_of_the_snapshot_are_taken(classifier: gradcam.Classifier, photo: Photo) -> None:
    snapshot = take_snapshot(classifier, photo("koala.webp"), method="layercam", score="probability")
    comparison = diff(snapshot, classifier, photo("koala.webp"))
    assert (comparison.new.method, comparison.new.score) == ("layercam", "probability")
    assert comparison.first_row.correlation == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("maps", None, "is damaged .its arrays are"),
        ("maps", lambda maps: maps[:-1], "its heatmaps do not have their recorded sizes"),
        ("maps", lambda maps: maps * np.float16(np.nan), "it contains invalid values"),
        ("predicted", lambda predicted: predicted + 1000, "it contains invalid values"),
        ("region", lambda region: region[:, :3], r"region is int64 \(4, 3\)"),
        ("region", lambda region: region * [1, 1, 0, 1], "it contains invalid values"),
        ("sha256", lambda sha256: sha256[:2], r"sha256 is <U64 \(2,\)"),
        ("about", lambda about: edit(about, schema=2), "its schema is 2, but this version of gradcam reads 1"),
        ("about", lambda about: edit(about, layer=None), "its description of the model is incomplete"),
        ("about", lambda about: edit(about, classes=7), "its labels do not match its 7 classes"),
        ("about", lambda about: edit(about, versions=3), "its description of the model is incomplete"),
        ("about", lambda about: np.array("[1]"), "is not a snapshot. Take a snapshot with gradcam diff MODEL"),
        ("about", None, "is not a snapshot. Take a snapshot with gradcam diff MODEL"),
    ],
)
def test_a_snapshot_that_somebody_changed_is_refused(
    name: str, change: Callable[[NDArray[Any]], Any] | None, message: str, snapshot: Snapshot, tmp_path: Path
) -> None:
    snapshot.save(tmp_path / "base.npz")
    with np.load(tmp_path / "base.npz") as file:
        arrays = dict(file)
    values = arrays.pop(name)
    np.savez(tmp_path / "changed.npz", **arrays, **({name: change(values)} if change else {}))
    with pytest.raises(OutputError, match=message) as caught:
        read_snapshot(tmp_path / "changed.npz")
    assert str(caught.value).startswith(f"{tmp_path}")
    assert "\n" not in str(caught.value)


def edit(about: NDArray[Any], **changed: Any) -> NDArray[Any]:
    return np.array(json.dumps(json.loads(str(about)) | changed))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 half of one", None])
def test_other_files_are_refused_and_not_overwritten(content: bytes | None, snapshot: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if content is None:
        np.save(path, np.eye(3))
        path = path.with_suffix(".npy")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="is not a snapshot"):
        read_snapshot(path)
    with pytest.raises(OutputError, match="is not a snapshot"):
        snapshot.save(path)
    assert path.read_bytes() == before
    with pytest.raises(OutputError, match="does not exist"):
        read_snapshot(tmp_path / "missing")
    with pytest.raises(OutputError, match="cannot be read"):
        read_snapshot(tmp_path)
    with pytest.raises(OutputError, match="the folder .* does not exist"):
        snapshot.save(tmp_path / "nowhere" / "base.npz")


# Conditions


@pytest.mark.parametrize(
    ("text", "values", "is_met"),
    [
        ("correlation<0.9", {"correlation": 0.89}, True),
        ("correlation<0.9", {"correlation": 0.9}, False),
        (" correlation > -0.5 ", {"correlation": 0.0}, True),
        ("agree<1", {"agree": 0.0}, True),
        ("agree<1", {"agree": 1.0}, False),
        ("mean  moved>5e-2", {"moved": 0.06}, True),
        ("drop>.3", {"drop": 0.2}, False),
    ],
)
def test_what_a_condition_says(text: str, values: dict[str, float], is_met: bool) -> None:
    condition = parse_condition(text)
    assert condition.is_met(values) is is_met
    assert condition.of_mean is ("mean" in text)


@pytest.mark.parametrize(
    "text",
    ["", "correlation", "correlation<", "correlation<=0.9", "0.9>correlation", "score<1", "agree<x", "moved<nan",
     "drop>inf", "least correlation<1", "correlation<0.9 agree<1", "correlation=1"],
)  # fmt: skip
def test_a_bad_condition_is_a_line_with_the_names(text: str) -> None:
    with pytest.raises(GradcamError, match="is not a condition: expected NAME<NUMBER.*agree, correlation, overlap.*$"):
        parse_condition(text)


def test_conditions_list_the_images_that_meet_them() -> None:
    good = {"agree": 1.0, "correlation": 0.95}
    bad = {"agree": 0.0, "correlation": 0.25}
    means = {"agree": 0.5, "correlation": 0.6}
    conditions, values = ["correlation<0.9", "agree<1", "mean agree<0.4"], {"bad & <b>\x01.png": bad, "good.png": good}
    gate = check_conditions(conditions, values, means, {"x": "x: no"})
    assert gate.is_met
    assert [case.met for case in gate.cases] == [("correlation<0.9", "agree<1"), (), (), ()]
    root = ElementTree.fromstring(gate.to_junit())
    (suite,) = root
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["4", "1", "1"]
    assert [case.get("name") for case in suite] == ["bad & <b>\\x01.png", "good.png", "x", "the mean of all images"]
    assert [[child.tag for child in case] for case in suite] == [["failure"], ["system-out"], ["error"], ["system-out"]]
    message = suite[0][0].get("message") or ""
    assert message == "correlation<0.9 and agree<1: agree 0, correlation 0.25"
    assert suite[2][0].get("message") == "x: no"
    assert not check_conditions(["mean agree<0.5"], {"bad": bad}, means, {}).is_met
    assert check_conditions(["mean agree<0.6"], {"bad": bad}, means, {}).is_met
    (case,) = check_conditions(["mean agree<0.6"], {}, {}, {}).cases
    assert case.error == "no image could be compared"


def test_a_gate_without_pictures_or_conditions_is_valid_xml() -> None:
    root = ElementTree.fromstring(check_conditions([], {}, {}, {}).to_junit())
    assert root.get("tests") == "0"


def test_the_gate_is_of_the_comparison(comparison: Diff) -> None:
    lowest = min(row.correlation for row in comparison.rows)
    assert comparison.gate([f"correlation<{lowest + 1e-6}"]).is_met
    assert not comparison.gate([f"correlation<{lowest - 1e-6}", "moved>1"]).is_met
    mean = np.mean([row.overlap for row in comparison.rows])
    assert comparison.gate([f"mean overlap<{mean + 1e-6}"]).is_met
    assert not comparison.gate([f"mean overlap<{mean - 1e-6}"]).is_met
