"""The manifest: a line for each picture, in the order of the input, appended as pictures are done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gradcam.batch.output.disk import BLOCK, LineFile, open_lines
from gradcam.batch.output.parts import find_parts, list_manifests
from gradcam.batch.output.shelves import Shelf, StoreShelf, to_shelf
from gradcam.errors import GradcamError, OutputError
from gradcam.files import open_file, write_whole
from gradcam.naming import is_called_after
from gradcam.records import Record, parse_whole
from gradcam.stores import Store, to_place

SECONDS = 1.0  # between two waits for the disk


def read_manifest(path: str | os.PathLike[str] | Store) -> list[Record]:
    """The records of `gradcam batch`, in their order: of its output folder with all shards' parts, or of one file.

    `path`: on a disk, or the URL of a folder in a store, where a manifest is of pieces; of those each picture has one
    record, the last. It may be read while the run goes on: a last line that is not whole yet is left out. Keys that are not
    known here are left out, too. Raises `OutputError`, naming file and line, for a line that is no record or of another
    schema, and where there is no manifest; and `StoreError`.
    """
    place = path if isinstance(path, Store) else to_place(os.fspath(path))
    try:
        if isinstance(place, Path) and not place.is_dir():
            return [record for _, record in read_lines(place)]
        if isinstance(place, Store) and place.url.endswith(".jsonl"):
            return list(parse_lines(StoreShelf(place.parent).read_lines(place.name), place.url))
        return _read_folder(to_shelf(place))
    except OSError as error:
        where = place.url if isinstance(place, Store) else place
        raise OutputError(f"{where}: cannot be read ({error.strerror or error})") from error


def _read_folder(shelf: Shelf) -> list[Record]:
    names = shelf.list_names()
    manifests = [list_manifests(names, part) for part in find_parts(names)]
    if not any(manifests):
        raise OutputError(
            f"{shelf.show().rstrip('/')}: holds no manifest.jsonl, expected the output folder of `gradcam batch`"
        )
    found: list[Record] = []
    for pieces in manifests:
        records = [record for name in pieces for record in parse_lines(shelf.read_lines(name), shelf.show(name))]
        # A picture that was done again has its record in a later piece; the earlier one could not be taken away at once.
        found += {record.image: record for record in records}.values() if len(pieces) > 1 else records
    return found


Parse = Callable[[bytes], Record]


def read_lines(path: Path, parse: Parse = Record.from_json) -> Iterator[tuple[bytes, Record]]:
    """Each line and the record in it; a last one that is not whole is left out. Raises `OSError` and `OutputError`."""
    yield from _pair_lines(open_lines(path), str(path), parse)


def parse_lines(lines: Iterable[bytes], where: str, parse: Parse = Record.from_json) -> Iterator[Record]:
    """The record in each line; a last one that is not whole is left out. Raises `OutputError`."""
    return (record for _, record in _pair_lines(lines, where, parse))


def _pair_lines(lines: Iterable[bytes], where: str, parse: Parse) -> Iterator[tuple[bytes, Record]]:
    for number, line in enumerate(lines, 1):
        try:
            yield line, parse(line)
        except GradcamError as error:  # noqa: PERF203  (it is of this line)
            if not line.endswith(b"\n"):
                return
            raise OutputError(f"{where}, line {number}: {error}; mend the line, or remove it") from error


def keep_lines(path: Path, is_done: Callable[[Record], bool], temporary: Path) -> set[str]:
    """Keep the lines of what is done, each picture's once, and no part of a line; gives the names of those pictures.

    The file is written anew where it has other lines. Raises `OSError` and `OutputError`.
    """
    done: set[str] = set()
    kept: list[tuple[int, int]] = []  # where lines begin and end; neighbours are joined, so that there are few of them
    size = 0
    for line, record in read_lines(path, parse_whole):
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
    """Whether the record says that a picture was explained by that model into files that are called after it now.

    `stems`: what the names of each picture's results begin with. What failed is tried again.
    """
    stem = stems.get(record.image)
    is_named = stem is None or record.tar is not None or all(is_called_after(name, stem) for name in record.files)
    return record.error is None and record.model == model and bool(record.explained) and is_named


def sort_lines(path: Path, order: Sequence[str], temporary: Path) -> None:
    """Bring the lines into the order of the pictures' names, whole, where they are not; what has no place goes behind.

    Of those, what has a file that is another picture's by now goes. Raises `OSError`, and `OutputError` for such a line that
    is no record.
    """
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
    owned = (record for _, record in read_lines(path) if record.image in ranks) if strays else ()
    gone = {strays[name] for record in owned for name in _list_own(record) if name in strays}
    wanted = sorted(place for place in found if place not in gone)
    if found != wanted:
        write_whole(path, _cut_out(path, [(start, end) for _, start, end in wanted]), beside=temporary)


def _list_own(record: Record) -> Iterable[str]:
    """The files that are of this picture alone, as a tar is not."""
    return record.files if record.tar is None else ()


def _cut_out(path: Path, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """What lies between these places of a file."""
    with open_file(path) as file:
        for start, end in pieces:
            file.seek(start)
            for position in range(start, end, BLOCK):
                yield file.read(min(BLOCK, end - position))


class ManifestWriter:
    """Appends records. Each is there for readers at once; on the disk itself it is within a second or so.

    A power cut takes the last records with it at most, and never leaves one whose overlays are lost for good: they were
    written to the disk and had their names before the record was appended, and resuming looks for each recorded file.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)
        self._synced = time.monotonic()

    def check(self) -> None:
        """Raises `OutputError` where somebody else removed, replaced or changed the file, and `OSError`."""
        self._lines.check()

    def append(self, record: Record) -> None:
        """Add a record. Raises `OSError`; nothing of it is in the file then."""
        self._lines.append(record.to_json().encode() + b"\n")
        if time.monotonic() - self._synced >= SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until all of it is on the disk. Raises `OSError`."""
        self._lines.sync()
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close it; more than once does no harm."""
        self._lines.close()
