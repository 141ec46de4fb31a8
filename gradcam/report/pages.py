"""The page: its data, the template, and the files that it is made of."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from gradcam.errors import printable
from gradcam.images.files import is_url
from gradcam.models.labels import name_class
from gradcam.options import count_cores
from gradcam.report.files import Files, ReportRun, opening, read_run
from gradcam.report.views import find_stem, name_views, provide_views
from gradcam.storage.clear import PAGE, REPORT, STATIC, check_page
from gradcam.storage.records import Explained, Prediction, Record
from gradcam.storage.store import Store
from gradcam.web.render import read_static, render

PICTURE, OVERLAY, BLANK = 1, 2, 4  # what there is of a picture: bits of the column "has"
LISTED = 20  # of the things that were found in a picture, such as boxes
CHUNK = 500  # records whose details are one file: a part of a second to load, and few files for a hundred thousand
STORE_THREADS = 16  # each waits for the store most of the time
PLAIN = re.compile(r"[\w.\-/]+", re.ASCII)  # names that need no quoting in a URL


class Privacy:
    """Takes the paths of this machine out of texts: the page may be given to others."""

    def __init__(self, run: ReportRun) -> None:
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
    forms = {os.path.abspath(place), os.path.realpath(place)}
    return {f"{form}{os.sep}": "" for form in forms} | {form: os.path.basename(form) for form in forms}


def to_url(path: str | None) -> str | None:
    """A path relative to the output folder as a URL; None for none, and for one that is not relative."""
    return quote(os.fsencode(path), safe="/") if path and not path.startswith("/") else None


def to_columns(run: ReportRun, privacy: Privacy) -> dict[str, Any]:
    """What the page holds of all pictures: a list for each fact, since ten thousand names of keys would be the most of
    it. "names"; "classes": index and label of those that are predicted, or of the boxes, masks and sentences that are
    explained, by their label where they have no index; "top": a position in there, -1 for none; "others": positions of what
    else a picture has, by its own; "confidence": of the top class, 0 to 1; "has": bits; "stems": URL of the views, where it
    is not 1: as the name says; "errors": by position."""
    names = [privacy.clean_value(record.image) for record in run.records]
    things = [_list_things(record) for record in run.records]
    counts = Counter(each[0][:2] for each in things if each)
    counts.update(dict.fromkeys((thing[:2] for each in things for thing in each[1:]), 0))
    places = {key: i for i, key in enumerate(counts)}
    own = [list(dict.fromkeys(places[thing[:2]] for thing in each)) for each in things]
    return {
        "names": names,
        "classes": [[printable(it) if isinstance(it, str) else it, printable(label)] for it, label in counts],
        "top": [each[0] if each else -1 for each in own],
        "others": {i: each[1:] for i, each in enumerate(own) if each[1:]},
        "confidence": [round(each[0][2], 4) if each else 0 for each in things],
        "has": [_find(run.files, record) for record in run.records],
        "stems": [_stem(record, name) for record, name in zip(run.records, names)],
        "errors": {i: privacy.clean(record.error) for i, record in enumerate(run.records) if record.error is not None},
    }


def _list_things(record: Record) -> list[tuple[int | str, str, float]]:
    """What a picture is found by: its top class; or what was explained in it, where that is more than a class, with how
    sure the model is of it."""
    explained = [entry for entry in record.explained if entry.kind != "class" and entry.on is None]
    if not explained:
        tops = record.predictions[:1]
        return [(top.index, name_class(top.index, top.label), top.probability) for top in tops]
    return [(*_name_thing(entry), _find_share(record, entry)) for entry in explained]


def _name_thing(entry: Explained) -> tuple[int | str, str]:
    name = entry.title if entry.kind in ("text", "like") else name_class(entry.index, entry.label)
    return name if entry.index is None else entry.index, name


def _find_share(record: Record, entry: Explained) -> float:
    number = next((it for it in (entry.number, entry.word, entry.keypoint) if it is not None), None)
    alike = [it for it in record.predictions if it.number == number and (number is not None or it.index == entry.index)]
    share = alike[0].probability if alike and entry.kind != "missed" else entry.score
    return min(max(share, 0.0), 1.0)


def to_details(run: ReportRun, record: Record, privacy: Privacy) -> dict[str, Any]:
    """What the page shows of one picture that is looked at."""
    stem = find_stem(record)
    predictions = ((it.index, printable(_name_found(it)), it.probability) for it in record.predictions[:LISTED])
    return {
        "predictions": [[index, name, round(probability, 6)] for index, name, probability in predictions],
        "explained": [_to_entry(run.files, entry, stem, k) for k, entry in enumerate(record.explained)],
        "note": privacy.clean(record.note) if record.note else None,
        "size": record.size,
        "region": record.region,
        "page": to_url(record.page),
    }


def _name_found(found: Prediction) -> str:
    name = name_class(found.index, found.label)
    return name if found.number is None else f"{found.number} {name}"


def _to_entry(files: Files, entry: Explained, stem: str | None, k: int) -> dict[str, Any]:
    small = name_views(stem).overlay(k) if stem else None
    results = {"overlay": entry.overlay, "heatmap": entry.heatmap, "map": entry.map, "panel": entry.panel}
    return {
        "index": entry.title if entry.kind != "class" else entry.index,
        "label": printable(entry.title),
        "score": entry.score,
        "layer": entry.layer,
        "method": entry.method,
        "evidence": entry.evidence,
        "blank": entry.blank,
        **({} if entry.on is None else {"on": entry.on}),
        "small": to_url(small) if small and files.is_there(small) else None,
        "files": {kind: to_url(path) for kind, path in results.items() if to_url(path)},
    }


def _find(files: Files, record: Record) -> int:
    blank = BLANK if record.explained and all(entry.blank for entry in record.explained) else 0
    stem = find_stem(record)
    if stem is None:
        return blank
    names = name_views(stem)
    picture = PICTURE if files.is_there(names.large) and files.is_there(names.small) else 0
    return blank | picture | (OVERLAY if files.is_there(names.overlay(0)) else 0)


def _stem(record: Record, name: str) -> str | int:
    if (stem := find_stem(record)) is None:
        return 0
    views = name_views(stem)
    is_as_named = PLAIN.fullmatch(name) and views.stem == name_views(name.rpartition(".")[0] or name).stem
    return 1 if is_as_named else str(to_url(views.stem))


def write_report(place: Path | Store) -> Path | str:
    """Write `index.html` and `report/` into the output folder of a run, and give the path, or the URL, of `index.html`.
    The page is of one static folder: it opens from disk, without a server and without the network, and no path of this
    machine is in it. Views that are missing are made from the overlays, and from the input's pictures where they are
    still to be found; without them the page shows the overlays alone. The same run gives the same bytes. Raises
    `OutputError` where the folder holds no manifest, or an `index.html` that is no report, or cannot be written to; and
    `StoreError` of a store."""
    with opening(place) as files:
        run = read_run(files)
        check_page(files.reader)
        with ThreadPoolExecutor(count_cores() if isinstance(place, Path) else STORE_THREADS) as pool:
            # Decoding leaves Python's lock alone.
            for _ in pool.map(lambda record: provide_views(files, record, run.root), run.records):
                pass
        privacy = Privacy(run)
        starts = range(0, len(run.records), CHUNK)
        cut = (run.records[start : start + CHUNK] for start in starts)
        shown = ([to_details(run, record, privacy) for record in piece] for piece in cut)
        pieces = [json.dumps(details, allow_nan=False, separators=(",", ":")) for details in shown]
        # Another name for other details: a page that is open, or was not written to its end, never mixes them up.
        details = "details-" + hashlib.sha256("".join(pieces).encode()).hexdigest()[:12]
        for i, piece in enumerate(pieces):
            files.write(f"{REPORT}/{details}/{i}.js", f"gradcam.receive({i}, {piece});\n".encode())
        for name in STATIC:
            files.write(f"{REPORT}/{name}", read_static(name).encode())
        data = {"details": f"{REPORT}/{details}", "chunk": CHUNK, **to_columns(run, privacy)}
        files.write(PAGE, _render(run, data, privacy).encode())
        files.remove_details(details)
    return place / PAGE if isinstance(place, Path) else place.below(PAGE).url


def _render(run: ReportRun, data: dict[str, Any], privacy: Privacy) -> str:
    entries = [entry for record in run.records for entry in record.explained]
    found = {"models": [record.model for record in run.records], "layers": [entry.layer for entry in entries]}
    found["methods"] = [entry.method for entry in entries]
    place = run.files.place
    return render(
        "index.html.j2",
        title=privacy.clean(place.resolve().name if isinstance(place, Path) else place.name),
        summary={key: [privacy.clean_value(name) for name in dict.fromkeys(names)] for key, names in found.items()},
        total=len(run.records),
        failures=sum(record.error is not None for record in run.records),
        facts=_list_facts(run.facts, privacy),
        data=data,
    )


def _list_facts(facts: dict[str, Any], privacy: Privacy) -> list[tuple[str, list[tuple[str, str]]]]:
    hidden = ("root", "schema")  # the root is a way through folders
    cleaned = privacy.clean_value({key: value for key, value in facts.items() if key not in hidden})
    alone = {key: value for key, value in cleaned.items() if not isinstance(value, dict)}
    groups = {"run": alone, **{key: value for key, value in cleaned.items() if isinstance(value, dict)}}
    return [(name, list(_flatten(group))) for name, group in groups.items() if group]


def _flatten(group: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in group.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key} ")
        else:
            yield prefix + key, _show(value)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_show(entry) for entry in value) or "none"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
