"""Read the layout that a user's reshape function describes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradcam.errors import LayerError, shorten
from gradcam.layers.layout import Change, ReshapeFunction


@dataclass(frozen=True, eq=False)
class IndexLayout:
    """The layout that a reshape function describes: for each value on the grid, its position in the layer's output.

    `indices` (N,C,*grid) are positions in the flattened output with the images first. The output has `folds` rows per
    image.
    """

    indices: Tensor
    image_axis: int
    folds: int
    kind = name = "picked"  # `name` is the layout in words, for records.

    def to_grid(self, tensor: Tensor) -> Tensor:
        return self.to_rows(tensor).flatten()[self.indices]

    def stack_to_grid(self, stack: Tensor) -> Tensor:
        return stack.movedim(self.image_axis + 1, 1).flatten(1)[:, self.indices]

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return the output with the images first; if an image has several rows, they form the second axis."""
        rows = tensor.movedim(self.image_axis, 0)
        return rows if self.folds == 1 else rows.unflatten(0, (-1, self.folds))

    def from_rows(self, rows: Tensor) -> Tensor:
        return (rows if self.folds == 1 else rows.flatten(0, 1)).movedim(0, self.image_axis)

    def change_grid(self, rows: Tensor, change: Change) -> None:
        """Change the values on the grid in place. Values that the reshape function leaves out stay unchanged."""
        values = rows.view(-1, rows[: len(self.indices)].numel())
        grid = values[:, self.indices].flatten(0, 1)
        change(grid)
        values[:, self.indices.flatten()] = grid.reshape(len(values), -1)

    def change_channels(self, rows: Tensor, change: Change) -> None:
        self.change_grid(rows, change)


def probe_layout(function: ReshapeFunction, layer: str, activations: Tensor, images: int, rank: int) -> IndexLayout:
    """Return the layout that a reshape function describes, found by calling the function with numbered positions.

    The numbers in the function's output show where each value came from. `images` is the number of images, and `rank`
    is the number of grid axes. Raises `LayerError` if the function fails, returns another shape, computes new values,
    uses a value twice, or mixes images.
    """
    shape, count = activations.shape, activations.numel()
    # This dtype represents the numbers below exactly.
    dtype = torch.float32 if activations.device.type == "mps" else torch.float64
    subject = f"The reshape function, called with the tensor {tuple(shape)} of layer '{layer}',"
    numbers = torch.arange(1, count + 1, dtype=dtype, device=activations.device).reshape(shape)
    picked = _call(function, numbers, subject)
    if picked.ndim != rank + 2 or len(picked) != images or max(picked.shape[2:]) < 2:
        expected = ", ".join([str(images), "C", *"dhw"[-rank:]])
        raise LayerError(f"{subject} returned {tuple(picked.shape)}, expected ({expected}).")
    indices = picked.to(torch.int64) - 1
    is_pick = bool((picked == picked.round()).all()) and int(indices.min()) >= 0 and int(indices.max()) < count
    if is_pick:
        # A ReLU or a cumulative maximum leaves positive, increasing numbers unchanged. To detect such operations, the
        # function is also called with noise.
        generator = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(count, dtype=dtype, device="cpu", generator=generator).to(numbers)
        output = _call(function, noise.reshape(shape), subject)
        is_pick = output.shape == picked.shape and torch.equal(output, noise[indices].to(output.dtype))
    if not is_pick:
        reason = "A reshape function may only pick and move values, as slicing, reshape and permute do."
        raise LayerError(f"{subject} returned values that are not in its input. {reason}")
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
    """Return the image axis, and the number of rows per image on this axis: above 1 if windows are folded into it."""
    coordinates = torch.unravel_index(indices, shape)
    expected = torch.arange(images, dtype=torch.int64, device=indices.device).reshape(-1, *[1] * (indices.ndim - 1))
    axes = sorted(range(len(shape)), key=lambda axis: shape[axis] != images)
    for axis in axes:
        folds, remainder = divmod(shape[axis], images)
        if remainder == 0 and bool((coordinates[axis] // folds == expected).all()):
            return axis, folds
    raise LayerError(f"{subject} mixed the {images} images: the grid of each image must come from that image alone.")
