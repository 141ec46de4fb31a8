"""Many explained pictures on one: columns and rows with their names, and what the colours mean."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gradcam.errors import ImageError, shorten
from gradcam.images.draw import GAP, colour_bar, scale
from gradcam.images.read import Pixels

MARGIN = 16  # pixels
TEXT = 17  # the letters' size
LINE = 26  # a line's height
BAR = 260  # the length of the colour bar
INK, WHITE = (25, 25, 25), (255, 255, 255)


@dataclass(frozen=True)
class PanelRow:
    """One row: what it is about, and a picture for each column."""

    title: str
    pictures: Sequence[Pixels]


def draw_panel(
    columns: Sequence[str],
    rows: Sequence[PanelRow],
    *,
    height: int = 224,
    colormap: str = "turbo",
    signed: bool = False,
) -> Pixels:
    """Rows of pictures under the names of their columns, and a bar of the heatmaps' colours: RGB, uint8 (H,W,3).

    Each picture is scaled to `height` pixels; columns are as wide as the widest picture in them, or as their name.
    Raises `ImageError` for a height that is not a number of pixels.
    """
    if isinstance(height, bool) or not isinstance(height, int) or height < 1:
        raise ImageError(f"height is {shorten(height)}, expected the height of each picture in pixels, 1 or more.")
    scaled = [[scale(picture, height) for picture in row.pictures] for row in rows]
    widths = [max(_length(name), *(row[column].shape[1] for row in scaled)) for column, name in enumerate(columns)]
    lefts = MARGIN + np.concatenate([[0], np.cumsum(np.array(widths) + GAP)]).astype(int)
    bottom = MARGIN + LINE + len(rows) * (LINE + height + GAP)
    total = max(int(lefts[-1]) - GAP, MARGIN + max(_length(row.title) for row in rows), MARGIN + _legend_width(signed))
    canvas = Image.new("RGB", (total + MARGIN, bottom + LINE + MARGIN), WHITE)
    draw = ImageDraw.Draw(canvas)
    for name, left in zip(columns, lefts):
        draw.text((int(left), MARGIN), name, INK, _font(bold=True))
    for number, (row, pictures) in enumerate(zip(rows, scaled)):
        top = MARGIN + LINE + number * (LINE + height + GAP)
        draw.text((MARGIN, top), row.title, INK, _font())
        for picture, left in zip(pictures, lefts):
            canvas.paste(Image.fromarray(picture), (int(left), top + LINE))
    _draw_legend(canvas, draw, bottom + GAP, colormap, signed)
    return np.array(canvas)


def _draw_legend(canvas: Image.Image, draw: ImageDraw.ImageDraw, top: int, colormap: str, signed: bool) -> None:
    before, after = _legend(signed)
    draw.text((MARGIN, top), before, INK, _font())
    left = MARGIN + _length(before) + GAP
    bar = colour_bar(BAR, LINE - 6, colormap=colormap, signed=signed)
    canvas.paste(Image.fromarray(bar), (left, top))
    draw.text((left + BAR + GAP, top), after, INK, _font())


def _legend(signed: bool) -> tuple[str, str]:
    if signed:
        return "most against it", "most for it, in each map by itself"
    return "no evidence", "most, in each map by itself"


def _legend_width(signed: bool) -> int:
    before, after = _legend(signed)
    return _length(before) + BAR + 2 * GAP + _length(after)


def _length(text: str) -> int:
    return round(_font(bold=True).getlength(text))


@functools.cache
def _font(*, bold: bool = False) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The one that Pillow carries; it has no bold, so that names are a little larger."""
    return ImageFont.load_default(TEXT + 1 if bold else TEXT)
