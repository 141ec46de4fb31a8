"""Activation maps on one picture: for each layer a block of cells, below the picture that the network saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from gradcam import drawing
from gradcam.errors import ImageError
from gradcam.images import PictureLike, Pixels, read_image
from gradcam.inspection.blocks import PALE, TEXT, TITLE, Look, draw_block, find_font, measure_text
from gradcam.inspection.channels import take_maps
from gradcam.panels import INK, LINE, MARGIN, WHITE

MOST_PIXELS = 2**28  # of all cells; of the usual size there is room for 21 thousand
LEGEND = "Each cell is a channel: below it its number, and how strong it is, its mean absolute activation."


def draw_activations(
    activations: Any,
    *,
    image: int = 0,
    channels: int = 64,
    columns: int = 8,
    order: str = "strongest",
    scale: str = "channel",
    size: int = 112,
    colormap: str = "inferno",
    picture: PictureLike | None = None,
    title: str = "",
) -> Pixels:
    """Activation maps as a picture, a block for each layer and in it a cell for each channel: RGB, uint8 (H,W,3).

    `activations`: what `inspection.activations` gave, or any mapping from names to floats (C,h,w), or (N,C,h,w), of which
    `image` is drawn; or one such tensor or array. `channels`: how many of a layer at most, in `order`: "strongest" first,
    by the mean absolute activation, or by "index". `columns`: how many in a row. `size`: of a cell's longer side, in
    pixels; a smaller map is enlarged without blurring, and 112 is a whole multiple of 7, 14, 28 and 56.
    `scale`: where the colours end. "channel": at each channel's own largest value, so that all show their structure;
    "layer": at the largest of the layer, so that strong channels stand out. The largest is the 99th percentile of the
    absolute values that are not zero; what is above gets the last colour, too.
    `colormap`: a name in `drawing.COLORMAPS`, for layers without negative values. Those with are drawn in warm colours
    above zero and in cold ones below, and black at zero. NaN and infinity are magenta; channels with NaN come first.
    `picture`: what the network saw, as `gradcam.read_image` takes it, shown above the blocks, with `title` beside it.

    Raises `ImageError` for activations, a picture or a number of another form and for what becomes too large,
    `GradcamError` for an unknown order, scale or colour map.
    """
    look = Look(channels=channels, columns=columns, order=order, scale=scale, size=size, colormap=colormap)
    named = activations if isinstance(activations, Mapping) else {"": activations}
    if not named:
        raise ImageError("There are no activations: expected those of one layer at least.")
    found = {str(name): take_maps(given, image, str(name)) for name, given in named.items()}
    cells = sum(min(channels, len(maps)) for maps in found.values())
    if cells * size**2 > MOST_PIXELS:
        raise ImageError(
            f"{cells} cells of {size} x {size} pixels are more than the {MOST_PIXELS} pixels that are drawn at most: "
            "choose fewer channels or layers, or smaller cells."
        )
    head = _draw_head(title, None if picture is None else drawing.scale(read_image(picture), size))
    blocks = [draw_block(name, maps, look) for name, maps in found.items()]
    return np.pad(drawing.stack([head, *blocks]), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def _draw_head(title: str, picture: Pixels | None) -> Pixels:
    """The picture, and beside it what this is about and how it is read."""
    left = 0 if picture is None else picture.shape[1] + MARGIN
    lines = [(title, TITLE, INK), (LEGEND, TEXT, PALE)] if title else [(LEGEND, TEXT, PALE)]
    height = max(len(lines) * LINE, 0 if picture is None else picture.shape[0])
    width = left + max(measure_text(text, size) for text, size, _ in lines)
    canvas = Image.new("RGB", (width, height), WHITE)
    draw = ImageDraw.Draw(canvas)
    if picture is not None:
        canvas.paste(Image.fromarray(picture), (0, 0))
    for row, (text, size, colour) in enumerate(lines):
        draw.text((left, (row + 1) * LINE - 7), text, colour, find_font(size), anchor="ls")
    return np.array(canvas)
