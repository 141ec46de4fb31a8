"""What the page is given: short columns for all pictures at once, and details that it fetches as they are looked at."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from gradcam.errors import printable
from gradcam.records import Explained, Record
from gradcam.report.files import Files
from gradcam.report.runs import Run
from gradcam.report.views import find_stem, name_views
from gradcam.stores import Store, is_url

PICTURE, OVERLAY, BLANK = 1, 2, 4  # what there is of a picture: bits of the column "has"
PLAIN = re.compile(r"[\w.\-/]+", re.ASCII)  # names that need no quoting in a URL


class Privacy:
    """Takes the paths of this machine out of texts: the page may be given to others."""

    def __init__(self, run: Run) -> None:
        shown = {str(Path.home()) + os.sep: f"~{os.sep}"}
        for place in (run.files.place, run.root or run.files.place):
            shown |= {f"{place.url}/": "", place.url: place.name} if isinstance(place, Store) else _shorten(place)
        self._shown = dict(sorted(shown.items(), key=lambda pair: -len(pair[0])))  # what lies deeper comes first

    def clean(self, text: str) -> str:
        """The text, without the output folder, the input's root and the user's home."""
        for place, short in self._shown.items():
            if len(place) > len(os.sep):
                text = text.replace(place, short)
        return printable(text)

    def clean_value(self, value: Any) -> Any:
        """A setting: of an absolute path, or a URL, the last part alone, and lists and dictionaries through and through."""
        if isinstance(value, dict):
            return {self.clean_value(str(key)): self.clean_value(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.clean_value(entry) for entry in value]
        if not isinstance(value, str):
            return value
        is_whole = PurePath(value).is_absolute() or is_url(value)
        return printable(PurePath(value).name) if is_whole else self.clean(value)


def _shorten(place: Path) -> dict[str, str]:
    """What is shown in place of a folder's path, and of what leads to something in it."""
    forms = {os.path.abspath(place), os.path.realpath(place)}
    return {f"{form}{os.sep}": "" for form in forms} | {form: os.path.basename(form) for form in forms}


def to_url(path: str | None) -> str | None:
    """A path relative to the output folder as a URL; None for none, and for one that is not relative."""
    if not path or path.startswith("/"):
        return None
    return quote(os.fsencode(path), safe="/")


def to_columns(run: Run, privacy: Privacy) -> dict[str, Any]:
    """What the page holds of all pictures: a list for each fact, since ten thousand names of keys would be the most of it.

    "names"; "classes": index and label of those that are predicted; "top": a position in there, -1 for none;
    "confidence": of the top class, 0 to 1; "has": bits; "stems": URL of the views, where it is not 1: as the name says;
    "errors": by position.
    """
    names = [privacy.clean_value(record.image) for record in run.records]
    tops = [record.predictions[0] if record.predictions else None for record in run.records]
    counts = Counter((top.index, top.label) for top in tops if top)
    places = {key: i for i, key in enumerate(counts)}
    return {
        "names": names,
        "classes": [[index, _label(index, label)] for index, label in counts],
        "top": [places[top.index, top.label] if top else -1 for top in tops],
        "confidence": [round(top.probability, 4) if top else 0 for top in tops],
        "has": [_find(run.files, record) for record in run.records],
        "stems": [_stem(record, name) for record, name in zip(run.records, names)],
        "errors": {i: privacy.clean(record.error) for i, record in enumerate(run.records) if record.error is not None},
    }


def to_details(run: Run, record: Record, privacy: Privacy) -> dict[str, Any]:
    """What the page shows of one picture that is looked at."""
    stem = find_stem(record)
    return {
        "predictions": [
            [each.index, _label(each.index, each.label), round(each.probability, 6)] for each in record.predictions
        ],
        "explained": [_to_entry(run.files, entry, stem, k) for k, entry in enumerate(record.explained)],
        "note": privacy.clean(record.note) if record.note else None,
        "size": record.size,
        "region": record.region,
    }


def _to_entry(files: Files, entry: Explained, stem: str | None, k: int) -> dict[str, Any]:
    small = name_views(stem).overlay(k) if stem else None
    results = {"overlay": entry.overlay, "heatmap": entry.heatmap, "map": entry.map, "panel": entry.panel}
    return {
        "index": entry.index,
        "label": _label(entry.index, entry.label),
        "score": entry.score,
        "layer": entry.layer,
        "method": entry.method,
        "evidence": entry.evidence,
        "blank": entry.blank,
        "small": to_url(small) if small and files.is_there(small) else None,
        "files": {kind: to_url(path) for kind, path in results.items() if to_url(path)},
    }


def _label(index: int, label: str | None) -> str:
    return f"class {index}" if label is None else printable(label)


def _find(files: Files, record: Record) -> int:
    """What there is of a picture, as bits."""
    blank = BLANK if record.explained and all(entry.blank for entry in record.explained) else 0
    stem = find_stem(record)
    if stem is None:
        return blank
    names = name_views(stem)
    picture = PICTURE if files.is_there(names.large) and files.is_there(names.small) else 0
    return blank | picture | (OVERLAY if files.is_there(names.overlay(0)) else 0)


def _stem(record: Record, name: str) -> str | int:
    stem = find_stem(record)
    if stem is None:
        return 0
    views = name_views(stem)
    is_as_named = PLAIN.fullmatch(name) and views.stem == name_views(_without_suffix(name)).stem
    return 1 if is_as_named else str(to_url(views.stem))


def _without_suffix(name: str) -> str:
    return name.rpartition(".")[0] or name


def cut(records: Sequence[Record], size: int) -> list[Sequence[Record]]:
    """Records in pieces of so many."""
    return [records[start : start + size] for start in range(0, len(records), size)]
