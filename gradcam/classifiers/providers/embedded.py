"""The model that comes with the package."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TypeVar

from gradcam.classifiers.checkpoints import read_checkpoint
from gradcam.classifiers.embedded import HERE, LAYER, LAYER_FOR_POSITIVE, PREPROCESSING, WEIGHTS, build, read_labels
from gradcam.classifiers.embedded.network import EfficientNetLite0
from gradcam.classifiers.providers.blueprint import Blueprint
from gradcam.classifiers.providers.imagenet import CLASSES, name_classes
from gradcam.classifiers.providers.parts import Parts
from gradcam.classifiers.providers.weights import build_for

Found = TypeVar("Found", Parts, Blueprint)


def load(name: str, weights: Path | None) -> Parts:
    """Its parts, with a checkpoint in place of its weights or not; `name` is the only one that there is.

    Raises `ModelError` for a checkpoint that does not fit.
    """
    if weights is not None:
        model, classes, notes = build_for(read_checkpoint(weights), build, CLASSES)
        found = Parts(model, PREPROCESSING, classes=classes, notes=notes)
        return name_classes(_with_layers(found))
    with resources.as_file(HERE / WEIGHTS) as path:
        model, _, _ = build_for(read_checkpoint(path), build, CLASSES)
    found = Parts(model, PREPROCESSING, labels=read_labels(), classes=CLASSES, activation="softmax")
    return _with_layers(found)


def plan(name: str) -> Blueprint:
    """The model, with random weights where nobody keeps it from drawing them."""
    build = partial(EfficientNetLite0, CLASSES)
    return _with_layers(Blueprint(build, PREPROCESSING.size))


def _with_layers(found: Found) -> Found:
    return replace(found, layer=LAYER, layer_for_positive=LAYER_FOR_POSITIVE)
