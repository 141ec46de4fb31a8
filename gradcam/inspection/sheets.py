"""Draw activation maps as one image: the model's input image at the top, then a block of cells for each layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gradcam.errors import ImageError
from gradcam.images.draw import GAP_PIXELS, find_colormap, join_below, list_colours, resize
from gradcam.images.draw import scale_to_height as to_height
from gradcam.images.opencv import cv2
from gradcam.images.read import ImageLike, Pixels, read_image
from gradcam.images.sheets import INK, LINE_HEIGHT, MARGIN, WHITE, find_font, measure_text
from gradcam.inspection.channels import measure_strengths, order_channels, take_maps
from gradcam.options import CHANNEL_ORDERS, CHANNEL_SCALES, accept_old_parameters, check_choice, check_count

# The colours of positive and negative values in maps that have both, chosen by eye on maps of photographs. Zero is
# black, as in the colour map for positive maps, so that dead channels look the same in every layer. If zero were white,
# sparse maps would look pale.
POSITIVE_COLOURS = ((0, 0, 0), (110, 40, 25), (200, 90, 40), (245, 170, 80), (255, 245, 215))
NEGATIVE_COLOURS = ((0, 0, 0), (25, 60, 110), (50, 130, 190), (140, 210, 240), (235, 250, 255))
MARKER = (255, 0, 255)  # The colour of NaN and infinity: magenta, which no usual colour map contains.
PERCENTILE = 99
TITLE, TEXT, LABEL = 18, 14, 12  # Font sizes.
HEADING, CAPTION = 34, 18  # Heights of the line above the cells and of the text below a cell.
BAR, BAR_HEIGHT = 80, 12
CAPTION_COLOUR = (105, 105, 105)
MAX_PIXELS = 2**28  # For all cells together. At the default size, this allows 21,000 cells.
LEGEND = "Each cell is a channel. Below the cell are the channel's number and mean absolute activation."


@accept_old_parameters
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
    input_image: ImageLike | None = None,
    title: str = "",
) -> Pixels:
    """Draw feature maps as an image: a block per layer, and a cell per channel.

    Layers without negative values use the colour map. In layers with negative values, warm colours are positive, cold
    colours are negative, and black is zero. NaN and infinity are magenta. Channels with NaN come first.

    Parameters
    ----------
    activations : mapping of str to Tensor, Tensor or array
        A mapping from names to floats (C,h,w) or (N,C,h,w), such as the result of `inspection.activations`. A single
        tensor or array of such a shape also works.
    image : int, default 0
        The number of the image in the batch.
    channels : int, default 64
        The maximum number of channels per layer.
    columns : int, default 8
        The number of cells in a row.
    order : str, default "strongest"
        The order of the channels. "strongest" sorts them by mean absolute activation, "index" by channel number.
    scale : str, default "channel"
        The colour scale. "channel" scales each channel to its own maximum, which shows its structure; "layer" scales
        all channels to the maximum of the layer, so that strong channels stand out. In both cases, the maximum is the
        99th percentile of the non-zero absolute values.
    size : int, default 112
        The longer side of a cell, in pixels. Smaller maps are enlarged without interpolation.
    colormap : str, default "inferno"
        The name of an OpenCV colour map.
    input_image : image, default None
        The model's input image, to be drawn above the blocks, in any form that `gradcam.read_image` takes.
    title : str, default ""
        The text to the right of `input_image`.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the activations, the image or a number is invalid, or if the result would be too large.
    GradcamError
        If the order, scale or colour map is unknown.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None)
    >>> maps = gradcam.inspection.activations(model, torch.rand(1, 3, 64, 64), ["layer1", "layer4"])
    >>> gradcam.write_image("channels.png", gradcam.inspection.draw_activations(maps, channels=8))
    """
    for name, value in {"channels": channels, "columns": columns, "size": size}.items():
        check_count(value, name, error=ImageError)
    check_choice(order, "order", CHANNEL_ORDERS)
    check_choice(scale, "scale", CHANNEL_SCALES)
    find_colormap(colormap)
    activations_by_layer = activations if isinstance(activations, Mapping) else {"": activations}
    if not activations_by_layer:
        raise ImageError("There are no activations: expected the activations of at least one layer.")
    maps_by_layer = {str(name): take_maps(values, image, str(name)) for name, values in activations_by_layer.items()}
    count = sum(min(channels, len(maps)) for maps in maps_by_layer.values())
    if count * size**2 > MAX_PIXELS:
        problem = f"{count} cells of {size} x {size} pixels exceed the limit of {MAX_PIXELS} pixels"
        raise ImageError(f"{problem}: choose fewer channels or layers, or smaller cells.")
    blocks = [_draw_head(title, None if input_image is None else to_height(read_image(input_image), size))]
    for name, maps in maps_by_layer.items():
        strengths, signed, largest = measure_strengths(maps), bool((maps < 0).any()), find_largest(maps)
        cells, labels = [], []
        for channel in order_channels(strengths, order)[:channels]:
            end = largest if scale == "layer" else find_largest(maps[channel])
            cells.append(draw_cell(maps[channel], size, largest=end, signed=signed, colormap=colormap))
            labels.append((str(channel), _to_text(strengths[channel]) if maps[channel].any() else "dead"))
        grid = _lay_out(cells, labels, columns)
        levels = np.linspace(-1 if signed else 0, 1, BAR, dtype=np.float32)  # The values of the colour bar.
        bar = _paint(np.tile(levels, (BAR_HEIGHT, 1)), find_colours(colormap, signed=signed))
        if scale == "layer":
            ends = _to_text(-largest) if signed else "0", _to_text(largest)
        else:
            start, end_name = ("negative", "positive") if signed else ("0", "largest")
            ends = start, f"{end_name} of each channel"
        heading = _draw_heading(name, _describe(maps, len(cells), order), bar, ends, grid.shape[1])
        blocks.append(join_below([heading, grid]))
    return np.pad(join_below(blocks), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def _draw_head(title: str, image: Pixels | None) -> Pixels:
    text_x = 0 if image is None else image.shape[1] + MARGIN
    lines = [*([(title, TITLE, INK)] if title else []), (LEGEND, TEXT, CAPTION_COLOUR)]
    height = max(len(lines) * LINE_HEIGHT, 0 if image is None else image.shape[0])
    width = text_x + max(measure_text(text, size) for text, size, _ in lines)
    canvas = Image.new("RGB", (width, height), WHITE)
    if image is not None:
        canvas.paste(Image.fromarray(image), (0, 0))
    for row, (text, size, colour) in enumerate(lines):
        ImageDraw.Draw(canvas).text((text_x, (row + 1) * LINE_HEIGHT - 7), text, colour, find_font(size), anchor="ls")
    return np.array(canvas)


def _lay_out(cells: Sequence[Pixels], labels: Sequence[tuple[str, str]], columns: int) -> Pixels:
    height, width = cells[0].shape[:2]
    pitch = max(width, *(measure_text(number, LABEL) for number, _ in labels)) + GAP_PIXELS
    cells_per_row = min(columns, len(cells))
    rows, row_pitch = -(-len(cells) // cells_per_row), height + CAPTION + GAP_PIXELS
    canvas = Image.new("RGB", (cells_per_row * pitch - GAP_PIXELS, rows * row_pitch - GAP_PIXELS), WHITE)
    draw = ImageDraw.Draw(canvas)
    for index, (cell, (number, strength)) in enumerate(zip(cells, labels)):
        x, y = index % cells_per_row * pitch, index // cells_per_row * row_pitch
        canvas.paste(Image.fromarray(cell), (x, y))
        draw.text((x, y + height + 3), number, INK, find_font(LABEL))
        start = width - measure_text(strength, LABEL)
        if start >= measure_text(number, LABEL) + GAP_PIXELS:
            draw.text((x + start, y + height + 3), strength, CAPTION_COLOUR, find_font(LABEL))
    return np.array(canvas)


def _draw_heading(name: str, description: str, bar: Pixels, ends: tuple[str, str], width: int) -> Pixels:
    """Draw the line above a block: the layer's name and description on the left, a labelled colour bar on the right."""
    start_label, end_label = ends
    description_x = measure_text(name, TITLE) + GAP_PIXELS if name else 0
    description_end = description_x + measure_text(description, TEXT) + 3 * GAP_PIXELS
    legend_width = measure_text(start_label, TEXT) + measure_text(end_label, TEXT) + bar.shape[1] + 2 * GAP_PIXELS
    canvas = Image.new("RGB", (max(width, description_end + legend_width), HEADING), WHITE)
    draw = ImageDraw.Draw(canvas)
    base = HEADING - 4  # The baseline of the text.
    draw.text((0, base), name, INK, find_font(TITLE), anchor="ls")
    draw.text((description_x, base), description, CAPTION_COLOUR, find_font(TEXT), anchor="ls")
    x = canvas.width - legend_width
    draw.text((x, base), start_label, CAPTION_COLOUR, find_font(TEXT), anchor="ls")
    canvas.paste(Image.fromarray(bar), (x + measure_text(start_label, TEXT) + GAP_PIXELS, base - bar.shape[0] + 1))
    draw.text((canvas.width, base), end_label, CAPTION_COLOUR, find_font(TEXT), anchor="rs")
    return np.array(canvas)


