"""Read, append to and sort the manifest, which has one line for each image, in the order of the input."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradcam.errors import GradcamError, OutputError
from gradcam.images.files import may_have_stem, open_file, write_atomically
from gradcam.storage.disk import BLOCK_BYTES, LineFile, open_lines
from gradcam.storage.output import OutputReader, StoreReader, to_reader
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_last_piece_number, find_shards, list_manifests, name_piece
from gradcam.storage.store import Store, parse_location

SYNC_INTERVAL_SECONDS = 1.0  # When a record is appended, the file is synced if the last sync is at least this old.
LINES_PER_PIECE = 1000  # The maximum number of lines in a piece that `sort_pieces` writes.
MAX_CACHED_PIECES = 16

Line = tuple[int, int, int, int]  # (position of the image in `order`, piece, start, end)


def encode_event(event: str, details: Mapping[str, Any]) -> bytes:
    """Return a line of a log: `{"time": ..., "event": ..., ...}`, with the time in ISO 8601 and its UTC offset."""
    fields = {"time": datetime.now().astimezone().isoformat(timespec="milliseconds"), "event": event, **details}
    return json.dumps(fields, default=str).encode() + b"\n"


class LogWriter:
    """A log file of events. Several threads may append events."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)
        self._lock = threading.Lock()

    def note(self, event: str, details: dict[str, Any]) -> None:
        line = encode_event(event, details)
        # Ignore errors of the log, because all results are in the manifest. (An error of the manifest stops the run.)
        with self._lock, contextlib.suppress(OSError, ValueError):  # A closed file raises ValueError.
            self._lines.append(line)

    def close(self) -> None:
        with self._lock:
            self._lines.close()


def read_manifest(path: str | os.PathLike[str] | Store) -> list[Record]:
    """Read the records of `gradcam batch`, in order.

    You can read the manifest while the run is in progress: an incomplete last line is ignored. Unknown keys are ignored
    as well.

    Parameters
    ----------
    path : str, path or Store
        The output folder, on disk or as a URL, or one manifest file. For a folder, the manifests of all shards are
        read. In a store, a manifest consists of several objects. If an image has several records in these objects, only
        its last record is returned.

    Returns
    -------
    list of Record
        One record per image, with `image`, `error`, `predictions`, `explained`, `size`, `region` and more. The
        reference of records describes all fields.

    Raises
    ------
    OutputError
        If there is no manifest, if it cannot be read, or if a line is not a record or has an unsupported schema.
    StoreError
        If an object store does not answer.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.cli import cli
    >>> cli.main(["batch", "photos/", "-o", "explained/", "--quiet"], standalone_mode=False)
    0
    >>> [record.predictions[0].label for record in gradcam.read_manifest("explained/")]
    ['espresso', 'missile']
    """
    location = path if isinstance(path, Store) else parse_location(os.fspath(path))
    try:
        if isinstance(location, Path) and not location.is_dir():
            return [record for _, record in pair_lines(open_lines(location), location)]
        if isinstance(location, Store) and location.url.endswith(".jsonl"):
            lines = StoreReader(location.parent).read_lines(location.name)
            return [record for _, record in pair_lines(lines, location.url)]
        reader = to_reader(location)
        names = reader.list_names()
        manifests = [list_manifests(names, shard) for shard in find_shards(names)]
        if not any(manifests):
            expected = "expected the output folder of `gradcam batch`"
            raise OutputError(f"{reader.show().rstrip('/')}: contains no manifest.jsonl, {expected}")
        records: list[Record] = []
        for pieces in manifests:
            pairs = (pair for name in pieces for pair in pair_lines(reader.read_lines(name), reader.show(name)))
            piece_records = [record for _, record in pairs]
            # Objects in a store cannot be edited. If an image was explained again, its new record is in a later piece,
            # and replaces the old record.
            records += {record.image: record for record in piece_records}.values() if len(pieces) > 1 else piece_records
        return records
    except OSError as error:
        source = location.url if isinstance(location, Store) else location
        raise OutputError(f"{source}: cannot be read ({error.strerror or error})") from error


