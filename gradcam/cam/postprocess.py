"""Test-time augmentation: the same images in several views, explained in one batch, and the mean of their maps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.hooks.nested import Batch, Window, map_tensors, take_rows
from gradcam.layers.frames import Frame
from gradcam.options import AUGMENTATIONS
from gradcam.targets.classes import RepeatedTarget

Part = tuple[tuple[float, ...], tuple[float, ...]]  # where something begins, and how far it reaches, along each axis


@dataclass(frozen=True)
class Views:
    """The views of a batch, as one batch: the images of the first view, then those of the second, and so on."""

    batch: Batch
    views: tuple[tuple[float, bool], ...]
    target: Any  # of all views: what the given one means for the first

    @property
    def images(self) -> int:
        return self.batch.images // len(self.views)

    def first(self, rows: Tensor) -> Tensor:
        """Of the images themselves, detached: the first N rows, where there is one row for each image of each view."""
        return (rows[: self.images] if rows.shape[:1] == (self.batch.images,) else rows).detach()

    def first_of(self, output: Any) -> Any:
        """The same of all that lies in an output."""
        first = output if len(self.views) == 1 else take_rows(output, slice(self.images), self.batch.images)
        return map_tensors(first, Tensor.detach)

    def combine(self, levels: Sequence[Tensor], evidence: str) -> Tensor:
        """Of raw maps (V N,K,h,w) of all views the positive values, or the negative ones without their sign, or all of
        them: (N,K,h,w). Those of several grids are resized to the finest, and added."""
        signed, means = evidence == "signed", map(self._average, levels)
        found = [level if signed else (level if evidence == "positive" else -level).relu() for level in means]
        finest = max((each.shape[2:] for each in found), key=lambda grid: grid.numel())
        return functools.reduce(
            torch.add, [each if each.shape[2:] == finest else resize(each, finest, signed=signed) for each in found]
        )

    def _average(self, maps: Tensor) -> Tensor:
        """Put upright, the mean over all views."""
        views = zip(maps.split(self.images), self.views)
        upright = [view.flip(-1) if mirrored else view for view, (_, mirrored) in views]
        return maps if len(upright) == 1 else torch.stack(upright).mean(0)


def make_views(batch: Batch, augmentation: str, target: Any) -> Views:
    """The batch in all views of this augmentation. The picture tensor is scaled; it and all others of its size, such as
    masks, are mirrored; others with a row for each image are repeated."""
    views = AUGMENTATIONS[augmentation]
    if len(views) == 1:
        return Views(batch, views, target)

    def mirror(tensor: Tensor) -> Tensor:
        if batch.listed is None:
            return tensor.flip(-1)
        mirrored = tensor.clone()  # each picture where it is, whatever is around it
        for one, (height, width) in zip(mirrored, batch.listed):
            one[..., :height, :width] = one[..., :height, :width].flip(-1)
        return mirrored

    def show(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and len(tensor) == batch.images
        if not has_rows or (tensor.numel() == 1 and batch.images == 1):  # one number is for all views
            return tensor
        is_in_space = tensor.ndim == batch.pictures.ndim and tensor.shape[2:] == batch.pictures.shape[2:]
        shown = [mirror(tensor) if mirrored and is_in_space else tensor for _, mirrored in views]
        if tensor is batch.pictures:
            shown = [view * factor for view, (factor, _) in zip(shown, views)]
        return torch.cat(shown)

    with torch.no_grad():
        shown_batch = batch.copy(show).repeat(len(views))
    if batch.windows is not None:
        windows = [
            _mirror_window(it, batch.size[-1]) if mirrored else it for _, mirrored in views for it in batch.windows
        ]
        shown_batch = replace(shown_batch, windows=tuple(windows))
    return Views(shown_batch, views, RepeatedTarget(target, batch.images, len(views)))


def _mirror_window(window: Window, width: int) -> Window:
    top, left, rows, columns = window
    return top, width - left - columns, rows, columns


def take_windows(maps: Tensor, frame: Frame) -> Tensor:
    """Maps (N,K,h,w) over a canvas as maps over the pictures that lie there: of as many cells for each as the largest of
    them covers, so that they stay one tensor."""
    cells = [length / side for length, side in zip(maps.shape[2:], frame.canvas)]  # for each pixel of the canvas
    parts = [
        ((top * cells[0], left * cells[1]), (rows * cells[0], columns * cells[1]))
        for top, left, rows, columns in frame.windows
    ]
    size = [math.ceil(max(lengths) - 1e-6) for lengths in zip(*(part[1] for part in parts))]
    if len(set(parts)) == 1:
        return resize(maps, size, signed=True, part=parts[0])
    return torch.cat([resize(maps[i : i + 1], size, signed=True, part=part) for i, part in enumerate(parts)])


def to_heatmaps(maps: Tensor, size: Sequence[int], *, signed: bool = False) -> Tensor:
    """Maps (N,K,h,w) or (N,K,d,h,w) as heatmaps of `size`, float32 in [0,1]: resized, then each divided by its maximum.
    The minimum is not subtracted: zero keeps meaning "no evidence", and a blank map stays zero. With `signed`, positive
    and negative values are resized by themselves, so that neither gets a rim of the other, and divided by the largest
    of both: [-1,1]."""
    heatmaps = resize(maps, size, signed=signed)
    values = heatmaps.abs() if signed else heatmaps
    largest = values.amax(list(range(2, values.ndim)), keepdim=True)
    # In place: many classes make this the largest tensor of all.
    return heatmaps.div_(largest.masked_fill_(largest == 0, 1))


def to_heatmaps_of_sizes(
    maps: Tensor, sizes: Sequence[tuple[int, ...]], *, signed: bool, device: torch.device
) -> Tensor | list[Tensor]:
    """Return heatmaps of each image's size on a device: one tensor if all sizes are equal, else one per image."""
    if len(set(sizes)) == 1:
        return to_heatmaps(maps, sizes[0], signed=signed).to(device)
    return [to_heatmaps(row, size, signed=signed)[0].to(device) for row, size in zip(maps.split(1), sizes)]


