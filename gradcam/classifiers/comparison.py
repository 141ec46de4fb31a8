"""Explanations of one picture side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcam.classifiers.explanation import PictureExplanation
from gradcam.errors import GradcamError, ImageError, shorten
from gradcam.fusion import check_alike
from gradcam.images import Pixels
from gradcam.panels import PanelRow, draw_panel


def panel(
    explanations: Mapping[tuple[str, str], PictureExplanation],
    i: int = 0,
    *,
    height: int = 224,
    alpha: float = 0.5,
    colormap: str = "turbo",
) -> Pixels:
    """Picture i as `Classifier.compare` explained it: methods across, layers and classes down, with a bar of the colours.

    Where each method has a layer of its own, the title of its column has that.

    RGB, uint8 (H,W,3). Shown is the part of the picture that the network saw, at `height` pixels; the first column is
    that part itself.
    `alpha` and `colormap` are as in `gradcam.overlay`.
    Raises `GradcamError` for explanations that are not of one comparison, `ImageError` where there is no picture i.
    """
    found = list(explanations.values()) if isinstance(explanations, Mapping) else []
    is_comparison = all(isinstance(key, tuple) and len(key) == 2 for key in explanations)
    if not found or not is_comparison or not all(isinstance(each, PictureExplanation) for each in found):
        raise GradcamError(f"The explanations are {shorten(explanations)}, expected what Classifier.compare() gives.")
    for other in found[1:]:
        check_alike(found[0], other)
    layers, methods = (list(dict.fromkeys(key[axis] for key in explanations)) for axis in (0, 1))
    if len(layers) > 1 and len(methods) == len(explanations):
        return _panel_of_own_layers(list(explanations.values()), i, height=height, alpha=alpha, colormap=colormap)
    missing = [(layer, method) for layer in layers for method in methods if (layer, method) not in explanations]
    if missing:
        raise GradcamError(
            f"There is no explanation by {missing[0][1]} at {missing[0][0]}: a panel needs each method at each layer."
        )
    first = _check_picture(found[0], i)
    rows = [
        PanelRow(
            _title(explanations[layer, methods[0]], i, k),
            [_seen(first, i), *(_seen(explanations[layer, method], i, k, alpha, colormap) for method in methods)],
        )
        for layer in layers
        for k in range(first.maps.shape[1])
    ]
    signed = first.evidence == "signed"
    return draw_panel(["picture", *methods], rows, height=height, colormap=colormap, signed=signed)


def _panel_of_own_layers(
    found: Sequence[PictureExplanation], i: int, *, height: int, alpha: float, colormap: str
) -> Pixels:
    """The classes down, and the methods across, each with its layer."""
    first = _check_picture(found[0], i)
    rows = [
        PanelRow(_title(first, i, k), [_seen(first, i), *(_seen(each, i, k, alpha, colormap) for each in found)])
        for k in range(first.maps.shape[1])
    ]
    titles = [each.method if each.layer == first.layer else f"{each.method} at {each.layer}" for each in found]
    return draw_panel(["picture", *titles], rows, height=height, colormap=colormap, signed=first.evidence == "signed")


def _check_picture(explanation: PictureExplanation, i: int) -> PictureExplanation:
    """The explanation itself. Raises `ImageError` where it has no picture i."""
    if not -len(explanation.pictures) <= i < len(explanation.pictures):
        raise ImageError(f"There is no picture {i}: there are {len(explanation.pictures)}.")
    return explanation


def _title(explanation: PictureExplanation, i: int, k: int) -> str:
    grid = " x ".join(map(str, explanation.maps.shape[2:]))
    kind = "" if explanation.evidence == "positive" else f", {explanation.evidence} evidence"
    return f"{explanation.name_class(i, k)} at {explanation.layer} ({grid}){kind}"


def _seen(
    explanation: PictureExplanation, i: int, k: int | None = None, alpha: float = 0.5, colormap: str = "turbo"
) -> Pixels:
    """The part of the picture that the network saw, with its k-th heatmap, or without."""
    look: dict[str, Any] = {"alpha": alpha, "colormap": colormap, "outline": False}
    picture = explanation.pictures[i] if k is None else explanation.overlay(i, k, **look)
    top, left, height, width = explanation.regions[i]
    return picture[top : top + height, left : left + width]
