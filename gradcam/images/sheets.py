"""Many explained pictures on one: columns and rows with their names, and what the colours mean."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gradcam.errors import ImageError
from gradcam.images.draw import GAP, colour_bar, scale
from gradcam.images.read import Pixels
from gradcam.options import check_count

MARGIN = 16  # pixels
TEXT, NAME = 17, 18  # the letters' size; Pillow's font has no bold, so that columns' names are a little larger
LINE = 26  # a line's height
BAR = 260  # the length of the colour bar
INK, WHITE = (25, 25, 25), (255, 255, 255)
LEGENDS = {  # what the ends of the colour bar mean, by whether the maps are signed
    False: ("no evidence", "most, in each map by itself"),
    True: ("most against it", "most for it, in each map by itself"),
}


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
    """Rows of pictures under the names of their columns, and a bar of the heatmaps' colours: RGB, uint8 (H,W,3). Each
    picture is scaled to `height` pixels; columns are as wide as the widest picture in them, or as their name. Raises
    `ImageError` for a height that is not a number of pixels."""
    check_count(height, "height", "the height of each picture in pixels, 1 or more.", error=ImageError)
    scaled = [[scale(picture, height) for picture in row.pictures] for row in rows]
    titles = [measure_text(name, NAME) for name in columns]
    widths = [max(title, *(row[column].shape[1] for row in scaled)) for column, title in enumerate(titles)]
    lefts = MARGIN + np.concatenate([[0], np.cumsum(np.array(widths) + GAP)]).astype(int)
    bottom = MARGIN + LINE + len(rows) * (LINE + height + GAP)
    before, after = LEGENDS[signed]
    start = MARGIN + measure_text(before, NAME) + GAP  # of the bar of colours
    longest = max(measure_text(row.title, NAME) for row in rows)
    total = max(int(lefts[-1]) - GAP, MARGIN + longest, start + BAR + GAP + measure_text(after, NAME))
    canvas = Image.new("RGB", (total + MARGIN, bottom + LINE + MARGIN), WHITE)
    draw = ImageDraw.Draw(canvas)
    for name, left in zip(columns, lefts):
        draw.text((int(left), MARGIN), name, INK, find_font(NAME))
    for number, (row, pictures) in enumerate(zip(rows, scaled)):
        top = MARGIN + LINE + number * (LINE + height + GAP)
        draw.text((MARGIN, top), row.title, INK, find_font(TEXT))
        for picture, left in zip(pictures, lefts):
            canvas.paste(Image.fromarray(picture), (int(left), top + LINE))
    draw.text((MARGIN, bottom + GAP), before, INK, find_font(TEXT))
    bar = colour_bar(BAR, LINE - 6, colormap=colormap, signed=signed)
    canvas.paste(Image.fromarray(bar), (start, bottom + GAP))
    draw.text((start + BAR + GAP, bottom + GAP), after, INK, find_font(TEXT))
    return np.array(canvas)


def measure_text(text: str, size: int) -> int:
    """The length of a text in letters of this size, in pixels."""
    return round(find_font(size).getlength(text))


@functools.cache
def find_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The one that Pillow carries."""
    return ImageFont.load_default(size)
