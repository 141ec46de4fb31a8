"""The table of pixel attribution methods."""

# This module must not import torch at the top. The command line lists these methods in its help, and importing torch is
# slow.

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradcam.cam.methods import papers
from gradcam.errors import GradcamError, find_similar_names, join_names

if TYPE_CHECKING:
    from gradcam.attributions.base import Attribution


@dataclass(frozen=True)
class AttributionMethod:
    """A method that attributes a score to the pixels of the image.

    Attributes
    ----------
    name : str
        The method's name.
    summary : str
        A description of the method, in one line.
    source : Paper
        The paper.
    cost : str
        The number of forward passes, in words.
    function_name : str
        The name of its function in `gradcam.attributions`.
    has_layer : bool
        True if the function takes `layer=`, as `gradcam.explain` does.
    has_progress : bool
        True if the method needs many passes. The function then takes `progress=`.

    Examples
    --------
    >>> from gradcam.attributions import ATTRIBUTIONS, AttributionMethod
    >>> method: AttributionMethod = ATTRIBUTIONS["smoothgrad"]
    >>> method.function.__name__, method.has_layer
    ('smoothgrad', False)
    >>> method.paper
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
        """Return the paper as one line of text."""
        return str(self.source)

    @property
    def function(self) -> Callable[..., Attribution]:
        """Return the method's function.

        The function takes a model, images and `target=`. If `has_layer` is True, it also takes `layer=` and `reshape=`.
        """
        return getattr(importlib.import_module("gradcam.attributions"), self.function_name)


# fmt: off
ATTRIBUTIONS: dict[str, AttributionMethod] = {
    method.name: method
    for method in (
        AttributionMethod("input-gradients", "saliency map: gradient of the score at the image",
            papers.SALIENCY, "1, plus a backward pass", "input_gradients"),
        AttributionMethod("guided-backprop", "gradient, with only positive values passed back at ReLUs",
            papers.GUIDED_BACKPROPAGATION, "1, plus a backward pass", "guided_backpropagation"),
        AttributionMethod("guided-gradcam", "guided backpropagation times the Grad-CAM heatmap",
            papers.GRADCAM, "2, plus a backward pass", "guided_gradcam", has_layer=True),
        AttributionMethod("smoothgrad", "gradient averaged over noisy copies of the image",
            papers.SMOOTHGRAD, "1 + 25, plus 25 backward passes", "smoothgrad", has_progress=True),
        AttributionMethod("integrated-gradients", "gradients integrated along a path from a baseline",
            papers.INTEGRATED_GRADIENTS, "2 + 50, plus 50 backward passes", "integrated_gradients", has_progress=True),
    )
}
# fmt: on


def find_attribution(name: str) -> AttributionMethod:
    """Find the attribution method of this name.

    Parameters
    ----------
    name : str
        A key of `ATTRIBUTIONS`.

    Returns
    -------
    AttributionMethod
        The method.

    Raises
    ------
    GradcamError
        If the name is unknown. The message lists the most similar names.

    Examples
    --------
    >>> from gradcam.attributions import find_attribution
    >>> find_attribution("guided-gradcam").has_layer
    True
    """
    if not isinstance(name, str) or name not in ATTRIBUTIONS:
        suggestions = (find_similar_names(name, ATTRIBUTIONS) if isinstance(name, str) else []) or list(ATTRIBUTIONS)
        raise GradcamError(f"There is no attribution method {name!r}. Nearest: {join_names(suggestions)}.")
    return ATTRIBUTIONS[name]
