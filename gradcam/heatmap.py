"""From maps at the layer's resolution to heatmaps at the picture's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def to_heatmaps(maps: Tensor, size: Sequence[int], *, signed: bool = False) -> Tensor:
    """Maps (N,K,h,w) or (N,K,d,h,w) as heatmaps of `size`, float32 in [0,1]: resized, then each divided by its maximum.

    The minimum is not subtracted: zero keeps meaning "no evidence", and a blank map stays zero. With `signed`, positive
    and negative values are resized by themselves, so that neither gets a rim of the other, and divided by the largest
    of both: [-1,1].
    """
    heatmaps = resize(maps, size, signed=signed)
    return heatmaps.div_(_divisors(heatmaps))  # in place: many classes make this the largest tensor of all


def resize(maps: Tensor, size: Sequence[int], *, signed: bool = False) -> Tensor:
    """Non-negative maps (N,K,h,w) or (N,K,d,h,w) at another size: cubic, with half-pixel centres, clamped at zero.

    With `signed`, positive and negative values by themselves.
    """
    if signed:
        return resize(maps.relu(), size) - resize((-maps).relu(), size)
    for length in size:  # each turn takes the first axis of the grid away and puts the new one behind the last
        maps = torch.tensordot(maps, _cubic_weights(maps.shape[2], length).to(maps), dims=([2], [1]))
    return maps.clamp_(min=0)


@functools.lru_cache(maxsize=64)
def _cubic_weights(cells: int, length: int) -> Tensor:
    """The matrix (length, cells) of one axis's interpolation.

    PyTorch's interpolation of the identity matrix gives it. As products of small matrices a hundred maps are resized
    several times faster than by the interpolation itself, and volumes, for which it has no cubic mode, are resized alike.
    """
    identity = torch.eye(cells, dtype=torch.float32, device="cpu")[None, None]  # whatever the caller's defaults are
    return F.interpolate(identity, size=(length, cells), mode="bicubic", align_corners=False)[0, 0]


def _divisors(heatmaps: Tensor) -> Tensor:
    """The largest value of each map, whatever its sign, ready to divide by: 1 where it is zero."""
    largest = heatmaps.flatten(2).abs().amax(2).reshape(*heatmaps.shape[:2], *[1] * (heatmaps.ndim - 2))
    return torch.where(largest > 0, largest, 1.0)
