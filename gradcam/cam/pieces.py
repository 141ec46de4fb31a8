"""Explain images that reach the model in pieces, such as tiles and rows of patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.adapters import find_family
from gradcam.adapters.vision_language import VisionLanguageModel
from gradcam.cam.forward import RecordedPass
from gradcam.cam.methods.base import Method
from gradcam.cam.postprocess import resize
from gradcam.errors import LayerError, TargetError
from gradcam.layers.pieces import TokenLayout
from gradcam.options import ExplainOptions
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, ScoreExtractor, TargetScores
from gradcam.targets.classes import compute_scores

# The default method for words, at the projector. Of the methods of one pass, its maps fit objects best:
# `scripts/bench --only words`.
WORD_METHOD = "elementwise-gradcam"
SCORES_PER_PASS = 2  # With more scores, a text model's gradients need much memory, compared with the forward pass.


def bind_pieces(
    model: nn.Module,
    bound: BoundTarget,
    methods: Sequence[Method],
    options: ExplainOptions,
    *,
    has_layers: bool = False,
) -> BoundTarget:
    """Return the target for images in pieces: with the default layer of the methods, and with one row for each image.

    `has_layers` is True if the user named layers. Raises `LayerError` and `TargetError` for options that need whole
    images, and for methods without a common default layer.
    """
    refused = [method.name for method in methods if method.runs_again]
    if refused:
        problem = f"{refused[0]} perturbs whole images, but {type(model).__name__} takes tiles or patches"
        raise LayerError(f"{problem}: choose a method that needs one pass, such as {LOCAL_METHOD}.")
    for name, unset in (("augmentation", "none"), ("reshape", None)):
        if (value := dict(options)[name]) != unset:
            reason = f"{type(model).__name__} takes tiles or patches, whose positions are fixed"
            raise TargetError(f"{name} is {value!r}, but {reason}: leave {name}= out.")
    if not {"input_ids", "inputs_embeds"} & bound.batch.kwargs.keys():
        needed = "the whole output of the model's own processor, with input_ids"
        raise TargetError(f"{type(model).__name__} needs a prompt, but the inputs have none: pass {needed}.")
    family = find_family(model, VisionLanguageModel)
    layer, default_method = bound.layer, LOCAL_METHOD
    if family is not None:
        layer = layer or family.layer
        is_default = all(method.name == WORD_METHOD for method in methods) and options["evidence"] == "positive"
        reads_text = {method.place == "text" for method in methods}
        if len(reads_text) > 1 and not has_layers:
            problem = "The method 'lens' and the other methods have different default layers"
            raise LayerError(f"{problem}: name a layer, or leave out 'lens'.")
        if reads_text == {True}:
            layer = family.list_text_layers()[-2]
        elif is_default and family.word_layer is not None:
            layer, default_method = family.word_layer, WORD_METHOD
    return replace(
        bound, target=ImageRows(bound.target, bound.batch.pieces.samples), layer=layer, method=default_method
    )


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
        fields: dict[str, Any] = {"classes": classes, "logits": logits, "instances": instances}
        return replace(scored, values=values, target=self, per_pass=SCORES_PER_PASS, **fields)


def crop_views(levels: Sequence[Tensor], recorded: RecordedPass, layer: str) -> Sequence[Tensor]:
    """Crop the maps of each view to the part of the view that the image covers, and resize them to one size."""
    names = {name for part in layer.split(" + ") for name in recorded.names_by_layer[part]}
    layouts: list[Any] = [layout for view, layout in recorded.layouts.items() if view.split(" (view ")[0] in names]
    return [_crop_view(level, layout) for level, layout in zip(levels, layouts, strict=True)]


def _crop_view(maps: Tensor, layout: TokenLayout) -> Tensor:
    if all(window == (0, 0, *layout.grid) for window in layout.windows):
        return maps
    size = [math.ceil(max(window[axis] for window in layout.windows) - 1e-6) for axis in (2, 3)]
    crops = []
    for image, (numbers, (top, left, rows, columns)) in enumerate(zip(layout.numbers, layout.windows)):
        # Cut off the padding of smaller images before the interpolation, which would mix it with cells at the border.
        height, width = (int((numbers >= 0).any(axis).sum()) or numbers.shape[1 - axis] for axis in (1, 0))
        cells = maps[image : image + 1, :, :height, :width]
        crops.append(resize(cells, size, signed=True, part=((top, left), (rows, columns))))
    return torch.cat(crops)
