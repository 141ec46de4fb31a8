"""Keeping the gradients of parameters small, while the backward pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.errors import GradientError, shorten
from gradcam.inspection.editing import Edit, edit_gradients


def clip_gradients(
    model: nn.Module, limit: float, *, norm: float | None = None, parameters: str | Sequence[str] = "*"
) -> Edit:
    """Keep the gradient of each parameter within `limit`, before it is added to `.grad`.

    `norm`: None clamps every value to [-limit, limit]. p, such as 2.0 or math.inf, scales a parameter's gradient where
    its p-norm is greater than `limit`, to that norm; each parameter by itself, while the backward pass runs. (To scale
    the gradients of all parameters together, call torch.nn.utils.clip_grad_norm_ after it.)
    `parameters`: names and patterns, as in `select_parameters`; those that require no gradient are passed over.
    Where gradients are accumulated, it is what each backward pass adds that is clipped, not the sum.
    NaN stays NaN, of a norm the whole gradient's; an infinite gradient has no direction, and scaled is NaN where it is
    infinite.

    Raises `GradientError` for a limit or a norm that is no positive number (a norm may be infinite), and as
    `edit_gradients` does. `Edit.remove()`, or the end of a `with`, takes it back.
    """
    if not _is_positive(limit) or math.isinf(limit):
        raise GradientError(f"The limit is {shorten(limit)}, expected a positive, finite number.")
    if norm is None:
        return edit_gradients(model, lambda gradient: _clamp(gradient, float(limit)), parameters=parameters)
    if not _is_positive(norm):
        raise GradientError(f"The norm is {shorten(norm)}, expected a positive number such as 2.0, math.inf, or None.")
    return edit_gradients(model, lambda gradient: _scale(gradient, float(limit), float(norm)), parameters=parameters)


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.floating, np.integer)) and type(value) is not bool and bool(value > 0)


def _clamp(gradient: Tensor, limit: float) -> Tensor:
    if gradient.layout == torch.sparse_coo:
        return _with_values(gradient, lambda values: _clamp(values, limit))
    if gradient.is_complex():
        return torch.view_as_complex(_clamp(torch.view_as_real(gradient), limit))
    limit = min(limit, torch.finfo(gradient.dtype).max)  # PyTorch refuses a bound that half precision cannot hold
    return gradient.clamp(-limit, limit)


def _scale(gradient: Tensor, limit: float, norm: float) -> Tensor:
    if gradient.layout == torch.sparse_coo:
        return _with_values(gradient, lambda values: _scale(values, limit, norm))
    if not gradient.numel():
        return gradient  # nothing has no greatest value
    # Squares of large values overflow in float32, and Apple's GPUs have no float64.
    wide = torch.promote_types(gradient.dtype, torch.float32 if gradient.device.type == "mps" else torch.float64)
    size = torch.linalg.vector_norm(gradient, norm, dtype=wide)
    factor = limit / size.clamp(min=limit)
    # A GPU may read the factor as the gradient's dtype first, and float16 has none as small.
    exact = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return (exact * factor).to(gradient.dtype)


def _with_values(gradient: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A sparse gradient in which what is stored went through `function`, what was stored twice added up before."""
    clone = gradient.coalesce().clone()  # PyTorch 2.11 warns when one is made from its parts
    clone._values().copy_(function(clone._values()))
    return clone
