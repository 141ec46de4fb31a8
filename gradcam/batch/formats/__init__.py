"""Output formats: each has a name, and functions that check and open the place for the results."""

# This module imports neither torch nor gradcam.storage, because the command line imports this module on every start.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradcam import plugins
from gradcam.errors import GradcamError, describe_unexpected, shorten
from gradcam.options import import_function

if TYPE_CHECKING:
    from gradcam.sources.shards import Shard
    from gradcam.storage.clear import ExistingRunMode
    from gradcam.storage.output import OutputWriter
    from gradcam.storage.records import Record
    from gradcam.storage.run_file import RunSettings, ShardFiles
    from gradcam.storage.store import Store


class OpenRun(Protocol):
    """The results of a run, or of one of its shards, open for writing.

    `done` contains the names of images with a finished result. `failed` contains the names of images that failed in an
    earlier run, and are retried. `manifest` is the path or URL of the records, for messages. `notes` are remarks for
    the user. `recorded` is the number of records that were safely stored since the run was opened. `place` writes the
    files of an image. If `place` is None, `append` receives the files together with the record.
    """

    done: frozenset[str]
    failed: frozenset[str]
    manifest: str
    notes: Sequence[str]

    @property
    def recorded(self) -> int: ...

    @property
    def place(self) -> OutputWriter | None: ...

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Store the record of an image, and its files unless `place` has written them. Return the stored record.

        Raises `OutputError` or `StoreError` if the record cannot be stored.
        """

    def log(self, event: str, **details: Any) -> None:
        """Log an event with the time. Thread-safe."""

    def close(self, order: Sequence[str] = ()) -> None:
        """Store all appended records permanently, and release the output folder. May be called more than once.

        `order` contains the names of all images. If `order` is given, the records are sorted in this order. Raises
        `OutputError` and `StoreError`.
        """


class Writer(Protocol):
    """An object that stores the results of a user-defined format. One thread calls `write` for each image, in order."""

    def write(self, record: Record, files: Mapping[str, bytes]) -> object:
        """Store the files of one image under their names, which may contain folders.

        When this method returns, the image counts as finished. A failed image has no files, and `record.error` gives
        the reason. If this method returns a `Record`, gradcam stores the returned record instead of `record`. All files
        that the returned record names must be in the output folder. If a file is missing, a resumed run explains the
        image again.
        """

    def close(self) -> object:
        """Finish the output. Called once, also if the run is interrupted."""


@dataclass(frozen=True)
class Destination:
    """The output folder of a run, and how to open it.

    `mode` says how to treat an earlier run in the folder. `shard` is None for a run without shards. If `report` is
    True, the run also writes a report.
    """

    place: Path | Store
    mode: ExistingRunMode = "new"
    shard: Shard | None = None
    report: bool = False

    @property
    def part(self) -> ShardFiles:
        from gradcam.sources.shards import to_shard_files

        return to_shard_files(self.shard)


@dataclass(frozen=True, kw_only=True)
class Opening(Destination):
    """The data that a format receives when it is opened for a run.

    `records` holds the open manifest, `run.json` and log. `run` is the content of `run.json`. `stems` maps the name of
    each image to the common beginning of its result names.
    """

    records: OpenRun
    run: RunSettings
    stems: Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """An output format: one way to store results.

    Parameters
    ----------
    name, summary
        The name on the command line, and a few words on what the format writes.
    open
        A function or class that takes an `Opening` and returns an `OpenRun` or a `Writer`. A `Writer` is simpler: it
        has only `write(record, files)` and `close()`, and its records are stored in `manifest.jsonl`, so that runs can
        be resumed. gradcam's own formats give the text "module:name", a function that is imported on first use.
    check
        A function that takes a `Destination`, and raises `GradcamError` for problems that are known before a model is
        loaded.
    has_files
        True if each result is a separate file in the output folder. The names of such files must be unique, and a
        report can show the files.

    Raises
    ------
    GradcamError
        If the name is empty or not a string, or if a function is neither callable nor a string.

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
        has_functions = all(callable(function) or isinstance(function, str) for function in (self.open, self.check))
        if not isinstance(self.name, str) or not self.name or not has_functions:
            expected = "a name, a summary and a function that opens the format"
            raise GradcamError(f"The format {shorten(self.name)} is incomplete: expected {expected}.")

    def check_place(self, destination: Destination) -> None:
        """Check the destination before a model is loaded. Raises `GradcamError` for a problem."""
        with convert_errors(f"The check of the format {self.name} failed", GradcamError):
            import_function(self.check, __package__)(destination)


@contextlib.contextmanager
def convert_errors(problem: str, error_type: type[GradcamError]) -> Iterator[None]:
    """Turn an unexpected error of a user-defined format into an `error_type` with a one-line message."""
    try:
        yield
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:
        raise error_type(f"{problem}: {describe_unexpected(error)}") from error


def is_writer(candidate: object) -> bool:
    """Return True if the object has the methods of a `Writer`."""
    return all(callable(getattr(candidate, name, None)) for name in ("write", "close"))


FORMATS = {
    "files": Format("files", "one file per result", "records:open_records", has_files=True),
    "webdataset": Format("webdataset", "WebDataset shards (.tar)", "webdataset:TarResults", "webdataset:check_tars"),
}


def find_format(name: str) -> Format:
    """Return the format with this name.

    `name` is a key of `FORMATS`, a format of an installed package, or `FILE.py:NAME`, where `NAME` is a `Format` or a
    `Writer` class.

    Raises `GradcamError` if the format cannot be imported, is not a format, or has the name of another format.
    """
    if name in FORMATS:
        return FORMATS[name]
    format_ = plugins.load_plugin("formats", name)
    if isinstance(format_, type) and is_writer(format_):
        format_ = Format(format_.__name__, " ".join((format_.__doc__ or "").split()), format_)
    if not isinstance(format_, Format):
        expected = "a gradcam.batch.formats.Format, or a class with write(record, files) and close()"
        raise GradcamError(f"{name} is {shorten(format_)}, expected {expected}.")
    if format_.name in FORMATS:
        raise GradcamError(f"{name}: a format named {format_.name!r} already exists: choose another name.")
    return format_
