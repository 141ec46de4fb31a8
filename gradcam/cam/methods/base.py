"""What a method is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from gradcam.cam.methods.papers import Paper
from gradcam.errors import GradcamError, join_names

ROUNDING = 64.0  # a sum of no more than so many units in the last place of its terms is nothing but rounding

# From activations (N,C,...) and weights, (N,K,C) for the channels or (N,K,C,...) for their places, to maps (N,K,...).
Join = Callable[[Tensor, Tensor], Tensor]


def add_up(activations: Tensor, weights: Tensor) -> Tensor:
    """The weighted channels' sum."""
    if weights.ndim == 3:
        return (weights @ activations.flatten(2)).unflatten(2, activations.shape[2:])
    return (activations[:, None] * weights).sum(2)


# No torch is imported here: the shell reads its choices from the table before there is anything to compute.


Needs = Literal["activations", "gradients", "curvatures"]
ACTIVATIONS: tuple[Needs, ...] = ("activations",)
GRADIENTS: tuple[Needs, ...] = ("activations", "gradients")
CURVATURES: tuple[Needs, ...] = ("activations", "gradients", "curvatures")


@dataclass(frozen=True)
class Method:
    """One way to make a map.

    `name`, `summary`: what it is called, and what it does, in one line. `source`: where it is from. `cost`: forward
    passes, in words. `home`: its function, as "module:name" below `gradcam`.
    `needs`: what the function takes, of which `activations` are (N,C,...), `gradients` and `curvatures` (H A, the
    second derivatives times the activations) (N,K,C,...), on a grid of any rank, float32 or float64. It gives maps
    (N,K,...), or (N,...) if it takes activations only and is of no class. A method that needs none of them runs the
    model again: its function takes what was recorded, the layer's site and the effort, and gives maps (N,K,...), settled
    by `rounding` where it is no method of attention.
    `place`: where its maps lie, at a "layer", on the "input", or in all blocks' "attention"; a function on the input takes
    no site, one of attention takes the census of it instead.
    `is_signed`: whether its negative values are evidence against the class. `assumes_positive`: whether it takes activations
    for strengths of features, so that it needs a layer without negative ones. `score`: a key of `scores.METHOD_SCORES`, if
    it explains another number than the one that was asked for. `options`: what can be changed with `using`, and to what it
    is set.
    """

    name: str
    summary: str
    source: Paper = field(repr=False)
    cost: str = field(repr=False)
    home: str = field(repr=False)
    needs: tuple[Needs, ...] = field(repr=False)
    is_signed: bool = field(default=False, repr=False)
    assumes_positive: bool = field(default=False, repr=False)
    score: str | None = field(default=None, repr=False)
    place: Literal["layer", "input", "attention"] = field(default="layer", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    channels: Literal["added", "component", ""] = field(default="", repr=False)
    join: str | None = field(default=None, repr=False)

    @property
    def paper(self) -> str:
        """Where it is from, in one line."""
        return str(self.source)

    @property
    def compute(self) -> Callable[..., Any]:
        """The function, imported when it is first asked for, with its options."""
        options = dict(self.options) if self.join is None else {**self.options, "join": _load(self.join)}
        function = _load(self.home)
        return functools.partial(function, **options) if options else function

    def using(self, **options: Any) -> Method:
        """The method with other options, to be passed where a name is: `METHODS["rise"].using(masks=2000)`.

        Raises `GradcamError` for an option that it does not have.
        """
        for name in options:
            if name not in self.options:
                known = join_names(self.options) if self.options else "none"
                raise GradcamError(f"{self.name} has no option {name!r}; its options are: {known}.")
        return replace(self, options={**self.options, **options})

    def smoothed(self) -> Method:
        """The method with eigen-smoothing: the first principal component of the weighted channels in place of their sum.

        A method that is a component already stays what it is. Raises `GradcamError` for one that adds no channels up.
        """
        if self.channels == "component":
            return self
        if self.channels != "added":
            raise GradcamError(f"{self.name} adds no channels up, so that there is nothing to take a component of.")
        return replace(self, join="cam.methods.one_pass:weighted_component")


def _load(home: str) -> Callable[..., Any]:
    module, _, name = home.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"gradcam.{module}"), name)
    return function
