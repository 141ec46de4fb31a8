"""Combine several explanations into one: fuse layers or methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gradcam.cam.explain import Explanation
from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import GradcamError, join_names, shorten
from gradcam.options import accept_old_parameters

REDUCTIONS = ("mean", "max")

AnyExplanation = TypeVar("AnyExplanation", bound=Explanation)


@accept_old_parameters
def fuse(
    explanations: Sequence[AnyExplanation] | Mapping[tuple[str, str], AnyExplanation], reduction: str = "mean"
) -> AnyExplanation:
    """Fuse several explanations of the same images and classes, such as those of several layers, into one explanation.

    Heatmaps are already divided by their own maximum, so all heatmaps have equal weight.

    Parameters
    ----------
    explanations : sequence or mapping of Explanation
        At least one explanation, or the result of `compare`. All explanations must be of the same images and target
        functions. This function does not check whether images and targets are the same.
    reduction : str, default "mean"
        "mean" averages the heatmaps; "max" takes the value with the largest magnitude at each pixel.

    Returns
    -------
    Explanation
        The fused explanation. The fused `maps` are float32 (N,K,H,W), at the input's size. `layer` and `method` join
        all names with "+". `scores`, `output` and the images are taken from the first explanation.

    Raises
    ------
    GradcamError
        If the list is empty, if `reduction` is unknown, or if sizes, classes or evidence differ.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> explanations = classifier.compare("photo.jpg", layers=["layer3", "layer4"], methods=["gradcam"])
    >>> gradcam.fuse(explanations).layer
    'layer3+layer4'
    """
    items = list(explanations.values()) if isinstance(explanations, Mapping) else explanations
    is_list = isinstance(items, Sequence) and bool(items)
    if not is_list or not all(isinstance(explanation, Explanation) for explanation in items):
        raise GradcamError(
            f"The explanations are {shorten(explanations)}, expected a non-empty list, or the result of compare()."
        )
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise GradcamError(f"reduction is {shorten(reduction)}, expected one of {join_names(REDUCTIONS)}.")
    first = items[0]
    if any(isinstance(explanation.heatmaps, list) for explanation in items):
        raise GradcamError("The images have different sizes: fuse explanations of images of one size.")
    for explanation in items[1:]:
        check_compatible(first, explanation)
    heatmaps = torch.stack([explanation.heatmaps.to(first.heatmaps.device) for explanation in items])
    # "max" takes the value that is furthest from zero.
    fused = heatmaps.mean(0) if reduction == "mean" else heatmaps.gather(0, heatmaps.abs().argmax(0, keepdim=True))[0]
    heatmaps = to_heatmaps(fused, fused.shape[2:], signed=first.evidence == "signed")
    layer, method = ("+".join(dict.fromkeys(getattr(item, name) for item in items)) for name in ("layer", "method"))
    return replace(first, maps=fused, heatmaps=heatmaps, layer=layer, method=method)


def check_compatible(first: Explanation, second: Explanation) -> None:
    """Raise `GradcamError` unless two explanations have the same sizes, classes and evidence."""
    shapes = [_shapes(explanation.heatmaps) for explanation in (first, second)]
    if shapes[0] != shapes[1]:
        raise GradcamError("Heatmaps {} and {} differ in shape: explain the same images and classes.".format(*shapes))
    if first.evidence != second.evidence:
        problem = f"The explanations show {first.evidence} and {second.evidence} evidence"
        raise GradcamError(f"{problem}: use the same evidence= for all.")
    classes = [None if explanation.classes is None else explanation.classes.tolist() for explanation in (first, second)]
    if classes[0] != classes[1]:
        raise GradcamError("The explanations are of different classes: pass the same target= for all.")


def _shapes(heatmaps: Any) -> object:
    return [tuple(heatmap.shape) for heatmap in heatmaps] if isinstance(heatmaps, list) else tuple(heatmaps.shape)
