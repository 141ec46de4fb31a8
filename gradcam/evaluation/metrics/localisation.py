"""Localisation metrics: how well the order, maximum, mass and box of a heatmap match annotated objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcam.errors import ImageError, format_fields, shorten
from gradcam.evaluation.subject import check_heatmaps, describe_tensor, scale_to_unit
from gradcam.options import BOX_THRESHOLD, argument_error, check_number
from gradcam.targets.object_choice import find_overlaps

MIN_SHARE_OF_MAXIMUM = 0.15  # Pixels with a smaller value are not part of a heatmap's box.
MIN_IOU = 0.5  # A smaller intersection over union is a localisation error.
TOLERANCE_PIXELS = 15.0
THRESHOLDS = tuple(step / 20 for step in range(1, 20))  # The thresholds of `corloc`, as shares of the maximum.

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Localisation:
    """The box around the main region of each heatmap, and its overlap with the object.

    Attributes
    ----------
    boxes : Tensor (N,4)
        The boxes, float32: left, top, right, bottom in pixels of the heatmap; zeros if the heatmap is blank.
    iou : Tensor (N,)
        The intersection over union with the best-fitting object, float32 in [0,1]; higher is better.
    errors : Tensor (N,)
        1 if the overlap is below 0.5, else 0, float32; lower is better.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import localisation
    >>> result = localisation(torch.ones(1, 8, 8), [[[0, 0, 4, 4]]])  # a constant heatmap: its box is the whole image
    >>> result.boxes, result.iou, result.errors
    (tensor([[0., 0., 8., 8.]]), tensor([0.2500]), tensor([1.]))
    """

    boxes: Tensor = field(repr=False)
    iou: Tensor
    errors: Tensor

    __repr__ = format_fields


def localisation(heatmaps: Any, boxes: Sequence[Any], *, share: float = MIN_SHARE_OF_MAXIMUM) -> Localisation:
    """Find the box around the largest connected part of each heatmap, and measure its overlap with objects.

    A pixel belongs to a part if its value exceeds `share` times the heatmap's maximum. Pixels are connected to their
    eight neighbours. If several parts are equally large, the part with the highest top edge is used. If several top
    edges are equally high, the leftmost part is used. The overlap is intersection over union. If there are several
    objects, the best overlap counts, as in ILSVRC. The box of a constant heatmap is the whole image. A blank heatmap
    has no box, and its overlap is 0.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, of any scale; negative values count as zero.
    boxes : sequence of (B,4)
        One or more objects per image: left, top, right, bottom in pixels of the heatmap. Coordinates refer to the edges
        of pixels: a box around the whole image is 0, 0, W, H.
    share : float, default 0.15
        The share of the heatmap's maximum that a pixel must exceed, from 0 to below 1.

    Returns
    -------
    Localisation
        The box of each heatmap, its overlap with the object, and whether the overlap is too small (an error).

    Raises
    ------
    ImageError
        If the heatmaps are not (N,H,W), if an image has no boxes, if its boxes are not (B,4), or if a box is empty.
    GradcamError
        If the share is below 0, or is 1 or more.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import localisation
    >>> heatmap = torch.zeros(1, 8, 8)
    >>> heatmap[0, 2:6, 2:6] = 1
    >>> result = localisation(heatmap, [[[2, 2, 6, 8]]])
    >>> result.boxes, result.iou
    (tensor([[2., 2., 6., 6.]]), tensor([0.6667]))

    References
    ----------
    Selvaraju et al., "Grad-CAM", ICCV 2017, section 4.1, for the share of 15 %.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise argument_error(share, "share", "a share of the maximum from 0 to below 1, such as 0.15.")
    if not isinstance(boxes, (Sequence, Tensor, np.ndarray)) or not len(boxes):
        raise ImageError(f"The boxes are {shorten(boxes)}, expected one or more boxes per image, as an array (B,4).")
    objects = [_check_boxes(image_boxes, number) for number, image_boxes in enumerate(boxes)]
    shape = tuple(getattr(getattr(heatmaps, "heatmaps", heatmaps), "shape", ()))
    # There must be one heatmap per image in `boxes`. Heatmaps may have any height and width.
    units = scale_to_unit(check_heatmaps(heatmaps, (len(objects), *shape[-2:])))
    main_boxes = np.stack([_bound_largest(mask) for mask in (units > share).cpu().numpy().astype(np.uint8)])
    pairs = zip(main_boxes.tolist(), map(torch.from_numpy, objects))
    overlaps = [float(find_overlaps(image_boxes, box).max()) for box, image_boxes in pairs]
    iou = torch.tensor(overlaps, dtype=torch.float32, device=units.device)
    return Localisation(torch.from_numpy(main_boxes).to(iou), iou, (iou < MIN_IOU).float())


