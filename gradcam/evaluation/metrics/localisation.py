"""Whether a map is on the objects: its order, its maximum, its mass, and the box around what it marks, beside theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcam.errors import ImageError, shorten, show_fields
from gradcam.evaluation.subject import check_heatmaps, describe, to_unit
from gradcam.options import check_number, refuse

SHARE = 0.15  # of the maximum
ENOUGH = 0.5  # of overlap, for an object that counts as found
TOLERANCE = 15.0  # pixels

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Localisation:
    """The box that each map draws around its object, and how well it fits.

    Attributes
    ----------
    boxes : Tensor (N,4)
        The boxes, float32: left, top, right, bottom in pixels of the heatmap; zeros where the map is blank.
    iou : Tensor (N,)
        The overlap with the object that fits best, intersection over union, float32 in [0,1]; higher is better.
    errors : Tensor (N,)
        1 where the overlap is below one half, else 0, float32; lower is better.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import localisation
    >>> found = localisation(torch.ones(1, 8, 8), [[[0, 0, 4, 4]]])  # a constant map: its box is the whole picture
    >>> found.boxes, found.iou, found.errors
    (tensor([[0., 0., 8., 8.]]), tensor([0.2500]), tensor([1.]))
    """

    boxes: Tensor = field(repr=False)
    iou: Tensor
    errors: Tensor

    __repr__ = show_fields


def localisation(heatmaps: Any, boxes: Sequence[Any], *, share: float = SHARE) -> Localisation:
    """Draw the box around the largest connected part of each map, and measure its overlap with objects.

    Pixels above a share of the map's maximum count, and are connected to all eight around them. Of several largest
    parts the topmost is taken, then the leftmost. The overlap is intersection over union; of several objects the best
    one counts, as in ILSVRC. A constant map's box is the whole picture. A blank map has no box, and its overlap is 0.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One map per image, of any scale; negative values are zero.
    boxes : sequence of (B,4)
        For each image one or more objects: left, top, right, bottom in pixels of the heatmap, measured at the pixels'
        edges. The whole picture is 0, 0, W, H: right and bottom are not inside.
    share : float, default 0.15
        The share of the map's maximum that a pixel must exceed, from 0 to below 1.

    Returns
    -------
    Localisation
        The box of each map, its overlap, and whether that is an error.

    Raises
    ------
    ImageError
        For heatmaps or boxes of another form or number, and for empty boxes.
    GradcamError
        For a share that is not from 0 to below 1.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import localisation
    >>> heatmap = torch.zeros(1, 8, 8)
    >>> heatmap[0, 2:6, 2:6] = 1
    >>> found = localisation(heatmap, [[[2, 2, 6, 8]]])
    >>> found.boxes, found.iou
    (tensor([[2., 2., 6., 6.]]), tensor([0.6667]))

    References
    ----------
    Selvaraju et al., "Grad-CAM", ICCV 2017, section 4.1, for the share of 15 %.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise refuse(share, "share", "a share of the maximum from 0 to below 1, such as 0.15.")
    if not isinstance(boxes, (Sequence, Tensor, np.ndarray)) or not len(boxes):
        raise ImageError(f"The boxes are {shorten(boxes)}, expected for each image one or more as (B,4).")
    objects = [_check_boxes(each, number) for number, each in enumerate(boxes)]
    shape = tuple(getattr(getattr(heatmaps, "heatmaps", heatmaps), "shape", ()))
    found = to_unit(check_heatmaps(heatmaps, (len(objects), *shape[-2:])))  # of any height and width, for these boxes
    drawn = np.stack([_bound_largest(each) for each in (found > share).cpu().numpy().astype(np.uint8)])
    overlaps = [float(measure_overlap(box, each).max()) for box, each in zip(drawn, objects)]
    iou, marked = (torch.tensor(it, dtype=torch.float32, device=found.device) for it in (overlaps, drawn))
    return Localisation(marked, iou, (iou < ENOUGH).float())


