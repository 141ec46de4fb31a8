"""Each picture's map, and what lies under it: one pass for both, in the batch that `gradcam batch` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.batch.findings import PictureResult, find
from gradcam.batch.pipeline import compute_items
from gradcam.batch.read import Fetched
from gradcam.cam.postprocess import take_windows
from gradcam.errors import GradcamError, LayerError, describe_failure
from gradcam.evaluation.snapshots.snapshot import Look
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import first_floating, to_batch
from gradcam.images.read import Region
from gradcam.layers.find import find_layer, unwrap
from gradcam.layers.frames import Frame
from gradcam.layers.layout import Axes, find_patches
from gradcam.models.preprocess import Prepared, find_windows
from gradcam.sources.contents import Item


@dataclass(frozen=True, eq=False)
class Marked:
    """What a model marks in one picture. `map`: float32 (h,w), the evidence for class `explained` on the layer's grid,
    over `region`. `features`: float32 (C,), the layer's channels averaged with the map as weights: what the marked place
    looks like to the network."""

    item: Item
    explained: int
    predicted: int
    region: Region
    map: NDArray[np.float32]
    features: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class _Seen:
    result: PictureResult
    features: Tensor  # (C,h,w) on the map's grid


def collect_evidence(
    look: Look, items: Sequence[Item], step: Callable[[], None]
) -> tuple[list[Marked], list[str], dict[str, str]]:
    """What is marked in each picture; the names of those whose map is blank; and why others have nothing."""
    marked: list[Marked] = []
    blank: list[str] = []
    failures: dict[str, str] = {}
    for item, found in compute_items(
        look.classifier,
        partial(_find, look),
        items,
        finish=_finish,
        batch_size=look.batch_size,
        workers=look.workers,
    ):
        step()
        if isinstance(found, str):
            failures[item.name] = found
        elif not found.map.any():
            blank.append(item.name)
        elif marked and found.map.shape != marked[0].map.shape:
            shapes = [" x ".join(map(str, it.map.shape)) for it in (found, marked[0])]
            failures[item.name] = (
                f"{item.name}: its heatmap is {shapes[0]}, but the first image's is {shapes[1]}: give all images one --size"
            )
        else:
            marked.append(found)
    return marked, blank, failures


def _find(
    look: Look, pictures: Sequence[Prepared], *, classes: Sequence[int] | None = None
) -> list[_Seen | GradcamError]:
    """As `find`, with the features of the layer from the same pass. Raises `LayerError` where they are on another grid."""
    module = find_layer(look.classifier.model, look.layer).module
    outputs: list[Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = first_floating(output)
        if tensor is not None and not outputs:  # of methods that run the model again, the first run is the picture's
            outputs.append(tensor.detach().clone())  # which the next layer may change in place

    with Hooks() as hooks:
        hooks.after_forward(module, keep)
        results = find(look.classifier, look.request, pictures, classes=classes)
    grids = _to_grid(look, outputs, pictures)
    return [result if isinstance(result, GradcamError) else _Seen(result, grid) for result, grid in zip(results, grids)]


def _to_grid(look: Look, outputs: Sequence[Tensor], pictures: Sequence[Prepared]) -> Tensor:
    """The layer's output (N,C,h,w), on the CPU."""
    model = unwrap(look.classifier.model)
    images = torch.stack([picture.image for picture in pictures])
    axes = Axes(model, to_batch(images), find_patches(model.modules()) if outputs and outputs[0].ndim == 3 else ())
    module = find_layer(model, look.layer).module
    layout = axes.find_layout(outputs[0].shape, module, look.request.options["reshape"]) if outputs else None
    if layout is None or len(outputs[0]) != len(pictures):
        raise LayerError(f"Layer '{look.layer}' has no grid of features for each image: choose another --layer.")
    grid, windows = layout.to_grid(outputs[0]).float().cpu(), find_windows(look.classifier.preprocess, pictures)
    # As maps of padded images, which cover the image alone.
    return grid if windows is None else take_windows(grid, Frame((images.shape[2], images.shape[3]), windows))


def _finish(fetched: Fetched, found: _Seen | GradcamError) -> tuple[Item, Marked | str]:
    item = fetched.item
    if isinstance(found, GradcamError):
        return item, describe_failure(item.name, found)
    (explanation,) = found.result.maps.values()
    values = explanation.maps[0, 0].float().clamp(min=0)
    if values.shape != found.features.shape[1:]:
        grids = [" x ".join(map(str, it)) for it in (values.shape, found.features.shape[1:])]
        return (
            item,
            f"{item.name}: the heatmap is {grids[0]}, but the layer's features are {grids[1]}: choose another method",
        )
    weights = values / values.sum().clamp(min=torch.finfo(torch.float32).tiny)
    features = (found.features * weights).sum((1, 2))
    if not (values.isfinite().all() and features.isfinite().all()):
        return item, f"{item.name}: the layer has NaN or infinite features: check the weights and the precision"
    explained = int(explanation.classes[0, 0])  # type: ignore[index]  # a class is explained
    predicted = found.result.predictions[0].index
    return item, Marked(item, explained, predicted, found.result.region, values.numpy(), features.numpy())
