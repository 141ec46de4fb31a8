"""Test the audit: a planted shortcut ranks first, values equal slow loops, and errors in tables name their line."""

from __future__ import annotations

import json
import ntpath
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

import gradcam
from gradcam.errors import GradcamError, InputError, ModelError
from gradcam.evaluation import Audit, audit
from gradcam.evaluation.shortcuts.clusters import Cluster, Evidence, build_clusters, cluster, estimate_rarity, find_cues
from gradcam.evaluation.shortcuts.result import describe_place
from tests.fruit import CELL, CLASSES, IMAGE_PIXELS, MARK, draw_fruit, make_model, write_fruit

GRID, CHANNELS, IMAGES_PER_CLASS = 7, 32, 150


def load(model: nn.Module | None = None, **more: Any) -> gradcam.Classifier:
    settings: Any = {"size": (IMAGE_PIXELS, IMAGE_PIXELS), "mean": (0.0,) * 3, "std": (1.0,) * 3, **more}
    return gradcam.load_classifier(model or make_model(), labels=list(CLASSES), **settings)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder of 80 images, and the names of the six that have a mark."""
    folder = tmp_path_factory.mktemp("fruit")
    return folder, write_fruit(folder)


@pytest.fixture(scope="module")
def report(marked: tuple[Path, list[str]]) -> Audit:
    return audit(marked[0], load())


# A planted shortcut ranks first


def imagine(seed: int, planted: int, kind: str = "corner") -> tuple[Evidence, set[int]]:
    """Return synthetic evidence of 600 images of four classes, and the indices of the images with a planted shortcut.

    Each map is a blob that seldom reaches the border. The features are those of the class and of one of three
    backgrounds. `planted` images of the third class have evidence with their own features, in a corner or anywhere.
    """
    chance = np.random.default_rng(seed)
    classes = np.repeat(np.arange(4), IMAGES_PER_CLASS)
    bases, backgrounds, shortcut = chance.random((4, CHANNELS)), chance.random((3, CHANNELS)), chance.random(CHANNELS)
    rows, columns = np.mgrid[:GRID, :GRID]
    maps, features, shortcuts = [], [], set()
    for i, class_ in enumerate(classes):
        is_planted = class_ == 2 and i % IMAGES_PER_CLASS < planted
        down, across = (0.2, 0.3) if is_planted and kind == "corner" else chance.uniform(1, GRID - 2, 2)
        blob = np.exp(-((rows - down) ** 2 + (columns - across) ** 2) / 3)
        maps.append(blob + 0.02 * chance.random((GRID, GRID)))
        feature = shortcut if is_planted else bases[class_] + 0.3 * backgrounds[chance.integers(3)]
        features.append(feature + 0.1 * chance.random(CHANNELS))
        if is_planted:
            shortcuts.add(i)
    return Evidence.from_maps(classes, np.stack(maps), np.stack(features)), shortcuts


@pytest.mark.parametrize("seed", range(5))
def test_a_few_pictures_with_evidence_of_their_own_in_a_corner_come_first(seed: int) -> None:
    evidence, planted = imagine(seed, 6)
    first, second = cluster(evidence)[:2]
    assert set(first.members.tolist()) == planted
    assert first.class_ == 2
    assert first.suspicion > max(0.6, second.suspicion + 0.05)
    assert (first.elsewhere, first.other_count) == (0, 450)
    assert describe_place(first.map) == "in the top left corner"


def test_features_without_a_common_position_make_a_cluster_of_average_suspicion() -> None:
    evidence, planted = imagine(0, 8, "anywhere")
    (planted_cluster,) = [candidate for candidate in cluster(evidence) if set(candidate.members.tolist()) == planted]
    assert planted_cluster.apart > 0.9
    assert planted_cluster.place < 0.1
    assert 0.4 < planted_cluster.suspicion <= 0.55


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_suspicious_where_nothing_is_planted(seed: int) -> None:
    groups = cluster(imagine(seed, 0)[0])
    assert max(group.suspicion for group in groups) < 0.55
    assert max(group.place for group in groups) < 0.3


def test_a_class_that_is_a_shortcut_as_a_whole_comes_first() -> None:
    evidence, _ = imagine(1, IMAGES_PER_CLASS)
    first = cluster(evidence)[0]
    assert first.class_ == 2
    assert min(first.place, first.suspicion) > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_a_texture_behind_all_images_of_a_class_is_first_among_whole_class_cues(seed: int) -> None:
    """The evidence has no fixed place. The texture makes the features more alike, and unlike those of other classes."""
    evidence, _ = imagine(seed, 0)
    has_texture = evidence.classes == 1
    looks = evidence.looks.copy()
    looks[has_texture] += 0.7 * np.eye(CHANNELS)[3]
    clusters, whole_class = find_cues(
        Evidence.from_maps(evidence.classes, evidence.places.reshape(-1, GRID, GRID), looks)
    )
    assert whole_class[0].class_ == 1
    assert len(whole_class[0].members) > 0.9 * IMAGES_PER_CLASS
    assert sorted(cue.class_ for cue in whole_class) == [0, 1, 2, 3]
    assert sum(len(group.members) for group in clusters) == len(looks)  # Clusters are still a partition.


def test_a_whole_class_cue_may_be_in_most_images_only() -> None:
    evidence, _ = imagine(0, 100, "anywhere")  # 100 of 150 images
    cue = next(cue for cue in find_cues(evidence)[1] if cue.class_ == 2)
    assert sorted(cue.members.tolist()) == list(range(300, 400))


def test_purity_compares_members_with_the_most_similar_images_of_others() -> None:
    evidence, _ = imagine(4, 0)
    members = np.flatnonzero(evidence.classes == 2)
    (group,) = build_clusters(evidence, [members])
    units = [look / np.sqrt((look**2).sum()) for look in evidence.looks]
    inside = [units[i] @ sum(units[j] for j in members if j != i) for i in members]
    norms = [np.sqrt((sum(units[j] for j in members if j != i) ** 2).sum()) for i in members]
    centre = sum(units[i] for i in members)
    outside = [unit @ centre / np.sqrt((centre**2).sum()) for i, unit in enumerate(units) if i not in members]
    lowest = sorted(a / b for a, b in zip(inside, norms))[int(0.2 * (len(members) - 1))]
    assert group.purity == pytest.approx(lowest - np.percentile(outside, 99), abs=1e-6)


def test_each_picture_of_a_class_is_in_one_cluster_and_it_repeats() -> None:
    evidence, _ = imagine(3, 6)
    groups = cluster(evidence)
    assert sorted(np.concatenate([group.members for group in groups]).tolist()) == list(range(4 * IMAGES_PER_CLASS))
    again = cluster(evidence)
    assert [group.members.tolist() for group in groups] == [group.members.tolist() for group in again]
    assert [group.suspicion for group in groups] == sorted((group.suspicion for group in groups), reverse=True)


def test_the_mark_in_the_corner_comes_first_of_drawn_pictures(report: Audit, marked: tuple[Path, list[str]]) -> None:
    first = report.clusters[0]
    assert set(first.members) == set(marked[1])
    assert (first.class_name, first.where, first.image_count) == ("apple", "in the bottom right corner", 40)
    words = "in the bottom right corner, in 6 of 40 images of apple; none of 40 images of other classes has"
    assert first.describe() == f"{words} as much evidence there"
    assert first.suspicion > 1.5 * report.clusters[1].suspicion
    assert report.source == "the folders' names"
    assert sum(len(group.members) for group in report.clusters) == 80


# Values of a cluster


def slow_rate(hits: int, count: int, end: str) -> float:
    if count == 0:
        return float(end == "high")
    return float(getattr(binomtest(hits, count).proportion_ci(0.9, method="wilson"), end))


@pytest.mark.parametrize(
    ("reference", "members"),
    [((0, 1500), (6, 500)), ((3, 40), (20, 40)), ((40, 40), (1, 40)), ((0, 0), (3, 5)), ((1, 9), (0, 4))],
)
def test_estimate_rarity_is_the_ratio_of_the_ends_of_scipys_intervals(
    reference: tuple[int, int], members: tuple[int, int]
) -> None:
    flags = [np.arange(count) < hits for hits, count in (reference, members)]
    low = slow_rate(*members, "low")
    expected = max(0.0, 1 - slow_rate(*reference, "high") / low) if low > 1e-12 else 0.0
    assert estimate_rarity(*flags) == pytest.approx(expected, abs=1e-3)


def slow_compare(classes: Any, maps: Any, features: Any, members: list[int]) -> tuple[float, float, int]:
    """Compute `place`, `apart` and `elsewhere` in a loop over the images."""
    shares = [heatmap / heatmap.sum() for heatmap in maps]
    mean = sum(shares[i] for i in members) / len(members)
    cells = sorted(((value, cell) for cell, value in np.ndenumerate(mean)), key=lambda heatmap: -heatmap[0])
    core, total = [], 0.0
    for value, cell in cells:
        core.append(cell)
        total += value
        if total >= 0.5:
            break
    amounts = [sum(share[cell] for cell in core) for share in shares]
    min_amount = sorted(amounts[i] for i in members)[int(0.2 * (len(members) - 1))]
    looks = [feature / np.sqrt((feature**2).sum()) for feature in features]

    def cosine(i: int) -> float:
        centre = sum(looks[j] for j in members if j != i)
        return float((looks[i] * centre).sum() / np.sqrt((centre**2).sum()))

    similarities = [cosine(i) for i in range(len(looks))]
    min_similarity = sorted(similarities[i] for i in members)[int(0.2 * (len(members) - 1))]
    class_ = classes[members[0]]
    other_classes = [i for i in range(len(classes)) if classes[i] != class_]
    same_class = [i for i in range(len(classes)) if classes[i] == class_]
    outside = [i for i in range(len(classes)) if i not in members]
    rates = []
    for values, limit, reference, inside in (
        (amounts, min_amount, other_classes, same_class),
        (similarities, min_similarity, outside, members),
    ):
        high = slow_rate(sum(values[i] >= limit for i in reference), len(reference), "high")
        rates.append(max(0, 1 - high / slow_rate(sum(values[i] >= limit for i in inside), len(inside), "low")))
    return rates[0], rates[1], sum(amounts[i] >= min_amount for i in other_classes)


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_is_compared_as_a_slow_loop_compares_it(seed: int) -> None:
    chance = np.random.default_rng(seed)
    classes, maps = chance.integers(0, 3, 60), chance.random((60, 4, 5)) ** 3
    features = chance.random((60, 6))
    members = np.flatnonzero(classes == 1)[:9]
    maps[members[:7], 0, 0] += 4  # makes `place` and `apart` positive
    features[members, 2] += 3
    _, group = build_clusters(Evidence.from_maps(classes, maps, features), [np.flatnonzero(classes == 1), members])
    place, apart, elsewhere = slow_compare(classes, maps, features, members.tolist())
    assert 0.05 < place < 1
    assert 0.05 < apart < 1
    assert (group.place, group.apart) == (pytest.approx(place, abs=1e-3), pytest.approx(apart, abs=1e-3))
    assert group.elsewhere == elsewhere
    assert group.share == pytest.approx(9 / (classes == 1).sum())


def test_suspicion_by_hand() -> None:
    def make(share: float, is_rest: bool = False) -> float:
        return Cluster(0, np.arange(3), share, np.ones((2, 2)) / 4, 0.6, 0.8, 0, 9, is_rest).suspicion

    assert make(0.1) == pytest.approx(0.8 * 1.6 / 2)
    assert make(0.5) == pytest.approx(0.8 * 1.6 / 2)
    assert make(0.51) == pytest.approx(0.8 * 0.6)
    assert make(0.1, is_rest=True) == pytest.approx(0.8 * 0.6)


def test_a_clusters_map_is_the_mean_of_what_explain_gives(report: Audit, marked: tuple[Path, list[str]]) -> None:
    for group in report.clusters:
        shares = []
        for name in group.members:
            image = torch.from_numpy(gradcam.read_image(marked[0] / name)).permute(2, 0, 1)[None].float() / 255
            values = gradcam.explain(make_model(), image, "1", target=group.index).maps[0, 0].double().numpy()
            shares.append(values / values.sum())
        np.testing.assert_allclose(group.map, np.mean(shares, 0), atol=1e-4)
    rows = slice(MARK[0].start // CELL, MARK[0].stop // CELL)
    columns = slice(MARK[1].start // CELL, MARK[1].stop // CELL)
    assert report.clusters[0].map[rows, columns].sum() == pytest.approx(1, abs=0.02)


def test_one_pass_of_the_model_gives_maps_and_features(marked: tuple[Path, list[str]]) -> None:
    model, batch_sizes = make_model(), []
    classifier = load(model, layer="1")
    model[0].register_forward_hook(lambda module, args, output: batch_sizes.append(len(output)))
    messages: list[tuple[int, int]] = []
    audit(marked[0], classifier, batch_size=20, progress=lambda *step: messages.append(step))
    assert messages[-1] == (80, 80)
    assert [size for size in batch_sizes if size > 1] == [20] * 4
    # In the first batch, each image also runs alone, to check that the model treats the images independently.
    assert batch_sizes.count(1) == 20


# Descriptions of places

WORDS = {
    (0, 0): "in the top left corner", (0, 6): "in the top right corner", (6, 0): "in the bottom left corner",
    (6, 6): "in the bottom right corner", (0, 3): "at the top", (6, 3): "at the bottom", (3, 0): "on the left",
    (3, 6): "on the right", (3, 3): "in the middle",
}  # fmt: skip


@pytest.mark.parametrize(("cell", "words"), WORDS.items(), ids=list(WORDS.values()))
def test_a_spot_has_its_place_in_words(cell: tuple[int, int], words: str) -> None:
    values = np.full((7, 7), 0.01)
    values[cell] = 1
    assert describe_place(values) == words
    assert describe_place(values.repeat(2, 0)) == words  # a grid that is not square


def test_bands_frames_and_all_over_the_picture() -> None:
    top, frame = np.full((7, 7), 0.05), np.full((7, 7), 0.01)
    top[0] = 1
    frame[[0, -1]] = frame[:, [0, -1]] = 1
    maps = (top, top.T, frame, np.ones((7, 7)), np.ones((1, 1)))
    words = ["at the top", "on the left", "along the border", "all over the image", "in the middle"]
    assert [describe_place(values) for values in maps] == words


# Labels


def write_table(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["image,class", *rows]) + "\n", encoding="utf-8")
    return path


def count_labels(report: Audit) -> dict[str, int]:
    return {group.class_name: group.image_count for group in report.clusters}


@pytest.mark.parametrize("start", ["", "fruit/", "beside"])
def test_a_table_names_pictures_from_where_they_lie_or_where_it_lies(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fruit(tmp_path / "fruit", 14, 0)
    monkeypatch.chdir(tmp_path)
    names = [f"{fruit}/{number:02}.png" for fruit in CLASSES for number in range(14)]
    folder = tmp_path / "fruit" if start == "beside" else tmp_path
    prefix = "" if start == "beside" else start
    rows = [f"{prefix}{name},{name.partition('/')[0]}" for name in names[:-4]]
    table = write_table(folder / "labels.csv", rows)
    report = audit("fruit", load(), labels=str(table))
    assert report.source == "labels.csv"
    unlabelled = [name for name in report.failures if name in names]
    assert unlabelled == names[-4:]
    assert report.failures[names[-1]] == f"{names[-1]}: there is no label in labels.csv"


def test_a_table_and_its_images_may_lie_on_two_drives_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fruit(tmp_path / "fruit", 14, 0)
    rows = [f"{tmp_path}/fruit/{fruit}/{number:02}.png,{fruit}" for fruit in CLASSES for number in range(14)]
    table = write_table(tmp_path / "labels.csv", [*rows, f"{tmp_path}/none.png,apple"])
    monkeypatch.setattr(os.path, "relpath", lambda path, start: ntpath.relpath(f"D:{path}", f"C:{start}"))
    report = audit(tmp_path / "fruit", load(), labels=table)
    assert list(report.failures.values()) == [f"{table}, line 30: {tmp_path}/none.png is not among the images"]
    assert count_labels(report) == {"apple": 14, "lime": 14}


def test_each_bad_line_has_its_own_failure_and_the_rest_is_audited(tmp_path: Path) -> None:
    write_fruit(tmp_path / "fruit", 14, 0)
    (tmp_path / "fruit/apple/13.png").write_bytes(b"nothing")
    rows = [f"fruit/{fruit}/{number:02}.png,{fruit}" for fruit in CLASSES for number in range(14)]
    rows[1] = "fruit/apple/01.png,pear"
    rows += ["fruit/none.png,apple", "fruit/apple/02.png,lime", "fruit/apple/02.png,"]
    table = write_table(tmp_path / "labels.csv", rows)
    report = audit(tmp_path / "fruit", load(), labels=table)
    messages = list(report.failures.values())
    beginnings = [
        f"{table}, line 30: fruit/none.png is not among the images",
        f"{table}, line 31: fruit/apple/02.png has the class lime on this line, but the class apple of an earlier line",
        f"{table}, line 32: fruit/apple/02.png has no class",
        "1 image left out: No class is called 'pear'",
        "apple/13.png: is not an image",
    ]
    assert [message[: len(start)] for message, start in zip(messages, beginnings, strict=True)] == beginnings
    assert count_labels(report) == {"apple": 12, "lime": 14}


def test_without_labels_folders_are_taken_or_predictions(marked: tuple[Path, list[str]], tmp_path: Path) -> None:
    for number in range(12):
        for fruit in CLASSES:
            gradcam.write_image(tmp_path / f"{fruit}{number}.png", draw_fruit(number, fruit))
    report = audit(tmp_path, load())
    assert report.source == "the model's predictions"
    assert "--labels" in report.notes[0]
    assert count_labels(report) == {"apple": 12, "lime": 12}
    assert audit(marked[0], load(), labels="predicted").source == "the model's predictions"
    labels = {f"{fruit}{number}.png": fruit for number in range(12) for fruit in CLASSES}
    assert audit(tmp_path, load(), labels=labels).source == "the labels given"
    with pytest.raises(InputError, match="No image has a valid class in the folders' names"):
        audit(tmp_path, load(), labels="folders")


def test_invalid_labels_are_refused(marked: tuple[Path, list[str]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="labels.json: expected a table .* with the columns image and class"):
        audit(marked[0], load(), labels="labels.json")
    with pytest.raises(InputError, match="this list cannot be opened"):
        audit(marked[0], load(), labels=tmp_path / "none.csv")
    words = r"No image has a valid class in other.csv: .*line 2: a.png is not among the images \(and 80 more"
    with pytest.raises(InputError, match=words):
        audit(marked[0], load(), labels=write_table(tmp_path / "other.csv", ["a.png,apple"]))


# Bad input


def test_one_class_alone_cannot_be_compared(marked: tuple[Path, list[str]]) -> None:
    with pytest.raises(InputError, match="are of one class, lime: give images of at least two classes"):
        audit(marked[0] / "lime", load(), labels="predicted")


def test_a_class_with_few_pictures_stands_for_other_classes_only(marked: tuple[Path, list[str]]) -> None:
    labels = {f"lime/{number:02}.png": "lime" for number in range(4)}
    labels |= {f"apple/{number:02}.png": "apple" for number in range(40)}
    report = audit(marked[0], load(), labels=labels)
    assert report.notes[-1].endswith("are used only for comparison: lime (4).")
    assert {(group.class_name, group.other_image_count) for group in report.clusters} == {("apple", 4)}
    few = dict(list(labels.items())[:8])
    with pytest.raises(InputError, match="Clustering needs 10 images with positive evidence"):
        audit(marked[0], load(), labels=few)


def test_blank_maps_are_reported_and_left_out(tmp_path: Path) -> None:
    write_fruit(tmp_path, 14, 0)
    gradcam.write_image(tmp_path / "apple/00.png", draw_fruit(0, "lime"))
    report = audit(tmp_path, load())
    assert report.blank == ("apple/00.png",)
    assert any("1 image has no positive evidence for the class" in note for note in report.notes)
    assert all("apple/00.png" not in group.members for group in report.clusters)
    assert {group.image_count for group in report.clusters if group.class_name == "apple"} == {13}


class NanOnWhite(nn.Module):
    """A layer whose output is NaN for images whose first pixel is white."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        is_white = (images[:, :, 0, 0] > 0.99).all(1)
        return torch.where(is_white[:, None, None, None], torch.nan, images)


