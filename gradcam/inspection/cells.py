"""One channel's map as a square of colours: sharp rectangles, one for each value, and what has no value stands out."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.drawing import colours_of, find_colormap
from gradcam.images import Pixels
from gradcam.opencv import cv2

# Looked at on photographs. Zero is black in both kinds, so that a dead channel looks alike everywhere. Of those for signed
# values, white at zero makes sparse maps pale, and grey without hues hides the sign.
ABOVE = ((0, 0, 0), (110, 40, 25), (200, 90, 40), (245, 170, 80), (255, 245, 215))
BELOW = ((0, 0, 0), (25, 60, 110), (50, 130, 190), (140, 210, 240), (235, 250, 255))
MARKER = (255, 0, 255)  # magenta, which neither these nor the usual colour maps have: NaN and infinity
PERCENTILE = 99


def find_largest(values: NDArray[Any]) -> float:
    """The value that gets the last colour: the 99th percentile of the absolute values that are neither zero nor infinite.

    So a few peaks do not leave the rest in the dark. It is one of the values: the largest of up to a hundred. 0 of none.
    """
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    return float(np.percentile(magnitudes, PERCENTILE, method="higher")) if magnitudes.size else 0.0


def find_sides(grid: Sequence[int], size: int) -> tuple[int, int]:
    """The height and width in pixels of the cell of a map (h,w), whose longer side is `size` pixels."""
    height, width = (max(1, round(side * size / max(grid))) for side in grid)
    return height, width


def draw_cell(values: NDArray[np.float64], size: int, *, largest: float, signed: bool, colormap: str) -> Pixels:
    """A map (h,w) in colour, its longer side of `size` pixels: RGB, uint8.

    Zero has the first colour, `largest` and what is above it the last one, see `find_colours`; NaN and infinity are
    magenta. Of a smaller map each value is a sharp rectangle; a larger one is shrunk by the mean, before it is coloured.
    """
    longest = max(values.shape)
    rows, columns = find_sides(values.shape, size)
    shares = (values / (largest or 1.0)).astype(np.float32)
    colours = find_colours(colormap, signed=signed)
    if longest > size:
        return _paint(
            np.asarray(cv2.resize(shares, (columns, rows), interpolation=cv2.INTER_AREA), np.float32), colours
        )
    whole = math.ceil(size / longest)  # enlarged by whole pixels, and shrunk a little from there: no edge is jagged
    enlarged = _paint(shares, colours).repeat(whole, 0).repeat(whole, 1)
    return np.asarray(cv2.resize(enlarged, (columns, rows), interpolation=cv2.INTER_AREA), np.uint8)


def draw_bar(width: int, height: int, *, signed: bool, colormap: str) -> Pixels:
    """The colours from zero, or from the most negative, to the largest value: RGB, uint8 (height,width,3)."""
    shares = np.linspace(-1 if signed else 0, 1, width, dtype=np.float32)
    return _paint(np.tile(shares, (height, 1)), find_colours(colormap, signed=signed))


@functools.cache
def find_colours(colormap: str, *, signed: bool) -> NDArray[np.uint8]:
    """The colours of shares from 0 to 1, RGB (256,3); signed from -1 to 1, (511,3), with zero in the middle.

    Signed: black at zero, through orange to white above, and through blue to white below, whatever the colour map.
    Raises `GradcamError` for an unknown one.
    """
    if not signed:
        return colours_of(find_colormap(colormap)).astype(np.uint8)
    return np.concatenate([_blend(BELOW)[:0:-1], _blend(ABOVE)])


def _blend(stops: tuple[tuple[int, int, int], ...]) -> NDArray[np.uint8]:
    """256 colours through these, at equal distances."""
    places = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(places, range(len(stops)), channel) for channel in zip(*stops)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def _paint(shares: NDArray[np.float32], colours: NDArray[np.uint8]) -> Pixels:
    """Shares of the largest value in the colours that are theirs, (h,w,3)."""
    is_finite = np.isfinite(shares)
    levels = np.rint(np.clip(np.where(is_finite, shares, 0), -1, 1) * 255).astype(np.int64)
    zero = len(colours) - 256
    painted = colours[np.maximum(levels + zero, 0)]
    painted[~is_finite] = MARKER
    return painted
