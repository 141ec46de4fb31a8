"""Pictures as tensors, many of one size at once, on whichever device they lie: turned, resized and drawn on, to the
levels that Pillow and OpenCV give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.images.draw import DARK, LIGHT, LINE, blending
from gradcam.images.read import Region

Box = tuple[float, float, float, float]  # left, top, right, bottom, in fractions of pixels


def turn_upright(picture: Tensor, turn: int) -> Tensor:
    """A picture (...,H,W) as a viewer shows it, of which the EXIF data says this orientation, 1 to 8; a view where it
    can be one."""
    upright = picture.transpose(-1, -2) if turn >= 5 else picture
    axes = [axis for axis, turns in ((-2, (3, 4, 7, 8)), (-1, (2, 3, 6, 7))) if turn in turns]
    return upright.flip(axes) if axes else upright


def _sinc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sinc(x) * np.sinc(x / 3)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


def _hamming(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.abs(x) < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0)


# What Pillow weighs pixels by, and how far that reaches, in pixels of the smaller of both pictures.
FILTERS: dict[str, tuple[float, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "box": (0.5, lambda x: ((x > -0.5) & (x <= 0.5)).astype(np.float64)),
    "bilinear": (1.0, lambda x: np.maximum(0, 1 - np.abs(x))),
    "hamming": (1.0, _hamming),
    "bicubic": (2.0, _cubic),
    "lanczos": (3.0, lambda x: np.where(np.abs(x) < 3, _sinc(x), 0)),
}


TALL_FIRST = int(PIL.__version__.partition(".")[0]) >= 13  # from then on, tall pictures are resized vertically first


@functools.lru_cache(maxsize=256)  # of folders in which sizes repeat; one may take a megabyte
def weigh(length: int, part: tuple[float, float], size: int, how: str, device: torch.device) -> tuple[int, Tensor]:
    """How the part of so many pixels, (start, end), makes `size` new ones: the first that counts, and a matrix (size,m)
    of float32 for it and those behind."""
    scale = (part[1] - part[0]) / size
    centres = part[0] + (np.arange(size) + 0.5) * scale
    if how == "nearest":  # Pillow adds up, and at the border of two pixels it matters how
        centres = np.cumsum([part[0] + 0.5 * scale, *[scale] * (size - 1)])
        nearest = np.clip(np.floor(centres).astype(int), 0, length - 1)
        first, last = int(nearest[0]), int(nearest[-1])
        weights = (nearest[:, None] == np.arange(first, last + 1)).astype(np.float64)
    else:
        reach, filtering = FILTERS[how]
        stretch = max(scale, 1.0)
        lows = np.maximum((centres - reach * stretch + 0.5).astype(int), 0)
        highs = np.minimum((centres + reach * stretch + 0.5).astype(int), length)
        first, last = int(lows.min()), int(highs.max()) - 1
        places = np.arange(first, last + 1)
        weights = filtering((places - centres[:, None] + 0.5) / stretch)
        weights *= (places >= lows[:, None]) & (places < highs[:, None])
        weights /= weights.sum(1, keepdims=True)
    return first, torch.from_numpy(weights.astype(np.float32)).to(device)


def resize(pictures: Tensor, size: tuple[int, int], box: Box, how: str) -> Tensor:
    """Pictures (N,C,H,W), uint8, from within a box to (N,C,*size): float32 of whole numbers, as of Pillow's resize, which
    rounds to 8 bits after each axis."""
    height, width = pictures.shape[-2:]
    left, top, right, bottom = box
    column, across = weigh(width, (left, right), size[1], how, pictures.device)
    row, down = weigh(height, (top, bottom), size[0], how, pictures.device)
    seen = pictures[..., row : row + down.shape[1], column : column + across.shape[1]].float()
    if TALL_FIRST and height - size[0] > 2 * max(0, width - size[1]):
        return _to_levels(_to_levels(down @ seen) @ across.T)
    return _to_levels(down @ _to_levels(seen @ across.T))


def _to_levels(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)  # halves go up, as in Pillow


@functools.lru_cache(maxsize=64)
def _weigh_cubic(length: int, size: int, device: torch.device) -> Tensor:
    """OpenCV's cubic weights of each old pixel in each of `size` new ones: a matrix (size,length). In float32, as there:
    many values lie where the next level begins."""
    centres = (np.arange(size) + 0.5) * (length / size) - 0.5
    first = np.floor(centres.astype(np.float32)).astype(int)
    x, a, one = centres.astype(np.float32) - first.astype(np.float32), np.float32(-0.75), np.float32(1)
    far = ((a * (x + one) - 5 * a) * (x + one) + 8 * a) * (x + one) - 4 * a
    near, next_ = (((a + 2) * t - (a + 3)) * t * t + one for t in (x, one - x))
    weights = np.zeros((size, length), np.float32)
    for step, own in enumerate((far, near, next_, one - far - near - next_), start=-1):
        np.add.at(weights, (np.arange(size), np.clip(first + step, 0, length - 1)), own)
    return torch.from_numpy(weights).to(device)


@functools.lru_cache(maxsize=64)
def _weigh_areas(length: int, size: int, device: torch.device) -> Tensor:
    """How much each of `size` new pixels covers of each old one: a matrix (size,length)."""
    edges = np.arange(size + 1) * (length / size)
    places = np.arange(length)
    covered = np.minimum(edges[1:, None], places + 1) - np.maximum(edges[:-1, None], places)
    weights = np.maximum(covered, 0)
    return torch.from_numpy((weights / weights.sum(1, keepdims=True)).astype(np.float32)).to(device)


def stretch(maps: Tensor, rows: int, columns: int) -> Tensor:
    """Maps (N,h,w), float32, at another size, as `draw.resize` does it: means of what is covered, or cubic."""
    height, width = maps.shape[-2:]
    weigh_both = _weigh_areas if rows <= height and columns <= width else _weigh_cubic
    return weigh_both(height, rows, maps.device) @ (maps @ weigh_both(width, columns, maps.device).T)


@functools.lru_cache(maxsize=16)
def _tables(colormap: str, alpha: float, signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of 256 levels: what is laid over a picture (3,256), and how much of the picture is kept (256,)."""
    colours, opacity = blending(colormap, signed=signed)
    opacity = alpha * opacity
    laid, kept = np.ascontiguousarray((colours * opacity).T, np.float32), np.float32(1 - opacity[:, 0])
    return torch.from_numpy(laid).to(device), torch.from_numpy(np.ascontiguousarray(kept)).to(device)


