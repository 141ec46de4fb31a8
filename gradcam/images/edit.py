"""Parts of a picture that are taken away: under a brush, or in a window. Each is written as one word, for a line to type."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, ImageError, shorten
from gradcam.images.read import Pixels
from gradcam.options import EDIT_FORM, EDITS, accept_old_parameters
from gradcam.renames import find_old_names

BLUR = 0.05  # of the longer side: the blur's standard deviation
MOST_POINTS = 10_000
THICKEST = 32_767  # pixels of a line, for OpenCV


@dataclass(frozen=True)
class Edit:
    """One stroke of a brush along points, or, where `radius` is None, a window from the first point to the second."""

    kind: str
    points: tuple[tuple[float, float], ...]  # across, down
    radius: float | None = None

    def __str__(self) -> str:
        pairs = [f"{x:g},{y:g}" for x, y in self.points]
        return (
            f"{self.kind}:{','.join(pairs)}"
            if self.radius is None
            else f"{self.kind}:{self.radius:g}:{'+'.join(pairs)}"
        )


def to_edit(text: str) -> Edit:
    """Read one. Raises `GradcamError` for anything else."""
    kind, *rest = text.split(":")
    try:
        if len(rest) == 1:
            left, top, right, bottom = map(float, rest[0].split(","))
            found, is_right = Edit(kind, ((left, top), (right, bottom))), left < right and top < bottom
        else:
            radius, path = rest
            points = tuple((float(x), float(y)) for x, y in (pair.split(",") for pair in path.split("+")))
            found, is_right = Edit(kind, points, float(radius)), 0 < float(radius) < math.inf
    except ValueError:
        is_right = False
    if not is_right or kind not in EDITS or len(found.points) > MOST_POINTS or not np.isfinite(found.points).all():
        raise GradcamError(f"{shorten(text)} is not an edit: expected {EDIT_FORM}.")
    return found


@accept_old_parameters
def edit_image(image: Pixels, edits: Sequence[str | Edit]) -> Pixels:
    """Remove parts of an image.

    Parameters
    ----------
    image : array (H,W,3)
        RGB, uint8.
    edits : sequence of str or Edit
        Such as "blur:20:100,80+120,90", a brush of 20 pixels' radius along two points, or "mean:10,10,60,60", a window.

    Returns
    -------
    array (H,W,3)
        A copy. Each edit is filled from the original image, not from earlier edits.

    Raises
    ------
    GradcamError
        If an edit has another form.
    ImageError
        If the image has another form, or an edit lies outside it.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ImageError(f"The image is {image.dtype} {image.shape}, expected RGB: uint8 (H,W,3).")
    found, filled = image.copy(), {}
    for each in edits:
        edit = to_edit(each) if isinstance(each, str) else each
        if edit.kind not in filled:
            filled[edit.kind] = _fill(image, edit.kind)
        mask = _cover(edit, *image.shape[:2])
        if not mask.any():
            height, width = image.shape[:2]
            raise ImageError(f"{edit} is outside the image, which is {width} pixels wide and {height} high.")
        found[mask] = filled[edit.kind][mask]
    return found


def _fill(picture: Pixels, kind: str) -> Pixels:
    if kind == "blur":
        from gradcam.images.opencv import cv2

        # Of a small copy: the blur is wide, and so it is quick for pictures of any size.
        height, width = picture.shape[:2]
        scale = min(1.0, 200 / max(height, width))
        small = (max(1, round(width * scale)), max(1, round(height * scale)))
        blurred = cv2.GaussianBlur(cv2.resize(picture, small, interpolation=cv2.INTER_AREA), (0, 0), BLUR * max(small))
        return cv2.resize(blurred, (width, height), interpolation=cv2.INTER_LINEAR).astype(np.uint8)
    colour = np.rint(picture.reshape(-1, 3).mean(0)) if kind == "mean" else np.zeros(3)
    return np.broadcast_to(colour.astype(np.uint8), picture.shape)


def _cover(edit: Edit, height: int, width: int) -> NDArray[np.bool_]:
    from gradcam.images.opencv import cv2

    mask = np.zeros((height, width), np.uint8)
    most = 4 * max(height, width)
    points = np.clip(np.array(edit.points), -most, most)
    if edit.radius is None:
        (left, top), (right, bottom) = np.rint(points).astype(int).clip(0)
        mask[top:bottom, left:right] = 1
        return mask.astype(bool)
    radius = round(min(edit.radius, most))
    whole = np.rint(points).astype(np.int32)
    for start, end in itertools.pairwise(whole):
        if 2 * radius <= THICKEST:
            cv2.line(mask, start.tolist(), end.tolist(), 1, max(1, 2 * radius))
        elif (start != end).any():
            along = (end - start) / np.hypot(*(end - start).astype(float))
            aside = radius * along[::-1] * (1, -1)
            corners = np.rint([start + aside, end + aside, end - aside, start - aside])
            cv2.fillConvexPoly(mask, corners.astype(np.int32), 1)
    for point in whole:
        cv2.circle(mask, point.tolist(), radius, 1, -1)
    return mask.astype(bool)


__getattr__ = find_old_names(__name__)
