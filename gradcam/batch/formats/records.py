"""What all formats keep: the records of pictures in a manifest, `run.json`, and a log; and the files of a user's writer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gradcam.batch.formats import Destination, Format, Opening, OpenRun, Writer, is_writer
from gradcam.batch.formats.folder import OutputFolder, check_folder
from gradcam.batch.formats.store import StoreResults, check_store
from gradcam.errors import GradcamError, OutputError, describe_unexpected, shorten
from gradcam.images.files import is_url
from gradcam.options import load_late
from gradcam.sources.contents import Item, find_url
from gradcam.sources.list import Listing
from gradcam.storage.clear import check_page, check_parts
from gradcam.storage.disk import uninterrupted
from gradcam.storage.manifest import read_manifest
from gradcam.storage.output import blaming, to_reader
from gradcam.storage.records import Record
from gradcam.storage.run_file import Run, find_shard_files, list_manifests
from gradcam.storage.store import Store

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier


def check_records(where: Destination) -> None:
    """What can be told of an output folder before a model is loaded. Raises `OutputError`, and `StoreError` of a store."""
    place = where.place
    with blaming(place):
        if check_store(place) if isinstance(place, Store) else check_folder(place, where.part):
            check_parts(to_reader(place), to_reader(place).list_names(), where.part, where.mode)
            if where.report:
                check_page(to_reader(place))


def keep_records(opening: Opening) -> OpenRun:
    """Results that are files of their own need nothing beside their records."""
    return opening.records


def open_results(chosen: Format, where: Destination, run: Run, listing: Listing, stems: Mapping[str, str]) -> OpenRun:
    """Results, open for this run, which removes none of these pictures. Raises `GradcamError`; nothing stays open then."""
    how: dict[str, Any] = {"mode": where.mode, "shard": where.shard, "stems": stems}
    records: OpenRun
    with contextlib.ExitStack() as stack:
        if isinstance(where.place, Store):
            urls = [*filter(None, map(find_url, listing.items)), *filter(is_url, listing.archives)]
            records = StoreResults.open(where.place, run, inputs=urls, **how)
            stack.callback(records.close)
        else:
            files = [item.content.path for item in listing.items] + [
                Path(it) for it in listing.archives if not is_url(it)
            ]
            with uninterrupted():  # Or a signal could come between the opening and the promise to close.
                records = OutputFolder.open(where.place, run, inputs=filter(None, files), **how)
                stack.callback(records.close)
        with _naming(chosen.name, "cannot be opened"):
            found = load_late(chosen.open, __package__)(Opening(**vars(where), records=records, run=run, stems=stems))
        if not hasattr(found, "append") and not is_writer(found):
            raise OutputError(
                f"The format {chosen.name} returned {shorten(found)}, expected an object with write(record, files) and "
                "close()."
            )
        stack.pop_all()
    return cast(OpenRun, found) if hasattr(found, "append") else WrittenResults(records, found, chosen.name)


class ResultsAround:
    """`OpenRun` around others, which keep the records. `end`: called once, before those are closed."""

    place = None

    def __init__(self, records: OpenRun, end: Callable[[], object]) -> None:
        self._records, self._end, self._is_closed = records, end, False
        self.done, self.failed = records.done, records.failed
        self.manifest, self.notes, self.log = records.manifest, records.notes, records.log

    @property
    def recorded(self) -> int:
        return self._records.recorded

    def close(self, order: Sequence[str] = ()) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._end()
        except BaseException:
            self._records.close()
            raise
        self._records.close(order)


class WrittenResults(ResultsAround):
    """`OpenRun` whose files a `Writer` keeps, and whose records others do, as soon as it has."""

    def __init__(self, records: OpenRun, writer: Writer, name: str) -> None:
        super().__init__(records, _naming(name, "cannot be closed")(writer.close))
        self._writer, self._name = writer, name

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Write the files, and then the record, without their names unless the writer gave one that has names."""
        with _naming(self._name, f"cannot write {record.image}"):
            kept = self._writer.write(record, files)
        return self._records.append(kept if isinstance(kept, Record) else rename_files(record, {}), {})


@contextlib.contextmanager
def _naming(name: str, what: str) -> Iterator[None]:
    """Whatever a user's code raises becomes one `OutputError` of one line that names the format."""
    try:
        yield
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:
        raise OutputError(f"The format {name} {what}: {describe_unexpected(error)}") from error


def rename_files(record: Record, names: Mapping[str, str], *, tar: str | None = None) -> Record:
    """The record with other names of its files; those that have none here are left out."""
    explained = []
    for each in record.explained:
        renamed: Any = {kind: names.get(getattr(each, kind)) for kind in ("overlay", "heatmap", "map", "panel")}
        explained.append(replace(each, **renamed))
    page = None if record.page is None else names.get(record.page)
    return replace(record, explained=tuple(explained), tar=tar, page=page)


def check_classes(place: Path | Store, items: Iterable[Item], classifier: Classifier) -> None:
    """Raises `OutputError` where a record in the folder is of another class than the list asks for that picture."""
    wanted = {item.name: item.wanted for item in items}
    if not any(wanted.values()):
        return  # of no class at all, run.json says enough
    reader = to_reader(place)
    names = reader.list_names() if isinstance(place, Store) or place.is_dir() else []
    if not any(list_manifests(names, part) for part in find_shard_files(names)):
        return
    for record in read_manifest(place):
        if record.model != classifier.name:
            return  # which is refused as well, and says more
        if record.explained and record.image in wanted and not _fits(record, wanted[record.image], classifier):
            entry = record.explained[0]
            raise OutputError(
                f"{reader.show()}: the earlier run explained '{entry.label or entry.index}' in {record.image}, but now the "
                f"list gives '{wanted[record.image] or 'the top class'}'. Give the same list, start again with "
                "--overwrite, or choose another --output"
            )


def _fits(record: Record, wanted: str | None, classifier: Classifier) -> bool:
    index = record.explained[0].index
    if index is None or (wanted is None and record.explained[0].kind != "class"):
        return wanted is None  # of a function, or of other things, of which run.json says enough
    if wanted is not None:
        return index == classifier.find_class(wanted)
    probabilities = {each.index: each.probability for each in record.predictions}  # the most probable comes first
    lowest = min(probabilities.values(), default=0.0)
    return probabilities.get(index, lowest) >= max(probabilities.values(), default=0.0)  # several may be alike
