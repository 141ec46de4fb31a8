"""What a format of results is, and what all formats keep: the records of pictures in a manifest, `run.json`, and a log."""

# No torch is imported here: the shell reads its choices from the table before there is anything to compute.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from gradcam.batch.formats.folder import OutputFolder, check_folder
from gradcam.batch.formats.store import StoreResults, check_store
from gradcam.errors import GradcamError, OutputError, describe_unexpected, shorten
from gradcam.images.files import is_url
from gradcam.sources.contents import Item, find_url
from gradcam.sources.list import Listing
from gradcam.sources.shards import Shard, to_part
from gradcam.storage.clear import Mode, check_page, check_parts
from gradcam.storage.manifest import read_manifest
from gradcam.storage.output import Place, blaming, to_reader
from gradcam.storage.records import Record
from gradcam.storage.run_file import Part, Run, find_parts, list_manifests
from gradcam.storage.store import Store

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier


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


class Writer(Protocol):
    """What a user's format opens: it gets the files of one picture after another, in the pictures' order, in one thread."""

    def write(self, record: Record, files: Mapping[str, bytes]) -> object:
        """Keep these files, by their names, which may have folders; when this returns, the picture counts as done.

        Of a picture that failed there are no files, and `record.error` says why. A `Record` that this gives is kept in
        place of this one without names of files; those that it names must be in the output folder, or all is done again.
        """

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
    def part(self) -> Part:
        """The shard, or the whole run, as its files are named."""
        return to_part(self.shard)


@dataclass(frozen=True, kw_only=True)
class Opening(Destination):
    """What a format begins with, when a run begins.

    `records`: the manifest, `run.json` and the log, open already. `run`: what `run.json` says. `stems`: what the names of
    each picture's results begin with, by the picture's name.
    """

    records: Results
    run: Run
    stems: Mapping[str, str]


def check_records(where: Destination) -> None:
    """What can be told of an output folder before a model is loaded. Raises `OutputError`, and `StoreError` of a store."""
    place = where.place
    with blaming(place):
        is_there = check_store(place) if isinstance(place, Store) else check_folder(place, where.part)
        if is_there:
            check_parts(to_reader(place), where.part, where.mode)
        if is_there and where.report:
            check_page(to_reader(place))


def open_records(where: Destination, run: Run, listing: Listing, stems: Mapping[str, str]) -> Results:
    """The manifest, `run.json` and the log there, open for this run, for results that are files. Raises as `check_records`.

    `listing`: the pictures, of which none is removed.
    """
    how: dict[str, Any] = {"mode": where.mode, "shard": where.shard, "stems": stems}
    if isinstance(where.place, Store):
        urls = [*filter(None, map(find_url, listing.items)), *filter(is_url, listing.archives)]
        return StoreResults.open(where.place, run, inputs=urls, **how)
    files = [item.content.path for item in listing.items] + [Path(it) for it in listing.archives if not is_url(it)]
    return OutputFolder.open(where.place, run, inputs=filter(None, files), **how)


@dataclass(frozen=True)
class Format:
    """One way to keep results.

    Parameters
    ----------
    name, summary
        What it is called in the shell, and what it writes, in a few words.
    open
        From an `Opening` to `Results`, or to a `Writer`, which is simpler: an object with `write(record, files)` and
        `close()`, whose records are kept in `manifest.jsonl`, so that runs can be gone on with. A class may stand here.
    check
        What can be told before a model is loaded: a function of a `Destination` that raises `GradcamError`.
    has_files
        Whether each result is a file of its own in the output folder, which a report can show, and whose name could be
        another's.

    Raises
    ------
    GradcamError
        For a name that is no text, and for what cannot be called.

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
    open: Callable[[Opening], Results | Writer] = field(repr=False)
    check: Callable[[Destination], object] = field(default=check_records, repr=False)
    has_files: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not callable(self.open) or not callable(self.check):
            raise GradcamError(
                f"A format has a name, a summary and a function that opens it, and {shorten(self.name)} has not."
            )

    def begin(self, where: Destination, run: Run, listing: Listing, stems: Mapping[str, str]) -> Results:
        """Results, open for this run. Raises `GradcamError`; nothing stays open then."""
        records = open_records(where, run, listing, stems)
        with contextlib.ExitStack() as stack:
            stack.callback(records.close)
            with _naming(self.name, "cannot be opened"):
                found = self.open(Opening(**vars(where), records=records, run=run, stems=stems))
            if not hasattr(found, "append") and not is_writer(found):
                raise OutputError(
                    f"The format {self.name} opened {shorten(found)}, expected something with write(record, files) and "
                    "close()."
                )
            stack.pop_all()
        return cast(Results, found) if hasattr(found, "append") else WrittenResults(records, found, self.name)


def is_writer(found: object) -> bool:
    """Whether it has a writer's two methods."""
    return all(callable(getattr(found, name, None)) for name in ("write", "close"))


