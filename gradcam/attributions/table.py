"""The attributions that there are: what each is called, what it does, and which function computes it."""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradcam.cam.methods import papers
from gradcam.cam.methods.papers import Paper
from gradcam.errors import GradcamError, join_names, nearest

if TYPE_CHECKING:
    from gradcam.attributions.base import Attribution


@dataclass(frozen=True)
class AttributionMethod:
    """One way to attribute a score to the picture: its name, what it does in one line, where it is from, what it costs.

    `cost`: forward passes, in words. `function_name`: of the function in this package. `has_layer`: whether that takes
    a layer, as `gradcam.explain` does. `has_progress`: whether it takes many passes, and `progress=`.
    """

    name: str
    summary: str
    source: Paper = field(repr=False)
    cost: str = field(repr=False)
    function_name: str = field(repr=False)
    has_layer: bool = False
    has_progress: bool = False

    @property
    def paper(self) -> str:
        """Where it is from, in one line."""
        return str(self.source)

    @property
    def function(self) -> Callable[..., Attribution]:
        """Called with a model and images, `target=`, and where there is a layer `layer=` and `reshape=`. Loads torch."""
        found: Callable[..., Attribution] = getattr(importlib.import_module("gradcam.attributions"), self.function_name)
        return found


ATTRIBUTIONS: dict[str, AttributionMethod] = {
    method.name: method
    for method in (
        AttributionMethod(
            name="input-gradients",
            summary="the gradient of the score at the picture",
            source=papers.SALIENCY,
            cost="1, and the network backwards",
            function_name="input_gradients",
        ),
        AttributionMethod(
            name="guided-backprop",
            summary="the gradient, of which every ReLU lets the positive part through",
            source=papers.GUIDED_BACKPROPAGATION,
            cost="1, and the network backwards",
            function_name="guided_backpropagation",
        ),
        AttributionMethod(
            name="guided-gradcam",
            summary="guided backpropagation times the Grad-CAM heatmap",
            source=papers.GRADCAM,
            cost="2, and the network backwards",
            function_name="guided_gradcam",
            has_layer=True,
        ),
        AttributionMethod(
            name="smoothgrad",
            summary="the gradient's mean over noisy copies of the picture",
            source=papers.SMOOTHGRAD,
            cost="1 and 25, those backwards as well",
            function_name="smoothgrad",
            has_progress=True,
        ),
        AttributionMethod(
            name="integrated-gradients",
            summary="the gradient along the way from a baseline to the picture, times that way",
            source=papers.INTEGRATED_GRADIENTS,
            cost="2 and 50, those backwards as well",
            function_name="integrated_gradients",
            has_progress=True,
        ),
    )
}


def find_attribution(name: str) -> AttributionMethod:
    """The method of that name. Raises `GradcamError` for an unknown one, and offers the nearest."""
    if not isinstance(name, str) or name not in ATTRIBUTIONS:
        offers = (nearest(name, ATTRIBUTIONS) if isinstance(name, str) else []) or list(ATTRIBUTIONS)
        raise GradcamError(f"There is no attribution {name!r}. Nearest: {join_names(offers)}.")
    return ATTRIBUTIONS[name]
