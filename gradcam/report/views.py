"""Views: the thumbnails of the gallery, and the larger image under the slider."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradcam.errors import GradcamError
from gradcam.images.files import MAX_NAME_BYTES
from gradcam.images.read import Pixels
from gradcam.images.write import encode_image, shrink_to_fit
from gradcam.report.report_folder import ReportFolder, read_pixels
from gradcam.storage.clear import REPORT
from gradcam.storage.records import Record
from gradcam.storage.store import Store

VIEWS_FOLDER = f"{REPORT}/views"
THUMBNAIL_PIXELS, LARGE_VIEW_PIXELS = 256, 900  # The maximum length of the longest side.
JPEG_QUALITY = 82
MAX_VIEW_ENDING_BYTES = 12


@dataclass(frozen=True)
class ViewNames:
    """The paths of one image's views, relative to the output folder. Different stems never give the same path."""

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
    """Return the names of an image's views.

    `stem` is relative to the output folder. The image's results are called `<stem>-...`.
    """
    if not _is_inside(stem):
        raise GradcamError(f"'{stem}' is not a path inside the output folder. Use a relative path without '..'.")
    folders, slash, name = stem.rpartition("/")
    encoded = os.fsencode(name)
    if len(encoded) + MAX_VIEW_ENDING_BYTES > MAX_NAME_BYTES:
        stem = folders + slash + hashlib.sha256(encoded).hexdigest()
    return ViewNames(f"{VIEWS_FOLDER}/{stem}")


def find_stem(record: Record) -> str | None:
    """Return the stem of a record's files, derived from their names; None if the record has no files."""
    for entry in record.explained:
        # The stem is followed by "-<method>" and by words without dashes. The stem therefore ends before the last
        # "-<method>".
        named_by_method = (entry.overlay, entry.heatmap, entry.map, entry.mask_file)
        endings = {f"-{entry.method}": named_by_method, "-compare": (entry.panel,)}
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
    """Draw the views of one image, and return them as JPEG bytes by name. Thread-safe.

    `stem` is the beginning of the names of the image's results, relative to the output folder, with "/" between folders.
    `picture` is RGB, uint8 (H,W,3), and `overlays` has one image per result, in the order of the record; None means
    that there is no image. Write the views after the overlays: a view that is older than its overlay counts as out of
    date.
    """
    names = name_views(stem)
    views: list[tuple[str, Pixels]] = []
    if picture is not None:
        large = shrink_to_fit(picture, LARGE_VIEW_PIXELS)
        views += [(names.large, large), (names.small, shrink_to_fit(large, THUMBNAIL_PIXELS))]
    drawn = ((k, overlay) for k, overlay in enumerate(overlays) if overlay is not None)
    views += [(names.overlay(k), shrink_to_fit(overlay, THUMBNAIL_PIXELS)) for k, overlay in drawn]
    return {name: encode_image(view, ".jpg", JPEG_QUALITY) for name, view in views}


def provide_views(files: ReportFolder, record: Record, root: Path | Store | None) -> None:
    """Draw missing or outdated views of a record from the overlays and the input image. Leave out missing files."""
    stem = find_stem(record)
    if stem is None:
        return
    names = name_views(stem)
    sources = [entry.overlay for entry in record.explained]
    image_views_are_current = all(files.is_current(name, sources[0]) for name in (names.large, names.small))
    image = None if image_views_are_current or root is None else read_pixels(root, record.image)
    overlays: list[Pixels | None] = [None] * len(sources)
    for k, source in enumerate(sources):
        if source is not None and not files.is_current(names.overlay(k), source):
            overlays[k] = read_pixels(files.place, source)
    for name, data in draw_views(stem, image, overlays).items():
        files.write_view(name, data)
