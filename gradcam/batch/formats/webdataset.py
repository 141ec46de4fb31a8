"""Store results as a WebDataset, in tar files with one sample per image.

A tar file is complete before the records of its images are stored.
"""

from __future__ import annotations

import tarfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from gradcam.batch.formats import Destination, Opening
from gradcam.batch.formats.records import RecordsWrapper, check_records, rename_files
from gradcam.errors import GradcamError, OutputError
from gradcam.sources.archives import check_webdataset
from gradcam.storage.disk import delay_signals, translate_disk_errors
from gradcam.storage.output import to_reader, to_writer, translate_output_errors
from gradcam.storage.records import Record
from gradcam.storage.store import Store

RECORD_FIELD = "json"
# A tar file is finished when it reaches either limit.
MAX_IMAGES_PER_TAR, MAX_TAR_BYTES = 1000, 256 * 2**20


def plan_keys(stems: Mapping[str, str]) -> dict[str, str]:
    """Return the sample key of each image, which is its stem with underscores instead of dots.

    In a WebDataset, a dot in a file name ends the key. If another image already has an equal key (ignoring case), a
    number from 2 is added.
    """
    keys = {name: stem for name, stem in stems.items() if "." not in stem.rpartition("/")[2]}
    used_keys = {stem.casefold() for stem in keys.values()}
    for name in sorted(stems.keys() - keys.keys()):
        folders, slash, name_part = stems[name].rpartition("/")
        base_key = key = folders + slash + name_part.replace(".", "_")
        numbers = count(2)
        while key.casefold() in used_keys:
            key = f"{base_key}-{next(numbers)}"
        used_keys.add(key.casefold())
        keys[name] = key
    return keys


def name_field(stem: str, file: str) -> str:
    """Return the field name of a file in its sample, which is the file name after the stem, such as `gradcam.jpg`.

    The field name is in lower case, because WebDataset reads field names in lower case. Field names stay unique,
    because the file names of one image never differ only in case.
    """
    # If the file name does not begin with the full stem, it was shortened, and contains a hash of the full name.
    has_full_stem = file.startswith(f"{stem}-")
    return (file[len(stem) + 1 :] if has_full_stem else file.rpartition("/")[2]).lower()


class TarResults(RecordsWrapper):
    """Stores the files of each image as one sample in a tar file.

    The key of the sample comes from the image's stem, and its `json` field is the record. A record is stored in the
    manifest after its tar file is complete. Raises `OutputError` if the folder contains tar files that belong to no
    recorded run.
    """

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening.records, self._finish_tar)
        temporary = opening.place / opening.part.temporary if isinstance(opening.place, Path) else None
        self._tars, self._part = to_writer(opening.place, temporary), opening.part
        self._stems, self._keys = opening.stems, plan_keys(opening.stems)
        # Records whose tar file is still open.
        self._pending: deque[Record] = deque()
        self._tar: _OpenTar | None = None
        numbers = _list_tars(opening)
        if opening.mode != "resume":
            _refuse_tars(opening, numbers)
        # The number of the last complete tar file.
        self._number = max(numbers, default=0)
        self._recover(numbers)

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Add the files to the open tar.

        Return the record with its file names in the tar. The record is stored once the tar is complete.
        """
        if not files:
            if self._pending:
                self._pending.append(record)
                return record
            return self._records.append(record, {})
        tar = self._part.tar(self._number + 1)
        key, stem = self._keys[record.image], self._stems[record.image]
        fields = {name: name_field(stem, name) for name in files}
        renamed = rename_files(record, {name: f"{tar}/{key}.{field}" for name, field in fields.items()}, tar=tar)
        if self._tar is None:
            self._tar = _OpenTar(self._tars.begin())
        sample = {"__key__": key, RECORD_FIELD: renamed.to_json().encode()}
        sample |= {fields[name]: files[name] for name in files}
        with delay_signals():
            self._tar.add(sample)
            self._pending.append(renamed)
        if len(self._pending) >= MAX_IMAGES_PER_TAR or self._tar.size >= MAX_TAR_BYTES:
            self._finish_tar()
        return renamed

    def _finish_tar(self) -> None:
        tar, self._tar = self._tar, None
        if tar is not None:
            self._store_tar(tar)
        # The tar file is complete. If this loop is interrupted, the remaining records stay in `_pending`.
        while self._pending:
            self._records.append(self._pending.popleft(), {})

    def _store_tar(self, tar: _OpenTar) -> None:
        is_stored = False
        try:
            if tar.close():
                with translate_output_errors(self._tars.root):
                    self._tars.keep(tar.path, self._part.tar(self._number + 1))
                self._number += 1
                is_stored = True
        finally:
            tar.path.unlink(missing_ok=True)
            if not is_stored:
                self._pending.clear()  # These images get no record, so that a resumed run explains them again.

    def _recover(self, numbers: Sequence[int]) -> None:
        """Store the records that a killed run wrote to its last tar files but not to the manifest."""
        unrecorded: list[Record] = []
        for name in map(self._part.tar, reversed(numbers)):
            records = [record for record in _read_records(self._tars.root, name) if record.tar == name]
            missing = [record for record in records if record.image not in self.done]
            if not missing:
                break  # Records are stored in order, so the records of all earlier tar files are also stored.
            unrecorded = missing + unrecorded
        for record in unrecorded:
            self._records.append(record, {})
        self.done = self.done | {record.image for record in unrecorded}


def check_tars(destination: Destination) -> None:
    """Raise `GradcamError` for problems of a WebDataset that are known before a model is loaded."""
    check_records(destination)
    check_webdataset()
    if destination.mode == "new":
        _refuse_tars(destination, _list_tars(destination))


def _list_tars(destination: Destination) -> list[int]:
    place = destination.place
    with translate_output_errors(place):
        exists = isinstance(place, Store) or place.is_dir()
        return destination.part.find_tars(to_reader(place).list_names()) if exists else []


def _refuse_tars(destination: Destination, numbers: Sequence[int]) -> None:
    if numbers:
        problem = f"contains {destination.part.tar(numbers[0])}, which is not part of a recorded run"
        advice = "move this file, or choose another --output"
        raise OutputError(f"{to_reader(destination.place).show()}: {problem}; {advice}")


def _read_records(place: Path | Store, name: str) -> Iterator[Record]:
    try:
        with translate_output_errors(place), to_reader(place).open(name) as file, tarfile.open(None, "r:", file) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name.endswith(f".{RECORD_FIELD}") else None
                if content is not None:
                    yield Record.from_json(content.read())
    except OutputError:
        raise
    except (tarfile.TarError, GradcamError) as error:
        raise OutputError(
            f"{name}: is not a tar file with this run's results ({error}); move this file to continue"
        ) from error


class _OpenTar:
    """A tar file that is being written. It contains no times, so that equal results give equal bytes."""

    def __init__(self, path: Path) -> None:
        from webdataset import TarWriter

        self.path, self.size = path, 0
        self._is_complete = True
        with translate_disk_errors(path.parent):
            self._file = open(path, "xb")  # noqa: SIM115  (`close` closes it)
            self._writer = TarWriter(self._file, encoder=False, mtime=0)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. If this raises `OutputError`, the tar file is unusable."""
        self._is_complete = False  # An interruption would leave a partial sample.
        with translate_disk_errors(self.path.parent):
            self.size += self._writer.write(dict(sample))
        self._is_complete = True

    def close(self) -> bool:
        with translate_disk_errors(self.path.parent), self._file:
            try:
                self._writer.close()
            except OSError:
                if self._is_complete:
                    raise
        return self._is_complete
