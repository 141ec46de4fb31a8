"""Objects that somebody marked in a picture, and where they are in what the network sees of it."""

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
Box = tuple[float, float, float, float]  # left, top, right, bottom, measured at the pixels' edges
Parts = tuple[str, ...]  # of a path
SLACK = 1.0  # pixels that a box may end outside of its picture: some tools round, and some count from 1


@dataclass(frozen=True)
class View:
    """What the network sees of a picture: `region` of it, resized to `size`. `picture`: its height and width, if known."""

    region: Region
    size: tuple[int, int]
    picture: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Marking:
    """One object of a picture: its box in pixels, or what draws it as a mask (H,W) of the picture. `where`: in which
    file, and where there, for errors. `index`: its class, None if it counts for whichever is explained. `picture`: the
    height and width of the picture as the annotations have it, if they do."""

    where: str
    index: int | None = None
    box: Box | None = None
    draw: Callable[[], Mask] | None = field(default=None, repr=False)
    picture: tuple[int, int] | None = None

    def project(self, view: View) -> tuple[Mask, Box] | None:
        """The object in the network's input, a mask and a box around it; None where nothing of it is seen. Raises
        `InputError` for a box that is not in the picture, and for a mask, or annotations, of another size."""
        self._check_size(self.picture, view)
        if self.draw is not None:
            mask = self.draw()
            self._check_size((mask.shape[0], mask.shape[1]), view)
            return project_mask(mask, view)
        if self.box is None:
            raise InputError(f"{self.where}: has neither a box nor a mask.")
        left, top, right, bottom = self.box
        picture = self.picture or view.picture
        height, width = picture or (np.inf, np.inf)
        if min(left, top) < -SLACK or right > width + SLACK or bottom > height + SLACK:
            box = f"the box from {left:g}, {top:g} to {right:g}, {bottom:g}"
            size = "" if picture is None else f" of {width} x {height} pixels"
            raise InputError(f"{self.where}: {box} is not inside the image{size}.")
        return project_box(self.box, view)

    def _check_size(self, size: tuple[int, int] | None, view: View) -> None:
        top, left, height, width = view.region
        if size is None or size == view.picture:
            return
        if view.picture is not None:
            expected = f"but the upright image has {view.picture[1]} x {view.picture[0]}"
        elif top + height > size[0] or left + width > size[1]:
            expected = f"but the model sees {width} x {height} pixels from {left}, {top}"
        else:
            return
        raise InputError(f"{self.where}: has {size[1]} x {size[0]} pixels, {expected}. Both must have the same size.")


def project_box(box: Box, view: View) -> tuple[Mask, Box] | None:
    """A box in the network's input, cut at its borders, and its pixels as `_cover` has them; None if nothing is left."""
    (top, left, height, width), (rows, columns) = view.region, view.size
    down, across = rows / height, columns / width
    lefts, rights = (float(np.clip((x - left) * across, 0, columns)) for x in (box[0], box[2]))
    tops, bottoms = (float(np.clip((y - top) * down, 0, rows)) for y in (box[1], box[3]))
    if lefts >= rights or tops >= bottoms:
        return None
    mask = np.outer(_cover(tops, bottoms, rows), _cover(lefts, rights, columns))
    return mask, (lefts, tops, rights, bottoms)


def project_mask(mask: Mask, view: View) -> tuple[Mask, Box] | None:
    """A picture's mask in the network's input, and the box around what is seen of it; None if nothing is. Each pixel of
    the input takes what is at its centre. An object that is at none of them takes the pixels it touches."""
    (_, _, height, width), (rows, columns) = view.region, view.size
    seen = crop(mask, view.region)
    down, across = np.nonzero(seen)
    if not len(down):
        return None
    sides = ((rows, height), (columns, width))
    resized = seen[np.ix_(*((2 * np.arange(new) + 1) * old // (2 * new) for new, old in sides))]
    if not resized.any():
        resized[down * rows // height, across * columns // width] = True
    by_row, by_column = rows / height, columns / width
    start, end = (float(it * by_column) for it in (across.min(), across.max() + 1))
    above, below = (float(it * by_row) for it in (down.min(), down.max() + 1))
    return resized, (start, above, end, below)


def _cover(start: float, end: float, length: int) -> Mask:
    """Which of so many pixels in a row have their centres from `start` to `end`, or else are touched."""
    pixels = np.arange(length)
    inside = (pixels + 0.5 >= start) & (pixels + 0.5 < end)
    return inside if inside.any() else (pixels + 1 > start) & (pixels < end)


class Pictures:
    """The names of the pictures that were given, to be found by other names of theirs. Paths are of one picture where
    one of them ends in the other, folder by folder: `cats/a.jpg` is `a.jpg`, and `/data/cats/a.jpg`. Of several, the
    one that agrees in most folders is meant. `keep_suffix`: whether suffixes count."""

    def __init__(self, names: Iterable[str | os.PathLike[str]], *, keep_suffix: bool = True) -> None:
        self._keep_suffix = keep_suffix
        self.names = list(dict.fromkeys(os.fspath(name) for name in names))
        self._by_last: defaultdict[str, list[tuple[Parts, str]]] = defaultdict(list)
        for name in self.names:
            if parts := self._split(name):
                self._by_last[parts[-1]].append((parts, name))

    def find(self, wanted: str, where: str) -> str | None:
        """The name of the picture that is meant, None where nobody gave it. Raises `InputError` where it may be several."""
        parts = self._split(wanted)
        found: defaultdict[int, list[str]] = defaultdict(list)
        for other, name in self._by_last.get(parts[-1], []) if parts else []:
            if other == parts:
                found[len(parts) + 1].append(name)
            common = min(len(parts), len(other))
            if other[-common:] == parts[-common:]:
                found[common].append(name)
        if not found:
            return None
        best = found[max(found)]
        if len(best) > 1:
            said = f"{shorten(wanted)} could be {join_names(best[:3])}"
            raise InputError(f"{where}: {said}: write more of its path, or give only one of these images.")
        return best[0]

    def sort(self, found: Iterable[str]) -> list[str]:
        present = set(found)
        return [name for name in self.names if name in present]

    def _split(self, path: str) -> Parts:
        plain = path.replace("\\", "/") if self._keep_suffix else os.path.splitext(path.replace("\\", "/"))[0]
        return tuple(part for part in plain.split("/") if part not in ("", ".", ".."))
