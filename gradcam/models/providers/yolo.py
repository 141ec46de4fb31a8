"""Load ultralytics models if ultralytics is installed. Because of its AGPL licence, it is not a dependency."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from gradcam import plugins
from gradcam.adapters.yolo import Letterbox, load_yolo
from gradcam.errors import ModelError
from gradcam.models.preprocess import Preprocessing
from gradcam.models.providers.base import Blueprint, Parts

# The steps of ultralytics' `classify_transforms`.
CLASSIFIER_PREPROCESSING = Preprocessing((224, 224), 224, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bilinear")


def load(name: str, weights: Path | None) -> Parts:
    """Load the network in a file such as `best.pt`; images are letterboxed, or cropped for a classifier."""
    if weights is not None:
        raise ModelError(f"yolo:{name} already names the weights: leave out --weights, or give yolo:OTHER.pt.")
    model, labels = _unpickle(name)
    if type(model).__name__ == "ClassificationModel":
        return Parts(model, CLASSIFIER_PREPROCESSING, labels=labels, task="classification")
    return Parts(model, Letterbox(), labels=labels, task="detection")


def plan(name: str) -> Blueprint:
    """Return the blueprint of the network in the file, with its weights."""
    return Blueprint(lambda: _unpickle(name)[0], (640, 640))


def _unpickle(name: str) -> tuple[nn.Module, list[str]]:
    plugins.register_code(f"yolo:{name}")  # The file is a pickle. Loading a pickle can run code.
    return load_yolo(name)
