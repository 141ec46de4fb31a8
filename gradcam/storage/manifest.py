"""The manifest: a line for each picture, in the order of the input, appended as pictures are done."""

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
from gradcam.images.files import is_called_after, open_file, write_whole
from gradcam.storage.disk import BLOCK, LineFile, open_lines
from gradcam.storage.output import RunReader, StoreReader, to_reader
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_last, find_shard_files, list_manifests, name_piece
from gradcam.storage.store import Store, to_place

SECONDS = 1.0  # between two waits for the disk
LINES = 1000  # of a piece that is written anew
HELD = 16  # pieces in memory meanwhile

Line = tuple[int, int, int, int]  # its rank in the order, its piece, where it begins and where it ends


def encode_event(event: str, details: Mapping[str, Any]) -> bytes:
    """A line of a log: `{"time": ..., "event": ..., ...}`, the time in ISO 8601 with its offset."""
    fields = {"time": datetime.now().astimezone().isoformat(timespec="milliseconds"), "event": event, **details}
    return json.dumps(fields, default=str).encode() + b"\n"


class Logbook:
    """Appends events; several threads may."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)
        self._lock = threading.Lock()

    def note(self, event: str, details: dict[str, Any]) -> None:
        line = encode_event(event, details)
        # A log that cannot be written stops no run: what matters is in the manifest, which says so when it cannot.
        with self._lock, contextlib.suppress(OSError, ValueError):  # a closed file's is a ValueError
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
        The output folder, on disk or as a URL, or one manifest file. Of a folder, the manifests of all shards are read.
        In a store, a manifest consists of several objects; if an image has several records there, the last one counts.

    Returns
    -------
    list of Record
        One per image: `image`, `error`, `predictions`, `explained`, `size`, `region` and more, as described in the
        reference of records.

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
    place = path if isinstance(path, Store) else to_place(os.fspath(path))
    try:
        if isinstance(place, Path) and not place.is_dir():
            return [record for _, record in pair_lines(open_lines(place), place)]
        if isinstance(place, Store) and place.url.endswith(".jsonl"):
            lines = StoreReader(place.parent).read_lines(place.name)
            return [record for _, record in pair_lines(lines, place.url)]
        reader = to_reader(place)
        names = reader.list_names()
        manifests = [list_manifests(names, part) for part in find_shard_files(names)]
        if not any(manifests):
            raise OutputError(
                f"{reader.show().rstrip('/')}: contains no manifest.jsonl, expected the output folder of `gradcam batch`"
            )
        found: list[Record] = []
        for pieces in manifests:
            records = [it for name in pieces for _, it in pair_lines(reader.read_lines(name), reader.show(name))]
            # One that was done again has its record in a later piece; the earlier one could not be taken away at once.
            found += {record.image: record for record in records}.values() if len(pieces) > 1 else records
        return found
    except OSError as error:
        where = place.url if isinstance(place, Store) else place
        raise OutputError(f"{where}: cannot be read ({error.strerror or error})") from error


def pair_lines(lines: Iterable[bytes], where: object) -> Iterator[tuple[bytes, Record]]:
    """Each line and the record in it; a last one that is not whole is left out. Raises `OutputError`."""
    for number, line in enumerate(lines, 1):
        try:
            yield line, Record.from_json(line)
        except GradcamError as error:  # noqa: PERF203  (it is of this line)
            if not line.endswith(b"\n"):
                return
            raise OutputError(f"{where}, line {number}: {error}; repair the line, or remove it") from error


def keep_lines(path: Path, is_done: Callable[[Record], bool], temporary: Path) -> set[str]:
    """Keep the lines of what is done, each picture's once, and no part of a line; gives the names of those pictures.
    The file is written anew where it has other lines. Raises `OSError` and `OutputError`."""
    done: set[str] = set()
    kept: list[tuple[int, int]] = []  # where lines begin and end; neighbours are joined, so that there are few of them
    size = 0
    for line, record in pair_lines(open_lines(path), path):
        if line.endswith(b"\n") and record.image not in done and is_done(record):
            done.add(record.image)
            if kept and kept[-1][1] == size:
                kept[-1] = (kept[-1][0], size + len(line))
            else:
                kept.append((size, size + len(line)))
        size += len(line)
    if sum(end - start for start, end in kept) < path.stat().st_size:
        write_whole(path, _cut_out(path, kept), beside=temporary)
    return done


def is_of(record: Record, model: str, stems: Mapping[str, str]) -> bool:
    """Whether the record says that a picture was explained by that model into files that are called after it now:
    `stems` are what the names of each picture's results begin with."""
    stem = stems.get(record.image)
    is_named = stem is None or record.tar is not None or all(is_called_after(name, stem) for name in record.files)
    return record.error is None and record.model == model and bool(record.explained) and is_named


