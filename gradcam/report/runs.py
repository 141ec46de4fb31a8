"""What a run left in its folder: the records of its manifests, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcam.batch.output.parts import Part, find_parts, list_manifests
from gradcam.batch.output.shelves import Shelf, to_shelf
from gradcam.errors import OutputError
from gradcam.records import Record
from gradcam.report.files import Files
from gradcam.stores import Store, is_url


@dataclass(frozen=True)
class Run:
    """Records in the order of the input, and the contents of run.json: empty where there is none."""

    files: Files
    records: Sequence[Record]
    facts: dict[str, Any]

    @property
    def root(self) -> Path | Store | None:
        """Where the names of the pictures start from, if that is known."""
        root, place = self.facts.get("root"), self.files.place
        if not isinstance(root, str):
            return None
        if is_url(root):
            return Store(root)
        return place / root if isinstance(place, Path) else Path(root)


def read_run(files: Files) -> Run:
    """The run in a folder: one manifest, or the parts of its shards, whose pictures are then in the order of names.

    Where a picture was done twice, the later record counts. Raises `GradcamError` where there is no manifest, or none that
    can be read, and for results in tars.
    """
    from gradcam.batch.output.manifest import read_manifest

    records = {record.image: record for record in read_manifest(files.place)}
    shelf = to_shelf(files.place)
    tar = next((record.tar for record in records.values() if record.tar is not None), None)
    if tar is not None:
        raise OutputError(
            f"{shelf.show()}: its results lie in tars such as {tar}, which a report cannot show; explain the pictures into "
            "another folder without --output-format webdataset"
        )
    names = shelf.list_names()
    is_whole = bool(list_manifests(names, Part()))
    found = list(records.values()) if is_whole else sorted(records.values(), key=lambda record: record.image)
    return Run(files, found, _read_facts(shelf, names))


def _read_facts(shelf: Shelf, names: Collection[str]) -> dict[str, Any]:
    for part in find_parts(names):
        try:
            facts = json.loads(shelf.read(part.run))
        except (OSError, ValueError, RecursionError, OutputError):  # the page can do without
            continue
        if isinstance(facts, dict):
            return facts
    return {}
