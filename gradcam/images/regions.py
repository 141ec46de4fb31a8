"""Turn heatmaps into masks and boxes: the pixels above a threshold, and their connected components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import ImageError
from gradcam.images.draw import resize
from gradcam.images.opencv import cv2
from gradcam.images.read import Region, describe_array, to_numpy
from gradcam.options import BOX_THRESHOLD, check_boxes

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class HeatmapBox:
    """The box around a region of a heatmap, in pixels.

    Attributes
    ----------
    left, top, right, bottom : int
        The edges. `right` and `bottom` are exclusive: the width of the box is ``right - left``.
    score : float
        The maximum of the heatmap in the region. It is not the probability of the class.
    index : int or None
        The explained class; None if it is unknown.
    label : str or None
        The name of the class, or the text of the target; None if it is unknown.

    Examples
    --------
    >>> from gradcam.images.regions import HeatmapBox
    >>> box = HeatmapBox(40, 20, 100, 90, score=1.0, index=285, label="Egyptian cat")
    >>> box.label, box.edges
    ('Egyptian cat', (40, 20, 100, 90))
    """

    left: int
    top: int
    right: int
    bottom: int
    score: float
    index: int | None = None
    label: str | None = None

    @property
    def edges(self) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom."""
        return self.left, self.top, self.right, self.bottom


def find_boxes(heatmap: Any, *, threshold: float = BOX_THRESHOLD, method: str = "largest") -> list[HeatmapBox]:
    """Find boxes around the regions where a heatmap reaches a share of its maximum.

    A region is a connected component of the pixels whose value is at least `threshold` times the heatmap's maximum.
    Pixels are connected to their eight neighbours. Zhou et al. took the box around the largest region, with a threshold
    of 0.2; Selvaraju et al. took 0.15. Choe et al. showed that the best threshold depends on the method and the data.
    For the sample photographs, the best thresholds of Grad-CAM are from 0.15 to 0.4 for the centre crop, and from 0.4
    to 0.55 for the whole image. For seven methods, on the centre crop and on the whole image, thresholds from 0.25 to
    0.35 give the most correct boxes (120 to 122 of 154). The default is therefore 0.3. If you have annotated images,
    ``gradcam evaluate --annotations`` measures how well a threshold transfers to other images (metric "corloc").

    Parameters
    ----------
    heatmap : array or Tensor (H,W)
        Any real numbers. Negative values count as zero, so a signed heatmap gives the regions of positive evidence.
    threshold : float, default 0.3
        The share of the maximum that a pixel must reach, above 0 and at most 1.
    method : str, default "largest"
        "largest" finds the box of the largest region. "components" finds a box for each region, the largest first.

    Returns
    -------
    list of HeatmapBox
        The boxes, without a class. The list is empty if no value of the heatmap is positive.

    Raises
    ------
    ImageError
        If the heatmap is not an array (H,W) of finite real numbers.
    GradcamError
        If the threshold is out of range, or the method is unknown.

    Examples
    --------
    >>> import gradcam
    >>> import numpy as np
    >>> heatmap = np.zeros((8, 8))
    >>> heatmap[1:4, 1:7], heatmap[6, 2] = 0.5, 1
    >>> gradcam.find_boxes(heatmap)
    [HeatmapBox(left=1, top=1, right=7, bottom=4, score=0.5, index=None, label=None)]
    >>> [box.edges for box in gradcam.find_boxes(heatmap, method="components")]
    [(1, 1, 7, 4), (2, 6, 3, 7)]

    References
    ----------
    Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016, section 3.2. Selvaraju et al.,
    "Grad-CAM", ICCV 2017, section 4.1. Choe et al., "Evaluating Weakly Supervised Object Localization Methods Right",
    CVPR 2020.
    """
    check_boxes(threshold, method)
    values, boxes = _check_heatmap(heatmap), []
    components, rows = label_components(find_mask(values, threshold=threshold))
    for number, (left, top, right, bottom) in rows[: 1 if method == "largest" else None]:
        part = slice(top, bottom), slice(left, right)
        boxes.append(HeatmapBox(left, top, right, bottom, float(values[part][components[part] == number].max())))
    return boxes


def find_mask(heatmap: Any, *, threshold: float = BOX_THRESHOLD) -> Mask:
    """Return the pixels, bool (H,W), whose value is at least `threshold` times the heatmap's maximum."""
    check_boxes(threshold)
    values = _check_heatmap(heatmap)
    return np.asarray((values > 0) & (values >= threshold * values.max()))


def label_components(mask: NDArray[Any]) -> tuple[NDArray[Any], list[tuple[int, Sequence[int]]]]:
    """Find the connected components of a mask; return the number of each pixel (H,W), and (number, box) pairs.

    Components are in order of size, the largest first. Equally large components are ordered from top to bottom, then
    from left to right. A box is (left, top, right, bottom).
    """
    labels, stats = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)[1:3]
    rows = [(n, row) for n, row in enumerate(stats.tolist()) if n > 0]  # Component 0 is the background.
    rows.sort(key=lambda pair: (-pair[1][4], pair[1][1], pair[1][0]))
    return np.asarray(labels), [(n, (x, y, x + width, y + height)) for n, (x, y, width, height, _) in rows]


def encode_mask(mask: Mask) -> bytes:
    """Return a mask (H,W) as the bytes of a grey PNG file with the values 0 and 255."""
    return cv2.imencode(".png", mask.astype(np.uint8) * 255)[1].tobytes()


def place_heatmap(heatmap: Any, region: Region, height: int, width: int) -> NDArray[np.float32]:
    """Stretch a heatmap's positive values over the region of an image, and return values (H,W) in [0,1]."""
    values, (y0, x0, rows, columns) = _check_heatmap(heatmap), region
    placed = np.zeros((height, width), np.float32)
    # Clip after resizing as well, because cubic interpolation overshoots.
    placed[y0 : y0 + rows, x0 : x0 + columns] = resize(values.clip(0, 1), rows, columns).clip(0, 1)
    return placed


def _check_heatmap(heatmap: Any) -> NDArray[np.float32]:
    values = np.asarray(to_numpy(heatmap))
    if values.ndim != 2 or not values.size or values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        raise ImageError(f"The heatmap is {describe_array(values)}, expected one map: finite numbers (H,W).")
    return values.astype(np.float32, copy=False)
