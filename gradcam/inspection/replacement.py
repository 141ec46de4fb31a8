"""What takes a gradient's place: what an edit returned, once it is known to fit and to have left the old one alone."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.errors import GradientError, shorten
from gradcam.passages import GradientHook

# How PyTorch itself refuses a change in place: of a gradient that is one value seen many times, of a leaf.
REFUSALS = ("refers to a single memory location", "in-place operation")


def replace_gradient(place: str, function: GradientHook, gradient: Tensor) -> Tensor | None:
    """What `function` makes of the gradient at `place`, None where it leaves it.

    Raises `GradientError` where that has another shape, dtype, layout or device, or is no tensor, and where the gradient was
    changed in place.
    """
    before = _version(gradient)
    try:
        replacement = function(gradient)
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        raise _changed(place) from error
    if _version(gradient) != before:
        raise _changed(place)
    if replacement is None:
        return None
    if not isinstance(replacement, Tensor):
        raise GradientError(
            f"The edit at {place} returned {shorten(replacement)}, expected a tensor: {_describe(gradient)}; or None, which "
            "leaves the gradient as it is."
        )
    if _describe(replacement) != _describe(gradient):
        raise GradientError(
            f"The edit at {place} returned {_describe(replacement)}, expected what came in: {_describe(gradient)}."
        )
    return replacement


def _changed(place: str) -> GradientError:
    return GradientError(
        f"The edit at {place} changed the gradient in place, which may be that of other tensors too: return a new tensor, "
        "such as gradient * 2 in place of gradient.mul_(2)."
    )


def _version(gradient: Tensor) -> int | None:
    """How often it was changed in place, as PyTorch counts; not where it was made in inference mode."""
    return None if gradient.is_inference() else gradient._version


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
