"""Results as a WebDataset: a sample for each picture, in tars that are there whole before their records are."""

from __future__ import annotations

import tarfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from gradcam.batch.formats import Destination, Opening, OpenRun
from gradcam.batch.formats.records import ResultsAround, check_records, rename_files
from gradcam.errors import GradcamError, OutputError
from gradcam.sources.archives import check_webdataset
from gradcam.storage.clear import Mode
from gradcam.storage.disk import blaming_disk, uninterrupted
from gradcam.storage.output import ResultWriter, blaming, to_reader, to_writer
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles
from gradcam.storage.store import Store

RECORD = "json"  # the field of a sample's record
PICTURES, BYTES = 1000, 256 * 2**20  # in a tar, which is finished when it has as many of either


def plan_keys(stems: Mapping[str, str]) -> dict[str, str]:
    """For each picture's name the key of its sample: its stem, as `plan_stems` gives it, with "_" for dots, which end a
    key in a WebDataset. Where two would be alike, case aside, one that had dots gets a number, from 2."""
    keys = {name: stem for name, stem in stems.items() if "." not in stem.rpartition("/")[2]}
    taken = {stem.casefold() for stem in keys.values()}
    for name in sorted(stems.keys() - keys.keys()):
        folders, slash, last = stems[name].rpartition("/")
        wish = key = folders + slash + last.replace(".", "_")
        numbers = count(2)
        while key.casefold() in taken:
            key = f"{wish}-{next(numbers)}"
        taken.add(key.casefold())
        keys[name] = key
    return keys


def name_field(stem: str, file: str) -> str:
    """The field of a sample that a file is: what stands behind the stem in its name, such as `gradcam.jpg`, in lower
    case, as the library reads all fields. A picture's files have names that differ in more than case."""
    is_whole = file.startswith(f"{stem}-")  # otherwise it was cut, and has a hash of all of it
    return (file[len(stem) + 1 :] if is_whole else file.rpartition("/")[2]).lower()


class TarResults(ResultsAround):
    """Results whose files are samples in tars, by their stems; fields are the files by what they are of, and `json`,
    the record, which is kept once its tar is there whole. Tars that no record tells of are an `OutputError`."""

    def __init__(
        self, records: OpenRun, place: ResultWriter, part: ShardFiles, stems: Mapping[str, str], mode: Mode
    ) -> None:
        super().__init__(records, self._finish)
        self._tars, self._part, self._stems = place, part, stems
        self._keys = plan_keys(stems)
        self._waiting: deque[Record] = deque()  # for the tar that is open
        self._tar: _OpenTar | None = None
        numbers = _list_tars(place.root, part)
        if numbers and mode != "resume":
            _refuse_tars(place.root, part)
        self._number = max(numbers, default=0)  # of the last one that is there
        self._recover(numbers)

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Put the files into the tar that is open; gives the record with their names there, which is kept later."""
        if not files:
            if self._waiting:
                self._waiting.append(record)
                return record
            return self._records.append(record, {})
        tar = self._part.tar(self._number + 1)
        key, stem = self._keys[record.image], self._stems[record.image]
        fields = {name: name_field(stem, name) for name in files}
        kept = rename_files(record, {name: f"{tar}/{key}.{field}" for name, field in fields.items()}, tar=tar)
        if self._tar is None:
            self._tar = _OpenTar(self._tars.begin())
        sample = {"__key__": key, RECORD: kept.to_json().encode(), **{fields[name]: files[name] for name in files}}
        with uninterrupted():
            self._tar.add(sample)
            self._waiting.append(kept)
        if len(self._waiting) >= PICTURES or self._tar.size >= BYTES:
            self._finish()
        return kept

    def _finish(self) -> None:
        tar, self._tar = self._tar, None
        if tar is not None:
            self._keep(tar)
        while self._waiting:  # of a tar that is there, also where an interruption came between its records
            self._records.append(self._waiting.popleft(), {})

    def _keep(self, tar: _OpenTar) -> None:
        is_kept = False
        try:
            if tar.close():
                with blaming(self._tars.root):
                    self._tars.keep(tar.path, self._part.tar(self._number + 1))
                self._number += 1
                is_kept = True
        finally:
            tar.path.unlink(missing_ok=True)
            if not is_kept:
                self._waiting.clear()  # no sample of it is recorded: they will be done again

    def _recover(self, numbers: Sequence[int]) -> None:
        """Record what is in the last tars, as far as a run that was killed did not come to that."""
        lost: list[Record] = []
        for name in map(self._part.tar, reversed(numbers)):
            records = [record for record in _read_records(self._tars.root, name) if record.tar == name]
            missing = [record for record in records if record.image not in self.done]
            if not missing:
                break  # what was before it was recorded before it
            lost = missing + lost
        for record in lost:
            self._records.append(record, {})
        self.done = self.done | {record.image for record in lost}


def check_tars(where: Destination) -> None:
    """What can be told of a WebDataset before a model is loaded. Raises `GradcamError`."""
    check_records(where)
    check_webdataset()
    if where.mode == "new":
        _refuse_tars(where.place, where.part)


def open_tars(opening: Opening) -> TarResults:
    """Results in tars, whose records go where they went without them."""
    temporary = opening.place / opening.part.temporary if isinstance(opening.place, Path) else None
    writer = to_writer(opening.place, temporary)
    return TarResults(opening.records, writer, opening.part, opening.stems, opening.mode)


def _list_tars(place: Path | Store, part: ShardFiles) -> list[int]:
    with blaming(place):
        is_there = isinstance(place, Store) or place.is_dir()
        return part.find_tars(to_reader(place).list_names()) if is_there else []


def _refuse_tars(place: Path | Store, part: ShardFiles) -> None:
    numbers = _list_tars(place, part)
    if numbers:
        raise OutputError(
            f"{to_reader(place).show()}: contains {part.tar(numbers[0])}, which belongs to no recorded run; move it, or "
            "choose another --output"
        )


def _read_records(place: Path | Store, name: str) -> Iterator[Record]:
    try:
        with blaming(place), to_reader(place).open(name) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name.endswith(f".{RECORD}") else None
                if content is not None:
                    yield Record.from_json(content.read())
    except OutputError:
        raise
    except (tarfile.TarError, GradcamError) as error:
        raise OutputError(f"{name}: is not a tar of this run's results ({error}); move it to continue") from error


class _OpenTar:
    """A tar that is being written. What is in it does not depend on the time."""

    def __init__(self, path: Path) -> None:
        from webdataset import TarWriter

        self.path, self.size = path, 0
        self._is_whole = True
        with blaming_disk(path.parent):
            self._file = open(path, "xb")  # noqa: SIM115  (it stays open: `close` is for the owner)
            self._writer = TarWriter(self._file, encoder=False, mtime=0)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. Raises `OutputError`; the tar is of no use any more then."""
        self._is_whole = False  # an interruption would leave a part of it
        with blaming_disk(self.path.parent):
            self.size += self._writer.write(dict(sample))
        self._is_whole = True

    def close(self) -> bool:
        with blaming_disk(self.path.parent), self._file:
            try:
                self._writer.close()
            except OSError:
                if self._is_whole:
                    raise
        return self._is_whole
