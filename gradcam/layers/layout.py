"""Lay out activations as a grid: channels-first or channels-last maps and transformer tokens become (N,C,h,w).

If a shape does not tell what its axes are, the model runs on a changed batch. With a single image, the image axis has
length 1 or, if windows are folded into it, the number of windows per image. With another text length, only tensors that
contain text change their length.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from gradcam.errors import LayerError, join_names, shorten
from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.hooks import Hooks, grad_mode_off
from gradcam.hooks.model_facts import ModelFacts
from gradcam.hooks.preserve import preserve_state
from gradcam.options import LAYOUTS

MAX_IMAGE_CHANNELS = 4  # Input channels of a convolution that works on the image itself.
USUAL_DEPTH = 16  # Slices of a volume, or frames of a clip.

POOLING = (_AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd)
CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm, *POOLING)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm, nn.Linear)  # Without subclasses: some of them work on channels first.
# These usually follow convolutions. GELU and Dropout are left out, because transformers have them as well.
CONVNET_LAYERS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Dropout2d)
MAX_PREFIX_TOKENS = 8  # Such as a class token, a distillation token and registers.
MAX_GUESSED_PREFIX = 2  # Limit if no grid of the model's patches fits: the tokens may then be a selection of patches.
MAX_PREFIX_OF_GIVEN_GRID = 8  # If the user gives the grid.
IMAGE_AXES = (0, 1)  # Axes of token tensors that may be the image axis.
TOKEN_KINDS = ("tokens", "tokens first")  # The layouts of tokens, by image axis.

Change = Callable[[Tensor], object]  # Changes a tensor in place.
Lengths = Sequence[int]  # The lengths of a shape, an image or a grid.
Grid = tuple[int, ...]


def takes_volumes(model: nn.Module) -> bool:
    """Return whether the model's first convolution works on volumes or clips (N,C,D,H,W)."""
    return isinstance(next((module for module in model.modules() if isinstance(module, _ConvNd)), None), nn.Conv3d)


