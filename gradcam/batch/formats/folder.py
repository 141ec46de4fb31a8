"""The output folder: one process at a time writes to it, and what was finished there is never lost or done twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout

from gradcam.errors import OutputError, warn
from gradcam.images.files import UNFINISHED, write_whole
from gradcam.sources.shards import Shard, to_shard_files
from gradcam.storage import disk, run_file
from gradcam.storage.clear import Mode, check_earlier, remove_runs
from gradcam.storage.manifest import Logbook, ManifestWriter, is_of, keep_lines, sort_lines
from gradcam.storage.output import Disk, DiskReader
from gradcam.storage.records import Record
from gradcam.storage.run_file import Run, ShardFiles, find_shard_files, list_manifests, list_pieces


class OutputFolder:
    """A folder with `manifest.jsonl`, `run.json` and `log.jsonl`, open for one run, or for one shard of it: `OpenRun`.
    `temporary`: a folder in it, for files that are not whole yet."""

    def __init__(self, path: Path, part: ShardFiles, release: Callable[[], None], notes: Sequence[str]) -> None:
        self.path, self.temporary, self.manifest = path, path / part.temporary, str(path / part.manifest)
        self.done, self.failed = frozenset[str](), frozenset[str]()
        self.recorded, self.notes, self._is_closed = 0, notes, False
        self._run, self._part, self._release = path / part.run, part, release
        self._untried: dict[str, Record] = {}  # of pictures that failed before, and were not tried again yet

    @classmethod
    def open(
        cls,
        path: Path,
        run: Run,
        *,
        mode: Mode = "new",
        shard: Shard | None = None,
        inputs: Iterable[Path] = (),
        stems: Mapping[str, str] | None = None,
    ) -> OutputFolder:
        """Make the folder, if need be, and take it for this run; all that may be in the way is found out here. `inputs`
        are never removed. `stems`: recorded files that are not called so are made again."""
        part = to_shard_files(shard)
        with disk.blaming_disk(path), contextlib.ExitStack() as stack:
            _check_no_file(path)
            path.mkdir(parents=True, exist_ok=True)
            release = _lock(path, part)
            stack.callback(release)
            fields = run.to_fields()
            notes = check_earlier(DiskReader(path), part, fields, mode)
            if mode == "overwrite":  # of a whole run all shards go, of which none may be at work, and the report
                earlier = [part] if part.of else find_shard_files(DiskReader(path).list_names())
                with contextlib.ExitStack() as others:
                    for other in filter(part.__ne__, earlier):
                        others.callback(_lock(path, other))
                    remove_runs(Disk(path), earlier, inputs, report=not part.of)
            _check_own_files(path, part)
            folder = cls(path, part, release, notes)
            folder._start(fields, stack, stems or {})
            stack.pop_all()
        return folder

    def _start(self, fields: dict[str, Any], stack: contextlib.ExitStack, stems: Mapping[str, str]) -> None:
        manifest = self.path / self._part.manifest
        stack.callback(disk.remove_empty, self.temporary)  # Before it is there: a signal may come in between.
        self.temporary.mkdir(exist_ok=True)
        self._sweep()
        # First of all: whatever stops the run, resuming finds the settings of what is in the manifest.
        if self._run.exists():
            fields = run_file.keep_beginning(fields, run_file.read_run(self._run))
        self._contents = run_file.encode_run(fields)
        if not self._run.exists() or self._run.read_bytes() != self._contents:
            write_whole(self._run, self._contents, beside=self.temporary)
        self._join_pieces(manifest)
        if manifest.exists():
            model = fields["model"]["name"]
            self.done = frozenset(keep_lines(manifest, lambda it: self._is_done(it, model, stems), self.temporary))
            self._untried = {name: record for name, record in self._untried.items() if name not in self.done}
            self.failed = frozenset(self._untried)
        self._manifest = ManifestWriter(manifest)
        stack.callback(self._manifest.close)
        self._log = Logbook(self.path / self._part.log)

    def _mend_run(self) -> None:
        if not self._run.exists():
            write_whole(self._run, self._contents, beside=self.temporary)
            warn(f"{self._run}: another program removed this file during the run. gradcam wrote it again.")

    def _join_pieces(self, manifest: Path) -> None:
        """Of a folder that was copied from a store: here a manifest is one file."""
        reader = DiskReader(self.path)
        names = reader.list_names()
        pieces = list_pieces(names, self._part.records)
        if pieces:
            lines = (line for name in list_manifests(names, self._part) for line in reader.read_lines(name))
            write_whole(manifest, lines, beside=self.temporary)
            for name in pieces:
                disk.remove(self.path / name)
            disk.remove_empty(self.path / self._part.records)

    @property
    def place(self) -> Disk:
        return Disk(self.path, self.temporary)

    def append(self, record: Record, files: Mapping[str, bytes] | None = None) -> Record:
        with disk.blaming_disk(self.path), disk.uninterrupted():
            self._mend_run()
            self._manifest.check()
            self._manifest.append(record)
            self._untried.pop(record.image, None)
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
            stack.enter_context(disk.blaming_disk(self.path))
            stack.callback(self._manifest.close)
            self._is_closed = True  # Only now: where a signal came before, it is closed once more.
            self._mend_run()
            for record in () if order else self._untried.values():  # stopped early: they are known to fail
                self._manifest.append(record)
            self._manifest.sync()
            self._sweep()  # what an actor that was killed did not finish, while the run went on
            if self.done and order:
                self._manifest.close()
                sort_lines(self.path / self._part.manifest, order, self.temporary)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_done(self, record: Record, model: str, stems: Mapping[str, str]) -> bool:
        if record.error is not None:
            self._untried[record.image] = record
        paths = [disk.find_inside(self.path, name) for name in record.files]
        return is_of(record, model, stems) and all(path is not None and disk.is_there(path) for path in paths)

    def _sweep(self) -> None:
        for path in self.temporary.glob(UNFINISHED.format("*")):
            disk.remove(path)


def check_folder(path: Path, part: ShardFiles) -> bool:
    """Whether there is an output folder. Raises `OSError`, and `OutputError` for what is in the way of one."""
    _check_no_file(path)
    _check_own_files(path, part)
    return path.exists()


def _check_no_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file, expected a folder for the results; choose another --output")


def _check_own_files(folder: Path, part: ShardFiles) -> None:
    for name in (part.run, part.manifest, part.log):
        disk.check_file(folder / name)


def _lock(folder: Path, part: ShardFiles) -> Callable[[], None]:
    """Keep others out; gives what lets them in again. Raises `OutputError` where another process was first."""
    try:
        return disk.take_lock(folder / part.lock, seconds=0)
    except Timeout:
        what = f" ({part})" if part.of else ""
        raise OutputError(
            f"{disk.show(folder)}: another process is writing to this folder{what}; wait until it ends, or choose another "
            "--output"
        ) from None
