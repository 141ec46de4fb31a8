"""Heatmaps of any library, checked: what every metric takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import ImageError, shorten
from gradcam.explanation import Explanation


def check_heatmaps(heatmaps: Any, size: Sequence[int] | None = None, device: torch.device | None = None) -> Tensor:
    """Heatmaps as float32 (N,H,W) on `device`: tensors or arrays (N,H,W) or (N,1,H,W), or an `Explanation` of one class.

    `size`: (N,H,W), that of the images, None where they do not matter. Values may be of any sign and scale: what each metric
    does with them is said there. Raises `ImageError` for heatmaps of another form or size, and for NaN and infinite values.
    """
    values = heatmaps.heatmaps if isinstance(heatmaps, Explanation) else heatmaps
    try:
        found = to_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ImageError(f"The heatmaps are {shorten(heatmaps)}, expected a tensor or an array (N,H,W).") from None
    if found.ndim == 4 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim != 3 or found.is_complex():
        raise ImageError(f"The heatmaps have the shape {tuple(found.shape)}, expected (N,H,W): one for each image.")
    if size is not None and tuple(found.shape) != tuple(size):
        raise ImageError(
            f"The heatmaps have the shape {tuple(found.shape)}, and the images {tuple(size)}: there must be one for each "
            'image, at its size. torch.nn.functional.interpolate(maps[:, None], size=(H, W), mode="bilinear") resizes maps.'
        )
    found = found.to(device if device is not None else found.device, torch.float32)
    if not found.isfinite().all():
        raise ImageError("The heatmaps hold NaN or infinite values: a metric of these would say nothing.")
    return found


def to_tensor(values: Any) -> Tensor:
    """A tensor itself, detached; arrays and nested sequences on the processor, whatever PyTorch's default device is."""
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def to_unit(heatmaps: Tensor) -> Tensor:
    """Heatmaps (N,H,W) in [0,1]: negative values are zero, and each is divided by its maximum; a blank one stays zero."""
    positive = heatmaps.clamp(min=0)
    largest = positive.amax((1, 2), keepdim=True)
    return positive / torch.where(largest > 0, largest, 1.0)
