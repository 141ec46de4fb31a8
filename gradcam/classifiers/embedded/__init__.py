"""The classifier that comes with the package: EfficientNet-Lite0, ImageNet's 1000 classes. NOTICE.md says from where."""

from __future__ import annotations

from importlib import resources

import torch
from torch import nn

from gradcam.classifiers.embedded.network import EfficientNetLite0
from gradcam.classifiers.preprocessing import Preprocessing

HERE = resources.files(__name__)
WEIGHTS = "efficientnet_lite0.safetensors"
LABELS = "imagenet_labels.txt"
PREPROCESSING = Preprocessing(size=(224, 224), resize=256, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
LAYER = "layer4"  # of the candidates, where all methods together localise best: scripts/choose_defaults.md
# `layer4` is a linear bottleneck. Behind the next activation, these localise two to five times as well: README.
LAYER_FOR_POSITIVE = "head.0"


def build(classes: int) -> nn.Module:
    """The network without weights, for that many classes."""
    with torch.device("meta"):  # nothing is drawn at random for weights that are about to be replaced
        return EfficientNetLite0(classes)


def read_labels() -> list[str]:
    """The names of ImageNet's 1000 classes."""
    return (HERE / LABELS).read_text(encoding="utf-8").splitlines()
