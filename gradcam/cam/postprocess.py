"""Turn raw maps into heatmaps: average over augmented views, crop to the images, resize."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.hooks.containers import Batch, map_tensors, take_rows
from gradcam.hooks.pytorch import is_any_autocast_enabled, is_autocast_enabled, set_grad_mode, without_autocast

Part = tuple[tuple[float, ...], tuple[float, ...]]  # (start, length) along each axis


@dataclass(frozen=True)
class Views:
    """The augmented views of a batch, as one batch: all images of the first view, then all of the second, ..."""

    batch: Batch
    views: tuple[tuple[float, bool], ...]
    target: Any  # The caller's target, extended to all views.

    @property
    def images(self) -> int:
        return self.batch.images // len(self.views)

    def first(self, rows: Tensor) -> Tensor:
        """Return the rows of the first view, detached. If `rows` has no row per image and view, return all rows."""
        if len(self.views) == 1:
            return rows.detach()
        return (rows[: self.images] if rows.shape[:1] == (self.batch.images,) else rows).detach()

    def first_of(self, output: Any) -> Any:
        """Return a model output with only the rows of the first view, detached."""
        first = output if len(self.views) == 1 else take_rows(output, slice(self.images), self.batch.images)
        return map_tensors(first, Tensor.detach)

    def combine(self, levels: Sequence[Tensor], evidence: str) -> Tensor:
        """Average raw maps (V N,K,h,w) over the V views, and return the evidence as maps (N,K,h,w).

        The evidence is the positive values, the magnitudes of the negative values, or all values. If the levels have
        several grids, the maps are resized to the finest grid and added.
        """
        signed, means = evidence == "signed", map(self._average, levels)
        selected = [level if signed else (level if evidence == "positive" else -level).relu() for level in means]
        if len(selected) == 1:
            return selected[0]
        finest = max((level.shape[2:] for level in selected), key=lambda grid: grid.numel())
        return functools.reduce(
            torch.add,
            [level if level.shape[2:] == finest else resize(level, finest, signed=signed) for level in selected],
        )

    def _average(self, maps: Tensor) -> Tensor:
        """Return the mean of the maps over all views, after mirrored views are flipped back."""
        if len(self.views) == 1:
            return maps
        views = zip(maps.split(self.images), self.views)
        return torch.stack([view.flip(-1) if mirrored else view for view, (_, mirrored) in views]).mean(0)


def to_heatmaps(maps: Tensor, size: Sequence[int], *, signed: bool = False, mode: str = "bicubic") -> Tensor:
    """Return maps (N,K,h,w) or (N,K,d,h,w) as heatmaps of `size`: resized, float32 in [0,1], divided by their maximum.

    The minimum is not subtracted, so zero still means "no evidence", and a blank map stays zero. `mode` is the
    interpolation, as in `resize`. With `signed`, positive and negative values are resized separately. Otherwise,
    bicubic interpolation would surround each sign with a rim of the other sign. All values are divided by the
    largest magnitude, so values are in [-1,1].
    """
    heatmaps = resize(maps, size, signed=signed, mode=mode)
    values = heatmaps.abs() if signed else heatmaps
    largest = values.amax(list(range(2, values.ndim)), keepdim=True)
    # Divide in place, because with many classes this is the largest tensor.
    return heatmaps.div_(torch.threshold_(largest, 0, 1))  # Divide a blank map by 1.


def to_heatmaps_of_sizes(maps: Tensor, sizes: Sequence[tuple[int, ...]], device: torch.device, **options: Any) -> Any:
    """Return heatmaps at each image's size, on a device: one tensor if all sizes are equal, else a tensor per image.

    `options` are those of `to_heatmaps`. The caller's grad mode and autocast have no effect.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return to_heatmaps_of_sizes(maps, sizes, device, **options)
    if is_any_autocast_enabled() and is_autocast_enabled(maps.device.type):
        with without_autocast(maps.device.type):
            return to_heatmaps_of_sizes(maps, sizes, device, **options)
    grad_mode = torch.is_grad_enabled()
    set_grad_mode(False)
    try:
        if len(set(sizes)) == 1:
            return to_heatmaps(maps, sizes[0], **options).to(device)
        return [to_heatmaps(row, size, **options)[0].to(device) for row, size in zip(maps.split(1), sizes)]
    finally:
        set_grad_mode(grad_mode)


def resize(
    maps: Tensor, size: Sequence[int], *, signed: bool = False, part: Part | None = None, mode: str = "bicubic"
) -> Tensor:
    """Resize non-negative maps (N,K,h,w) or (N,K,d,h,w) by interpolation, and clamp the result at zero.

    Pixel centres are at half-integers. With `signed`, positive and negative values are resized separately. `part` is
    the part of the maps to resize, as starts and lengths in cells along the axes; None means all. `mode` is "bicubic",
    "bilinear" or "nearest"; a part is always resized by bicubic interpolation.
    """
    if signed:
        return resize(maps.relu(), size, part=part, mode=mode) - resize((-maps).relu(), size, part=part, mode=mode)
    spans = (None,) * len(size) if part is None else zip(*part)
    axes = zip(maps.shape[2:], size, spans)
    *depth, rows, columns = (_make_weights(*axis, mode, dtype=maps.dtype, device=maps.device) for axis in axes)
    # For a single map, products of matrices need a third of the operations of batched products.
    if maps.numel() == rows.shape[1] * columns.shape[1]:
        maps = (rows.mm(maps.reshape(rows.shape[1], -1)).mm(columns.mT)).reshape(*maps.shape[:-2], *size[-2:])
    else:
        maps = rows @ maps @ columns.mT
    if depth:
        maps = (depth[0] @ maps.flatten(3)).unflatten(3, maps.shape[3:])
    return maps.relu_()


@functools.lru_cache(maxsize=64)
def _make_weights(cells: int, length: int, span: tuple[float, float] | None, mode: str, **options: Any) -> Tensor:
    """Return the matrix (length, cells) that interpolates one axis, over all cells or over a span: (start, length).

    The matrix is PyTorch's interpolation of the identity matrix. For a hundred maps, products with small matrices are
    several times faster than interpolation. The products also resize volumes, for which PyTorch has no cubic mode. The
    matrix is cached, so that later calls copy no matrix to the device. `options` are the dtype and the device.
    """
    # The device and dtype are explicit, because the caller may have changed PyTorch's defaults.
    identity = torch.eye(cells, dtype=torch.float64, device="cpu")[None, None]
    if span is not None:
        places = span[0] + (torch.arange(length, dtype=torch.float64, device="cpu") + 0.5) * span[1] / length
        rows = torch.arange(cells, dtype=torch.float64, device="cpu") + 0.5
        points = torch.stack(torch.meshgrid(places, rows, indexing="ij"), -1).flip(-1) * 2 / cells - 1
        settings: Any = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}
        weights = F.grid_sample(identity.mT, points[None], **settings)
    else:
        # PyTorch's mode "nearest" takes the cell at the upper left corner of a pixel, not at its centre.
        mode = "nearest-exact" if mode == "nearest" else mode
        weights = F.interpolate(identity, size=(length, cells), mode=mode)
    return weights[0, 0].to(**options)
