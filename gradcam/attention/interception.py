"""A model's attention where it is computed: the probabilities between the softmax and the values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradcam.recording import caller_autocast
from gradcam.sites import at_least_float32

SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
HOLDING = (F.multi_head_attention_forward, torch.autograd.grad)  # attentions, which the latter repeats for checkpoints
QUESTION = "has_torch_function"  # what a function of PyTorch's asks before it does anything

Meet = Callable[[tuple[int, ...]], Callable[[Tensor], Tensor] | None]


class Interception(TorchFunctionMode):
    """A context that meets each attention of a model in this thread: the fused kind, and those made with a softmax.

    `meet`: called with the shape (rows,...,queries,keys) of an attention before it is computed. The function that it gives
    is called with the probabilities, and what that returns takes their place; None leaves the attention as it is. Those
    of fused attention are computed in float32, or in more where the model does, and only if they are wanted; the output is
    that of the fused kernel up to rounding, in its precision.
    A softmax over the last of at least three dimensions is taken for an attention.
    """

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HOLDING and QUESTION in func.__code__.co_names:
            with self:  # which is not active inside of itself
                return _body(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in SOFTMAXES and result.ndim > 2 and _axis(*args, **kwargs) in (-1, result.ndim - 1):
            take = self._meet(tuple(result.shape))
            return result if take is None else take(result).clone()  # which the model may change in place
        return result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        take = self._meet((*query.shape[:-1], key.shape[-2]))
        if take is None:
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return _attend_openly(query, key, value, *args, **kwargs, take=take)


def _axis(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> int | None:
    return dim


@functools.cache
def _body(function: Any) -> Callable[..., Any]:
    """A function of PyTorch's without its question whether somebody overrides it.

    With an interception active it would hand itself over to that in place of doing its work, within which are the softmax
    and the fused attention.
    """
    names = {**function.__globals__, QUESTION: lambda _: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _attend_openly(  # noqa: PLR0917  # as they are there
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    take: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `scaled_dot_product_attention` computes, its arguments by the names they have there."""
    device = query.device.type
    autocast = None if query.dtype == torch.float64 else caller_autocast(device)
    kind = autocast or query.dtype
    with torch.autocast(device, enabled=False):
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
        if enable_gqa:  # several heads share their keys and values
            shared = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        logits = at_least_float32(query) * factor @ at_least_float32(key).transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            logits = logits + attn_mask
        probabilities = F.dropout(take(logits.softmax(-1)), dropout_p)
        return probabilities.to(kind) @ value
