"""Lay out the tokens of a transformer: find the grid that a number of tokens forms on the image.

Extra tokens are assumed to come before the cells. `cam/measure_layout.py` measures the order of tokens, and corrects
the assumption.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from gradcam.layers import layout as maps
from gradcam.layers.layout import Grid, GridSpec, Layout, Lengths

# If a convolution has at most this many input channels, it is assumed to work on the image itself.
MAX_IMAGE_CHANNELS = 4
USUAL_DEPTH = 16  # The usual number of slices of a volume, or frames of a clip.
MAX_PREFIX_TOKENS = 8  # The maximum number of extra tokens, such as a class token, a distillation token and registers.
MAX_GUESSED_PREFIX = 2  # The maximum number if no patch grid fits. The tokens may then be a selection of the patches.
MAX_PREFIX_OF_GIVEN_GRID = 8  # The maximum number of extra tokens if the user passes the grid.
IMAGE_AXES = (0, 1)  # The axes of a token tensor that may be the image axis.
TOKEN_KINDS = ("tokens", "tokens first")  # The layouts of tokens, by image axis: 0 for (N,T,D), and 1 for (T,N,D).


def takes_volumes(model: nn.Module) -> bool:
    """Return whether the model's first convolution works on volumes or clips (N,C,D,H,W)."""
    return isinstance(next((module for module in model.modules() if isinstance(module, _ConvNd)), None), nn.Conv3d)