def pair_lines(lines: Iterable[bytes], source: object) -> Iterator[tuple[bytes, Record]]:
    """Yield each line with its record. Skip an incomplete last line, and raise `OutputError` for other faulty lines."""
    for number, line in enumerate(lines, 1):
        try:
            yield line, Record.from_json(line)
        except GradcamError as error:  # noqa: PERF203 (the error belongs to this line)
            if not line.endswith(b"\n"):
                return
            raise OutputError(f"{source}, line {number}: {error}; repair the line, or remove it") from error


def remove_unfinished_lines(path: Path, is_done: Callable[[Record], bool], temporary: Path) -> set[str]:
    """Remove unfinished, repeated and incomplete lines from a manifest, and return the names of the finished images.

    If there are no lines to remove, the file is not rewritten. Raises `OSError` and `OutputError`.
    """
    finished: set[str] = set()
    ranges: list[tuple[int, int]] = []  # (start, end) of adjacent lines, which are merged to save memory.
    size = 0
    for line, record in pair_lines(open_lines(path), path):
        if line.endswith(b"\n") and record.image not in finished and is_done(record):
            finished.add(record.image)
            start = ranges.pop()[0] if ranges and ranges[-1][1] == size else size
            ranges.append((start, size + len(line)))
        size += len(line)
    if sum(end - start for start, end in ranges) < path.stat().st_size:
        write_atomically(path, _read_ranges(path, ranges), beside=temporary)
    return finished


def is_finished_by(record: Record, model: str, stems: Mapping[str, str]) -> bool:
    """Return whether the record is a finished result of this model.

    A finished result has no error, at least one explanation, and current file names. A file name is current if it
    begins with the image's stem. `stems` maps each image to its stem.
    """
    stem = None if record.tar is not None else stems.get(record.image)
    has_current_names = stem is None or all(may_have_stem(name, stem) for name in record.files)
    return record.error is None and record.model == model and bool(record.explained) and has_current_names


def sort_manifest(path: Path, order: Sequence[str], temporary: Path) -> None:
    """Sort the lines of a manifest by the order of the image names.

    Lines of images that are not in `order` come last. Such a line is removed if one of its files has been overwritten
    by a result of an image in `order`.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    positions, start = [], 0
    # Maps the files of images that are not in `order` to the lines of these images.
    unranked: dict[str, tuple[int, int, int]] = {}
    with open_file(path) as file:
        for line in file:
            position = (ranks.get(json.loads(line)["image"], len(ranks)), start, start + len(line))
            if position[0] == len(ranks):
                unranked |= dict.fromkeys(_list_separate_files(Record.from_json(line)), position)
            positions.append(position)
            start += len(line)
    lines = pair_lines(open_lines(path), path) if unranked else ()
    ranked_files = (_list_separate_files(record) for _, record in lines if record.image in ranks)
    overwritten = {unranked[name] for names in ranked_files for name in names if name in unranked}
    ordered = sorted(position for position in positions if position not in overwritten)
    if positions != ordered:
        write_atomically(path, _read_ranges(path, [(start, end) for _, start, end in ordered]), beside=temporary)


def _list_separate_files(record: Record) -> Iterable[str]:
    return record.files if record.tar is None else ()


def _read_ranges(path: Path, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    with open_file(path) as file:
        for start, end in ranges:
            file.seek(start)
            for position in range(start, end, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, end - position))


class ManifestWriter:
    """An open manifest, to which records are appended.

    Readers see each record immediately. The file is synced to the disk about once a second, so a power cut can lose
    only the last records. Overlays are synced before their record is appended, so a record never refers to a lost
    overlay.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)
        self._last_sync = time.monotonic()
        self.check, self.close = self._lines.check, self._lines.close

    def append(self, record: Record) -> None:
        """Add a record. If this raises `OSError`, no part of the record is in the file."""
        self._lines.append(record.to_json().encode() + b"\n")
        if time.monotonic() - self._last_sync >= SYNC_INTERVAL_SECONDS:
            self.sync()

    def sync(self) -> None:
        self._lines.sync()
        self._last_sync = time.monotonic()


