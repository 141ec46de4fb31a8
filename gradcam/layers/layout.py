"""Activations of any layout as a grid: channels-last maps and transformer tokens to (N,C,h,w).

Where counting cannot tell what the axes are, the model is asked, by a batch of another form. With one image alone the axis
of the images has one row, and windows that were folded into rows have as many as one image has. With another length of the
text, what holds text has another length, and the picture's own tokens have not.
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
from gradcam.hooks.facts import Facts
from gradcam.hooks.hooks import Hooks, recording_off
from gradcam.hooks.nested import Batch, tensors
from gradcam.hooks.preserve import preserve_state
from gradcam.options import LAYOUTS

PICTURE_CHANNELS = 4  # at most, of what a convolution that works on the picture itself takes
USUAL_DEPTH = 16  # slices of a volume, or frames of a clip

POOLING = (_AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd)
CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm, *POOLING)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm, nn.Linear)  # themselves: of their kinds some work on channels first
# As a rule; GELU and Dropout are transformers' as well.
BEHIND_CONVOLUTIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Dropout2d)
MOST_PREFIX_TOKENS = 8  # a class token, a distillation token, registers
MOST_GUESSED_PREFIX = 2  # where the model's patches do not explain the grid: fewer tokens may be some that were chosen
MOST_NAMED_PREFIX = 8  # where the grid is given
IMAGE_AXES = (0, 1)  # along which the images of tokens may lie
TOKENS = ("tokens", "tokens first")  # the layouts of tokens, by that axis

Change = Callable[[Tensor], object]  # of a tensor, in place
Lengths = Sequence[int]  # of a shape, a picture or a grid
Grid = tuple[int, ...]


def takes_volumes(model: nn.Module) -> bool:
    """Whether the model's first convolution is over volumes or clips (N,C,D,H,W)."""
    return isinstance(next((it for it in model.modules() if isinstance(it, _ConvNd)), None), nn.Conv3d)


class Patch(NamedTuple):
    """How a convolution cuts a picture: into patches of this size, so far apart, behind so much padding."""

    kernel: Grid
    stride: Grid
    padding: Grid

    def grids(self, size: Lengths) -> Iterator[Grid]:
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
    for module in (it for it in modules if isinstance(it, _ConvNd)):
        is_on_picture = module.in_channels <= PICTURE_CHANNELS and max(module.stride) > 1
        if is_on_picture or module.stride == module.kernel_size:
            padding: Any = (0,) * len(module.stride) if isinstance(module.padding, str) else module.padding
            found.append(Patch(module.kernel_size, module.stride, padding))
    return found


def find_patch_grids(size: Lengths, patches: Sequence[Patch]) -> Iterator[Grid]:
    """Those of all patches that are of as many dimensions as the picture."""
    return (grid for patch in patches if len(patch.stride) == len(size) for grid in patch.grids(size))


