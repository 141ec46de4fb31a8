"""The model that comes with the package."""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import Path

from gradcam.classifiers import embedded
from gradcam.classifiers.checkpoints import read_checkpoint
from gradcam.classifiers.embedded.network import EfficientNetLite0
from gradcam.classifiers.providers import imagenet
from gradcam.classifiers.providers.blueprint import Blueprint
from gradcam.classifiers.providers.parts import Parts
from gradcam.classifiers.providers.weights import build_for


def load(name: str, weights: Path | None) -> Parts:
    """Its parts, with a checkpoint in place of its weights or not; `name` is the only one that there is.

    Raises `ModelError` for a checkpoint that does not fit.
    """
    if weights is not None:
        model, classes, notes = build_for(read_checkpoint(weights), embedded.build, imagenet.CLASSES)
        found = Parts(model, embedded.PREPROCESSING, classes=classes, layer=embedded.LAYER, notes=notes)
        return imagenet.name_classes(found)
    with resources.as_file(embedded.HERE / embedded.WEIGHTS) as path:
        model, _, _ = build_for(read_checkpoint(path), embedded.build, imagenet.CLASSES)
    return Parts(
        model,
        embedded.PREPROCESSING,
        labels=embedded.read_labels(),
        classes=imagenet.CLASSES,
        layer=embedded.LAYER,
        activation="softmax",
    )


def plan(name: str) -> Blueprint:
    """The model, with random weights where nobody keeps it from drawing them."""
    build = partial(EfficientNetLite0, imagenet.CLASSES)
    return Blueprint(build, embedded.PREPROCESSING.size, layer=embedded.LAYER)
