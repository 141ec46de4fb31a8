"""Test-time augmentation: the same images in several views, explained in one batch, and the mean of their maps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.hooks.nested import Batch
from gradcam.options import AUGMENTATIONS
from gradcam.targets import RepeatedTarget


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

    def show(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and len(tensor) == batch.images
        if not has_rows or (tensor.numel() == 1 and batch.images == 1):  # one number is for all views
            return tensor
        is_in_space = tensor.ndim == batch.pictures.ndim and tensor.shape[2:] == batch.pictures.shape[2:]
        shown = [tensor.flip(-1) if mirrored and is_in_space else tensor for _, mirrored in views]
        if tensor is batch.pictures:
            shown = [view * factor for view, (factor, _) in zip(shown, views)]
        return torch.cat(shown)

    with torch.no_grad():
        shown_batch = replace(batch.copy(show), images=batch.images * len(views))
    return Views(shown_batch, views, RepeatedTarget(target, batch.images, len(views)))


def to_heatmaps(maps: Tensor, size: Sequence[int], *, signed: bool = False) -> Tensor:
    """Maps (N,K,h,w) or (N,K,d,h,w) as heatmaps of `size`, float32 in [0,1]: resized, then each divided by its maximum.
    The minimum is not subtracted: zero keeps meaning "no evidence", and a blank map stays zero. With `signed`, positive
    and negative values are resized by themselves, so that neither gets a rim of the other, and divided by the largest
    of both: [-1,1]."""
    heatmaps = resize(maps, size, signed=signed)
    largest = heatmaps.flatten(2).abs().amax(2).reshape(*heatmaps.shape[:2], *[1] * (heatmaps.ndim - 2))
    # In place: many classes make this the largest tensor of all.
    return heatmaps.div_(torch.where(largest > 0, largest, 1.0))


def resize(maps: Tensor, size: Sequence[int], *, signed: bool = False) -> Tensor:
    """Non-negative maps (N,K,h,w) or (N,K,d,h,w) at another size: cubic, with half-pixel centres, clamped at zero. With
    `signed`, positive and negative values by themselves."""
    if signed:
        return resize(maps.relu(), size) - resize((-maps).relu(), size)
    for length in size:  # each turn takes the first axis of the grid away and puts the new one behind the last
        maps = torch.tensordot(maps, _cubic_weights(maps.shape[2], length).to(maps), dims=([2], [1]))
    return maps.clamp_(min=0)


@functools.lru_cache(maxsize=64)
def _cubic_weights(cells: int, length: int) -> Tensor:
    """The matrix (length, cells) of one axis's interpolation. PyTorch's interpolation of the identity matrix gives it.
    As products of small matrices a hundred maps are resized several times faster than by the interpolation itself, and
    volumes, for which it has no cubic mode, are resized alike."""
    identity = torch.eye(cells, dtype=torch.float32, device="cpu")[None, None]  # whatever the caller's defaults are
    return F.interpolate(identity, size=(length, cells), mode="bicubic", align_corners=False)[0, 0]
