"""Find the CAM methods that support a model, so that the page offers only these methods."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from gradcam.cam.methods.attention_capture import find_blocks, find_last
from gradcam.cam.methods.base import AttentionMethod
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, ModelError
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared

TASKS = {"finercam": "classification", "drise": "detection", "lens": "captioning"}  # Methods for a single task.
METHODS_OF_LAST_ATTENTION = ("grad-eclip",)  # All other attention methods need every attention block.


def list_general_methods() -> list[str]:
    """List the methods that every classifier supports."""
    return [name for name, method in METHODS.items() if method.place != "attention" and name not in TASKS]


def list_supported_methods(classifier: Classifier, prepared: Prepared, target: Any, reshape: Any = None) -> list[str]:
    """List the methods that support the model. One forward pass finds the attention blocks that can be recorded."""
    supported = {name for name, task in TASKS.items() if task == classifier.task}
    supported.update(list_general_methods())

    def find_attention(recorded: Any, log: Any, budget: Any) -> Tensor:
        for name, method in METHODS.items():
            if method.place == "attention":
                find = find_last if name in METHODS_OF_LAST_ATTENTION else find_blocks
                with contextlib.suppress(ModelError):
                    find(log, recorded)
                    supported.add(name)
        scores: Tensor = recorded.scored.values.detach()
        return scores[..., None, None]  # A method must return maps, so return unused maps of one cell.

    with contextlib.suppress(GradcamError):  # The page reports this error when it explains the image.
        method = AttentionMethod("attention", "find the attention", None, find_attention)
        classifier.compare(prepared, methods=[method], target=target, reshape=reshape)
    return [name for name in METHODS if name in supported]
