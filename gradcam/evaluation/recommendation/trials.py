"""Combinations of methods, scores and layers, as heatmaps: as many as can be from one pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradcam.choices import SCORES
from gradcam.classifiers import Classifier
from gradcam.errors import BlindLayerError, GradcamError, GradcamWarning, LayerError, shorten
from gradcam.evaluation.recommendation.outcome import Combination
from gradcam.explanation import compare
from gradcam.methods import METHODS, find_methods
from gradcam.targets import ClassTarget


def list_single_pass() -> list[str]:
    """The methods at a layer that take one forward pass of the model, and one backwards."""
    return [method.name for method in METHODS.values() if method.cost == "1" and method.place == "layer"]


def combine(methods: Sequence[str], scores: Sequence[str], layers: Sequence[str]) -> list[Combination]:
    """All combinations, each once. Methods that explain no score, or their own, are there once for each layer.

    Raises `GradcamError` for unknown methods and scores, and for methods that look at no layer.
    """
    found = find_methods(methods)
    for method in found:
        if method.place != "layer":
            raise GradcamError(f"{method.name} looks at no layer, and layers are what is to be chosen: leave it out.")
    if isinstance(scores, str) or not scores or not all(score in SCORES for score in scores):
        raise GradcamError(f"scores is {shorten(scores)}, expected some of {', '.join(SCORES)}.")
    combinations = [
        Combination(method.name, score if _has_score(method.name) else None, layer)
        for layer in layers
        for method in found
        for score in scores
    ]
    return list(dict.fromkeys(combinations))


def _has_score(name: str) -> bool:
    """Whether a method's map depends on which score is asked for."""
    method = METHODS[name]
    return method.score is None and method.needs != ("activations",)


@dataclass
class Trials:
    """What explains images in every way that is asked for. `left_out`: what turned out to have no map, and why."""

    classifier: Classifier
    reshape: Any = None
    left_out: dict[Combination, str] = field(default_factory=dict)

    def explain(
        self, images: Tensor, classes: Tensor, combinations: Iterable[Combination]
    ) -> Iterator[tuple[Combination, Tensor]]:
        """Each combination, and its heatmaps (N,K,H,W) in [0,1] of images (N,C,H,W) for classes (N,K).

        There is a pass for each score, and only its heatmaps are in memory. One is blank where the gradient at its layer is
        exactly zero. A combination that has no map at all is left out, here and from now on.
        """
        wanted = [it for it in combinations if it not in self.left_out]
        for score in SCORES:
            # Methods without a score go with the logits' pass.
            part = [it for it in wanted if (it.score or "logit") == score]
            if part:
                yield from self._explain(images, classes, score, part)

    def _explain(
        self, images: Tensor, classes: Tensor, score: str, wanted: Sequence[Combination]
    ) -> Iterator[tuple[Combination, Tensor]]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GradcamWarning)  # whatever suits a method is found out here
                found = compare(
                    self.classifier.model,
                    images,
                    layers=list(dict.fromkeys(it.layer for it in wanted)),
                    methods=list(dict.fromkeys(it.method for it in wanted)),
                    target=ClassTarget(classes, score=score, activation=self.classifier.activation),
                    reshape=self.reshape,
                )
        except LayerError as error:
            if len(wanted) > 1:  # one of them is the reason: each by itself
                for it in wanted:
                    yield from self._explain(images, classes, score, [it])
            elif isinstance(error, BlindLayerError):
                yield wanted[0], images.new_zeros(*classes.shape, *images.shape[2:])
            else:
                self.left_out[wanted[0]] = str(error)
        else:
            for it in wanted:
                yield it, found[it.layer, it.method].heatmaps
