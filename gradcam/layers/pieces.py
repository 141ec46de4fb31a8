"""Describe images that reach a model in several pieces, and find the cells of each piece in a layer's output.

The processor of a vision-language model cuts an image into tiles, or into rows of patches. A *piece* is a tile, or an
image that is not cut. A *view* of an image is one piece, or several tiles that form a grid. Many processors add a
thumbnail of the whole image, which is a second view. The maps of an image's views are added, like the levels of a
feature pyramid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from gradcam.errors import ImageError, LayerError
from gradcam.hooks.containers import Window
from gradcam.layers.layout import has_aspect
from gradcam.layers.token_layout import MAX_PREFIX_TOKENS

WHOLE: Window = (0, 0, 1, 1)
Size = tuple[int, int]
Numbers = NDArray[np.int64]  # The token numbers of the cells (h,w).
NumberedView = tuple[Numbers, Window]


@dataclass(frozen=True)
class View:
    """A view of an image: the numbers of its pieces, row by row, and the part of the view that the image covers.

    `window` is (top, left, height, width), as shares of the view's height and width. The rest of the view is padding.
    """

    pieces: tuple[tuple[int, ...], ...]
    window: Window = WHOLE


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The layout of one view of each image in a layer's output: `numbers` (N,h,w) are the cells' token numbers.

    The numbers count through all axes of the output except the channel axis. If a view of an image is smaller than the
    grid, the remaining cells have number -1, and are zero on the grid. `windows` are the parts of the grid that the
    images cover, in cells.
    """

    numbers: Tensor
    channel_axis: int
    windows: tuple[Window, ...]
    image_axis = 0
    kind = name = "pieces"  # `name` is the layout in words, for records.

    @property
    def grid(self) -> Size:
        return int(self.numbers.shape[1]), int(self.numbers.shape[2])

    def to_grid(self, tensor: Tensor) -> Tensor:
        """Return activations, or their gradient, as (N,C,h,w)."""
        return self.stack_to_grid(tensor[None])[0]

    def stack_to_grid(self, stack: Tensor) -> Tensor:
        """Return k stacked tensors (k,...) as (k,N,C,h,w)."""
        axis = self.channel_axis + 1 if self.channel_axis >= 0 else -1
        tokens = stack.movedim(axis, -1).flatten(1, -2)
        cells = tokens[:, self.numbers.clamp(min=0)].masked_fill((self.numbers < 0)[..., None], 0)
        return cells.movedim(-1, 2)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces in which images reach a model, read from the output of the model's processor.

    `grids` are the pieces' patch grids. `views` are the views of each image, and `samples` is the number of the sample
    (the prompt) to which each image belongs. `sizes` are the sizes of the images' heatmaps. In the text model, `merge` x
    `merge` patches form one token. If `has_blocks` is True, patches of one token are neighbours in the order of patches.
    `text_modules` are names of modules that process text tokens, and `placeholders` (S,L) marks the image's tokens
    among them.
    """

    grids: Sequence[Size]
    views: Sequence[Sequence[View]]
    samples: Sequence[int]
    sizes: Sequence[Size]
    merge: int = 1
    has_blocks: bool = False
    text_modules: Sequence[str] = ()
    placeholders: Tensor | None = None
    is_class_last: ClassVar[bool] = False  # If True, the class token follows the patches, instead of preceding them.

    def find_layouts(self, layer: str, tensor: Tensor) -> list[TokenLayout]:
        """Return the layout of each view in a layer's output. Raise `LayerError` if the output has no such cells."""
        axis, shape = -1, tuple(tensor.shape)
        if any(layer == name or layer.startswith((f"{name}.", f"{name}:")) for name in self.text_modules):
            views = self._number_text(layer, shape)
        else:
            if len(shape) == 4 and (self._is_map(shape[2:]) or not self._is_map(shape[1:3])):
                axis, shape = 1, (shape[0], *shape[2:], shape[1])
            numbers = self.number_pieces(layer, shape)
            views = [[(_join(numbers, view), view.window) for view in row] for row in self.views]
        return [_to_layout(views, k, axis, tensor.device) for k in range(max(map(len, views)))]

    def number_pieces(self, layer: str, shape: Sequence[int]) -> list[Numbers]:
        """Return the token numbers of each piece's cells in an output (...,C) of the vision tower or the projector."""
        if len(shape) == 4 and shape[0] == len(self.grids):
            cells = np.arange(math.prod(shape[:3])).reshape(shape[:3])
            # Smaller images lie in the upper left corner, and the rest is padding.
            shares = np.array(self.grids) / np.max(self.grids, axis=0)
            ends = np.ceil(shares * shape[1:3] - 1e-6).astype(int)
            return [row[:height, :width] for row, (height, width) in zip(cells, ends)]
        tokens = shape[-2] if len(shape) in (2, 3) else 0
        for factor in (1, self.merge):
            grids = [(height // factor, width // factor) for height, width in self.grids]
            counts = [height * width for height, width in grids]
            if len(shape) == 3 and shape[0] == len(grids) and 0 <= tokens - max(counts) <= MAX_PREFIX_TOKENS:
                prefix = 0 if self.is_class_last else tokens - max(counts)
                starts = [number * tokens + prefix for number in range(len(grids))]
            elif math.prod(shape[:-1]) == sum(counts):
                starts = [sum(counts[:number]) for number in range(len(counts))]
            else:
                continue
            ranks = [self.rank_cells(layer, grid, factor) for grid in grids]
            return [start + rank for start, rank in zip(starts, ranks)]
        raise self._make_error(layer, shape)

    def rank_cells(self, layer: str, grid: Size, factor: int) -> Numbers:
        """Return the positions of a piece's cells (h,w) in the sequence. A cell is `factor` x `factor` patches."""
        height, width = grid
        ranks = np.arange(height * width)
        if not self.has_blocks or factor > 1:
            return ranks.reshape(grid)
        blocks = ranks.reshape(height // self.merge, width // self.merge, self.merge, self.merge)
        return blocks.transpose(0, 2, 1, 3).reshape(grid)

    def number_image_tokens(self, image: int) -> list[NumberedView]:
        """Return the views of an image, with the numbers of the cells among the image's tokens in the text."""
        grids = {number: self._token_grid(number) for row in self.views[image] for number in _list_pieces(row)}
        numbers, start = {}, 0
        for number in sorted(grids):
            count = math.prod(grids[number])
            numbers[number] = np.arange(start, start + count).reshape(grids[number])
            start += count
        return [(_join(numbers, view), view.window) for view in self.views[image]]

    def count_image_tokens(self, image: int) -> int:
        """Return how many tokens of the text stand for an image."""
        return sum(math.prod(self._token_grid(number)) for view in self.views[image] for number in _list_pieces(view))

    def crop(self, windows: Sequence[Window]) -> Self:
        """Return the pieces, if each image covers only this part of its single piece, as shares of the piece's sides."""
        views, sizes = list(self.views), list(self.sizes)
        for image, window in enumerate(windows):
            (view, *more_views), (height, width) = views[image], sizes[image]
            if not more_views and view.window == WHOLE and len(_list_pieces(view)) == 1 and window != WHOLE:
                views[image] = (View(view.pieces, window),)
                sizes[image] = max(1, round(height * window[2])), max(1, round(width * window[3]))
        return replace(self, views=views, sizes=sizes)

    def check_placeholders(self, name: str) -> None:
        """Raise `ImageError` if the text `name` has another number of placeholders than the images have tokens."""
        if self.placeholders is None:
            return
        for sample, mask in enumerate(self.placeholders):
            images = [image for image, owner in enumerate(self.samples) if owner == sample]
            expected, count = sum(map(self.count_image_tokens, images)), int(mask.sum())
            if count != expected:
                problem = f"{name} has {count} image tokens, but {len(images)} image(s) of this size need {expected}"
                advice = "call the model's own processor once with text and images, and pass its output"
                raise ImageError(f"{problem}: {advice}.")

    def _token_grid(self, number: int) -> Size:
        height, width = self.grids[number]
        return height // self.merge, width // self.merge

    def _is_map(self, grid: Sequence[int]) -> bool:
        return all(has_aspect(grid, size) for size in self.grids)

    def _number_text(self, layer: str, shape: Sequence[int]) -> list[list[NumberedView]]:
        mask = self.placeholders
        if mask is None:
            problem = f"Layer '{layer}' belongs to the text model, whose tokens have no position in the image"
            raise LayerError(f"{problem}: choose a layer of the image encoder.")
        if len(shape) != 3 or shape[0] != len(mask) or shape[1] < mask.shape[1]:
            raise self._make_error(layer, shape)
        rows, columns = np.nonzero(mask.cpu().numpy())
        views: list[list[NumberedView]] = []
        used = [0] * len(mask)
        for image, sample in enumerate(self.samples):
            positions = sample * shape[1] + columns[rows == sample][used[sample] :]
            used[sample] += self.count_image_tokens(image)
            views.append([(positions[numbers], window) for numbers, window in self.number_image_tokens(image)])
        return views

    def _make_error(self, layer: str, shape: Sequence[int]) -> LayerError:
        grids = ", ".join(f"{height} x {width}" for height, width in self.grids[:3])
        problem = f"The output {tuple(shape)} of layer '{layer}' does not have one token per patch"
        expected = f"expected {grids} patches for {len(self.grids)} image(s) or tile(s)"
        return LayerError(f"{problem}: {expected}. Choose another layer.")


def _list_pieces(view: View) -> list[int]:
    return [number for row in view.pieces for number in row]


def _join(numbers: Mapping[int, Numbers] | Sequence[Numbers], view: View) -> Numbers:
    """Return the cell numbers of a view, from the cell numbers of its pieces."""
    return np.block([[numbers[number] for number in row] for row in view.pieces])


def _to_layout(views: Sequence[Sequence[NumberedView]], k: int, axis: int, device: torch.device) -> TokenLayout:
    """Return the layout of the `k`th view of each image; images with fewer views get cells with number -1."""
    empty: NumberedView = (np.empty((0, 0), np.int64), WHOLE)
    selected: list[Any] = [row[k] if k < len(row) else empty for row in views]
    height, width = (max(sides) for sides in zip(*(numbers.shape for numbers, _ in selected)))
    padded, windows = np.full((len(selected), height, width), -1), []
    for target, (numbers, (top, left, rows, columns)) in zip(padded, selected):
        h, w = numbers.shape
        target[:h, :w] = numbers
        windows.append((top * h, left * w, rows * h, columns * w))
    return TokenLayout(torch.from_numpy(padded).to(device), axis, tuple(windows))