def sort_lines(path: Path, order: Sequence[str], temporary: Path) -> None:
    """Bring the lines into the order of the pictures' names; what has no place goes behind, and goes away where it has
    a file that is another picture's by now."""
    ranks = {name: rank for rank, name in enumerate(order)}
    found, start = [], 0
    strays: dict[str, tuple[int, int, int]] = {}  # the places of lines that have none in the order, by their files
    with open_file(path) as file:
        for line in file:
            place = (ranks.get(json.loads(line)["image"], len(ranks)), start, start + len(line))
            if place[0] == len(ranks):
                strays |= dict.fromkeys(_list_own(Record.from_json(line)), place)
            found.append(place)
            start += len(line)
    owned = (record for _, record in pair_lines(open_lines(path), path) if record.image in ranks) if strays else ()
    gone = {strays[name] for record in owned for name in _list_own(record) if name in strays}
    wanted = sorted(place for place in found if place not in gone)
    if found != wanted:
        write_whole(path, _cut_out(path, [(start, end) for _, start, end in wanted]), beside=temporary)


def _list_own(record: Record) -> Iterable[str]:
    return record.files if record.tar is None else ()


def _cut_out(path: Path, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    with open_file(path) as file:
        for start, end in pieces:
            file.seek(start)
            for position in range(start, end, BLOCK):
                yield file.read(min(BLOCK, end - position))


class ManifestWriter:
    """Appends records. Each is there for readers at once; on the disk itself it is within a second or so. A power cut
    takes the last records with it at most, and never leaves one whose overlays are lost for good: they were written to
    the disk and had their names before the record was appended, and resuming looks for each recorded file."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)
        self._synced = time.monotonic()
        self.check, self.close = self._lines.check, self._lines.close

    def append(self, record: Record) -> None:
        """Add a record. Raises `OSError`; nothing of it is in the file then."""
        self._lines.append(record.to_json().encode() + b"\n")
        if time.monotonic() - self._synced >= SECONDS:
            self.sync()

    def sync(self) -> None:
        self._lines.sync()
        self._synced = time.monotonic()


class PieceWriter:
    """Collects lines, and writes them as the next piece of a folder in a store when it is told to; several threads may
    add. `last`: the highest number that there is already."""

    def __init__(self, store: Store, folder: str, last: int) -> None:
        self._store, self._folder, self._number = store, folder, last
        self._lines: list[bytes] = []
        self._sent = 0  # the first lines, which are on their way as a piece: it may be there although no answer came
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: bytes) -> None:
        """Add a line, with its end. It is lost unless it is written."""
        with self._lock:
            self._lines.append(line)

    def write(self) -> None:
        """Write what is waiting; nothing where nothing is. Raises `OutputError` where somebody else wrote that piece,
        and what a `Store` does; the lines wait on then."""
        with self._lock:
            while self._lines:
                self._sent = self._sent or len(self._lines)
                name, data = name_piece(self._folder, self._number + 1), b"".join(self._lines[: self._sent])
                if self._store.is_file(name) and self._store.read(name) != data:
                    raise OutputError(
                        f"{self._store.below(name).url}: another process wrote this file. Run one process at a time, or one "
                        "for each --shard. Continue with --resume"
                    )
                self._store.write(name, data)
                self._number += 1
                del self._lines[: self._sent]
                self._sent = 0


def find_done(
    reader: RunReader, pieces: Sequence[str], sizes: Mapping[str, int], model: str, stems: Mapping[str, str]
) -> tuple[frozenset[str], dict[str, bool]]:
    """The names of pictures that need not be done again, by `is_of` and `sizes`, those of all objects in the store; and
    of those that are recorded and need to be, whether they failed. A picture's last record counts."""
    done: set[str] = set()
    other: dict[str, bool] = {}
    for piece in pieces:
        for _, record in pair_lines(reader.read_lines(piece), reader.show(piece)):
            if is_of(record, model, stems) and all(sizes.get(name, 0) > 0 for name in record.files):
                done.add(record.image)
                other.pop(record.image, None)
            else:
                done.discard(record.image)
                other[record.image] = record.error is not None
    return frozenset(done), other


def sort_pieces(store: Store, part: ShardFiles, order: Sequence[str], unwanted: Collection[str]) -> None:
    """Bring the records into the order of the pictures' names, each picture's last alone, without the unwanted. From
    the first piece on that is another, all are written anew, under higher numbers, and only then the old ones are
    removed: readers take the last record of a picture, so that a stop in between does no harm."""
    names = StoreReader(store).list_names()
    pieces, ranks = list_manifests(names, part), {name: rank for rank, name in enumerate(order)}
    last: dict[str, Line] = {}
    stored: list[list[Line]] = []  # the lines of each piece
    for number, piece in enumerate(pieces):
        lines: dict[str, Line] = {}
        start = 0
        for line in store.read(piece).splitlines(keepends=True):
            if line.endswith(b"\n"):
                image = json.loads(line)["image"]
                lines[image] = (ranks.get(image, len(ranks)), number, start, start + len(line))
            start += len(line)
        last |= lines
        stored.append(list(lines.values()))
    wanted = sorted(place for image, place in last.items() if image not in unwanted)
    kept = position = 0
    while kept < len(pieces) and wanted[position : position + len(stored[kept])] == stored[kept]:
        position += len(stored[kept])
        kept += 1
    number, read = find_last(names, part.records), lru_cache(HELD)(store.read)
    for start in range(position, len(wanted), LINES):
        number += 1
        cut = (read(pieces[piece])[begin:end] for _, piece, begin, end in wanted[start : start + LINES])
        store.write(name_piece(part.records, number), b"".join(cut))
    store.remove(pieces[kept:])
