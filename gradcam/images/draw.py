"""Draw heatmaps in colour on images, with OpenCV."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, ImageError, find_similar_names, join_names, shorten, warn
from gradcam.images.opencv import cv2
from gradcam.images.read import ImageLike, Pixels, Region, read_image, to_numpy
from gradcam.options import BASES, BLENDS, check_choice

if TYPE_CHECKING:
    from torch import Tensor

COLORMAPS: dict[str, int] = {
    name.removeprefix("COLORMAP_").lower(): getattr(cv2, name) for name in dir(cv2) if name.startswith("COLORMAP_")
}
GAP_PIXELS = 8  # white pixels between the images of a sheet
PIXELS_PER_LINE_WIDTH = 640  # An outline is one pixel wide for each 640 pixels of the region's shorter side.
# The value of an outline pixel is a quarter of the image's value, plus one of these two constants.
DARK_TONE, LIGHT_TONE = 20, 180
# If the aspect ratios of heatmap and image differ by more than this factor, the warning calls the heatmap distorted.
MAX_ASPECT_RATIO = 1.05
PIXELS_PER_BAND = 2**17
# The colour bar for a grey base is drawn on this grey, which minimises the error in reading values from the bar.
MIDDLE_GREY = 128
HAS_16_BIT_LUT = int(cv2.__version__.partition(".")[0]) >= 5  # OpenCV 5's lookup takes half the time of NumPy's.
# The colours of signed heatmaps, from weak to strong. Positive evidence is warm, and negative evidence is cold.
POSITIVE_COLOURS = ((255, 205, 70), (225, 0, 35))
NEGATIVE_COLOURS = ((90, 225, 255), (25, 25, 205))


def overlay(
    image: ImageLike,
    heatmap: NDArray[Any] | Tensor,
    *,
    alpha: float | None = None,
    colormap: str | None = None,
    base: str = "gray",
    blend: str | None = None,
    region: Region | None = None,
    signed: bool = False,
    outline: bool = False,
) -> Pixels:
    """Draw a heatmap in colour on an image, at the image's size.

    Parameters
    ----------
    image : image
        In any form that `gradcam.read_image` takes: an array, a tensor, a PIL image, a path, bytes, an open file.
    heatmap : array or Tensor (h,w)
        Floats in [0,1], of any size. The heatmap is stretched over the region.
    alpha : float, default None
        The largest opacity of the colours, in [0,1]. None means 0.8 on a grey base, and 0.5 on a colour base.
    colormap : str, default None
        The name of an OpenCV colour map, in upper or lower case. None means "inferno" on a grey base, and "turbo" on a
        colour base.
    base : str, default "gray"
        "gray" draws the whole image in grey, so that all colours are the heatmap's. "color" keeps the image's colours.
    blend : str, default None
        How the opacity depends on the value v. With "grow", the opacity is `alpha` v (2 - v), so it rises up to the
        maximum. With "fade", the opacity rises linearly to `alpha` at v = 0.5, and stays at `alpha` for larger values.
        With "uniform", the opacity is `alpha` everywhere; signed heatmaps use "fade" instead, because 0 has no colour
        of its own. None means "grow" on a grey base, and "fade" on a colour base.
    region : (int, int, int, int), default None
        Top, left, height and width of the pixels that the model saw. None means the whole image, with a warning if the
        sizes of heatmap and image differ. Pixels outside the region show the base alone.
    signed : bool, default False
        True if the heatmap is in [-1,1]. Positive values are then red, negative values are blue, and `colormap` has no
        effect.
    outline : bool, default False
        Whether to draw a thin line along the border of a region that is not the whole image. A blank heatmap gets no
        line.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the image, heatmap or region is invalid.
    GradcamError
        If the colour map, base or blend is unknown, or the opacity is outside [0,1].

    Examples
    --------
    >>> import gradcam
    >>> explanation = gradcam.load_classifier().explain("photo.jpg")
    >>> heatmap, region = explanation.heatmaps[0, 0], explanation.regions[0]
    >>> gradcam.overlay("photo.jpg", heatmap, region=region, base="color").shape
    (640, 800, 3)
    """
    # On a grey base, the hue of a pixel depends on the heatmap alone, so users can find the hue on the colour bar.
    # Colour-blind people can read the colour map inferno, because its lightness rises with the value. On a colour base,
    # turbo is easier to read, because it has more hues. The opacity grows with the value, so that the image stays
    # visible where the heatmap is low.
    look = fill_look(alpha=alpha, colormap=colormap, base=base, blend=blend)
    pixels, values = read_image(image), to_numpy(heatmap)
    height, width = pixels.shape[:2]
    if region is None:
        _warn_if_stretched(values.shape, height, width)
    y0, x0, rows, columns = _check_region((0, 0, height, width) if region is None else region, height, width)
    levels = _to_levels(values, rows, columns, signed=signed)
    result = np.array(pixels) if base == "color" else to_grey(pixels)
    inside = result[y0 : y0 + rows, x0 : x0 + columns]
    _blend(inside, levels, _make_blend_tables(look["colormap"], look["alpha"], bool(signed), look["blend"]))
    if outline and look["alpha"] > 0 and (levels != get_level_scale(signed)[1]).any():
        sides = [y0 > 0, x0 > 0, y0 + rows < height, x0 + columns < width]
        for strip, tone in list_outline_strips(inside.transpose(2, 0, 1), sides):
            strip[...] = strip // 4 + tone
    return result


def _warn_if_stretched(shape: tuple[int, ...], height: int, width: int) -> None:
    """Warn if stretching distorts a heatmap, because the model may have seen only a part of the image."""
    if len(shape) != 2 or not all(shape) or shape == (height, width):
        return
    aspect = (shape[1] / shape[0]) / (width / height)
    distortion = "" if 1 / MAX_ASPECT_RATIO <= aspect <= MAX_ASPECT_RATIO else " and distorted"
    warn(
        f"A heatmap of {shape[1]} x {shape[0]} is stretched{distortion} over the whole image of {width} x {height}. If "
        "the model saw a crop, pass region=explanation.regions[0], or region=classifier.region(height, width). If the "
        "model saw the whole image, pass region=(0, 0, height, width)."
    )


def list_outline_strips(pixels: Any, sides: Sequence[bool]) -> Iterator[tuple[Any, int]]:
    """Yield views of the outline pixels along the sides of an image (...,H,W), each with `DARK_TONE` or `LIGHT_TONE`.

    Each side has a dark outer line and a light inner line, so that one of the lines is visible on any image. `sides`
    contains four bools: whether to draw the lines of the top, left, bottom and right side.
    """
    width = max(1, round(min(pixels.shape[-2:]) / PIXELS_PER_LINE_WIDTH))
    for inset, tone in ((width, LIGHT_TONE), (0, DARK_TONE)):
        start, end = slice(inset, inset + width), slice(-inset - width, -inset or None)
        strips = [pixels[..., start, :], pixels[..., start], pixels[..., end, :], pixels[..., end]]
        yield from ((strip, tone) for strip, is_drawn in zip(strips, sides) if is_drawn)


def fill_look(*, base: str = "gray", **options: Any) -> dict[str, Any]:
    """Return the options base, blend, alpha and colormap. Options that are None or missing get the base's defaults.

    Raises `GradcamError` if an option is invalid.
    """
    if not isinstance(base, str) or base not in BASES:
        check_choice(base, "base", BASES)
    look = BASES[base] | {key: value for key, value in options.items() if value is not None}
    if not isinstance(look["blend"], str) or look["blend"] not in BLENDS:
        check_choice(look["blend"], "blend", BLENDS)
    alpha = look["alpha"]
    if not isinstance(alpha, (int, float, np.number)) or not 0 <= alpha <= 1:
        raise GradcamError(f"alpha is {shorten(alpha)}, expected an opacity from 0 to 1.")
    find_colormap(look["colormap"])
    return {**look, "base": base, "alpha": float(alpha), "colormap": str(look["colormap"])}


def to_grey(pixels: Pixels) -> Pixels:
    """Return a grey copy of an RGB image, with three equal channels."""
    return np.asarray(cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB))


def draw_colour_bar(width: int, height: int, *, base: str = "gray", signed: bool = False, **look: Any) -> Pixels:
    """Return a bar of the heatmap colours from minimum to maximum, on a middle grey or, for a colour base, on white.

    A colour base has no typical colour, so its bar is drawn with an `alpha` of 1.
    """
    values = np.tile(np.linspace(-1 if signed else 0, 1, width, dtype=np.float32), (height, 1))
    look |= {"alpha": 1} if base == "color" else {}
    background = np.full((height, width, 3), 255 if base == "color" else MIDDLE_GREY, np.uint8)
    return overlay(background, values, base=base, signed=signed, **look)


def join_rows(rows: Sequence[Sequence[Pixels]], height: int = 320) -> Pixels:
    """Place images side by side in rows, scaled to one height (in pixels), with white gaps."""
    return join_below([_join([scale_to_height(image, height) for image in row], axis=1) for row in rows])


def join_below(strips: Sequence[Pixels]) -> Pixels:
    """Stack strips vertically with white gaps, and pad narrower strips with white on the right."""
    width = max(strip.shape[1] for strip in strips)
    padded = [np.pad(strip, ((0, 0), (0, width - strip.shape[1]), (0, 0)), constant_values=255) for strip in strips]
    return _join(padded, axis=0)


def find_colormap(name: str) -> int:
    """Return OpenCV's number for a colour map. Upper and lower case are equivalent.

    Raises `GradcamError` for an unknown name; the message suggests similar names.
    """
    key = str(name).lower()
    if key not in COLORMAPS:
        suggestions = find_similar_names(key, COLORMAPS) or ["turbo", "viridis", "inferno", "jet"]
        raise GradcamError(f"There is no colour map {shorten(name)}. Nearest: {join_names(suggestions)}.")
    return COLORMAPS[key]


@functools.cache
def list_colours(colormap: int) -> NDArray[np.float32]:
    """Return the 256 colours of an OpenCV colour map: RGB, float32 (256,3). Do not modify the cached array."""
    levels = np.arange(256, dtype=np.uint8)[:, None]
    return cv2.cvtColor(cv2.applyColorMap(levels, colormap), cv2.COLOR_BGR2RGB)[:, 0].astype(np.float32)


@functools.lru_cache(maxsize=8)
def _make_blend_tables(colormap: str, alpha: float, signed: bool, blend: str) -> NDArray[np.uint8]:
    """Return blending tables (3,65536), one per channel, with an entry for each heatmap level and image value.

    Entry 256 * level + value is the blended pixel value.
    """
    colours, opacity = compute_colours(colormap, signed=signed, blend=blend)
    opacity = alpha * opacity
    mixed = (colours * opacity).T[..., None] + np.arange(256, dtype=np.float32) * (1 - opacity)
    return np.rint(mixed).astype(np.uint8).reshape(3, -1)


def compute_colours(
    colormap: str, *, signed: bool, blend: str = "fade"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the colours of the 256 levels (256,3), and their opacities (256,1) in [0,1], as `overlay` describes them."""
    steps, zero = get_level_scale(signed)
    values = ((np.arange(256, dtype=np.float32) - zero) / steps)[:, None]
    strength = np.abs(values)
    opacity = strength * (2 - strength) if blend == "grow" else np.minimum(1, 2 * strength)
    if blend == "uniform" and not signed:
        opacity = np.ones_like(strength)
    if not signed:
        return list_colours(find_colormap(colormap)), opacity
    positive, negative = np.array([POSITIVE_COLOURS, NEGATIVE_COLOURS], np.float32)[:, :, None]
    weak, strong = np.where(values < 0, negative, positive)
    return weak * (1 - strength) + strong * strength, opacity


