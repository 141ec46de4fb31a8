"""Load segmentation-models-pytorch segmenters from a folder written by `save_pretrained`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gradcam.errors import ModelError
from gradcam.models.checkpoints.fit import load_weights
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.device import first_channels
from gradcam.models.preprocess import ASSUMED, ASSUMED_GREY, WholeImage
from gradcam.models.providers.base import DEFAULT_SIZE, Blueprint, Parts, import_extra

SHORTER_SIDE = 512  # pixels; the settings do not contain the training size
WEIGHTS = "model.safetensors"


def load(name: str, weights: Path | None) -> Parts:
    """Load the model in a folder, with its own weights or a checkpoint."""
    model = _build(name)
    notes = load_weights(model, read_checkpoint(weights if weights is not None else Path(name).expanduser() / WEIGHTS))
    return replace(parts := to_parts(model), notes=[*notes, *parts.notes])


def to_parts(model: Any) -> Parts:
    """Return a model's parts and a note. Use the timm encoder's mean and std, or else ImageNet's."""
    default = ASSUMED_GREY if first_channels(model) == 1 else ASSUMED
    kind = "greyscale images" if default is ASSUMED_GREY else "images"
    timm_models = (module for module in model.encoder.modules() if hasattr(module, "pretrained_cfg"))
    settings: Any = next((module.pretrained_cfg for module in timm_models), {})
    has_statistics = default is ASSUMED and settings.get("mean") is not None
    mean, std = (tuple(settings["mean"]), tuple(settings["std"])) if has_statistics else (default.mean, default.std)
    statistics = "" if has_statistics else ", and ImageNet's mean and std"
    assumption = f"Assumed {kind} with a shorter side of {SHORTER_SIDE} pixels{statistics}"
    notes = [f"{assumption}. Override with --size, --mean, --std."]
    multiple = int(getattr(model.encoder, "output_stride", 32))  # input sides must be multiples of this number
    return Parts(model, WholeImage(SHORTER_SIDE, None, mean, std, multiple=multiple), task="segmentation", notes=notes)


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model, without its weights."""
    return Blueprint(partial(_build, name), DEFAULT_SIZE)


def _build(name: str) -> nn.Module:
    """Build the model from the settings in its folder; raise `ModelError` if there are none."""
    library = import_extra("segmentation_models_pytorch", "smp")
    file = Path(name).expanduser() / "config.json"
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        options = {key: value for key, value in settings.items() if not key.startswith("_")}
        return getattr(library, settings["_model_class"])(**options | {"encoder_weights": None})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        expected = "a folder written by a model's save_pretrained()."
        raise ModelError(f"smp:{name} cannot be built ({reason}): expected {expected}") from error
