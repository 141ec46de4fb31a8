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
from gradcam.classifiers.explanation import PictureExplanation, to_probabilities
from gradcam.classifiers.labels import find_class
from gradcam.classifiers.preparation import find_input_device, find_input_dtype
from gradcam.classifiers.preprocessing import Preprocess
from gradcam.classifiers.readers import Reader, Reading, read_picture, to_reading
from gradcam.effort import Progress
from gradcam.errors import ImageError, LayerError, shorten
from gradcam.explanation import compare, one_map
from gradcam.images import Region
from gradcam.methods import Method, find_methods
from gradcam.targets import ClassTarget, to_class_target


@dataclass(frozen=True, eq=False)
class Prepared:
    """A picture that was read, and as the tensor (C,H,W) that the model takes."""

    reading: Reading
    image: Tensor


Picture = str | os.PathLike[str] | NDArray[Any] | Reading | Prepared


@dataclass(frozen=True, eq=False)
class Classifier:
    """A model in evaluation mode, with its preprocessing, its classes, and the layer to explain.

    `preprocess`: one RGB array, uint8 (H,W,3), or whatever the reader gives, to one tensor (C,H,W). `classes`: how many;
    `labels`: their names, None where nobody knows them. A single logit is two classes, 1 for and 0 against.
    `layer`: what is explained where nothing else is said; `layer_for_positive`: in its place for methods that assume
    activations that are not negative, where that is another one. `activation`: how logits become probabilities, a key of
    `choices.ACTIVATIONS`. `reader`: from a file to a `Reading`, as `to_reader` makes one. `notes`: what was assumed, and
    what else a person should know of how the model was loaded.
    """

    name: str
    model: nn.Module = field(repr=False)
    preprocess: Preprocess
    classes: int
    labels: Sequence[str] | None = field(repr=False)
    layer: str
    layer_for_positive: str | None = field(default=None, repr=False, kw_only=True)
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

    def prepare(self, picture: Picture) -> Prepared:
        """A picture (a path, or an array) read and preprocessed, for `explain` and `compare`: several threads may do so.

        Raises as `gradcam.read_image` does.
        """
        if isinstance(picture, Prepared):
            return picture
        reading = to_reading(picture, self.reader)
        return Prepared(reading, self.preprocess(reading.values))

    def batch(self, pictures: Sequence[NDArray[Any]]) -> Tensor:
        """Arrays as the tensor (N,C,H,W) that the model takes, on its device and in its precision."""
        return self._stack([self.preprocess(picture) for picture in pictures])

    def _stack(self, images: list[Tensor]) -> Tensor:
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

    def layer_for(self, method: str | Method) -> str:
        """What is explained with this method where no layer is named. Raises `GradcamError` for an unknown one."""
        positive = self.layer_for_positive
        return self.layer if positive is None or not find_methods([method])[0].assumes_positive else positive

    def explain(
        self,
        pictures: Picture | Sequence[Picture],
        layer: str | nn.Module | None = None,
        *,
        method: str | Method = "gradcam",
        target: Any = None,
        layers: Sequence[str | nn.Module] | None = None,
        join: str | None = None,
        evidence: str = "positive",
        augmentation: str = "none",
        smoothing: str = "none",
        reshape: Any = None,
        memory_budget: int | None = None,
        progress: Progress | None = None,
    ) -> PictureExplanation:
        """Show where the model looked in one picture (a path, or an array), or in a sequence of them.

        Pictures of a sequence may be of several sizes and kinds, and such as `prepare` gave. An array is RGB, uint8 (H,W,3),
        or integers or floats (H,W) or (H,W,C) as the preprocessing takes them; the picture that is drawn on is made from it,
        stretched where its values use less than half of their range.
        `layer`: dotted name, or module; None takes `layer_for(method)`. `target`: as in `gradcam.explain`, with labels in
        place of indices where wanted; the rest as there. Raises as `gradcam.explain` and `gradcam.read_image` do.
        """
        found = self.compare(
            pictures,
            layers=one_map(layer, layers, join),
            methods=[method],
            target=target,
            join=join,
            evidence=evidence,
            augmentation=augmentation,
            smoothing=smoothing,
            reshape=reshape,
            memory_budget=memory_budget,
            progress=progress,
        )
        return next(iter(found.values()))

    def compare(
        self,
        pictures: Picture | Sequence[Picture],
        *,
        layers: Sequence[str | nn.Module] | None = None,
        methods: Sequence[str | Method],
        target: Any = None,
        join: str | None = None,
        evidence: str = "positive",
        augmentation: str = "none",
        smoothing: str = "none",
        reshape: Any = None,
        memory_budget: int | None = None,
        progress: Progress | None = None,
    ) -> dict[tuple[str, str], PictureExplanation]:
        """Like `explain`, at several layers with several methods from one pass: a dict from (layer name, method name).

        Without `layers`, each method explains its own, `layer_for(method)`, with a pass for each that there is.
        """
        prepared = self._prepare_all(pictures)
        images = self._stack([picture.image for picture in prepared])
        passes = self._assign(methods) if layers is None else [(layers, methods)]
        found = [
            compare(
                self.model,
                images.clone() if len(passes) > 1 else images,
                layers=at,
                methods=names,
                target=self._to_target(target),
                join=join,
                evidence=evidence,
                augmentation=augmentation,
                smoothing=smoothing,
                reshape=reshape,
                memory_budget=memory_budget,
                progress=progress,
            )
            for at, names in passes
        ]
        explanations = {key: explanation for each in found for key, explanation in each.items()}
        if len(passes) > 1:
            order = [method.name for method in find_methods(methods)]
            explanations = dict(sorted(explanations.items(), key=lambda item: order.index(item[0][1])))
        described = self._describe(prepared)
        return {
            key: PictureExplanation(**vars(explanation), **described, activation=self.activation)
            for key, explanation in explanations.items()
        }

    def _assign(
        self, methods: Sequence[str | Method]
    ) -> list[tuple[Sequence[str | nn.Module], Sequence[str | Method]]]:
        """The layers that no one named, each with its methods."""
        assigned: dict[str, list[Method]] = {}
        for method in find_methods(methods):
            assigned.setdefault(self.layer_for(method), []).append(method)
        return [([layer], own) for layer, own in assigned.items()]

    def attribute(
        self,
        pictures: Picture | Sequence[Picture],
        method: str = "guided-gradcam",
        *,
        layer: str | nn.Module | None = None,
        target: Any = None,
        reshape: Any = None,
    ) -> PictureAttribution:
        """How much each pixel that the network saw matters: signed values, drawn by `.picture(i, k)`.

        `method`: a key of `gradcam.attributions.ATTRIBUTIONS`, with that method's defaults. `layer`, `reshape`: for
        guided-gradcam, as in `explain`. `pictures`, `target`: as in `explain`. Raises as that method's function and
        `gradcam.read_image` do, and `LayerError` for a layer, or a reshape, where the method takes none.
        """
        chosen = find_attribution(method)
        for name, value in {"layer": layer, "reshape": reshape}.items():
            if value is not None and not chosen.has_layer:
                raise LayerError(f"{method} takes no layer: it attributes to the picture itself. Leave {name}= away.")
        prepared = self._prepare_all(pictures)
        place = {"layer": self.layer if layer is None else layer, "reshape": reshape} if chosen.has_layer else {}
        images = self._stack([picture.image for picture in prepared])
        attribution = chosen.function(self.model, images, target=self._to_target(target), **place)
        return PictureAttribution(**vars(attribution), **self._describe(prepared))

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

    def _prepare_all(self, pictures: Picture | Sequence[Picture]) -> list[Prepared]:
        if isinstance(pictures, (str, os.PathLike, Reading, Prepared)):
            pictures = [pictures]
        if isinstance(pictures, np.ndarray) and pictures.ndim in (2, 3):
            pictures = [pictures]
        if not isinstance(pictures, (Sequence, np.ndarray)):
            raise ImageError(f"The pictures are {shorten(pictures)}, expected a path, an array, or a sequence of them.")
        prepared = [self.prepare(picture) for picture in pictures]
        if not prepared:
            raise ImageError("There are no pictures: expected one path or array, or a sequence of them.")
        return prepared

    def _describe(self, prepared: Sequence[Prepared]) -> dict[str, Any]:
        """What results remember of the pictures."""
        pictures = [each.reading.picture for each in prepared]
        regions = [self.region(*picture.shape[:2]) for picture in pictures]
        notes = [each.reading.note for each in prepared]
        return {"pictures": pictures, "regions": regions, "labels": self.labels, "notes": notes}
