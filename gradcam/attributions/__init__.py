"""Attributions in input space: how much each value of the picture itself, not of a layer, matters to a score.

attribution = gradcam.attributions.integrated_gradients(model, images, target=281)
picture = gradcam.attributions.draw_attribution(attribution.values[0, 0])
"""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradcam.errors import GradcamError, join_names, nearest
from gradcam.methods import papers
from gradcam.methods.papers import Paper

if TYPE_CHECKING:
    from gradcam.attributions.attribution import Attribution as Attribution
    from gradcam.attributions.drawing import draw_attribution as draw_attribution
    from gradcam.attributions.guided import guided_backpropagation as guided_backpropagation
    from gradcam.attributions.guided import guided_gradcam as guided_gradcam
    from gradcam.attributions.integration import integrated_gradients as integrated_gradients
    from gradcam.attributions.sensitivity import input_gradients as input_gradients
    from gradcam.attributions.smoothing import smoothgrad as smoothgrad

_HOMES = {
    "Attribution": "attribution",
    "draw_attribution": "drawing",
    "guided_backpropagation": "guided",
    "guided_gradcam": "guided",
    "input_gradients": "sensitivity",
    "integrated_gradients": "integration",
    "smoothgrad": "smoothing",
}

__all__ = ["ATTRIBUTIONS", "AttributionMethod", "find_attribution", *_HOMES]  # noqa: PLE0604  (names, all of them strings)


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
        function: Callable[..., Attribution] = __getattr__(self.function_name)
        return function


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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradcam.attributions' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"gradcam.attributions.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
