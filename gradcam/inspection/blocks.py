"""One layer on a sheet: its name and shape, the bar that explains its colours, and a labelled cell for each channel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gradcam.choices import CHANNEL_ORDERS, CHANNEL_SCALES
from gradcam.drawing import GAP, find_colormap, stack
from gradcam.errors import GradcamError, ImageError, join_names, shorten
from gradcam.images import Pixels
from gradcam.inspection.cells import draw_bar, draw_cell, find_largest
from gradcam.inspection.channels import measure_strengths, order_channels
from gradcam.panels import INK, WHITE

TITLE, TEXT, LABEL = 18, 14, 12  # the letters' sizes
HEADING = 34  # the height of the line above cells
CAPTION = 18  # the height of what is below a cell
BAR, BAR_HEIGHT = 80, 12
PALE = (105, 105, 105)


@dataclass(frozen=True)
class Look:
    """How layers are drawn, with the names that `draw_activations` has for it. Raises as that does."""

    channels: int
    columns: int
    order: str
    scale: str
    size: int
    colormap: str

    def __post_init__(self) -> None:
        for name in ("channels", "columns", "size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ImageError(f"{name} is {shorten(value)}, expected a whole number, 1 or more.")
        for name, known in (("order", CHANNEL_ORDERS), ("scale", CHANNEL_SCALES)):
            if getattr(self, name) not in known:
                raise GradcamError(f"{name} is {shorten(getattr(self, name))}, expected one of {join_names(known)}.")
        find_colormap(self.colormap)


def draw_block(name: str, maps: NDArray[np.float64], look: Look) -> Pixels:
    """A layer's maps (C,h,w): RGB, uint8 (H,W,3), as wide as its cells, or as its heading."""
    strengths = measure_strengths(maps)
    shown = order_channels(strengths, look.order)[: look.channels]
    signed, largest = bool((maps < 0).any()), find_largest(maps)
    cells = [
        draw_cell(
            maps[channel],
            look.size,
            largest=largest if look.scale == "layer" else find_largest(maps[channel]),
            signed=signed,
            colormap=look.colormap,
        )
        for channel in shown
    ]
    labels = [(str(channel), _to_text(strengths[channel]) if maps[channel].any() else "dead") for channel in shown]
    grid = _lay_out(cells, labels, look.columns)
    bar = draw_bar(BAR, BAR_HEIGHT, signed=signed, colormap=look.colormap)
    heading = _draw_heading(name, _describe(maps, shown, look), bar, _ends(signed, largest, look), grid.shape[1])
    return stack([heading, grid])


def _lay_out(cells: Sequence[Pixels], labels: Sequence[tuple[str, str]], columns: int) -> Pixels:
    """Cells of one size in rows of so many, below each its number, and on the right, if there is room, its strength."""
    height, width = cells[0].shape[:2]
    pitch = max(width, *(measure_text(number, LABEL) for number, _ in labels)) + GAP
    across = min(columns, len(cells))
    rows = -(-len(cells) // across)
    canvas = Image.new("RGB", (across * pitch - GAP, rows * (height + CAPTION + GAP) - GAP), WHITE)
    draw = ImageDraw.Draw(canvas)
    for place, (cell, (number, strength)) in enumerate(zip(cells, labels)):
        left, top = place % across * pitch, place // across * (height + CAPTION + GAP)
        canvas.paste(Image.fromarray(cell), (left, top))
        draw.text((left, top + height + 3), number, INK, find_font(LABEL))
        start = width - measure_text(strength, LABEL)
        if start >= measure_text(number, LABEL) + GAP:
            draw.text((left + start, top + height + 3), strength, PALE, find_font(LABEL))
    return np.array(canvas)


def _draw_heading(name: str, description: str, bar: Pixels, ends: tuple[str, str], width: int) -> Pixels:
    """One line: what it is on the left, and its colours on the right, with what the bar's ends are."""
    before, after = ends
    start = measure_text(name, TITLE) + GAP if name else 0
    middle = start + measure_text(description, TEXT) + 3 * GAP
    legend = measure_text(before, TEXT) + measure_text(after, TEXT) + bar.shape[1] + 2 * GAP
    canvas = Image.new("RGB", (max(width, middle + legend), HEADING), WHITE)
    draw = ImageDraw.Draw(canvas)
    base = HEADING - 4  # the line that letters stand on
    draw.text((0, base), name, INK, find_font(TITLE), anchor="ls")
    draw.text((start, base), description, PALE, find_font(TEXT), anchor="ls")
    left = canvas.width - legend
    draw.text((left, base), before, PALE, find_font(TEXT), anchor="ls")
    left += measure_text(before, TEXT) + GAP
    canvas.paste(Image.fromarray(bar), (left, base - bar.shape[0] + 1))
    draw.text((canvas.width, base), after, PALE, find_font(TEXT), anchor="rs")
    return np.array(canvas)


def _describe(maps: NDArray[np.float64], shown: Sequence[int], look: Look) -> str:
    count, height, width = maps.shape
    parts = [f"{count} channel{'' if count == 1 else 's'} of {height} x {width}"]
    if len(shown) < count:
        parts.append(f"the {'strongest' if look.order == 'strongest' else 'first'} {len(shown)}")
    odd = maps.size - int(np.isfinite(maps).sum())
    if odd:
        parts.append(f"{odd} value{'' if odd == 1 else 's'} NaN or infinite (magenta)")
    return ", ".join(parts)


def _ends(signed: bool, largest: float, look: Look) -> tuple[str, str]:
    """What the first and the last colour stand for."""
    if look.scale == "layer":
        return _to_text(-largest) if signed else "0", _to_text(largest)
    return ("negative", "positive, each channel by itself") if signed else ("0", "largest, each channel by itself")


def _to_text(value: float) -> str:
    """A number in three digits, or in as many as it has before the point."""
    if math.isnan(value):
        return "NaN"
    if value == 0 or 1000 <= abs(value) < 1e6:
        return f"{value or 0:.0f}"
    return f"{value:#.3g}".removesuffix(".")


def measure_text(text: str, size: int) -> int:
    """The length of a text in letters of this size, in pixels."""
    return round(find_font(size).getlength(text))


@functools.cache
def find_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The one that Pillow carries."""
    return ImageFont.load_default(size)
