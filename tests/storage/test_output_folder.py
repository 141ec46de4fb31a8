"""Test the output folder: one run at a time, no results lost or repeated, and a one-line message if it cannot be used."""

from __future__ import annotations

import contextlib
import errno
import json
import ntpath
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import filelock
import pytest

import gradcam
from gradcam.batch.formats.folder import OutputFolder
from gradcam.batch.save import describe_weights
from gradcam.errors import OutputError
from gradcam.images.files import write_atomically
from gradcam.storage.manifest import read_manifest
from gradcam.storage.records import Explained, Record
from gradcam.storage.run_file import RunSettings, describe_root, describe_versions

WEIGHTS = {"file": None, "sha256": "ab" * 32, "of": "tensors"}
SETTINGS = {"alpha": 0.5, "layers": ("layer4",), "preprocessing": {"size": (224, 224), "mean": None}}
RUN = RunSettings("cpu", "net", WEIGHTS, SETTINGS, ["photos"], "../photos", images=4, left_out=1)
ORDER = ["a.jpg", "sub/b.jpg", "c.jpg", "d.jpg"]


@dataclass(frozen=True)
class Shard:
    index: int
    of: int


def finish(folder: OutputFolder, name: str) -> Record:
    """Write the result of an image as the drawing step does, and return its record."""
    record, files = finish_files(name)
    for result, data in files.items():
        (folder.path / result).parent.mkdir(exist_ok=True)
        write_atomically(folder.path / result, data, beside=folder.temporary)
    return record


def finish_files(name: str) -> tuple[Record, dict[str, bytes]]:
    """Return the record of an image, and write its result."""
    result = f"{name.removesuffix('.jpg')}-gradcam.jpg"
    record = Record(name, "net", explained=(Explained(1, "cat", 2.0, "layer4", "gradcam", result, False),))
    return record, {result: f"of {name}".encode()}


def work(path: Path, names: list[str], *, failing: str = "", run: RunSettings = RUN, **kwargs: Any) -> OutputFolder:
    """Run over these images, except those that are done."""
    with closing(OutputFolder.open(path, run, **kwargs)) as folder:
        for name in names:
            if name not in folder.done:
                folder.append(Record(name, "net", error="broken") if name == failing else finish(folder, name))
        folder.close(ORDER)
    return folder


def refuse(message: str, path: Path, run: RunSettings = RUN, **options: Any) -> None:
    with pytest.raises(OutputError, match=message):
        OutputFolder.open(path, run, **options)


