"""What a model is given: its arguments, and the pictures among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.inputs import Arguments
from gradcam.nested import map_tensors, tensors


@dataclass(frozen=True)
class Batch:
    """The model's arguments, the pictures among them, how many those are, and of which size: (H,W) or (D,H,W)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pictures: Tensor
    images: int
    size: tuple[int, ...]
    device: torch.device

    def copy(self, change: Callable[[Tensor], Tensor] = torch.Tensor.clone, pictures: Tensor | None = None) -> Batch:
        """The arguments for another run, since a model may change its own in place: copies, or what `change` gives.

        `pictures` take the place of the pictures.
        """
        changed = change(self.pictures) if pictures is None else pictures

        def new(tensor: Tensor) -> Tensor:
            return changed if tensor is self.pictures else change(tensor)

        args, kwargs = map_tensors((self.args, self.kwargs), new)
        return replace(self, args=args, kwargs=kwargs, pictures=changed)


def to_arguments(images: Any) -> Arguments:
    """What the caller gave, as arguments: a tuple's are positional, a mapping's have names, anything else is the only one.

    Raises `ImageError` for a mapping from anything but names.
    """
    # A mapping, not only a dict: Hugging Face's processors give one of their own.
    kwargs = dict(images) if isinstance(images, Mapping) else {}
    args = images if isinstance(images, tuple) else () if isinstance(images, Mapping) else (images,)
    if not all(isinstance(key, str) for key in kwargs):
        raise ImageError(f"The images are a mapping from {list(kwargs)}, expected the names of the model's arguments.")
    return args, kwargs


def to_inputs(images: Any) -> Arguments:
    """What the caller gave, pictures or not, as arguments. Raises `ImageError` where there is no tensor in it."""
    args, kwargs = to_arguments(images)
    if not any(True for _ in tensors((args, kwargs))):
        raise ImageError(f"The images are {type(images).__name__}, expected a tensor, or a tuple or dict with tensors.")
    return args, kwargs


def to_batch(images: Any) -> Batch:
    """What the caller gave, as arguments. Raises `ImageError` where there is no floating (N,C,H,W) or (N,C,D,H,W) in it."""
    args, kwargs = to_arguments(images)
    given = list(tensors((args, kwargs)))
    if any(tensor.is_nested for tensor in given):
        raise ImageError("The images are a nested tensor, expected pictures of one size in a batch (N,C,H,W).")
    first = next((tensor for tensor in given if tensor.is_floating_point() and tensor.ndim in (4, 5)), None)
    if first is None:
        what = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in given) or type(images).__name__
        if isinstance(images, (list, tuple)) and given and all(it.ndim == 3 and it.is_floating_point() for it in given):
            raise ImageError(
                f"The images are {len(given)} of {tuple(given[0].shape)} in a {type(images).__name__}, expected one tensor "
                "(N,C,H,W): torch.stack(images), or image[None] of one. A detector takes that too, with "
                'target=lambda output: torch.stack([found["scores"][0] for found in output]).'
            )
        raise ImageError(
            f"The images are {what}, expected a floating tensor (N,C,H,W) or (N,C,D,H,W), alone or in a tuple or dict: "
            "preprocess the pictures, and give a single one its batch dimension with image[None]."
        )
    if 0 in first.shape:
        raise ImageError(f"The images are {tuple(first.shape)}: there is nothing to explain in an empty tensor.")
    return Batch(args, kwargs, first, len(first), tuple(first.shape[2:]), first.device)


def caller_keeps(tensor: Tensor) -> Tensor:
    """What the model gets of a tensor of the caller's: outside inference mode, and nothing that is recorded sticks to it."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()
