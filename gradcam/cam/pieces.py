"""Explain images that reach the model in pieces, such as tiles and rows of patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.adapters import find_family
from gradcam.adapters.captioning import GenerativeCaptioner
from gradcam.adapters.vision_language import VisionLanguageModel
from gradcam.cam.forward import RecordedPass
from gradcam.cam.methods.base import Method
from gradcam.cam.views import crop_to_windows
from gradcam.errors import LayerError, TargetError
from gradcam.layers.frames import Frame
from gradcam.options import ExplainOptions
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, ScoreExtractor, TargetScores
from gradcam.targets.classes import compute_scores


def bind_pieces(
    model: nn.Module, bound: BoundTarget, methods: Sequence[Method], options: ExplainOptions
) -> BoundTarget:
    """Return the target for images in pieces: with the default layer of the model, and with one row for each image.

    Raises `LayerError` and `TargetError` for options that need whole images.
    """
    refused = [method.name for method in methods if method.runs_again]
    if refused:
        problem = f"{refused[0]} perturbs whole images, but {type(model).__name__} takes images in pieces"
        raise LayerError(f"{problem}: choose a method that needs one pass, such as {LOCAL_METHOD}.")
    for name, unset in (("augmentation", "none"), ("reshape", None)):
        if (value := dict(options)[name]) != unset:
            reason = f"{type(model).__name__} takes images in pieces, whose places are known"
            raise TargetError(f"{name} is {value!r}, but {reason}: leave {name}= out.")
    family = find_family(model, GenerativeCaptioner)
    layer = bound.layer if family is None else bound.layer or family.layer
    if isinstance(family, VisionLanguageModel) and any(method.place == "text" for method in methods):
        layer = family.lens_layer
    target = ImageRows(bound.target, bound.batch.pieces.samples)
    return replace(bound, target=target, layer=layer, method=LOCAL_METHOD)


@dataclass(frozen=True)
class ImageRows(ScoreExtractor):
    """A target with a row of scores for each image. `samples` is the number of the sample to which each image belongs.

    Only the first image of a sample has scores with a graph. A backward pass therefore starts once at each sample, and
    reaches all images of the sample.
    """

    target: Any
    samples: Sequence[int]

    def score(self, output: Any, images: int) -> TargetScores:
        scored = compute_scores(self.target, output, max(self.samples) + 1)
        first = [sample not in self.samples[:image] for image, sample in enumerate(self.samples)]
        is_first = torch.tensor(first, dtype=torch.bool, device=scored.values.device)[:, None]
        rows = list(self.samples)
        values = scored.values[rows].where(is_first, scored.values.detach()[rows])
        instances = None if scored.instances is None else [scored.instances[row] for row in rows]
        classes, logits = (None if value is None else value[rows] for value in (scored.classes, scored.logits))
        return replace(scored, values=values, classes=classes, logits=logits, target=self, instances=instances)


def crop_views(levels: Sequence[Tensor], recorded: RecordedPass, layer: str) -> Sequence[Tensor]:
    """Crop the maps of each view to the part of the view that the image covers."""
    names = {name for part in layer.split(" + ") for name in recorded.names_by_layer[part]}
    layouts: list[Any] = [layout for view, layout in recorded.layouts.items() if view.split(" (view ")[0] in names]
    frames = [Frame(layout.grid, layout.windows) for layout in layouts]
    return [
        level if frame.is_whole else crop_to_windows(level, frame) for level, frame in zip(levels, frames, strict=True)
    ]