class PieceWriter:
    """A buffer of lines for the next piece (object) of a manifest or log in a store. Several threads may add lines.

    `last` is the highest number of the existing pieces.
    """

    def __init__(self, store: Store, folder: str, last: int) -> None:
        self._store, self._folder, self._number = store, folder, last
        self._lines: list[bytes] = []
        # The number of lines that a failed request sent, or 0. The store may have written these lines without
        # confirmation, so the next attempt sends the same lines.
        self._sent_count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: bytes) -> None:
        """Add a line, which must include its line end. The line is lost unless `write` is called."""
        with self._lock:
            self._lines.append(line)

    def write(self) -> None:
        """Write the pending lines, if there are any.

        Raises `OutputError` if another process wrote the piece, and the errors of `Store`. After an error, the lines
        stay pending.
        """
        with self._lock:
            while self._lines:
                self._sent_count = self._sent_count or len(self._lines)
                name, data = name_piece(self._folder, self._number + 1), b"".join(self._lines[: self._sent_count])
                if self._store.is_file(name) and self._store.read(name) != data:
                    problem = f"{self._store.below(name).url}: another process wrote this file"
                    advice = "Run one process at a time, or one for each --shard. Continue with --resume"
                    raise OutputError(f"{problem}. {advice}")
                self._store.write(name, data)
                self._number += 1
                del self._lines[: self._sent_count]
                self._sent_count = 0


def find_finished_images(
    reader: OutputReader, pieces: Sequence[str], sizes: Mapping[str, int], model: str, stems: Mapping[str, str]
) -> tuple[frozenset[str], dict[str, bool]]:
    """Return the names of the finished images, and a dict from the other recorded images to whether they failed.

    An image is finished if `is_finished_by` accepts its last record, and if all its files exist and are not empty.
    `sizes` contains the sizes of all objects in the store.
    """
    finished: set[str] = set()
    unfinished: dict[str, bool] = {}
    for piece in pieces:
        for _, record in pair_lines(reader.read_lines(piece), reader.show(piece)):
            if is_finished_by(record, model, stems) and all(sizes.get(name, 0) > 0 for name in record.files):
                finished.add(record.image)
                unfinished.pop(record.image, None)
            else:
                finished.discard(record.image)
                unfinished[record.image] = record.error is not None
    return frozenset(finished), unfinished


def sort_pieces(store: Store, shard: ShardFiles, order: Sequence[str], unwanted: Collection[str]) -> None:
    """Sort the records by the image names in `order`. Keep only the last record per image, and drop `unwanted` images.

    The first changed piece and all later pieces are rewritten under higher numbers. Then the old pieces are removed. An
    interruption before the removal is harmless, because readers use only the last record of an image.
    """
    names = StoreReader(store).list_names()
    pieces, ranks = list_manifests(names, shard), {name: rank for rank, name in enumerate(order)}
    last_lines: dict[str, Line] = {}
    stored: list[list[Line]] = []  # One list per piece.
    for number, piece in enumerate(pieces):
        lines: dict[str, Line] = {}
        start = 0
        for line in store.read(piece).splitlines(keepends=True):
            if line.endswith(b"\n"):
                image = json.loads(line)["image"]
                lines[image] = (ranks.get(image, len(ranks)), number, start, start + len(line))
            start += len(line)
        last_lines |= lines
        stored.append(list(lines.values()))
    ordered = sorted(line for image, line in last_lines.items() if image not in unwanted)
    unchanged = position = 0
    while unchanged < len(pieces) and ordered[position : position + len(stored[unchanged])] == stored[unchanged]:
        position += len(stored[unchanged])
        unchanged += 1
    number, read_cached = find_last_piece_number(names, shard.records), lru_cache(MAX_CACHED_PIECES)(store.read)
    for start in range(position, len(ordered), LINES_PER_PIECE):
        number += 1
        lines_of_piece = ordered[start : start + LINES_PER_PIECE]
        chunks = (read_cached(pieces[piece])[begin:end] for _, piece, begin, end in lines_of_piece)
        store.write(name_piece(shard.records, number), b"".join(chunks))
    store.remove(pieces[unchanged:])
