"""Measure which part of an image an image processor returns, and where this part lies in the output.

The processor is run on brightness ramps. In a ramp, the value of a pixel encodes the pixel's position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.hooks.containers import Window
from gradcam.images.read import Region

CALIBRATION_SIDE = 64  # side in pixels of the black and the white image of `calibrate`
# Slope of a ramp in the perpendicular direction. For example, a ramp from left to right also rises by 37.4 of 255
# levels from top to bottom. Each row then has other rounding errors, which almost cancel in the mean over the rows.
TILT = 37.4 / 255
TRIMMED_SHARE = 0.1  # fraction ignored at each end of a ramp, because resizing mixes padding into it
# The outputs for the two ramps differ in image pixels (except on the diagonal), and are equal in padding. A row belongs
# to the image if its number of differing pixels exceeds this fraction of the largest number in any row. The same rule
# applies to columns.
MIN_VALID_SHARE = 0.2
TOLERANCE_LEVELS = 2  # maximum mean deviation of a ramp from a straight line, in levels from 0 to 255
SNAP_PIXELS = 0.05  # An edge within this distance of a pixel boundary is moved to the boundary.

# The `region`, `window` and `scales` of a `Piece` along one axis: (start, length), (start, length), scale.
Extents = tuple[tuple[int, int], tuple[float, float], float]
Process = Callable[[NDArray[np.uint8]], Tensor]  # from an image (H,W,3) to tensors (P,C,h,w)


@dataclass(frozen=True)
class Piece:
    """The part of an image in a processor's output tensor (C,h,w), and the position of this part in the tensor.

    `region` is the part of the image, in whole image pixels. `window` is the position of this part in the tensor, in
    fractional tensor pixels. Both are (top, left, height, width). Outside the window, the tensor has padding. `scales`
    is the number of tensor pixels per image pixel: vertical, horizontal. `size` and `image` are the (height, width) of
    the tensor and of the image.
    """

    region: Region
    window: Window
    scales: tuple[float, float]
    size: tuple[int, int]
    image: tuple[int, int]


def calibrate(process: Process) -> tuple[float, float]:
    """Return a processor's output value for black, and the difference between its values for white and black."""
    shape = (CALIBRATION_SIDE, CALIBRATION_SIDE, 3)
    black, white = (process(np.full(shape, level, np.uint8))[0].double().mean(0) for level in (0, 255))
    contrasts = white - black
    is_image = contrasts.abs() > contrasts.abs().amax() / 2  # In padding, the contrast is 0.
    return black[is_image].median().item(), contrasts[is_image].median().item()


def measure(process: Process, height: int, width: int, black: float, contrast: float) -> list[Piece]:
    """Return a `Piece` for each tensor that the processor returns for an image of this size.

    `black` and `contrast` are the results of `calibrate`. The processor is run on two ramps, one from top to bottom and
    one from left to right. Pixels with equal outputs are padding. Raises `ImageError` if an output is not a ramp.
    """
    y, x = ((np.arange(length, dtype=np.float32) + 0.5) * (255 / length) for length in (height, width))
    ramps = (share * y[:, None] + (1 - share) * x for share in (1 - TILT, TILT))
    images = (np.rint(ramp).astype(np.uint8)[..., None].repeat(3, 2) for ramp in ramps)
    down, across = ((process(image).float().mean(1) - black) / contrast for image in images)
    pairs = (down, across), (across, down)
    straightened = (((1 - TILT) * ramp - TILT * tilted) / (1 - 2 * TILT) for ramp, tilted in pairs)
    pieces = []
    for differs, y, x in zip((down - across).abs() > 0.5 / 255, *straightened):
        (top, rows), (y0, window_rows), down_scale = _fit_axis(y.T, differs.T, height)
        (left, columns), (x0, window_columns), across_scale = _fit_axis(x, differs, width)
        region, window = (top, left, rows, columns), (y0, x0, window_rows, window_columns)
        pieces.append(Piece(region, window, (down_scale, across_scale), (x.shape[0], x.shape[1]), (height, width)))
    return pieces


def _fit_axis(positions: Tensor, differs: Tensor, length: int) -> Extents:
    """Fit a line to the image positions in a tensor along one axis, and return the extents."""
    columns, rows = (_find_valid(differs.float().mean(axis)) for axis in (0, 1))
    values = positions[_trim(rows)][:, columns] * length
    profile = values.mean(0)
    # In padding that mirrors the image, positions run backwards. The smallest and the largest position are therefore at
    # the ends of the image.
    first, last = int(profile.argmin()), int(profile.argmax())
    if last - first < 2:
        raise ImageError("it does more than resize, crop and pad")
    inner = _trim(torch.arange(first, last + 1, dtype=torch.int64, device="cpu"))
    centres = columns[inner].double() + 0.5
    slope, start = np.polyfit(centres.numpy(), profile[inner].numpy(), 1).tolist()
    error = (values[:, inner] - (start + slope * centres)).abs().mean().item()
    if slope <= 0 or error > length * TOLERANCE_LEVELS / 255 + slope:
        raise ImageError("it does more than resize, crop and pad")
    return _cut(start, slope, length, (int(columns[0]), int(columns[-1]) + 1), positions.shape[1])


def _cut(start: float, slope: float, length: int, valid: tuple[int, int], side: int) -> Extents:
    """Return the extents along an axis, given that tensor pixel u shows the image position `start + slope * u`."""
    tolerance = max(SNAP_PIXELS, 0.1 / slope)
    ends = [-start / slope, (length - start) / slope]  # both ends of the image, in tensor pixels
    # If the image was cropped and then padded, its ends are outside the tensor. Use the limits of the valid pixels.
    visible = [valid[0] if valid[0] > ends[0] + 2 else ends[0], valid[1] if valid[1] < ends[1] - 2 else ends[1]]
    visible = [min(max(end, 0), side) for end in visible]
    first, last = (min(max(round(start + slope * end), 0), length) for end in visible)
    first, last = min(first, length - 1), max(last, first + 1)
    edges = [end if end in (0, side) else (position - start) / slope for end, position in zip(visible, (first, last))]
    edges = [round(edge) if abs(edge - round(edge)) <= tolerance else edge for edge in edges]
    return (first, last - first), (edges[0], edges[1] - edges[0]), 1 / slope


def _find_valid(fractions: Tensor) -> Tensor:
    """Return the indices of the rows or columns that show the image instead of padding."""
    if not fractions.any():
        raise ImageError("a part of its output does not depend on the image")
    return (fractions > MIN_VALID_SHARE * fractions.max()).nonzero()[:, 0]


def _trim(indices: Tensor) -> Tensor:
    count = int(len(indices) * TRIMMED_SHARE)
    return indices[count : len(indices) - count]
