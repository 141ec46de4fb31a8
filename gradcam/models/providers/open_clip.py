"""Load models of open_clip: an architecture by name, with a checkpoint of this architecture."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gradcam.errors import ModelError, find_similar_names, join_names, shorten
from gradcam.models.checkpoints.fit import load_weights
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.preprocess import Preprocessing
from gradcam.models.providers.base import Blueprint, Parts, import_extra


def load(name: str, weights: Path | None) -> Parts:
    """Load an architecture such as `ViT-B-32`; raise `ModelError` if it is unknown or `weights` is None."""
    library = import_extra("open_clip", "open_clip")
    if weights is None:
        raise ModelError(f"open_clip:{name} needs a checkpoint: give --weights FILE (weights= in Python).")
    model: Any = _build(library, name)
    preprocess = to_preprocessing(model.visual.preprocess_cfg)
    return Parts(model, preprocess, notes=load_weights(model, read_checkpoint(weights)), task="matching")


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model, without its weights."""
    library = import_extra("open_clip", "open_clip")
    side = _find_settings(library, name)["vision_cfg"].get("image_size", 224)
    return Blueprint(partial(_build, library, name), (side, side) if isinstance(side, int) else (side[0], side[1]))


def _find_settings(library: Any, name: str) -> dict[str, Any]:
    names = library.list_models()
    settings = library.get_model_config(name) if name in names else None
    if settings is None:
        offers = find_similar_names(name, names) or names[:5]
        raise ModelError(f"open_clip has no architecture {shorten(name)}. Nearest: {join_names(offers)}.")
    return settings


def _build(library: Any, name: str) -> nn.Module:
    """Build the model; raise `ModelError` if its text encoder is from a hub, or if open_clip fails."""
    if _find_settings(library, name).get("text_cfg", {}).get("hf_model_name"):
        problem = f"open_clip would download the text encoder of {name} from a hub"
        raise ModelError(f"{problem}: give the model as hf:FOLDER instead.")
    try:
        return library.create_model(name, pretrained=None)
    except Exception as error:  # Constructors raise errors of any type.
        raise ModelError(f"open_clip cannot build {name}: {' '.join(str(error).split())[:300]}") from error


def to_preprocessing(settings: dict[str, Any]) -> Preprocessing:
    """Convert open_clip's transforms for inference to a `Preprocessing`; raise `ModelError` for transforms that pad."""
    side, mode = settings["size"], settings.get("resize_mode", "shortest")
    size = (side, side) if isinstance(side, int) else (side[0], side[1])
    if mode == "longest":
        problem = f"open_clip's resize mode '{mode}' pads images, which is not supported"
        raise ModelError(f"{problem}: give --size and --crop.")
    interpolation = "bilinear" if settings.get("interpolation") == "bilinear" else "bicubic"
    resize = size if mode == "squash" else min(size)
    return Preprocessing(size, resize, tuple(settings["mean"]), tuple(settings["std"]), interpolation)