def _describe(maps: NDArray[np.float64], drawn: int, order: str) -> str:
    count, height, width = maps.shape
    parts = [f"{count} channel{'' if count == 1 else 's'} of {height} x {width}"]
    if drawn < count:
        parts.append(f"the {'strongest' if order == 'strongest' else 'first'} {drawn}")
    if nonfinite := maps.size - int(np.isfinite(maps).sum()):
        parts.append(f"{nonfinite} value{'' if nonfinite == 1 else 's'} NaN or infinite (magenta)")
    return ", ".join(parts)


def _to_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if value == 0 or 1000 <= abs(value) < 1e6:
        return f"{value or 0:.0f}"
    return f"{value:#.3g}".removesuffix(".")


def draw_cell(values: NDArray[np.float64], size: int, *, largest: float, signed: bool, colormap: str) -> Pixels:
    """Draw a map (h,w) in colour, with a longer side of `size` pixels, as an RGB uint8 image.

    The values are divided by `largest`, clipped to [-1,1], and coloured by `find_colours`. NaN and infinity are
    magenta. A smaller map is coloured and then enlarged to sharp rectangles. A larger map is first shrunk by averaging.
    """
    longest = max(values.shape)
    rows, columns = (max(1, round(side * size / longest)) for side in values.shape)
    levels, colours = (values / (largest or 1.0)).astype(np.float32), find_colours(colormap, signed=signed)
    if longest > size:
        return _paint(resize(levels, rows, columns), colours)
    # Enlarge by an integer factor, rounded up, and then shrink, to avoid jagged edges.
    factor = math.ceil(size / longest)
    enlarged = _paint(levels, colours).repeat(factor, 0).repeat(factor, 1)
    return np.asarray(cv2.resize(enlarged, (columns, rows), interpolation=cv2.INTER_AREA), np.uint8)