@functools.lru_cache(maxsize=64)
def find_even_grids(size: Grid) -> tuple[Grid, ...]:
    """The grids of square patches that divide the picture; in a volume the first axis may have a stride of its own."""
    *depths, height, width = size
    common = math.gcd(height, width)
    strides = [stride for stride in range(1, common + 1) if common % stride == 0]
    own = [[cells for cells in range(1, depth + 1) if depth % cells == 0] for depth in depths]
    return tuple((*first, height // stride, width // stride) for stride in strides for first in product(*own))


def may_be_merged(grid: Grid, size: Lengths, patches: Sequence[Patch]) -> bool:
    """Whether whole patches, or whole steps of a first convolution, make up the cells of this grid."""
    steps = [patch.stride for patch in patches if max(patch.stride) > 1 and len(patch.stride) == len(size)]
    cells = [length // count for length, count in zip(size, grid)][-2:]
    return not steps or any(all(cell % step == 0 for cell, step in zip(cells, stride[-2:])) for stride in steps)


@dataclass(frozen=True)
class Layout:
    """How a layer's output lies on the image: its grid, and which tokens are the grid's cells.

    `kind` is one of `options.LAYOUTS`; "tokens" are (N,T,D), "tokens first" (T,N,D). `prefix` tokens come before the
    cells, and what is left over comes after them. `order` lists the tokens of the cells, row by row, where they are in
    another order.
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
        """The layout in words, for records."""
        if self.order is not None:
            return f"{self.kind} in measured order {hashlib.sha256(str(self.order).encode()).hexdigest()[:8]}"
        return f"{self.kind}, {self.prefix} before the grid" if self.prefix else self.kind

    def to_grid(self, tensor: Tensor) -> Tensor:
        """Activations, or a gradient with respect to them, as (N,C,*grid); a view where possible."""
        return self._rows_to_grid(self.to_rows(tensor))

    def stack_to_grid(self, stack: Tensor) -> Tensor:
        """The same for k of them at once, (k,...) to (k,N,C,*grid)."""
        axis = self.image_axis
        images = stack if self.kind == "channels first" else stack.movedim(0, axis).flatten(axis, axis + 1)
        return images if images is stack else self.to_grid(images).unflatten(0, (len(stack), -1))

    def to_rows(self, tensor: Tensor) -> Tensor:
        """A layer's output with the images first; `from_rows` is the way back."""
        return tensor.movedim(self.image_axis, 0)

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.movedim(0, self.image_axis)

    def list_cells(self) -> slice | list[int]:
        """Return the tokens of the cells, as an index."""
        return slice(self.prefix, self.prefix + math.prod(self.grid)) if self.order is None else list(self.order)

    def change_grid(self, rows: Tensor, change: Change) -> None:
        """Change what lies on the grid, as (n,C,*grid), in rows (n,...)."""
        grid = self._rows_to_grid(rows)
        change(grid)
        if self.order is not None:
            rows[:, self.list_cells()] = grid.flatten(2).movedim(1, -1)

    def change_channels(self, rows: Tensor, change: Change) -> None:
        """Change the channels, as (n,C,...), in rows (n,...): those of the tokens beside the grid, too."""
        change(rows.movedim(1 if self.kind == "channels first" else -1, 1))

    def _rows_to_grid(self, rows: Tensor) -> Tensor:
        if self.kind == "channels first":
            return rows
        if self.kind != "channels last":
            rows = rows[:, self.list_cells()].unflatten(1, self.grid)
        return rows.movedim(-1, 1)


def order_question(layout: Layout | IndexLayout, shape: Lengths, size: Lengths) -> Hashable:
    """Return the key under which the order that was measured for so many tokens is remembered."""
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
    """The layout of an output of this `shape` for pictures of this `size` (H,W) or (D,H,W); None if not certain.
    `images`: how many there are, None for as many as there are rows; without a row for each there is no grid.
    `patches`: what `find_patches` says of the model, for tokens. `reshape`: one of `options.LAYOUTS`, or the grid that
    the last of the tokens form. `image_axes`: along which of the first two axes the images may lie, for tokens;
    `axes.Axes` asks the model. Channels first is assumed, unless only channels last has the picture's aspect or the
    module works on channels last. Tokens (N,T,D) form a grid if there is but one for them. They may come first,
    (T,N,D), where (N,T,D) cannot be meant."""
    if len(shape) == 3:
        axes = [axis for axis in image_axes if images in (None, shape[axis])]
        if isinstance(reshape, tuple):
            for axis in axes if len(reshape) == len(size) else ():
                prefix = shape[1 - axis] - math.prod(reshape)
                if 0 <= prefix <= MOST_NAMED_PREFIX:
                    known = [it.grid for it in candidates(shape[1 - axis], find_patch_grids(size, patches))]
                    return Layout(reshape, TOKENS[axis], prefix) if reshape in known or not known else None
            return None
        axes = [axis for axis in axes if reshape in (None, TOKENS[axis]) and (axis == 0 or images is not None)]
        return _row_layout(shape, size, module if reshape is None else None, axes, patches)
    fits = len(shape) == len(size) + 2 and images in (None, shape[0])
    if isinstance(reshape, tuple) or not fits or (reshape or "").startswith("tokens"):
        return None
    first, last = tuple(shape[2:]), tuple(shape[1:-1])
    kind = reshape or _kind_of_map(shape, size, module)
    grid = last if kind == "channels last" else first
    return Layout(grid, kind) if kind and max(grid) > 1 else None


def _kind_of_map(shape: Lengths, size: Lengths, module: nn.Module | None) -> str | None:
    fits_first, fits_last = _has_aspect(shape[2:], size), _has_aspect(shape[1:-1], size)
    axis = None if module is None else _channel_axis(module, shape)
    if axis == 1:
        return "channels first"
    if axis == -1:  # windows of a partition lie in the place of rows, and have no aspect
        return "channels last" if fits_last else None
    if _gives_matrices(module) or (
        fits_first == fits_last and module is not None and _has_channels_last(module, shape)
    ):
        return None
    # Behind convolutions, or with a part that works on that many channels, strides down and across may differ.
    if fits_first != fits_last or isinstance(module, BEHIND_CONVOLUTIONS) or shape[1] in _list_channels(module):
        return "channels first" if fits_first or not fits_last else "channels last"
    if not fits_first:
        return None
    first, last = (_distortion(grid, size) for grid in (shape[2:], shape[1:-1]))  # the squarer cells are the grid's
    is_unclear = first == last and module is not None
    return None if is_unclear else "channels first" if first <= last else "channels last"


def _gives_matrices(module: nn.Module | None) -> bool:
    """Whether its rows are shares of a whole, as those of attention are: of a square picture these have the aspect."""
    return isinstance(module, nn.Softmax) and module.dim in (-1, 3)


def _channel_axis(module: nn.Module, shape: Lengths) -> int | None:
    if isinstance(module, CHANNELS_FIRST):
        return 1
    features = None  # how many it gives, of the kinds that usually have them last
    if isinstance(module, nn.Linear):
        features = module.out_features
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1:
        features = module.normalized_shape[0]
    if features is None or features not in (shape[1], shape[-1]):
        return None
    if features == shape[1] == shape[-1]:
        return -1 if type(module) in CHANNELS_LAST else _try_axes(module, features, len(shape))
    return -1 if features == shape[-1] else 1


def _try_axes(module: nn.Module, features: int, rank: int) -> int | None:
    """Where a kind of LayerNorm or Linear has its features, which may be channels first: it takes no other length there."""
    given = module.in_features if isinstance(module, nn.Linear) else features
    some = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
    sides, taken = [max(given, features) + 1, *[1] * (rank - 3)], []
    for axis, shape in ((1, (1, given, *sides)), (-1, (1, *sides, given))):
        with torch.no_grad(), contextlib.suppress(Exception):  # whatever a module raises
            module.forward(torch.zeros(shape, dtype=some.dtype, device=some.device))  # itself, without hooks
            taken.append(axis)
    return taken[0] if len(taken) == 1 else None


def _has_channels_last(module: nn.Module, shape: Lengths) -> bool:
    return any(_channel_axis(part, shape) == -1 for part in module.modules())


def _list_channels(module: nn.Module | None) -> list[Any]:
    parts = [part for part in (() if module is None else module.modules()) if isinstance(part, CHANNELS_FIRST)]
    return [getattr(part, name, None) for part in parts for name in ("out_channels", "num_features", "num_channels")]


def _has_aspect(grid: Lengths, size: Lengths) -> bool:
    """Whether one stride, rounded up or down, makes this grid; the first axis of a volume may have one of its own."""
    if any(cells > length for cells, length in zip(grid[:-2], size[:-2])):
        return False
    sides = list(zip(grid[-2:], size[-2:]))  # of one cell there may be less than a stride
    most = min(it / (cells - 1) if cells > 1 else math.inf for cells, it in sides)
    return max(it / (cells + 1) for cells, it in sides) < most


def _distortion(grid: Lengths, size: Lengths) -> float:
    height, width = (length / cells for cells, length in zip(grid[-2:], size[-2:]))
    return max(height / width, width / height)


def find_rivals(shape: Lengths, module: nn.Module, size: Lengths, patches: Sequence[Patch] = ()) -> list[Layout]:
    """The layouts that nothing tells apart, none where there are not several: of tokens, the grids of as many cells."""
    if len(shape) == 3:
        found = _token_layouts(shape[1], size, patches)
        return found if len(found) > 1 else []
    grids = {"channels first": tuple(shape[2:]), "channels last": tuple(shape[1:-1])}
    if len(shape) != len(size) + 2 or _gives_matrices(module) or _has_channels_last(module, shape):
        return []
    are_maps = all(_has_aspect(grid, size) for grid in grids.values())
    return [Layout(grid, kind) for kind, grid in grids.items() if are_maps and max(grid) > 1]


def is_guess(layout: Layout, module: nn.Module, shape: Lengths, size: Lengths) -> bool:
    """Whether a count or an aspect alone says how this lies on the picture, and neither convolutions nor what works on
    it. Tokens may be in any order, and maps of another aspect, or of a stride that is no whole number, may be no
    maps."""
    if layout.kind == "channels last":
        return not _has_channels_last(module, shape)
    if layout.kind != "channels first" or not _has_aspect(layout.grid, size):
        return True
    if isinstance(module, BEHIND_CONVOLUTIONS) or any(isinstance(part, CHANNELS_FIRST) for part in module.modules()):
        return False
    for cells, length in zip(layout.grid, size):
        strides = (max(1, length // cells), -(-length // cells))
        if not any(cells in (length // stride, -(-length // stride)) for stride in strides):
            return True
    return False


def _row_layout(
    shape: Lengths, size: Lengths, module: nn.Module | None, axes: Lengths, patches: Sequence[Patch]
) -> Layout | None:
    """Of three axes, with the images along one of these: tokens, unless the middle one is that of channels."""
    for axis in (it for it in IMAGE_AXES if it in axes):
        layouts = _token_layouts(shape[1 - axis], size, patches)
        if len(layouts) == 1 and axis == 1:
            return replace(layouts[0], kind=TOKENS[1])
        if len(layouts) == 1:  # what is the patches' is surer than what divides
            cut = list(find_patch_grids(size, patches))
            grids = cut if layouts[0].grid in cut else find_even_grids(tuple(size))
            channels = None if module is None else _channel_axis(module, shape)
            if channels is None and module is not None and not _has_channels_last(module, shape):
                # It may as well be a map (N,C,h,w) whose cells, on one of these grids, were put in a row.
                channels = 1 if any(math.prod(grid) == shape[2] for grid in grids) else None
            return None if channels == 1 else layouts[0]
    return None


def _token_layouts(tokens: int, size: Lengths, patches: Sequence[Patch]) -> list[Layout]:
    """The grids that leave a few tokens over: of the model's patches, or else of some that divide the picture."""
    found = candidates(tokens, find_patch_grids(size, patches))
    if found:
        return found
    most = MOST_GUESSED_PREFIX if patches else MOST_PREFIX_TOKENS
    grids = (grid for grid in find_even_grids(tuple(size)) if may_be_merged(grid, size, patches))
    return [it for it in candidates(tokens, grids) if it.prefix <= most]


def candidates(tokens: int, grids: Iterable[Grid]) -> list[Layout]:
    """The layouts of so many tokens on one of these grids, each once."""
    prefixes = {grid: tokens - math.prod(grid) for grid in grids if max(grid) > 1}
    return [Layout(grid, "tokens", prefix) for grid, prefix in prefixes.items() if 0 <= prefix <= MOST_PREFIX_TOKENS]


Shapes = dict[nn.Module, list[tuple[int, ...]]]  # of each tensor that a module gives


def one_image(batch: Batch, index: int = 0) -> Batch:
    """Return one image alone, and what belongs to it."""

    def take(tensor: Tensor) -> Tensor:
        return (tensor[index : index + 1] if _is_of_images(tensor, batch) else tensor).clone()

    return batch.copy(take).take(1, index)


class Axes:
    """What the axes of a model's layers' outputs are, for a batch; asked only where that is not certain, and once."""

    def __init__(
        self, model: nn.Module, batch: Batch, patches: Sequence[Patch] = (), facts: Facts | None = None
    ) -> None:
        self._model, self._batch, self._patches = model, batch, patches
        self._facts = facts or Facts(model)

    @functools.cached_property
    def text_lengths(self) -> list[int]:
        """The lengths of the texts in the batch: numbers in a row, or vectors in a row where they are embedded already."""
        if len(self._batch.args) == 1 and not self._batch.kwargs:  # the images alone
            return []
        given = tensors((self._batch.args, self._batch.kwargs))
        found = [tensor for tensor in given if _is_of_images(tensor, self._batch)]
        words = [it for it in found if it.ndim == 2 and not it.is_floating_point() and it.dtype != torch.bool]
        vectors = [it for it in found if it.ndim == 3 and it.is_floating_point()]
        return sorted({it.shape[1] for it in words + vectors})

    def find_layout(
        self, shape: Sequence[int], module: nn.Module, reshape: str | tuple[int, ...] | None = None
    ) -> Layout | None:
        """As `find_layout`, of what a module gave for the batch; None, too, where it holds text."""
        size, images = self._batch.size, self._batch.images
        axes = IMAGE_AXES if isinstance(reshape, str) else self.image_axes(shape, module)
        found = find_layout(shape, size, module, images, patches=self._patches, reshape=reshape, image_axes=axes)
        return None if found is not None and reshape is None and self.holds_text(shape, module) else found

    def image_axes(self, shape: Sequence[int], module: nn.Module) -> Sequence[int]:
        """Along which of the first two axes of three the images may lie; none where the rows are not the images. There
        may be as many tokens as images, and windows that were folded into rows may have as many tokens each."""
        shape, images = tuple(shape), self._batch.images
        if len(shape) != 3 or images == 1 or shape[1] != images or shape[0] % images:
            return IMAGE_AXES

        def ask() -> Sequence[int]:
            alone = self._alone.get(module, [])
            return [axis for axis in IMAGE_AXES if (*shape[:axis], 1, *shape[axis + 1 :]) in alone]

        found: Sequence[int] = self._remember(module, ("images", shape), ask)
        return found

    def holds_text(self, shape: Sequence[int], module: nn.Module) -> bool:
        """Whether an output of this shape is of the text beside the pictures, or of both in one row."""
        shape = tuple(shape)
        if not self.text_lengths or max(shape[1:], default=0) < self.text_lengths[0]:
            return False
        return bool(self._remember(module, ("text", shape, *self.text_lengths), lambda: self._ask_text(shape, module)))

    def prepare(self) -> None:
        """Ask now, for all layers: for whoever is going to look at them while the model runs."""
        if self._batch.images > 1:
            _ = self._alone
        if self.text_lengths:
            _ = self._with_other_texts

    @functools.cached_property
    def plain(self) -> Shapes:
        return self._ask(self._batch.copy())

    def _ask_text(self, shape: tuple[int, ...], module: nn.Module) -> bool:
        for other in self._with_other_texts:
            if module not in other:  # the model takes no other length: the number of tokens has to tell
                left = [shape[1] - length for length in self.text_lengths]
                grids = list(find_patch_grids(self._batch.size, self._patches))
                return any(rest == 0 or (rest > 0 and candidates(rest, grids)) for rest in left)
            if shape not in other[module]:
                return True
        return False

    @functools.cached_property
    def _alone(self) -> Shapes:
        return self._ask(one_image(self._batch))

    @functools.cached_property
    def _with_other_texts(self) -> list[Shapes]:
        """For each length of a text: with one word less, or with the last one twice."""
        found = []
        for length in self.text_lengths:
            shorter = {} if length == 1 else self._ask_with_text(length, lambda tensor: tensor[:, :-1])
            found.append(shorter or self._ask_with_text(length, lambda tensor: torch.cat([tensor, tensor[:, -1:]], 1)))
        return found

    def _ask_with_text(self, length: int, change: Callable[[Tensor], Tensor]) -> Shapes:

        def change_texts(tensor: Tensor) -> Tensor:
            is_along = 2 <= tensor.ndim <= 3 and tensor.shape[1] == length and _is_of_images(tensor, self._batch)
            return (change(tensor) if is_along else tensor).clone()

        return self._ask(self._batch.copy(change_texts))

    def _ask(self, batch: Batch) -> Shapes:
        """The shapes of what each layer gives for another batch; nothing if the model does not take it."""
        found: Shapes = {}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if shapes := [tuple(tensor.shape) for tensor in tensors(output) if tensor.is_floating_point()]:
                found.setdefault(module, shapes)

        try:
            with preserve_state(self._model) as modules, recording_off(), Hooks() as hooks:
                for module in modules:
                    if not isinstance(module, torch.jit.ScriptModule):
                        hooks.after_forward(module, look)
                batch.run(self._model)
        except Exception:  # whatever a model raises for a batch of another form than it was given
            return {}
        return found

    def _remember(self, module: nn.Module, question: Any, ask: Callable[[], Any]) -> Any:
        return self._facts.remember((*question, id(module), self._batch.images, self._batch.size), ask)


def _is_of_images(tensor: Tensor, batch: Batch) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch.images


Function = Callable[[Tensor], Tensor]
Reshape = str | tuple[int, ...] | Function | None


@dataclass(frozen=True, eq=False)
class IndexLayout:
    """What a function gives in place of a `Layout`: for each cell, where in the layer's output its value comes from.
    `indices`: (N,C,*grid), into the output with the images first, flattened. `folds`: rows of the output for each
    image."""

    indices: Tensor
    image_axis: int
    folds: int
    kind: str = "picked"

    @property
    def name(self) -> str:
        """The layout in words, for records."""
        return self.kind

    def to_grid(self, tensor: Tensor) -> Tensor:
        return self.to_rows(tensor).flatten()[self.indices]

    def stack_to_grid(self, stack: Tensor) -> Tensor:
        return stack.movedim(self.image_axis + 1, 1).flatten(1)[:, self.indices]

    def to_rows(self, tensor: Tensor) -> Tensor:
        """An image's rows stay together."""
        rows = tensor.movedim(self.image_axis, 0)
        return rows if self.folds == 1 else rows.unflatten(0, (-1, self.folds))

    def from_rows(self, rows: Tensor) -> Tensor:
        return (rows if self.folds == 1 else rows.flatten(0, 1)).movedim(0, self.image_axis)

    def change_grid(self, rows: Tensor, change: Change) -> None:
        """What was picked is changed, and put back where it came from; what the function leaves out stays as it is."""
        values = rows.view(-1, rows[: len(self.indices)].numel())
        grid = values[:, self.indices].flatten(0, 1)
        change(grid)
        values[:, self.indices.flatten()] = grid.reshape(len(values), -1)

    def change_channels(self, rows: Tensor, change: Change) -> None:
        self.change_grid(rows, change)


def to_reshape(value: Any) -> Reshape:
    """A grid as a tuple, a layout's name, a function, or None. Raises `LayerError` for anything else."""
    if value is None or callable(value):
        return value
    if isinstance(value, str) and value.replace("-", " ") in LAYOUTS:
        return value.replace("-", " ")
    if isinstance(value, (tuple, list)) and len(value) in (2, 3):
        lengths = [it for it in value if isinstance(it, int) and not isinstance(it, bool) and it > 0]
        if len(lengths) == len(value) and max(lengths) > 1:
            return tuple(lengths)
    raise LayerError(
        f"reshape is {shorten(value)}, expected the token grid (h, w) or (d, h, w), one of {join_names(LAYOUTS)}, or a "
        "function from the layer's tensor to (N, C, h, w)."
    )


def pick(function: Function, layer: str, activations: Tensor, images: int, rank: int) -> IndexLayout:
    """What a function picks of a layer's activations, for so many images on a grid of this rank. It is shown numbers in
    place of the values, and what comes back tells where each one came from. Raises `LayerError` where it fails, gives
    another shape, computes, takes a value twice, or mixes images."""
    shape, count = activations.shape, activations.numel()
    kind = torch.float32 if activations.device.type == "mps" else torch.float64  # exact for so many numbers
    what = f"The reshape function, called with the tensor {tuple(shape)} of layer '{layer}',"
    numbers = torch.arange(1, count + 1, dtype=kind, device=activations.device).reshape(shape)
    found = _call(function, numbers, what)
    if found.ndim != rank + 2 or len(found) != images or max(found.shape[2:]) < 2:
        wanted = ", ".join([str(images), "C", *"dhw"[-rank:]])
        raise LayerError(f"{what} returned {tuple(found.shape)}, expected ({wanted}).")
    indices = found.to(torch.int64) - 1
    is_pick = bool((found == found.round()).all()) and int(indices.min()) >= 0 and int(indices.max()) < count
    if is_pick:
        # Numbers alone do not tell: of positive ones a ReLU changes none, and the largest may be where it was.
        others = torch.randn(count, dtype=kind, device="cpu", generator=torch.Generator("cpu").manual_seed(0)).to(
            numbers
        )
        again = _call(function, others.reshape(shape), what)
        is_pick = again.shape == found.shape and torch.equal(again, others[indices].to(again.dtype))
    if not is_pick:
        raise LayerError(
            f"{what} returned values that are not in its input. It is also used for gradients, so it may only pick and move "
            "values (slicing, reshape, permute)."
        )
    if len(indices.unique()) < indices.numel():
        raise LayerError(f"{what} used some values more than once: it may only pick and move values.")
    axis, folds = _image_axis(indices, shape, images, what)
    before = torch.arange(count, dtype=torch.int64, device=indices.device).reshape(shape).movedim(axis, 0).flatten()
    after = torch.empty_like(before)
    after[before] = torch.arange(count, dtype=torch.int64, device=indices.device)
    return IndexLayout(after[indices], axis, folds)


def _call(function: Function, tensor: Tensor, what: str) -> Tensor:
    try:
        with torch.no_grad():
            found = function(tensor.clone())
    except Exception as error:  # whatever somebody's function raises
        raise LayerError(f"{what} raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(found, Tensor):
        raise LayerError(f"{what} returned {shorten(found)}, expected a tensor (N, C, h, w).")
    return found.to(tensor.device)


def _image_axis(indices: Tensor, shape: torch.Size, images: int, what: str) -> tuple[int, int]:
    """The axis along which the images lie, and how many rows each has: one, or several where they were folded into it."""
    coordinates = torch.unravel_index(indices, shape)
    own = torch.arange(images, dtype=torch.int64, device=indices.device).reshape(-1, *[1] * (indices.ndim - 1))
    axes = sorted(range(len(shape)), key=lambda axis: shape[axis] != images)
    for axis in axes:
        folds, rest = divmod(shape[axis], images)
        if rest == 0 and bool((coordinates[axis] // folds == own).all()):
            return axis, folds
    raise LayerError(f"{what} mixed the {images} images: the grid of each image must come from that image alone.")
