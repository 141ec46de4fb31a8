"""The strip: pictures that were dropped, those of a folder, those of a finished batch."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from gradcam.errors import GradcamError, printable
from gradcam.images.read import Pixels, read_image
from gradcam.images.write import encode_image, fit_view

SIDE = 176  # pixels of a small view
MOST_BYTES = 512 * 10**6  # of dropped pictures that are kept; the oldest make room
MOST_VIEWS = 2000
MANIFEST = "manifest.jsonl"


@dataclass(frozen=True)
class Entry:
    """A picture in the strip: a file, or the bytes of one that was dropped."""

    name: str
    source: Path | bytes = field(repr=False)

    def open(self) -> Path | io.BytesIO:
        """What is read; a dropped picture by its name."""
        if isinstance(self.source, Path):
            return self.source
        file = io.BytesIO(self.source)
        file.name = self.name
        return file


class Pictures:
    """All of them, by their numbers. `read`: the pixels of what `Entry.open` gives."""

    def __init__(
        self, files: Iterable[tuple[str, Path]] = (), read: Callable[[Path | io.BytesIO], Pixels] = read_image
    ) -> None:
        self._read = read
        self._entries: dict[int, Entry] = {i: Entry(name, path) for i, (name, path) in enumerate(files)}
        self._next = len(self._entries)
        self._views: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, name: str, data: bytes) -> int:
        """Keep a dropped picture. Raises `ImageError` where it is none."""
        entry = Entry(printable(PurePath(name.replace("\\", "/")).name)[:200] or "picture", data)
        view = self._draw_small(entry)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._entries[number], self._views[number] = entry, view
            dropped = [(each, it.source) for each, it in self._entries.items() if isinstance(it.source, bytes)]
            size = sum(len(source) for _, source in dropped)
            for each, source in dropped[:-1]:
                if size <= MOST_BYTES:
                    break
                size -= len(source)
                del self._entries[each]
                self._views.pop(each, None)
        return number

    def get(self, number: Any) -> Entry:
        """The picture of this number. Raises `GradcamError` where there is none."""
        if not isinstance(number, int) or number not in self._entries:
            raise GradcamError("This image is no longer available: drag it onto the page again.")
        return self._entries[number]

    def view(self, number: Any) -> bytes:
        """A small JPEG of it. Raises `GradcamError`."""
        entry = self.get(number)
        if number not in self._views:
            found = self._draw_small(entry)
            with self._lock:
                self._views[number] = found
                if len(self._views) > MOST_VIEWS:
                    self._views.popitem(last=False)
        return self._views[number]

    def to_data(self) -> list[dict[str, Any]]:
        """The strip, as the page is told."""
        with self._lock:
            return [{"id": number, "name": entry.name} for number, entry in self._entries.items()]

    def _draw_small(self, entry: Entry) -> bytes:
        return encode_image(fit_view(self._read(entry.open()), SIDE), ".jpg", 80)


def list_pictures(places: Iterable[Path]) -> list[tuple[str, Path]]:
    """Names and files of pictures: of folders, of what a batch explained, of pictures themselves. Raises `GradcamError`
    where there are none."""
    from gradcam.sources.list import list_inputs

    found: list[tuple[str, Path]] = []
    for place in places:
        if (place / MANIFEST).is_file():
            found += _list_batch(place)
        elif place.is_dir():
            found += [(item.name, place / item.name) for item in list_inputs([place]).items]
        elif os.path.lexists(place):
            found.append((place.name, place))
        else:
            raise GradcamError(f"{place}: no such image or folder.")
    return [(printable(name), path) for name, path in found]


def _list_batch(place: Path) -> list[tuple[str, Path]]:
    from gradcam.report.files import Files, read_run

    run = read_run(Files(place))
    root = run.root if isinstance(run.root, Path) else None
    paths = [(record.image, Path(record.image) if root is None else root / record.image) for record in run.records]
    there = [(name, path) for name, path in paths if path.is_file()]
    if not there:
        raise GradcamError(
            f"{place}: the images of this batch were moved or deleted. Start gradcam ui with their current folder."
        )
    return there
