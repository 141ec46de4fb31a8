"""The image strip of the page: images dropped on the page, and images from folders and from finished batches."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from gradcam.errors import GradcamError, escape_controls
from gradcam.images.read import Pixels, read_image
from gradcam.images.write import encode_image, shrink_to_fit

THUMBNAIL_SIDE = 176  # pixels
MAX_DROPPED_BYTES = 512 * 10**6  # Beyond this size, the oldest dropped images are deleted.
MAX_THUMBNAILS = 2000
MANIFEST = "manifest.jsonl"


@dataclass(frozen=True)
class StripImage:
    """An image in the strip. `source` is the path of the image or, if it was dropped on the page, its encoded bytes."""

    name: str
    source: Path | bytes = field(repr=False)

    def open(self) -> Path | io.BytesIO:
        """Return the path, or a file object with a name, because image readers find the format by the name."""
        if isinstance(self.source, Path):
            return self.source
        file = io.BytesIO(self.source)
        file.name = self.name
        return file


class ImageStrip:
    """The images of the strip by number, and their thumbnails. `read` reads the pixels from a path or file object."""

    def __init__(
        self, files: Iterable[tuple[str, Path]] = (), read: Callable[[Path | io.BytesIO], Pixels] = read_image
    ) -> None:
        self._read = read
        self._entries = {i: StripImage(name, path) for i, (name, path) in enumerate(files)}
        self._next = len(self._entries)
        self._thumbnails: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, name: str, data: bytes) -> int:
        """Add a dropped image, and return its number. Raise `ImageError` if the data is not an image."""
        entry = StripImage(escape_controls(PurePath(name.replace("\\", "/")).name)[:200] or "picture", data)
        thumbnail = self._draw_thumbnail(entry)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._entries[number], self._thumbnails[number] = entry, thumbnail
            dropped = [(i, image.source) for i, image in self._entries.items() if isinstance(image.source, bytes)]
            size = sum(len(source) for _, source in dropped)
            for i, source in dropped[:-1]:
                if size <= MAX_DROPPED_BYTES:
                    break
                size -= len(source)
                del self._entries[i]
                self._thumbnails.pop(i, None)
        return number

    def add_file(self, path: Path) -> int:
        """Add an image file, and return its number. A file that is already in the strip keeps its number."""
        with self._lock:
            for number, entry in self._entries.items():
                if entry.source == path:
                    return number
            number, self._next = self._next, self._next + 1
            self._entries[number] = StripImage(path.name, path)
        return number

    def get(self, number: Any) -> StripImage:
        """Return the image with a number. Raise `GradcamError` if there is no such image."""
        if not isinstance(number, int) or number not in self._entries:
            raise GradcamError("This image is no longer available: drag it onto the page again.")
        return self._entries[number]

    def thumbnail(self, number: Any) -> bytes:
        """Return a thumbnail of the image as JPEG. Raise `GradcamError` if the image cannot be read."""
        entry = self.get(number)
        if number not in self._thumbnails:
            thumbnail = self._draw_thumbnail(entry)
            with self._lock:
                self._thumbnails[number] = thumbnail
                if len(self._thumbnails) > MAX_THUMBNAILS:
                    self._thumbnails.popitem(last=False)
        return self._thumbnails[number]

    def to_data(self) -> list[dict[str, Any]]:
        """Return the numbers and names of all images, as JSON data for the page."""
        with self._lock:
            return [{"id": number, "name": entry.name} for number, entry in self._entries.items()]

    def _draw_thumbnail(self, entry: StripImage) -> bytes:
        return encode_image(shrink_to_fit(self._read(entry.open()), THUMBNAIL_SIDE), ".jpg", 80)


def list_images(places: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return the name and path of each image in files, folders, and output folders of finished batches.

    Raises `GradcamError` if a path does not exist.
    """
    from gradcam.sources.collect import list_inputs

    images: list[tuple[str, Path]] = []
    for place in places:
        if (place / MANIFEST).is_file():
            images += _list_batch(place)
        elif place.is_dir():
            images += [(item.name, place / item.name) for item in list_inputs([place]).items]
        elif os.path.lexists(place):
            images.append((place.name, place))
        else:
            raise GradcamError(f"{place}: there is no such image or folder.")
    return [(escape_controls(name), path) for name, path in images]


def _list_batch(place: Path) -> list[tuple[str, Path]]:
    from gradcam.report.report_folder import ReportFolder, read_run

    run = read_run(ReportFolder(place))
    root = run.root if isinstance(run.root, Path) else None
    paths = [(record.image, Path(record.image) if root is None else root / record.image) for record in run.records]
    existing = [(name, path) for name, path in paths if path.is_file()]
    if not existing:
        problem = f"{place}: the images of this batch were moved or deleted"
        raise GradcamError(f"{problem}. Start gradcam ui with their current folder.")
    return existing
