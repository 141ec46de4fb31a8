"""What a format of results is: a name, and functions that check and open the place for them; and the table of formats."""

# No torch, and nothing of storage, is imported here: the shell reads its choices from the table before all work.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradcam import plugins
from gradcam.errors import GradcamError, describe_unexpected, shorten
from gradcam.options import load_late

if TYPE_CHECKING:
    from gradcam.sources.shards import Shard
    from gradcam.storage.clear import Mode
    from gradcam.storage.output import ResultWriter
    from gradcam.storage.records import Record
    from gradcam.storage.run_file import Run, ShardFiles
    from gradcam.storage.store import Store


class OpenRun(Protocol):
    """Open for one run, or for one shard of it. `done`: the names of pictures that need not be done again. `failed`: of
    those that an earlier run could not explain, which are tried again. `recorded`: how many records are kept for good
    since it was opened. `manifest`: where they are, for people. `notes`: what a person should know. `place`: where the
    files of a picture go; None where `append` takes them along with the record."""

    done: frozenset[str]
    failed: frozenset[str]
    manifest: str
    notes: Sequence[str]

    @property
    def recorded(self) -> int: ...

    @property
    def place(self) -> ResultWriter | None: ...

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Add the record of a picture whose files are written, or are these; gives the record as it is kept. Raises
        `OutputError` and `StoreError`; no part of it is there then."""

    def log(self, event: str, **details: Any) -> None:
        """Note what happened, with the time; several threads may."""

    def close(self, order: Sequence[str] = ()) -> None:
        """Let go of it; more than once does no harm. What was appended is kept for good then. `order`: the names of all
        pictures, for a manifest whose lines can be brought into it. Raises `OutputError` and `StoreError`."""


class Writer(Protocol):
    """What a user's format opens: it gets the files of one picture after another, in the pictures' order, in one thread."""

    def write(self, record: Record, files: Mapping[str, bytes]) -> object:
        """Keep these files, by their names, which may have folders; when this returns, the picture counts as done. Of a
        picture that failed there are no files, and `record.error` says why. A `Record` that this gives is kept in place
        of this one without names of files; those that it names must be in the output folder, or all is done again."""

    def close(self) -> object:
        """Bring it to its end; called once, also where the run is stopped."""


@dataclass(frozen=True)
class Destination:
    """Where results go, for which shard, and what is done about an earlier run. `report`: whether one is to be written."""

    place: Path | Store
    mode: Mode = "new"
    shard: Shard | None = None
    report: bool = False

    @property
    def part(self) -> ShardFiles:
        from gradcam.sources.shards import to_shard_files

        return to_shard_files(self.shard)


@dataclass(frozen=True, kw_only=True)
class Opening(Destination):
    """What a format begins with, when a run begins. `records`: the manifest, `run.json` and the log, open already.
    `run`: what `run.json` says. `stems`: what the names of each picture's results begin with, by the picture's name."""

    records: OpenRun
    run: Run
    stems: Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """An output format: one way to store results.

    Parameters
    ----------
    name, summary
        The name on the command line, and a few words on what the format writes.
    open
        A function (or class) from an `Opening` to an `OpenRun`, or to a `Writer`, which is simpler: an object with
        `write(record, files)` and `close()`. The records of a `Writer` are stored in `manifest.jsonl`, so that runs can
        be resumed. gradcam's own formats give "module:name" in this package, which is imported on first use.
    check
        A function of a `Destination` that raises `GradcamError` for problems that are known before a model is loaded.
    has_files
        Whether each result is a separate file in the output folder. A report can show these files, and their names must
        be unique.

    Raises
    ------
    GradcamError
        For a name that is not a string, and for functions that are not callable.

    Examples
    --------
    >>> class Flat:
    ...     def __init__(self, opening):
    ...         self.place = opening.place
    ...     def write(self, record, files):
    ...         for name, data in files.items():
    ...             (self.place / name.replace("/", "-")).write_bytes(data)
    ...     def close(self):
    ...         pass
    >>> Format("flat", "all results in one folder", Flat)
    Format(name='flat', summary='all results in one folder')
    """

    name: str
    summary: str
    open: str | Callable[[Opening], OpenRun | Writer] = field(repr=False)
    check: str | Callable[[Destination], object] = field(default="records:check_records", repr=False)
    has_files: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        functions = all(callable(it) or isinstance(it, str) for it in (self.open, self.check))
        if not isinstance(self.name, str) or not self.name or not functions:
            raise GradcamError(
                f"The format {shorten(self.name)} is incomplete: expected a name, a summary and a function that opens it."
            )

    def check_place(self, where: Destination) -> None:
        """What can be told before a model is loaded. Raises `GradcamError`."""
        try:
            load_late(self.check, __package__)(where)
        except GradcamError:
            raise
        except (Exception, SystemExit) as error:
            raise GradcamError(f"The check of the format {self.name} failed: {describe_unexpected(error)}") from error


def is_writer(found: object) -> bool:
    """Whether it has a writer's two methods."""
    return all(callable(getattr(found, name, None)) for name in ("write", "close"))


FORMATS = {
    each.name: each
    for each in (
        Format("files", "one file per result", "records:keep_records", has_files=True),
        Format("webdataset", "WebDataset shards (.tar)", "webdataset:open_tars", "webdataset:check_tars"),
    )
}


def find_format(name: str) -> Format:
    """The format of that name: of the table, of an installed package, or a `Format` or a `Writer`'s class in
    `FILE.py:NAME`. Raises `GradcamError` for what cannot be imported or is no format, and for a name that is
    another's."""
    if name in FORMATS:
        return FORMATS[name]
    found = plugins.load("formats", name)
    if isinstance(found, type) and is_writer(found):
        found = Format(found.__name__, " ".join((found.__doc__ or "").split()), found)
    if not isinstance(found, Format):
        raise GradcamError(
            f"{name} is {shorten(found)}, expected a gradcam.batch.formats.Format, or a class with write(record, files) and "
            "close()."
        )
    if found.name in FORMATS:
        raise GradcamError(f"{name}: a format named {found.name!r} already exists: choose another name.")
    return found
