"""Remove parts of an image with a brush or a rectangular window. An edit can be written as a text without spaces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, ImageError, shorten
from gradcam.images.read import Pixels
from gradcam.images.write import check_pixels, shrink_to_fit
from gradcam.options import EDIT_FORM, EDITS, accept_old_parameters
from gradcam.renames import find_old_names

BLUR_FRACTION = 0.05  # standard deviation of the blur, as a fraction of the longer side
MAX_EDIT_POINTS = 10_000
MAX_LINE_THICKNESS = 32_767  # OpenCV's limit, in pixels


@dataclass(frozen=True)
class Edit:
    """A part of an image to remove: a brush stroke, or if `radius` is None, a window between two corner points."""

    kind: str
    points: tuple[tuple[float, float], ...]  # (x, y)
    radius: float | None = None

    def __str__(self) -> str:
        pairs = [f"{x:g},{y:g}" for x, y in self.points]
        if self.radius is None:
            return f"{self.kind}:{','.join(pairs)}"
        return f"{self.kind}:{self.radius:g}:{'+'.join(pairs)}"


def parse_edit(text: str) -> Edit:
    """Parse the text of an edit, such as "mean:10,10,60,60". Raises `GradcamError` for other texts."""
    kind, *fields = text.split(":")
    try:
        if len(fields) == 1:
            x0, y0, x1, y1 = map(float, fields[0].split(","))
            edit, is_valid = Edit(kind, ((x0, y0), (x1, y1))), x0 < x1 and y0 < y1
        else:
            radius, path = fields
            points = tuple((float(x), float(y)) for x, y in (pair.split(",") for pair in path.split("+")))
            edit, is_valid = Edit(kind, points, float(radius)), 0 < float(radius) < math.inf
    except ValueError:
        is_valid = False
    if not is_valid or kind not in EDITS or len(edit.points) > MAX_EDIT_POINTS or not np.isfinite(edit.points).all():
        raise GradcamError(f"{shorten(text)} is not an edit: expected {EDIT_FORM}.")
    return edit


@accept_old_parameters
def edit_image(image: Pixels, edits: Sequence[str | Edit]) -> Pixels:
    """Remove parts of an image.

    Parameters
    ----------
    image : array (H,W,3)
        RGB, uint8.
    edits : sequence of str or Edit
        For example "blur:20:100,80+120,90", which is a brush stroke with a radius of 20 pixels along two points, or
        "mean:10,10,60,60", which is a window.

    Returns
    -------
    array (H,W,3)
        An edited copy. Each edit is filled from the original image, not from the result of earlier edits.

    Raises
    ------
    GradcamError
        If the text of an edit is invalid.
    ImageError
        If the image is not uint8 (H,W,3), or an edit lies outside the image.
    """
    result, filled = check_pixels(image).copy(), {}
    for text_or_edit in edits:
        edit = parse_edit(text_or_edit) if isinstance(text_or_edit, str) else text_or_edit
        if edit.kind not in filled:
            filled[edit.kind] = _fill(image, edit.kind)
        mask = _cover(edit, *image.shape[:2])
        if not mask.any():
            height, width = image.shape[:2]
            raise ImageError(f"{edit} is outside the image, which is {width} pixels wide and {height} high.")
        result[mask] = filled[edit.kind][mask]
    return result


def _fill(image: Pixels, kind: str) -> Pixels:
    if kind == "blur":
        from gradcam.images.opencv import cv2

        # Blur a small copy, to save time. The blur is so wide that the details lost by shrinking do not matter.
        small = shrink_to_fit(image, 200)
        blurred = cv2.GaussianBlur(small, (0, 0), BLUR_FRACTION * max(small.shape))
        return cv2.resize(blurred, image.shape[1::-1], interpolation=cv2.INTER_LINEAR).astype(np.uint8)
    colour = np.rint(image.reshape(-1, 3).mean(0)) if kind == "mean" else np.zeros(3)
    return np.broadcast_to(colour.astype(np.uint8), image.shape)


def _cover(edit: Edit, height: int, width: int) -> NDArray[np.bool_]:
    from gradcam.images.opencv import cv2

    mask = np.zeros((height, width), np.uint8)
    limit = 4 * max(height, width)
    points = np.clip(np.array(edit.points), -limit, limit)
    if edit.radius is None:
        (x0, y0), (x1, y1) = np.rint(points).astype(int).clip(0)
        mask[y0:y1, x0:x1] = 1
        return mask.astype(bool)
    radius = round(min(edit.radius, limit))
    if 2 * radius > MAX_LINE_THICKNESS:
        raise ImageError(f"{edit} has too large a radius, expected at most {MAX_LINE_THICKNESS // 2} pixels.")
    pixels = np.rint(points).astype(int).tolist()
    for start, end in itertools.pairwise(pixels):
        cv2.line(mask, start, end, 1, max(1, 2 * radius))
    for point in pixels:
        cv2.circle(mask, point, radius, 1, -1)
    return mask.astype(bool)


__getattr__ = find_old_names(__name__)
