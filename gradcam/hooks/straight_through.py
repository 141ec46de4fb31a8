"""Give dynamically quantised layers a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.hooks.hooks import Hooks


@contextlib.contextmanager
def straight_through(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give dynamically quantised linear layers the gradient of the unrounded layer; their outputs stay the same.

    The derivative of rounding is zero almost everywhere, and PyTorch's quantised kernels have no derivative. The
    straight-through estimator (Bengio et al., 2013, arXiv 1308.3432) uses the gradient of the unrounded layer instead.
    """
    dynamic = torch.ao.nn.quantized.dynamic

    def attach(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        (inputs,) = (*args, *kwargs.values())
        if not (torch.is_grad_enabled() and inputs.requires_grad):
            return None
        # In a quantised layer, `weight` is a method, but the type checker assumes a tensor.
        unrounded = F.linear(inputs, module.weight().dequantize().to(inputs.dtype))  # type: ignore[operator]
        return output.detach() + (unrounded - unrounded.detach())

    with contextlib.ExitStack() as stack:
        for module in modules:
            if isinstance(module, dynamic.Linear):
                stack.enter_context(Hooks()).after_forward(module, attach)
        yield
