"""Rotate, resize and draw on batches of image tensors on any device, with the same results as Pillow and OpenCV."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.images.draw import compute_colours, fill_look, get_level_scale, list_outline_strips
from gradcam.images.read import Region

Box = tuple[float, float, float, float]  # (left, top, right, bottom), in fractional pixels


def apply_orientation(image: Tensor, orientation: int) -> Tensor:
    """Return an image (...,H,W) upright, given the EXIF orientation (1 to 8). The result may be a view."""
    upright = image.transpose(-1, -2) if orientation >= 5 else image
    axes = [axis for axis, orientations in ((-2, (3, 4, 7, 8)), (-1, (2, 3, 6, 7))) if orientation in orientations]
    return upright.flip(axes) if axes else upright


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


# Pillow's filters by name: (support, function). The support is in output pixels if the image shrinks, and in input
# pixels otherwise.
FILTERS: dict[str, tuple[float, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "box": (0.5, lambda x: ((x > -0.5) & (x <= 0.5)).astype(np.float64)),
    "bilinear": (1.0, lambda x: np.maximum(0, 1 - np.abs(x))),
    "hamming": (1.0, lambda x: np.where(np.abs(x) < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0)),
    "bicubic": (2.0, _cubic),
    "lanczos": (3.0, lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)),
}


# Since version 13, Pillow resizes tall images vertically first.
RESIZES_TALL_FIRST = int(PIL.__version__.partition(".")[0]) >= 13


# Images in a folder often have the same size. The cache is limited, because an entry may take a megabyte.
@functools.lru_cache(maxsize=256)
def compute_weights(
    length: int, span: tuple[float, float], size: int, filter_name: str, device: torch.device
) -> tuple[int, Tensor]:
    """Return Pillow's weights for resizing one axis: the `span` (start, end) of `length` pixels becomes `size` pixels.

    The result is an index and a float32 matrix (size,m): the weights of m input pixels, starting at the index. All
    other input pixels have weight 0.
    """
    scale = (span[1] - span[0]) / size
    centres = span[0] + (np.arange(size) + 0.5) * scale
    if filter_name == "nearest":  # Add up steps as Pillow does, because rounding errors can change the nearest pixel.
        centres = np.cumsum([span[0] + 0.5 * scale, *[scale] * (size - 1)])
        nearest = np.clip(np.floor(centres).astype(int), 0, length - 1)
        first, last = int(nearest[0]), int(nearest[-1])
        weights = (nearest[:, None] == np.arange(first, last + 1)).astype(np.float64)
    else:
        reach, weight = FILTERS[filter_name]
        stretch = max(scale, 1.0)
        lows = np.maximum((centres - reach * stretch + 0.5).astype(int), 0)
        highs = np.minimum((centres + reach * stretch + 0.5).astype(int), length)
        first, last = int(lows.min()), int(highs.max()) - 1
        positions = np.arange(first, last + 1)
        weights = weight((positions - centres[:, None] + 0.5) / stretch)
        weights *= (positions >= lows[:, None]) & (positions < highs[:, None])
        weights /= weights.sum(1, keepdims=True)
    return first, torch.from_numpy(weights.astype(np.float32)).to(device)


def resize(images: Tensor, size: tuple[int, int], box: Box, filter_name: str) -> Tensor:
    """Resize one box of all images (N,C,H,W), uint8, to (N,C,*size). The result is float32 with integer values.

    As in Pillow, values are rounded to 8 bits after resizing one axis, and again after the other axis.
    """
    height, width = images.shape[-2:]
    x0, y0, x1, y1 = box
    column, across = compute_weights(width, (x0, x1), size[1], filter_name, images.device)
    row, down = compute_weights(height, (y0, y1), size[0], filter_name, images.device)
    source = images[..., row : row + down.shape[1], column : column + across.shape[1]].float()
    if RESIZES_TALL_FIRST and height - size[0] > 2 * max(0, width - size[1]):
        return _to_levels(_to_levels(down @ source) @ across.T)
    return _to_levels(down @ _to_levels(source @ across.T))


def _to_levels(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)  # Pillow rounds halves up.


@functools.lru_cache(maxsize=64)
def _compute_cubic_weights(length: int, size: int, device: torch.device) -> Tensor:
    """Return OpenCV's cubic weights for resizing `length` pixels to `size` pixels: a matrix (size,length).

    As in OpenCV, the weights are computed in float32. Many resized values are close to the border between two colour
    levels, so other rounding would change their levels.
    """
    centres = (np.arange(size) + 0.5) * (length / size) - 0.5
    first = np.floor(centres.astype(np.float32)).astype(int)
    x, a, unit = centres.astype(np.float32) - first.astype(np.float32), np.float32(-0.75), np.float32(1)
    far = ((a * (x + unit) - 5 * a) * (x + unit) + 8 * a) * (x + unit) - 4 * a
    near, next_ = (((a + 2) * t - (a + 3)) * t * t + unit for t in (x, unit - x))
    weights = np.zeros((size, length), np.float32)
    for step, tap_weights in enumerate((far, near, next_, unit - far - near - next_), start=-1):
        np.add.at(weights, (np.arange(size), np.clip(first + step, 0, length - 1)), tap_weights)
    return torch.from_numpy(weights).to(device)


@functools.lru_cache(maxsize=64)
def _compute_area_weights(length: int, size: int, device: torch.device) -> Tensor:
    """Return the weights that resize `length` pixels to `size` pixels by area interpolation: a matrix (size,length)."""
    edges, positions = np.arange(size + 1) * (length / size), np.arange(length)
    weights = np.clip(np.minimum(edges[1:, None], positions + 1) - np.maximum(edges[:-1, None], positions), 0, None)
    weights /= weights.sum(1, keepdims=True)
    return torch.from_numpy(weights.astype(np.float32)).to(device)


def stretch(maps: Tensor, rows: int, columns: int) -> Tensor:
    """Resize maps (N,h,w), float32. As in `draw.resize`, use area interpolation if both sides shrink, else cubic."""
    height, width = maps.shape[-2:]
    compute = _compute_area_weights if rows <= height and columns <= width else _compute_cubic_weights
    return compute(height, rows, maps.device) @ (maps @ compute(width, columns, maps.device).T)


@functools.lru_cache(maxsize=16)
def _make_tables(colormap: str, alpha: float, signed: bool, blend: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tables for 256 heatmap levels: colours (3,256) to add, and weights (256,) of the image's values."""
    colours, opacity = compute_colours(colormap, signed=signed, blend=blend)
    opacity = alpha * opacity
    added, image_weights = np.ascontiguousarray((colours * opacity).T, np.float32), np.float32(1 - opacity[:, 0])
    return torch.from_numpy(added).to(device), torch.from_numpy(np.ascontiguousarray(image_weights)).to(device)


