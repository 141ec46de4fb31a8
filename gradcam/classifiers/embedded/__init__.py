"""The classifier that comes with the package: EfficientNet-Lite0, ImageNet's 1000 classes. NOTICE.md says from where."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradcam.classifiers.embedded.network import EfficientNetLite0
from gradcam.classifiers.preprocessing import Preprocessing
from gradcam.errors import ModelError, join_names

HERE = resources.files(__name__)
WEIGHTS = "efficientnet_lite0.safetensors"
LABELS = "imagenet_labels.txt"


def load(weights: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The parts of its `Classifier`. `weights`: a safetensors file in place of its own, of the same 1000 classes."""
    with torch.device("meta"):  # nothing is drawn at random for weights that are about to be replaced
        model = EfficientNetLite0()
    if weights is not None:
        _load_weights(model, Path(weights))
    else:
        with resources.as_file(HERE / WEIGHTS) as path:
            _load_weights(model, path)
    return {
        "model": model,
        "preprocess": Preprocessing(size=(224, 224), resize=256, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        "labels": (HERE / LABELS).read_text(encoding="utf-8").splitlines(),
        "classes": 1000,
        "layer": "layer4",
    }


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: cannot be read as safetensors ({reason})") from error
    expected = model.state_dict()
    wrong = [name for name in expected if name not in tensors or tensors[name].shape != expected[name].shape]
    wrong += [name for name in tensors if name not in expected]
    if wrong:
        raise ModelError(
            f"{path}: does not fit {type(model).__name__} with 1000 classes; {len(wrong)} tensors are missing, unexpected "
            f"or of another shape, the first {join_names(wrong[:3])}"
        )
    as_float = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    model.load_state_dict(as_float, assign=True)
