"""Read the inputs that a user passes to a model by name, such as the output of a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gradcam.hooks.containers import Batch, to_batch


def to_model_batch(model: nn.Module, inputs: Mapping[str, Any]) -> Batch:
    """Return named inputs as a batch. A vision-language model's images may be in pieces.

    Raises `ImageError` as `to_batch` does, and if the inputs do not fit the model.
    """
    if "pixel_values" in inputs:
        from gradcam.adapters import find_family
        from gradcam.adapters.vision_language import VisionLanguageModel

        family = find_family(model, VisionLanguageModel)
        if family is not None:
            return family.to_pieces(dict(inputs))
    return to_batch(inputs)