def _blend(pixels: Pixels, levels: Pixels, tables: NDArray[np.uint8]) -> None:
    """Blend the colours of heatmap levels into pixels, in place, with the tables of `_make_blend_tables`."""
    # Look up each channel separately, which is seven times faster than one lookup in a three-channel table. Blend only
    # a few rows at a time, so that intermediate results stay in the CPU's cache. OpenCV's functions release the GIL.
    look_up = cv2.LUT if HAS_16_BIT_LUT else lambda indices, table: table.take(indices)
    height = max(1, PIXELS_PER_BAND // levels.shape[1])
    for start in range(0, len(levels), height):
        band, band_levels = pixels[start : start + height], levels[start : start + height]
        index_planes = (cv2.merge([plane, band_levels]).view(np.uint16)[..., 0] for plane in cv2.split(band))
        band[...] = cv2.merge([*map(look_up, index_planes, tables)])


def _to_levels(values: NDArray[Any], rows: int, columns: int, *, signed: bool) -> Pixels:
    minimum = -1 if signed else 0
    if values.ndim != 2 or values.size == 0 or values.dtype.kind != "f":
        raise ImageError(f"The heatmap is {values.dtype} {values.shape}, expected one map: floats (h,w) in [0,1].")
    low, high = values.min(), values.max()
    if not (low >= minimum - 1e-4 and high <= 1 + 1e-4):  # NaN fails the comparisons, and causes the error.
        hint = " (-1 to 1 with signed=True)" if low < 0 and not signed else ""
        raise ImageError(f"The heatmap has values from {low:.4g} to {high:.4g}, expected {minimum} to 1{hint}.")
    levels = _stretch(values, rows, columns)
    if signed:  # Cubic interpolation of signed values would add rims of the opposite sign. Resize each sign separately.
        levels -= _stretch(-values, rows, columns)
    steps, zero = get_level_scale(signed)
    levels *= steps
    if zero:
        np.rint(levels, out=levels)
        levels += zero
    return np.asarray(cv2.convertScaleAbs(levels))  # Like `numpy.rint`, this function rounds half to even.


def _stretch(values: NDArray[Any], rows: int, columns: int) -> NDArray[np.float32]:
    resized = resize(np.clip(values, 0, 1).astype(np.float32), rows, columns)
    return np.clip(resized, 0, 1, out=resized)


def get_level_scale(signed: bool) -> tuple[int, int]:
    """Return the number of levels from heatmap value 0 to the maximum, and the level of value 0."""
    return (127, 128) if signed else (255, 0)


def _check_region(region: Region, height: int, width: int) -> Region:
    try:
        y0, x0, rows, columns = map(operator.index, region)
    except (TypeError, ValueError):
        raise ImageError(f"The region is {region!r}, expected whole numbers: (top, left, height, width).") from None
    if y0 < 0 or x0 < 0 or rows < 1 or columns < 1 or y0 + rows > height or x0 + columns > width:
        outside = f"The region {(y0, x0, rows, columns)} is not inside an image of {width} x {height}"
        raise ImageError(f"{outside}: expected (top, left, height, width).")
    return y0, x0, rows, columns


def scale_to_height(image: Pixels, height: int) -> Pixels:
    """Scale an image to a height in pixels, without changing its aspect ratio."""
    return resize(image, height, max(1, round(image.shape[1] * height / image.shape[0])))


def resize(values: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """Resize values (H,W) or (H,W,C), by area interpolation if both sides shrink, otherwise by cubic interpolation."""
    shrinks = rows <= values.shape[0] and columns <= values.shape[1]
    interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(values, (columns, rows), interpolation=interpolation))


def _join(images: Sequence[Pixels], axis: int) -> Pixels:
    shape = list(images[0].shape)
    shape[axis] = GAP_PIXELS
    gap = np.full(shape, 255, np.uint8)
    return np.concatenate([part for image in images for part in (gap, image)][1:], axis=axis)
