"""Into which patches a model cuts a picture, and which grids these, or whole ones together, can form."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

PICTURE_CHANNELS = 4  # at most, of what a convolution that works on the picture itself takes


USUAL_DEPTH = 16  # slices of a volume, or frames of a clip


def takes_volumes(model: nn.Module) -> bool:
    """Whether the model's first convolution is over volumes or clips (N,C,D,H,W)."""
    return isinstance(next((it for it in model.modules() if isinstance(it, _ConvNd)), None), nn.Conv3d)


class Patch(NamedTuple):
    """How a convolution cuts a picture: into patches of this size, so far apart, behind so much padding."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def grids(self, size: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The grids of patches on a picture; where they lie edge to edge, the last may be cut off or padded."""
        if self.kernel == self.stride:
            yield tuple(length // side for length, side in zip(size, self.stride))
            yield tuple(-(-length // side) for length, side in zip(size, self.stride))
        yield tuple(
            (length + 2 * padding - kernel) // stride + 1
            for length, kernel, stride, padding in zip(size, self.kernel, self.stride, self.padding)
        )


def find_patches(modules: Iterable[nn.Module]) -> list[Patch]:
    """Into which patches a model's convolutions cut a picture: those edge to edge, and those on the picture itself."""
    found: list[Patch] = []
    for module in modules:
        if isinstance(module, _ConvNd) and (module.stride == module.kernel_size or _is_on_picture(module)):
            padding: Any = (0,) * len(module.stride) if isinstance(module.padding, str) else module.padding
            found.append(Patch(module.kernel_size, module.stride, padding))
    return found


def _is_on_picture(module: _ConvNd) -> bool:
    return module.in_channels <= PICTURE_CHANNELS and max(module.stride) > 1


def find_patch_grids(size: Sequence[int], patches: Sequence[Patch]) -> Iterator[tuple[int, ...]]:
    """The grids of all patches that are of as many dimensions as the picture."""
    for patch in patches:
        if len(patch.stride) == len(size):
            yield from patch.grids(size)


@functools.lru_cache(maxsize=64)
def find_even_grids(size: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The grids of square patches that divide the picture; in a volume the first axis may have a stride of its own."""
    *depths, height, width = size
    common = math.gcd(height, width)
    strides = [stride for stride in range(1, common + 1) if common % stride == 0]
    own = [[cells for cells in range(1, depth + 1) if depth % cells == 0] for depth in depths]
    return tuple((*first, height // stride, width // stride) for stride in strides for first in product(*own))


def may_be_merged(grid: tuple[int, ...], size: Sequence[int], patches: Sequence[Patch]) -> bool:
    """Whether whole patches, or whole steps of a first convolution, make up the cells of this grid."""
    steps = [patch.stride for patch in patches if max(patch.stride) > 1 and len(patch.stride) == len(size)]
    cells = [length // count for length, count in zip(size, grid)][-2:]
    return not steps or any(all(cell % step == 0 for cell, step in zip(cells, stride[-2:])) for stride in steps)
