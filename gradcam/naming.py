"""Names of files: which ones are pictures, and what results are called."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

WRITE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
READ_SUFFIXES = WRITE_SUFFIXES | {".jpe", ".jfif", ".dib", ".gif", ".mpo", ".jp2", ".avif"}
READ_SUFFIXES |= {".ppm", ".pgm", ".pbm", ".tga", ".ico"}
LONGEST_NAME = 240  # bytes; file systems allow 255, and a copy may need a number


def overlay_name(
    stem: str, method: str, *, index: int | None = None, label: str | None = None, layer: str | None = None
) -> str:
    """`<stem>-<method>.png`, with `-<index>-<label>` and `-<layer>` where they are given."""
    parts = [method]
    if index is not None:
        parts.append(str(index))
    if label is not None:
        parts.append(_plain(label))
    if layer is not None:
        parts.append(_plain(layer))
    ending = "-" + "-".join(parts) + ".png"
    return _shorten(stem, LONGEST_NAME - len(os.fsencode(ending))) + ending


def _plain(text: str) -> str:
    """Words of letters, digits and dots, joined by underscores: a name that every shell and file system takes."""
    return re.sub(r"[^\w.]+", "_", text).strip("_.")[:80] or "_"


def _shorten(stem: str, most: int) -> str:
    return os.fsencode(stem)[: max(most, 1)].decode(errors="ignore")


class OutputNames:
    """Paths that nothing else in this call writes to or reads from."""

    def __init__(self, folder: Path, inputs: Iterable[Path]) -> None:
        self._folder = folder
        self._taken = {key for path in inputs for key in _keys(path)}

    def claim(self, names: Sequence[str]) -> list[Path]:
        """Paths in the folder for one picture's results; where one is taken, all of them get the same number, from 2."""
        paths = [self._folder / name for name in names]
        number = 2
        while any(_keys(path) & self._taken for path in paths) or len(set(paths)) < len(paths):
            paths = [self._folder / _with_number(name, number) for name in names]
            number += 1
        self._taken |= {key for path in paths for key in _keys(path)}
        return paths


def _with_number(name: str, number: int) -> str:
    path = Path(name)
    return f"{path.stem}-{number}{path.suffix}"


def _keys(path: Path) -> set[str]:
    """What tells whether two paths are one file, also where case does not count and through links."""
    return {os.path.abspath(path).casefold(), os.path.realpath(path).casefold()}
