from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest

from gradcam.errors import GradcamError, OutputError
from gradcam.images.files import join_name
from gradcam.images.read import Pixels, read_image
from gradcam.images.write import write_image
from gradcam.report import gallery
from gradcam.report.gallery import write_report
from gradcam.report.report_folder import open_report_folder
from gradcam.report.views import find_stem, name_views
from gradcam.storage.clear import remove_runs
from gradcam.storage.output import DiskWriter
from gradcam.storage.records import Explained, Prediction, Record
from tests.views import write_views

RED, BLUE = (200, 30, 30), (20, 40, 210)
HOSTILE = "<img src=x onerror=alert(1)>"


def halves(height: int, width: int, left_colour: tuple[int, ...] = RED, right_colour: tuple[int, ...] = BLUE) -> Pixels:
    """Return an image of two colours side by side."""
    picture = np.empty((height, width, 3), np.uint8)
    picture[:, : width // 2], picture[:, width // 2 :] = left_colour, right_colour
    return picture


def make_result(overlay: str | None, **changes: Any) -> Explained:
    """Return one result of a record."""
    fields = {"index": 7, "label": "cock", "score": 8.5, "layer": "layer4", "method": "gradcam", "blank": False}
    return Explained(**(fields | {"overlay": overlay} | changes))


def make_record(image: str, overlay: str | None = None, probability: float = 0.9, **changes: Any) -> Record:
    """Return the record of an image whose overlay has the default name."""
    overlay = overlay or f"{image.rpartition('.')[0]}-gradcam.jpg"
    predictions, explained = [Prediction(7, "cock", probability)], [make_result(overlay)]
    fields = {"model": "resnet50", "predictions": predictions, "explained": explained}
    return Record(image, **(fields | {"size": (60, 80)} | changes))


def write_run(
    folder: Path, records: Sequence[Record], facts: dict[str, Any] | None = None, manifest: str = "manifest.jsonl"
) -> Path:
    """Write the folder of a run, without its overlays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifest).write_text("".join(record.to_json() + "\n" for record in records))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    return folder


def write_overlays(folder: Path, records: Sequence[Record]) -> None:
    for record in records:
        for entry in record.explained:
            path = folder / str(entry.overlay)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_image(path, halves(60, 80))


def read_data(folder: Path) -> dict[str, Any]:
    """Return the page's data of all images."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match.group(1))


def read_details(folder: Path) -> list[dict[str, Any]]:
    data, details = read_data(folder), []
    for i in range(-(-len(data["names"]) // data["chunk"])):
        call = (folder / data["details"] / f"{i}.js").read_text()
        match = re.fullmatch(r"gradcam\.receive\((\d+), (.*)\);\n", call, re.S)
        assert match
        assert int(match.group(1)) == i
        details += json.loads(match.group(2))
    return details


def view(folder: Path, name: str) -> Pixels:
    return read_image(folder / "report" / "views" / name)


def test_views_are_the_picture_and_its_overlays_made_smaller(tmp_path: Path) -> None:
    picture, overlay = halves(600, 1200), halves(600, 1200, BLUE, RED)
    write_views(tmp_path, "a b/cat #1", picture, [overlay, picture])
    assert view(tmp_path, "a b/cat #1.large.jpg").shape == (450, 900, 3)
    for name, left_colour, right_colour in [("small", RED, BLUE), ("0", BLUE, RED), ("1", RED, BLUE)]:
        small = view(tmp_path, f"a b/cat #1.{name}.jpg")
        assert small.shape == (128, 256, 3)
        np.testing.assert_allclose(small[:, :118].mean((0, 1)), left_colour, atol=3)
        np.testing.assert_allclose(small[:, 138:].mean((0, 1)), right_colour, atol=3)
    assert len(list((tmp_path / "report").rglob("*.*"))) == 4


def test_what_is_made_smaller_is_averaged(tmp_path: Path) -> None:
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 200  # sampling every second pixel would give 0 or 200
    write_views(tmp_path, "stripes", None, [stripes])
    np.testing.assert_allclose(view(tmp_path, "stripes.0.jpg"), 100, atol=2)


@pytest.mark.parametrize(("size", "expected"), [((30, 40), (30, 40)), ((1, 3000), (1, 256)), ((3000, 2), (256, 1))])
def test_views_are_never_enlarged_and_never_empty(
    tmp_path: Path, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    write_views(tmp_path, "x", halves(*size), [])
    assert view(tmp_path, "x.small.jpg").shape[:2] == expected


def test_no_two_pictures_share_a_view() -> None:
    endings = ["", ".large", ".0", ".1", ".10", ".0.jpg", ".large.jpg", ".small", "/0", "/cat"]
    stems = [f"cat{ending}" for ending in endings]
    all_views = [name_views(stem) for stem in stems]
    names = [name for views in all_views for name in (views.large, views.small, *map(views.overlay, range(12)))]
    assert len({name.casefold() for name in names}) == len(stems) * 14


@pytest.mark.parametrize("stem", ["../cat", "a/../../cat", "/cat", "", "a/.."])
def test_views_stay_in_the_folder(tmp_path: Path, stem: str) -> None:
    with pytest.raises(GradcamError, match="not a path inside the output folder"):
        write_views(tmp_path, stem, halves(4, 4), [])
    assert not list(tmp_path.iterdir())


def test_long_names_have_views_of_their_own(tmp_path: Path) -> None:
    stems = ["ü" * 119 + end for end in ("a", "b")]  # 239 bytes each
    for stem, colour in zip(stems, (RED, BLUE)):
        write_views(tmp_path, f"folder/{stem}", None, [halves(8, 8, colour, colour)])
    for stem, colour in zip(stems, (RED, BLUE)):
        image = read_image(tmp_path / name_views(f"folder/{stem}").overlay(0))
        np.testing.assert_allclose(image.mean((0, 1)), colour, atol=3)


def test_views_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "report/views/x.small.jpg").mkdir(parents=True)
    with pytest.raises(OutputError, match="is a directory"):
        write_views(tmp_path, "x", halves(8, 8), [])
    assert sorted(path.name for path in (tmp_path / "report/views").iterdir()) == ["x.large.jpg", "x.small.jpg"]


def test_unfinished_views_lie_where_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    sources = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: sources.append(source) or replace(source, target))
    write_views(tmp_path, "x", None, [halves(8, 8)], temporary=tmp_path / "temporary")
    assert [source.parent for source in sources] == [tmp_path / "temporary"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("method", ["gradcam", "gradcam-pp", "eigengradcam"])
@pytest.mark.parametrize("stem", ["cat", "a/b c/cat-gradcam-7", "gradcam-pp/x-gradcam-pp", "-gradcam"])
def test_the_stem_is_read_from_the_names_of_outputs(method: str, stem: str) -> None:
    for ending in ["", "-7-cock_gradcam", "-layer4.1", "-negative"]:
        name = join_name(stem.rpartition("/")[2], f"-{method}{ending}.png")
        overlay = f"{stem.rpartition('/')[0]}/{name}".lstrip("/")
        record = make_record("image.jpg", explained=[make_result(overlay, method=method)])
        assert find_stem(record) == stem
        only_map = make_result(None, method=method, map=overlay.replace(".png", ".npy"))
        assert find_stem(make_record("image.jpg", explained=[only_map])) == stem
    assert find_stem(make_record("image.jpg", explained=[make_result(None, panel=f"{stem}-compare.jpg")])) == stem


def test_a_stem_that_leads_out_of_the_folder_is_none() -> None:
    for overlay in ["../cat-gradcam.jpg", "/etc/cat-gradcam.jpg", "-gradcam.jpg", "other.jpg"]:
        assert find_stem(make_record("x.jpg", overlay)) is None
    assert find_stem(Record("x.jpg", "resnet50", error="is empty")) is None


def test_the_page_has_every_record_in_the_order_of_the_manifest(tmp_path: Path) -> None:
    failed = Record("c.jpg", "resnet50", error="c.jpg: is empty")
    cup = make_record("a/cup.png", predictions=[Prediction(968, "cup", 0.123456), Prediction(967, None, 0.1)])
    nameless = make_record("b.jpg", predictions=[Prediction(3, None, 0.5)], note="a note")
    page = write_report(write_run(tmp_path, [failed, cup, nameless, make_record("a.jpg")]))
    assert page == tmp_path / "index.html"
    data = read_data(tmp_path)
    assert data["names"] == ["c.jpg", "a/cup.png", "b.jpg", "a.jpg"]
    assert data["classes"] == [[968, "cup"], [3, "class 3"], [7, "cock"]]
    assert data["top"] == [-1, 0, 1, 2]
    assert data["confidence"] == [0, 0.1235, 0.5, 0.9]
    assert data["errors"] == {"0": "c.jpg: is empty"}
    details = read_details(tmp_path)
    assert details[0]["explained"] == details[0]["predictions"] == []
    assert details[1]["predictions"] == [[968, "cup", 0.123456], [967, "class 967", 0.1]]
    assert details[2]["note"] == "a note"
    assert details[3]["explained"][0]["files"] == {"overlay": "a-gradcam.jpg"}


def test_the_parts_of_a_job_array_are_one_page(tmp_path: Path) -> None:
    write_run(tmp_path, [make_record("b.jpg"), make_record("d.jpg")], manifest="manifest-1-of-2.jsonl")
    write_run(tmp_path, [make_record("a.jpg"), make_record("c.jpg")], manifest="manifest-2-of-2.jsonl")
    (tmp_path / "run-2-of-2.json").write_text('{"settings": {"alpha": 0.25}}')
    write_report(tmp_path)
    assert read_data(tmp_path)["names"] == ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    assert "<dt>alpha</dt><dd>0.25</dd>" in (tmp_path / "index.html").read_text()


def test_the_later_record_of_an_image_counts(tmp_path: Path) -> None:
    failed = Record("a.jpg", "m", error="out of memory")
    write_report(write_run(tmp_path, [failed, make_record("b.jpg"), make_record("a.jpg")]))
    data = read_data(tmp_path)
    assert data["names"] == ["a.jpg", "b.jpg"]
    assert data["errors"] == {}


def test_details_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "RECORDS_PER_FILE", 2)
    write_report(write_run(tmp_path, [make_record(f"{i}.jpg") for i in range(5)]))
    assert len(list((tmp_path / read_data(tmp_path)["details"]).iterdir())) == 3
    overlays = [detail["explained"][0]["files"]["overlay"] for detail in read_details(tmp_path)]
    assert overlays == [f"{i}-gradcam.jpg" for i in range(5)]


def test_missing_views_are_made_of_overlays_and_pictures(tmp_path: Path) -> None:
    records = [make_record("a/cat.png"), make_record("gone.png")]
    folder = write_run(tmp_path / "out", records, {"root": "../photos"})
    write_overlays(folder, records)
    (tmp_path / "photos/a").mkdir(parents=True)
    write_image(tmp_path / "photos/a/cat.png", halves(60, 80, BLUE, RED))
    write_report(folder)
    np.testing.assert_allclose(view(folder, "a/cat.0.jpg")[:, :30].mean((0, 1)), RED, atol=3)
    np.testing.assert_allclose(view(folder, "a/cat.large.jpg")[:, :30].mean((0, 1)), BLUE, atol=3)
    assert read_data(folder)["has"] == [gallery.HAS_IMAGE | gallery.HAS_OVERLAY, gallery.HAS_OVERLAY]
    assert not list(folder.rglob("gone.small.jpg"))
    small = [detail["explained"][0]["small"] for detail in read_details(folder)]
    assert small == ["report/views/a/cat.0.jpg", "report/views/gone.0.jpg"]


def test_views_are_made_again_only_where_they_are_out_of_date(tmp_path: Path) -> None:
    records = [make_record("old.png"), make_record("cut.png"), make_record("new.png")]
    write_overlays(write_run(tmp_path, records), records)
    for record in records:
        write_views(tmp_path, str(find_stem(record)), None, [halves(60, 80, BLUE, BLUE)])
    os.utime(tmp_path / "report/views/old.0.jpg", (1, 1))
    (tmp_path / "report/views/cut.0.jpg").write_bytes(b"")
    write_report(tmp_path)
    for name, colour in [("old", RED), ("cut", RED), ("new", BLUE)]:
        np.testing.assert_allclose(view(tmp_path, f"{name}.0.jpg")[:, :30].mean((0, 1)), colour, atol=3)


def test_a_record_whose_overlay_is_gone_or_broken_is_on_the_page(tmp_path: Path) -> None:
    no_overlay = make_record("none.jpg", explained=[make_result(None)])
    folder = write_run(tmp_path, [make_record("gone.jpg"), make_record("broken.jpg"), no_overlay])
    (folder / "broken-gradcam.jpg").write_bytes(b"no picture")
    write_report(folder)
    assert read_data(folder)["has"] == [0, 0, 0]
    assert [detail["explained"][0]["small"] for detail in read_details(folder)] == [None] * 3


ODD = ["a b#c?d%e&f+g.jpg", "quote\"'`.jpg", "grün/猫.jpg", f"{HOSTILE}.jpg", "back\\slash.jpg"]
ODD.append("javascript:alert(1).jpg")


@pytest.mark.parametrize("image", [*ODD, os.fsdecode(b"not-utf8-\xff.jpg")])
def test_paths_are_quoted(tmp_path: Path, image: str) -> None:
    records = [make_record(image)]
    write_overlays(write_run(tmp_path, records), records)
    write_report(tmp_path)
    (details,) = read_details(tmp_path)
    overlay, small = details["explained"][0]["files"]["overlay"], details["explained"][0]["small"]
    for url in (overlay, small, f"{read_data(tmp_path)['stems'][0]}.0.jpg"):
        assert re.fullmatch(r"[\w.~/%-]+", url, re.ASCII)
        assert (tmp_path / os.fsdecode(unquote_to_bytes(url))).is_file()
    assert unquote_to_bytes(overlay) == os.fsencode(image.removesuffix(".jpg") + "-gradcam.jpg")


def test_a_default_stem_is_not_stored(tmp_path: Path) -> None:
    records = [make_record("a/cat.jpg"), make_record("a/cat.png", "a/cat-png-gradcam.jpg")]
    write_report(write_run(tmp_path, records))
    assert read_data(tmp_path)["stems"] == [1, "report/views/a/cat-png"]


def make_box_results(*numbers: int, **changes: Any) -> list[Explained]:
    """Return the results of boxes of a record: 0 and 2 are persons, and 1 is a dog."""
    results = []
    for k in numbers:
        index, label = (17, "dog") if k == 1 else (1, "person")
        fields = {"index": index, "label": label, "number": k, "score": 0.9 - k / 10}
        results.append(make_result(f"s-gradcam-box{k}.jpg", **fields, **changes))
    return results


DETECTIONS = [Prediction(1, "person", 0.9, 0), Prediction(17, "dog", 0.8, 1), Prediction(1, "person", 0.7, 2)]


def test_pictures_are_found_by_what_was_explained(tmp_path: Path) -> None:
    both = make_record("s.jpg", predictions=DETECTIONS, explained=make_box_results(1, 0, 2))
    dog: dict[str, Any] = {"index": 17, "label": "dog"}
    masks = [make_result("m.jpg", **dog, mask="predicted")]
    mask = make_record("m.jpg", predictions=[Prediction(17, "dog", 0.25)], explained=masks)
    boxes = [make_result("n.jpg", **dog, missed=True, score=0.1)]
    missed = make_record("n.jpg", predictions=DETECTIONS, explained=boxes)
    texts = [
        make_result(f"t-{k}.jpg", index=None, label=text, text=text, score=0.3 - k)
        for k, text in enumerate(("a dog", "a cat"))
    ]
    path = "/home/anna/o.jpg"
    like = [make_result("l.jpg", index=None, label="o.jpg", like=path, on=on, score=0.5) for on in (None, "reference")]
    others = [make_record(f"{name}.jpg", predictions=[], explained=part) for name, part in (("t", texts), ("l", like))]
    write_report(write_run(tmp_path, [both, mask, missed, *others, make_record("c.jpg")]))
    data = read_data(tmp_path)
    names = [label for _, label in data["classes"]]
    assert [names[top] for top in data["top"]] == ["dog", "dog", "dog", "a dog", "like o.jpg", "cock"]
    others_by_image = {key: [names[index] for index in row] for key, row in data["others"].items()}
    assert others_by_image == {"0": ["person"], "3": ["a cat"]}
    assert data["confidence"] == [0.8, 0.25, 0.1, 0.3, 0.5, 0.9]
    assert [index for index, _ in data["classes"]] == [17, "a dog", "like o.jpg", 7, 1, "a cat"]
    assert "anna" not in (tmp_path / "index.html").read_text()


def test_details_say_which_box_it_is(tmp_path: Path) -> None:
    like = [make_result("l.jpg", index=None, label="o.jpg", like="o.jpg", on=on) for on in (None, "reference")]
    boxes = make_record("s.jpg", predictions=DETECTIONS * 10, explained=make_box_results(1, 2, edge="left"))
    write_report(write_run(tmp_path, [boxes, make_record("l.jpg", explained=like)]))
    boxed, liked = read_details(tmp_path)
    assert [entry["label"] for entry in boxed["explained"]] == ["left edge of box 1, dog", "left edge of box 2, person"]
    assert len({entry["index"] for entry in boxed["explained"]}) == 2, "columns are of what is explained"
    assert boxed["predictions"][:3] == [[1, "0 person", 0.9], [17, "1 dog", 0.8], [1, "2 person", 0.7]]
    assert len(boxed["predictions"]) == 20
    labels = [(entry["label"], entry.get("on")) for entry in liked["explained"]]
    assert labels == [("like o.jpg", None), ("in o.jpg", "reference")]


class Tags(HTMLParser):
    """A parser that lists the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_hostile_texts_are_no_elements(tmp_path: Path) -> None:
    ending = f"</script><script>alert(2)</script>{HOSTILE}"
    explained = [
        make_result("x-gradcam.jpg", layer=ending, method=ending),
        make_result("y-gradcam.jpg", index=None, label=ending, text=ending, against=(ending,)),
        make_result("z-gradcam.jpg", label=ending, mask=ending),
    ]
    prediction = Prediction(7, ending, 0.5)
    record = make_record(f"{HOSTILE}.jpg", predictions=[prediction], explained=explained, note=ending, model=HOSTILE)
    facts = {"model": HOSTILE, "settings": {HOSTILE: ending}, HOSTILE: [ending]}
    folder = write_run(tmp_path / HOSTILE, [record, Record("b.jpg", HOSTILE, error=ending)], facts)
    write_report(folder)
    parser = Tags()
    parser.feed((folder / "index.html").read_text())
    assert "img" not in [tag for tag, _ in parser.tags]
    scripts = [attributes.get("src", attributes.get("type")) for tag, attributes in parser.tags if tag == "script"]
    names = ("common", "records", "grid", "detail", "gallery")
    assert scripts == ["report/theme.js", "application/json", *[f"report/{name}.js" for name in names]]
    attribute_names = [name for _, attributes in parser.tags for name in attributes]
    assert not [name for name in attribute_names if name.startswith("on") or name == "style"]
    assert read_data(folder)["classes"] == [[ending, ending], [7, ending]]


def test_nothing_of_this_machine_is_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "anna"
    monkeypatch.setenv("HOME", str(home))
    photos, folder = home / "secret plans", home / "runs" / "out"
    error = f"{photos}/a.jpg: is in {photos}; {home}/cache; {folder}/a"
    records = [
        Record("a.jpg", str(home / "nets/net.py:make"), error=error),
        make_record("b.jpg", note=f"as {photos}/b.txt says", model=str(home / "nets" / "net.pt")),
        make_record(str(photos / "c.jpg"), str(folder / "c-gradcam.jpg")),
    ]
    settings = {"inputs": [str(photos)], "weights": str(home / "weights.pt"), "deep": {str(home): [[str(home)]]}}
    facts = {"root": "../../secret plans", "settings": settings, "line": f"gradcam batch {photos}/x"}
    write_run(folder, records, facts)
    photos.mkdir()
    write_report(folder)
    assert read_data(folder)["names"] == ["a.jpg", "b.jpg", "c.jpg"]
    assert read_data(folder)["errors"] == {"0": f"a.jpg: is in secret plans; ~{os.sep}cache; a"}
    for path in [folder / "index.html", *folder.glob("report/**/*.*")]:
        assert str(tmp_path) not in path.read_text()
        assert "../secret" not in path.read_text()
    page = (folder / "index.html").read_text()
    assert "net.pt" in page
    assert "weights.pt" in page


def test_the_page_asks_for_nothing_beyond_its_folder(tmp_path: Path) -> None:
    write_report(write_run(tmp_path, [make_record("a.jpg")]))
    for path in [tmp_path / "index.html", *tmp_path.glob("report/*.*")]:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the SVG namespace is not a request
        pattern = r"https?:|//\w+\.\w|fetch\((?!\))|XMLHttpRequest|innerHTML|insertAdjacentHTML|eval\("
        assert not re.search(pattern, text)
    page = (tmp_path / "index.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy.group(1).split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == "'self' file:"


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    records = [make_record("a.jpg"), make_record("b.jpg")]
    write_overlays(write_run(tmp_path, records, {"settings": {"alpha": 0.5}}), records)
    write_report(tmp_path)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_report(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == first


def test_another_run_leaves_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    write_report(write_run(tmp_path, [make_record("a.jpg")]))
    earlier = read_data(tmp_path)["details"]
    write_report(write_run(tmp_path, [make_record("a.jpg", probability=0.5)]))
    later = read_data(tmp_path)["details"]
    assert earlier != later
    assert [path.name for path in (tmp_path / "report").glob("details-*")] == [Path(later).name]


def test_counts_and_names_stand_at_the_head(tmp_path: Path) -> None:
    failed = [Record(f"{i}.jpg", "resnet50", error="is empty") for i in range(1200)]
    second = make_result("a-layercam.jpg", method="layercam", layer="layer3")
    twice = make_record("a.jpg", explained=[make_result("a-gradcam.jpg"), second])
    settings = '{"settings": {"classes": [], "audit": false, "name": null}, "model": {"weights": {"file": "x.pt"}}}'
    (tmp_path / "run.json").write_text(settings)
    write_report(write_run(tmp_path, [*failed, twice]))
    page = (tmp_path / "index.html").read_text()
    assert "<dd>resnet50</dd>" in page
    assert "<dt>Layers</dt><dd>layer4, layer3</dd>" in page
    assert "<dt>Methods</dt><dd>gradcam, layercam</dd>" in page
    assert "<dt>Images</dt><dd>1,201</dd>" in page
    assert '<dd id="failures">1,200</dd>' in page
    assert "<dt>classes</dt><dd>none</dd><dt>audit</dt><dd>false</dd><dt>name</dt><dd>null</dd>" in page
    assert "<dt>weights file</dt><dd>x.pt</dd>" in page


@pytest.mark.parametrize("text", ["", "no json", "[1]", '{"root": 3}'])
def test_a_page_needs_no_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    for names in (["a.jpg"], []):
        write_report(write_run(tmp_path, list(map(make_record, names))))
        assert read_data(tmp_path)["names"] == names


def test_a_folder_without_a_manifest_is_said(tmp_path: Path) -> None:
    with pytest.raises(GradcamError, match=r"contains no manifest\.jsonl, expected the output folder of"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (write_run(tmp_path, [make_record("a.jpg")]) / "report").write_text("in the way")
    with pytest.raises(GradcamError, match="the report cannot be written"):
        write_report(tmp_path)
    assert not (tmp_path / "index.html").exists()


def test_unfinished_files_lie_in_a_folder_that_the_next_report_removes(tmp_path: Path, monkeypatch: Any) -> None:
    records = [make_record("a.jpg")]
    write_overlays(write_run(tmp_path, records), records)
    partial = tmp_path / ".gradcam-partial-report"
    partial.mkdir()
    (partial / ".gradcam-0123.tmp").write_bytes(b"left by a process that was killed")
    replace, sources = os.replace, list[Path]()
    monkeypatch.setattr(os, "replace", lambda source, path: (sources.append(Path(source)), replace(source, path)))
    write_report(tmp_path)
    assert {path.parent for path in sources} == {partial}
    assert not partial.exists()


def test_overwriting_knows_all_files_of_a_report(tmp_path: Path) -> None:
    records = [make_record("a.jpg")]
    write_overlays(write_run(tmp_path, records), records)
    write_report(tmp_path)
    remove_runs(DiskWriter(tmp_path), (), (), report=True)
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == [".gradcam-report.lock", "a-gradcam.jpg", "manifest.jsonl"]


def test_a_signal_while_temporary_files_are_removed_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.jsonl").touch()
    remove, signals = shutil.rmtree, [KeyboardInterrupt()]

    def interrupt(path: Path, *, ignore_errors: bool) -> None:
        if list(path.glob("*")) and signals:
            raise signals.pop()
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    stack = contextlib.ExitStack()
    stack.enter_context(open_report_folder(tmp_path))
    (temporary,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (temporary / "page").touch()
    with pytest.raises(KeyboardInterrupt):
        stack.close()
    assert not signals
    assert not temporary.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows delivers the signal later")
def test_a_signal_while_a_thread_starts_leaves_no_thread_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [make_record(f"{i}.jpg") for i in range(8)]
    write_overlays(write_run(tmp_path, records), records)
    threads: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        threads.append(thread)
        start_thread(thread)
        signal.raise_signal(signal.SIGINT)

    start_thread = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_report(tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    assert not list(tmp_path.glob(".gradcam-partial*"))


def test_the_report_imports_no_torch() -> None:
    code = "import sys, gradcam.report; print(sorted({'torch', 'jinja2', 'cv2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_concurrent_reports_leave_the_more_complete_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, [make_record("a.jpg")], manifest="manifest-1-of-2.jsonl")
    original, threads = gallery._render, []

    def render(*arguments: Any) -> str:
        if not threads:
            write_run(folder, [make_record("b.jpg")], manifest="manifest-2-of-2.jsonl")
            threads.append(threading.Thread(target=write_report, args=(folder,)))
            threads[0].start()
            threads[0].join(1)  # the thread cannot finish before this report does
        return original(*arguments)

    monkeypatch.setattr(gallery, "_render", render)
    write_report(folder)
    threads[0].join(60)
    assert read_data(folder)["names"] == ["a.jpg", "b.jpg"]
    assert len(read_details(folder)) == 2
    assert len(list((folder / "report").glob("details-*"))) == 1
