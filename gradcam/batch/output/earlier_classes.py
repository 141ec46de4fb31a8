"""Whether a list still asks for the classes that an earlier run explained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gradcam.batch.items import Item
from gradcam.batch.output.manifest import read_manifest
from gradcam.batch.output.parts import find_parts, list_manifests
from gradcam.batch.output.shelves import to_shelf
from gradcam.classifiers import Classifier
from gradcam.errors import OutputError
from gradcam.records import Record
from gradcam.stores import Store


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
