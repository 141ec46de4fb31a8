"""Activations of any layout as a grid: channels-last maps and transformer tokens to (N,C,h,w)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

CHANNELS_FIRST = (_ConvNd, _BatchNorm, nn.GroupNorm)
MOST_PREFIX_TOKENS = 8  # a class token, a distillation token, registers


@dataclass(frozen=True)
class Layout:
    """How a layer's output lies on the picture: where its grid is, and how many tokens come before it."""

    grid: tuple[int, ...]
    kind: str  # "channels first", "channels last" or "tokens"
    prefix: int = 0

    def to_grid(self, tensor: Tensor) -> Tensor:
        """Activations, or gradients with them, as (N,C,*grid); a view where possible."""
        if self.kind == "channels first":
            return tensor
        if self.kind == "tokens":
            tensor = tensor[:, self.prefix :].unflatten(1, self.grid)
        return tensor.movedim(-1, 1)


def find_layout(shape: Sequence[int], size: Sequence[int], module: nn.Module | None = None) -> Layout | None:
    """The layout of a layer's output of this `shape` for pictures of this `size` (H,W) or (D,H,W); None without a grid.

    Channels first is assumed, unless only channels last has the picture's aspect and the module is not known to work on
    channels first. Tokens (N,T,D) form a grid if exactly one stride that divides the picture leaves at most
    `MOST_PREFIX_TOKENS` of them over.
    """
    if len(shape) == len(size) + 2:
        first, last = tuple(shape[2:]), tuple(shape[1:-1])
        may_be_last = not isinstance(module, CHANNELS_FIRST)
        if may_be_last and _has_aspect(last, size) and not _has_aspect(first, size):
            return Layout(last, "channels last")
        return Layout(first, "channels first") if max(first) > 1 else None
    if len(shape) == 3 and len(size) == 2:
        return _token_layout(shape[1], size)
    return None


def _has_aspect(grid: Sequence[int], size: Sequence[int]) -> bool:
    """Whether one stride, rounded up or down, makes this grid of a picture of this size."""
    strides = [(length / (cells + 1), length / max(cells - 1, 0.5)) for cells, length in zip(grid, size)]
    return max(low for low, _ in strides) < min(high for _, high in strides)


def _token_layout(tokens: int, size: Sequence[int]) -> Layout | None:
    height, width = size
    candidates = []
    for stride in range(1, min(height, width) + 1):
        if height % stride == 0 and width % stride == 0:
            grid = (height // stride, width // stride)
            prefix = tokens - grid[0] * grid[1]
            if 0 <= prefix <= MOST_PREFIX_TOKENS and max(grid) > 1:
                candidates.append(Layout(grid, "tokens", prefix))
    return candidates[0] if len(candidates) == 1 else None
