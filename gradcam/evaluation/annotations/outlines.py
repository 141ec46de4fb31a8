"""Objects as COCO writes them, polygons and runs of pixels, as masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradcam.evaluation.annotations.markings import Mask


def fill_polygons(polygons: Sequence[Sequence[float]], size: tuple[int, int]) -> Mask:
    """The pixels (H,W) whose centres are inside of one of the polygons, each a list x, y, x, y, ... in pixels.

    Inside is what a line from outside reaches over an odd number of edges. pycocotools draws polygons on a grid five
    times as fine, and differs by pixels of the outline.
    """
    mask = np.zeros(size, dtype=bool)
    for polygon in polygons:
        mask |= _fill_polygon(np.asarray(polygon, dtype=np.float64).reshape(-1, 2), size)
    return mask


def _fill_polygon(points: NDArray[np.float64], size: tuple[int, int]) -> Mask:
    """Each edge turns over all pixels to the right of it: those that are turned an odd number of times are inside."""
    rows, columns = size
    crossings = np.zeros((rows, columns + 1), dtype=np.int64)
    for (x, y), (next_x, next_y) in zip(points, np.roll(points, -1, axis=0)):
        low, high = np.clip(np.ceil(np.array(sorted((y, next_y))) - 0.5), 0, rows).astype(int)
        if low < high:
            down = np.arange(low, high)
            across = x + (down + 0.5 - y) * (next_x - x) / (next_y - y)
            np.add.at(crossings, (down, np.clip(np.ceil(across - 0.5), 0, columns).astype(int)), 1)
    return np.asarray(crossings.cumsum(1)[:, :columns] % 2 == 1)


def fill_runs(counts: Sequence[int], size: tuple[int, int]) -> Mask:
    """The pixels (H,W) of runs: so many outside, so many inside, and so on, column by column from the top left.

    Raises `ValueError` where they are not as many as the picture has pixels.
    """
    rows, columns = size
    lengths = np.asarray(counts, dtype=np.int64)
    if (lengths < 0).any() or lengths.sum() != rows * columns:
        raise ValueError(f"its runs are of {lengths.sum()} pixels, and {columns} x {rows} are {rows * columns}")
    inside = np.arange(len(lengths)) % 2 == 1
    return np.repeat(inside, lengths).reshape(columns, rows).T


def unpack_runs(text: str) -> list[int]:
    """Runs from COCO's compressed form: five bits a character, the lowest first; from the fourth on each is
    what it is more than the one two before.

    Raises `ValueError` for what is no such text.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64:
            raise ValueError(f"its runs hold {character!r}, which no compressed ones do")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # the last character of this number; its highest bit is the sign
            value -= (1 << shift) if code & 16 else 0
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    if shift:
        raise ValueError("its runs end within a number")
    return counts
