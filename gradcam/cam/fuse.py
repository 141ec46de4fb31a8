"""One explanation of several: layers or methods joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gradcam.cam.explain import Explanation
from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import GradcamError, join_names, shorten

HOW = ("mean", "max")

AnyExplanation = TypeVar("AnyExplanation", bound=Explanation)


def fuse(
    explanations: Sequence[AnyExplanation] | Mapping[tuple[str, str], AnyExplanation], how: str = "mean"
) -> AnyExplanation:
    """Make one explanation of several of the same images and classes: layers or methods joined.

    Each heatmap is divided by its own maximum first, so that all count alike.

    Parameters
    ----------
    explanations : sequence or mapping of Explanation
        At least one; what `compare` gives may be passed as it is. That the images and target functions are the same is
        the caller's to see to.
    how : str, default "mean"
        "mean" averages them; "max" takes the strongest value at each pixel, whatever its sign.

    Returns
    -------
    Explanation
        Its `maps` are float32 (N,K,H,W), at the input's size; `layer` and `method` name all that went in, with "+"
        between; `scores`, `output` and pictures are the first one's.

    Raises
    ------
    GradcamError
        For none, for an unknown `how`, and where sizes, classes or evidence differ.

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
            f"The explanations are {shorten(explanations)}, expected a list of at least one, or what compare() gives."
        )
    if not isinstance(how, str) or how not in HOW:
        raise GradcamError(f"how is {shorten(how)}, expected one of {join_names(HOW)}.")
    first = found[0]
    if any(isinstance(each.heatmaps, list) for each in found):
        raise GradcamError("The pictures have several sizes: explain those of one size, and fuse these.")
    for other in found[1:]:
        check_alike(first, other)
    heatmaps = torch.stack([each.heatmaps.to(first.heatmaps.device) for each in found])
    # The strongest is the value that is furthest from zero.
    joined = heatmaps.mean(0) if how == "mean" else heatmaps.gather(0, heatmaps.abs().argmax(0, keepdim=True))[0]
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
        said = f"Heatmaps {shapes[0]} and {shapes[1]} do not go together"
        raise GradcamError(f"{said}: explain the same images and classes.")
    if one.evidence != other.evidence:
        raise GradcamError(f"{one.evidence} and {other.evidence} evidence do not go together: ask for the same kind.")
    classes = [None if each.classes is None else each.classes.tolist() for each in (one, other)]
    if classes[0] != classes[1]:
        raise GradcamError(
            "These are explanations of different classes, which do not go together: give the same target."
        )


def _shapes(heatmaps: Any) -> object:
    return [tuple(it.shape) for it in heatmaps] if isinstance(heatmaps, list) else tuple(heatmaps.shape)
