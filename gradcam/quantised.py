"""Gradients through dynamically quantised linear layers, which have none of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.hooks import Hooks
from gradcam.nested import tensors

STATIC = ("torch.ao.nn.quantized.modules", "torch.ao.nn.intrinsic.quantized.modules")  # of activations too
IN_FLOATS = (
    "8-bit integers, which have no gradient: explain the model in floating point that was quantised, or this one with "
    "method='rise', which needs none."
)


@contextlib.contextmanager
def straight_through(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Dynamically quantised linear layers among these keep their values, and get the gradient of the layer they round.

    Rounding has a derivative of zero wherever it has one, and PyTorch's quantised kernels give none; the straight-through
    estimate (Bengio et al., 2013, arXiv 1308.3432) takes the unrounded layer's instead.
    """
    quantised = sys.modules.get("torch.ao.nn.quantized.dynamic")  # not imported: then nothing is made of it either
    kinds = {kind for kind in set(map(type, modules)) if quantised is not None and issubclass(kind, quantised.Linear)}
    with Hooks() as hooks:
        for module in modules if kinds else ():
            if type(module) in kinds:
                hooks.after_forward(module, _attach_gradient)
        yield


def is_in_8_bits(values: Any) -> bool:
    """Whether a tensor among these values, or one that a module among them computes, is quantised."""
    if isinstance(values, nn.Module):
        return any(type(module).__module__.startswith(STATIC) for module in values.modules())
    return any(tensor.is_quantized for tensor in tensors(values))


def _attach_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    (inputs,) = (*args, *kwargs.values())
    if not (torch.is_grad_enabled() and inputs.requires_grad):
        return None
    # Here `weight` is a method; in every other linear layer it is a tensor, and so the type checker takes it.
    unrounded = F.linear(inputs, module.weight().dequantize().to(inputs.dtype))  # type: ignore[operator]
    return output.detach() + (unrounded - unrounded.detach())
