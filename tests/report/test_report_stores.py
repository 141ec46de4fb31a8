"""Test reports in object stores: objects are listed once, and the page contains no paths of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcam.errors import GradcamError, OutputError, StoreError
from gradcam.images.read import read_image
from gradcam.images.write import encode_image
from gradcam.models.preprocess import read_image_file
from gradcam.report import gallery as contents
from gradcam.report.gallery import write_report
from gradcam.report.views import draw_views, find_stem
from gradcam.storage import retry as failures
from gradcam.storage.records import Record
from gradcam.storage.store import Store
from tests.report.test_report import BLUE, RED, halves, make_record, write_overlays, write_run
from tests.stores import FSSPEC_VERSION, ObjectStore, down, objects

URL = "objects://bucket/out"


@pytest.fixture
def fs() -> Iterator[type[ObjectStore]]:
    with objects() as store_class:
        yield store_class


def put_run(records: list[Record], facts: dict[str, Any] | None = None, url: str = URL) -> Store:
    """Write the folder of a run to a store, with its overlays."""
    store = Store(url)
    store.write("manifest/00001.jsonl", "".join(record.to_json() + "\n" for record in records).encode())
    store.write("run.json", json.dumps(facts or {}).encode())
    for record in records:
        for entry in record.explained:
            store.write(str(entry.overlay), encode_image(halves(60, 80), ".jpg", 90))
    return store


def read_page(store: Store) -> dict[str, Any]:
    match = re.search(rb'<script type="application/json" id="data">(.*?)</script>', store.read("index.html"), re.S)
    assert match
    return json.loads(match.group(1))


def test_a_report_in_a_store_is_that_of_a_disk(fs: Any, tmp_path: Path) -> None:
    records = [make_record("a/cat.jpg"), make_record("b.jpg"), Record("c.jpg", "resnet50", error="c.jpg: is empty")]
    store = put_run(records, {"settings": {"alpha": 0.5}})
    write_overlays(write_run(tmp_path / "out", records, {"settings": {"alpha": 0.5}}), records)
    for name in ("a/cat-gradcam.jpg", "b-gradcam.jpg"):
        (tmp_path / "out" / name).write_bytes(store.read(name))
    assert write_report(store) == f"{URL}/index.html"
    write_report(tmp_path / "out")
    paths = [path for path in (tmp_path / "out").rglob("*.*") if path.is_file()]
    names = [path.relative_to(tmp_path / "out").as_posix() for path in paths]
    report_files = sorted(name for name in names if name.startswith(("report/", "index.html")))
    assert [name for name in store.find() if name.startswith(("report/", "index.html"))] == report_files
    assert len(report_files) > 9
    for name in report_files:
        assert store.read(name) == (tmp_path / "out" / name).read_bytes()


@pytest.mark.skipif(FSSPEC_VERSION < (2024, 12), reason="fsspec looks for the folder of each object")
def test_views_that_are_missing_are_made_and_others_left(fs: Any) -> None:
    records = [make_record("there.jpg"), make_record("empty.jpg"), make_record("missing.jpg")]
    store = put_run(records, {"root": "objects://bucket/photos"})
    for record in records[:2]:
        store.write_all(draw_views(str(find_stem(record)), None, [halves(60, 80, BLUE, BLUE)]))
    store.write("report/views/empty.0.jpg", b"")
    photos = Store("objects://bucket/photos")
    photos.write("missing.jpg", encode_image(halves(60, 80, BLUE, RED), ".jpg", 90))
    photos.write("empty.jpg", b"no picture")
    fs.requests.clear()
    write_report(store)
    assert [operation for operation, _ in fs.requests].count("list") == 1
    assert not [path for operation, path in fs.requests if operation == "look"]
    for name, colour in [("there.0", BLUE), ("empty.0", RED), ("missing.0", RED), ("missing.large", BLUE)]:
        picture = read_image_file(name, store.read(f"report/views/{name}.jpg")).picture
        np.testing.assert_allclose(picture[:, :30].mean((0, 1)), colour, atol=3)
    both = contents.HAS_IMAGE | contents.HAS_OVERLAY
    assert read_page(store)["has"] == [contents.HAS_OVERLAY, contents.HAS_OVERLAY, both]


def test_pictures_in_a_store_are_found_from_a_disk(fs: Any, tmp_path: Path) -> None:
    records = [make_record("cat.jpg")]
    Store("objects://bucket/photos").write("cat.jpg", encode_image(halves(60, 80, BLUE, RED), ".jpg", 90))
    write_overlays(write_run(tmp_path, records, {"root": "objects://bucket/photos"}), records)
    write_report(tmp_path)
    large = read_image(tmp_path / "report/views/cat.large.jpg")
    np.testing.assert_allclose(large[:, :30].mean((0, 1)), BLUE, atol=3)


def test_the_page_contains_no_paths(fs: Any) -> None:
    photos = "objects://secret-bucket/plans/photos"
    records = [Record("a.jpg", "m", error=f"{photos}/a.jpg: is in {photos}; {URL}/a"), make_record("b.jpg")]
    settings = {"inputs": [photos, "objects://secret-bucket/more/*.jpg", "/secret-bucket/x.csv"]}
    store = put_run(records, {"root": photos, "settings": settings})
    write_report(store)
    assert read_page(store)["errors"] == {"0": "a.jpg: is in photos; a"}
    for name in store.find():
        if name.startswith(("report/", "index.html")):
            assert b"secret-bucket" not in store.read(name)
            assert b"objects://" not in store.read(name)
    assert b"<dt>inputs</dt><dd>photos, *.jpg, x.csv</dd>" in store.read("index.html")
    assert b"<title>out " in store.read("index.html")


def test_another_page_takes_the_details_of_the_earlier_one_away(fs: Any) -> None:
    store = put_run([make_record("a.jpg")])
    write_report(store)
    earlier = read_page(store)["details"]
    store.write("report/details-mine/0.js", b"x")
    put_run([make_record("a.jpg", probability=0.5)])
    write_report(store)
    later = read_page(store)["details"]
    assert earlier != later
    details = {name for name in store.find("report") if "details-" in name}
    assert details == {f"{later}/0.js", "report/details-mine/0.js"}


def test_shares_that_end_at_the_same_time_leave_a_complete_page(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = put_run([make_record("a.jpg")])
    original, interruptions = Store.write, []

    def write(self: Store, name: str, data: bytes) -> None:
        if name == "index.html" and not interruptions:  # another share writes its page first
            interruptions.append(name)
            store.write("manifest/00002.jsonl", (make_record("b.jpg").to_json() + "\n").encode())
            write_report(store)
        original(self, name, data)

    monkeypatch.setattr(Store, "write", write)
    write_report(store)
    details = read_page(store)["details"]
    assert interruptions
    assert store.is_file(f"{details}/0.js")


def test_errors_that_prevent_a_report_are_reported(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GradcamError, match=rf"{URL}: contains no manifest\.jsonl, expected the output folder"):
        write_report(Store(URL))
    store = put_run([make_record("a.jpg")])
    store.write("index.html", b"<html>mine</html>")
    with pytest.raises(OutputError, match=r"index\.html: is not a gradcam report, but a report would replace it"):
        write_report(store)
    store.remove(["index.html"])
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.05)
    fs.failures += [down() for _ in range(999)]
    with pytest.raises(StoreError, match="has not answered correctly"):
        write_report(store)
    fs.failures.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            ObjectStore, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(PermissionError("Access Denied"))
        )
        with pytest.raises(OutputError, match="do not allow listing, reading or writing it"):
            write_report(store)
