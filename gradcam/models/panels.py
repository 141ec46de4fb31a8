"""Draw all explanations of one image side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from gradcam.cam.fuse import check_compatible
from gradcam.errors import GradcamError, ImageError, shorten
from gradcam.images.marks import draw_mark_panel
from gradcam.images.read import Pixels, crop
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.results import ImageExplanation, to_mark


def panel(
    explanations: Mapping[tuple[str, str], ImageExplanation],
    i: int = 0,
    *,
    height: int = 224,
    alpha: float = 0.5,
    colormap: str = "turbo",
) -> Pixels:
    """Draw the results of `Classifier.compare` for one image: a column per method, a row per layer and class.

    The panel shows the part of the image that the model saw, first without a heatmap and then with each heatmap. A
    colour bar is at the bottom. If each method has its own layer, the titles of the columns name the layers. If one
    method explains several instances (boxes, masks or sentences) at one layer, the panel has another form: first the
    image with all instances, and then one heatmap for each instance.

    Parameters
    ----------
    explanations : mapping of (str, str) to ImageExplanation
        The result of `Classifier.compare`.
    i : int, default 0
        The index of the image.
    height : int, default 224
        The height of each cell, in pixels.
    alpha : float, default 0.5
        As in `gradcam.overlay`.
    colormap : str, default "turbo"
        As in `gradcam.overlay`.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    GradcamError
        If the explanations are not from one comparison, the colour map is unknown, or the opacity is outside [0,1].
    ImageError
        If there is no image i, or the height is below 1.

    Examples
    --------
    >>> import gradcam
    >>> explanations = gradcam.load_classifier().compare("photo.jpg", methods=["gradcam", "layercam"], target="espresso")
    >>> image = gradcam.panel(explanations, height=160)
    >>> image.shape
    (278, ..., 3)
    >>> gradcam.write_image("panel.png", image)
    """
    explained = list(explanations.values()) if isinstance(explanations, Mapping) else []
    is_comparison = all(isinstance(key, tuple) and len(key) == 2 for key in explanations)
    if not (explained and is_comparison and all(isinstance(result, ImageExplanation) for result in explained)):
        problem = f"The explanations are {shorten(explanations)}"
        raise GradcamError(f"{problem}, expected the result of Classifier.compare().")
    for explanation in explained[1:]:
        check_compatible(explained[0], explanation)
    layers, methods = (list(dict.fromkeys(key[axis] for key in explanations)) for axis in (0, 1))
    first, titles, across = explained[0], methods, [explained]
    if not -len(first.images) <= i < len(first.images):
        raise ImageError(f"There is no image {i}: there are {len(first.images)} image(s).")
    # If each method has its own layer, each column title names a layer.
    if len(layers) > 1 and len(methods) == len(explanations):
        places = ["" if explanation.layer == first.layer else f" at {explanation.layer}" for explanation in explained]
        titles = [f"{explanation.method}{place}" for explanation, place in zip(explained, places)]
    else:
        for layer, method in itertools.product(layers, methods):
            if (layer, method) not in explanations:
                problem = f"There is no explanation by {method} at {layer}"
                raise GradcamError(f"{problem}: a panel needs every method at every layer.")
        across = [[explanations[layer, method] for method in methods] for layer in layers]
    if first.instances is not None and len(explained) == 1 and len(first.instances[i]) > 1:
        return _draw_instances(first, i, height, alpha=alpha, colormap=colormap)
    rows = []
    for row, k in itertools.product(across, range(first.maps.shape[1])):
        cells = [_draw_seen_part(explanation, i, k, alpha=alpha, colormap=colormap) for explanation in row]
        rows.append(PanelRow(_title(row[0], i, k), [_draw_seen_part(first, i), *cells]))
    signed = first.evidence == "signed"
    return draw_panel(["image", *titles], rows, height=height, colormap=colormap, signed=signed)


def _draw_instances(explanation: ImageExplanation, i: int, height: int, *, alpha: float, colormap: str) -> Pixels:
    """Draw the image with all instances, then one overlay per instance."""
    instances = explanation.instances[i]  # type: ignore[index]  # checked by the caller
    options: dict[str, Any] = {"alpha": alpha, "colormap": colormap, "outline": False}
    overlays = [explanation.overlay(i, k, **options) for k in range(len(instances))]
    signed = explanation.evidence == "signed"
    marks = [to_mark(instance) for instance in instances]
    return draw_mark_panel(explanation.images[i], overlays, marks, height=height, colormap=colormap, signed=signed)


def _title(explanation: ImageExplanation, i: int, k: int) -> str:
    grid = " x ".join(map(str, explanation.maps.shape[2:]))
    kind = "" if explanation.evidence == "positive" else f", {explanation.evidence} evidence"
    return f"{explanation.name_class(i, k)} at {explanation.layer} ({grid}){kind}"


def _draw_seen_part(explanation: ImageExplanation, i: int, k: int | None = None, **options: Any) -> Pixels:
    image = explanation.images[i] if k is None else explanation.overlay(i, k, outline=False, **options)
    return crop(image, explanation.regions[i])