@dataclass(frozen=True, eq=False)
class CorLoc:
    """How well the boxes of heatmaps fit the objects at several thresholds, and at a threshold chosen on other images.

    Attributes
    ----------
    iou : Tensor (N,T)
        The overlap of each heatmap's box with the best-fitting object at the thresholds 0.05, 0.10, ... 0.95, float32.
    hits : Tensor (N,)
        1 if the overlap is at least 0.5 at the chosen threshold, else 0, float32; higher is better.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import corloc
    >>> result = corloc(torch.eye(8)[None].repeat(2, 1, 1), [[[0, 0, 8, 8]], [[0, 0, 8, 4]]])
    >>> result.iou.shape, result.hits
    (torch.Size([2, 19]), tensor([1., 1.]))
    """

    iou: Tensor = field(repr=False)
    hits: Tensor

    __repr__ = format_fields


def corloc(heatmaps: Any, boxes: Sequence[Any]) -> CorLoc:
    """Measure how often the box of a heatmap fits the object, at a threshold that is chosen on other images.

    The box is around the largest connected part of the pixels above the threshold, as in `localisation`. A box fits if
    its intersection over union with an object is at least 0.5. The mean of `hits` is CorLoc; with known classes, it is
    also called GT-known Loc. The best threshold differs between methods, so a fixed threshold would favour some methods,
    as Choe et al. showed. Their MaxBoxAcc therefore uses the best threshold for the same images, which is optimistic.
    Here, the even images use the threshold with the most hits for the odd images, and vice versa. If several thresholds
    have equally many hits, the threshold with the largest mean overlap is used. A single image uses the default
    threshold of `gradcam.find_boxes`.

    In `evaluate`, images are counted in the order of their SHA-256, so that their names and order do not matter. The
    thresholds are chosen after the last image. Until then, each image has the result at the default threshold.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, of any scale; negative values count as zero.
    boxes : sequence of (B,4)
        One or more objects per image, as in `localisation`.

    Returns
    -------
    CorLoc
        The overlaps at all thresholds, and the hits.

    Raises
    ------
    ImageError
        As in `localisation`.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import corloc
    >>> heatmaps = torch.zeros(2, 8, 8)
    >>> heatmaps[:, 2:6, 2:6] = 0.5
    >>> heatmaps[:, 2, 2] = 1  # above half of the maximum, the box is a single pixel
    >>> corloc(heatmaps, [[[2, 2, 6, 6]], [[2, 2, 6, 5]]]).hits  # each image uses the threshold that fits the other
    tensor([1., 1.])
    >>> corloc(heatmaps, [[[2, 2, 6, 6]], [[2, 2, 3, 3]]]).hits  # here, this threshold is wrong for both
    tensor([0., 0.])

    References
    ----------
    Deselaers et al., "Weakly Supervised Localization and Learning with Generic Knowledge", IJCV 2012, for CorLoc. Choe
    et al., "Evaluating Weakly Supervised Object Localization Methods Right", CVPR 2020, for the thresholds.
    """
    iou = torch.stack([localisation(heatmaps, boxes, share=threshold).iou for threshold in THRESHOLDS], 1)
    return CorLoc(iou, torch.from_numpy(find_held_out_hits(iou.cpu().numpy())).to(iou))


