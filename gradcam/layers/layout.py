"""Lay out activations as a grid: channels-first or channels-last maps become (N,C,h,w)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from gradcam.errors import LayerError, join_names, shorten
from gradcam.options import LAYOUTS

POOLING = (_AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd)
CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm, *POOLING)
# Subclasses are not included, because some subclasses work on channels first.
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm, nn.Linear)
# Modules that usually follow convolutions. GELU and Dropout are left out, because transformers use them too.
CONVNET_LAYERS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Dropout2d)

Change = Callable[[Tensor], object]  # Changes a tensor in place.
Lengths = Sequence[int]  # The lengths of a tensor, an image or a grid.
Grid = tuple[int, ...]
ReshapeFunction = Callable[[Tensor], Tensor]
# A value of `options.LAYOUTS`, the grid that the last tokens form, or None if the grid is unknown.
GridSpec = str | Grid | None
ReshapeSpec = GridSpec | ReshapeFunction


@dataclass(frozen=True)
class Layout:
    """The arrangement of a layer's output on the image: its grid, and which tokens are the grid's cells.

    `kind` is one of `options.LAYOUTS`. The output is (N,T,D) for "tokens", and (T,N,D) for "tokens first". `prefix`
    tokens come before the cells, and any remaining tokens after them. If the cells are not in row-major order, `order`
    lists their tokens row by row.
    """

    grid: Grid
    kind: str
    prefix: int = 0
    order: tuple[int, ...] | None = None

    @property
    def image_axis(self) -> int:
        return 1 if self.kind == "tokens first" else 0

    @property
    def name(self) -> str:
        """Return the layout in words, for records."""
        if self.order is not None:
            return f"{self.kind} in measured order {hashlib.sha256(str(self.order).encode()).hexdigest()[:8]}"
        return f"{self.kind}, {self.prefix} before the grid" if self.prefix else self.kind

    def to_grid(self, tensor: Tensor) -> Tensor:
        """Return activations, or their gradient, as (N,C,*grid); a view where possible."""
        if self.kind == "channels first":
            return tensor
        return self._rows_to_grid(self.to_rows(tensor))

    def stack_to_grid(self, stack: Tensor) -> Tensor:
        """Return k stacked tensors (k,...) as (k,N,C,*grid)."""
        axis = self.image_axis
        images = stack if self.kind == "channels first" else stack.movedim(0, axis).flatten(axis, axis + 1)
        return images if images is stack else self.to_grid(images).unflatten(0, (len(stack), -1))

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return a layer's output with the images first. `from_rows` is the inverse."""
        return tensor.movedim(self.image_axis, 0)

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.movedim(0, self.image_axis)

    def list_cells(self) -> slice | list[int]:
        """Return a slice or a list of indices that selects the tokens that are cells."""
        return slice(self.prefix, self.prefix + math.prod(self.grid)) if self.order is None else list(self.order)

    def change_grid(self, rows: Tensor, change: Change) -> None:
        """Call the in-place function `change` with the grid (n,C,*grid) of rows (n,...), and update the rows."""
        grid = self._rows_to_grid(rows)
        change(grid)
        if self.order is not None:
            rows[:, self.list_cells()] = grid.flatten(2).movedim(1, -1)

    def change_channels(self, rows: Tensor, change: Change) -> None:
        """Call `change` with the channels (n,C,...) of rows (n,...), including extra tokens outside the grid."""
        change(rows.movedim(1 if self.kind == "channels first" else -1, 1))

    def _rows_to_grid(self, rows: Tensor) -> Tensor:
        if self.kind == "channels first":
            return rows
        if self.kind != "channels last":
            rows = rows[:, self.list_cells()].unflatten(1, self.grid)
        return rows.movedim(-1, 1)


def find_map_layout(
    shape: Lengths, size: Lengths, module: nn.Module | None, images: int | None, *, reshape: GridSpec
) -> Layout | None:
    """Return the layout of a map of `shape` for images of `size` (H,W) or (D,H,W); None if it is uncertain.

    The arguments are those of `token_layout.find_layout`. Channels first is assumed in general. Channels last is used
    if only this layout has the image's aspect ratio, or if the module works on channels last.
    """
    fits = len(shape) == len(size) + 2 and images in (None, shape[0])
    if isinstance(reshape, tuple) or not fits or (reshape or "").startswith("tokens"):
        return None
    first, last = tuple(shape[2:]), tuple(shape[1:-1])
    kind = reshape or _find_map_kind(shape, size, module)
    grid = last if kind == "channels last" else first
    return Layout(grid, kind) if kind and max(grid) > 1 else None


