"""A model with all that is needed to explain pictures from files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcam.attributions import find_attribution
from gradcam.classifiers.attribution import PictureAttribution
from gradcam.classifiers.labels import find_class
from gradcam.classifiers.preparation import find_input_device, find_input_dtype
from gradcam.classifiers.preprocessing import Preprocess
from gradcam.classifiers.readers import Reader, Reading, read_picture, to_reading
from gradcam.drawing import overlay, sheet
from gradcam.effort import Progress
from gradcam.errors import ImageError, LayerError, shorten
from gradcam.explanation import Explanation, compare
from gradcam.images import Pixels, Region, encode_png
from gradcam.methods import Method
from gradcam.scores import probabilities
from gradcam.targets import ClassTarget, to_class_target

Picture = str | os.PathLike[str] | NDArray[Any]


@dataclass(frozen=True, eq=False)
class PictureExplanation(Explanation):
    """An `Explanation` that remembers the pictures, and where in them the network looked. A notebook shows it by itself."""

    pictures: Sequence[Pixels] = field(repr=False)
    regions: Sequence[Region] = field(repr=False)
    labels: Sequence[str] | None = field(repr=False)
    notes: Sequence[str | None] = field(repr=False)  # what a person should know of how each picture is shown
    activation: str = field(repr=False)

    __repr__ = Explanation.__repr__

    def overlay(self, i: int = 0, k: int = 0, *, alpha: float = 0.5, colormap: str = "turbo") -> Pixels:
        """Picture i with its k-th heatmap, on the pixels that the network saw: RGB, uint8 (H,W,3).

        Signed evidence is red for the class and blue against it, whatever the colour map.
        Raises `ImageError` where there is no such picture or heatmap.
        """
        images, classes = self.maps.shape[:2]
        if not (-images <= i < images and -classes <= k < classes):
            raise ImageError(f"There is no map [{i}, {k}]: there are {images} picture(s), with {classes} map(s) each.")
        heatmap = self.heatmaps[i, k]
        signed = self.evidence == "signed"
        return overlay(self.pictures[i], heatmap, alpha=alpha, colormap=colormap, region=self.regions[i], signed=signed)

    def probabilities(self) -> Tensor:
        """All classes' probabilities: float32 (N,C)."""
        return to_probabilities(self.output, len(self.pictures), self.activation)

    def _repr_png_(self) -> bytes:
        images, classes = self.maps.shape[:2]
        if images == classes == 1:
            return encode_png(self.overlay())
        return encode_png(sheet([[self.overlay(i, k) for k in range(classes)] for i in range(images)]))


