"""Segmenters of segmentation-models-pytorch, from a folder that its `save_pretrained` made."""

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
from gradcam.models.preprocess import ASSUMED, ASSUMED_GREY, WholePicture
from gradcam.models.providers.base import USUAL_SIZE, Blueprint, Parts, import_extra

SIDE = 512  # pixels of the shorter side, where nothing says what the model was trained with
WEIGHTS = "model.safetensors"


def load(name: str, weights: Path | None) -> Parts:
    """The model of a folder, with a checkpoint in place of its weights or not."""
    model = _build(name)
    notes = load_weights(model, read_checkpoint(weights if weights is not None else Path(name).expanduser() / WEIGHTS))
    return replace(parts := to_parts(model), notes=[*notes, *parts.notes])


def to_parts(model: Any) -> Parts:
    """Return a model with the mean and std of its encoder of timm, or else ImageNet's, and a note."""
    usual = ASSUMED_GREY if first_channels(model) == 1 else ASSUMED
    kind = "greyscale images" if usual is ASSUMED_GREY else "images"
    own: Any = next((it.pretrained_cfg for it in model.encoder.modules() if hasattr(it, "pretrained_cfg")), {})
    is_own = usual is ASSUMED and own.get("mean") is not None
    mean, std = (tuple(own["mean"]), tuple(own["std"])) if is_own else (usual.mean, usual.std)
    statistics = "" if is_own else ", and ImageNet's mean and std"
    note = f"Assumed {kind} with a shorter side of {SIDE} pixels{statistics}. Override with --size, --mean, --std."
    multiple = int(getattr(model.encoder, "output_stride", 32))  # of which the sides of its pictures have to be
    return Parts(model, WholePicture(SIDE, None, mean, std, multiple=multiple), notes=[note], task="segmentation")


def plan(name: str) -> Blueprint:
    """The model without its weights."""
    return Blueprint(partial(_build, name), USUAL_SIZE)


def _build(name: str) -> nn.Module:
    """Raises `ModelError` for a folder that holds no model's settings."""
    library = import_extra("segmentation_models_pytorch", "smp")
    file = Path(name).expanduser() / "config.json"
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind, options = settings.pop("_model_class"), settings
        own = {key: value for key, value in options.items() if not key.startswith("_")}
        model: nn.Module = getattr(library, kind)(**own | {"encoder_weights": None})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"smp:{name} cannot be built ({reason}): expected a folder written by a model's save_pretrained()."
        ) from error
    return model
