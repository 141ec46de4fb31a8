"""How a method's channels become one map: they are added up as a rule."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ROUNDING = 64.0  # a sum of no more than so many units in the last place of its terms is nothing but rounding

# From activations (N,C,...) and weights, (N,K,C) for the channels or (N,K,C,...) for their places, to maps (N,K,...).
Join = Callable[[Tensor, Tensor], Tensor]


def add_up(activations: Tensor, weights: Tensor) -> Tensor:
    """The weighted channels' sum."""
    if weights.ndim == 3:
        return (weights @ activations.flatten(2)).unflatten(2, activations.shape[2:])
    return (activations[:, None] * weights).sum(2)
