"""What a run left in its folder: the records of its manifests, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcam.batch.parts import Part, find_parts
from gradcam.errors import OutputError
from gradcam.records import Record


@dataclass(frozen=True)
class Run:
    """Records in the order of the input, and the contents of run.json: empty where there is none."""

    folder: Path
    records: Sequence[Record]
    facts: dict[str, Any]

    @property
    def root(self) -> Path | None:
        """Where the names of the pictures start from, if that is known."""
        root = self.facts.get("root")
        return self.folder / root if isinstance(root, str) else None


def read_run(folder: Path) -> Run:
    """The run in a folder: one manifest, or the parts of its shards, whose pictures are then in the order of names.

    Where a picture was done twice, the later record counts. Raises `GradcamError` where there is no manifest, or none that
    can be read, and for results in tars.
    """
    from gradcam.batch.manifest import read_manifest

    records = {record.image: record for record in read_manifest(folder)}
    tar = next((record.tar for record in records.values() if record.tar is not None), None)
    if tar is not None:
        raise OutputError(
            f"{folder}: its results lie in tars such as {tar}, which a report cannot show; explain the pictures into "
            "another folder without --output-format webdataset"
        )
    is_whole = (folder / Part().manifest).is_file()
    found = list(records.values()) if is_whole else sorted(records.values(), key=lambda record: record.image)
    return Run(folder, found, _read_facts(folder))


def _read_facts(folder: Path) -> dict[str, Any]:
    for part in find_parts(folder):
        try:
            facts = json.loads((folder / part.run).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the page can do without
            continue
        if isinstance(facts, dict):
            return facts
    return {}