@dataclass(frozen=True, eq=False)
class Classifier:
    """A model in evaluation mode, with its preprocessing, its classes, and the layer to explain.

    `preprocess`: one RGB array, uint8 (H,W,3), or whatever the reader gives, to one tensor (C,H,W). `classes`: how many;
    `labels`: their names, None where nobody knows them. A single logit is two classes, 1 for and 0 against.
    `layer`: what is explained where nothing else is said. `activation`: how logits become probabilities, a key of
    `choices.ACTIVATIONS`. `reader`: from a file to a `Reading`, as `to_reader` makes one. `notes`: what was assumed, and
    what else a person should know of how the model was loaded.
    """

    name: str
    model: nn.Module = field(repr=False)
    preprocess: Preprocess
    classes: int
    labels: Sequence[str] | None = field(repr=False)
    layer: str
    activation: str = "softmax"
    reader: Reader = field(default=read_picture, repr=False)
    notes: Sequence[str] = field(default=(), repr=False)

    @property
    def device(self) -> torch.device:
        """Where the model is; where its input goes, if it lies on several devices."""
        return find_input_device(self.model)

    def region(self, height: int, width: int) -> Region:
        """The pixels of a picture of this size that the network sees: (top, left, height, width)."""
        return self.preprocess.region(height, width)

    def batch(self, pictures: Sequence[NDArray[Any]]) -> Tensor:
        """Arrays as the tensor (N,C,H,W) that the model takes, on its device and in its precision."""
        images = [self.preprocess(picture) for picture in pictures]
        sizes = sorted({tuple(image.shape[1:]) for image in images})
        if len(sizes) > 1:
            raise ImageError(
                f"The pictures are {' and '.join(f'{height} x {width}' for height, width in sizes[:2])} once preprocessed, "
                "which do not fit into one batch: explain them one by one."
            )
        return torch.stack(images).to(self.device, find_input_dtype(self.model))

    def probabilities(self, output: Any, images: int) -> Tensor:
        """All classes' probabilities, float32 (N,C), in what the model gave for so many images."""
        return to_probabilities(output, images, self.activation)

    def explain(
        self,
        pictures: Picture | Sequence[Picture],
        layer: str | nn.Module | None = None,
        *,
        method: str | Method = "gradcam",
        target: Any = None,
        evidence: str = "positive",
        augmentation: str = "none",
        smoothing: str = "none",
        memory_budget: int | None = None,
        progress: Progress | None = None,
    ) -> PictureExplanation:
        """Show where the model looked in one picture (a path, or an array), or in a sequence of them.

        Pictures of a sequence may be of several sizes and kinds. An array is RGB, uint8 (H,W,3), or integers or floats (H,W)
        or (H,W,C) as the preprocessing takes them; the picture that is drawn on is made from it, stretched where its values
        use less than half of their range.
        `layer`: dotted name, or module; None takes the classifier's own. `target`: as in `gradcam.explain`, with labels in
        place of indices where wanted; the rest as there. Raises as `gradcam.explain` and `gradcam.read_image` do.
        """
        layers = [self.layer if layer is None else layer]
        found = self.compare(
            pictures,
            layers=layers,
            methods=[method],
            target=target,
            evidence=evidence,
            augmentation=augmentation,
            smoothing=smoothing,
            memory_budget=memory_budget,
            progress=progress,
        )
        return next(iter(found.values()))

    def compare(
        self,
        pictures: Picture | Sequence[Picture],
        *,
        layers: Sequence[str | nn.Module],
        methods: Sequence[str | Method],
        target: Any = None,
        evidence: str = "positive",
        augmentation: str = "none",
        smoothing: str = "none",
        memory_budget: int | None = None,
        progress: Progress | None = None,
    ) -> dict[tuple[str, str], PictureExplanation]:
        """Like `explain`, at several layers with several methods from one pass: a dict from (layer name, method name)."""
        readings = self._read_all(pictures)
        explanations = compare(
            self.model,
            self.batch([reading.values for reading in readings]),
            layers=layers,
            methods=methods,
            target=self._to_target(target),
            evidence=evidence,
            augmentation=augmentation,
            smoothing=smoothing,
            memory_budget=memory_budget,
            progress=progress,
        )
        return {
            key: PictureExplanation(**vars(explanation), **self._describe(readings), activation=self.activation)
            for key, explanation in explanations.items()
        }

    def attribute(
        self,
        pictures: Picture | Sequence[Picture],
        method: str = "guided-gradcam",
        *,
        layer: str | nn.Module | None = None,
        target: Any = None,
    ) -> PictureAttribution:
        """How much each pixel that the network saw matters: signed values, drawn by `.picture(i, k)`.

        `method`: a key of `gradcam.attributions.ATTRIBUTIONS`, with that method's defaults. `layer`: for guided-gradcam, as
        in `explain`. `pictures`, `target`: as in `explain`. Raises as that method's function and `gradcam.read_image` do,
        and `LayerError` for a layer where the method takes none.
        """
        chosen = find_attribution(method)
        if layer is not None and not chosen.has_layer:
            raise LayerError(f"{method} takes no layer: it attributes to the picture itself. Leave layer= away.")
        readings = self._read_all(pictures)
        layers = [self.layer if layer is None else layer] if chosen.has_layer else []
        images = self.batch([reading.values for reading in readings])
        attribution = chosen.function(self.model, images, *layers, target=self._to_target(target))
        return PictureAttribution(**vars(attribution), **self._describe(readings))

    def find_class(self, wanted: str) -> int:
        """The index of a class by its label, in any case. Raises `TargetError`, with the nearest, for an unknown one."""
        return find_class(self.labels, wanted, self.classes)

    def label(self, index: int) -> str | None:
        """A class's label, None where nobody knows it."""
        return None if self.labels is None else self.labels[index]

    def _to_target(self, target: Any) -> Any:
        """The target with indices in place of labels, and with the model's own activation where it has none."""
        target = self._with_indices(target)
        if callable(target):
            return target
        target = to_class_target(target)
        return replace(target, activation=self.activation) if target.activation == "auto" else target

    def _with_indices(self, target: Any) -> Any:
        if isinstance(target, str):
            return self.find_class(target)
        if isinstance(target, (list, tuple)):
            return [self._with_indices(value) for value in target]
        if isinstance(target, ClassTarget):
            classes, against = (self._with_indices(value) for value in (target.classes, target.against))
            return replace(target, classes=classes, against=against)
        return target

    def _read_all(self, pictures: Picture | Sequence[Picture]) -> list[Reading]:
        if isinstance(pictures, (str, os.PathLike)) or (isinstance(pictures, np.ndarray) and pictures.ndim in (2, 3)):
            pictures = [pictures]
        if not isinstance(pictures, (Sequence, np.ndarray)):
            raise ImageError(f"The pictures are {shorten(pictures)}, expected a path, an array, or a sequence of them.")
        readings = [to_reading(picture, self.reader) for picture in pictures]
        if not readings:
            raise ImageError("There are no pictures: expected one path or array, or a sequence of them.")
        return readings

    def _describe(self, readings: Sequence[Reading]) -> dict[str, Any]:
        """What results remember of the pictures."""
        pictures = [reading.picture for reading in readings]
        regions = [self.region(*picture.shape[:2]) for picture in pictures]
        notes = [reading.note for reading in readings]
        return {"pictures": pictures, "regions": regions, "labels": self.labels, "notes": notes}


def to_probabilities(output: Any, images: int, activation: str) -> Tensor:
    """All classes' probabilities, float32 (N,C), in what a model gave for so many images."""
    return probabilities(ClassTarget(activation=activation).find_logits(output, images), activation)
