"""The journal of a study: what was asked, then a line for each image that was judged, so that it can be gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from gradcam.errors import GradcamError, OutputError
from gradcam.evaluation.study.results import Judgement
from gradcam.images.files import open_file, write_whole
from gradcam.storage.disk import LineFile, blaming_disk, take_lock
from gradcam.storage.run_file import SCHEMA, find_fault, list_differences, list_notes, load_fields

FIELDS = ("gradcam", "versions", "device", "model", "settings", "images")  # of those of a run
Entries = dict[tuple[str, str], Judgement]  # by image and SHA-256
Mode = Literal["new", "resume", "overwrite"]


class Journal(AbstractContextManager["Journal"]):
    """A file of JSON lines, open for one study. `notes`: what a person should know who goes on with it. Each entry is
    in the file before it is given to anybody; what was not written to its end is cut off by whoever goes on."""

    def __init__(self, path: Path, entries: Entries, release: Callable[[], None], notes: list[str]) -> None:
        self.path = path
        self.notes = notes
        self._entries = entries
        self._release = release
        self._lines = LineFile(path)

    @classmethod
    def open(cls, path: Path, run: Mapping[str, Any], *, mode: Mode = "resume") -> Journal:
        """Take the file for this study. `run`: what its numbers depend on, as `Conditions.to_run` gives it. `mode`:
        "new" wants that there is none yet, "resume" goes on with one of the same `run`, if there is one, and
        "overwrite" starts anew. Raises `OutputError` otherwise, and where another process is at work on it."""
        with blaming_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                release = take_lock(path.with_name(f".{path.name}.lock"), seconds=0)
            except Timeout:
                busy = f"{path}: is in use by another process. Wait for it to finish, or choose another --output"
                raise OutputError(busy) from None
            try:
                entries, notes = _begin(path, run, mode)
                return cls(path, entries, release, notes)
            except BaseException:
                release()
                raise

    def find(self, image: str, sha256: str | None) -> Judgement | None:
        """What was measured of an image, if its bytes are still the same."""
        return None if sha256 is None else self._entries.get((image, sha256))

    def append(self, entry: Judgement) -> None:
        """Add what was measured of an image. Raises `OutputError`; no part of it is in the file then."""
        with blaming_disk(self.path.parent):
            self._lines.append(entry.to_json().encode() + b"\n")

    def close(self) -> None:
        self._lines.close()
        self._release()

    def __exit__(self, *_: object) -> None:
        self.close()


def check_journal(path: Path, mode: Mode) -> None:
    """What can be told before anything is computed. Raises `OutputError` for a journal where there must be none."""
    if mode == "new" and path.exists():
        ways = "--resume to continue it, --overwrite to replace it, or another --output"
        raise OutputError(f"{path}: belongs to an earlier study. Give {ways}")


def _begin(path: Path, run: Mapping[str, Any], mode: Mode) -> tuple[Entries, list[str]]:
    """What is done already, and notes; a file that is not there yet begins with the run."""
    check_journal(path, mode)
    lines = _read_lines(path) if path.exists() and mode == "resume" else iter(())
    first = next(lines, None)
    if first is None:
        write_whole(path, json.dumps(dict(run)).encode() + b"\n")
        return {}, []
    earlier = load_fields(first)
    if earlier is None or earlier.get("schema") != SCHEMA or find_fault(earlier, FIELDS) is not None:
        expected = "is not a journal of this version"
        raise OutputError(f"{path}: {expected}. Replace it with --overwrite")
    if differences := list_differences(earlier, run):
        raise OutputError(
            f"{path}: the earlier study had other settings: {'; '.join(differences)}. Give the same settings, start "
            "again with --overwrite, or choose another --output"
        )
    entries = {}
    for number, line in enumerate(lines, 2):
        try:
            entry = Judgement.from_json(line)
        except GradcamError as error:
            raise OutputError(f"{path}, line {number}: {error}; repair the line, or remove it") from error
        if entry.error is None and entry.sha256 is not None:  # what failed is tried again
            entries[entry.image, entry.sha256] = entry
    return entries, list_notes(earlier, run)


def _read_lines(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))
