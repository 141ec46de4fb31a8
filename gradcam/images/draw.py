"""Heatmaps in colour on pictures, through OpenCV."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, ImageError, join_names, nearest, shorten, warn
from gradcam.images.opencv import cv2
from gradcam.images.read import PictureLike, Pixels, Region, read_image, to_numpy

if TYPE_CHECKING:
    from torch import Tensor

COLORMAPS: dict[str, int] = {
    name.removeprefix("COLORMAP_").lower(): getattr(cv2, name) for name in dir(cv2) if name.startswith("COLORMAP_")
}
GAP = 8  # white pixels between the pictures of a sheet
LINE = 640  # pixels of a region for each that its outline is wide
DARK, LIGHT = 20, 180  # which three quarters of an outline's lines are
MAX_ASPECT_RATIO = 1.05  # of heatmap to image, or its inverse, up to which nothing looks distorted
BAND = 2**17  # pixels that are blended at a time
LOOKS_UP_16_BITS = int(cv2.__version__.partition(".")[0]) >= 5  # which is twice as fast as NumPy
# Signed heatmaps, from a little to the most: evidence for the class in warm colours, evidence against it in cold ones.
FOR = ((255, 205, 70), (225, 0, 35))
AGAINST = ((90, 225, 255), (25, 25, 205))


def overlay(
    image: PictureLike,
    heatmap: NDArray[Any] | Tensor,
    *,
    alpha: float = 0.5,
    colormap: str = "turbo",
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
    alpha : float, default 0.5
        The opacity, in [0,1], of the colour where the heatmap is 0.5 or more. Below 0.5 the colour fades out, so pixels
        without evidence stay unchanged.
    colormap : str, default "turbo"
        The name of an OpenCV colour map, in upper or lower case.
    region : (int, int, int, int), default None
        Top, left, height and width of the pixels that the model saw. None means the whole image, with a warning if the
        sizes of heatmap and image differ. Pixels outside the region stay unchanged.
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
        If the colour map is unknown, or the opacity is outside [0,1].

    Examples
    --------
    >>> import gradcam
    >>> explanation = gradcam.load_classifier().explain("photo.jpg")
    >>> heatmap, region = explanation.heatmaps[0, 0], explanation.regions[0]
    >>> gradcam.overlay("photo.jpg", heatmap, region=region, colormap="viridis").shape
    (640, 800, 3)
    """
    # Why these defaults: turbo has the most hues to tell values apart, and stands out on colour photographs, foliage and
    # greyscale pictures alike; single-hue maps wash out on bright ones. A uniform blend would lay turbo's dark blue over
    # everything cold, and hide small objects and the picture with them.
    picture, values = read_image(image), to_numpy(heatmap)
    height, width = picture.shape[:2]
    if region is None:
        _warn_of_stretching(values.shape, height, width)
    top, left, rows, columns = _check_region((0, 0, height, width) if region is None else region, height, width)
    if not isinstance(alpha, (int, float, np.number)) or not 0 <= alpha <= 1:
        raise GradcamError(f"alpha is {shorten(alpha)}, expected an opacity from 0 to 1.")
    levels = _to_levels(values, rows, columns, signed=signed)
    tables = _blended(str(colormap), float(alpha), bool(signed))
    result = np.array(picture)
    seen = result[top : top + rows, left : left + columns]
    _blend(seen, levels, tables)
    if outline and alpha > 0 and (levels != _scale_of(signed)[1]).any():
        _draw_outline(seen, [top > 0, left > 0, top + rows < height, left + columns < width])
    return result


def _warn_of_stretching(shape: tuple[int, ...], height: int, width: int) -> None:
    """Warn that a heatmap of another size than the image's is drawn over all of it, which the network may not have seen."""
    if len(shape) != 2 or not all(shape) or shape == (height, width):
        return
    aspect = (shape[1] / shape[0]) / (width / height)
    how = "" if 1 / MAX_ASPECT_RATIO <= aspect <= MAX_ASPECT_RATIO else " and distorted"
    warn(
        f"A heatmap of {shape[1]} x {shape[0]} is stretched{how} over the whole image of {width} x {height}. If the model "
        "saw a crop, pass region=explanation.regions[0], or region=classifier.region(height, width). If it saw the whole "
        "image, pass region=(0, 0, height, width)."
    )


