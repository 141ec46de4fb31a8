"""The classifier that comes with the package: EfficientNet-Lite0, ImageNet's 1000 classes. NOTICE.md says from where."""

from __future__ import annotations

import os
from importlib import resources
from typing import Any

import torch

from gradcam.classifiers.checkpoints import read_checkpoint
from gradcam.classifiers.embedded.network import EfficientNetLite0
from gradcam.classifiers.fitting import load_weights
from gradcam.classifiers.preprocessing import Preprocessing

HERE = resources.files(__name__)
WEIGHTS = "efficientnet_lite0.safetensors"
LABELS = "imagenet_labels.txt"


def load(weights: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The parts of its `Classifier`. `weights`: a checkpoint in place of its own, of the same 1000 classes."""
    with torch.device("meta"):  # nothing is drawn at random for weights that are about to be replaced
        model = EfficientNetLite0()
    if weights is not None:
        load_weights(model, read_checkpoint(weights))
    else:
        with resources.as_file(HERE / WEIGHTS) as path:
            load_weights(model, read_checkpoint(path))
    return {
        "model": model,
        "preprocess": Preprocessing(size=(224, 224), resize=256, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        "labels": (HERE / LABELS).read_text(encoding="utf-8").splitlines(),
        "classes": 1000,
        "layer": "layer4",
    }