def resize(maps: Tensor, size: Sequence[int], *, signed: bool = False, part: Part | None = None) -> Tensor:
    """Non-negative maps (N,K,h,w) or (N,K,d,h,w) at another size: cubic, with half-pixel centres, clamped at zero. With
    `signed`, positive and negative values by themselves. `part`: where in the maps the result begins, and how far it
    reaches, in cells; None for all of them."""
    if signed:
        return resize(maps.relu(), size, part=part) - resize((-maps).relu(), size, part=part)
    starts, lengths = ((None,) * len(size),) * 2 if part is None else part
    kind: Any = {"dtype": maps.dtype, "device": maps.device}
    *depth, rows, columns = (
        _cubic_weights_there(cells, length, start, extent, **kind)
        for cells, length, start, extent in zip(maps.shape[2:], size, starts, lengths)
    )
    maps = rows @ maps @ columns.mT
    if depth:
        maps = (depth[0] @ maps.flatten(3)).unflatten(3, maps.shape[3:])
    return maps.clamp_(min=0)


@functools.lru_cache(maxsize=64)
def _cubic_weights_there(
    cells: int, length: int, start: float | None, extent: float | None, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The same where they are needed, so that a device does not wait for them each time."""
    return _cubic_weights(cells, length, start, extent).to(dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def _cubic_weights(cells: int, length: int, start: float | None = None, extent: float | None = None) -> Tensor:
    """The matrix (length, cells) of one axis's interpolation, of all cells or from one place on. PyTorch's interpolation
    of the identity matrix gives it. As products of small matrices a hundred maps are resized several times faster than by
    the interpolation itself, and volumes, for which it has no cubic mode, are resized alike."""
    identity = torch.eye(cells, dtype=torch.float64, device="cpu")[None, None]  # whatever the caller's defaults are
    if start is not None and extent is not None:
        places = start + (torch.arange(length, dtype=torch.float64, device="cpu") + 0.5) * extent / length
        rows = torch.arange(cells, dtype=torch.float64, device="cpu") + 0.5
        points = torch.stack(torch.meshgrid(places, rows, indexing="ij"), -1).flip(-1) * 2 / cells - 1
        settings: Any = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}
        return F.grid_sample(identity.mT, points[None], **settings)[0, 0]
    return F.interpolate(identity, size=(length, cells), mode="bicubic", align_corners=False)[0, 0]
