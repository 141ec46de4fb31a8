"""The folder of a report, on a disk or in an object store: read the run, and write the report's files."""

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
from gradcam.storage.disk import acquire_lock
from gradcam.storage.manifest import read_manifest
from gradcam.storage.output import to_reader, to_writer, translate_output_store_errors
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_shards, list_manifests
from gradcam.storage.store import Store

LOCK = ".gradcam-report.lock"  # The lock file is not deleted after use, like the lock files of shards.
# The name of the folder for incomplete files. Only the process that holds the lock writes to this folder.
TEMPORARY = ".gradcam-partial-report"
DETAILS = re.compile(f"{REPORT}/(details-[0-9a-f]{{12}})(?:/.*)?", re.DOTALL)


class ReportFolder:
    """An output folder. File names are relative to the folder, with "/" between folders. Thread-safe.

    A folder in an object store is listed once, because a request per object would take hours.
    """

    def __init__(self, place: Path | Store, temporary: Path | None = None) -> None:
        self.place, self.reader = place, to_reader(place)
        self._writer = to_writer(place, temporary)
        self._sizes = place.find() if isinstance(place, Store) else None
        page = place.read(PAGE) if isinstance(place, Store) and self.has_file(PAGE) else b""
        match = re.search(rb"details-[0-9a-f]{12}", page)
        self._earlier_details = match[0].decode() if match else None

    def has_file(self, name: str) -> bool:
        """Return True if the file exists and is not empty. A power cut may leave empty files."""
        if self._sizes is not None:
            return self._sizes.get(name, 0) > 0
        try:
            return os.stat(f"{self.place}/{name}").st_size > 0
        except OSError:
            return False

    def is_current(self, view: str, source: str | None) -> bool:
        """Return True if the view exists and is not older than its source.

        In an object store, each existing view counts as current, because the times of objects do not show which object
        is newer.
        """
        if not self.has_file(view) or self._sizes is not None or source is None:
            return self.has_file(view)
        try:
            times = [os.stat(f"{self.place}/{name}").st_mtime_ns for name in (view, source)]
        except OSError:  # If the source is missing, the view cannot be drawn again, so the view is used.
            return True
        return times[0] >= times[1]

    def write(self, name: str, data: bytes) -> None:
        self._writer.put(name, data)
        if self._sizes is not None:
            self._sizes[name] = len(data)

    def write_view(self, name: str, data: bytes) -> None:
        """Write a view without waiting for the disk, because a lost view can be drawn again."""
        self._writer.put_view(name, data)
        if self._sizes is not None:
            self._sizes[name] = len(data)

    def remove_details(self, current: str) -> None:
        """Remove the details of earlier pages. `current` is the name of this page's details.

        In an object store, only the details of the page that existed at the start are removed. Other details may belong
        to a shard that is writing its report now.
        """
        if isinstance(self.place, Path):
            for path in (self.place / REPORT).glob("details-*"):
                if path.name != current and DETAILS.fullmatch(f"{REPORT}/{path.name}"):
                    shutil.rmtree(path, ignore_errors=True)
            return
        matches = ((name, DETAILS.fullmatch(name)) for name in self._sizes or ())
        self._writer.remove([name for name, match in matches if match and match[1] == self._earlier_details != current])


@contextlib.contextmanager
def open_report_folder(place: Path | Store) -> Iterator[ReportFolder]:
    """Open the folder for one report. Raises `OutputError` and `StoreError`.

    A local folder with shards is locked, so that other processes wait until its report is written.
    """
    if isinstance(place, Store):
        with translate_output_store_errors(place):
            yield ReportFolder(place)
        return
    try:
        with contextlib.ExitStack() as stack:
            temporary = None
            if place.is_dir() and find_shards(to_reader(place).list_names()):
                temporary = place / TEMPORARY
                # Two shards may finish at the same time. Without the lock, each shard could remove the details of the
                # other shard, and the older page could replace the newer page.
                stack.callback(acquire_lock(place / LOCK, seconds=-1))
                shutil.rmtree(temporary, ignore_errors=True)  # A killed process may have left this folder.
                for _ in range(2):  # If a signal interrupts the first removal, the second one removes the rest.
                    stack.callback(shutil.rmtree, temporary, ignore_errors=True)
                temporary.mkdir()
            yield ReportFolder(place, temporary)
    except OSError as error:
        raise OutputError(f"{place}: the report cannot be written ({error.strerror or error})") from error


def read_pixels(place: Path | Store, name: str) -> Pixels | None:
    """Read an image of a folder; return None if that fails, because the report can omit the image."""
    from gradcam.models.preprocess import read_image_file

    with contextlib.suppress(GradcamError, OSError):
        if isinstance(place, Path):
            return read_image_file(place / name).picture
        return read_image_file(name, place.read(name)).picture
    return None


@dataclass(frozen=True)
class ReportRun:
    """The records of a run in input order, and the content of run.json, which is empty if the file is missing."""

    files: ReportFolder
    records: Sequence[Record]
    facts: dict[str, Any]

    @property
    def root(self) -> Path | Store | None:
        """Return the input folder, to which image names are relative; None if the folder is unknown."""
        root, place = self.facts.get("root"), self.files.place
        if not isinstance(root, str):
            return None
        if is_url(root):
            return Store(root)
        return place / root if isinstance(place, Path) else Path(root)


def read_records(files: ReportFolder) -> list[Record]:
    """Read the records of a run, in the order of the input. The records of shards are sorted by image name.

    If an image has several records, the last one counts. Raises `GradcamError` if there is no readable manifest.
    """
    records = list({record.image: record for record in read_manifest(files.place)}.values())
    if not list_manifests(files.reader.list_names(), ShardFiles()):
        records.sort(key=lambda record: record.image)
    return records


def read_run(files: ReportFolder) -> ReportRun:
    """Read the run in a folder from its manifest, or from the manifests of its shards.

    Raises `GradcamError` if there is no readable manifest, or if the results are in tar files.
    """
    records, reader = read_records(files), files.reader
    tar = next((record.tar for record in records if record.tar is not None), None)
    if tar is not None:
        problem = f"the results are in tar files such as {tar}, which a report cannot read"
        advice = "Run gradcam batch again without --output-format webdataset, and give a new folder with --output."
        raise OutputError(f"{reader.show()}: {problem}. {advice}")
    for part in find_shards(reader.list_names()):
        # If run.json cannot be read, the page is written without the settings.
        with contextlib.suppress(OSError, ValueError, RecursionError, OutputError):
            if isinstance(facts := json.loads(reader.read(part.run)), dict):
                return ReportRun(files, records, facts)
    return ReportRun(files, records, {})
