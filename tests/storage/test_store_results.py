"""Test results in a store: no object is appended to or renamed, and no results are lost or repeated."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam.batch.formats import Destination
from gradcam.batch.formats import store_folder as store_results
from gradcam.batch.formats.folder import OutputFolder
from gradcam.batch.formats.records import check_records
from gradcam.batch.formats.store_folder import StoreResults
from gradcam.errors import ImageError, OutputError, StoreError
from gradcam.storage import manifest as store_manifest
from gradcam.storage import retry as failures
from gradcam.storage.output import StoreWriter
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_last_piece_number, find_shards, list_manifests
from gradcam.storage.store import Store
from tests.storage.test_output_folder import ORDER, RUN, Shard, finish_files
from tests.storage.test_output_folder import work as work_on_disk
from tests.stores import FSSPEC_VERSION, ObjectStore, down, objects

URL = "objects://bucket/out"


@pytest.fixture
def fs() -> Iterator[type[ObjectStore]]:
    with objects() as actual:
        yield actual


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on a store that fails without waiting."""
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(failures, "MIN_WAIT_SECONDS", 0.01)


def add(results: StoreResults, name: str, *, failing: str = "") -> None:
    if name == failing:
        results.append(Record(name, "net", error="broken"))
        return
    record, files = finish_files(name)
    results.place.write(files, {})
    results.append(record)


def refuse(message: str, run: Any = RUN, **options: Any) -> None:
    with pytest.raises(OutputError, match=message):
        StoreResults.open(Store(URL), run, **options)


def refuse_check(message: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(OutputError, match=message):
        check_records(Destination(Store(URL), *arguments, **options))


def work(names: list[str], *, failing: str = "", run: Any = RUN, url: str = URL, **kwargs: Any) -> StoreResults:
    """Run over these images, except those that are done."""
    results = StoreResults.open(Store(url), run, **kwargs)
    for name in names:
        if name not in results.done:
            add(results, name, failing=failing)
    results.close(ORDER)
    return results


def tree(fs: type[ObjectStore]) -> dict[str, bytes]:
    """Return the files that the user keeps, relative to the bucket's folder: not the log, which contains times."""
    actual = {name.removeprefix("/bucket/out/"): file.getvalue() for name, file in fs.store.items()}
    return {name: actual[name] for name in sorted(actual) if not name.startswith("log")}


def images(url: str = URL) -> list[str]:
    return [record.image for record in gradcam.read_manifest(url)]


RESULTS = ["a-gradcam.jpg", "c-gradcam.jpg", "d-gradcam.jpg", "sub/b-gradcam.jpg"]


def test_a_run_leaves_pieces_of_its_manifest_its_settings_and_its_log(fs: Any) -> None:
    results = work(ORDER)
    assert list(tree(fs)) == sorted([*RESULTS, "manifest/00001.jsonl", "run.json"])
    assert images() == ORDER
    assert (results.recorded, results.manifest, results.notes) == (4, f"{URL}/manifest/", [])
    assert "/bucket/out/log/00001.jsonl" not in fs.store  # nothing was logged
    assert fs.written[0] == "/bucket/out/run.json"
    before = tree(fs)
    results.close(ORDER)  # Closing twice changes nothing.
    assert tree(fs) == before


def test_the_log_is_of_pieces_too(fs: Any) -> None:
    results = StoreResults.open(Store(URL), RUN)
    results.log("start", device="cpu")
    add(results, "a.jpg")
    results.log("end")
    results.close()
    lines = fs.store["/bucket/out/log/00001.jsonl"].getvalue().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "end"]


