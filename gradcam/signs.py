"""The signs of activations, of which some methods assume that there is but one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradcam.errors import join_names, warn
from gradcam.methods import Method

SMALL = 0.2  # of the positive values' energy: SiLU and GELU, which dip below zero, leave less to negative ones


def has_both_signs(activations: Tensor) -> bool:
    """Whether negative activations count beside positive ones: the sums of their squares are compared."""
    values = activations.detach().float()
    return bool(values.clamp(max=0).square().sum() > SMALL * values.clamp(min=0).square().sum())


def warn_of_signs(activations: Mapping[str, Tensor], methods: Sequence[Method]) -> None:
    """Say where a method that assumes activations that are not negative meets a layer, by name, of both signs."""
    names = [method.name for method in methods if method.assumes_positive and method.place == "layer"]
    layers = [layer for layer, tensor in activations.items() if names and has_both_signs(tensor)]
    if layers:
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        warn(
            f"The activations of {join_names(layers[:1])}{more} have both signs, and {', '.join(names)} "
            f"assume{'s' if len(names) == 1 else ''} none below 0: maps may be wrong. Take a layer behind a ReLU "
            "(`gradcam layers` marks others ±), or another method."
        )
