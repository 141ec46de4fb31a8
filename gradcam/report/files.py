"""The folder that a report is written into, on a disk or in a store: what is there, and how it is read and written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcam.errors import GradcamError, OutputError
from gradcam.images.files import is_url
from gradcam.images.read import Pixels
from gradcam.storage.clear import PAGE, REPORT
from gradcam.storage.disk import take_lock
from gradcam.storage.manifest import read_manifest
from gradcam.storage.output import blaming_store, to_reader, to_writer
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_shard_files, list_manifests
from gradcam.storage.store import Store

LOCK = ".gradcam-report.lock"  # of the output folder; it stays there, as those of its parts do
TEMPORARY = ".gradcam-partial-report"  # where files are before they are whole; the process with the lock owns it
DETAILS = re.compile(f"{REPORT}/(details-[0-9a-f]{{12}})(?:/.*)?", re.DOTALL)


class Files:
    """An output folder. Names are relative to it, with "/". Several threads may use it. A folder in a store is listed
    once: to ask for each object on its own would take hours."""

    def __init__(self, place: Path | Store, temporary: Path | None = None) -> None:
        self.place, self.reader = place, to_reader(place)
        self._writer = to_writer(place, temporary)
        self._sizes = place.find() if isinstance(place, Store) else None
        page = place.read(PAGE) if isinstance(place, Store) and self.is_there(PAGE) else b""
        found = re.search(rb"details-[0-9a-f]{12}", page)
        self._earlier = found[0].decode() if found else None

    def is_there(self, name: str) -> bool:
        """Whether there is such a file; what a power cut left empty is none."""
        if self._sizes is not None:
            return self._sizes.get(name, 0) > 0
        try:
            return os.stat(f"{self.place}/{name}").st_size > 0
        except OSError:
            return False

    def is_current(self, view: str, source: str | None) -> bool:
        """Whether there is such a view, made of what its source is now. By their times, which say little of objects,
        since the last one written may be the first that arrived."""
        if not self.is_there(view) or self._sizes is not None or source is None:
            return self.is_there(view)
        try:
            times = [os.stat(f"{self.place}/{name}").st_mtime_ns for name in (view, source)]
        except OSError:  # the source is gone: what there is, is the best that there will be
            return True
        return times[0] >= times[1]

    def write(self, name: str, data: bytes) -> None:
        self._writer.put(name, data)
        self._note(name, data)

    def write_view(self, name: str, data: bytes) -> None:
        """As `write`, without waiting for the disk: a view can be made again at any time."""
        self._writer.put_view(name, data)
        self._note(name, data)

    def _note(self, name: str, data: bytes) -> None:
        if self._sizes is not None:
            self._sizes[name] = len(data)

    def remove_details(self, kept: str) -> None:
        """Remove the details of earlier pages; `kept` is the name of this one's. In a store, of the page that was there
        at the start alone: others may be of a shard that writes its report just now."""
        if isinstance(self.place, Path):
            for path in (self.place / REPORT).glob("details-*"):
                if path.name != kept and DETAILS.fullmatch(f"{REPORT}/{path.name}"):
                    shutil.rmtree(path, ignore_errors=True)
            return
        matches = ((name, DETAILS.fullmatch(name)) for name in self._sizes or ())
        self._writer.remove([name for name, match in matches if match and match[1] == self._earlier != kept])


@contextlib.contextmanager
def opening(place: Path | Store) -> Iterator[Files]:
    """The folder, for one report; on a disk others wait. Raises `OutputError` where it cannot be written to, and
    `StoreError`."""
    if isinstance(place, Store):
        with blaming_store(place):
            yield Files(place)
        return
    try:
        with contextlib.ExitStack() as stack:
            temporary = None
            if place.is_dir() and find_shard_files(to_reader(place).list_names()):
                temporary = place / TEMPORARY
                # Shards may end at one time: each would take the other's details away, and the older page could stay.
                stack.callback(take_lock(place / LOCK, seconds=-1))
                shutil.rmtree(temporary, ignore_errors=True)  # Left by a report whose process was killed.
                stack.callback(shutil.rmtree, temporary, ignore_errors=True)
                temporary.mkdir()
            yield Files(place, temporary)
    except OSError as error:
        raise OutputError(f"{place}: the report cannot be written ({error.strerror or error})") from error


def read_pixels(place: Path | Store, name: str) -> Pixels | None:
    """A picture in a folder; None where it is gone, or never was a file of its own: the page does without."""
    from gradcam.models.preprocess import read_picture

    with contextlib.suppress(GradcamError, OSError):
        if isinstance(place, Path):
            return read_picture(place / name).picture
        return read_picture(name, place.read(name)).picture
    return None


@dataclass(frozen=True)
class ReportRun:
    """Records in the order of the input, and the contents of run.json: empty where there is none."""

    files: Files
    records: Sequence[Record]
    facts: dict[str, Any]

    @property
    def root(self) -> Path | Store | None:
        """Where the names of the pictures start from, if that is known."""
        root, place = self.facts.get("root"), self.files.place
        if not isinstance(root, str):
            return None
        if is_url(root):
            return Store(root)
        return place / root if isinstance(place, Path) else Path(root)


def read_run(files: Files) -> ReportRun:
    """The run in a folder: one manifest, or the parts of its shards, whose pictures are then in the order of names. Of
    a picture that was done twice the later record counts. Raises `GradcamError`: no manifest to read, results in
    tars."""
    records = {record.image: record for record in read_manifest(files.place)}
    reader = files.reader
    tar = next((record.tar for record in records.values() if record.tar is not None), None)
    if tar is not None:
        advice = "Run gradcam batch again without --output-format webdataset, and give a new folder with --output."
        raise OutputError(
            f"{reader.show()}: the results are in tar files such as {tar}, which a report cannot read. {advice}"
        )
    names = reader.list_names()
    is_whole = bool(list_manifests(names, ShardFiles()))
    found = list(records.values()) if is_whole else sorted(records.values(), key=lambda record: record.image)
    for part in find_shard_files(names):
        with contextlib.suppress(OSError, ValueError, RecursionError, OutputError):  # the page can do without
            if isinstance(facts := json.loads(reader.read(part.run)), dict):
                return ReportRun(files, found, facts)
    return ReportRun(files, found, {})
