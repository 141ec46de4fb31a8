"""Annotated objects, their position in the model's input, and the matching of image names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import InputError, join_names, shorten
from gradcam.images.read import Region, crop

Mask = NDArray[np.bool_]
Box = tuple[float, float, float, float]  # left, top, right, bottom: positions of edges, in pixels
PathParts = tuple[str, ...]
MAX_OVERHANG_PIXELS = 1.0  # Some tools round coordinates or count from 1, so a box may exceed its image by this much.


@dataclass(frozen=True)
class ModelView:
    """The part of an image that the model sees: `region`, resized to `size`. `image_size` is (H,W); None if unknown."""

    region: Region
    size: tuple[int, int]
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class AnnotatedObject:
    """One object in an image: its box in pixels, or a function that draws its mask (H,W).

    `location` names the file and the line or annotation, for error messages. `index` is the class; None means that the
    object is class-agnostic. `image_size` is (H,W) according to the annotations; None if the annotations do not contain
    the image's size.
    """

    location: str
    index: int | None = None
    box: Box | None = None
    draw: Callable[[], Mask] | None = field(default=None, repr=False)
    image_size: tuple[int, int] | None = None

    def project(self, view: ModelView) -> tuple[Mask, Box] | None:
        """Return the object's mask and box in the model's input; None if the model sees no part of the object.

        Raise `InputError` if the box is not inside the image, or if the size of the mask, or `image_size`, differs from
        the image's size.
        """
        self._check_size(self.image_size, view)
        if self.draw is not None:
            mask = self.draw()
            self._check_size((mask.shape[0], mask.shape[1]), view)
            return project_mask(mask, view)
        if self.box is None:
            raise InputError(f"{self.location}: the object has neither a box nor a mask.")
        left, top, right, bottom = self.box
        image_size = self.image_size or view.image_size
        height, width = image_size or (np.inf, np.inf)
        if max(-left, -top, right - width, bottom - height) > MAX_OVERHANG_PIXELS:
            box = f"the box from {left:g}, {top:g} to {right:g}, {bottom:g}"
            size = "" if image_size is None else f" of {width} x {height} pixels"
            raise InputError(f"{self.location}: {box} is not inside the image{size}.")
        return project_box(self.box, view)

    def _check_size(self, size: tuple[int, int] | None, view: ModelView) -> None:
        y, x, height, width = view.region
        if size is None or size == view.image_size:
            return
        rows, columns = size
        if view.image_size is not None:
            actual = f"the image has {view.image_size[1]} x {view.image_size[0]} (after EXIF rotation)"
        elif y + height > rows or x + width > columns:
            actual = f"the model sees pixels up to x = {x + width} and y = {y + height}"
        else:
            return
        problem = f"{self.location}: the annotation is for {columns} x {rows} pixels, but {actual}"
        raise InputError(f"{problem}. Give annotations made for the image at this size.")


def project_box(box: Box, view: ModelView) -> tuple[Mask, Box] | None:
    """Return the mask and the cropped box in the model's input; None if the box is outside the view."""
    (view_y, view_x, height, width), (rows, columns) = view.region, view.size
    scale_y, scale_x = rows / height, columns / width
    x0, x1 = (float(np.clip((x - view_x) * scale_x, 0, columns)) for x in (box[0], box[2]))
    y0, y1 = (float(np.clip((y - view_y) * scale_y, 0, rows)) for y in (box[1], box[3]))
    if x0 >= x1 or y0 >= y1:
        return None
    return np.outer(_cover(y0, y1, rows), _cover(x0, x1, columns)), (x0, y0, x1, y1)


def project_mask(mask: Mask, view: ModelView) -> tuple[Mask, Box] | None:
    """Return the mask in the model's input, and the box around its visible part; None if no part is visible.

    The mask is sampled at the centres of the input's pixels. If the object contains no such centre, the returned mask
    marks the pixels that the object touches.
    """
    (_, _, height, width), (rows, columns) = view.region, view.size
    visible = crop(mask, view.region)
    visible_y, visible_x = np.nonzero(visible)
    if not len(visible_y):
        return None
    centre_y, centre_x = ((2 * np.arange(n) + 1) * size // (2 * n) for n, size in ((rows, height), (columns, width)))
    resized = visible[np.ix_(centre_y, centre_x)]
    if not resized.any():
        resized[visible_y * rows // height, visible_x * columns // width] = True
    x0, x1 = (float(x * (columns / width)) for x in (visible_x.min(), visible_x.max() + 1))
    y0, y1 = (float(y * (rows / height)) for y in (visible_y.min(), visible_y.max() + 1))
    return resized, (x0, y0, x1, y1)


def _cover(start: float, end: float, length: int) -> Mask:
    """Return a mask of the pixels with a centre between `start` and `end`.

    If no centre is in this interval, the mask marks the pixels that the interval touches.
    """
    pixels = np.arange(length)
    inside = (pixels + 0.5 >= start) & (pixels + 0.5 < end)
    return inside if inside.any() else (pixels + 1 > start) & (pixels < end)


class ImageNames:
    """The names of the evaluated images, matched by longer or shorter paths.

    Two paths match if the longer path ends in the shorter path, folder by folder: `cats/a.jpg` matches `a.jpg` and
    `/data/cats/a.jpg`. If several names match, the name that has the most folders in common with the path is used.
    `keep_suffix=False` ignores file suffixes.
    """

    def __init__(self, names: Iterable[str | os.PathLike[str]], *, keep_suffix: bool = True) -> None:
        self._keep_suffix = keep_suffix
        self.names = list(dict.fromkeys(os.fspath(name) for name in names))
        self._by_filename: defaultdict[str, list[tuple[PathParts, str]]] = defaultdict(list)
        for name in self.names:
            if parts := self._split(name):
                self._by_filename[parts[-1]].append((parts, name))

    def find(self, path: str, location: str) -> str | None:
        """Return the name that matches a path; None if no name matches. Raise `InputError` if the path is ambiguous."""
        parts = self._split(path)
        by_agreement: defaultdict[int, list[str]] = defaultdict(list)
        for known_parts, name in self._by_filename.get(parts[-1], []) if parts else []:
            common = min(len(parts), len(known_parts))
            if known_parts[-common:] == parts[-common:]:
                by_agreement[common + (known_parts == parts)].append(name)
        if not by_agreement:
            return None
        candidates = by_agreement[max(by_agreement)]
        if len(candidates) > 1:
            problem = f"{shorten(path)} matches several images, {join_names(candidates[:3])}"
            raise InputError(f"{location}: {problem}: write a longer path, or give only one of these images.")
        return candidates[0]

    def sort(self, names: Iterable[str]) -> list[str]:
        present = set(names)
        return [name for name in self.names if name in present]

    def _split(self, path: str) -> PathParts:
        normalised = path.replace("\\", "/") if self._keep_suffix else os.path.splitext(path.replace("\\", "/"))[0]
        return tuple(part for part in normalised.split("/") if part not in ("", ".", ".."))
