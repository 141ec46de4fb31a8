"""The report page: its data, its template, and its files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from gradcam.errors import escape_controls
from gradcam.images.files import is_url
from gradcam.models.labels import name_class
from gradcam.options import count_cores
from gradcam.report.report_folder import ReportFolder, ReportRun, open_report_folder, read_run
from gradcam.report.views import find_stem, name_views, provide_views
from gradcam.storage.clear import PAGE, REPORT, STATIC_FILES, check_page
from gradcam.storage.disk import open_thread_pool
from gradcam.storage.records import Explained, Prediction, Record
from gradcam.storage.run_file import flatten
from gradcam.storage.store import Store
from gradcam.web.render import read_static, render

HAS_IMAGE, HAS_OVERLAY, IS_BLANK = 1, 2, 4  # Bits of the column "has".
# The page lists at most this many predictions, such as boxes, for each image.
MAX_PREDICTIONS = 20
# Each file of details holds at most this many records. Such a file loads in a fraction of a second, and 100,000 images
# need only 200 files.
RECORDS_PER_FILE = 500
STORE_THREADS = 16  # There can be more threads than cores, because the threads mostly wait for the store.
PLAIN_NAME = re.compile(r"[\w.\-/]+", re.ASCII)  # Names that need no quoting in a URL.


class Privacy:
    """Removes local paths from texts, because the page may be shared."""

    def __init__(self, run: ReportRun) -> None:
        replacements = {str(Path.home()) + os.sep: f"~{os.sep}"}
        for place in (run.files.place, run.root or run.files.place):
            replacements |= _shorten(place)
        # Longer paths are replaced first. Otherwise, the path of a parent folder would match inside the paths of its
        # subfolders.
        self._replacements = dict(sorted(replacements.items(), key=lambda pair: -len(pair[0])))

    def clean(self, text: str) -> str:
        """Return the text without the paths of the output folder, the input's root and the user's home folder."""
        for place, replacement in self._replacements.items():
            if len(place) > len(os.sep):
                text = text.replace(place, replacement)
        return escape_controls(text)

    def clean_value(self, value: Any) -> Any:
        """Clean a setting, recursively in lists and dictionaries.

        Absolute paths and URLs are reduced to their last part.
        """
        if isinstance(value, dict):
            return {self.clean_value(str(key)): self.clean_value(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.clean_value(entry) for entry in value]
        if not isinstance(value, str):
            return value
        is_absolute = PurePath(value).is_absolute() or is_url(value)
        return escape_controls(PurePath(value).name) if is_absolute else self.clean(value)


def _shorten(place: Path | Store) -> dict[str, str]:
    """Return replacements that shorten the paths of files in a folder or an object store.

    The path of a file becomes relative to the folder. The path of the folder itself becomes its last part. A folder may
    have two paths, with and without symbolic links.
    """
    forms = {place.url} if isinstance(place, Store) else {os.path.abspath(place), os.path.realpath(place)}
    separator = "/" if isinstance(place, Store) else os.sep
    return {f"{form}{separator}": "" for form in forms} | {form: os.path.basename(form) for form in forms}


def to_url(path: str | None) -> str | None:
    """Return a path relative to the output folder as a URL; None for an absolute path or no path."""
    return quote(os.fsencode(path), safe="/") if path and not path.startswith("/") else None


def to_columns(run: ReportRun, privacy: Privacy) -> dict[str, Any]:
    """Return the data of all images for the page: one list per fact, because a dict per image would be much larger.

    "names", "top", "confidence", "has" and "stems" are lists with one entry per image. "names" has the names of the
    images. "classes" has the index and label of each class under which the page lists an image. If a box, mask or
    sentence has no index, the label replaces the index. "wrong" lists the images whose label differs from the predicted
    class. "top" has the position of each image's first class in "classes", or -1. "confidence" has the confidence of
    the first class, from 0 to 1. "others" maps the position of an image to the positions of its other classes in
    "classes". "has" combines the bits `HAS_IMAGE`, `HAS_OVERLAY` and `IS_BLANK`. "stems" has the URL of the views, 1 if
    the URL follows from the image's name, or 0 if there are no views. "errors" maps the position of an image to its
    error.
    """
    names = [privacy.clean_value(record.image) for record in run.records]
    classes_per_image = [_list_classes(record) for record in run.records]
    counts = Counter(classes[0][:2] for classes in classes_per_image if classes)
    counts.update(dict.fromkeys((class_[:2] for classes in classes_per_image for class_ in classes[1:]), 0))
    positions = {key: i for i, key in enumerate(counts)}
    rows = ((positions[class_[:2]] for class_ in classes) for classes in classes_per_image)
    positions_per_image = [list(dict.fromkeys(row)) for row in rows]
    return {
        "names": names,
        "classes": [[escape_controls(i) if isinstance(i, str) else i, escape_controls(label)] for i, label in counts],
        "top": [row[0] if row else -1 for row in positions_per_image],
        "others": {i: row[1:] for i, row in enumerate(positions_per_image) if row[1:]},
        "confidence": [round(classes[0][2], 4) if classes else 0 for classes in classes_per_image],
        "has": [_to_flags(run.files, record) for record in run.records],
        "stems": [_find_url_stem(record, name) for record, name in zip(run.records, names)],
        "wrong": _list_wrong(run),
        "errors": {i: privacy.clean(record.error) for i, record in enumerate(run.records) if record.error is not None},
    }


def _list_classes(record: Record) -> list[tuple[int | str, str, float]]:
    """Return the index, the label and the confidence of each class under which the page lists an image.

    If the record explains boxes, masks or sentences, these objects count as the classes. Otherwise, the classes are the
    predicted class and the explained classes.
    """
    explained = [entry for entry in record.explained if entry.kind != "class" and entry.on is None]
    if not explained:
        top = [(item.index, name_class(item.index, item.label), item.probability) for item in record.predictions[:1]]
        named = (
            [entry for entry in record.explained if entry.kind == "class" and entry.index is not None] if top else []
        )
        return [*top, *((entry.index, name_class(entry.index, entry.label), 0.0) for entry in named)]  # type: ignore[list-item]  # checked above
    classes = []
    for entry in explained:
        name = entry.title if entry.kind in ("text", "like") else name_class(entry.index, entry.label)
        index = name if entry.index is None else entry.index
        classes.append((index, name, _find_confidence(record, entry)))
    return classes


def _list_wrong(run: ReportRun) -> list[int]:
    """Return the positions of the images whose label is not the predicted class.

    In an input list, an image can have a label. Without `--class`, the explained class is the label, or the predicted
    class if there is no label. If the explained class is not the predicted class, the explained class is therefore the
    label.
    """
    settings = run.facts.get("settings") or {}
    if settings.get("classes") or settings.get("top_k") != 1:
        return []
    pairs = ((i, record.explained, record.predictions) for i, record in enumerate(run.records))
    labelled = ((i, explained[0], top[0]) for i, explained, top in pairs if explained and top)
    return [i for i, entry, top in labelled if entry.kind == "class" and entry.index not in (None, top.index)]


def _find_confidence(record: Record, entry: Explained) -> float:
    number = next((value for value in (entry.number, entry.word, entry.keypoint) if value is not None), None)
    candidates = [] if entry.kind == "missed" else [item for item in record.predictions if item.number == number]
    matches = [item.probability for item in candidates if number is not None or item.index == entry.index]
    return min(max([*matches, entry.score][0], 0.0), 1.0)


def to_details(run: ReportRun, record: Record, privacy: Privacy) -> dict[str, Any]:
    """Return the details of one image, which the page shows when the image is opened."""
    stem = find_stem(record)
    predictions = record.predictions[:MAX_PREDICTIONS]
    details: dict[str, Any] = {}
    details["predictions"] = [[item.index, _name_prediction(item), round(item.probability, 6)] for item in predictions]
    details["explained"] = [_to_entry(run.files, entry, stem, k) for k, entry in enumerate(record.explained)]
    note = privacy.clean(record.note) if record.note else None
    return details | {"note": note, "size": record.size, "region": record.region, "page": to_url(record.page)}


def _name_prediction(prediction: Prediction) -> str:
    name = escape_controls(name_class(prediction.index, prediction.label))
    return name if prediction.number is None else f"{prediction.number} {name}"


def _to_entry(files: ReportFolder, entry: Explained, stem: str | None, k: int) -> dict[str, Any]:
    overlay_view = name_views(stem).overlay(k) if stem else None
    return {
        "index": entry.title if entry.kind != "class" else entry.index,
        "label": escape_controls(entry.title),
        **{name: getattr(entry, name) for name in ("score", "layer", "method", "evidence", "blank")},
        **({} if entry.on is None else {"on": entry.on}),
        "small": to_url(overlay_view) if overlay_view and files.has_file(overlay_view) else None,
        "files": {key.removesuffix("_file"): to_url(path) for key, path in entry.files.items() if to_url(path)},
    }


def _to_flags(files: ReportFolder, record: Record) -> int:
    blank_flag = IS_BLANK if record.explained and all(entry.blank for entry in record.explained) else 0
    stem = find_stem(record)
    if stem is None:
        return blank_flag
    names = name_views(stem)
    image_flag = HAS_IMAGE if files.has_file(names.large) and files.has_file(names.small) else 0
    return blank_flag | image_flag | (HAS_OVERLAY if files.has_file(names.overlay(0)) else 0)


def _find_url_stem(record: Record, name: str) -> str | int:
    if (stem := find_stem(record)) is None:
        return 0
    views = name_views(stem)
    is_as_named = PLAIN_NAME.fullmatch(name) and views.stem == name_views(name.rpartition(".")[0] or name).stem
    return 1 if is_as_named else str(to_url(views.stem))


def write_report(place: Path | Store) -> Path | str:
    """Write `index.html` and `report/` into the output folder of a run, and return the path or URL of `index.html`.

    The page is a static folder: it opens from disk, without server or network, and contains no local paths. Missing
    views (thumbnails and larger images) are drawn from the overlays and the input images. If an input image no longer
    exists, the page shows only the overlays. The same run always gives the same bytes. Raises `OutputError` if the
    folder has no manifest, has an `index.html` that is not a report, or cannot be written to, and `StoreError` for an
    object store.
    """
    with open_report_folder(place) as files:
        run = read_run(files)
        check_page(files.reader)
        with open_thread_pool(count_cores() if isinstance(place, Path) else STORE_THREADS) as pool:
            # Processes are not needed, because decoding releases Python's global lock.
            for _ in pool.map(lambda record: provide_views(files, record, run.root), run.records):
                pass
        privacy = Privacy(run)
        starts = range(0, len(run.records), RECORDS_PER_FILE)
        chunks = (run.records[start : start + RECORDS_PER_FILE] for start in starts)
        details_per_chunk = ([to_details(run, record, privacy) for record in chunk] for chunk in chunks)
        encoded_chunks = [json.dumps(details, allow_nan=False, separators=(",", ":")) for details in details_per_chunk]
        # The folder's name changes with its content, so that an open or half-written page never mixes old and new
        # details.
        details = "details-" + hashlib.sha256("".join(encoded_chunks).encode()).hexdigest()[:12]
        for i, encoded in enumerate(encoded_chunks):
            files.write(f"{REPORT}/{details}/{i}.js", f"gradcam.receive({i}, {encoded});\n".encode())
        for name in STATIC_FILES:
            files.write(f"{REPORT}/{name}", read_static(name).encode())
        data = {"details": f"{REPORT}/{details}", "chunk": RECORDS_PER_FILE, **to_columns(run, privacy)}
        files.write(PAGE, _render(run, data, privacy).encode())
        files.remove_details(details)
    return place / PAGE if isinstance(place, Path) else place.below(PAGE).url


def _render(run: ReportRun, data: dict[str, Any], privacy: Privacy) -> str:
    entries = [entry for record in run.records for entry in record.explained]
    names_by_kind = {"models": [record.model for record in run.records], "layers": [entry.layer for entry in entries]}
    names_by_kind["methods"] = [entry.method for entry in entries]
    place = run.files.place
    title = privacy.clean(place.resolve().name if isinstance(place, Path) else place.name)
    summary = {kind: list(map(privacy.clean_value, dict.fromkeys(names))) for kind, names in names_by_kind.items()}
    counts = {"total": len(run.records), "failures": sum(record.error is not None for record in run.records)}
    facts = _list_facts(run.facts, privacy)
    return render("index.html.j2", title=title, summary=summary, facts=facts, data=data, **counts)


def _list_facts(facts: dict[str, Any], privacy: Privacy) -> list[tuple[str, list[tuple[str, str]]]]:
    hidden_keys = ("root", "schema")  # The root is a local path.
    cleaned = privacy.clean_value({key: value for key, value in facts.items() if key not in hidden_keys})
    top_level = {key: value for key, value in cleaned.items() if not isinstance(value, dict)}
    groups = {"run": top_level, **{key: value for key, value in cleaned.items() if isinstance(value, dict)}}
    rows = ((name, flatten(group, " ")) for name, group in groups.items() if group)
    return [(name, [(key, _format_setting(value)) for key, value in pairs]) for name, pairs in rows]


def _format_setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_format_setting(entry) for entry in value) or "none"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
