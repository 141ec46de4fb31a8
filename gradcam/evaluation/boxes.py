"""The box around what a map marks, and how well it agrees with the boxes around the objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.errors import GradcamError, ImageError, shorten, show_fields
from gradcam.evaluation.heatmaps import check_heatmaps, to_unit

SHARE = 0.15  # of the maximum
ENOUGH = 0.5  # of overlap, for an object that counts as found

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Localisation:
    """Where each map says that the object is, and whether it is there.

    `boxes`: float32 (N,4), left, top, right, bottom; zeros where the map is blank. `iou`: float32 (N,) in [0,1], the
    overlap with the nearest object; higher is better. `errors`: float32 (N,), 1 where it is below one half; lower is better.
    """

    boxes: Tensor = field(repr=False)
    iou: Tensor
    errors: Tensor

    __repr__ = show_fields


def localisation(heatmaps: Any, boxes: Sequence[Any], *, share: float = SHARE) -> Localisation:
    """The box around the largest connected part of each map above a share of its maximum, and its overlap with objects.

    `heatmaps`: (N,H,W), of any scale; negative values are zero. `boxes`: for each image, one or more objects as (B,4): left,
    top, right, bottom in pixels of the heatmap, measured at the pixels' edges, so that the whole picture is 0, 0, W, H and
    right and bottom are not inside. Selvaraju et al. (Grad-CAM, section 4.1) take a share of 15 %.

    Pixels are connected to all eight around them. Of several largest parts it is the topmost, then the leftmost. The
    overlap is that of intersection and union, and of several objects the best one, as ILSVRC counts it. A constant map's
    box is the whole picture; a blank map has none: its overlap is 0.

    Raises `ImageError` for heatmaps of another form, for boxes of another form or number and those that are empty, and
    `GradcamError` for a share out of range.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise GradcamError(
            f"share is {shorten(share)}, expected a share of the maximum from 0 to below 1, such as 0.15."
        )
    if not isinstance(boxes, (Sequence, Tensor, np.ndarray)) or not len(boxes):
        raise ImageError(f"The boxes are {shorten(boxes)}, expected for each image one or more as (B,4).")
    objects = [_check_boxes(each, number) for number, each in enumerate(boxes)]
    found = to_unit(check_heatmaps(heatmaps, _find_size(heatmaps, len(objects))))
    drawn = np.stack([_bound_largest(each) for each in (found > share).cpu().numpy()])
    overlaps = [float(measure_overlap(box, each).max()) for box, each in zip(drawn, objects)]
    iou = torch.tensor(overlaps, dtype=torch.float32, device=found.device)
    marked = torch.tensor(drawn, dtype=torch.float32, device=found.device)
    return Localisation(marked, iou, (iou < ENOUGH).float())


def measure_overlap(box: Values, objects: Values) -> Values:
    """Intersection over union of one box (4,) with objects (B,4), which are not empty: (B,) in [0,1]."""
    starts, ends = np.maximum(box[:2], objects[:, :2]), np.minimum(box[2:], objects[:, 2:])
    common = (ends - starts).clip(min=0).prod(1)
    return np.asarray(common / ((box[2:] - box[:2]).prod() + (objects[:, 2:] - objects[:, :2]).prod(1) - common))


def _bound_largest(above: NDArray[np.bool_]) -> Values:
    """The box around the largest connected part of a mask (H,W); zeros where there is none."""
    from gradcam.opencv import cv2

    _, _, parts, _ = cv2.connectedComponentsWithStats(above.astype(np.uint8), connectivity=8)
    if len(parts) == 1:  # the background
        return np.zeros(4)
    left, top, width, height, _ = max(parts[1:].tolist(), key=lambda part: (part[4], -part[1], -part[0]))
    return np.array([left, top, left + width, top + height], dtype=np.float64)


def _find_size(heatmaps: Any, images: int) -> tuple[int, ...]:
    """(N,H,W) that the heatmaps must have: any height and width, but one map for each image's boxes."""
    shape = tuple(getattr(getattr(heatmaps, "heatmaps", heatmaps), "shape", ()))
    return (images, *shape[-2:])


def _check_boxes(boxes: Any, number: int) -> Values:
    try:
        found = np.asarray(boxes.detach().cpu() if isinstance(boxes, Tensor) else boxes, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or found.shape[1] != 4 or not len(found):
        raise ImageError(
            f"The boxes of image {number} are {shorten(boxes)}, expected one or more as (B,4): left, top, right, bottom."
        )
    if not np.isfinite(found).all() or (found[:, 2:] <= found[:, :2]).any():
        raise ImageError(
            f"The boxes of image {number} are {shorten(found.tolist())}: right must be greater than left, and bottom than "
            "top."
        )
    return found
