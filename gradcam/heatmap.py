"""From maps at the layer's resolution to heatmaps at the picture's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def to_heatmaps(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps (N,K,h,w) or (N,K,d,h,w) as heatmaps of `size`, float32 in [0,1]: resized, then each divided by its maximum.

    The minimum is not subtracted: zero keeps meaning "no evidence", and a blank map stays zero.
    """
    return normalise(resize(maps, size))


def resize(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Non-negative maps (N,K,h,w) or (N,K,d,h,w) at another size: cubic, with half-pixel centres, clamped at zero."""
    if tuple(maps.shape[2:]) == tuple(size):
        return maps
    for axis, length in enumerate(size, start=2):
        weights = _cubic_weights(maps.shape[axis], length).to(maps)
        maps = torch.tensordot(maps, weights, dims=([axis], [1])).movedim(-1, axis)
    return maps.clamp(min=0).contiguous()


@functools.lru_cache(maxsize=64)
def _cubic_weights(cells: int, length: int) -> Tensor:
    """The matrix (length, cells) of one axis's interpolation.

    PyTorch's interpolation of the identity matrix gives it. As products of small matrices a hundred maps are resized
    several times faster than by the interpolation itself, and volumes, for which it has no cubic mode, are resized alike.
    """
    identity = torch.eye(cells)[None, None]
    return F.interpolate(identity, size=(length, cells), mode="bicubic", align_corners=False)[0, 0]


def normalise(heatmaps: Tensor) -> Tensor:
    """Each (n,k) divided by its own maximum; a blank one stays zero."""
    largest = heatmaps.flatten(2).amax(2).reshape(*heatmaps.shape[:2], *[1] * (heatmaps.ndim - 2))
    return torch.where(largest > 0, heatmaps / largest, 0.0)
