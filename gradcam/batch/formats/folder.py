"""The output folder on a disk.

A lock ensures that only one process at a time writes a run or a shard. Finished results are neither lost nor repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from filelock import Timeout

from gradcam.errors import OutputError, warn
from gradcam.images.files import TEMPORARY_NAME, read_text_file, write_atomically
from gradcam.sources.shards import Shard, to_shard_files
from gradcam.storage import disk, run_file
from gradcam.storage.clear import ExistingRunMode, check_earlier_run, remove_runs
from gradcam.storage.manifest import LogWriter, ManifestWriter, is_finished_by, remove_unfinished_lines, sort_manifest
from gradcam.storage.output import DiskReader, DiskWriter
from gradcam.storage.records import Record
from gradcam.storage.run_file import RunSettings, ShardFiles, find_shards, list_manifests, list_pieces


class OutputFolder:
    """A folder with `manifest.jsonl`, `run.json` and `log.jsonl`, open for one run or shard. Implements `OpenRun`.

    `temporary` is a subfolder for incomplete files.
    """

    def __init__(self, path: Path, part: ShardFiles, release: Callable[[], None], notes: Sequence[str]) -> None:
        self.path, self.temporary, self.manifest = path, path / part.temporary, str(path / part.manifest)
        self.done, self.failed = frozenset[str](), frozenset[str]()
        self.recorded, self.notes, self._is_closed = 0, notes, False
        self._run, self._part, self._release = path / part.run, part, release
        # Records of images that failed in an earlier run and have not been retried yet.
        self._old_failures: dict[str, Record] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        run: RunSettings,
        *,
        mode: ExistingRunMode = "new",
        shard: Shard | None = None,
        inputs: Iterable[Path] = (),
        stems: Mapping[str, str] | None = None,
    ) -> OutputFolder:
        """Create the folder if needed, lock it for this run, and check that the run can write to it.

        `inputs` are files that are never removed. `stems` maps the name of each image to the common beginning of its
        result names. If the recorded files of an image have another stem, the image is explained again.
        """
        part = to_shard_files(shard)
        with disk.translate_disk_errors(path), contextlib.ExitStack() as stack:
            check_folder(path, part)
            path.mkdir(parents=True, exist_ok=True)
            release = _lock(path, part)
            stack.callback(release)
            fields = run.to_fields()
            notes = check_earlier_run(DiskReader(path), part, fields, mode)
            # If a run without shards overwrites, it removes all earlier shards and the report. If one of the shards is
            # still running, `_lock` raises an error.
            if mode == "overwrite":
                earlier = [part] if part.of else find_shards(DiskReader(path).list_names())
                with contextlib.ExitStack() as locks:
                    for other_part in filter(part.__ne__, earlier):
                        locks.callback(_lock(path, other_part))
                    remove_runs(DiskWriter(path), earlier, inputs, report=not part.of)
            folder = cls(path, part, release, notes)
            folder._start(fields, stack, stems or {})
            stack.pop_all()
        return folder

    def _start(self, fields: dict[str, Any], stack: contextlib.ExitStack, stems: Mapping[str, str]) -> None:
        manifest = self.path / self._part.manifest
        # Register the clean-up before the folder is created, because a signal may arrive right after its creation.
        stack.callback(disk.remove_empty, self.temporary)
        self.temporary.mkdir(exist_ok=True)
        self._remove_unfinished()
        # Write run.json before the first record. A resumed run then always finds the settings of the recorded images.
        if self._run.exists():
            fields = run_file.merge_resumed_run(fields, run_file.decode_run(read_text_file(self._run), str(self._run)))
        self._contents = run_file.encode_run(fields)
        if not self._run.exists() or self._run.read_bytes() != self._contents:
            write_atomically(self._run, self._contents, beside=self.temporary)
        self._join_pieces(manifest)
        if manifest.exists():
            model = fields["model"]["name"]
            is_done = partial(self._is_done, model=model, stems=stems)
            self.done = frozenset(remove_unfinished_lines(manifest, is_done, self.temporary))
            self._old_failures = {name: record for name, record in self._old_failures.items() if name not in self.done}
            self.failed = frozenset(self._old_failures)
        self._manifest = ManifestWriter(manifest)
        stack.callback(self._manifest.close)
        self._log = LogWriter(self.path / self._part.log)

    def _restore_run_file(self) -> None:
        if not self._run.exists():
            write_atomically(self._run, self._contents, beside=self.temporary)
            warn(f"{self._run}: another program removed this file during the run. gradcam wrote it again.")

    def _join_pieces(self, manifest: Path) -> None:
        """Join the pieces of a manifest into one file. A folder that was copied from an object store has pieces."""
        reader = DiskReader(self.path)
        names = reader.list_names()
        pieces = list_pieces(names, self._part.records)
        if pieces:
            lines = (line for name in list_manifests(names, self._part) for line in reader.read_lines(name))
            write_atomically(manifest, lines, beside=self.temporary)
            for name in pieces:
                disk.remove(self.path / name)
            disk.remove_empty(self.path / self._part.records)

    @property
    def place(self) -> DiskWriter:
        return DiskWriter(self.path, self.temporary)

    def append(self, record: Record, files: Mapping[str, bytes] | None = None) -> Record:
        with disk.translate_disk_errors(self.path), disk.delay_signals():
            self._restore_run_file()
            self._manifest.check()
            self._manifest.append(record)
            self._old_failures.pop(record.image, None)
            self.recorded += 1
        return record

    def log(self, event: str, **details: Any) -> None:
        self._log.note(event, details)

    def close(self, order: Sequence[str] = ()) -> None:
        if self._is_closed:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._release)
            stack.callback(disk.remove_empty, self.temporary)
            stack.callback(self._log.close)
            stack.enter_context(disk.translate_disk_errors(self.path))
            stack.callback(self._manifest.close)
            # Set this flag last. If a signal interrupts the steps above, `close` can be called again.
            self._is_closed = True
            self._restore_run_file()
            # If `order` is empty, the run stopped early. Keep the records of failures that were not retried.
            for record in () if order else self._old_failures.values():
                self._manifest.append(record)
            self._manifest.sync()
            self._remove_unfinished()  # Remove files that a killed Ray actor left behind during the run.
            if self.done and order:
                self._manifest.close()
                sort_manifest(self.path / self._part.manifest, order, self.temporary)

    def _is_done(self, record: Record, model: str, stems: Mapping[str, str]) -> bool:
        if record.error is not None:
            self._old_failures[record.image] = record
        has_files = (disk.has_nonempty_file(self.path, name) for name in record.files)
        return is_finished_by(record, model, stems) and all(has_files)

    def _remove_unfinished(self) -> None:
        for path in self.temporary.glob(TEMPORARY_NAME.format("*")):
            disk.remove(path)


def check_folder(path: Path, part: ShardFiles) -> bool:
    """Return True if the output folder exists.

    Raises `OutputError` if the path is not a folder, or if the manifest, `run.json` or the log is not a regular file.
    Also raises `OSError`.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file, expected a folder for the results; choose another --output")
    for name in (part.run, part.manifest, part.log):
        disk.check_regular_file(path / name)
    return path.exists()


def _lock(folder: Path, part: ShardFiles) -> Callable[[], None]:
    """Lock the folder, and return a function that unlocks it.

    Raises `OutputError` if another process holds the lock.
    """
    try:
        return disk.acquire_lock(folder / part.lock, seconds=0)
    except Timeout:
        problem = f"another process is writing to this folder{f' ({part})' if part.of else ''}"
        advice = "wait until that process ends, or choose another --output"
        raise OutputError(f"{disk.format_folder(folder)}: {problem}; {advice}") from None