def _find_map_kind(shape: Lengths, size: Lengths, module: nn.Module | None) -> str | None:
    fits_first, fits_last = has_aspect(shape[2:], size), has_aspect(shape[1:-1], size)
    axis = None if module is None else find_channel_axis(module, shape)
    if axis == 1:
        return "channels first"
    if axis == -1:  # If the aspect ratio differs from the image's, the output consists of windows, and is no grid.
        return "channels last" if fits_last else None
    is_unclear = fits_first == fits_last and module is not None and has_channels_last(module, shape)
    if is_unclear or is_attention_output(module):
        return None
    # A convolution may have different vertical and horizontal strides, which change the aspect ratio. If the module
    # usually follows a convolution, or has a submodule for `shape[1]` channels, channels first is therefore assumed
    # even if neither ratio fits.
    if fits_first != fits_last or isinstance(module, CONVNET_LAYERS) or shape[1] in _list_channels(module):
        return "channels first" if fits_first or not fits_last else "channels last"
    if not fits_first:
        return None
    # Prefer the layout whose cells are closer to squares.
    first, last = (_distortion(grid, size) for grid in (shape[2:], shape[1:-1]))
    is_unclear = first == last and module is not None
    return None if is_unclear else "channels first" if first <= last else "channels last"


def is_attention_output(module: nn.Module | None) -> bool:
    """Return whether the output is an attention matrix, which looks like the grid of a square image."""
    return isinstance(module, nn.Softmax) and module.dim in (-1, 3)


def find_channel_axis(module: nn.Module, shape: Lengths) -> int | None:
    """Return the channel axis of a module's output, 1 or -1; None if the module does not determine the axis."""
    if isinstance(module, CHANNELS_FIRST):
        return 1
    features = None  # The number of channels, for modules that usually have the channel axis last.
    if isinstance(module, nn.Linear):
        features = module.out_features
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1:
        features = module.normalized_shape[0]
    if features is None or features not in (shape[1], shape[-1]):
        return None
    if features == shape[1] == shape[-1]:
        return -1 if type(module) in CHANNELS_LAST else _probe_channel_axis(module, features, len(shape))
    return -1 if features == shape[-1] else 1


def _probe_channel_axis(module: nn.Module, features: int, rank: int) -> int | None:
    """Return the only axis, 1 or -1, on which a LayerNorm or Linear subclass accepts its features; None if unclear."""
    in_features = module.in_features if isinstance(module, nn.Linear) else features
    weight = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
    lengths, accepted = [max(in_features, features) + 1, *[1] * (rank - 3)], []
    for axis, shape in ((1, (1, in_features, *lengths)), (-1, (1, *lengths, in_features))):
        with torch.no_grad(), contextlib.suppress(Exception):  # A module may raise anything.
            module.forward(torch.zeros(shape, dtype=weight.dtype, device=weight.device))  # `forward` skips hooks.
            accepted.append(axis)
    return accepted[0] if len(accepted) == 1 else None


def has_channels_last(module: nn.Module, shape: Lengths) -> bool:
    """Return whether the module, or one of its submodules, works on channels last."""
    return any(find_channel_axis(part, shape) == -1 for part in module.modules())


def _list_channels(module: nn.Module | None) -> list[Any]:
    parts = [part for part in (() if module is None else module.modules()) if isinstance(part, CHANNELS_FIRST)]
    return [getattr(part, name, None) for part in parts for name in ("out_channels", "num_features", "num_channels")]


@functools.lru_cache(maxsize=256)
def has_aspect(grid: Lengths, size: Lengths) -> bool:
    """Return whether a single stride turns `size` into this grid, rounded up or down.

    In a volume, the first axis may have another stride.
    """
    if any(cells > length for cells, length in zip(grid[:-2], size[:-2])):
        return False
    sides = list(zip(grid[-2:], size[-2:]))
    # Along a side with a single cell, the stride may be arbitrarily large.
    max_stride = min(length / (cells - 1) if cells > 1 else math.inf for cells, length in sides)
    return max(length / (cells + 1) for cells, length in sides) < max_stride


def _distortion(grid: Lengths, size: Lengths) -> float:
    height, width = (length / cells for cells, length in zip(grid[-2:], size[-2:]))
    return max(height / width, width / height)


def is_guess(layout: Layout, module: nn.Module, shape: Lengths, size: Lengths) -> bool:
    """Return whether only the number of cells or the aspect ratio, and not the module, determines the layout."""
    if layout.kind == "channels last":
        return not has_channels_last(module, shape)
    if layout.kind != "channels first" or not has_aspect(layout.grid, size):
        return True  # Tokens may be in any order. An output with another aspect ratio than the image may not be a map.
    if isinstance(module, CONVNET_LAYERS) or any(isinstance(part, CHANNELS_FIRST) for part in module.modules()):
        return False
    for cells, length in zip(layout.grid, size):
        strides = (max(1, length // cells), -(-length // cells))
        if not any(cells in (length // stride, -(-length // stride)) for stride in strides):
            return True  # If the stride is not an integer, the output may not be a map.
    return False


def to_reshape(value: Any) -> ReshapeSpec:
    """Return `reshape` as a tuple (a grid), a layout's name, a function, or None; raise `LayerError` otherwise."""
    if value is None or callable(value):
        return value
    if isinstance(value, str) and value.replace("-", " ") in LAYOUTS:
        return value.replace("-", " ")
    if isinstance(value, (tuple, list)) and len(value) in (2, 3):
        sides = [side for side in value if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        if len(sides) == len(value) and max(sides) > 1:
            return tuple(sides)
    function = "a function from the layer's tensor to (N, C, h, w)"
    expected = f"the token grid (h, w) or (d, h, w), one of {join_names(LAYOUTS)}, or {function}."
    raise LayerError(f"reshape is {shorten(value)}, expected {expected}")
