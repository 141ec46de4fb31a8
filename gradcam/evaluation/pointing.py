"""Whether a map points to the object: its maximum, and its mass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.errors import GradcamError, ImageError, shorten
from gradcam.evaluation.heatmaps import check_heatmaps, to_unit

TOLERANCE = 15.0  # pixels


def pointing_game(heatmaps: Any, masks: Any, *, tolerance: float = TOLERANCE) -> Tensor:
    """1 where the map's maximum is on the object, or within `tolerance` pixels of it; float32 (N,). Higher is better.

    `heatmaps`: (N,H,W), of any sign and scale. `masks`: bool (N,H,W), where the object is. The distance is that of the
    centres of two pixels, in pixels of the heatmap; one of exactly `tolerance` is within. Of several maxima each counts
    by its share: a constant map scores the share of the picture that is on the object or near it, which is chance. A blank
    map points nowhere: 0. The mean over pictures is Zhang et al.'s Hits / (Hits + Misses) (2018, section 4.2), for one
    class; TorchRay takes the first maximum alone, and leaves out a distance of exactly `tolerance`.

    Raises `ImageError` for heatmaps or masks of another form, for masks without an object, and `GradcamError` for a
    tolerance that is no length.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise GradcamError(f"tolerance is {shorten(tolerance)}, expected a distance in pixels, 0 or more.")
    found, inside = _check(heatmaps, masks)
    maxima = found == found.amax((1, 2), keepdim=True)
    hits, all_maxima = (it.sum((1, 2), dtype=torch.float32) for it in (maxima & _grow(inside, tolerance), maxima))
    return torch.where(found.any(2).any(1), hits / all_maxima, 0.0)


def energy_pointing_game(heatmaps: Any, masks: Any) -> Tensor:
    """The share of the map's mass that is on the object, float32 (N,) in [0,1]. Higher is better.

    `heatmaps`: (N,H,W), of any scale; negative values are zero. `masks`: bool (N,H,W), where the object is. Wang et al.
    (Score-CAM, 2020, section 4.3): the sum of the map inside, divided by its sum. A constant map scores the object's share
    of the picture, which is chance; a blank one 0.

    Raises `ImageError` for heatmaps or masks of another form, and for masks without an object.
    """
    found, inside = _check(heatmaps, masks)
    unit = to_unit(found)
    mass = unit.sum((1, 2))
    return (unit * inside).sum((1, 2)) / torch.where(mass > 0, mass, 1.0)


def _check(heatmaps: Any, masks: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors (N,H,W) on the heatmaps' device."""
    inside = torch.from_numpy(np.ascontiguousarray(masks)) if isinstance(masks, np.ndarray) else masks
    if not isinstance(inside, Tensor) or inside.dtype != torch.bool or inside.ndim != 3:
        what = f"{masks.dtype} {tuple(masks.shape)}" if isinstance(masks, (Tensor, np.ndarray)) else shorten(masks)
        raise ImageError(f"The masks are {what}, expected bool (N,H,W): where the object is, one for each image.")
    found = check_heatmaps(heatmaps, inside.shape)
    empty = (~inside.any(2).any(1)).nonzero().flatten().tolist()
    if empty:
        raise ImageError(f"There is no object in the mask of image {empty[0]}: leave out images without one.")
    return found, inside.to(found.device)


def _grow(masks: Tensor, tolerance: float) -> Tensor:
    """The pixels of masks (N,H,W), and those within so many pixels of one: each row is widened, and copied up and down."""
    rows, columns = masks.shape[1:]
    values, grown = masks[:, None].float(), masks.clone()
    for down in range(min(math.floor(tolerance), rows - 1) + 1):
        reach = min(math.floor(math.sqrt(tolerance**2 - down**2)), columns)
        wide = F.max_pool2d(values, (1, 2 * reach + 1), stride=1, padding=(0, reach))[:, 0] > 0
        grown[:, down:] |= wide[:, : rows - down]
        grown[:, : rows - down] |= wide[:, down:]
    return grown