class Patch(NamedTuple):
    """The patches into which a convolution cuts an image: their size, stride and padding."""

    kernel: Grid
    stride: Grid
    padding: Grid

    def grids(self, size: Lengths) -> Iterator[Grid]:
        """Yield possible grids of patches. Without overlap, an incomplete last patch may be dropped or padded."""
        if self.kernel == self.stride:
            yield tuple(length // stride for length, stride in zip(size, self.stride))
            yield tuple(-(-length // stride) for length, stride in zip(size, self.stride))
        yield tuple(
            (length + 2 * padding - kernel) // stride + 1
            for length, kernel, stride, padding in zip(size, self.kernel, self.stride, self.padding)
        )


def find_patches(modules: Iterable[nn.Module]) -> list[Patch]:
    """Return the patches of a model's convolutions: those without overlap, and those on the image itself."""
    patches: list[Patch] = []
    for module in (module for module in modules if isinstance(module, _ConvNd)):
        is_on_image = module.in_channels <= MAX_IMAGE_CHANNELS and max(module.stride) > 1
        if is_on_image or module.stride == module.kernel_size:
            padding: Any = (0,) * len(module.stride) if isinstance(module.padding, str) else module.padding
            patches.append(Patch(module.kernel_size, module.stride, padding))
    return patches


def find_patch_grids(size: Lengths, patches: Sequence[Patch]) -> Iterator[Grid]:
    """Return the grids of all patches with as many dimensions as the image."""
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
    """Return whether each cell of this grid consists of whole patches, or of whole steps of a first convolution."""
    steps = [patch.stride for patch in patches if max(patch.stride) > 1 and len(patch.stride) == len(size)]
    cell_size = [length // count for length, count in zip(size, grid)][-2:]
    return not steps or any(all(length % step == 0 for length, step in zip(cell_size, stride[-2:])) for stride in steps)


@dataclass(frozen=True)
class Layout:
    """The arrangement of a layer's output on the image: its grid, and which tokens are the grid's cells.

    `kind` is one of `options.LAYOUTS`; "tokens" are (N,T,D), "tokens first" (T,N,D). `prefix` tokens come before the
    cells, and any remaining tokens after them. If the cells are not in row-major order, `order` lists their tokens row
    by row.
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
        """Return an index of the tokens that are cells."""
        return slice(self.prefix, self.prefix + math.prod(self.grid)) if self.order is None else list(self.order)

    def change_grid(self, rows: Tensor, change: Change) -> None:
        """Call `change` with the grid (n,C,*grid) in rows (n,...), and write the result back."""
        grid = self._rows_to_grid(rows)
        change(grid)
        if self.order is not None:
            rows[:, self.list_cells()] = grid.flatten(2).movedim(1, -1)

    def change_channels(self, rows: Tensor, change: Change) -> None:
        """Call `change` with the channels (n,C,...) of rows (n,...), including the tokens outside the grid."""
        change(rows.movedim(1 if self.kind == "channels first" else -1, 1))

    def _rows_to_grid(self, rows: Tensor) -> Tensor:
        if self.kind == "channels first":
            return rows
        if self.kind != "channels last":
            rows = rows[:, self.list_cells()].unflatten(1, self.grid)
        return rows.movedim(-1, 1)


def order_key(layout: Layout | IndexLayout, shape: Lengths, size: Lengths) -> Hashable:
    """Return the cache key for the measured order of a layer's tokens."""
    return ("order", shape[1 - layout.image_axis], tuple(size), layout)


def find_layout(
    shape: Lengths,
    size: Lengths,
    module: nn.Module | None = None,
    images: int | None = None,
    *,
    patches: Sequence[Patch] = (),
    reshape: str | Grid | None = None,
    image_axes: Lengths = IMAGE_AXES,
) -> Layout | None:
    """Return the layout of an output of `shape` for images of `size` (H,W) or (D,H,W); None if it is uncertain.

    `images` is the number of images; None means one per row. Without one row per image, there is no grid. `patches` are
    those of `find_patches`, for tokens. `reshape` is one of `options.LAYOUTS`, or the grid that the last tokens form.
    `image_axes` are the possible image axes of tokens; `AxisResolver` finds them by running the model. Channels first
    is assumed, unless only channels last has the image's aspect ratio, or the module works on channels last. Tokens
    (N,T,D) form a grid if exactly one grid fits. (T,N,D) is assumed only if (N,T,D) is impossible.
    """
    if len(shape) == 3:
        axes = [axis for axis in image_axes if images in (None, shape[axis])]
        if isinstance(reshape, tuple):
            for axis in axes if len(reshape) == len(size) else ():
                prefix = shape[1 - axis] - math.prod(reshape)
                if 0 <= prefix <= MAX_PREFIX_OF_GIVEN_GRID:
                    patch_grids = find_patch_grids(size, patches)
                    grids = [layout.grid for layout in list_token_layouts(shape[1 - axis], patch_grids)]
                    return Layout(reshape, TOKEN_KINDS[axis], prefix) if reshape in grids or not grids else None
            return None
        axes = [axis for axis in axes if reshape in (None, TOKEN_KINDS[axis]) and (axis == 0 or images is not None)]
        return _find_row_layout(shape, size, module if reshape is None else None, axes, patches)
    fits = len(shape) == len(size) + 2 and images in (None, shape[0])
    if isinstance(reshape, tuple) or not fits or (reshape or "").startswith("tokens"):
        return None
    first, last = tuple(shape[2:]), tuple(shape[1:-1])
    kind = reshape or _find_map_kind(shape, size, module)
    grid = last if kind == "channels last" else first
    return Layout(grid, kind) if kind and max(grid) > 1 else None


def _find_map_kind(shape: Lengths, size: Lengths, module: nn.Module | None) -> str | None:
    fits_first, fits_last = _has_aspect(shape[2:], size), _has_aspect(shape[1:-1], size)
    axis = None if module is None else _find_channel_axis(module, shape)
    if axis == 1:
        return "channels first"
    if axis == -1:  # Partitioned windows lack the image's aspect ratio, and are no grid.
        return "channels last" if fits_last else None
    if _is_attention(module) or (fits_first == fits_last and module is not None and _has_channels_last(module, shape)):
        return None
    # Vertical and horizontal strides may differ after convolutions, and in modules with a part for `shape[1]` channels.
    if fits_first != fits_last or isinstance(module, CONVNET_LAYERS) or shape[1] in _list_channels(module):
        return "channels first" if fits_first or not fits_last else "channels last"
    if not fits_first:
        return None
    first, last = (_distortion(grid, size) for grid in (shape[2:], shape[1:-1]))  # Prefer squarer cells.
    is_unclear = first == last and module is not None
    return None if is_unclear else "channels first" if first <= last else "channels last"


def _is_attention(module: nn.Module | None) -> bool:
    """Return whether the output is an attention matrix, which looks like the grid of a square image."""
    return isinstance(module, nn.Softmax) and module.dim in (-1, 3)


def _find_channel_axis(module: nn.Module, shape: Lengths) -> int | None:
    if isinstance(module, CHANNELS_FIRST):
        return 1
    features = None  # The length of the channel axis, for modules that usually have it last.
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
    """Return the axis on which a LayerNorm or Linear subclass has its features: it rejects another length there."""
    in_features = module.in_features if isinstance(module, nn.Linear) else features
    weight = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
    lengths, accepted = [max(in_features, features) + 1, *[1] * (rank - 3)], []
    for axis, shape in ((1, (1, in_features, *lengths)), (-1, (1, *lengths, in_features))):
        with torch.no_grad(), contextlib.suppress(Exception):  # A module may raise anything.
            module.forward(torch.zeros(shape, dtype=weight.dtype, device=weight.device))  # `forward` skips hooks.
            accepted.append(axis)
    return accepted[0] if len(accepted) == 1 else None


def _has_channels_last(module: nn.Module, shape: Lengths) -> bool:
    return any(_find_channel_axis(part, shape) == -1 for part in module.modules())


def _list_channels(module: nn.Module | None) -> list[Any]:
    parts = [part for part in (() if module is None else module.modules()) if isinstance(part, CHANNELS_FIRST)]
    return [getattr(part, name, None) for part in parts for name in ("out_channels", "num_features", "num_channels")]


def _has_aspect(grid: Lengths, size: Lengths) -> bool:
    """Return whether one stride, rounded up or down, gives this grid. A volume's first axis may have its own stride."""
    if any(cells > length for cells, length in zip(grid[:-2], size[:-2])):
        return False
    sides = list(zip(grid[-2:], size[-2:]))  # A single cell sets no upper limit for the stride.
    max_stride = min(length / (cells - 1) if cells > 1 else math.inf for cells, length in sides)
    return max(length / (cells + 1) for cells, length in sides) < max_stride


def _distortion(grid: Lengths, size: Lengths) -> float:
    height, width = (length / cells for cells, length in zip(grid[-2:], size[-2:]))
    return max(height / width, width / height)


def find_rival_layouts(shape: Lengths, module: nn.Module, size: Lengths, patches: Sequence[Patch] = ()) -> list[Layout]:
    """Return all layouts that fit equally well, such as token grids with as many cells; [] if only one fits."""
    if len(shape) == 3:
        layouts = _find_token_layouts(shape[1], size, patches)
        return layouts if len(layouts) > 1 else []
    grids = {"channels first": tuple(shape[2:]), "channels last": tuple(shape[1:-1])}
    if len(shape) != len(size) + 2 or _is_attention(module) or _has_channels_last(module, shape):
        return []
    are_maps = all(_has_aspect(grid, size) for grid in grids.values())
    return [Layout(grid, kind) for kind, grid in grids.items() if are_maps and max(grid) > 1]


def is_guess(layout: Layout, module: nn.Module, shape: Lengths, size: Lengths) -> bool:
    """Return whether only a number of cells or an aspect ratio supports the layout, and no module confirms it."""
    if layout.kind == "channels last":
        return not _has_channels_last(module, shape)
    if layout.kind != "channels first" or not _has_aspect(layout.grid, size):
        return True  # Tokens may be in any order, and maps of another aspect ratio may be no maps.
    if isinstance(module, CONVNET_LAYERS) or any(isinstance(part, CHANNELS_FIRST) for part in module.modules()):
        return False
    for cells, length in zip(layout.grid, size):
        strides = (max(1, length // cells), -(-length // cells))
        if not any(cells in (length // stride, -(-length // stride)) for stride in strides):
            return True  # With a stride that is not an integer, this may be no map.
    return False


def _find_row_layout(
    shape: Lengths, size: Lengths, module: nn.Module | None, axes: Lengths, patches: Sequence[Patch]
) -> Layout | None:
    """Return the layout of a tensor with three axes: tokens, unless its middle axis holds channels."""
    for axis in (axis for axis in IMAGE_AXES if axis in axes):
        layouts = _find_token_layouts(shape[1 - axis], size, patches)
        if len(layouts) == 1 and axis == 1:
            return replace(layouts[0], kind=TOKEN_KINDS[1])
        if len(layouts) == 1:  # Grids of the model's patches are more certain than grids that divide the image.
            patch_grids = list(find_patch_grids(size, patches))
            grids = patch_grids if layouts[0].grid in patch_grids else find_even_grids(tuple(size))
            channels = None if module is None else _find_channel_axis(module, shape)
            if channels is None and module is not None and not _has_channels_last(module, shape):
                # The tensor could also be a map (N,C,h,w) on one of these grids, flattened to (N,C,h*w).
                channels = 1 if any(math.prod(grid) == shape[2] for grid in grids) else None
            return None if channels == 1 else layouts[0]
    return None


def _find_token_layouts(tokens: int, size: Lengths, patches: Sequence[Patch]) -> list[Layout]:
    """Return layouts with few tokens outside the grid: on the model's patch grids or, if none fits, on even grids."""
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


Shapes = dict[nn.Module, list[tuple[int, ...]]]  # The shapes of the tensors that each module returns.


def take_image(batch: Batch, index: int = 0) -> Batch:
    """Return one image of a batch, and everything that belongs to it."""

    def take(tensor: Tensor) -> Tensor:
        return (tensor[index : index + 1] if _is_of_images(tensor, batch) else tensor).clone()

    return batch.copy(take).take(1, index)


class AxisResolver:
    """Finds the axes of layer outputs for a batch. The model runs only if the shapes leave the axes uncertain."""

    def __init__(
        self, model: nn.Module, batch: Batch, patches: Sequence[Patch] = (), facts: ModelFacts | None = None
    ) -> None:
        self._model, self._batch, self._patches = model, batch, patches
        self._facts = facts or ModelFacts(model)

    @functools.cached_property
    def text_lengths(self) -> list[int]:
        """Return the lengths of the texts in the batch, which are rows of token ids or of embeddings."""
        if len(self._batch.args) == 1 and not self._batch.kwargs:  # There are only images.
            return []
        arguments = list_tensors((self._batch.args, self._batch.kwargs))
        per_image = [tensor for tensor in arguments if _is_of_images(tensor, self._batch)]
        words = [ids for ids in per_image if ids.ndim == 2 and not ids.is_floating_point() and ids.dtype != torch.bool]
        vectors = [vector for vector in per_image if vector.ndim == 3 and vector.is_floating_point()]
        return sorted({tensor.shape[1] for tensor in words + vectors})

    def find_layout(
        self, shape: Sequence[int], module: nn.Module, reshape: str | tuple[int, ...] | None = None
    ) -> Layout | None:
        """Return the layout of a module's output, as the function `find_layout` does; None also for text."""
        size, images = self._batch.size, self._batch.images
        axes = IMAGE_AXES if isinstance(reshape, str) else self.image_axes(shape, module)
        layout = find_layout(shape, size, module, images, patches=self._patches, reshape=reshape, image_axes=axes)
        return None if layout is not None and reshape is None and self.holds_text(shape, module) else layout

    def image_axes(self, shape: Sequence[int], module: nn.Module) -> Sequence[int]:
        """Return which of a tensor's first two axes may be the image axis; an empty list if neither can be."""
        # With as many tokens, of an image or of a window folded into the image axis, as images, the shape is ambiguous.
        shape, images = tuple(shape), self._batch.images
        if len(shape) != 3 or images == 1 or shape[1] != images or shape[0] % images:
            return IMAGE_AXES

        def find_axes() -> Sequence[int]:
            single_shapes = self._single_image_shapes.get(module, [])
            return [axis for axis in IMAGE_AXES if (*shape[:axis], 1, *shape[axis + 1 :]) in single_shapes]

        axes: Sequence[int] = self._remember(module, ("images", shape), find_axes)
        return axes

    def holds_text(self, shape: Sequence[int], module: nn.Module) -> bool:
        """Return whether an output of this shape contains text, alone or together with the image's tokens."""
        shape = tuple(shape)
        if not self.text_lengths or max(shape[1:], default=0) < self.text_lengths[0]:
            return False
        return bool(self._remember(module, ("text", shape, *self.text_lengths), lambda: self._has_text(shape, module)))

    def prepare(self) -> None:
        """Run the changed batches now, because the caller will watch the layers while the model runs."""
        if self._batch.images > 1:
            _ = self._single_image_shapes
        if self.text_lengths:
            _ = self._changed_text_shapes

    @functools.cached_property
    def plain(self) -> Shapes:
        return self._list_shapes(self._batch.copy())

    def _has_text(self, shape: tuple[int, ...], module: nn.Module) -> bool:
        for shapes in self._changed_text_shapes:
            if module not in shapes:  # The model takes no other length, so the number of tokens decides.
                image_tokens = [shape[1] - length for length in self.text_lengths]
                grids = list(find_patch_grids(self._batch.size, self._patches))
                return any(count == 0 or (count > 0 and list_token_layouts(count, grids)) for count in image_tokens)
            if shape not in shapes[module]:
                return True
        return False

    @functools.cached_property
    def _single_image_shapes(self) -> Shapes:
        return self._list_shapes(take_image(self._batch))

    @functools.cached_property
    def _changed_text_shapes(self) -> list[Shapes]:
        """Return the shapes with each text one word shorter or, if that fails, with the last word repeated."""
        shapes = []
        for length in self.text_lengths:
            shorter = {} if length == 1 else self._text_shapes(length, lambda tensor: tensor[:, :-1])
            shapes.append(shorter or self._text_shapes(length, lambda tensor: torch.cat([tensor, tensor[:, -1:]], 1)))
        return shapes

    def _text_shapes(self, length: int, change: Callable[[Tensor], Tensor]) -> Shapes:
        def change_texts(tensor: Tensor) -> Tensor:
            has_text = 2 <= tensor.ndim <= 3 and tensor.shape[1] == length and _is_of_images(tensor, self._batch)
            return (change(tensor) if has_text else tensor).clone()

        return self._list_shapes(self._batch.copy(change_texts))

    def _list_shapes(self, batch: Batch) -> Shapes:
        """Return the shapes of each layer's output for a changed batch; an empty dict if the model rejects it."""
        shapes_by_module: Shapes = {}

        def record_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if shapes := [tuple(tensor.shape) for tensor in list_tensors(output) if tensor.is_floating_point()]:
                shapes_by_module.setdefault(module, shapes)

        try:
            with preserve_state(self._model) as modules, grad_mode_off(), Hooks() as hooks:
                for module in modules:
                    if not isinstance(module, torch.jit.ScriptModule):
                        hooks.after_forward(module, record_shapes)
                batch.run(self._model)
        except Exception:  # A model may raise anything for a batch that it was not built for.
            return {}
        return shapes_by_module

    def _remember(self, module: nn.Module, key: Any, compute: Callable[[], Any]) -> Any:
        return self._facts.remember((*key, id(module), self._batch.images, self._batch.size), compute)


def _is_of_images(tensor: Tensor, batch: Batch) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch.images


ReshapeFunction = Callable[[Tensor], Tensor]
ReshapeSpec = str | tuple[int, ...] | ReshapeFunction | None


@dataclass(frozen=True, eq=False)
class IndexLayout:
    """The layout that a reshape function describes: where in the layer's output the value of each cell comes from.

    `indices` (N,C,*grid) point into the flattened output with the images first. An image has `folds` rows.
    """

    indices: Tensor
    image_axis: int
    folds: int
    kind: str = "picked"

    @property
    def name(self) -> str:
        """Return the layout in words, for records."""
        return self.kind

    def to_grid(self, tensor: Tensor) -> Tensor:
        return self.to_rows(tensor).flatten()[self.indices]

    def stack_to_grid(self, stack: Tensor) -> Tensor:
        return stack.movedim(self.image_axis + 1, 1).flatten(1)[:, self.indices]

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return the output with the images first. An image's rows stay together."""
        rows = tensor.movedim(self.image_axis, 0)
        return rows if self.folds == 1 else rows.unflatten(0, (-1, self.folds))

    def from_rows(self, rows: Tensor) -> Tensor:
        return (rows if self.folds == 1 else rows.flatten(0, 1)).movedim(0, self.image_axis)

    def change_grid(self, rows: Tensor, change: Change) -> None:
        """Change the picked values in place. Values that the function leaves out stay as they are."""
        values = rows.view(-1, rows[: len(self.indices)].numel())
        grid = values[:, self.indices].flatten(0, 1)
        change(grid)
        values[:, self.indices.flatten()] = grid.reshape(len(values), -1)

    def change_channels(self, rows: Tensor, change: Change) -> None:
        self.change_grid(rows, change)


def to_reshape(value: Any) -> ReshapeSpec:
    """Return a grid as a tuple, a layout's name, a function, or None. Raises `LayerError` for any other `value`."""
    if value is None or callable(value):
        return value
    if isinstance(value, str) and value.replace("-", " ") in LAYOUTS:
        return value.replace("-", " ")
    if isinstance(value, (tuple, list)) and len(value) in (2, 3):
        sides = [side for side in value if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        if len(sides) == len(value) and max(sides) > 1:
            return tuple(sides)
    raise LayerError(
        f"reshape is {shorten(value)}, expected the token grid (h, w) or (d, h, w), one of {join_names(LAYOUTS)}, or a "
        "function from the layer's tensor to (N, C, h, w)."
    )


def probe_layout(function: ReshapeFunction, layer: str, activations: Tensor, images: int, rank: int) -> IndexLayout:
    """Return the layout that a reshape function describes, for the given number of images and of grid axes (`rank`).

    The function is called with numbered positions, so that its output tells where each value came from. Raises
    `LayerError` if the function fails, returns another shape, computes, uses a value twice, or mixes images.
    """
    shape, count = activations.shape, activations.numel()
    dtype = torch.float32 if activations.device.type == "mps" else torch.float64  # Exact for these numbers.
    subject = f"The reshape function, called with the tensor {tuple(shape)} of layer '{layer}',"
    numbers = torch.arange(1, count + 1, dtype=dtype, device=activations.device).reshape(shape)
    picked = _call(function, numbers, subject)
    if picked.ndim != rank + 2 or len(picked) != images or max(picked.shape[2:]) < 2:
        expected = ", ".join([str(images), "C", *"dhw"[-rank:]])
        raise LayerError(f"{subject} returned {tuple(picked.shape)}, expected ({expected}).")
    indices = picked.to(torch.int64) - 1
    is_pick = bool((picked == picked.round()).all()) and int(indices.min()) >= 0 and int(indices.max()) < count
    if is_pick:
        # The positions prove little: a ReLU or a cumulative maximum leaves positive, increasing numbers unchanged.
        noise = torch.randn(count, dtype=dtype, device="cpu", generator=torch.Generator("cpu").manual_seed(0)).to(
            numbers
        )
        output = _call(function, noise.reshape(shape), subject)
        is_pick = output.shape == picked.shape and torch.equal(output, noise[indices].to(output.dtype))
    if not is_pick:
        raise LayerError(
            f"{subject} returned values that are not in its input. It is also used for gradients, so it may only pick and "
            "move values (slicing, reshape, permute)."
        )
    if len(indices.unique()) < indices.numel():
        raise LayerError(f"{subject} used some values more than once: it may only pick and move values.")
    axis, folds = _image_axis(indices, shape, images, subject)
    before = torch.arange(count, dtype=torch.int64, device=indices.device).reshape(shape).movedim(axis, 0).flatten()
    after = torch.empty_like(before)
    after[before] = torch.arange(count, dtype=torch.int64, device=indices.device)
    return IndexLayout(after[indices], axis, folds)


def _call(function: ReshapeFunction, tensor: Tensor, subject: str) -> Tensor:
    try:
        with torch.no_grad():
            result = function(tensor.clone())
    except Exception as error:  # A user's function may raise anything.
        raise LayerError(f"{subject} raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(result, Tensor):
        raise LayerError(f"{subject} returned {shorten(result)}, expected a tensor (N, C, h, w).")
    return result.to(tensor.device)


def _image_axis(indices: Tensor, shape: torch.Size, images: int, subject: str) -> tuple[int, int]:
    """Return the image axis, and the number of rows per image: one, or several if windows were folded into it."""
    coordinates = torch.unravel_index(indices, shape)
    expected = torch.arange(images, dtype=torch.int64, device=indices.device).reshape(-1, *[1] * (indices.ndim - 1))
    axes = sorted(range(len(shape)), key=lambda axis: shape[axis] != images)
    for axis in axes:
        folds, remainder = divmod(shape[axis], images)
        if remainder == 0 and bool((coordinates[axis] // folds == expected).all()):
            return axis, folds
    raise LayerError(f"{subject} mixed the {images} images: the grid of each image must come from that image alone.")
