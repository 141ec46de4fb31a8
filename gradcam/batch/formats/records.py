"""Open the records of a run (manifest, `run.json` and log), and store the results of user-defined writers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gradcam.batch.formats import Destination, Format, Opening, OpenRun, Writer, convert_errors, is_writer
from gradcam.batch.formats.folder import OutputFolder, check_folder
from gradcam.batch.formats.store_folder import StoreResults, check_store
from gradcam.errors import OutputError, shorten
from gradcam.images.files import is_url
from gradcam.options import import_function
from gradcam.sources.collect import InputListing
from gradcam.sources.contents import InputImage, get_store_url
from gradcam.storage.clear import check_other_shards, check_page
from gradcam.storage.disk import delay_signals
from gradcam.storage.manifest import read_manifest
from gradcam.storage.output import to_reader, translate_output_errors
from gradcam.storage.records import Record
from gradcam.storage.run_file import RunSettings, find_shards, list_manifests
from gradcam.storage.store import Store

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier


def check_records(destination: Destination) -> None:
    """Check the output folder before a model is loaded. Raises `OutputError` or `StoreError` for a problem."""
    place = destination.place
    with translate_output_errors(place):
        if check_store(place) if isinstance(place, Store) else check_folder(place, destination.part):
            check_other_shards(to_reader(place), to_reader(place).list_names(), destination.part, destination.mode)
            if destination.report:
                check_page(to_reader(place))


def open_records(opening: Opening) -> OpenRun:
    """Return the records unchanged, because results in separate files need no other storage."""
    return opening.records


def open_results(
    output_format: Format, destination: Destination, run: RunSettings, listing: InputListing, stems: Mapping[str, str]
) -> OpenRun:
    """Open the results of this run.

    The input images in `listing` are never removed. If this function raises `GradcamError`, nothing stays open.
    """
    options: dict[str, Any] = {"mode": destination.mode, "shard": destination.shard, "stems": stems}
    records: OpenRun
    with contextlib.ExitStack() as stack:
        if isinstance(destination.place, Store):
            urls = [*filter(None, map(get_store_url, listing.items)), *filter(is_url, listing.archives)]
            records = StoreResults.open(destination.place, run, inputs=urls, **options)
            stack.callback(records.close)
        else:
            files = [item.content.path for item in listing.items]
            files += [Path(archive) for archive in listing.archives if not is_url(archive)]
            # Delay signals, because a signal between the next two statements would leave the folder open.
            with delay_signals():
                records = OutputFolder.open(destination.place, run, inputs=filter(None, files), **options)
                stack.callback(records.close)
        opening = Opening(**vars(destination), records=records, run=run, stems=stems)
        with convert_errors(f"The format {output_format.name} cannot be opened", OutputError):
            results = import_function(output_format.open, __package__)(opening)
        if not hasattr(results, "append") and not is_writer(results):
            expected = "an object with write(record, files) and close()"
            raise OutputError(f"The format {output_format.name} returned {shorten(results)}, expected {expected}.")
        stack.pop_all()
    return cast(OpenRun, results) if hasattr(results, "append") else WriterResults(records, results, output_format.name)


class RecordsWrapper:
    """An `OpenRun` that stores its records in `records`, another `OpenRun`.

    `close` calls `end`, and then closes `records`.
    """

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


class WriterResults(RecordsWrapper):
    """An `OpenRun` that passes files to a `Writer`, and stores the record after `Writer.write` has returned."""

    def __init__(self, records: OpenRun, writer: Writer, name: str) -> None:
        super().__init__(records, convert_errors(f"The format {name} cannot be closed", OutputError)(writer.close))
        self._writer, self._name = writer, name

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Write the files, then the record.

        If the writer returns a record, the returned record is stored. Otherwise `record` is stored without file names.
        """
        with convert_errors(f"The format {self._name} cannot write {record.image}", OutputError):
            written = self._writer.write(record, files)
        return self._records.append(written if isinstance(written, Record) else rename_files(record, {}), {})


def rename_files(record: Record, names: Mapping[str, str], *, tar: str | None = None) -> Record:
    """Return the record with its files renamed. Files without a new name are left out."""
    explained = []
    for entry in record.explained:
        renamed: Any = {key: names.get(path) for key, path in entry.files.items()}
        explained.append(replace(entry, **renamed))
    page = None if record.page is None else names.get(record.page)
    return replace(record, explained=tuple(explained), tar=tar, page=page)


def check_recorded_classes(place: Path | Store, items: Iterable[InputImage], classifier: Classifier) -> None:
    """Raise `OutputError` if a recorded image was explained for another class than the input list now requests."""
    requested = {item.name: item.wanted for item in items}
    if not any(requested.values()):
        return  # If the list requests no classes, run.json already identifies the target.
    reader = to_reader(place)
    names = reader.list_names() if isinstance(place, Store) or place.is_dir() else []
    if not any(list_manifests(names, part) for part in find_shards(names)):
        return
    for record in read_manifest(place):
        if record.model != classifier.name:
            return  # A run with a different model is rejected elsewhere, with a better message.
        if not record.explained or record.image not in requested:
            continue
        entry, class_ = record.explained[0], requested[record.image]
        if not _matches_class(record, class_, classifier):
            problem = f"the earlier run explained '{entry.label or entry.index}' in {record.image}"
            change = f"now the list gives {'no class' if class_ is None else repr(class_)}"
            advice = "Give the same list, start again with --overwrite, or choose another --output"
            raise OutputError(f"{reader.show()}: {problem}, but {change}. {advice}")


def _matches_class(record: Record, requested: str | None, classifier: Classifier) -> bool:
    index = record.explained[0].index
    if index is None or (requested is None and record.explained[0].kind != "class"):
        return requested is None  # For functions and other targets, run.json already identifies the target.
    if requested is not None:
        return index == classifier.find_class(requested)
    # Without a requested class, the record must explain the most probable class. Several classes may have the highest
    # probability.
    probabilities = {prediction.index: prediction.probability for prediction in record.predictions}
    lowest = min(probabilities.values(), default=0.0)
    return probabilities.get(index, lowest) >= max(probabilities.values(), default=0.0)
