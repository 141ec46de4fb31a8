"""Record a study in a journal, to resume the study later: one line of settings, then one line per evaluated image."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from gradcam.errors import GradcamError, OutputError
from gradcam.evaluation.study.results import StudyEntry
from gradcam.images.files import open_file, write_atomically
from gradcam.storage.disk import LineFile, acquire_lock, translate_disk_errors
from gradcam.storage.run_file import SCHEMA, describe_invalid_field, list_differences, list_resume_notes, load_fields

FIELDS = ("gradcam", "versions", "device", "model", "settings", "images")  # the required fields of the first line
Entries = dict[tuple[str, str], StudyEntry]  # by (image name, SHA-256)
Mode = Literal["new", "resume", "overwrite"]


class Journal(AbstractContextManager["Journal"]):
    """A file of JSON lines, locked by one study. `notes` are for the user who resumes the study.

    A study appends each entry before it yields the entry. If the process was stopped while writing, the incomplete last
    line is removed when the study is resumed.
    """

    def __init__(self, path: Path, entries: Entries, notes: list[str], release: Callable[[], None]) -> None:
        self.path, self.notes = path, notes
        self._entries, self._release, self._lines = entries, release, LineFile(path)

    @classmethod
    def open(cls, path: Path, run: Mapping[str, Any], *, mode: Mode = "resume") -> Journal:
        """Lock the file and read the entries of an earlier run.

        `run` is the result of `Conditions.to_run`: everything that the numbers depend on. If the mode is "new", the
        file must not exist. The mode "resume" continues a file with an equal `run`, and "overwrite" replaces the file.
        Raise `OutputError` if the mode does not allow the existing file, if the file cannot be written, or if another
        process uses the file.
        """
        with translate_disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                release = acquire_lock(path.with_name(f".{path.name}.lock"), seconds=0)
            except Timeout:
                busy = f"{path}: is in use by another process. Wait for it to finish, or choose another --output"
                raise OutputError(busy) from None
            try:
                return cls(path, *_begin(path, run, mode), release)
            except BaseException:
                release()
                raise

    def find(self, image: str, sha256: str | None) -> StudyEntry | None:
        """Return the entry of an image; None if the image has no entry, or if its file has changed."""
        return None if sha256 is None else self._entries.get((image, sha256))

    def append(self, entry: StudyEntry) -> None:
        """Append an entry. If writing fails, raise `OutputError`, and leave no part of the entry in the file."""
        with translate_disk_errors(self.path.parent):
            self._lines.append(entry.to_json().encode() + b"\n")

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._release()


def check_journal(path: Path, mode: Mode) -> None:
    """Raise `OutputError` if the mode is "new" and the journal exists. Call this function before the study starts."""
    if mode == "new" and path.exists():
        options = "--resume to continue this study, --overwrite to replace it, or another --output"
        raise OutputError(f"{path}: belongs to an earlier study. Give {options}")


def _begin(path: Path, run: Mapping[str, Any], mode: Mode) -> tuple[Entries, list[str]]:
    """Return the entries and the notes of an earlier run, or start a new file whose first line is `run`."""
    check_journal(path, mode)
    lines = _read_lines(path) if path.exists() and mode == "resume" else iter(())
    first = next(lines, None)
    if first is None:
        write_atomically(path, json.dumps(dict(run)).encode() + b"\n")
        return {}, []
    first_run = load_fields(first)
    if first_run is None or first_run.get("schema") != SCHEMA or describe_invalid_field(first_run, FIELDS) is not None:
        raise OutputError(f"{path}: is not a results file of this gradcam version. Replace the file with --overwrite")
    if differences := list_differences(first_run, run):
        raise OutputError(
            f"{path}: the earlier study had other settings: {'; '.join(differences)}. Give the same settings, start "
            "again with --overwrite, or choose another --output"
        )
    entries = {}
    for number, line in enumerate(lines, 2):
        try:
            entry = StudyEntry.from_json(line)
        except GradcamError as error:
            raise OutputError(f"{path}, line {number}: {error}; repair the line, or remove it") from error
        if entry.error is None and entry.sha256 is not None:  # Failed images are evaluated again.
            entries[entry.image, entry.sha256] = entry
    return entries, list_resume_notes(first_run, run)


def _read_lines(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))
