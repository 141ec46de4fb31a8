"""Whether a list still asks for the classes that an earlier run explained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gradcam.batch.disk import show
from gradcam.batch.items import Item
from gradcam.batch.manifest import read_manifest
from gradcam.batch.parts import find_parts
from gradcam.classifiers import Classifier
from gradcam.errors import OutputError
from gradcam.records import Record


def check_classes(folder: Path, items: Iterable[Item], classifier: Classifier) -> None:
    """Raises `OutputError` where a record in the folder is of another class than the list asks for that picture."""
    wanted = {item.name: item.wanted for item in items}
    has_records = folder.is_dir() and any((folder / part.manifest).is_file() for part in find_parts(folder))
    if not has_records or not any(wanted.values()):
        return  # of no class at all, run.json says enough
    for record in read_manifest(folder):
        if record.model != classifier.name:
            return  # which is refused as well, and says more
        if record.explained and record.image in wanted and not _fits(record, wanted[record.image], classifier):
            entry = record.explained[0]
            raise OutputError(
                f"{show(folder)}: the earlier run explained '{entry.label or entry.index}' in {record.image}, and now the "
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