def find_largest(values: NDArray[Any]) -> float:
    """Return the value that maps to the end of the colour scale; 0 if all values are zero or not finite.

    The result is the 99th percentile of the finite, non-zero absolute values. With the maximum, a few peaks would
    darken the rest of the map. The percentile is not interpolated. For at most a hundred values, it is the maximum.
    """
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    return float(np.percentile(magnitudes, PERCENTILE, method="higher")) if magnitudes.size else 0.0


@functools.cache
def find_colours(colormap: str, *, signed: bool) -> NDArray[np.uint8]:
    """Return a colour scale as RGB: (256,3) for values from 0 to 1 or, if `signed`, (511,3) for values from -1 to 1.

    The signed scale does not use `colormap`. Zero is black. Positive values go through orange to white, and negative
    values through blue to white.
    """
    if not signed:
        return list_colours(find_colormap(colormap)).astype(np.uint8)
    positions = np.linspace(0, len(POSITIVE_COLOURS) - 1, 256)
    negative, positive = (
        np.rint(np.stack([np.interp(positions, range(len(stops)), channel) for channel in zip(*stops)], axis=1))
        for stops in (NEGATIVE_COLOURS, POSITIVE_COLOURS)
    )
    return np.concatenate([negative[:0:-1], positive]).astype(np.uint8)


def _paint(levels: NDArray[np.float32], colours: NDArray[np.uint8]) -> Pixels:
    is_finite = np.isfinite(levels)
    indices = np.rint(np.clip(np.where(is_finite, levels, 0), -1, 1) * 255).astype(np.int64)
    image = colours[np.maximum(indices + len(colours) - 256, 0)]
    image[~is_finite] = MARKER
    return image