def test_an_image_with_nan_features_fails_and_the_rest_is_audited(tmp_path: Path) -> None:
    write_fruit(tmp_path, 14, 0)
    white = draw_fruit(0, "apple")
    white[0, 0] = 255
    gradcam.write_image(tmp_path / "apple/00.png", white)
    report = audit(tmp_path, load(nn.Sequential(NanOnWhite(), make_model()), layer="1.1"))
    (reason,) = report.failures.values()
    assert re.match("apple/00.png: .*NaN", reason)
    assert sum(len(group.members) for group in report.clusters) == 27


def test_pictures_that_are_all_alike_are_clustered(tmp_path: Path) -> None:
    for fruit in CLASSES:
        (tmp_path / fruit).mkdir()
        for number in range(12):
            gradcam.write_image(tmp_path / fruit / f"{number}.png", draw_fruit(0, fruit))
    report = audit(tmp_path, load())
    assert sum(len(group.members) for group in report.clusters) == 24
    assert all(np.isfinite([group.suspicion, group.place, group.apart]).all() for group in report.clusters)


def test_what_cannot_be_audited_says_so(marked: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="'whole': use fit='crop'"):
        audit(marked[0], load(fit="whole"))
    with pytest.raises(ModelError):
        audit(marked[0], None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(GradcamError, match=r'needs scikit-learn.*pip install "\.\[audit\]"'):
        audit(marked[0], load())


@pytest.mark.slow
def test_scikit_learn_is_imported_when_it_is_used() -> None:
    import subprocess

    code = "import sys, gradcam.evaluation as it; it.audit; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Results


def test_clusters_are_drawn_with_their_members(report: Audit, marked: tuple[Path, list[str]]) -> None:
    drawn = report.clusters[0].draw(count=2)
    assert list(drawn) == ["mean map", *report.clusters[0].members[:2]]
    name = report.clusters[0].members[0]
    explanation = load(layer="1").explain(marked[0] / name, target="apple")
    assert abs(drawn[name].astype(int) - explanation.overlay()).max() <= 2
    sheet = report.sheet(count=2, height=40)
    assert sheet.dtype == np.uint8
    assert sheet.shape[0] < report.sheet(count=3, height=40).shape[0]


def test_a_deleted_image_is_left_out_of_the_drawing(tmp_path: Path) -> None:
    write_fruit(tmp_path, 10, 0)
    report = audit(tmp_path, load())
    assert not any("are not clustered" in note for note in report.notes)  # ten images are enough
    first = report.clusters[0]
    (tmp_path / first.members[0]).unlink()
    assert list(first.draw(count=2)) == ["mean map", first.members[1]]


def test_the_record_has_everything_and_is_json(report: Audit, marked: tuple[Path, list[str]]) -> None:
    record = json.loads(json.dumps(report.to_record(), allow_nan=False))
    assert (record["schema"], record["kind"], record["model"]) == (1, "gradcam audit", report.model)
    assert [entry["rank"] for entry in record["clusters"]] == list(range(1, 1 + len(report.clusters)))
    first = record["clusters"][0]
    assert first["class"] == {"index": 0, "label": "apple"}
    assert set(first["members"]) == set(marked[1])
    assert first["share"] == pytest.approx(6 / 40)
    whole_class = record["whole_class"]
    assert [entry["rank"] for entry in whole_class] == [1, 2]
    assert all(entry["share"] > 0.5 for entry in whole_class)
    scores = [entry["share"] * entry["purity"] for entry in whole_class]
    assert scores == sorted(scores, reverse=True)
    assert np.sum(first["map"]) == pytest.approx(1, abs=1e-4)
    again = audit(marked[0], load())
    assert again.to_record()["clusters"] == report.to_record()["clusters"]
    assert repr(report).startswith("Audit(80 images of 2 classes in ")
