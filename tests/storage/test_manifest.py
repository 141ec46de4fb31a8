"""Test the manifest: lines stay complete after any failure, and readers return what was written."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradcam.errors import GradcamError, OutputError
from gradcam.storage.disk import BLOCK_BYTES, LineFile, find_line_end
from gradcam.storage.manifest import ManifestWriter, read_manifest, remove_unfinished_lines, sort_manifest
from gradcam.storage.records import Explained, Prediction, Record


def refuse(message: str, path: Any) -> None:
    with pytest.raises(OutputError, match=message):
        read_manifest(path)


def make_record(name: str = "a/cat.jpg", *, error: str | None = None) -> Record:
    if error is not None:
        return Record(name, "net", error=f"{name}: {error}")
    predictions = (Prediction(281, "tabby", 0.75), Prediction(7, None, 1 / 3))
    first = Explained(281, "tabby", 9.5, "layer4", "gradcam", f"{name}-gradcam.jpg", False, map=f"{name}-gradcam.npy")
    second = Explained(7, None, -0.1, "input", "rise", None, True, "signed", heatmap="h.png", panel="p.png")
    facts: Any = {"note": "8 bits of 16", "size": (480, 640), "region": (0, 80, 480, 480), "sha256": "ab" * 32}
    return Record(name, "net", None, predictions, (first, second), **facts)


def write(path: Path, *records: Record) -> list[bytes]:
    lines = [record.to_json().encode() + b"\n" for record in records]
    path.write_bytes(b"".join(lines))
    return lines


def names(path: Path) -> list[str]:
    return [record.image for record in read_manifest(path)]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Limit the size of files: the system writes the part that fits and refuses the remainder, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("record", [make_record(), make_record("b", error="is broken"), Record("ä\udce9\n.jpg", "net")])
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert line.isascii()
    assert Record.from_json(line) == record
    assert Record.from_json(line.encode()).to_json() == line


def test_keys_that_nobody_asked_for_are_left_out() -> None:
    fields = json.loads(Record("a", "net", explained=make_record().explained).to_json())
    assert {"heatmap", "map", "panel", "sha256"}.isdisjoint(fields)
    kinds = [{"heatmap", "map", "panel", "overlay"} & set(entry) for entry in fields["explained"]]
    assert kinds == [{"map", "overlay"}, {"heatmap", "overlay", "panel"}]


def test_a_record_lists_its_files_once() -> None:
    record = make_record("x")
    assert list(record.files) == ["x-gradcam.jpg", "x-gradcam.npy", "h.png", "p.png"]
    assert list(Record("x", "net", explained=record.explained * 2).files) == list(record.files)


BOX = (1.5, 0.0, 99.5, 40.0)
THINGS = [
    {"number": 3, "box": BOX}, {"number": 0, "box": BOX, "edge": "left"}, {"missed": True, "box": BOX},
    {"mask": "40,60", "box": BOX}, {"text": "a dog", "against": ("a cat", "")}, {"like": "b/o.jpg"},
    {"like": "b/o.jpg", "on": "reference"}, {"word": 0}, {"keypoint": 0, "point": (1.0, 2.5), "axis": "x"},
]  # fmt: skip
KINDS = ["box", "box", "missed", "mask", "text", "like", "like", "word", "keypoint"]


def test_other_things_than_classes_come_back_as_they_were() -> None:
    entries = tuple(Explained(None, "it", 0.5, "l", "m", None, False, **thing) for thing in THINGS)
    actual = (Prediction(1, "person", 0.9, 0, BOX), Prediction(2, "nose", 0.5, 0, None, (3.0, 4.0)))
    record = Record("a", "net", predictions=actual, explained=entries)
    line = record.to_json()
    assert Record.from_json(line) == record
    assert [entry.kind for entry in Record.from_json(line).explained] == KINDS
    fields = json.loads(line)
    for entry, expected in zip(fields["explained"], THINGS):
        extra_fields = set(entry) - set(json.loads(make_record().to_json())["explained"][0]) - {"overlay"}
        assert extra_fields == set(expected)


def test_of_classes_the_line_is_as_it_always_was() -> None:
    entry = Explained(281, "tabby", 9.5, "layer4", "gradcam", "a.jpg", False)
    assert entry.kind == "class"
    line = Record("a", "net", predictions=(Prediction(281, "tabby", 0.75),), explained=(entry,), size=(4, 5)).to_json()
    assert line == (
        '{"schema": 1, "image": "a", "status": "ok", "error": null, "model": "net", "predictions": [{"index": 281, '
        '"label": "tabby", "probability": 0.75}], "explained": [{"index": 281, "label": "tabby", "score": 9.5, "layer": '
        '"layer4", "method": "gradcam", "overlay": "a.jpg", "blank": false, "evidence": "positive"}], "note": null, '
        '"size": [4, 5], "region": null}'
    )


def test_keys_of_later_versions_are_left_out_at_any_depth() -> None:
    fields = json.loads(make_record().to_json())
    fields["new"] = {"deep": 1}
    fields["predictions"][0]["new"] = 2
    fields["explained"][1]["new"] = [3]
    assert Record.from_json(json.dumps(fields)) == make_record()


def test_keys_that_have_a_usual_value_may_be_missing() -> None:
    line = '{"schema": 1, "image": "a", "model": "m", "explained": [%s]}'
    entry = '{"index": 1, "label": null, "score": 2, "layer": "l", "method": "m", "overlay": null, "blank": false}'
    expected = Explained(1, None, 2, "l", "m", None, False, "positive")
    assert Record.from_json(line % entry) == Record("a", "m", explained=(expected,))


ENTRY = (
    '{"schema": 1, "image": "a", "model": "m", "explained": [{"index": 1, "label": null, "score": 2, "layer": "l", '
    '"method": "m", "overlay": null, "blank": false, %s}]}'
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ("[1]", r"it is \[1\], expected a record"),
        ("{}", "expected a record"),
        ('{"schema": 2, "image": "a", "model": "m"}', "its schema is 2, but this version .* reads 1: .* newer one"),
        ('{"schema": 1, "model": "m"}', "not a complete record .*image"),
        ('{"schema": 1, "image": 3, "model": "m"}', "3 is not of type str"),
        ('{"schema": 1, "image": "a", "model": "m", "size": [1, "b"]}', "'b' is not of type int"),
        ('{"schema": 1, "image": "a", "model": "m", "predictions": [{"index": 1}]}', "not a complete record .*label"),
        ('{"schema": 1, "image": "a", "model": "m", "explained": 5}', "not a complete record"),
        (ENTRY % '"box": [1, 2, 3]', "does not have 4 numbers"),
        (ENTRY % '"number": "3"', "'3' is not of type int"),
        (ENTRY % '"missed": 1', "1 is not of type bool"),
        (ENTRY % '"against": ["a", 1]', "1 is not of type str"),
    ],
)
def test_what_is_no_record_is_refused(line: str | bytes, message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        Record.from_json(line)


def test_a_manifest_is_read_from_its_folder_or_by_itself(tmp_path: Path) -> None:
    records = [make_record("b"), make_record("a"), make_record("c", error="is broken")]
    write(tmp_path / "manifest.jsonl", *records)
    assert read_manifest(tmp_path) == records
    assert read_manifest(str(tmp_path / "manifest.jsonl")) == records


def test_the_parts_of_all_shards_are_read_together_in_their_order(tmp_path: Path) -> None:
    for index in (10, 2, 1):
        write(tmp_path / f"manifest-{index}-of-12.jsonl", make_record(f"{index}b"), make_record(f"{index}a"))
    for name in ("manifest-1.jsonl", "manifest-1-of-2.jsonl.bak", "manifest-x-of-2.jsonl", "run-3-of-12.json"):
        (tmp_path / name).write_text("not a manifest")
    assert names(tmp_path) == ["1b", "1a", "2b", "2a", "10b", "10a"]


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    refuse(f"{tmp_path}: contains no manifest.jsonl, expected the output folder", tmp_path)
    refuse("nowhere: cannot be read .No such file", tmp_path / "nowhere")


def test_a_last_line_is_left_out_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    first, last = write(path, make_record("a"), make_record("b"))
    for length in range(len(last) + 1):
        path.write_bytes(first + last[:length])
        is_whole = length >= len(last) - 1  # only the end of the line is missing, which holds no information
        assert names(path) == (["a", "b"] if is_whole else ["a"])


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    first, second, third = write(path, make_record("a"), make_record("b"), make_record("c"))
    path.write_bytes(first + second[:20] + b"\n" + third)
    refuse(f"{path}, line 2: it is not valid JSON; repair the line, or remove it", tmp_path)
    path.write_bytes(first + second[:20] + b"\n")  # this line ends with a newline, so it is not an unfinished one
    refuse("line 2", tmp_path)
    path.write_bytes(first.replace(b'"schema": 1', b'"schema": 2'))
    refuse("line 1: its schema is 2, but this version of gradcam reads 1", path)


def test_pandas_loads_it_as_it_is(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    path = tmp_path / "manifest.jsonl"
    write(path, make_record("a"), make_record("b", error="is broken"), make_record("c"))
    table = pandas.read_json(path, lines=True)
    assert list(table["image"]) == ["a", "b", "c"]
    assert list(table["status"]) == ["ok", "failed", "ok"]
    assert table["explained"][0][0]["score"] == 9.5
    assert table["explained"][1] == []
    assert table["predictions"][2][1]["probability"] == pytest.approx(1 / 3)


def test_records_are_there_for_readers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    writer = ManifestWriter(path)
    for count in range(1, 4):
        writer.append(make_record(str(count)))
        assert names(path) == [str(number) for number in range(1, count + 1)]
    writer.close()
    writer.close()


def test_each_record_is_one_write_of_a_whole_line(tmp_path: Path) -> None:
    writer, written = ManifestWriter(tmp_path / "manifest.jsonl"), []
    file = writer._lines._file
    writer._lines._file = SimpleNamespace(write=lambda data: written.append(bytes(data)) or len(data))  # type: ignore[assignment]
    for name in "ab":
        writer.append(make_record(name))
    writer._lines._file = file
    writer.close()
    assert written == [make_record(name).to_json().encode() + b"\n" for name in "ab"]


def test_the_disk_is_waited_for_once_a_second_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, syncs = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "fsync", lambda file: syncs.append(clock[0]))
    writer = ManifestWriter(tmp_path / "manifest.jsonl")
    for step in range(35):
        clock[0] = step / 10
        writer.append(make_record())
    assert syncs == [1.0, 2.0, 3.0]
    writer.sync()
    writer.close()
    assert len(syncs) == 4


def test_ten_thousand_records_take_less_than_a_millisecond_each(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    writer, record = ManifestWriter(path), make_record()
    start = time.process_time()
    for _ in range(10_000):
        writer.append(record)
    writer.sync()
    writer.close()
    assert len(read_manifest(path)) == 10_000
    assert time.process_time() - start < 10


def test_a_disk_that_takes_any_part_of_a_line_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    first, last = write(path, make_record("a"), make_record("b"))
    path.write_bytes(first)
    lines = LineFile(path)
    for written in range(len(last)):
        with no_file_longer_than(len(first) + written), pytest.raises(OSError, match="too large"):
            lines.append(last)
        assert path.read_bytes() == first
    lines.append(last)
    lines.close()
    assert path.read_bytes() == first + last


def test_a_line_that_the_disk_takes_in_pieces_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    lines = LineFile(path)
    file = lines._file
    lines._file = SimpleNamespace(write=lambda data: file.write(data[:7]))  # type: ignore[assignment]
    lines.append(b"0123456789" * 5 + b"\n")
    lines._file = file
    lines.close()
    assert path.read_bytes() == b"0123456789" * 5 + b"\n"


def test_an_interrupted_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    lines = LineFile(path)
    lines.append(b"first\n")
    file = lines._file

    class Interrupted:
        truncate = file.truncate

        def write(self, data: memoryview) -> int:
            file.write(data[:3])
            raise KeyboardInterrupt

    lines._file = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        lines.append(b"second\n")
    lines._file = file
    lines.append(b"third\n")
    lines.close()
    assert path.read_bytes() == b"first\nthird\n"


@pytest.mark.parametrize("size", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_a_line_of_any_length_that_was_cut_is_found(tmp_path: Path, size: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" + b"b" * size)
    assert find_line_end(path) == 2
    path.write_bytes(b"b" * size)
    assert find_line_end(path) == 0
    path.write_bytes(b"b" * size + b"\n")
    assert find_line_end(path) == size + 1
    path.write_bytes(b"a\nb\n" + bytes(size))  # null bytes, as a power cut may leave them
    LineFile(path).close()
    assert path.read_bytes() == b"a\nb\n"


def test_what_is_done_is_kept_wherever_the_last_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # fsync hundreds of times would be slow
    path = tmp_path / "manifest.jsonl"
    first, last = write(path, make_record("a"), make_record("b"))
    for length in range(len(last) + 1):
        path.write_bytes(first + last[:length])
        is_whole = length == len(last)
        assert remove_unfinished_lines(path, lambda record: True, tmp_path) == ({"a", "b"} if is_whole else {"a"})
        assert path.read_bytes() == (first + last if is_whole else first)
        assert os.listdir(tmp_path) == ["manifest.jsonl"]


def test_what_is_not_done_is_dropped_and_a_double_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    failed, result = make_record("b", error="is broken"), make_record("b")
    lines = write(path, make_record("a"), failed, make_record("c"), result, make_record("a"), make_record("gone"))
    keeps = remove_unfinished_lines(path, lambda record: record.error is None and record.image != "gone", tmp_path)
    assert keeps == {"a", "b", "c"}
    assert path.read_bytes() == lines[0] + lines[2] + lines[3]


def test_lines_that_stay_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    write(path, make_record("a"), make_record("b"))
    before = path.stat()
    remove_unfinished_lines(path, lambda record: True, tmp_path)
    sort_manifest(path, ["a", "c", "b"], tmp_path)
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_lines_are_brought_into_the_order_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    records = {name: replace(make_record(name), explained=make_record(name).explained[:1]) for name in "abcdef"}
    namesake = replace(records["f"], image="renamed")  # a later image has the same file name
    a, b, c, removed_line, old, later, double = write(path, *records.values(), namesake)
    path.write_bytes(removed_line + c + double + a + old + b + later)
    sort_manifest(path, ["a", "b", "x", "c", "f"], tmp_path)
    assert path.read_bytes() == a + b + c + later + removed_line + old
    assert os.listdir(tmp_path) == ["manifest.jsonl"]


def test_pieces_larger_than_a_block_are_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    lines = write(path, *(make_record(f"{number:05}" * 30) for number in range(400)))
    assert sum(map(len, lines)) > 3 * BLOCK_BYTES
    remove_unfinished_lines(path, lambda record: not record.image.startswith("00399"), tmp_path)
    assert path.read_bytes() == b"".join(lines[:399])


def test_a_manifest_that_cannot_be_rewritten_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    lines = write(path, make_record("a"), make_record("b"), make_record("c"))
    for size in (0, 1, len(lines[0]), len(lines[0]) * 2 - 1):
        with no_file_longer_than(size), pytest.raises(OSError, match="too large"):
            remove_unfinished_lines(path, lambda record: record.image != "b", tmp_path)
        with no_file_longer_than(size), pytest.raises(OSError, match="too large"):
            sort_manifest(path, ["c", "b", "a"], tmp_path)
        assert path.read_bytes() == b"".join(lines)
        assert os.listdir(tmp_path) == ["manifest.jsonl"]