def find_held_out_hits(iou: NDArray[Any]) -> Values:
    """Return each image's hit (N,), 1 or 0, at the threshold that is best for the other half of overlaps (N,T)."""
    iou = np.reshape(iou, (-1, len(THRESHOLDS)))  # If there is no image, `iou` is empty.
    hits, result = (iou >= MIN_IOU).astype(np.float64), np.zeros(len(iou))
    for half in (0, 1):
        others = slice(1 - half, None, 2)
        # More hits are better. Ties are broken by the mean overlap, then by the distance from the default threshold.
        scores = hits[others].sum(0) + iou[others].sum(0) / (len(iou) + 1)
        best = np.argmax(scores - 1e-6 * np.abs(np.array(THRESHOLDS) - BOX_THRESHOLD))
        result[half::2] = hits[half::2, best]
    return result


def _bound_largest(mask: NDArray[np.uint8]) -> Values:
    """Return the box around the largest connected part of a mask (H,W); zeros if the mask is empty."""
    from gradcam.images.regions import label_components

    return np.array(next((box for _, box in label_components(mask)[1]), [0] * 4), dtype=np.float64)


def _check_boxes(boxes: Any, number: int) -> Values:
    try:
        array = np.asarray(boxes.detach().cpu() if isinstance(boxes, Tensor) else boxes, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    subject = f"The boxes of image {number} are"
    if array.ndim != 2 or array.shape[1] != 4 or not len(array):
        expected = "an array (B,4) of one or more boxes: left, top, right, bottom"
        raise ImageError(f"{subject} {shorten(boxes)}, expected {expected}.")
    if not np.isfinite(array).all() or (array[:, 2:] <= array[:, :2]).any():
        raise ImageError(f"{subject} {shorten(array.tolist())}: right must be greater than left, and bottom than top.")
    return array


def pointing_game(heatmaps: Any, masks: Any, *, tolerance: float = TOLERANCE_PIXELS) -> Tensor:
    """Measure whether the heatmap's maximum is on or near the object; higher is better.

    An image scores 1 if the maximum is on or near the object, else 0. If there are several equal maxima, the score is
    the share of the maxima that are on or near the object. In a constant heatmap, every pixel is a maximum. The score
    is then chance: the share of the image's pixels that are on or near the object. A blank heatmap scores 0. The mean
    over images is the paper's Hits / (Hits + Misses) for one class. TorchRay uses only the first maximum, and counts a
    distance of exactly `tolerance` as a miss.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, of any sign and scale.
    masks : Tensor or array (N,H,W)
        bool, True on the object.
    tolerance : float, default 15.0
        The largest distance from the object that still counts as near, in pixels of the heatmap. Distances are measured
        between the centres of pixels.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        If the heatmaps are not (N,H,W), if the masks are not bool of the same shape, or if a mask has no object.
    GradcamError
        If the tolerance is negative.

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
    maps, inside = _check(heatmaps, masks)
    maxima = maps == maps.amax((1, 2), keepdim=True)
    hits, all_maxima = (mask.sum((1, 2), dtype=torch.float32) for mask in (maxima & _dilate(inside, tolerance), maxima))
    return torch.where(maps.any(2).any(1), hits / all_maxima, 0.0)


def energy_pointing_game(heatmaps: Any, masks: Any) -> Tensor:
    """Measure the share of the heatmap's mass that is on the object; higher is better.

    The score is the heatmap's sum on the object divided by the heatmap's sum over the image. The score of a constant
    heatmap is chance: the object's share of the image. A blank heatmap scores 0.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, of any scale; negative values count as zero.
    masks : Tensor or array (N,H,W)
        bool, True on the object.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        If the heatmaps are not (N,H,W), if the masks are not bool of the same shape, or if a mask has no object.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import energy_pointing_game
    >>> heatmap, mask = torch.ones(1, 4, 4), torch.zeros(1, 4, 4, dtype=torch.bool)
    >>> mask[0, :2] = True  # the object is the upper half
    >>> heatmap[0, :2] = 3  # where the heatmap is three times as strong
    >>> energy_pointing_game(heatmap, mask)
    tensor([0.7500])

    References
    ----------
    Wang et al., "Score-CAM", CVPR Workshops 2020, section 4.3.
    """
    maps, inside = _check(heatmaps, masks)
    return measure_share(scale_to_unit(maps), inside)


def order_pointing_game(heatmaps: Any, masks: Any) -> Tensor:
    """Measure how often the heatmap is higher on the object than outside the object; higher is better.

    The score is the probability that a random pixel of the object has a larger value than a random pixel outside; equal
    values count half. This probability is the area under the ROC curve of the heatmap as a detector of the object's
    pixels. Only the order of the values counts. For example, raising a heatmap to a power does not change the score.
    Constant and blank heatmaps score 1/2, which is chance. If the object fills the image, every heatmap scores 1/2.
    Objects are often near the centre, so even a blob in the centre scores above chance. Compare with the control map
    "centre".

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, of any sign and scale.
    masks : Tensor or array (N,H,W)
        bool, True on the object.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        If the heatmaps are not (N,H,W), if the masks are not bool of the same shape, or if a mask has no object.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import energy_pointing_game, order_pointing_game
    >>> heatmap, mask = torch.tensor([[[0.1, 0.2], [0.5, 0.3]]]), torch.tensor([[[False, False], [True, True]]])
    >>> energy_pointing_game(heatmap, mask), energy_pointing_game(heatmap**8, mask)  # sharpening raises the mass
    (tensor([0.7273]), tensor([0.9994]))
    >>> order_pointing_game(heatmap, mask), order_pointing_game(heatmap**8, mask)  # but not the order
    (tensor([1.]), tensor([1.]))

    References
    ----------
    Hanley and McNeil, "The Meaning and Use of the Area under a Receiver Operating Characteristic (ROC) Curve",
    Radiology, 1982.
    """
    return measure_order(*_check(heatmaps, masks))


def measure_share(maps: Tensor, masks: Tensor) -> Tensor:
    """Return the share of each non-negative map's sum inside the mask, (N,). The share of a blank map is 0."""
    total = maps.sum((1, 2))
    return (maps * masks).sum((1, 2)) / torch.where(total > 0, total, 1.0)


def measure_order(maps: Tensor, inside: Tensor) -> Tensor:
    """Return how often a pixel inside the mask has a larger value than a pixel outside: float32 (N,); ties count half.

    If the mask is empty, or covers the whole map, the result is 1/2.
    """
    scores = []
    for values, mask in zip(maps.cpu().numpy(), inside.cpu().numpy()):  # NumPy sorts several times faster than PyTorch.
        inner, outer = np.sort(values[mask]), np.sort(values[~mask])
        # Sums of integers are exact. A pair of pixels therefore counts two if the inner value is larger, and one in a
        # tie.
        pairs = sum(int(np.searchsorted(outer, inner, side=side).sum()) for side in ("left", "right"))
        max_pairs = 2 * len(inner) * len(outer)
        scores.append(pairs / max_pairs if max_pairs else 0.5)
    return torch.tensor(scores, dtype=torch.float32, device=maps.device)


def _check(heatmaps: Any, masks: Any) -> tuple[Tensor, Tensor]:
    inside = torch.from_numpy(np.ascontiguousarray(masks)) if isinstance(masks, np.ndarray) else masks
    if not isinstance(inside, Tensor) or inside.dtype != torch.bool or inside.ndim != 3:
        description = describe_tensor(masks, Tensor, np.ndarray)
        raise ImageError(f"The masks are {description}, expected bool (N,H,W): one mask per image, True on the object.")
    maps = check_heatmaps(heatmaps, inside.shape)
    empty = (~inside.any(2).any(1)).nonzero().flatten().tolist()
    if empty:
        raise ImageError(f"The mask of image {empty[0]} has no object: leave out images without an object.")
    return maps, inside.to(maps.device)


def _dilate(masks: Tensor, tolerance: float) -> Tensor:
    """Dilate masks (N,H,W) by a disk: widen each row, and copy the widened row to the rows above and below."""
    rows, columns = masks.shape[1:]
    values, dilated = masks[:, None].float(), masks.clone()
    for shift in range(min(math.floor(tolerance), rows - 1) + 1):
        half_width = min(math.floor(math.sqrt(tolerance**2 - shift**2)), columns)
        widened = nn.functional.max_pool2d(values, (1, 2 * half_width + 1), stride=1, padding=(0, half_width))[:, 0] > 0
        dilated[:, shift:] |= widened[:, : rows - shift]
        dilated[:, : rows - shift] |= widened[:, shift:]
    return dilated
