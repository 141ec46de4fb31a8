"""Draw many explained images on one panel, with row and column titles, and a colour legend."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gradcam.errors import ImageError
from gradcam.images.draw import GAP_PIXELS, draw_colour_bar, scale_to_height
from gradcam.images.read import Pixels
from gradcam.options import check_count

MARGIN = 16  # pixels
# Font sizes. Titles are a little larger, because Pillow's font has no bold style.
TEXT, TITLE_SIZE = 17, 18
LINE_HEIGHT = 26  # height of a line of text
BAR_WIDTH = 260
INK, WHITE = (25, 25, 25), (255, 255, 255)
LEGENDS = {  # Labels for the ends of the colour bar. The key is True for signed maps.
    False: ("no positive evidence", "strongest in each heatmap"),
    True: ("evidence against", "evidence for, in each heatmap"),
}


@dataclass(frozen=True)
class PanelRow:
    """A row of a panel: its title, and an image for each column."""

    title: str
    pictures: Sequence[Pixels]


def draw_panel(
    columns: Sequence[str],
    rows: Sequence[PanelRow],
    *,
    height: int = 224,
    signed: bool = False,
    **look: Any,
) -> Pixels:
    """Draw rows of images under column titles, with a colour bar below: RGB, uint8 (H,W,3).

    Each image is scaled to `height` pixels. A column is as wide as its widest image or its title. Raises
    `ImageError` if the height is not a number of pixels. `look` contains options of `gradcam.overlay`, for the colour bar.
    """
    check_count(height, "height", "the height of each image in pixels, 1 or more.", error=ImageError)
    scaled = [[scale_to_height(image, height) for image in row.pictures] for row in rows]
    titles = [measure_text(name, TITLE_SIZE) for name in columns]
    widths = [max(title, *(row[column].shape[1] for row in scaled)) for column, title in enumerate(titles)]
    x_starts = MARGIN + np.concatenate([[0], np.cumsum(np.array(widths) + GAP_PIXELS)]).astype(int)
    bottom = MARGIN + LINE_HEIGHT + len(rows) * (LINE_HEIGHT + height + GAP_PIXELS)
    legend = draw_legend(signed=signed, **look)
    longest_title = max(measure_text(row.title, TITLE_SIZE) for row in rows)
    total = max(int(x_starts[-1]) - GAP_PIXELS, MARGIN + longest_title, MARGIN + legend.shape[1])
    canvas = Image.new("RGB", (total + MARGIN, bottom + LINE_HEIGHT + MARGIN), WHITE)
    draw = ImageDraw.Draw(canvas)
    for name, x in zip(columns, x_starts):
        draw.text((int(x), MARGIN), name, INK, find_font(TITLE_SIZE))
    for number, (row, images) in enumerate(zip(rows, scaled)):
        top = MARGIN + LINE_HEIGHT + number * (LINE_HEIGHT + height + GAP_PIXELS)
        draw.text((MARGIN, top), row.title, INK, find_font(TEXT))
        for image, x in zip(images, x_starts):
            canvas.paste(Image.fromarray(image), (int(x), top + LINE_HEIGHT))
    canvas.paste(Image.fromarray(legend), (MARGIN, bottom + GAP_PIXELS))
    return np.array(canvas)


def draw_legend(*, signed: bool = False, **look: Any) -> Pixels:
    """Draw a colour bar, as high as a line of text, between two labels that explain the ends of the bar."""
    before, after = LEGENDS[signed]
    start = measure_text(before, TITLE_SIZE) + GAP_PIXELS
    end = start + BAR_WIDTH + GAP_PIXELS
    canvas = Image.new("RGB", (end + measure_text(after, TITLE_SIZE), LINE_HEIGHT), WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((0, 0), before, INK, find_font(TEXT))
    bar = draw_colour_bar(BAR_WIDTH, LINE_HEIGHT - 6, signed=signed, **look)
    canvas.paste(Image.fromarray(bar), (start, 0))
    draw.text((end, 0), after, INK, find_font(TEXT))
    return np.array(canvas)


def measure_text(text: str, size: int) -> int:
    """Return the width of a text in pixels, at this font size."""
    return round(find_font(size).getlength(text))


def fit_text(text: str, width: int, size: int) -> str:
    """Cut a text to this width in pixels, at this font size. A text that is cut ends with an ellipsis."""
    text = text[: width + 1]  # Cut huge texts first, to save time: each letter is at least one pixel wide.
    if measure_text(text, size) <= width:
        return text
    end = bisect.bisect_right(range(len(text)), width, key=lambda end: measure_text(f"{text[:end].rstrip()}…", size))
    return f"{text[: max(0, end - 1)].rstrip()}…"


@functools.cache
def find_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's built-in font at this size."""
    return ImageFont.load_default(size)
