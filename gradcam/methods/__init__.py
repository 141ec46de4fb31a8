"""The table of class activation mapping methods: pure functions from activations and gradients to maps."""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradcam.errors import GradcamError, join_names, nearest
from gradcam.methods.gradient_weighted import gradcam

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["METHODS", "Method", "find_method"]


@dataclass(frozen=True)
class Method:
    """One way to make a map: its name, what it does in one line, where it is from, and the function.

    The function takes activations (N,C,...) and gradients (N,K,C,...) on a grid of any rank, float32 or float64, and
    gives maps (N,K,...) of which only the positive part will be kept.
    """

    name: str
    summary: str
    paper: str
    compute: Callable[[Tensor, Tensor], Tensor] = field(repr=False)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="gradcam",
            summary="channels weighted by their mean gradient",
            paper="Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based "
            "Localization, ICCV 2017",
            compute=gradcam,
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of that name. Raises `GradcamError` for an unknown one, and offers the nearest."""
    if not isinstance(name, str) or name not in METHODS:
        offers = (nearest(name, METHODS) if isinstance(name, str) else []) or list(METHODS)
        raise GradcamError(f"There is no method {name!r}. Nearest: {join_names(offers)}.")
    return METHODS[name]