class WrittenResults:
    """`Results` whose files a `Writer` keeps, and whose records others do, as soon as it has."""

    place = None

    def __init__(self, records: Results, writer: Writer, name: str) -> None:
        self._records, self._writer, self._name = records, writer, name
        self._is_closed = False
        self.done, self.failed = records.done, records.failed
        self.manifest, self.notes = records.manifest, records.notes
        self.log = records.log

    @property
    def recorded(self) -> int:
        """How many records were added since it was opened."""
        return self._records.recorded

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Write the files, and then the record, without their names unless the writer gave one that has names."""
        with _naming(self._name, f"cannot write {record.image}"):
            kept = self._writer.write(record, files)
        return self._records.append(kept if isinstance(kept, Record) else rename_files(record, {}), {})

    def close(self, order: Sequence[str] = ()) -> None:
        """Close the writer, and then the records; more than once does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with _naming(self._name, "cannot be closed"):
                self._writer.close()
        except BaseException:
            self._records.close()
            raise
        self._records.close(order)


@contextlib.contextmanager
def _naming(name: str, what: str) -> Iterator[None]:
    """Whatever a user's code raises becomes one `OutputError` of one line that names the format."""
    try:
        yield
    except GradcamError:
        raise
    except Exception as error:
        raise OutputError(f"The format {name} {what}: {describe_unexpected(error)}") from error


def rename_files(record: Record, names: Mapping[str, str], *, tar: str | None = None) -> Record:
    """The record with other names of its files; those that have none here are left out."""
    explained = []
    for each in record.explained:
        renamed: Any = {kind: names.get(getattr(each, kind)) for kind in ("overlay", "heatmap", "map", "panel")}
        explained.append(replace(each, **renamed))
    return replace(record, explained=tuple(explained), tar=tar)


def check_classes(place: Path | Store, items: Iterable[Item], classifier: Classifier) -> None:
    """Raises `OutputError` where a record in the folder is of another class than the list asks for that picture."""
    wanted = {item.name: item.wanted for item in items}
    if not any(wanted.values()):
        return  # of no class at all, run.json says enough
    reader = to_reader(place)
    names = reader.list_names() if isinstance(place, Store) or place.is_dir() else []
    if not any(list_manifests(names, part) for part in find_parts(names)):
        return
    for record in read_manifest(place):
        if record.model != classifier.name:
            return  # which is refused as well, and says more
        if record.explained and record.image in wanted and not _fits(record, wanted[record.image], classifier):
            entry = record.explained[0]
            raise OutputError(
                f"{reader.show()}: the earlier run explained '{entry.label or entry.index}' in {record.image}, and now the "
                f"list asks for '{wanted[record.image] or 'the top class'}'. Give the same list, start anew with "
                "--overwrite, or choose another --output"
            )


def _fits(record: Record, wanted: str | None, classifier: Classifier) -> bool:
    index = record.explained[0].index
    if wanted is not None:
        return index == classifier.find_class(wanted)
    probabilities = {each.index: each.probability for each in record.predictions}  # the most probable comes first
    lowest = min(probabilities.values(), default=0.0)
    return probabilities.get(index, lowest) >= max(probabilities.values(), default=0.0)  # several may be alike