class Patch(NamedTuple):
    """The patches into which a convolution cuts an image: their size, stride and padding."""

    kernel: Grid
    stride: Grid
    padding: Grid

    def grids(self, size: Lengths) -> Iterator[Grid]:
        """Yield possible grids of patches.

        If patches do not overlap, an incomplete last patch may be dropped or padded.
        """
        if self.kernel == self.stride:
            yield tuple(length // stride for length, stride in zip(size, self.stride))
            yield tuple(-(-length // stride) for length, stride in zip(size, self.stride))
        axes = zip(size, self.kernel, self.stride, self.padding)
        yield tuple((length + 2 * padding - kernel) // stride + 1 for length, kernel, stride, padding in axes)


def find_patches(modules: Iterable[nn.Module]) -> list[Patch]:
    """Return the patches of all convolutions whose patches do not overlap, or that work on the image itself."""
    patches: list[Patch] = []
    for module in (module for module in modules if isinstance(module, _ConvNd)):
        is_on_image = module.in_channels <= MAX_IMAGE_CHANNELS and max(module.stride) > 1
        if is_on_image or module.stride == module.kernel_size:
            padding: Any = (0,) * len(module.stride) if isinstance(module.padding, str) else module.padding
            patches.append(Patch(module.kernel_size, module.stride, padding))
    return patches


def find_patch_grids(size: Lengths, patches: Sequence[Patch]) -> Iterator[Grid]:
    """Return the grids of all patches that have as many spatial axes as the image."""
    return (grid for patch in patches if len(patch.stride) == len(size) for grid in patch.grids(size))


@functools.lru_cache(maxsize=64)
def find_even_grids(size: Grid) -> tuple[Grid, ...]:
    """Return the grids of square patches that divide the image. In a volume, the first axis may have another stride."""
    *depths, height, width = size
    common = math.gcd(height, width)
    strides = [stride for stride in range(1, common + 1) if common % stride == 0]
    depth_grids = [[cells for cells in range(1, depth + 1) if depth % cells == 0] for depth in depths]
    return tuple((*cells, height // stride, width // stride) for stride in strides for cells in product(*depth_grids))


def consists_of_patches(grid: Grid, size: Lengths, patches: Sequence[Patch]) -> bool:
    """Return whether a patch exists whose strides divide the side lengths of a grid cell.

    If no patch has a stride above 1, return True.
    """
    steps = [patch.stride for patch in patches if max(patch.stride) > 1 and len(patch.stride) == len(size)]
    cell_size = [length // count for length, count in zip(size, grid)][-2:]
    return not steps or any(all(length % step == 0 for length, step in zip(cell_size, stride[-2:])) for stride in steps)


def find_rival_layouts(shape: Lengths, module: nn.Module, size: Lengths, patches: Sequence[Patch] = ()) -> list[Layout]:
    """Return all layouts that fit equally well, such as token grids with equally many cells; [] if only one fits."""
    if len(shape) == 3:
        layouts = _find_token_layouts(shape[1], size, patches)
        return layouts if len(layouts) > 1 else []
    grids = {"channels first": tuple(shape[2:]), "channels last": tuple(shape[1:-1])}
    if len(shape) != len(size) + 2 or maps.is_attention_output(module) or maps.has_channels_last(module, shape):
        return []
    are_maps = all(maps.has_aspect(grid, size) for grid in grids.values())
    return [Layout(grid, kind) for kind, grid in grids.items() if are_maps and max(grid) > 1]


def find_layout(
    shape: Lengths,
    size: Lengths,
    module: nn.Module | None = None,
    images: int | None = None,
    *,
    patches: Sequence[Patch] = (),
    reshape: GridSpec = None,
    image_axes: Lengths = IMAGE_AXES,
) -> Layout | None:
    """Return the layout of an output of `shape` for images of `size` (H,W) or (D,H,W); None if it is uncertain.

    `images` is the number of images; None means one image per row. If the output does not have one row per image, there
    is no grid. `patches` is the result of `find_patches`; it is needed for tokens. `reshape` is one of
    `options.LAYOUTS`, or the grid that the last tokens form. `image_axes` are the possible image axes of tokens;
    `AxisResolver` finds them by running the model. Tokens (N,T,D) form a grid if exactly one grid fits. (T,N,D) is
    assumed only if (N,T,D) is impossible. For other outputs, `find_map_layout` returns the layout.
    """
    if len(shape) != 3:
        return maps.find_map_layout(shape, size, module, images, reshape=reshape)
    axes = [axis for axis in image_axes if images in (None, shape[axis])]
    if isinstance(reshape, tuple):
        for axis in axes if len(reshape) == len(size) else ():
            prefix = shape[1 - axis] - math.prod(reshape)
            if 0 <= prefix <= MAX_PREFIX_OF_GIVEN_GRID:
                layouts = list_token_layouts(shape[1 - axis], find_patch_grids(size, patches))
                is_possible = not layouts or any(layout.grid == reshape for layout in layouts)
                return Layout(reshape, TOKEN_KINDS[axis], prefix) if is_possible else None
        return None
    axes = [axis for axis in axes if reshape in (None, TOKEN_KINDS[axis]) and (axis == 0 or images is not None)]
    module = module if reshape is None else None
    for axis in (axis for axis in IMAGE_AXES if axis in axes):
        layouts = _find_token_layouts(shape[1 - axis], size, patches)
        if len(layouts) == 1 and axis == 1:
            return replace(layouts[0], kind=TOKEN_KINDS[1])
        if len(layouts) == 1:
            patch_grids = list(find_patch_grids(size, patches))
            # If the grid is one of the model's patch grids, compare only with patch grids. Otherwise, compare with even
            # grids.
            grids = patch_grids if layouts[0].grid in patch_grids else find_even_grids(tuple(size))
            channels = None if module is None else maps.find_channel_axis(module, shape)
            if channels is None and module is not None and not maps.has_channels_last(module, shape):
                # The tensor may also be a map (N,C,h,w) on one of the `grids`, flattened to (N,C,h*w).
                channels = 1 if any(math.prod(grid) == shape[2] for grid in grids) else None
            return None if channels == 1 else layouts[0]
    return None


def _find_token_layouts(tokens: int, size: Lengths, patches: Sequence[Patch]) -> list[Layout]:
    """Return layouts with few extra tokens: on the model's patch grids or, if no patch grid fits, on even grids."""
    layouts = list_token_layouts(tokens, find_patch_grids(size, patches))
    if layouts:
        return layouts
    max_prefix = MAX_GUESSED_PREFIX if patches else MAX_PREFIX_TOKENS
    grids = (grid for grid in find_even_grids(tuple(size)) if consists_of_patches(grid, size, patches))
    return [layout for layout in list_token_layouts(tokens, grids) if layout.prefix <= max_prefix]


def list_token_layouts(tokens: int, grids: Iterable[Grid]) -> list[Layout]:
    """Return the possible layouts of this many tokens on the grids, each once."""
    prefixes = {grid: tokens - math.prod(grid) for grid in grids if max(grid) > 1}
    return [Layout(grid, "tokens", prefix) for grid, prefix in prefixes.items() if 0 <= prefix <= MAX_PREFIX_TOKENS]
