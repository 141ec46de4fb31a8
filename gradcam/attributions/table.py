"""The attributions that there are: what each is called, what it does, and which function computes it."""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradcam.cam.methods import papers
from gradcam.errors import GradcamError, join_names, nearest

if TYPE_CHECKING:
    from gradcam.attributions.base import Attribution


@dataclass(frozen=True)
class AttributionMethod:
    """One way to attribute a score to the picture.

    Attributes
    ----------
    name : str
        What it is called.
    summary : str
        What it does, in one line.
    source : Paper
        Where it is from.
    cost : str
        Forward passes, in words.
    function_name : str
        Of the function in this package.
    has_layer : bool
        Whether it takes a layer, as `gradcam.explain` does.
    has_progress : bool
        Whether it takes many passes, and `progress=`.

    Examples
    --------
    >>> from gradcam.attributions import ATTRIBUTIONS, AttributionMethod
    >>> found: AttributionMethod = ATTRIBUTIONS["smoothgrad"]
    >>> found.function.__name__, found.has_layer
    ('smoothgrad', False)
    >>> found.paper
    'Smilkov et al., SmoothGrad: ..., 2017'
    """

    name: str
    summary: str
    source: papers.Paper = field(repr=False)
    cost: str = field(repr=False)
    function_name: str = field(repr=False)
    has_layer: bool = False
    has_progress: bool = False

    @property
    def paper(self) -> str:
        """Where it is from, in words."""
        return str(self.source)

    @property
    def function(self) -> Callable[..., Attribution]:
        """What is called with a model and images, `target=`, with a layer `layer=` and `reshape=`. Loads torch."""
        return getattr(importlib.import_module("gradcam.attributions"), self.function_name)


# fmt: off
ATTRIBUTIONS: dict[str, AttributionMethod] = {
    method.name: method
    for method in (
        AttributionMethod("input-gradients", "the gradient of the score at the picture",
            papers.SALIENCY, "1, and the network backwards", "input_gradients"),
        AttributionMethod("guided-backprop", "the gradient, of which every ReLU lets the positive part through",
            papers.GUIDED_BACKPROPAGATION, "1, and the network backwards", "guided_backpropagation"),
        AttributionMethod("guided-gradcam", "guided backpropagation times the Grad-CAM heatmap",
            papers.GRADCAM, "2, and the network backwards", "guided_gradcam", has_layer=True),
        AttributionMethod("smoothgrad", "the gradient's mean over noisy copies of the picture",
            papers.SMOOTHGRAD, "1 and 25, those backwards as well", "smoothgrad", has_progress=True),
        AttributionMethod("integrated-gradients",
            "the gradient along the way from a baseline to the picture, times that way",
            papers.INTEGRATED_GRADIENTS, "2 and 50, those backwards as well", "integrated_gradients", has_progress=True),
    )
}
# fmt: on


def find_attribution(name: str) -> AttributionMethod:
    """Find the method of that name.

    Parameters
    ----------
    name : str
        A key of `ATTRIBUTIONS`.

    Returns
    -------
    AttributionMethod
        Its row of the table.

    Raises
    ------
    GradcamError
        For an unknown one; the message offers the nearest.

    Examples
    --------
    >>> from gradcam.attributions import find_attribution
    >>> find_attribution("guided-gradcam").has_layer
    True
    """
    if not isinstance(name, str) or name not in ATTRIBUTIONS:
        offers = (nearest(name, ATTRIBUTIONS) if isinstance(name, str) else []) or list(ATTRIBUTIONS)
        raise GradcamError(f"There is no attribution {name!r}. Nearest: {join_names(offers)}.")
    return ATTRIBUTIONS[name]
