"""Names of files: which ones are pictures, and what results are called."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

WRITE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
READ_SUFFIXES = WRITE_SUFFIXES | {".jpe", ".jfif", ".dib", ".gif", ".mpo", ".jp2", ".avif"}
READ_SUFFIXES |= {".ppm", ".pgm", ".pbm", ".tga", ".ico", ".dcm", ".dicom"}
LONGEST_NAME = 240  # bytes; file systems allow 255, and a copy may need a number
LONGEST_PART = 80  # bytes of a label, or of a layer, in a file name
LONGEST_CHARACTER = 4  # bytes


def overlay_name(
    stem: str,
    method: str,
    *,
    index: int | None = None,
    label: str | None = None,
    layer: str | None = None,
    evidence: str | None = None,
    suffix: str = ".png",
) -> str:
    """`<stem>-<method><suffix>`, with `-<index>-<label>`, `-<layer>` and `-<evidence>` where they are given."""
    parts = [method]
    if index is not None:
        parts.append(str(index))
    if label is not None:
        parts.append(to_plain(label))
    if layer is not None:
        parts.append(to_plain(layer))
    if evidence is not None:
        parts.append(evidence)
    return join_name(stem, "-" + "-".join(parts) + suffix)


def join_name(stem: str, ending: str) -> str:
    """A name with this ending; a stem that is too long for it is cut."""
    return cut(stem, LONGEST_NAME - len(os.fsencode(ending))) + ending


def to_plain(text: str) -> str:
    """Words of letters, digits and dots, joined by underscores: a name that every shell and file system takes."""
    return cut(re.sub(r"[^\w.]+", "_", text).strip("_."), LONGEST_PART) or "_"


def cut(text: str, most: int) -> str:
    """At most so many bytes of it; a character is not cut in two."""
    encoded = os.fsencode(text)
    return text if len(encoded) <= most else encoded[:most].decode(errors="ignore")


class OutputNames:
    """Paths that nothing else in this call writes to or reads from."""

    def __init__(self, folder: Path, inputs: Iterable[Path]) -> None:
        self._folder = folder
        self._taken = {key for path in inputs for key in _keys(path)}

    def claim(self, names: Sequence[str]) -> list[Path]:
        """Paths in the folder for one picture's results; where one is taken, all of them get the same number, from 2.

        Names that are alike get the numbers after it.
        """
        number = next(number for number in count(1) if all(self._is_free(name, number) for name in names))
        return [self._claim_one(name, number) for name in names]

    def _claim_one(self, name: str, first: int) -> Path:
        number = next(number for number in count(first) if self._is_free(name, number))
        path = self._folder / _with_number(name, number)
        self._taken |= _keys(path)
        return path

    def _is_free(self, name: str, number: int) -> bool:
        return not _keys(self._folder / _with_number(name, number)) & self._taken


def _with_number(name: str, number: int) -> str:
    """The name itself for 1."""
    path = Path(name)
    return name if number == 1 else f"{path.stem}-{number}{path.suffix}"


def _keys(path: Path) -> set[str]:
    """What tells whether two paths are one file, also where case does not count and through links."""
    return {os.path.abspath(path).casefold(), os.path.realpath(path).casefold()}


def is_called_after(name: str, stem: str) -> bool:
    """Whether a result of that stem can have this name; of one that was cut that is not known."""
    return name.startswith(f"{stem}-") or len(os.fsencode(name.rpartition("/")[2])) > LONGEST_NAME - LONGEST_CHARACTER
