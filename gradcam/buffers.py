"""A module's buffers, kept and put back."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

Values = list[tuple[Tensor, Tensor]]  # a buffer, and a copy of it


def keep_buffers(module: nn.Module) -> Values:
    """The module's own buffers, with their values."""
    return [
        (buffer, buffer.detach().clone())
        for buffer in module._buffers.values()
        if buffer is not None and buffer.layout == torch.strided and not buffer.is_meta and not buffer.is_nested
    ]


def restore_buffers(kept: Values) -> None:
    """Write back the values of those that were changed in place, and take them out of the graph of what was written.

    A tensor that took another's place is left: it is a cache as a rule, and its module remembers elsewhere what it is for.
    """
    for buffer, copy in kept:
        if buffer.grad_fn is not None and not buffer._is_view():
            buffer.detach_()
        is_same_kind = (buffer.dtype, buffer.shape) == (copy.dtype, copy.shape)
        if is_same_kind and not _is_equal(buffer, copy):
            with contextlib.suppress(RuntimeError), torch.no_grad():  # an expanded tensor shares its memory with itself
                buffer.copy_(copy)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """By value, since the kernels of observers do not count up a tensor's version; NaN equals NaN."""
    try:
        return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    except (RuntimeError, NotImplementedError):  # kinds of numbers that PyTorch stores and cannot compare
        return True
