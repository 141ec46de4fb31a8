"""How a layer's output lies on the picture, as somebody says: a grid, a layout's name, or a function that picks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import LayerError, join_names, shorten
from gradcam.layers.layout import Change
from gradcam.options import LAYOUTS

Function = Callable[[Tensor], Tensor]
Reshape = str | tuple[int, ...] | Function | None


@dataclass(frozen=True)
class IndexLayout:
    """What a function gives in place of a `Layout`: for each cell, where in the layer's output its value comes from.
    `indices`: (N,C,*grid), into the output with the images first, flattened. `folds`: rows of the output for each
    image."""

    indices: Tensor
    image_axis: int
    folds: int
    kind: str = "picked"

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
        f"reshape is {shorten(value)}, expected the grid of the tokens (h, w) or (d, h, w), one of {join_names(LAYOUTS)}, "
        "or a function from the layer's tensor to (N, C, h, w)."
    )


def pick(function: Function, layer: str, activations: Tensor, images: int, rank: int) -> IndexLayout:
    """What a function picks of a layer's activations, for so many images on a grid of this rank. It is shown numbers in
    place of the values, and what comes back tells where each one came from. Raises `LayerError` where it fails, gives
    another shape, computes, takes a value twice, or mixes images."""
    shape, count = activations.shape, activations.numel()
    kind = torch.float32 if activations.device.type == "mps" else torch.float64  # exact for so many numbers
    what = f"The function for reshape, given the {tuple(shape)} of layer '{layer}',"
    numbers = torch.arange(1, count + 1, dtype=kind, device=activations.device).reshape(shape)
    found = _call(function, numbers, what)
    if found.ndim != rank + 2 or len(found) != images or max(found.shape[2:]) < 2:
        wanted = ", ".join([str(images), "C", *"dhw"[-rank:]])
        raise LayerError(f"{what} gives {tuple(found.shape)}, expected ({wanted}).")
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
            f"{what} gives values that are not in it: it is used for gradients as well, so that it may only pick values and "
            "move them (slicing, reshape, permute), and compute nothing."
        )
    if len(indices.unique()) < indices.numel():
        raise LayerError(f"{what} takes some values more than once: it may only pick values and move them.")
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
        raise LayerError(f"{what} raises {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(found, Tensor):
        raise LayerError(f"{what} gives {shorten(found)}, expected a tensor (N, C, h, w).")
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
    raise LayerError(f"{what} mixes images: what it gives for one of the {images} has to come from that one alone.")