def overlay(
    pictures: Tensor,
    heatmaps: Tensor,
    *,
    region: Region,
    alpha: float = 0.5,
    colormap: str = "turbo",
    signed: bool = False,
    outline: bool = False,
) -> Tensor:
    """Pictures of one size, uint8 (N,3,H,W), with a heatmap (N,h,w) on each: `draw.overlay`, without its checks."""
    top, left, rows, columns = region
    levels = stretch(heatmaps.float().clamp(0, 1), rows, columns).clamp_(0, 1)
    steps, zero = 255, 0
    if signed:  # each sign by itself, as there
        levels -= stretch((-heatmaps.float()).clamp(0, 1), rows, columns).clamp_(0, 1)
        steps, zero = 127, 128
    chosen = levels.mul_(steps).round_().add_(zero).int()
    laid, kept = _tables(colormap, float(alpha), signed, pictures.device)
    result = pictures.clone()
    seen = result[:, :, top : top + rows, left : left + columns]
    shares = kept[chosen]
    for channel in range(3):  # one at a time takes a third of the memory
        mixed = (seen[:, channel] * shares).add_(laid[channel][chosen])
        seen[:, channel] = mixed.round_().clamp_(0, 255).to(torch.uint8)
    if outline and alpha > 0:
        height, width = pictures.shape[-2:]
        is_blank = (chosen == zero).flatten(1).all(1)
        _draw_outline(seen, is_blank, [top > 0, left > 0, top + rows < height, left + columns < width])
    return result


def _draw_outline(seen: Tensor, is_blank: Tensor, sides: list[bool]) -> None:
    """The lines of `draw.overlay`, on those that are not blank; which ones these are is not asked of the device."""
    width = max(1, round(min(seen.shape[-2:]) / LINE))
    skipped = is_blank[:, None, None, None]
    for inset, tone in ((width, LIGHT), (0, DARK)):
        edges: list[Any] = [slice(inset, inset + width), slice(-inset - width, -inset or None)]
        strips = [seen[..., edges[0], :], seen[..., edges[0]], seen[..., edges[1], :], seen[..., edges[1]]]
        for strip in (strip for strip, wanted in zip(strips, sides) if wanted):
            strip.copy_(torch.where(skipped, strip, strip // 4 + tone))
