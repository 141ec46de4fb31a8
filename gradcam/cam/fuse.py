"""One explanation of several: layers or methods joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gradcam.cam.explain import Explanation
from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import GradcamError, join_names, shorten
from gradcam.options import accept_old_parameters

HOW = ("mean", "max")

AnyExplanation = TypeVar("AnyExplanation", bound=Explanation)


@accept_old_parameters
def fuse(
    explanations: Sequence[AnyExplanation] | Mapping[tuple[str, str], AnyExplanation], reduction: str = "mean"
) -> AnyExplanation:
    """Fuse explanations of the same images and classes into one, for example from several layers or methods.

    Each heatmap is divided by its own maximum first, so that all have equal weight.

    Parameters
    ----------
    explanations : sequence or mapping of Explanation
        At least one, or the result of `compare`. They have to be of the same images and target functions; this is not
        checked.
    reduction : str, default "mean"
        "mean" averages the heatmaps; "max" takes the value with the largest magnitude at each pixel.

    Returns
    -------
    Explanation
        The fused explanation. Its `maps` are float32 (N,K,H,W), at the input's size. `layer` and `method` join all
        names with "+". `scores`, `output` and images are those of the first explanation.

    Raises
    ------
    GradcamError
        If the list is empty, if `reduction` is unknown, or if sizes, classes or evidence differ.

    Examples
    --------
    >>> import gradcam
    >>> found = gradcam.load_classifier().compare("photo.jpg", layers=["layer3", "layer4"], methods=["gradcam"])
    >>> gradcam.fuse(found).layer
    'layer3+layer4'
    """
    found = list(explanations.values()) if isinstance(explanations, Mapping) else explanations
    if not isinstance(found, Sequence) or not found or not all(isinstance(each, Explanation) for each in found):
        raise GradcamError(
            f"The explanations are {shorten(explanations)}, expected a non-empty list, or the result of compare()."
        )
    if not isinstance(reduction, str) or reduction not in HOW:
        raise GradcamError(f"reduction is {shorten(reduction)}, expected one of {join_names(HOW)}.")
    first = found[0]
    if any(isinstance(each.heatmaps, list) for each in found):
        raise GradcamError("The images have different sizes: fuse explanations of images of one size.")
    for other in found[1:]:
        check_alike(first, other)
    heatmaps = torch.stack([each.heatmaps.to(first.heatmaps.device) for each in found])
    # The strongest is the value that is furthest from zero.
    joined = heatmaps.mean(0) if reduction == "mean" else heatmaps.gather(0, heatmaps.abs().argmax(0, keepdim=True))[0]
    signed = first.evidence == "signed"
    return replace(
        first,
        maps=joined,
        heatmaps=to_heatmaps(joined, joined.shape[2:], signed=signed),
        layer="+".join(dict.fromkeys(each.layer for each in found)),
        method="+".join(dict.fromkeys(each.method for each in found)),
    )


def check_alike(one: Explanation, other: Explanation) -> None:
    """Raises `GradcamError` where two are not of the same sizes, classes and evidence."""
    shapes = [_shapes(each.heatmaps) for each in (one, other)]
    if shapes[0] != shapes[1]:
        said = f"Heatmaps {shapes[0]} and {shapes[1]} differ in shape"
        raise GradcamError(f"{said}: explain the same images and classes.")
    if one.evidence != other.evidence:
        raise GradcamError(
            f"The explanations show {one.evidence} and {other.evidence} evidence: use the same evidence= for all."
        )
    classes = [None if each.classes is None else each.classes.tolist() for each in (one, other)]
    if classes[0] != classes[1]:
        raise GradcamError("The explanations are of different classes: pass the same target= for all.")


def _shapes(heatmaps: Any) -> object:
    return [tuple(it.shape) for it in heatmaps] if isinstance(heatmaps, list) else tuple(heatmaps.shape)
