"""What a run writes to, whatever kind it is: the results of pictures, their records in a manifest, and a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from gradcam.storage.output import Place
from gradcam.storage.records import Record

Mode = Literal["new", "resume", "overwrite"]


class Results(Protocol):
    """Open for one run, or for one shard of it.

    `done`: the names of pictures that need not be done again. `failed`: of those that an earlier run could not explain,
    which are tried again. `recorded`: how many records are kept for good since it was
    opened. `manifest`: where they are, for people. `notes`: what a person should know. `place`: where the files of a
    picture go; None where `append` takes them along with the record.
    """

    done: frozenset[str]
    failed: frozenset[str]
    manifest: str
    notes: Sequence[str]

    @property
    def recorded(self) -> int: ...

    @property
    def place(self) -> Place | None: ...

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Add the record of a picture whose files are written, or are these; gives the record as it is kept.

        Raises `OutputError` and `StoreError`; no part of it is there then.
        """

    def log(self, event: str, **details: Any) -> None:
        """Note what happened, with the time; several threads may."""

    def close(self, order: Sequence[str] = ()) -> None:
        """Let go of it; more than once does no harm. What was appended is kept for good then.

        `order`: the names of all pictures, for a manifest whose lines can be brought into it.
        Raises `OutputError` and `StoreError`.
        """