def files(path: Path) -> dict[str, bytes]:
    """Return the files that the user keeps: not the log, which contains times, and not the lock."""
    paths = [entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith(("log", ".gradcam"))]
    return {entry.relative_to(path).as_posix(): entry.read_bytes() for entry in paths}


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[Path]:
    """Mount a separate disk of this size in bytes."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    completed = shutil.which("mount") and subprocess.run(command, check=False, capture_output=True)
    if not completed or completed.returncode:
        pytest.skip("a disk can be mounted by root alone, on Linux")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_run_leaves_its_manifest_its_settings_and_its_log(tmp_path: Path) -> None:
    path = tmp_path / "new" / "explained"
    folder = work(path, ORDER)
    assert [record.image for record in read_manifest(path)] == ORDER
    results = {"a-gradcam.jpg", "sub/b-gradcam.jpg", "c-gradcam.jpg", "d-gradcam.jpg"}
    assert set(files(path)) == {"manifest.jsonl", "run.json", *results}
    assert not folder.temporary.exists()
    assert {path.name for path in path.iterdir()} - set(files(path)) == {".gradcam.lock", "log.jsonl", "sub"}


def test_run_json_says_what_made_the_results_and_has_no_times(tmp_path: Path) -> None:
    work(tmp_path / "one", [])
    work(tmp_path / "two", [])
    assert (tmp_path / "one" / "run.json").read_bytes() == (tmp_path / "two" / "run.json").read_bytes()
    import cv2
    import numpy as np
    import PIL
    import torch
    import torchvision

    assert json.loads((tmp_path / "one" / "run.json").read_text()) == {
        "schema": 1,
        "gradcam": gradcam.__version__,
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
        | {"torchvision": torchvision.__version__, "opencv": cv2.__version__}
        | {"numpy": np.__version__, "pillow": PIL.__version__},
        "device": "cpu",
        "model": {"name": "net", "weights": {"file": None, "sha256": "ab" * 32, "of": "tensors"}},
        "settings": {"alpha": 0.5, "layers": ["layer4"], "preprocessing": {"size": [224, 224], "mean": None}},
        "inputs": ["photos"],
        "root": "../photos",
        "images": 4,
        "pictures": 4,  # the old name
        "left_out": 1,
        "resolved": {},
    }


def test_the_log_has_the_times(tmp_path: Path) -> None:
    with closing(OutputFolder.open(tmp_path, RUN)) as folder:
        before = datetime.now().astimezone()
        folder.log("batch", pictures=3, seconds=0.25, place=tmp_path)
        folder.log("stopped", reason="SIGTERM")
    folder.log("too late")
    first, second = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    time = datetime.fromisoformat(first.pop("time"))
    assert time.utcoffset() is not None
    assert abs((time - before).total_seconds()) < 60
    assert first == {"event": "batch", "pictures": 3, "seconds": 0.25, "place": str(tmp_path)}
    assert (second["event"], second["reason"]) == ("stopped", "SIGTERM")


def test_a_cut_line_of_the_log_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"event": "batch"}\n{"event": "ba')
    with closing(OutputFolder.open(tmp_path, RUN)) as folder:
        folder.log("resumed")
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["batch", "resumed"]


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    work(tmp_path, ORDER[:3])
    before = files(tmp_path)
    refuse(
        f"^{tmp_path}/: contains an earlier run, with 3 records; give --resume to continue it, --overwrite", tmp_path
    )
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["manifest.jsonl", "run.json", "manifest-1-of-2.jsonl", "run-2-of-3.json"])
def test_any_file_of_an_earlier_run_makes_a_folder_used(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("one line\n")
    refuse(r"contains (an earlier run, with|shard 1/2, with 1 record|shard 2/3, with 0 rec)", tmp_path, RUN)


@pytest.mark.parametrize("name", ["photo.jpg", "manifest.json", "run_me.json", "my-run.json", "manifest-0-of-2.jsonl"])
def test_other_files_in_the_folder_do_not_matter(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    work(tmp_path, ORDER)
    assert (tmp_path / name).read_text() == "mine"


def test_resuming_an_empty_folder_starts(tmp_path: Path) -> None:
    folder = work(tmp_path, ORDER, mode="resume")
    assert folder.done == frozenset()
    work(tmp_path / "plain", ORDER)
    assert files(tmp_path / "plain").items() <= files(tmp_path).items()


@pytest.mark.parametrize("finished", range(5))
def test_resuming_does_the_rest_once_and_gives_the_same_bytes(tmp_path: Path, finished: int) -> None:
    work(tmp_path / "plain", ORDER)
    work(tmp_path / "stopped", ORDER[:finished])
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").rglob("*-gradcam.jpg")}
    folder = work(tmp_path / "stopped", ORDER, mode="resume")
    assert folder.done == set(ORDER[:finished])
    assert folder.notes == []
    assert files(tmp_path / "stopped") == files(tmp_path / "plain")
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


def test_a_run_stopped_anywhere_in_its_manifest_is_resumed_to_the_same_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # fsync hundreds of times would be slow
    path, plain = tmp_path / "stopped", tmp_path / "plain"
    work(plain, ORDER)
    work(path, ORDER)
    data = (plain / "manifest.jsonl").read_bytes()
    for length in range(0, len(data) + 1, 7):
        (path / "manifest.jsonl").write_bytes(data[:length])
        folder = work(path, ORDER, mode="resume")
        assert len(folder.done) == data[:length].count(b"\n")
        assert files(path) == files(plain)


def test_failed_pictures_are_tried_again_and_come_to_their_place(tmp_path: Path) -> None:
    work(tmp_path / "plain", ORDER)
    work(tmp_path / "failed", ORDER, failing="sub/b.jpg")
    assert read_manifest(tmp_path / "failed")[1].error == "broken"
    folder = work(tmp_path / "failed", ORDER, mode="resume")
    assert folder.done == set(ORDER) - {"sub/b.jpg"}
    assert files(tmp_path / "failed") == files(tmp_path / "plain")


@pytest.mark.parametrize("harm", ["removed", "emptied", "a folder"])
def test_pictures_whose_results_are_lost_are_done_again(tmp_path: Path, harm: str) -> None:
    work(tmp_path / "plain", ORDER)
    work(tmp_path / "harmed", ORDER)
    result = tmp_path / "harmed" / "a-gradcam.jpg"
    result.unlink()
    if harm == "emptied":
        result.touch()
    elif harm == "a folder":
        result.mkdir()
        (result / "x").touch()
    with closing(OutputFolder.open(tmp_path / "harmed", RUN, mode="resume")) as folder:
        assert folder.done == set(ORDER) - {"a.jpg"}
    if harm != "a folder":
        work(tmp_path / "harmed", ORDER, mode="resume")
        assert files(tmp_path / "harmed") == files(tmp_path / "plain")


@pytest.mark.parametrize("name", ["../outside.jpg", "/etc/hostname", "", "a/../../outside.jpg"])
def test_a_result_out_of_the_folder_does_not_count_as_done(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.jpg").write_text("something")
    path = tmp_path / "explained"
    with closing(OutputFolder.open(path, RUN)) as folder:
        folder.append(Record("a.jpg", "net", explained=(Explained(1, None, 2.0, "l", "m", name, False),)))
    with closing(OutputFolder.open(path, RUN, mode="resume")) as folder:
        assert folder.done == set()


def test_other_settings_are_refused_and_said(tmp_path: Path) -> None:
    work(tmp_path, ORDER[:2])
    before = files(tmp_path)
    settings = {"alpha": 0.7, "layers": ["layer4"], "preprocessing": {"size": [224, 256], "mean": None}, "audit": True}
    changed_run = replace(RUN, settings=settings, model="other", weights={**RUN.weights, "sha256": "cd" * 32})
    with pytest.raises(OutputError) as raised:
        OutputFolder.open(tmp_path, changed_run, mode="resume")
    assert str(raised.value) == (
        f"{tmp_path}/: the earlier run had other settings: model: net → other; weights: {'ab' * 32} → {'cd' * 32}; "
        "alpha: 0.5 → 0.7; preprocessing.size: [224, 224] → [224, 256]; audit: nothing → true. Give the same settings, "
        "start again with --overwrite, or choose another --output"
    )
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root": None, "inputs": ["b.zip"]}, r'input: ../photos → \["b.zip"\]'),
        ({"device": "cuda:1"}, "device: cpu → cuda"),
        ({"root": "../others"}, "input: ../photos → ../others"),
        ({"settings": {**RUN.settings, "layers": ["layer3"]}}, r'layers: \["layer4"\] → \["layer3"\]'),
        ({"settings": {"alpha": 0.5, "layers": ("layer4",)}}, r"preprocessing.size: \[224, 224\] → nothing"),
    ],
)
def test_each_difference_that_counts_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    work(tmp_path, ORDER[:2])
    refuse(f"other settings: {message}", tmp_path, replace(RUN, **changes), mode="resume")


@pytest.mark.parametrize("of", ["tensors", "file"])
def test_rounded_weights_are_no_other_weights(tmp_path: Path, of: str) -> None:
    run = replace(RUN, weights={"file": None, "sha256": "ab" * 32, "of": of}, settings={"precision": "fp32"})
    work(tmp_path, ORDER[:2], run=run)
    rounded = replace(run, weights={**run.weights, "sha256": "cd" * 32}, settings={"precision": "bf16"})
    message = {"tensors": "precision: fp32 → bf16. G"}
    message["file"] = f"weights: {'ab' * 32} → {'cd' * 32}; precision: fp32 → bf16"
    refuse(f"other settings: {message[of]}", tmp_path, rounded, mode="resume")
    refuse("other settings: weights: ab", tmp_path, replace(rounded, settings=run.settings), mode="resume")


@pytest.mark.parametrize(
    "changes",
    [{"inputs": ["./photos/"], "left_out": 2}, {"weights": {**RUN.weights, "file": "new.pth"}}, {"device": "cuda:1"}],
)
def test_what_changes_no_result_is_no_difference(tmp_path: Path, changes: dict[str, Any]) -> None:
    first = replace(RUN, device="cuda:0")
    work(tmp_path, ORDER[:2], run=first)
    folder = work(tmp_path, ORDER, run=replace(first, **changes), mode="resume")
    assert (folder.notes, folder.done) == ([], set(ORDER[:2]))


def test_other_versions_are_noted_and_the_first_ones_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(tmp_path, ORDER[:2])
    before = (tmp_path / "run.json").read_bytes()
    versions = {**describe_versions(), "torch": "99.0"}
    monkeypatch.setattr("gradcam.storage.run_file.describe_versions", lambda: versions)
    (note,) = work(tmp_path, ORDER, mode="resume").notes
    assert note.startswith("The earlier run used different versions (torch ")
    assert note.endswith(" → 99.0): results may differ in the last digits.")
    assert (tmp_path / "run.json").read_bytes() == before


def test_more_pictures_are_noted_and_counted(tmp_path: Path) -> None:
    work(tmp_path, ORDER[:3], run=replace(RUN, images=3))
    folder = work(tmp_path, ORDER, mode="resume")
    assert folder.notes[0].startswith("The input had 3 images and now has 4: new images are added")
    assert json.loads((tmp_path / "run.json").read_text())["images"] == 4
    assert [record.image for record in read_manifest(tmp_path)] == ORDER


@pytest.mark.parametrize("contents", ["", "{", "[]", "{}", '{"schema": 2}'])
def test_a_run_json_that_says_nothing_is_named(tmp_path: Path, contents: str) -> None:
    work(tmp_path, ORDER[:2])
    (tmp_path / "run.json").write_text(contents)
    refuse(r"run.json: (does not contain the settings|its schema is 2).* --overwrite", tmp_path, RUN, mode="resume")
    work(tmp_path, ORDER, mode="overwrite")


def test_a_manifest_without_its_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    work(tmp_path, ORDER[:2])
    (tmp_path / "run.json").unlink()
    refuse(r"contains manifest.jsonl, but not run.json .*overwrite", tmp_path, RUN, mode="resume")


def test_a_broken_line_stops_resuming_and_nothing_is_changed(tmp_path: Path) -> None:
    work(tmp_path, ORDER)
    lines = (tmp_path / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "manifest.jsonl").write_bytes(lines[0] + lines[1][:9] + b"\n" + lines[2])
    before = files(tmp_path)
    refuse(r"manifest.jsonl, line 2: it is not valid JSON; repair the line, or remove it", tmp_path, RUN, mode="resume")
    assert files(tmp_path) == before
    work(tmp_path, ORDER, mode="overwrite")  # the lock is free again


def test_what_was_not_finished_is_swept_and_nothing_else(tmp_path: Path) -> None:
    folder = OutputFolder.open(tmp_path, RUN)
    folder.close()
    folder.temporary.mkdir()
    (folder.temporary / ".gradcam-0123.tmp").write_bytes(b"half")
    (folder.temporary / "mine").write_text("mine")
    with closing(OutputFolder.open(tmp_path, RUN, mode="resume")) as folder:
        assert os.listdir(folder.temporary) == ["mine"]
        (folder.temporary / ".gradcam-4567.tmp").write_bytes(b"half, of a process of this run's that was killed")
    assert os.listdir(folder.temporary) == ["mine"]


def test_temporary_files_are_on_the_same_disk_and_hidden(tmp_path: Path) -> None:
    with closing(OutputFolder.open(tmp_path, RUN)) as folder:
        assert folder.temporary == tmp_path / ".gradcam-partial"
        assert folder.temporary.is_dir()
    with closing(OutputFolder.open(tmp_path / "shards", RUN, shard=Shard(2, 4))) as folder:
        assert folder.temporary == tmp_path / "shards" / ".gradcam-partial-2-of-4"


def test_overwriting_removes_what_the_earlier_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    path, expected_path = tmp_path / "explained", tmp_path / "other"
    work(path, ORDER)
    work(expected_path, ["c.jpg"])
    for name in ("index.html", "report/style.css", "report/gallery.js", "report/details-0a1b/0.js"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    for name in ("a.small.jpg", "sub/b.large.jpg", "sub/b.0.jpg", "sub/b.12.jpg"):
        (path / "report/views" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "report/views" / name).touch()
    actual = ("mine.jpg", "a-gradcam-2.jpg", "sub/mine.txt", "report/notes.txt", "report/views/photo.jpg")
    for name in actual:
        (path / name).write_text("mine")
    work(path, ["c.jpg"], mode="overwrite")
    remaining = files(path)
    assert [remaining.pop(name) for name in actual] == [b"mine"] * len(actual)
    assert remaining == files(expected_path)
    assert not (path / "report/views/sub").exists()
    (path / "report/notes.txt").unlink()
    (path / "report/views/photo.jpg").rename(path / "report/views/a.small.jpg")
    work(path, ["c.jpg"], mode="overwrite")
    assert not (path / "report").exists()


def test_overwriting_follows_no_path_out_of_the_folder(tmp_path: Path) -> None:
    path, outside = tmp_path / "explained", tmp_path / "outside"
    outside.mkdir()
    for name in ("1.jpg", "2.jpg", "3.jpg", "views/a.small.jpg"):
        (outside / name).parent.mkdir(exist_ok=True)
        (outside / name).write_text("precious")
    with closing(OutputFolder.open(path, RUN)) as folder:
        (path / "link").symlink_to(outside)
        (path / "report").symlink_to(outside)
        (path / "own.jpg").symlink_to(outside / "3.jpg")
        for name in ("../outside/1.jpg", str(outside / "2.jpg"), "link/3.jpg", "own.jpg", "nul\0.jpg", "sub", "link"):
            folder.append(Record("a", "net", explained=(Explained(1, None, 2.0, "l", "m", name, False),)))
        (path / "sub").mkdir()
    work(path, [], mode="overwrite")
    assert files(outside) == dict.fromkeys(files(outside), b"precious")
    assert len(files(outside)) == 4
    assert not (path / "own.jpg").is_symlink()  # The link is removed, not its target.
    assert (path / "sub").is_dir()


def test_overwriting_removes_no_input(tmp_path: Path) -> None:
    path = tmp_path / "explained"
    work(path, ORDER)
    before = files(path)
    (tmp_path / "link.jpg").symlink_to(path / "a-gradcam.jpg")
    for picture in (path / "a-gradcam.jpg", tmp_path / "link.jpg"):
        message = r"a-gradcam.jpg: is an input image, but also a result of the earlier"
        refuse(message, path, mode="overwrite", inputs=[tmp_path / "x.jpg", picture])
    (path / "sub").rename(path / "real")
    (path / "sub").symlink_to(path / "real")  # Now the path of a result leads to the image through a link.
    refuse(r"b-gradcam.jpg: is an input image", path, RUN, mode="overwrite", inputs=[path / "real" / "b-gradcam.jpg"])
    (path / "sub").unlink()
    (path / "real").rename(path / "sub")
    assert files(path) == before
    work(path, ORDER, mode="overwrite", inputs=[tmp_path / "x.jpg", path / "another.jpg"])


def test_overwriting_that_was_stopped_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(tmp_path, ORDER)
    from gradcam.storage import disk

    def stop(path: Path) -> None:
        if path.name == "c-gradcam.jpg":
            raise KeyboardInterrupt
        path.unlink()

    monkeypatch.setattr(disk, "remove", stop)
    with pytest.raises(KeyboardInterrupt):
        OutputFolder.open(tmp_path, RUN, mode="overwrite")
    monkeypatch.undo()
    work(tmp_path, [], mode="overwrite")
    assert set(files(tmp_path)) == {"run.json", "manifest.jsonl"}


def test_overwriting_heeds_no_broken_lines(tmp_path: Path) -> None:
    work(tmp_path, ORDER)
    lines = (tmp_path / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "manifest.jsonl").write_bytes(b"".join([lines[0], b"what?\n", *lines[1:]]) + b"{")
    work(tmp_path, [], mode="overwrite")
    assert set(files(tmp_path)) == {"run.json", "manifest.jsonl"}


def test_shards_share_a_folder(tmp_path: Path) -> None:
    with (
        closing(OutputFolder.open(tmp_path, RUN, shard=Shard(1, 2))) as first_shard,
        closing(OutputFolder.open(tmp_path, RUN, shard=Shard(2, 2))) as second_shard,
    ):
        second_shard.append(finish(second_shard, "c.jpg"))
        first_shard.append(finish(first_shard, "a.jpg"))
        first_shard.log("begun")
    assert [record.image for record in read_manifest(tmp_path)] == ["a.jpg", "c.jpg"]
    names = {"manifest-1-of-2.jsonl", "manifest-2-of-2.jsonl", "run-1-of-2.json", "run-2-of-2.json"}
    assert set(files(tmp_path)) == names | {"a-gradcam.jpg", "c-gradcam.jpg"}
    assert "begun" in (tmp_path / "log-1-of-2.jsonl").read_text()
    folder = work(tmp_path, ["c.jpg", "d.jpg"], mode="resume", shard=Shard(2, 2))
    assert folder.done == {"c.jpg"}
    assert [record.image for record in read_manifest(tmp_path)] == ["a.jpg", "c.jpg", "d.jpg"]


def test_a_shard_meets_only_shards_of_its_own_run(tmp_path: Path) -> None:
    work(tmp_path, ["a.jpg"], shard=Shard(1, 2))
    changed_run = replace(RUN, settings={**RUN.settings, "alpha": 0.9})
    for mode in ("new", "resume", "overwrite"):
        message = r"the earlier run \(of shard 1/2\) had other settings: alpha: 0.5 → 0.9"
        refuse(message, tmp_path, changed_run, mode=mode, shard=Shard(2, 2))
        message = "contains shard 1/2, with 1 record, but this run is shard 1/3; choose another"
        refuse(message, tmp_path, mode=mode, shard=Shard(1, 3))
    for mode in ("new", "resume"):
        refuse(r"contains shard 1/2, with 1 record, but this run is a run without shards", tmp_path, RUN, mode=mode)
    refuse(r"contains an earlier run, with 1 record; give --resume", tmp_path, RUN, shard=Shard(1, 2))
    work(tmp_path / "whole", ["a.jpg"])
    message = "contains a run without shards, with 1 record, but this run is shard 1/2"
    refuse(message, tmp_path / "whole", mode="overwrite", shard=Shard(1, 2))


def test_a_shard_overwrites_its_own_part_and_a_whole_run_all_of_them(tmp_path: Path) -> None:
    work(tmp_path, ["a.jpg"], shard=Shard(1, 2))
    work(tmp_path, ["c.jpg"], shard=Shard(2, 2))
    work(tmp_path, [], mode="overwrite", shard=Shard(2, 2))
    assert [record.image for record in read_manifest(tmp_path)] == ["a.jpg"]
    assert (tmp_path / "a-gradcam.jpg").exists()
    assert not (tmp_path / "c-gradcam.jpg").exists()
    with (
        closing(OutputFolder.open(tmp_path, RUN, mode="resume", shard=Shard(2, 2))),
        pytest.raises(OutputError, match=r"another process is writing to this folder \(shard 2/2\); wait"),
    ):
        OutputFolder.open(tmp_path, RUN, mode="overwrite")
    work(tmp_path, [], mode="overwrite")
    assert set(files(tmp_path)) == {"run.json", "manifest.jsonl"}


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    with closing(OutputFolder.open(tmp_path, RUN)) as folder:
        folder.append(finish(folder, "a.jpg"))
        for mode in ("new", "resume", "overwrite"):
            with pytest.raises(OutputError) as raised:
                OutputFolder.open(tmp_path, RUN, mode=mode)
            assert str(raised.value).startswith(f"{tmp_path}/: another process is writing to this folder; wait until")
        assert folder.temporary.is_dir()
        folder.append(finish(folder, "c.jpg"))
    assert work(tmp_path, ORDER, mode="resume").done == {"a.jpg", "c.jpg"}


def test_a_process_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from gradcam.storage import run_file
from gradcam.batch.formats.folder import OutputFolder
from gradcam.storage.run_file import RunSettings
run_file.describe_versions = lambda: {describe_versions()!r}
OutputFolder.open(Path({str(tmp_path)!r}), RunSettings(**{vars(RUN)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (tmp_path / ".gradcam-partial").is_dir()
    assert work(tmp_path, ORDER, mode="resume").notes == []
    assert not (tmp_path / ".gradcam-partial").exists()


@pytest.mark.parametrize(
    "error", [NotImplementedError("no flock"), OSError(errno.ENOLCK, "No locks"), OSError(errno.EOPNOTSUPP, "No")]
)
def test_a_disk_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: Any, error: Exception) -> None:
    def fail(lock: filelock.FileLock) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    work(tmp_path, ORDER)
    assert [record.image for record in read_manifest(tmp_path)] == ORDER
    error = OSError(errno.EIO, "Input/output error")
    refuse(r"/: input/output error; check the disk, then continue with --resume", tmp_path / "other", RUN)


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refuse(r"file: is a file, expected a folder for the results; choose another --output", tmp_path / "file", RUN)
    refuse(r"file/below/: not a directory; choose another --output", tmp_path / "file" / "below", RUN)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_said_before_work_begins(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        work(disk / "used", ORDER[:2])
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for path in (disk, disk / "new"):
            refuse(r"/: read-only file system; choose another --output", path, RUN)
        refuse(r"used/: read-only file system; choose another --output", disk / "used", RUN, mode="resume")


def fill(path: Path, names: list[str]) -> None:
    with closing(OutputFolder.open(path, RUN)) as folder:
        for name in names:
            folder.append(Record(name, "net", explained=(Explained(1, "cat", 2.0, "layer4", "gradcam", None, False),)))


def test_a_full_disk_ends_the_run_in_one_line_and_it_can_go_on(tmp_path: Path) -> None:
    names = [f"{number:04}.jpg" for number in range(1000)]
    with mounted(tmp_path / "disk", "256k") as disk:
        (disk / "ballast").write_bytes(bytes(190_000))
        path = disk / "explained"
        with pytest.raises(OutputError) as raised:
            fill(path, names)
        assert str(raised.value) == f"{path}/: no space left on device; free some space, then continue with --resume"
        data = (path / "manifest.jsonl").read_bytes()
        assert data.endswith(b"}\n")
        assert [record.image for record in read_manifest(path)] == names[: data.count(b"\n")]
        assert 0 < data.count(b"\n") < 1000
        refuse("no space left on device", disk / "another", RUN)
        assert not (disk / "another" / "run.json").exists()
        (disk / "ballast").unlink()
        with closing(OutputFolder.open(path, RUN, mode="resume")) as folder:
            assert folder.done == set(names[: data.count(b"\n")])
            folder.log("resumed")


def test_a_folder_that_cannot_be_opened_is_let_go_of(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    errors = []  # Holding the errors also keeps everything that they refer to alive.
    for _ in range(2):
        with pytest.raises(OutputError, match=r"log.jsonl: is not a file, .*; move it, or choose") as raised:
            OutputFolder.open(tmp_path, RUN, mode="resume")
        errors.append(raised.value)
        assert not (tmp_path / ".gradcam-partial").exists()
    (tmp_path / "log.jsonl").rmdir()
    work(tmp_path, ORDER, mode="resume")


def test_roots_are_seen_from_the_output_folder(tmp_path: Path) -> None:
    (tmp_path / "disk" / "explained").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "explained")
    assert describe_root(tmp_path / "photos", tmp_path / "explained") == "../photos"
    assert describe_root(tmp_path / "photos", tmp_path / "photos" / "explained") == ".."
    assert describe_root(tmp_path / "photos", tmp_path / "link") == "../../photos"
    assert describe_root(None, tmp_path) is None


def test_a_root_on_another_drive_of_windows_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "relpath", lambda path, start: ntpath.relpath(f"D:{path}", f"C:{start}"))
    assert describe_root(tmp_path / "photos", tmp_path / "explained") == (tmp_path / "photos").as_posix()


def test_a_weights_file_is_told_by_its_bytes(tmp_path: Path, classifier: gradcam.Classifier) -> None:
    file = tmp_path / "net.pth"
    file.write_bytes(b"weights" * 300_000)
    actual = subprocess.run(["sha256sum", str(file)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert describe_weights(classifier, file) == {"file": "net.pth", "sha256": actual, "of": "file"}


def test_a_model_is_told_by_its_tensors(classifier: gradcam.Classifier, tmp_path: Path) -> None:
    import hashlib

    import torch

    actual = describe_weights(classifier)
    digest = hashlib.sha256()
    for name, tensor in classifier.model.state_dict().items():  # an independent oracle
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    assert actual == {"file": None, "sha256": digest.hexdigest(), "of": "tensors"}
    assert describe_weights(classifier, tmp_path)["of"] == "tensors"  # a folder with several files

    weight = next(iter(classifier.model.state_dict().values()))
    first = weight[0, 0, 0, 0].clone()
    try:
        weight[0, 0, 0, 0] = torch.nextafter(first, first + 1)
        assert describe_weights(classifier)["sha256"] != actual["sha256"]
    finally:
        weight[0, 0, 0, 0] = first
    assert describe_weights(classifier) == actual


@pytest.mark.parametrize("kind", ["bfloat16", "transposed", "empty", "scalar", "sparse", "quantised", "meta", "bool"])
def test_tensors_of_every_kind_count(classifier: gradcam.Classifier, kind: str) -> None:
    import warnings

    import torch
    from torch import nn

    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch deprecates some of these tensors
        quantised = torch.quantize_per_tensor(values, 0.1, 2, torch.quint8)
    tensors = {
        "bfloat16": values.bfloat16(), "transposed": values.T, "empty": values[:0], "scalar": values[1, 1],
        "sparse": values.to_sparse(), "quantised": quantised, "meta": values.to("meta"), "bool": values > 2,
    }  # fmt: skip
    actual = set()
    for tensor in (tensors[kind], values + 1):
        model = nn.Module()
        model.register_buffer("values", tensor)
        actual |= {describe_weights(replace(classifier, model=model))["sha256"] for _ in range(2)}
    assert len(actual) == 2
