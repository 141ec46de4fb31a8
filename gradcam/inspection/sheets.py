"""Activation maps on one picture: for each layer a block of cells, below the picture that the network saw."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gradcam.errors import ImageError
from gradcam.images.draw import GAP, colours_of, find_colormap, resize, stack
from gradcam.images.draw import scale as to_height
from gradcam.images.opencv import cv2
from gradcam.images.read import PictureLike, Pixels, read_image
from gradcam.images.sheets import INK, LINE, MARGIN, WHITE, find_font, measure_text
from gradcam.inspection.channels import measure_strengths, order_channels, take_maps
from gradcam.options import CHANNEL_ORDERS, CHANNEL_SCALES, accept_old_parameters, check_choice, check_count

# Looked at on photographs. Zero is black in both kinds, so that a dead channel looks alike everywhere. Of those for signed
# values, white at zero makes sparse maps pale, and grey without hues hides the sign.
ABOVE = ((0, 0, 0), (110, 40, 25), (200, 90, 40), (245, 170, 80), (255, 245, 215))
BELOW = ((0, 0, 0), (25, 60, 110), (50, 130, 190), (140, 210, 240), (235, 250, 255))
MARKER = (255, 0, 255)  # magenta, which neither these nor the usual colour maps have: NaN and infinity
PERCENTILE = 99
TITLE, TEXT, LABEL = 18, 14, 12  # the letters' sizes
HEADING, CAPTION = 34, 18  # the heights of the line above cells, and of what is below a cell
BAR, BAR_HEIGHT = 80, 12
PALE = (105, 105, 105)
MOST_PIXELS = 2**28  # of all cells; of the usual size there is room for 21 thousand
LEGEND = "Each cell is a channel. Below it are its number and its mean absolute activation."


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
    input_image: PictureLike | None = None,
    title: str = "",
) -> Pixels:
    """Draw feature maps as an image: a block per layer, and a cell per channel.

    Layers without negative values use the colour map. Layers with negative values use warm colours above zero, cold colours
    below, and black at zero. NaN and infinity are magenta; channels with NaN come first.

    Parameters
    ----------
    activations : mapping of str to Tensor, Tensor or array
        The result of `inspection.activations`, any mapping from names to floats (C,h,w) or (N,C,h,w), or one such tensor.
    image : int, default 0
        The number of the image in the batch.
    channels : int, default 64
        The maximum number of channels per layer.
    columns : int, default 8
        The number of cells in a row.
    order : str, default "strongest"
        "strongest" sorts by the mean absolute activation, "index" by channel number.
    scale : str, default "channel"
        The colour scale. "channel" scales each channel to its own maximum, which shows its structure; "layer" scales
        all channels to the maximum of the layer, so that strong channels stand out. Both maxima are the 99th percentile
        of the non-zero absolute values.
    size : int, default 112
        The longer side of a cell, in pixels; smaller maps are enlarged without blurring.
    colormap : str, default "inferno"
        The name of an OpenCV colour map.
    input_image : image, default None
        The model's input image, in any form that `gradcam.read_image` takes, drawn above the blocks.
    title : str, default ""
        The text beside `input_image`.

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
    look = Look(channels=channels, columns=columns, order=order, scale=scale, size=size, colormap=colormap)
    named = activations if isinstance(activations, Mapping) else {"": activations}
    if not named:
        raise ImageError("There are no activations: expected those of at least one layer.")
    found = {str(name): take_maps(given, image, str(name)) for name, given in named.items()}
    cells = sum(min(channels, len(maps)) for maps in found.values())
    if cells * size**2 > MOST_PIXELS:
        raise ImageError(
            f"{cells} cells of {size} x {size} pixels exceed the limit of {MOST_PIXELS} pixels: choose fewer channels or "
            "layers, or smaller cells."
        )
    head = _draw_head(title, None if input_image is None else to_height(read_image(input_image), size))
    blocks = [draw_block(name, maps, look) for name, maps in found.items()]
    return np.pad(stack([head, *blocks]), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def _draw_head(title: str, picture: Pixels | None) -> Pixels:
    left = 0 if picture is None else picture.shape[1] + MARGIN
    lines = [*([(title, TITLE, INK)] if title else []), (LEGEND, TEXT, PALE)]
    height = max(len(lines) * LINE, 0 if picture is None else picture.shape[0])
    width = left + max(measure_text(text, size) for text, size, _ in lines)
    canvas = Image.new("RGB", (width, height), WHITE)
    if picture is not None:
        canvas.paste(Image.fromarray(picture), (0, 0))
    for row, (text, size, colour) in enumerate(lines):
        ImageDraw.Draw(canvas).text((left, (row + 1) * LINE - 7), text, colour, find_font(size), anchor="ls")
    return np.array(canvas)


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
            check_count(getattr(self, name), name, error=ImageError)
        check_choice(self.order, "order", CHANNEL_ORDERS)
        check_choice(self.scale, "scale", CHANNEL_SCALES)
        find_colormap(self.colormap)


def draw_block(name: str, maps: NDArray[np.float64], look: Look) -> Pixels:
    """A layer's maps (C,h,w): RGB, uint8 (H,W,3), as wide as its cells, or as its heading."""
    strengths = measure_strengths(maps)
    shown = order_channels(strengths, look.order)[: look.channels]
    signed, largest = bool((maps < 0).any()), find_largest(maps)
    cells = []
    for channel in shown:
        end = largest if look.scale == "layer" else find_largest(maps[channel])
        cells.append(draw_cell(maps[channel], look.size, largest=end, signed=signed, colormap=look.colormap))
    labels = [(str(channel), _to_text(strengths[channel]) if maps[channel].any() else "dead") for channel in shown]
    grid = _lay_out(cells, labels, look.columns)
    shares = np.linspace(-1 if signed else 0, 1, BAR, dtype=np.float32)  # the bar of colours
    bar = _paint(np.tile(shares, (BAR_HEIGHT, 1)), find_colours(look.colormap, signed=signed))
    if look.scale == "layer":
        ends = _to_text(-largest) if signed else "0", _to_text(largest)
    else:
        ends = ("negative", "positive, each channel by itself") if signed else ("0", "largest, each channel by itself")
    return stack([_draw_heading(name, _describe(maps, shown, look), bar, ends, grid.shape[1]), grid])


def _lay_out(cells: Sequence[Pixels], labels: Sequence[tuple[str, str]], columns: int) -> Pixels:
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


def _to_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if value == 0 or 1000 <= abs(value) < 1e6:
        return f"{value or 0:.0f}"
    return f"{value:#.3g}".removesuffix(".")


def draw_cell(values: NDArray[np.float64], size: int, *, largest: float, signed: bool, colormap: str) -> Pixels:
    """A map (h,w) in colour, its longer side of `size` pixels: RGB, uint8. Zero has the first colour, `largest` and
    what is above it the last one, see `find_colours`; NaN and infinity are magenta. Of a smaller map each value is a
    sharp rectangle; a larger one is shrunk by the mean, before it is coloured."""
    longest = max(values.shape)
    rows, columns = (max(1, round(side * size / longest)) for side in values.shape)
    shares = (values / (largest or 1.0)).astype(np.float32)
    colours = find_colours(colormap, signed=signed)
    if longest > size:
        return _paint(resize(shares, rows, columns), colours)
    whole = math.ceil(size / longest)  # enlarged by whole pixels, and shrunk a little from there: no edge is jagged
    enlarged = _paint(shares, colours).repeat(whole, 0).repeat(whole, 1)
    return np.asarray(cv2.resize(enlarged, (columns, rows), interpolation=cv2.INTER_AREA), np.uint8)


def find_largest(values: NDArray[Any]) -> float:
    """The value that gets the last colour: the 99th percentile of the absolute values that are neither zero nor
    infinite. So a few peaks do not leave the rest in the dark. It is one of the values: the largest of up to a hundred.
    0 of none."""
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    return float(np.percentile(magnitudes, PERCENTILE, method="higher")) if magnitudes.size else 0.0


@functools.cache
def find_colours(colormap: str, *, signed: bool) -> NDArray[np.uint8]:
    """The colours of shares from 0 to 1, RGB (256,3); signed from -1 to 1, (511,3), with zero in the middle. Signed:
    black at zero, through orange to white above, and through blue to white below, whatever the colour map."""
    if not signed:
        return colours_of(find_colormap(colormap)).astype(np.uint8)
    places = np.linspace(0, len(ABOVE) - 1, 256)
    below, above = (
        np.rint(np.stack([np.interp(places, range(len(stops)), channel) for channel in zip(*stops)], axis=1))
        for stops in (BELOW, ABOVE)
    )
    return np.concatenate([below[:0:-1], above]).astype(np.uint8)


def _paint(shares: NDArray[np.float32], colours: NDArray[np.uint8]) -> Pixels:
    is_finite = np.isfinite(shares)
    levels = np.rint(np.clip(np.where(is_finite, shares, 0), -1, 1) * 255).astype(np.int64)
    painted = colours[np.maximum(levels + len(colours) - 256, 0)]
    painted[~is_finite] = MARKER
    return painted