def to_grey(images: Tensor) -> Tensor:
    """Return grey copies of RGB images, uint8 (N,3,H,W), with the rounded weights of OpenCV."""
    red, green, blue = images.unbind(1)
    # A single large tensor of integers is changed in place, to save memory.
    grey = red.int().mul_(9798).add_(green, alpha=19235).add_(blue, alpha=3735).add_(2**14).bitwise_right_shift_(15)
    return grey.to(torch.uint8)[:, None].repeat(1, 3, 1, 1)


def overlay(
    images: Tensor,
    heatmaps: Tensor,
    *,
    region: Region,
    alpha: float | None = None,
    colormap: str | None = None,
    base: str = "gray",
    blend: str | None = None,
    signed: bool = False,
    outline: bool = False,
) -> Tensor:
    """Draw heatmaps (N,h,w) on images, uint8 (N,3,H,W), on a device, as `draw.overlay` does, but without checks."""
    look = fill_look(alpha=alpha, colormap=colormap, base=base, blend=blend)
    y0, x0, rows, columns = region
    levels = stretch(heatmaps.float().clamp(0, 1), rows, columns).clamp_(0, 1)
    if signed:  # Like `draw.overlay`, resize each sign separately.
        levels -= stretch((-heatmaps.float()).clamp(0, 1), rows, columns).clamp_(0, 1)
    steps, zero = get_level_scale(signed)
    indices = levels.mul_(steps).round_().add_(zero).int()
    del levels  # Free memory, because the tensors below are as large.
    added, image_weights = _make_tables(look["colormap"], look["alpha"], signed, look["blend"], images.device)
    result = images.clone() if base == "color" else to_grey(images)
    region_pixels = result[:, :, y0 : y0 + rows, x0 : x0 + columns]
    shade = image_weights[indices]
    if base != "color":  # All channels are equal.
        shade.mul_(region_pixels[:, 0])
    for channel in range(3):  # One channel at a time takes a third of the memory.
        mixed = added[channel][indices]
        mixed = mixed.add_(shade) if base != "color" else mixed.add_(region_pixels[:, channel] * shade)
        region_pixels[:, channel] = mixed.round_().clamp_(0, 255).to(torch.uint8)
    if outline and look["alpha"] > 0:
        height, width = images.shape[-2:]
        sides = [y0 > 0, x0 > 0, y0 + rows < height, x0 + columns < width]
        is_blank = (indices == zero).flatten(1).all(1)[:, None, None, None]
        for strip, tone in list_outline_strips(region_pixels, sides):
            # Use `torch.where` to skip blank heatmaps, because a Python condition would wait for the device.
            strip.copy_(torch.where(is_blank, strip, strip // 4 + tone))
    return result