def test_a_log_that_cannot_be_written_stops_no_run(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = ObjectStore.pipe_file

    def write(self: Any, path: str, *arguments: Any, **kwargs: Any) -> None:
        if "/log/" in path:
            raise PermissionError("Access Denied")
        actual(self, path, *arguments, **kwargs)

    monkeypatch.setattr(ObjectStore, "pipe_file", write)
    results = StoreResults.open(Store(URL), RUN)
    results.log("start")
    add(results, "a.jpg")
    results.close()
    assert images() == ["a.jpg"]


def test_a_piece_is_written_after_so_many_records(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 2)
    results = StoreResults.open(Store(URL), RUN)
    counts = []
    for name in ORDER[:3]:
        add(results, name)
        counts.append((results.recorded, [name for name in tree(fs) if "manifest" in name]))
    first = ["manifest/00001.jsonl"]
    assert counts == [(0, []), (2, first), (2, first)]
    results.close()
    assert images() == ORDER[:3]
    assert [name for name in tree(fs) if "manifest" in name] == ["manifest/00001.jsonl", "manifest/00002.jsonl"]


def test_a_piece_is_written_after_so_many_seconds(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(store_results.time, "monotonic", lambda: now[0])
    results = StoreResults.open(Store(URL), RUN)
    add(results, "a.jpg")
    assert results.recorded == 0
    now[0] += store_results.FLUSH_SECONDS
    add(results, "c.jpg")
    assert results.recorded == 2
    now[0] += store_results.FLUSH_SECONDS / 2
    add(results, "d.jpg")
    assert (results.recorded, images()) == (2, ["a.jpg", "c.jpg"])


def test_no_object_is_written_twice(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 1)
    work(ORDER, failing="c.jpg")
    work(ORDER, mode="resume")
    written = [name for name in fs.written if not name.endswith("run.json")]
    assert len(written) == len(set(written))


# Resuming


def test_what_is_done_is_not_done_again(fs: Any) -> None:
    work(ORDER[:2])
    file = StoreResults.open(Store(URL), RUN, mode="resume")
    assert file.done == {"a.jpg", "sub/b.jpg"}
    file.close()
    results = work(ORDER, mode="resume")
    assert (results.recorded, images()) == (2, ORDER)


@pytest.mark.skipif(FSSPEC_VERSION < (2024, 12), reason="fsspec looks for the folder of each object")
def test_resuming_lists_once_and_asks_for_no_object_on_its_own(fs: Any) -> None:
    work(ORDER)
    fs.requests.clear()
    StoreResults.open(Store(URL), RUN, mode="resume")
    assert [request for request, _ in fs.requests].count("list") == 1
    assert not [path for request, path in fs.requests if request == "look"]


@pytest.mark.parametrize("spoil", [lambda fs, name: fs.store.pop(name), lambda fs, name: fs.store[name].truncate(0)])
def test_what_failed_or_went_away_or_is_empty_is_done_again_in_its_place(fs: Any, spoil: Any) -> None:
    work(ORDER, failing="sub/b.jpg")
    spoil(fs, "/bucket/out/a-gradcam.jpg")
    results = StoreResults.open(Store(URL), RUN, mode="resume")
    assert results.done == {"c.jpg", "d.jpg"}
    results.close()
    expected = _elsewhere(fs)
    work(ORDER, mode="resume")
    assert images() == ORDER
    now = tree(fs)
    expected["manifest/00003.jsonl"] = expected.pop("manifest/00001.jsonl")  # the second part has the new records
    assert now == expected


def _elsewhere(fs: Any) -> dict[str, bytes]:
    """Return the results of a run that was not stopped."""
    saved = dict(fs.store)
    fs.store.clear()
    work(ORDER)
    actual = tree(fs)
    fs.store.clear()
    fs.store.update(saved)
    return actual


def test_a_killed_run_loses_the_last_records_alone(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 2)
    results = StoreResults.open(Store(URL), RUN)
    for name in ORDER[:3]:
        add(results, name)
    del results
    assert images() == ORDER[:2]
    again = work(ORDER, mode="resume")
    assert (again.recorded, images()) == (2, ORDER)
    assert list(tree(fs)) == sorted([*RESULTS, "manifest/00001.jsonl", "manifest/00002.jsonl", "run.json"])


def test_pieces_that_are_in_order_stay_as_they_are(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 1)
    work(ORDER, failing="c.jpg")
    work(ORDER, mode="resume")
    names = [name for name in tree(fs) if name.startswith("manifest/")]
    assert names == ["manifest/00001.jsonl", "manifest/00002.jsonl", "manifest/00006.jsonl"]
    assert images() == ORDER


@pytest.mark.parametrize("stop_at", range(7))
def test_a_stop_while_pieces_are_put_in_order_does_no_harm(fs: Any, monkeypatch: Any, stop_at: int) -> None:
    monkeypatch.setattr(store_manifest, "LINES_PER_PIECE", 1)
    work(ORDER, failing="a.jpg")
    results = StoreResults.open(Store(URL), RUN, mode="resume")
    add(results, "a.jpg")
    remaining = iter(range(stop_at))

    def stop(actual: Any) -> Any:
        def call(*arguments: Any) -> None:
            if next(remaining, None) is None:
                raise KeyboardInterrupt
            actual(*arguments)

        return call

    with monkeypatch.context() as patch:  # one write of the last record, four of the parts, and two removals
        patch.setattr(Store, "write", stop(Store.write))
        patch.setattr(fs, "rm_file", stop(fs.rm_file))
        with pytest.raises(KeyboardInterrupt):
            results.close(ORDER)
    manifest = gradcam.read_manifest(URL)
    assert sorted(record.image for record in manifest) == sorted(ORDER)
    assert sum(record.error is not None for record in manifest) == (stop_at == 0)
    work(ORDER, mode="resume")
    assert images() == ORDER


@pytest.mark.parametrize(("failing", "remaining"), [("a.jpg", ["x.jpg"]), ("x.jpg", [])])
def test_an_image_that_is_no_longer_in_the_input_keeps_a_result(fs: Any, failing: str, remaining: list[str]) -> None:
    work(["x.jpg", *ORDER], failing=failing)
    work(ORDER, mode="resume")
    assert images() == [*ORDER, *remaining]


def test_the_versions_of_the_first_run_are_kept(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work(ORDER[:1])
    before = tree(fs)["run.json"]
    monkeypatch.setattr("gradcam.storage.run_file.__version__", "9.9")
    results = work(ORDER, mode="resume")
    assert tree(fs)["run.json"] == before
    assert "gradcam 0." in results.notes[0]
    assert "9.9" in results.notes[0]


# Refusals


def test_an_earlier_run_is_in_the_way(fs: Any) -> None:
    work(ORDER)
    message = f"^{URL}/: contains an earlier run, with 4 records; give --resume to continue it, --overwrite to start"
    refuse(message)
    refuse_check(message, "new")
    check_records(Destination(Store(URL), "resume"))


def test_other_settings_are_refused(fs: Any) -> None:
    work(ORDER)
    before = dict(tree(fs))
    changed_run = replace(RUN, settings={**RUN.settings, "alpha": 0.25})
    refuse(r"the earlier run had other settings: alpha: 0\.5 → 0\.25", changed_run, mode="resume")
    assert tree(fs) == before


def test_a_manifest_without_settings_is_refused(fs: Any) -> None:
    work(ORDER)
    del fs.store["/bucket/out/run.json"]
    refuse(r"contains manifest/00001\.jsonl, but not run\.json", mode="resume")


def test_a_line_that_is_no_record_is_named(fs: Any) -> None:
    work(ORDER)
    Store(URL).write("manifest/00002.jsonl", b"{}\n")
    refuse(rf"{URL}/manifest/00002\.jsonl, line 1: it is", mode="resume")
    with pytest.raises(OutputError, match=r"00002\.jsonl, line 1: it is"):
        gradcam.read_manifest(URL)


def test_shards_share_a_folder(fs: Any) -> None:
    for index, names in ((1, ORDER[:2]), (2, ORDER[2:])):
        work(names, shard=Shard(index, 2))
    assert images() == ORDER
    assert [name for name in tree(fs) if name not in RESULTS] == [
        "manifest-1-of-2/00001.jsonl", "manifest-2-of-2/00001.jsonl", "run-1-of-2.json", "run-2-of-2.json",
    ]  # fmt: skip
    refuse_check("contains shard 1/2, with 4 records, but this run is a run without shards", "resume")
    refuse_check("contains shard 1/2, with 4 records, but this run is shard 1/3", "new", Shard(1, 3))
    options: Any = {"mode": "overwrite", "shard": Shard(2, 2)}
    refuse(r"the earlier run \(of shard 1/2\) had other settings", replace(RUN, device="cuda"), **options)
    work(ORDER[2:], mode="overwrite", shard=Shard(2, 2))
    assert images() == ORDER


def test_a_folder_of_that_name_is_no_manifest(fs: Any) -> None:
    for name in ("manifest/cat-gradcam.jpg", "log/1.jsonl", "manifest/1.jsonl", "log/00001.jsonl", "manifest.json"):
        Store(URL).write(name, b"x")
    check_records(Destination(Store(URL), "new"))
    work(ORDER)
    assert images() == ORDER


def test_two_at_once_are_found_out(fs: Any) -> None:
    first, second = (StoreResults.open(Store(URL), RUN, mode="resume") for _ in range(2))
    add(first, "a.jpg")
    add(second, "c.jpg")
    first.close()
    with pytest.raises(OutputError, match=r"manifest/00001\.jsonl: another process wrote this file"):
        second.close()
    assert images() == ["a.jpg"]


@pytest.mark.parametrize("lands", [False, True])
def test_a_stop_while_a_piece_is_on_its_way_loses_nothing(fs: Any, monkeypatch: Any, lands: bool) -> None:
    """Check that the run writes its next results to a new part, because an interrupted write may have created its own."""
    actual, cut = Store.write, iter([True])

    def write(self: Store, name: str, data: bytes) -> None:
        is_cut = name.startswith("manifest/") and next(cut, False)
        if lands or not is_cut:
            actual(self, name, data)
        if is_cut:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "write", write)
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 2)
    results = StoreResults.open(Store(URL), RUN, mode="resume")
    add(results, ORDER[0])
    with pytest.raises(KeyboardInterrupt):
        add(results, ORDER[1])
    add(results, ORDER[2])
    results.close()
    assert results.recorded == 3
    assert images() == ORDER[:3]


# Overwriting


def test_overwriting_removes_what_was_recorded_and_nothing_else(fs: Any) -> None:
    store = Store(URL)
    work(ORDER)
    StoreResults.open(store, RUN, mode="resume").log("x")
    unrelated = {"notes.txt": b"n", "a-gradcam.png": b"p", "manifest/notes.txt": b"m", "report/mine.txt": b"r"}
    page = b'<head><meta name="generator" content="gradcam"></head>'
    report = {"index.html": page, "report/style.css": b"s", "report/views/sub/b.large.jpg": b"v"}
    for name, data in {**unrelated, **report}.items():
        store.write(name, data)
    Store("objects://bucket/other").write("a-gradcam.jpg", b"o")
    StoreResults.open(store, RUN, mode="overwrite")
    assert {name: data for name, data in tree(fs).items() if name != "run.json"} == {
        **unrelated, "/bucket/other/a-gradcam.jpg": b"o",
    }  # fmt: skip


def test_overwriting_removes_nothing_of_a_record_that_leads_away(fs: Any) -> None:
    Store("objects://bucket").write("precious.jpg", b"p")
    results = StoreResults.open(Store(URL), RUN)
    record, _ = finish_files("a.jpg")
    for name in ("../precious.jpg", "/bucket/precious.jpg", "objects://bucket/precious.jpg"):
        results.append(replace(record, image=name, explained=(replace(record.explained[0], overlay=name),)))
    results.close()
    fs.requests.clear()
    StoreResults.open(Store(URL), RUN, mode="overwrite")
    assert Store("objects://bucket").read("precious.jpg") == b"p"
    removed = [path for request, path in fs.requests if request == "remove"]
    assert removed == ["/bucket/out/run.json", "/bucket/out/manifest/00001.jsonl"]


def test_overwriting_a_share_keeps_the_report_and_the_other_shares(fs: Any) -> None:
    for index, names in ((1, ORDER[:2]), (2, ORDER[2:])):
        work(names, shard=Shard(index, 2))
    page = b'<head><meta name="generator" content="gradcam"></head>'
    Store(URL).write("index.html", page)
    before = tree(fs)
    StoreResults.open(Store(URL), RUN, mode="overwrite", shard=Shard(1, 2))
    removed = {"a-gradcam.jpg", "sub/b-gradcam.jpg", "manifest-1-of-2/00001.jsonl"}
    assert tree(fs) == {name: data for name, data in before.items() if name not in removed}


def test_overwriting_removes_no_input(fs: Any) -> None:
    work(ORDER)
    before = tree(fs)
    message = rf"{URL}/a-gradcam\.jpg: is an input image, but also a result"
    refuse(message, mode="overwrite", inputs=[f"{URL}/a-gradcam.jpg"])
    assert tree(fs) == before


def test_a_page_of_others_is_not_replaced(fs: Any) -> None:
    Store(URL).write("index.html", b"<html>mine</html>")
    refuse_check(r"index\.html: is not a gradcam report, but a report would replace it", "new", report=True)
    check_records(Destination(Store(URL), "new"))
    work(ORDER)
    StoreResults.open(Store(URL), RUN, mode="overwrite")
    assert tree(fs)["index.html"] == b"<html>mine</html>"


# A store that fails


def test_a_store_that_comes_back_is_waited_for(fs: Any) -> None:
    results = StoreResults.open(Store(URL), RUN)
    for name in ORDER:
        fs.failures += [down(), OSError(errno.EIO, "Internal error")]
        add(results, name)
    fs.failures.append(TimeoutError())
    results.close(ORDER)
    assert images() == ORDER


def test_a_store_that_stays_down_stops_the_run_which_goes_on_later(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 2)
    results = StoreResults.open(Store(URL), RUN)
    add(results, "a.jpg")
    fs.failures += [down() for _ in range(999)]
    with pytest.raises(StoreError, match="has not answered correctly"):
        add(results, "sub/b.jpg")
    with pytest.raises(StoreError):
        results.close()
    fs.failures.clear()
    assert results.recorded == 0
    assert work(ORDER, mode="resume").recorded == 4
    assert images() == ORDER


def test_records_wait_for_the_next_try(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 1)
    results = StoreResults.open(Store(URL), RUN)
    fs.failures += [down() for _ in range(999)]
    with pytest.raises(StoreError):
        results.append(finish_files("a.jpg")[0])
    fs.failures.clear()
    results.close()
    assert (results.recorded, images()) == (1, ["a.jpg"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Access Denied"), r"the credentials do not allow listing, reading or writing it \(Access Denied\)"),
        (FileNotFoundError("The specified bucket does not exist"), "the bucket, or an object in it, does not exist"),
        (OSError(errno.EROFS, "Read-only"), r"cannot be written to \(Read-only\); choose another --output"),
    ],
)  # fmt: skip
def test_what_a_store_refuses_is_one_line(fs: Any, error: OSError, message: str) -> None:
    def refuse(*arguments: Any, **kwargs: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "pipe_file", refuse)
        with pytest.raises(OutputError, match=f"^{URL}/: {message}") as caught:
            StoreResults.open(Store(URL), RUN)
        assert "\n" not in str(caught.value)
        with pytest.raises(OutputError, match=message):
            StoreWriter(Store(URL)).write({"a.jpg": b"a"}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "ls", refuse)
        patch.setattr(ObjectStore, "find", refuse)
        with pytest.raises(OutputError, match=message):
            check_records(Destination(Store(URL), "new"))


def test_a_picture_s_files_are_all_there_or_none(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = ObjectStore.pipe_file

    def refuse(self: Any, path: str, value: bytes, *arguments: Any, **kwargs: Any) -> None:
        if path.endswith("long.npy"):
            raise OSError(errno.ENAMETOOLONG, "File name too long")
        actual(self, path, value)

    monkeypatch.setattr(ObjectStore, "pipe_file", refuse)
    with pytest.raises(ImageError, match=r"long\.npy: this result cannot be written \(File name too long\)"):
        StoreWriter(Store(URL)).write({"a.jpg": b"a", "long.npy": b"b"}, {"view.jpg": b"v"})
    assert tree(fs) == {}


def test_the_place_can_be_sent_to_other_processes(fs: Any) -> None:
    sent = pickle.loads(pickle.dumps(StoreResults.open(Store(URL), RUN).place))
    sent.write({"a.jpg": b"a"}, {"report/views/a.large.jpg": b"v", "report/views/a.small.jpg": b"w"})
    assert list(tree(fs)) == ["a.jpg", "report/views/a.large.jpg", "report/views/a.small.jpg", "run.json"]


# Reading back


def test_of_a_picture_that_was_done_twice_the_last_record_counts(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work(ORDER, failing="a.jpg")
    results = StoreResults.open(Store(URL), RUN, mode="resume")
    add(results, "a.jpg")
    results.close()  # a stopped run, whose records are not in input order
    manifest = gradcam.read_manifest(URL)
    assert ([record.image for record in manifest], manifest[0].error) == (ORDER, None)


def test_a_manifest_is_read_from_wherever_it_was_copied(fs: Any, tmp_path: Path) -> None:
    work(ORDER)
    copy_out(fs, tmp_path)
    expected = gradcam.read_manifest(URL)
    assert len(expected) == 4
    assert gradcam.read_manifest(tmp_path) == expected
    assert gradcam.read_manifest(f"file://{tmp_path}") == expected
    assert gradcam.read_manifest(f"{URL}/manifest/00001.jsonl") == expected
    assert gradcam.read_manifest(tmp_path / "manifest" / "00001.jsonl") == expected
    shutil.move(tmp_path / "manifest" / "00001.jsonl", tmp_path / "manifest.jsonl")
    Store("objects://bucket/copied").write("manifest.jsonl", (tmp_path / "manifest.jsonl").read_bytes())
    assert gradcam.read_manifest("objects://bucket/copied/") == expected


@pytest.mark.parametrize("url", [f"{URL}/nothing", f"{URL}/nothing.jsonl"])
def test_a_manifest_that_is_not_there_is_said(fs: Any, url: str) -> None:
    with pytest.raises(OutputError, match=f"{url}: (contains no manifest.jsonl, expected the output|cannot be read)"):
        gradcam.read_manifest(url)


def test_numbers_of_pieces_are_read_as_numbers() -> None:
    names = ["manifest/100000.jsonl", "manifest/99999.jsonl", "manifest-1-of-2/00007.jsonl"]
    names += ["manifest/x.jsonl", "run.json"]
    assert find_last_piece_number(names, "manifest") == 100000
    assert list_manifests(names, ShardFiles()) == ["manifest/99999.jsonl", "manifest/100000.jsonl"]
    assert find_shards(names) == [ShardFiles(), ShardFiles(2, 1)]


# Copies from a disk to a store, and back


def test_a_run_in_a_store_goes_on_in_a_copy_on_a_disk(fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "FLUSH_RECORDS", 1)
    work(ORDER[:3], failing="sub/b.jpg")
    copy_out(fs, tmp_path)
    with pytest.raises(OutputError, match="contains an earlier run, with 3 records"):
        OutputFolder.open(tmp_path, RUN)
    folder = work_on_disk(tmp_path, ORDER, mode="resume")
    assert folder.recorded == 2
    assert [record.image for record in gradcam.read_manifest(tmp_path)] == ORDER
    assert (tmp_path / "manifest.jsonl").read_text().count("\n") == 4
    assert not (tmp_path / "manifest").exists()


def test_a_copy_on_a_disk_is_overwritten(fs: Any, tmp_path: Path) -> None:
    results = StoreResults.open(Store(URL), RUN)
    results.log("start")
    add(results, "a.jpg")
    results.close()
    copy_out(fs, tmp_path)
    OutputFolder.open(tmp_path, RUN, mode="overwrite").close()
    remaining = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert remaining == [".gradcam.lock", "log.jsonl", "manifest.jsonl", "run.json"]


def test_a_run_on_a_disk_goes_on_in_a_copy_in_a_store(fs: Any, tmp_path: Path) -> None:
    work_on_disk(tmp_path, ORDER, failing="sub/b.jpg")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            Store(URL).write(path.relative_to(tmp_path).as_posix(), path.read_bytes())
    assert work(ORDER, mode="resume").recorded == 1
    assert images() == ORDER
    assert [name for name in tree(fs) if "manifest" in name] == ["manifest/00002.jsonl"]


def copy_out(fs: Any, folder: Path) -> None:
    for name, file in fs.store.items():
        path = folder / name.removeprefix("/bucket/out/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