def measure_overlap(box: Values, objects: Values) -> Values:
    """Intersection over union of one box (4,) with objects (B,4), which are not empty: (B,) in [0,1]."""
    starts, ends = np.maximum(box[:2], objects[:, :2]), np.minimum(box[2:], objects[:, 2:])
    common = (ends - starts).clip(min=0).prod(1)
    return np.asarray(common / ((box[2:] - box[:2]).prod() + (objects[:, 2:] - objects[:, :2]).prod(1) - common))


def _bound_largest(above: NDArray[np.uint8]) -> Values:
    """The box around the largest connected part of a mask (H,W); zeros where there is none."""
    from gradcam.images.opencv import cv2

    parts = cv2.connectedComponentsWithStats(above, connectivity=8)[2].tolist()[1:]  # without the background
    left, top, width, height, _ = max(parts, key=lambda it: (it[4], -it[1], -it[0]), default=[0] * 5)
    return np.array([left, top, left + width, top + height], dtype=np.float64)


def _check_boxes(boxes: Any, number: int) -> Values:
    try:
        found = np.asarray(boxes.detach().cpu() if isinstance(boxes, Tensor) else boxes, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    said = f"The boxes of image {number} are"
    if found.ndim != 2 or found.shape[1] != 4 or not len(found):
        raise ImageError(f"{said} {shorten(boxes)}, expected one or more as (B,4): left, top, right, bottom.")
    if not np.isfinite(found).all() or (found[:, 2:] <= found[:, :2]).any():
        raise ImageError(f"{said} {shorten(found.tolist())}: right must be greater than left, and bottom than top.")
    return found


def pointing_game(heatmaps: Any, masks: Any, *, tolerance: float = TOLERANCE) -> Tensor:
    """Ask whether the map's maximum is on the object, or near it; higher is better.

    Each image scores 1 where it is, else 0. Of several maxima each counts by its share. So a constant map scores the
    share of the picture that is on the object or near it, which is chance; a blank map scores 0. The mean over pictures
    is the paper's Hits / (Hits + Misses), for one class. TorchRay takes the first maximum alone, and leaves out a
    distance of exactly `tolerance`.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One map per image, of any sign and scale.
    masks : Tensor or array (N,H,W)
        bool, True where the object is.
    tolerance : float, default 15.0
        How far from the object the maximum may be, in pixels of the heatmap between the centres of two pixels. A
        distance of exactly that is within.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        For heatmaps or masks of another form, and for masks without an object.
    GradcamError
        For a tolerance that is no number from zero up.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import pointing_game
    >>> heatmap, mask = torch.zeros(1, 64, 64), torch.zeros(1, 64, 64, dtype=torch.bool)
    >>> heatmap[0, 10, 10], mask[0, 12:20, 12:20] = 1, True  # the maximum is 2.8 pixels from the object
    >>> pointing_game(heatmap, mask), pointing_game(heatmap, mask, tolerance=1)
    (tensor([1.]), tensor([0.]))

    References
    ----------
    Zhang et al., "Top-Down Neural Attention by Excitation Backprop", IJCV 2018, section 4.2.
    """
    check_number(tolerance, "tolerance", "a distance in pixels, 0 or more.")
    found, inside = _check(heatmaps, masks)
    maxima = found == found.amax((1, 2), keepdim=True)
    hits, all_maxima = (it.sum((1, 2), dtype=torch.float32) for it in (maxima & _grow(inside, tolerance), maxima))
    return torch.where(found.any(2).any(1), hits / all_maxima, 0.0)


def energy_pointing_game(heatmaps: Any, masks: Any) -> Tensor:
    """Measure the share of the map's mass that is on the object; higher is better.

    It is the sum of the map inside the object, divided by its sum. A constant map scores the object's share of the
    picture, which is chance; a blank one scores 0.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One map per image, of any scale; negative values are zero.
    masks : Tensor or array (N,H,W)
        bool, True where the object is.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        For heatmaps or masks of another form, and for masks without an object.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import energy_pointing_game
    >>> heatmap, mask = torch.ones(1, 4, 4), torch.zeros(1, 4, 4, dtype=torch.bool)
    >>> mask[0, :2] = True  # the object is the upper half
    >>> heatmap[0, :2] = 3  # where the map is three times as strong
    >>> energy_pointing_game(heatmap, mask)
    tensor([0.7500])

    References
    ----------
    Wang et al., "Score-CAM", CVPR Workshops 2020, section 4.3.
    """
    found, inside = _check(heatmaps, masks)
    unit = to_unit(found)
    mass = unit.sum((1, 2))
    return (unit * inside).sum((1, 2)) / torch.where(mass > 0, mass, 1.0)


def order_pointing_game(heatmaps: Any, masks: Any) -> Tensor:
    """Measure how often the map has more on the object than beside it; higher is better.

    It is the probability that a pixel of the object, drawn at random, has a larger value than a pixel of the rest of the
    picture; equal ones count half. That is the area under the ROC curve of the map as a detector of the object's pixels.
    Only the order of the pixels counts: raising a map to a power, which moves its mass to its peak, changes nothing.
    Constant and blank maps score 1/2, which is chance, and so does each map of an object that is all of the picture. As
    photographers like the middle, a blob there scores more than chance: compare with the control "centre".

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One map per image, of any sign and scale.
    masks : Tensor or array (N,H,W)
        bool, True where the object is.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        For heatmaps or masks of another form, and for masks without an object.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import energy_pointing_game, order_pointing_game
    >>> heatmap, mask = torch.tensor([[[0.1, 0.2], [0.5, 0.3]]]), torch.tensor([[[False, False], [True, True]]])
    >>> energy_pointing_game(heatmap, mask), energy_pointing_game(heatmap**8, mask)  # mass can be bought
    (tensor([0.7273]), tensor([0.9994]))
    >>> order_pointing_game(heatmap, mask), order_pointing_game(heatmap**8, mask)  # order cannot
    (tensor([1.]), tensor([1.]))

    References
    ----------
    Hanley and McNeil, "The Meaning and Use of the Area under a Receiver Operating Characteristic (ROC) Curve",
    Radiology, 1982.
    """
    return measure_order(*_check(heatmaps, masks))


def measure_order(maps: Tensor, inside: Tensor) -> Tensor:
    """How often a pixel inside has more than one outside, ties counting half: of maps and masks (N,H,W), float32 (N,).
    1/2 where there is no pixel on one of the sides."""
    found = []
    for values, own in zip(maps.cpu().numpy(), inside.cpu().numpy()):  # NumPy sorts several times faster than PyTorch
        ours, others = np.sort(values[own]), np.sort(values[~own])
        # How many of the others are below each of ours, and how many are not above it: whole numbers, which add up exactly.
        pairs = sum(int(np.searchsorted(others, ours, side=side).sum()) for side in ("left", "right"))
        most = 2 * len(ours) * len(others)
        found.append(pairs / most if most else 0.5)
    return torch.tensor(found, dtype=torch.float32, device=maps.device)


def _check(heatmaps: Any, masks: Any) -> tuple[Tensor, Tensor]:
    inside = torch.from_numpy(np.ascontiguousarray(masks)) if isinstance(masks, np.ndarray) else masks
    if not isinstance(inside, Tensor) or inside.dtype != torch.bool or inside.ndim != 3:
        what = describe(masks, Tensor, np.ndarray)
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
        wide = nn.functional.max_pool2d(values, (1, 2 * reach + 1), stride=1, padding=(0, reach))[:, 0] > 0
        grown[:, down:] |= wide[:, : rows - down]
        grown[:, : rows - down] |= wide[:, down:]
    return grown
