"""Store the results of a run in an object store.

An object cannot be appended to, so records are written in pieces, and each piece is an object.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradcam.errors import GradcamError, OutputError, warn
from gradcam.sources.shards import Shard, to_shard_files
from gradcam.storage import run_file
from gradcam.storage.clear import ExistingRunMode, check_earlier_run, remove_runs
from gradcam.storage.manifest import PieceWriter, encode_event, find_finished_images, sort_pieces
from gradcam.storage.output import StoreReader, StoreWriter, translate_output_store_errors
from gradcam.storage.records import Record
from gradcam.storage.run_file import RunSettings, ShardFiles, find_shards, list_manifests
from gradcam.storage.store import Store

# A piece of the manifest is written after this time, or after this number of records.
FLUSH_SECONDS, FLUSH_RECORDS = 30.0, 1000


class StoreResults:
    """A folder in an object store, open for one run or one shard. Implements `OpenRun`.

    No lock prevents a second process from opening the same folder. If a process is killed, the records of at most the
    last `FLUSH_SECONDS` are lost.
    """

    def __init__(self, store: Store, part: ShardFiles, notes: Sequence[str]) -> None:
        self.done, self.failed = frozenset[str](), frozenset[str]()
        self._appended, self.notes, self.manifest = 0, notes, f"{store.below(part.records)}"
        self._store, self._part, self._is_closed = store, part, False
        # Recorded images that will be explained again. The value is True if the image failed in an earlier run.
        self._retried: dict[str, bool] = {}

    @classmethod
    def open(
        cls,
        store: Store,
        run: RunSettings,
        *,
        mode: ExistingRunMode = "new",
        shard: Shard | None = None,
        inputs: Iterable[str] = (),
        stems: Mapping[str, str] | None = None,
    ) -> StoreResults:
        """Check the folder for earlier runs, write `run.json`, and return the open run.

        The arguments are those of `OutputFolder.open`, but `inputs` are URLs of images that are never removed.
        """
        part, reader, fields = to_shard_files(shard), StoreReader(store), run.to_fields()
        with translate_output_store_errors(store):
            notes = check_earlier_run(reader, part, fields, mode)
            if mode == "overwrite":
                parts = [part] if part.of else find_shards(reader.list_names())
                remove_runs(StoreWriter(store), parts, inputs, report=not part.of)
            results = cls(store, part, notes)
            results._start(fields, reader, stems or {})
        return results

    def _start(self, fields: dict[str, Any], reader: StoreReader, stems: Mapping[str, str]) -> None:
        names, part = reader.list_names(), self._part
        earlier = run_file.decode_run(reader.read(part.run), reader.show(part.run)) if part.run in names else None
        # Write run.json before the first record. A resumed run then always finds the settings of the recorded images.
        # Also write run.json if it is unchanged, because a missing write permission raises an error here.
        self._contents = run_file.encode_run(fields if earlier is None else run_file.merge_resumed_run(fields, earlier))
        self._store.write(part.run, self._contents)
        self._pieces = list_manifests(names, part)
        if self._pieces:
            sizes, model = self._store.find(), fields["model"]["name"]
            self.done, self._retried = find_finished_images(reader, self._pieces, sizes, model, stems)
            self.failed = frozenset(name for name, is_failed in self._retried.items() if is_failed)
        self._manifest = PieceWriter(self._store, part.records, run_file.find_last_piece_number(names, part.records))
        self._log = PieceWriter(self._store, part.events, run_file.find_last_piece_number(names, part.events))
        self._written = time.monotonic()

    @property
    def place(self) -> StoreWriter:
        return StoreWriter(self._store)

    @property
    def recorded(self) -> int:
        """Return the number of records in written pieces.

        This is the number of added records minus the number of unwritten records. A separate counter would be wrong if a
        signal arrived between a write and the update of the counter.
        """
        return self._appended - len(self._manifest)

    def append(self, record: Record, files: Mapping[str, bytes] | None = None) -> Record:
        """Add a record, which is stored with the next piece of the manifest.

        If the piece cannot be written, its records are kept for the next attempt.
        """
        self._manifest.add(record.to_json().encode() + b"\n")
        self._appended += 1
        self._retried.pop(record.image, None)
        if len(self._manifest) >= FLUSH_RECORDS or time.monotonic() - self._written >= FLUSH_SECONDS:
            with translate_output_store_errors(self._store):
                self._write()
        return record

    def log(self, event: str, **details: Any) -> None:
        self._log.add(encode_event(event, details))

    def close(self, order: Sequence[str] = ()) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with translate_output_store_errors(self._store):
            self._write()
            if self._pieces and order:
                sort_pieces(self._store, self._part, order, self._retried)

    def _write(self) -> None:
        """Write the manifest, then the log. A log that cannot be written does not stop the run."""
        self._manifest.write()
        if not self._store.is_file(self._part.run):  # Another program removed run.json, which a resumed run needs.
            self._store.write(self._part.run, self._contents)
            warn(f"{self._store.below(self._part.run).url}: another program removed this file. gradcam wrote it again.")
        self._written = time.monotonic()
        with contextlib.suppress(OSError, GradcamError):
            self._log.write()


def check_store(store: Store) -> bool:
    """Return True, because a folder in a store always exists. Raises `OutputError` if the URL cannot be a folder."""
    if store.url.endswith("://") and not store.url.startswith("memory"):
        raise OutputError(f"{store}: contains no bucket name, expected a URL like {store}bucket/explained")
    if store.is_file():
        raise OutputError(f"{store.url}: is an object, expected a folder for the results; choose another --output")
    return True
