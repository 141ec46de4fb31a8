"""Views: the small pictures that the gallery shows, and the larger plain one under its slider."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradcam.errors import GradcamError
from gradcam.images.files import LONGEST_NAME
from gradcam.images.read import Pixels
from gradcam.images.write import encode_image, fit_view
from gradcam.report.files import Files, read_pixels
from gradcam.storage.clear import REPORT
from gradcam.storage.records import Record
from gradcam.storage.store import Store

FOLDER = f"{REPORT}/views"
SMALL, LARGE = 256, 900  # pixels of the longest side
QUALITY = 82
LONGEST_ENDING = 12  # bytes


@dataclass(frozen=True)
class ViewNames:
    """Where one picture's views lie, relative to the output folder. No two stems share one, as no ending ends another."""

    stem: str

    @property
    def large(self) -> str:
        return f"{self.stem}.large.jpg"

    @property
    def small(self) -> str:
        return f"{self.stem}.small.jpg"

    def overlay(self, k: int) -> str:
        return f"{self.stem}.{k}.jpg"


def name_views(stem: str) -> ViewNames:
    """The names of the views of the picture whose results are called `<stem>-...`; `stem` is relative, with "/"."""
    if not _is_inside(stem):
        raise GradcamError(f"'{stem}' is not a path inside the output folder. Use a relative path without '..'.")
    folders, slash, name = stem.rpartition("/")
    encoded = os.fsencode(name)
    if len(encoded) + LONGEST_ENDING > LONGEST_NAME:
        stem = folders + slash + hashlib.sha256(encoded).hexdigest()
    return ViewNames(f"{FOLDER}/{stem}")


def find_stem(record: Record) -> str | None:
    """What the names of a record's files begin with, read off them; None where nothing was written of it."""
    for entry in record.explained:
        # Behind the stem come the method and words without a dash; the last "-<method>" is therefore the right one.
        endings = {f"-{entry.method}": (entry.overlay, entry.heatmap, entry.map), "-compare": (entry.panel,)}
        for ending, paths in endings.items():
            for path in paths:
                stem = (path or "").rpartition(ending)[0]
                if _is_inside(stem):
                    return stem
    return None


def _is_inside(stem: str) -> bool:
    parts = stem.split("/")
    return parts[0] != "" and parts[-1] not in ("", ".") and ".." not in parts


def draw_views(stem: str, picture: Pixels | None, overlays: Sequence[Pixels | None]) -> dict[str, bytes]:
    """What the gallery shows of one picture, as JPEG files by their names under `report/views`; several threads may at
    once. `stem`: what the names of its results begin with, relative to the output folder, with "/" between folders.
    `picture`: RGB, uint8 (H,W,3); `overlays`: one for each result, in the order of the record; None for what there is
    none of. To be written behind the overlays: a view that is older than its overlay counts as out of date."""
    names = name_views(stem)
    views: list[tuple[str, Pixels]] = []
    if picture is not None:
        large = fit_view(picture, LARGE)
        views += [(names.large, large), (names.small, fit_view(large, SMALL))]
    views += [(names.overlay(k), fit_view(overlay, SMALL)) for k, overlay in enumerate(overlays) if overlay is not None]
    return {name: encode_image(view, ".jpg", QUALITY) for name, view in views}


def provide_views(files: Files, record: Record, root: Path | Store | None) -> None:
    """Make the views of a record that are missing or out of date, from its overlays and its picture, if they are there."""
    stem = find_stem(record)
    if stem is None:
        return
    names = name_views(stem)
    sources = [entry.overlay for entry in record.explained]
    fresh = all(files.is_current(name, sources[0]) for name in (names.large, names.small))
    picture = None if fresh or root is None else read_pixels(root, record.image)
    overlays = [
        None if source is None or files.is_current(names.overlay(k), source) else read_pixels(files.place, source)
        for k, source in enumerate(sources)
    ]
    for name, data in draw_views(stem, picture, overlays).items():
        files.write_view(name, data)