def _draw_outline(seen: Pixels, sides: Sequence[bool]) -> None:
    """A dark line, and a light one within, along those of its sides (top, left, bottom, right): one shows on any picture."""
    rows, columns = seen.shape[:2]
    width = max(1, round(min(rows, columns) / LINE))
    for inset, tone in ((width, LIGHT), (0, DARK)):
        edge = slice(inset, inset + width), slice(-inset - width, -inset or None)
        strips = [seen[edge[0]], seen[:, edge[0]], seen[edge[1]], seen[:, edge[1]]]
        for strip in (strip for strip, wanted in zip(strips, sides) if wanted):
            strip[...] = strip // 4 + tone


def colour_bar(width: int, height: int, *, colormap: str = "turbo", signed: bool = False) -> Pixels:
    """The colours of a heatmap, from its least value to its largest, as `overlay` lays them over white at full opacity."""
    values = np.linspace(-1 if signed else 0, 1, width, dtype=np.float32)
    white = np.full((height, width, 3), 255, np.uint8)
    return overlay(white, np.tile(values, (height, 1)), alpha=1, colormap=colormap, signed=signed)


def sheet(rows: Sequence[Sequence[Pixels]], height: int = 320) -> Pixels:
    """Pictures side by side in rows, each scaled to one height (in pixels), with white between them."""
    return stack([_join([scale(picture, height) for picture in row], axis=1) for row in rows])


def stack(strips: Sequence[Pixels]) -> Pixels:
    """Pictures one below another, with white between them, and to the right of those that are not as wide."""
    width = max(strip.shape[1] for strip in strips)
    wide = [np.pad(it, ((0, 0), (0, width - it.shape[1]), (0, 0)), constant_values=255) for it in strips]
    return _join(wide, axis=0)


def find_colormap(name: str) -> int:
    """OpenCV's number of a colour map; case does not count. Raises `GradcamError`, with the nearest, for an unknown name."""
    known = str(name).lower()
    if known not in COLORMAPS:
        offers = nearest(known, COLORMAPS) or ["turbo", "viridis", "inferno", "jet"]
        raise GradcamError(f"There is no colour map {shorten(name)}. Nearest: {join_names(offers)}.")
    return COLORMAPS[known]


@functools.cache  # OpenCV computes them anew each time
def colours_of(colormap: int) -> NDArray[np.float32]:
    """The 256 colours of OpenCV's map of this number, RGB, float32 (256,3); to be read only."""
    levels = np.arange(256, dtype=np.uint8)[:, None]
    return cv2.cvtColor(cv2.applyColorMap(levels, colormap), cv2.COLOR_BGR2RGB)[:, 0].astype(np.float32)


@functools.lru_cache(maxsize=8)
def _blended(colormap: str, alpha: float, signed: bool) -> NDArray[np.uint8]:
    """What becomes of a channel's value under the colour of a level, at 256 level + value: (3,65536)."""
    colours, opacity = blending(colormap, signed=signed)
    opacity = alpha * opacity
    mixed = (colours * opacity).T[..., None] + np.arange(256, dtype=np.float32) * (1 - opacity)
    return np.rint(mixed).astype(np.uint8).reshape(3, -1)


