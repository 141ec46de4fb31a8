"""The folder that a report is written into, on a disk or in a store: what is there, and how it is read and written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradcam.errors import GradcamError, OutputError
from gradcam.images.files import is_url, replacing, write_whole
from gradcam.images.read import Pixels
from gradcam.storage.clear import PAGE, REPORT, check_page
from gradcam.storage.clear import check_stored_page as check_page_in_store
from gradcam.storage.disk import take_lock
from gradcam.storage.output import Shelf, blaming_store, to_shelf
from gradcam.storage.records import Record
from gradcam.storage.run_file import Part, find_parts, list_manifests
from gradcam.storage.store import Store

LOCK = ".gradcam-report.lock"  # of the output folder; it stays there, as those of its parts do
DETAILS = re.compile(f"{REPORT}/(details-[0-9a-f]{{12}})(?:/.*)?", re.DOTALL)


class Files(Protocol):
    """An output folder. Names are relative to it, with "/". Several threads may use it."""

    @property
    def place(self) -> Path | Store: ...

    def check_page(self) -> None:
        """Raises `OutputError` where the report would replace an `index.html` that is none."""

    def is_there(self, name: str) -> bool:
        """Whether there is such a file; what a power cut left empty is none."""

    def is_current(self, view: str, source: str | None) -> bool:
        """Whether there is such a view, made of what its source is now."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole. Raises `OSError`, and `StoreError` of a store."""

    def write_view(self, name: str, data: bytes) -> None:
        """As `write`, without waiting for the disk: a view can be made again at any time."""

    def remove_details(self, kept: str) -> None:
        """Remove the details of earlier pages; `kept` is the name of this one's."""


class DiskFiles:
    """A folder on a disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def place(self) -> Path:
        return self._folder

    def check_page(self) -> None:
        """As `Files.check_page`."""
        check_page(self._folder)

    def is_there(self, name: str) -> bool:
        """As `Files.is_there`."""
        try:
            return os.stat(f"{self._folder}/{name}").st_size > 0
        except OSError:
            return False

    def is_current(self, view: str, source: str | None) -> bool:
        """As `Files.is_current`, by their times."""
        if not self.is_there(view):
            return False
        try:
            return source is None or self._time(view) >= self._time(source)
        except OSError:  # the source is gone: what there is, is the best that there will be
            return True

    def _time(self, name: str) -> int:
        return os.stat(f"{self._folder}/{name}").st_mtime_ns

    def write(self, name: str, data: bytes) -> None:
        """As `Files.write`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def write_view(self, name: str, data: bytes) -> None:
        """As `Files.write_view`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)

    def remove_details(self, kept: str) -> None:
        """As `Files.remove_details`."""
        for path in (self._folder / REPORT).glob("details-*"):
            if path.name != kept and DETAILS.fullmatch(f"{REPORT}/{path.name}"):
                shutil.rmtree(path, ignore_errors=True)


class StoreFiles:
    """A folder in a store, listed once: to ask for each object on its own would take hours."""

    def __init__(self, store: Store) -> None:
        self._store, self._sizes = store, store.find()
        found = re.search(rb"details-[0-9a-f]{12}", store.read(PAGE)) if self.is_there(PAGE) else None
        self._earlier = found[0].decode() if found else None

    @property
    def place(self) -> Store:
        return self._store

    def check_page(self) -> None:
        """As `Files.check_page`."""
        check_page_in_store(self._store, self._sizes)

    def is_there(self, name: str) -> bool:
        """As `Files.is_there`."""
        return self._sizes.get(name, 0) > 0

    def is_current(self, view: str, source: str | None) -> bool:
        """As `Files.is_current`; times of objects say little, since the last one written may be the first that arrived."""
        return self.is_there(view)

    def write(self, name: str, data: bytes) -> None:
        """As `Files.write`."""
        self._store.write(name, data)
        self._sizes[name] = len(data)

    write_view = write

    def remove_details(self, kept: str) -> None:
        """As `Files.remove_details`: of the page that was there at the start alone.

        Others may be those of a shard that writes its report at this time, whose page comes last.
        """
        matches = ((name, DETAILS.fullmatch(name)) for name in self._sizes)
        self._store.remove([name for name, match in matches if match and match[1] == self._earlier != kept])


@contextlib.contextmanager
def opening(place: Path | Store) -> Iterator[Files]:
    """The folder, for one report; on a disk others wait.

    Raises `OutputError` where it cannot be written to, and `StoreError`.
    """
    if isinstance(place, Store):
        with blaming_store(place):
            yield StoreFiles(place)
        return
    try:
        with contextlib.ExitStack() as stack:
            if place.is_dir() and find_parts(to_shelf(place).list_names()):
                # Shards may end at one time: each would take the other's details away, and the older page could stay.
                stack.callback(take_lock(place / LOCK, seconds=-1))
            yield DiskFiles(place)
    except OSError as error:
        raise OutputError(f"{place}: the report cannot be written ({error.strerror or error})") from error


def read_pixels(place: Path | Store, name: str) -> Pixels | None:
    """A picture in a folder; None where it is gone, or never was a file of its own: the page does without."""
    from gradcam.models.readers import read_picture

    with contextlib.suppress(GradcamError, OSError):
        if isinstance(place, Path):
            return read_picture(place / name).picture
        return read_picture(name, place.read(name)).picture
    return None


@dataclass(frozen=True)
class Run:
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


def read_run(files: Files) -> Run:
    """The run in a folder: one manifest, or the parts of its shards, whose pictures are then in the order of names.

    Where a picture was done twice, the later record counts. Raises `GradcamError` where there is no manifest, or none that
    can be read, and for results in tars.
    """
    from gradcam.storage.manifest import read_manifest

    records = {record.image: record for record in read_manifest(files.place)}
    shelf = to_shelf(files.place)
    tar = next((record.tar for record in records.values() if record.tar is not None), None)
    if tar is not None:
        raise OutputError(
            f"{shelf.show()}: its results lie in tars such as {tar}, which a report cannot show; explain the pictures into "
            "another folder without --output-format webdataset"
        )
    names = shelf.list_names()
    is_whole = bool(list_manifests(names, Part()))
    found = list(records.values()) if is_whole else sorted(records.values(), key=lambda record: record.image)
    return Run(files, found, _read_facts(shelf, names))


def _read_facts(shelf: Shelf, names: Collection[str]) -> dict[str, Any]:
    for part in find_parts(names):
        try:
            facts = json.loads(shelf.read(part.run))
        except (OSError, ValueError, RecursionError, OutputError):  # the page can do without
            continue
        if isinstance(facts, dict):
            return facts
    return {}
