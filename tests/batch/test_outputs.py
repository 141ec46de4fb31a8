"""Test the files of each image: their pixels and values equal those from Python, and their names describe them."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradcam
from gradcam.attributions.table import ATTRIBUTIONS
from gradcam.batch.image_results import ExplainedImage, ExplainRequest, explain_batch
from gradcam.batch.read_items import HashedItem
from gradcam.batch.result_names import OutputOptions, check_outputs, name_result
from gradcam.batch.save import Saver
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, ImageError, OutputError
from gradcam.images import files as image_files
from gradcam.options import DEFAULTS
from gradcam.sources.contents import FileContent, InputImage, UnreadableContent
from gradcam.storage.fetch import StoreImage
from gradcam.storage.output import DiskWriter
from gradcam.storage.records import ImageOutcome, Record
from gradcam.storage.store import Store
from gradcam.targets import ClassTarget
from tests.storage.test_output_folder import mounted

Photo = Callable[[str], Path]
TIGER_CAT, ESPRESSO = 282, 967


@dataclass
class Work:
    """Explains images and saves the results to a folder, as a run does."""

    classifier: gradcam.Classifier
    folder: Path
    request: ExplainRequest
    saving: OutputOptions = field(default_factory=OutputOptions)
    draw_views: Any = None

    def save(self, path: Path, stem: str = "sub/cat", result: Any = None) -> ImageOutcome:
        temporary = self.folder / ".partial"
        temporary.mkdir(parents=True, exist_ok=True)
        item = InputImage(f"{stem}.jpg", FileContent(str(path)))
        place = DiskWriter(self.folder, temporary)
        saver = Saver(place, {item.name: stem}, self.saving, self.classifier, self.request, self.draw_views)
        outcome = saver.save(HashedItem(item, "ab" * 32), self.find(path) if result is None else result)
        assert os.listdir(temporary) == []
        return outcome

    def find(self, path: Path) -> ExplainedImage:
        (result,) = explain_batch(self.classifier, self.request, [self.classifier.prepare(path)])
        assert isinstance(result, ExplainedImage)
        return result

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def do(classifier: gradcam.Classifier, tmp_path: Path) -> Callable[..., Work]:
    def make(saving: OutputOptions | None = None, *, classes: Sequence[int] = (), **settings: Any) -> Work:
        target = ClassTarget([list(classes)] if classes else None, top=settings.pop("top", 1))
        options: Any = {name: settings.pop(name) for name in DEFAULTS if name in settings}
        methods = [METHODS[name] for name in settings.pop("methods", ["gradcam"])]
        attributions = [ATTRIBUTIONS[name] for name in settings.pop("attributions", ())]
        settings = {"layers": (classifier.layer,), "attributions": attributions, **settings}
        request = ExplainRequest.of(methods, target, options, "Request", **settings)
        return Work(classifier, tmp_path / "explained", request, saving or OutputOptions())

    return make


def test_an_overlay_is_the_one_that_python_gives(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    styles: list[Any] = [{}, {"alpha": 0.8, "colormap": "viridis"}]
    for number, saving in enumerate([OutputOptions(format="png", **style) for style in styles]):
        work = do(saving)
        record = work.save(path, f"{number}").record
        explanation = work.classifier.explain(path)
        expected = explanation.overlay(alpha=saving.alpha, colormap=saving.colormap)
        (entry,) = record.explained
        assert entry.overlay == f"{number}-gradcam.png"
        assert np.array_equal(gradcam.read_image(work.folder / entry.overlay), expected)
        assert entry.score == explanation.scores.item()
        assert entry.index == explanation.classes.item()


@pytest.mark.parametrize("name", ["jpg", "webp"])
def test_an_overlay_is_as_good_as_its_quality(do: Callable[..., Work], photo: Photo, name: str) -> None:
    path, errors, sizes = photo("chelsea.jpg"), [], []
    for quality in (30, 90):
        work = do(OutputOptions(format=name, quality=quality))
        (entry,) = work.save(path, str(quality)).record.explained
        written = gradcam.read_image(work.folder / str(entry.overlay))
        expected = work.find(path).results[0].draw()
        errors.append(np.abs(written.astype(int) - expected).mean())
        sizes.append((work.folder / str(entry.overlay)).stat().st_size)
    assert errors[1] < 2.5
    assert errors[1] < errors[0] < 12
    assert sizes[0] * 1.5 < sizes[1]


def test_a_map_is_written_to_the_last_bit(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    work = do(OutputOptions(kinds=("map",)), classes=(TIGER_CAT, ESPRESSO))
    record = work.save(path).record
    maps = work.classifier.explain(path, target=[[TIGER_CAT, ESPRESSO]]).maps
    for k, entry in enumerate(record.explained):
        values = np.load(work.folder / str(entry.map))
        assert values.dtype == np.float32
        assert values.max() > 0
        assert np.array_equal(values, maps[0, k].numpy())
        assert entry.overlay is entry.heatmap is entry.panel is None
    assert not np.array_equal(*(np.load(work.folder / str(entry.map)) for entry in record.explained))
    assert work.files() == {"sub/cat-gradcam-282-tiger_cat.npy", "sub/cat-gradcam-967-espresso.npy"}


def test_a_heatmap_file_is_black_outside_the_region(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    work = do(OutputOptions(kinds=("heatmap",), format="png", alpha=0.1))
    (entry,) = work.save(path).record.explained
    assert entry.heatmap == "sub/cat-gradcam-heatmap.png"
    result = work.find(path)
    height, width = result.picture.shape[:2]
    written = gradcam.read_image(work.folder / entry.heatmap)
    assert written.shape == (height, width, 3)
    y0, x0, rows, columns = result.region
    inside = np.zeros((height, width), bool)
    inside[y0 : y0 + rows, x0 : x0 + columns] = True
    assert not inside.all()
    assert not written[~inside].any()
    heatmap = work.classifier.explain(path).heatmaps[0]
    black = np.zeros((rows, columns, 3), np.uint8)
    expected = gradcam.overlay(black, heatmap[0], alpha=1, region=(0, 0, rows, columns))
    assert np.array_equal(written[inside].reshape(rows, columns, 3), expected)
    bar = gradcam.overlay(np.zeros((1, 1, 3), np.uint8), np.ones((1, 1), np.float32), alpha=1)
    # The strongest evidence has the last colour of the colour map at full opacity.
    assert (written == bar).all(axis=2).any()


def test_signed_heatmaps_keep_their_two_colours(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    work = do(OutputOptions(kinds=("heatmap", "overlay"), format="png"), classes=(ESPRESSO,), evidence="signed")
    record = work.save(path).record
    (entry,) = record.explained
    assert entry.overlay == "sub/cat-gradcam-967-espresso-signed.png"
    assert entry.heatmap == "sub/cat-gradcam-967-espresso-signed-heatmap.png"
    written = gradcam.read_image(work.folder / str(entry.heatmap))
    heatmap = work.classifier.explain(path, target=ESPRESSO, evidence="signed").heatmaps[0, 0]
    assert heatmap.min() < 0 < heatmap.max()
    black = np.zeros_like(written)
    assert np.array_equal(written, gradcam.overlay(black, heatmap, alpha=1, region=record.region, signed=True))


def test_a_panel_is_the_one_that_python_gives(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("chelsea.jpg")
    work = do(OutputOptions(kinds=("panel",), format="png", alpha=0.7), methods=("gradcam", "layercam"))
    record = work.save(path).record
    assert [entry.panel for entry in record.explained] == ["sub/cat-compare.png"] * 2
    compared = work.classifier.compare(path, layers=[work.classifier.layer], methods=["gradcam", "layercam"])
    assert np.array_equal(gradcam.read_image(work.folder / "sub/cat-compare.png"), gradcam.panel(compared, alpha=0.7))
    assert work.files() == {"sub/cat-compare.png"}


def test_attributions_are_drawn_as_attributions(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("chelsea.jpg")
    kinds = ("overlay", "heatmap", "map", "panel")
    work = do(OutputOptions(kinds=kinds, format="png"), attributions=("guided-gradcam",))
    of_map, of_attribution = work.save(path).record.explained
    expected = work.classifier.attribute(path, "guided-gradcam")
    assert of_attribution.panel is None
    assert of_map.panel == "sub/cat-compare.png"
    assert of_attribution.evidence == "signed"
    for name in (of_attribution.overlay, of_attribution.heatmap):
        assert np.array_equal(gradcam.read_image(work.folder / str(name)), expected.draw())
    values = np.load(work.folder / str(of_attribution.map))
    assert values.dtype == np.float32
    assert values.min() < 0 < values.max()
    assert np.array_equal(values, expected.values[0, 0].numpy())
    names = [f"{method}{end}" for method in ("gradcam", "guided-gradcam") for end in (".png", "-heatmap.png", ".npy")]
    assert work.files() == {f"sub/cat-{name}" for name in ("compare.png", *names)}


def test_the_record_has_all_documented_fields(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    work = do(OutputOptions(kinds=("overlay", "map")))
    outcome = work.save(path)
    record, result = outcome.record, work.find(path)
    assert (record.image, record.model, record.status) == ("sub/cat.jpg", "efficientnet_lite0", "ok")
    assert record.size == result.picture.shape[:2] == (640, 800)
    assert record.region == result.region
    assert record.sha256 == "ab" * 32
    assert list(record.predictions) == list(result.predictions)
    (entry,) = record.explained
    assert (entry.layer, entry.method, entry.blank) == (work.classifier.layer, "gradcam", False)
    assert entry.label == work.classifier.label(entry.index)
    assert 0 < outcome.seconds < 600
    assert Record.from_json(record.to_json()) == record


def test_class_and_layer_are_in_the_name_if_there_are_several(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    layers = ("layer3", "layer4")
    work = do(classes=(TIGER_CAT, ESPRESSO), layers=layers)
    record = work.save(path, "cat").record
    names = {"282-tiger_cat-layer3", "967-espresso-layer3", "282-tiger_cat-layer4", "967-espresso-layer4"}
    assert {entry.overlay for entry in record.explained} == {f"cat-gradcam-{name}.jpg" for name in names}
    for entry in record.explained:
        assert str(entry.overlay).endswith(f"-{entry.index}-{str(entry.label).replace(' ', '_')}-{entry.layer}.jpg")
    for work, name in ((do(classes=(ESPRESSO,)), "cat-gradcam-967-espresso.jpg"), (do(), "cat-gradcam.jpg")):
        assert [entry.overlay for entry in work.save(path, "cat").record.explained] == [name]


def test_equal_names_get_numbers(do: Callable[..., Work], photo: Photo) -> None:
    work = do(OutputOptions(kinds=("overlay", "heatmap", "map"), format="png"), layers=("layer3", "layer4"))
    result = work.find(photo("chelsea.jpg"))
    pairs = zip(result.maps.values(), ("a/b", "A_B"))
    explanations = {(name, "gradcam"): replace(item, layer=name) for item, name in pairs}
    record = work.save(Path("x"), result=replace(result, maps=explanations)).record
    assert [(entry.overlay, entry.heatmap, entry.map) for entry in record.explained] == [
        ("sub/cat-gradcam-a_b.png", "sub/cat-gradcam-a_b-heatmap.png", "sub/cat-gradcam-a_b.npy"),
        ("sub/cat-gradcam-A_B-2.png", "sub/cat-gradcam-A_B-2-heatmap.png", "sub/cat-gradcam-A_B-2.npy"),
    ]
    assert len(work.files()) == 6
    values = np.load(work.folder / "sub/cat-gradcam-A_B-2.npy")
    assert np.array_equal(values, explanations["A_B", "gradcam"].maps[0, 0].numpy())


def test_long_stems_of_two_pictures_stay_apart() -> None:
    ending = "-gradcam-1-" + "l" * 80 + ".jpg"
    names = {name_result(f"folder-1/{'猫' * 70}{last}", ending) for last in "ab"}
    assert len(names) == 2
    for name in names:
        folder, _, file = name.partition("/")
        assert folder == "folder-1"
        assert file.endswith(ending)
        assert file.startswith("猫" * 40)
        assert len(os.fsencode(file)) <= 240
    assert name_result("a-b/short", ending) == f"a-b/short{ending}"


def test_a_picture_that_failed_has_one_line_that_names_it_once(do: Callable[..., Work], tmp_path: Path) -> None:
    work, path = do(), tmp_path / "photos" / "sub" / "cat.jpg"
    for lines in (("is cut", " off"), ("sub/cat.jpg: is cut", " off")):
        record = work.save(path, result=ImageError(*lines)).record
        assert record.error == "sub/cat.jpg: is cut off"
        assert (record.status, record.explained, record.sha256) == ("failed", (), "ab" * 32)
        assert record.image == "sub/cat.jpg"
    assert work.files() == set()


def test_a_picture_that_cannot_be_drawn_fails_by_itself(
    do: Callable[..., Work], photo: Photo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = do(OutputOptions(kinds=("overlay", "map")))
    result = work.find(photo("chelsea.jpg"))
    message = "sub/cat.jpg: IndexError: list index out of range (for the traceback, set GRADCAM_TRACEBACK=1)"
    with monkeypatch.context() as patch:
        patch.setattr(gradcam.batch.image_results.ExplanationResult, "draw_kinds", lambda *_, **__: list(range(1))[1])
        assert work.save(Path("x"), result=result).record.error == message
        patch.setenv("GRADCAM_TRACEBACK", "1")
        work.save(Path("x"), result=result)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert work.files() == set()  # The failed image has no file.
    with monkeypatch.context() as patch:
        wide = np.zeros((9, 70_000, 3), np.uint8)
        patch.setattr(gradcam.batch.image_results.ImageExplanation, "overlay", lambda *_, **__: wide)
        error = work.save(Path("x"), result=result).record.error
    assert error == "sub/cat.jpg: 70000 x 9 pixels are too large for this format: choose .png"


def test_a_name_that_the_disk_refuses_fails_only_its_image(do: Callable[..., Work], photo: Photo) -> None:
    work, path = do(OutputOptions(kinds=("overlay", "map"), format="png")), photo("chelsea.jpg")
    work.folder.mkdir()
    (work.folder / "sub").write_text("a file, where a folder is needed")
    error = str(work.save(path).record.error)
    assert error == "sub/cat.jpg: sub/cat-gradcam.png: this result cannot be written (file exists)"
    (work.folder / "cat-gradcam.npy").mkdir()
    error = str(work.save(path, "cat").record.error)
    assert error == "cat.jpg: cat-gradcam.npy: this result cannot be written (is a directory)"
    assert work.files() == {"sub"}  # The overlay was written, and was removed again.
    assert str(work.save(path, "x/" * 3000 + "cat").record.error).endswith("cannot be written (file name too long)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.ENOENT])
def test_a_disk_that_fails_ends_the_run(do: Callable[..., Work], photo: Photo, monkeypatch: Any, number: int) -> None:
    work = do(OutputOptions(kinds=("overlay", "map")))
    result, write = work.find(photo("chelsea.jpg")), image_files.write_atomically

    def fail(path: Path, data: bytes, **options: Any) -> None:
        if path.suffix == ".npy":
            raise OSError(number, os.strerror(number), str(path))
        write(path, data, **options)

    monkeypatch.setattr(image_files, "write_atomically", fail)
    with pytest.raises(OutputError) as raised:
        work.save(Path("x"), result=result)
    reason = os.strerror(number)
    assert str(raised.value).startswith(f"{work.folder}/: {reason[0].lower()}{reason[1:]}; ")
    assert work.files() == set()


def test_a_full_disk_leaves_nothing_half_written(do: Callable[..., Work], photo: Photo, tmp_path: Path) -> None:
    work = do(OutputOptions(format="png"))
    result = work.find(photo("chelsea.jpg"))
    with mounted(tmp_path / "disk", "1m") as disk:
        work.folder = disk / "explained"
        with pytest.raises(OutputError) as raised:
            any(work.save(Path("x"), str(number), result).record.error for number in range(20))
        assert str(raised.value).endswith("no space left on device; free some space, then continue with --resume")
        assert 1 <= len(work.files()) < 20
        expected = result.results[0].draw()
        for name in work.files():
            assert np.array_equal(gradcam.read_image(work.folder / name), expected)
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        assert work.save(Path("x"), "more", result).record.status == "ok"


def test_views_are_written_on_request(do: Callable[..., Work], photo: Photo) -> None:
    path, calls = photo("chelsea.jpg"), []

    def draw_views(stem: str, picture: Any, overlays: Any) -> dict[str, bytes]:
        calls.append((stem, picture, overlays))
        return {"report/views/a.jpg": b"small"}

    work = do(OutputOptions(kinds=("map",), views=True))
    work.draw_views = draw_views
    work.save(path)
    ((stem, picture, (overlay,)),) = calls
    assert stem == "sub/cat"
    assert np.array_equal(picture, gradcam.read_image(path))
    assert np.array_equal(overlay, work.find(path).results[0].draw())
    view, result = work.folder / "report/views/a.jpg", work.folder / "sub/cat-gradcam.npy"
    assert view.read_bytes() == b"small"
    assert view.stat().st_mtime_ns >= result.stat().st_mtime_ns  # An older view would count as out of date.
    work.saving = OutputOptions(kinds=("map",))
    work.save(path)
    assert len(calls) == 1

    def fail(*_: Any) -> dict[str, bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    work.saving, work.draw_views = OutputOptions(views=True), fail
    assert "No space left" in str(work.save(path).record.error)


def test_without_a_place_the_report_includes_the_files(do: Callable[..., Work], photo: Photo) -> None:
    work, path = do(OutputOptions(kinds=("overlay", "map"), format="png")), photo("chelsea.jpg")
    (item, result) = InputImage("sub/cat.jpg", FileContent(str(path))), work.find(path)
    saver = Saver(None, {item.name: "sub/cat"}, work.saving, work.classifier, work.request)
    outcome = saver.save(HashedItem(item), result)
    assert list(outcome.files) == list(outcome.record.files) == ["sub/cat-gradcam.png", "sub/cat-gradcam.npy"]
    assert not work.folder.exists()
    work.save(path)
    assert {name: (work.folder / name).read_bytes() for name in outcome.files} == outcome.files


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ()}, r"outputs to save are \(\), expected some of 'overlay', 'heatmap', 'map', 'panel'"),
        ({"kinds": ("overlay", "film")}, "'film'"),
        ({"format": "gif"}, "format is 'gif', expected one of 'jpg', 'png', 'webp'"),
        ({"quality": 0}, "quality is 0, expected a whole number from 1 to 100"),
        ({"quality": 101}, "quality is 101"),
        ({"quality": True}, "quality is True"),
        ({"alpha": 1.5}, "alpha is 1.5, expected an opacity from 0 to 1"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"colormap": "tubro"}, "no colour map 'tubro'. Nearest: 'turbo'"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        OutputOptions(**settings)


@pytest.mark.parametrize(
    ("settings", "unfit"),
    [
        ({"methods": (), "attributions": ("guided-gradcam",)}, "guided-gradcam"),
        ({"methods": ("gradcam", "rise")}, "rise"),
    ],
)
def test_a_panel_of_no_maps_is_refused_before_work_begins(do: Any, settings: dict[str, Any], unfit: str) -> None:
    with pytest.raises(GradcamError, match=f"needs heatmaps at a layer, but {unfit} has no layer"):
        check(do(OutputOptions(kinds=("panel",)), **settings), ["cat"])


def check(work: Work, stems: Sequence[str], paths: dict[str, Path] | None = None) -> None:
    items = [InputImage(f"{stem}.jpg", FileContent(str((paths or {}).get(stem, stem)))) for stem in stems]
    stems_by_name = {item.name: item.name.removesuffix(".jpg") for item in items}
    check_outputs(work.folder, items, stems_by_name, saving=work.saving, request=work.request)


@pytest.mark.parametrize(
    ("stems", "kind"),
    [
        (("cat", "cat-guided"), "overlay"),
        (("a/cat", "A/Cat-Guided"), "map"),
        (("a-b/cat", "a-b/cat-guided"), "heatmap"),
    ],
)
def test_pictures_whose_results_would_have_one_name_are_refused(do: Any, stems: Sequence[str], kind: str) -> None:
    with pytest.raises(OutputError, match=f"{stems[0]}.jpg and {stems[1]}.jpg: their results would have the same name"):
        check(do(OutputOptions(kinds=(kind,)), attributions=("guided-gradcam",)), stems[::-1])


@pytest.mark.parametrize(
    ("stems", "settings"),
    [
        (("cat", "cat-gradcam", "cat-gradcam-heatmap", "cat-compare", "cat-2"), {}),
        (("cat", "cat-guided"), {}),
        (("x/cat", "y/cat-guided"), {"attributions": ("guided-gradcam",)}),
        (("cat", "cat-gradcam-282"), {"top": 3}),
        (("cat", "cat-gradcam-282-tiger_cat"), {"classes": (TIGER_CAT, ESPRESSO)}),
        (("img", *(f"img-{number}" for number in range(2000))), {"top": 2, "layers": ("layer3", "layer4")}),
    ],
)
def test_other_pictures_are_not(do: Callable[..., Work], stems: Sequence[str], settings: dict[str, Any]) -> None:
    check(do(OutputOptions(kinds=("overlay", "heatmap", "map")), **settings), stems)


def test_an_input_that_a_result_would_replace_is_refused(do: Callable[..., Work], tmp_path: Path) -> None:
    work = do(OutputOptions(kinds=("overlay", "heatmap")), top=2)
    folder = work.folder
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder / "sub")
    (tmp_path / "elsewhere").mkdir()
    name = "cat-gradcam-282-tiger_cat-heatmap.jpg"
    (tmp_path / "elsewhere" / "link.jpg").symlink_to(folder / "sub" / name)
    paths = [folder / "sub" / name, folder / "sub" / "CAT-gradcam-282-Tiger_cat.JPG"]
    for path in (*paths, tmp_path / "link" / name, tmp_path / "elsewhere" / "link.jpg"):
        with pytest.raises(OutputError, match=f"{path}: a result in {folder}/ would replace this image; choose"):
            check(work, ["sub/cat", "sub/other"], {"sub/other": path})
    names = ("cat.jpg", name.replace(".jpg", ".png"), "dog-gradcam-282-tiger_cat.jpg")
    for path in (*(folder / "sub" / name for name in names), folder / name, tmp_path / "sub" / name):
        check(work, ["sub/cat", "sub/other"], {"sub/other": path})


def test_a_result_that_would_replace_an_input_in_a_store_is_refused(do: Callable[..., Work]) -> None:
    work, store = do(), Store("s3://bucket/out")
    settings: dict[str, Any] = {"saving": work.saving, "request": work.request}
    for name in ("a/cat-gradcam.jpg", "A/Cat-gradcam.jpg", "top-gradcam.jpg"):
        item = InputImage("a/cat.jpg" if "/" in name else "top.jpg", StoreImage(f"s3://bucket/out/{name}"))
        with pytest.raises(OutputError, match=rf"^s3://bucket/out/{name}: a result in s3://bucket/out/ would replace"):
            check_outputs(store, [item], {item.name: item.name.removesuffix(".jpg")}, **settings)
    for url in ("s3://bucket/a/cat-gradcam.jpg", "s3://other/out/a/cat-gradcam.jpg", "s3://bucket/out/a/cat.jpg"):
        check_outputs(store, [InputImage("a/cat.jpg", StoreImage(url))], {"a/cat.jpg": "a/cat"}, **settings)


def test_an_output_folder_that_leads_to_the_input_is_recognised(do: Callable[..., Work], tmp_path: Path) -> None:
    work = do()
    work.folder.mkdir()
    (tmp_path / "photos").mkdir()
    (work.folder / "Sub").symlink_to(tmp_path / "photos")
    with pytest.raises(OutputError, match="would replace this image"):
        check(work, ["Sub/cat", "other"], {"other": tmp_path / "photos" / "cat-gradcam.jpg"})


def test_partial_files_are_in_their_own_folder(do: Callable[..., Work], photo: Photo, monkeypatch: Any) -> None:
    work, places, replace_file = do(OutputOptions(kinds=("overlay", "map"))), [], os.replace

    def spy(old: Path, new: Path) -> None:
        places.append((old.parent, new.name))
        replace_file(old, new)

    monkeypatch.setattr(os, "replace", spy)
    work.save(photo("chelsea.jpg"))
    assert places == [(work.folder / ".partial", f"cat-gradcam{suffix}") for suffix in (".jpg", ".npy")]


def test_several_threads_may_save(do: Callable[..., Work], photo: Photo) -> None:
    from concurrent.futures import ThreadPoolExecutor

    work = do(OutputOptions(format="png"))
    result = work.find(photo("chelsea.jpg"))
    temporary = work.folder / ".partial"
    temporary.mkdir(parents=True)
    items = [InputImage(f"{number % 3}/{number}.jpg", UnreadableContent("")) for number in range(12)]
    stems = {item.name: item.name.removesuffix(".jpg") for item in items}
    saver = Saver(DiskWriter(work.folder, temporary), stems, work.saving, work.classifier, work.request)
    with ThreadPoolExecutor(4) as pool:
        records = [outcome.record for outcome in pool.map(lambda item: saver.save(HashedItem(item), result), items)]
    assert [(record.error, record.sha256) for record in records] == [(None, None)] * 12
    assert len({(work.folder / str(record.explained[0].overlay)).read_bytes() for record in records}) == 1
    assert torch.equal(result.results[0].source.maps, work.find(photo("chelsea.jpg")).results[0].source.maps)


# Masks and boxes


def test_masks_and_boxes_are_those_of_python(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    saving = OutputOptions(("mask", "boxes"), "webp", box_threshold=0.6, box_method="components")
    work = do(saving, classes=(TIGER_CAT, ESPRESSO))
    record = work.save(path).record
    explanation = work.classifier.explain(path, target=[[TIGER_CAT, ESPRESSO]])
    masks = explanation.masks(threshold=0.6)
    for k, entry in enumerate(record.explained):
        assert np.array_equal(
            gradcam.read_image(work.folder / str(entry.mask_file))[..., 0], np.where(masks[k], 255, 0)
        )
        boxes = explanation.boxes(0, k, threshold=0.6, method="components")
        assert entry.boxes == tuple((*box.edges, round(box.score, 4)) for box in boxes)
        assert entry.overlay is entry.mask is None
    assert work.files() == {"sub/cat-gradcam-282-tiger_cat-mask.png", "sub/cat-gradcam-967-espresso-mask.png"}
    assert Record.from_json(record.to_json()) == record


def test_boxes_are_drawn_on_the_overlay(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    pictures = []
    for number, kinds in enumerate([("overlay",), ("overlay", "boxes")]):
        work = do(OutputOptions(kinds, "png"), classes=(ESPRESSO,))
        (entry,) = work.save(path, str(number)).record.explained
        pictures.append(gradcam.read_image(work.folder / str(entry.overlay)).astype(int))
    left, top, right, bottom, score = (entry.boxes or ())[0]
    changed = np.abs(pictures[1] - pictures[0]).sum(2) > 0
    rows, columns = np.nonzero(changed)
    assert score == 1
    assert columns.min() == pytest.approx(left, abs=4)
    assert columns.max() == pytest.approx(right, abs=4)
    assert rows.max() == pytest.approx(bottom, abs=4)
    assert changed[int(top) + 100 : int(bottom) - 20, int(left) + 20 : int(right) - 20].sum() == 0  # below the label


def test_a_blank_map_has_an_empty_mask_and_no_boxes(do: Callable[..., Work], photo: Photo) -> None:
    path = photo("coffee.jpg")
    work = do(OutputOptions(("overlay", "mask", "boxes")))
    result = work.find(path)
    maps = {key: replace(value, heatmaps=torch.zeros_like(value.heatmaps)) for key, value in result.maps.items()}
    (entry,) = work.save(path, result=replace(result, maps=maps)).record.explained
    assert entry.boxes == ()
    assert not gradcam.read_image(work.folder / str(entry.mask_file)).any()
    assert '"boxes": []' in work.save(path, result=replace(result, maps=maps)).record.to_json()


def test_masks_and_boxes_need_a_heatmap(do: Callable[..., Work]) -> None:
    for kind in ("mask", "boxes"):
        with pytest.raises(GradcamError, match="but guided-gradcam attributes scores to pixels: use a CAM method"):
            check(do(OutputOptions(kinds=(kind,)), attributions=("guided-gradcam",)), ["cat"])
