"""Many explained pictures on one: columns and rows with their names, and what the colours mean."""

from __future__ import annotations

import bisect
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
    False: ("no positive evidence", "strongest in each heatmap"),
    True: ("evidence against", "evidence for, in each heatmap"),
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
    check_count(height, "height", "the height of each image in pixels, 1 or more.", error=ImageError)
    scaled = [[scale(picture, height) for picture in row.pictures] for row in rows]
    titles = [measure_text(name, NAME) for name in columns]
    widths = [max(title, *(row[column].shape[1] for row in scaled)) for column, title in enumerate(titles)]
    lefts = MARGIN + np.concatenate([[0], np.cumsum(np.array(widths) + GAP)]).astype(int)
    bottom = MARGIN + LINE + len(rows) * (LINE + height + GAP)
    legend = draw_legend(colormap=colormap, signed=signed)
    longest = max(measure_text(row.title, NAME) for row in rows)
    total = max(int(lefts[-1]) - GAP, MARGIN + longest, MARGIN + legend.shape[1])
    canvas = Image.new("RGB", (total + MARGIN, bottom + LINE + MARGIN), WHITE)
    draw = ImageDraw.Draw(canvas)
    for name, left in zip(columns, lefts):
        draw.text((int(left), MARGIN), name, INK, find_font(NAME))
    for number, (row, pictures) in enumerate(zip(rows, scaled)):
        top = MARGIN + LINE + number * (LINE + height + GAP)
        draw.text((MARGIN, top), row.title, INK, find_font(TEXT))
        for picture, left in zip(pictures, lefts):
            canvas.paste(Image.fromarray(picture), (int(left), top + LINE))
    canvas.paste(Image.fromarray(legend), (MARGIN, bottom + GAP))
    return np.array(canvas)


def draw_legend(*, colormap: str = "turbo", signed: bool = False) -> Pixels:
    """A bar of the heatmaps' colours between what its ends mean, one line high."""
    before, after = LEGENDS[signed]
    start = measure_text(before, NAME) + GAP
    end = start + BAR + GAP
    canvas = Image.new("RGB", (end + measure_text(after, NAME), LINE), WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((0, 0), before, INK, find_font(TEXT))
    canvas.paste(Image.fromarray(colour_bar(BAR, LINE - 6, colormap=colormap, signed=signed)), (start, 0))
    draw.text((end, 0), after, INK, find_font(TEXT))
    return np.array(canvas)


def measure_text(text: str, size: int) -> int:
    """The length of a text in letters of this size, in pixels."""
    return round(find_font(size).getlength(text))


def fit_text(text: str, width: int, size: int) -> str:
    """As much of a text, in one line, as fits into this width in letters of this size: with an ellipsis where it is cut."""
    text = text[: width + 1]  # no letter is narrower than a pixel
    if measure_text(text, size) <= width:
        return text
    end = bisect.bisect_right(range(len(text)), width, key=lambda end: measure_text(f"{text[:end].rstrip()}…", size))
    return f"{text[: max(0, end - 1)].rstrip()}…"


@functools.cache
def find_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The one that Pillow carries."""
    return ImageFont.load_default(size)