def blending(colormap: str, *, signed: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """256 colours (256,3), and how opaque each of them is, (256,1) in [0,1]: fully from half the largest value on."""
    steps, zero = _scale_of(signed)
    values = ((np.arange(256, dtype=np.float32) - zero) / steps)[:, None]
    strength = np.abs(values)
    opacity = np.minimum(1, 2 * strength)
    if not signed:
        return colours_of(find_colormap(colormap)), opacity
    (little_for, most_for), (little_against, most_against) = np.array([FOR, AGAINST], np.float32)
    little, most = np.where(values < 0, little_against, little_for), np.where(values < 0, most_against, most_for)
    return little * (1 - strength) + most * strength, opacity


def _blend(seen: Pixels, levels: Pixels, tables: NDArray[np.uint8]) -> None:
    """Lay the colour of each level over `seen`, in place, by a table for each channel."""
    # Channel by channel and a few rows at a time: tables of one channel are looked up seven times faster than those of
    # three, and what lies between the steps stays in the processor's cache. All of it runs without Python's lock.
    height = max(1, BAND // levels.shape[1])
    for top in range(0, len(levels), height):
        band, those = seen[top : top + height], levels[top : top + height]
        places = (cv2.merge([plane, those]).view(np.uint16)[..., 0] for plane in cv2.split(band))
        band[...] = cv2.merge([_look_up(place, table) for place, table in zip(places, tables)])


def _look_up(places: NDArray[np.uint16], table: NDArray[np.uint8]) -> Pixels:
    if LOOKS_UP_16_BITS:
        return np.asarray(cv2.LUT(places, table))
    return table.take(places)


def _to_levels(values: NDArray[Any], rows: int, columns: int, *, signed: bool) -> Pixels:
    lowest = -1 if signed else 0
    if values.ndim != 2 or values.size == 0 or values.dtype.kind != "f":
        raise ImageError(f"The heatmap is {values.dtype} {values.shape}, expected one map: floats (h,w) in [0,1].")
    if not (values.min() >= lowest - 1e-4 and values.max() <= 1 + 1e-4):  # NaN fails both
        hint = "" if signed or not values.min() < 0 else " (-1 to 1 with signed=True)"
        found = f"values from {values.min():.4g} to {values.max():.4g}"
        raise ImageError(f"The heatmap has {found}, expected {lowest} to 1{hint}.")
    levels = _stretch(values, rows, columns)
    if signed:  # each sign by itself: interpolation would give a rim of the other one
        levels -= _stretch(-values, rows, columns)
    steps, zero = _scale_of(signed)
    levels *= steps
    if zero:
        np.rint(levels, out=levels)
        levels += zero
    return np.asarray(cv2.convertScaleAbs(levels))  # which rounds, to even, as `numpy.rint` does


def _stretch(values: NDArray[Any], rows: int, columns: int) -> NDArray[np.float32]:
    resized = resize(np.clip(values, 0, 1).astype(np.float32), rows, columns)
    return np.clip(resized, 0, 1, out=resized)


def _scale_of(signed: bool) -> tuple[int, int]:
    return (127, 128) if signed else (255, 0)


def _check_region(region: Region, height: int, width: int) -> Region:
    try:
        top, left, rows, columns = map(operator.index, region)
    except (TypeError, ValueError):
        raise ImageError(f"The region is {region!r}, expected whole numbers: (top, left, height, width).") from None
    if top < 0 or left < 0 or rows < 1 or columns < 1 or top + rows > height or left + columns > width:
        outside = f"The region {(top, left, rows, columns)} is not inside an image of {width} x {height}"
        raise ImageError(f"{outside}: expected (top, left, height, width).")
    return top, left, rows, columns


def scale(picture: Pixels, height: int) -> Pixels:
    """A picture at another height, in pixels, with its own aspect."""
    return resize(picture, height, max(1, round(picture.shape[1] * height / picture.shape[0])))


def resize(values: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """Values (H,W) or (H,W,C) at another size, in their own kind: each the mean of what it covers where all is shrunk."""
    shrinks = rows <= values.shape[0] and columns <= values.shape[1]
    interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(values, (columns, rows), interpolation=interpolation))


def _join(pictures: Sequence[Pixels], axis: int) -> Pixels:
    shape = list(pictures[0].shape)
    shape[axis] = GAP
    gap = np.full(shape, 255, np.uint8)
    parts = [part for picture in pictures for part in (gap, picture)]
    return np.concatenate(parts[1:], axis=axis)
