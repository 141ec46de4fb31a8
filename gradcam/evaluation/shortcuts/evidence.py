"""Compute each image's heatmap and the target layer's features in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.batch.image_results import ExplainedImage, explain_batch
from gradcam.batch.read_items import HashedItem
from gradcam.cam.views import crop_to_windows
from gradcam.errors import GradcamError, LayerError, describe_failure
from gradcam.evaluation.snapshots.snapshot import ItemExplainer
from gradcam.hooks.containers import find_floating_tensor, to_batch
from gradcam.hooks.hooks import Hooks
from gradcam.images.read import Region
from gradcam.layers.axes import AxisResolver
from gradcam.layers.find import find_layer, unwrap
from gradcam.layers.frames import Frame
from gradcam.layers.token_layout import find_patches
from gradcam.models.preprocess import Prepared, find_windows
from gradcam.sources.contents import InputImage


@dataclass(frozen=True, eq=False)
class ImageEvidence:
    """The evidence in one image.

    `map` (float32, (h,w)) is the heatmap of class `class_index` on the layer's grid. The map covers `region` of the
    image. `features` (float32, (C,)) is the mean of the layer's features over the grid, weighted by the map. The
    features describe the appearance of the evidence.
    """

    item: InputImage
    class_index: int
    predicted: int
    region: Region
    map: NDArray[np.float32]
    features: NDArray[np.float32]


ResultWithFeatures = tuple[ExplainedImage, Tensor]  # features (C,h,w) on the map's grid


def collect_evidence(
    explainer: ItemExplainer, items: Sequence[InputImage], failures: dict[str, str], step: Callable[[], None]
) -> tuple[list[ImageEvidence], list[str]]:
    """Return the evidence in each image, and the names of images with blank heatmaps.

    If an image fails, the reason is added to `failures`.
    """
    evidence: list[ImageEvidence] = []
    blank: list[str] = []
    for image in explainer.run(partial(_explain, explainer), items, step, failures, finish=_finish):
        if not image.map.any():
            blank.append(image.item.name)
        elif evidence and image.map.shape != evidence[0].map.shape:
            sizes = [" x ".join(map(str, entry.map.shape)) for entry in (image, evidence[0])]
            reason = f"its heatmap is {sizes[0]}, but other heatmaps are {sizes[1]}: use the same --size for all images"
            failures[image.item.name] = f"{image.item.name}: {reason}"
        else:
            evidence.append(image)
    return evidence, blank


def _explain(
    explainer: ItemExplainer, prepared: Sequence[Prepared], *, classes: Sequence[int] | None = None
) -> list[ResultWithFeatures | GradcamError]:
    """Explain images, and record the layer's features in the same pass. Raise `LayerError` if the layer has no grid."""
    module = find_layer(explainer.classifier.model, explainer.layer).module
    outputs: list[Tensor] = []

    def record_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = find_floating_tensor(output)
        # Only the first pass is recorded: if a method runs the model several times, later passes change the image.
        if tensor is not None and not outputs:
            outputs.append(tensor.detach().clone())  # The next layer may change the tensor in place.

    with Hooks() as hooks:
        hooks.after_forward(module, record_output)
        results = explain_batch(explainer.classifier, explainer.request, prepared, classes=classes)
    grids = _to_grid(explainer, outputs, prepared)
    return [result if isinstance(result, GradcamError) else (result, grid) for result, grid in zip(results, grids)]


def _to_grid(explainer: ItemExplainer, outputs: Sequence[Tensor], prepared: Sequence[Prepared]) -> Tensor:
    """Return the layer's output (N,C,h,w) on the CPU."""
    model = unwrap(explainer.classifier.model)
    images = torch.stack([image.image for image in prepared])
    patches = find_patches(model.modules()) if outputs and outputs[0].ndim == 3 else ()
    axes = AxisResolver(model, to_batch(images), patches)
    module = find_layer(model, explainer.layer).module
    layout = axes.find_layout(outputs[0].shape, module, explainer.request.options["reshape"]) if outputs else None
    if layout is None or len(outputs[0]) != len(prepared):
        raise LayerError(f"Layer '{explainer.layer}' has no grid of features for each image: choose another --layer.")
    grid, windows = layout.to_grid(outputs[0]).float().cpu(), find_windows(explainer.classifier.preprocess, prepared)
    # The features of padded images are cropped to the image, because heatmaps are cropped as well.
    return grid if windows is None else crop_to_windows(grid, Frame((images.shape[2], images.shape[3]), windows))


def _finish(fetched: HashedItem, outcome: ResultWithFeatures | GradcamError) -> tuple[str, ImageEvidence | str]:
    name = fetched.item.name
    if isinstance(outcome, GradcamError):
        return name, describe_failure(name, outcome)
    result, grid = outcome
    (explanation,) = result.maps.values()
    values = explanation.maps[0, 0].float().clamp(min=0)
    if values.shape != grid.shape[1:]:
        sizes = [" x ".join(map(str, shape)) for shape in (values.shape, grid.shape[1:])]
        reason = f"the heatmap is {sizes[0]}, but the layer's features are {sizes[1]}: choose another method"
        return name, f"{name}: {reason}"
    weights = values / values.sum().clamp(min=torch.finfo(torch.float32).tiny)
    features = (grid * weights).sum((1, 2))
    if not (values.isfinite().all() and features.isfinite().all()):
        return name, f"{name}: the layer has NaN or infinite features: check the weights and the precision"
    explained, predicted = int(explanation.classes[0, 0]), result.predictions[0].index  # type: ignore[index]  # a class
    return name, ImageEvidence(fetched.item, explained, predicted, result.region, values.numpy(), features.numpy())
