"""Whether a list still asks for the classes that an earlier run explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gradcam.batch.formats.base import Mode, Results
from gradcam.batch.formats.folder import OutputFolder, check_folder
from gradcam.batch.formats.store import StoreResults, check_store
from gradcam.errors import OutputError
from gradcam.images.files import is_url
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import Item, find_url
from gradcam.sources.list import Listing
from gradcam.sources.shards import Shard
from gradcam.storage.manifest import read_manifest
from gradcam.storage.output import to_shelf
from gradcam.storage.records import Record
from gradcam.storage.run_file import Run, find_parts, list_manifests
from gradcam.storage.store import Store


def check_classes(folder: Path | Store, items: Iterable[Item], classifier: Classifier) -> None:
    """Raises `OutputError` where a record in the folder is of another class than the list asks for that picture."""
    wanted = {item.name: item.wanted for item in items}
    if not any(wanted.values()):
        return  # of no class at all, run.json says enough
    shelf = to_shelf(folder)
    names = shelf.list_names() if isinstance(folder, Store) or folder.is_dir() else []
    if not any(list_manifests(names, part) for part in find_parts(names)):
        return
    for record in read_manifest(folder):
        if record.model != classifier.name:
            return  # which is refused as well, and says more
        if record.explained and record.image in wanted and not _fits(record, wanted[record.image], classifier):
            entry = record.explained[0]
            raise OutputError(
                f"{shelf.show()}: the earlier run explained '{entry.label or entry.index}' in {record.image}, and now the "
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


def check_output(place: Path | Store, mode: Mode, shard: Shard | None = None, *, report: bool = False) -> None:
    """What can be told before a model is loaded. Raises `OutputError`, and `StoreError` of a store."""
    if isinstance(place, Store):
        check_store(place, mode, shard, report=report)
    else:
        check_folder(place, mode, shard, report=report)


def open_results(
    place: Path | Store,
    run: Run,
    listing: Listing,
    *,
    mode: Mode,
    shard: Shard | None,
    stems: Mapping[str, str] | None = None,
) -> Results:
    """Results there, open for this run. `listing`: the pictures, of which none is removed.

    `stems`: as of `OutputFolder.open`. Raises as `check_output`.
    """
    if isinstance(place, Store):
        urls = [*filter(None, map(find_url, listing.items)), *filter(is_url, listing.archives)]
        return StoreResults.open(place, run, mode=mode, shard=shard, inputs=urls, stems=stems)
    files = [item.content.path for item in listing.items] + [Path(it) for it in listing.archives if not is_url(it)]
    return OutputFolder.open(place, run, mode=mode, shard=shard, inputs=filter(None, files), stems=stems)
