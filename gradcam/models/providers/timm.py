"""Load timm models: by name, from a folder that timm saved, or from the hub."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradcam.errors import ModelError, find_similar_names, join_names, shorten
from gradcam.models.checkpoints.fit import load_weights
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.preprocess import Preprocessing
from gradcam.models.providers import base
from gradcam.models.providers.base import Blueprint, Parts, import_extra
from gradcam.models.providers.embedded import CLASSES, name_classes, read_labels

SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")
PICKLES = (".pth", ".pt", ".bin", ".tar")
# The names of weights files on the hub, in timm's order. Some versions of timm would run code in such a file.
# Therefore, this module reads the file first, and rejects files with code.
FILES = ("model.safetensors", "pytorch_model.bin")


def load(name: str, weights: Path | None, task: str | None = None) -> Parts:
    """Load `resnet18.a1_in1k`, `resnet18`, a folder or `hf-hub:OWNER/NAME`, with its own weights or a checkpoint.

    For the task "matching", the model is built without a classifier, so that its output is features.
    """
    timm = import_extra("timm", "timm")
    name = _find_source(timm, name)
    tagged_name = f"{name.partition('.')[0]}.{weights}"
    if weights is not None and not weights.exists() and tagged_name in _list_tagged(timm, name):
        name, weights = tagged_name, None
    if weights is not None:
        return _load_file(timm, name, weights, task)
    model = _build(timm, name, 0 if task == "matching" else None, **_find_weights(timm, name))
    classes = int(getattr(model, "num_classes", 0))
    if not classes and task in (None, "matching"):
        return replace(_to_parts(timm, model, None), labels=None, task="matching")
    if not classes:
        advice = "choose another model, or give a classifier's checkpoint with --weights."
        raise ModelError(f"timm's {name} has no classifier: {advice}")
    parts = _to_parts(timm, model, classes)
    if name.startswith("local-dir:"):
        return _name_classes(parts)
    subset = timm.data.infer_imagenet_subset(model) if parts.labels is None else None
    if subset is None:
        return parts
    labels = read_labels() if classes == CLASSES else timm.data.ImageNetInfo(subset).label_descriptions()
    return replace(parts, labels=labels, activation="softmax")


def _load_file(timm: Any, name: str, weights: Path, task: str | None) -> Parts:
    checkpoint = read_checkpoint(weights)
    own_classes = None if task else getattr(timm.get_pretrained_cfg(name), "num_classes", None)
    if task == "matching" or own_classes == 0:
        model: Any = _build(timm, name, 0)
        try:
            notes = load_weights(model, checkpoint)
        # If loading fails, the checkpoint has a head. Load it into a model with a head, and then remove the head.
        except ModelError:
            model, _, notes = base.build_for(checkpoint, partial(_build, timm, name), CLASSES)
            model.reset_classifier(0)
        return replace(_to_parts(timm, model, None), labels=None, task="matching", notes=notes)
    # To recognise the file, compare its name and hash with all tags of the model, or with the tag in the name.
    tagged = [tagged_name for tagged_name in _list_tagged(timm, name) if "." not in name or tagged_name == name]
    files = {(timm.get_pretrained_cfg(tagged_name).url or "").rpartition("/")[2]: tagged_name for tagged_name in tagged}
    file, criterion = base.recognise(weights, filter(None, files))
    name = name if file is None else files[file]
    model, classes, notes = base.build_for(checkpoint, partial(_build, timm, name), CLASSES)
    parts = _to_parts(timm, model, classes)
    tag = (getattr(model, "pretrained_cfg", None) or {}).get("tag")
    display_name = f"timm's {name}.{tag}" if tag and "." not in name and ":" not in name else f"timm's {name}"
    preprocess: Any = parts.preprocess
    note = base.describe_preprocessing(weights, criterion, "timm", display_name, preprocess)
    return _name_classes(replace(parts, notes=[*notes, note]))


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model, without its weights."""
    timm = import_extra("timm", "timm")
    name = _find_source(timm, name)
    build = partial(_build, timm, name, pretrained=False)
    settings = None if name.startswith(SOURCES) else timm.get_pretrained_cfg(name)
    shape = settings.input_size if settings else timm.data.resolve_model_data_config(build())["input_size"]
    return Blueprint(build, tuple(shape[1:]), shape[0])


def _find_source(timm: Any, name: str) -> str:
    """Return the name for timm (local-dir:FOLDER for local files); raise `ModelError` if there is no such model."""
    is_hub = name.startswith(SOURCES[:2])
    if name.startswith("local-dir:") or (os.sep in name and not is_hub) or (name and Path(name).is_dir()):
        folder = Path(name.removeprefix("local-dir:")).expanduser()
        if not (folder / "config.json").is_file():
            problem = "has no config.json" if folder.is_dir() else "is not a folder"
            raise ModelError(f"{folder}: {problem}, expected a folder written by timm.models.save_for_hf().")
        for path in [file for file in map(folder.joinpath, FILES) if file.is_file()][:1]:
            read_checkpoint(path)
        return f"local-dir:{folder}"
    if is_hub:
        repository = name.partition(":")[2]
        config, weights = _find_cached(repository, ["config.json"]), _find_cached(repository, FILES)
        if config is not None and weights is not None:
            read_checkpoint(weights)
            return f"local-dir:{config.parent}"
        _require(f"{base.hub_address()}/{repository}", base.hub_address())
        return name
    is_model = timm.is_model(name.partition(".")[0])
    known_names = _list_tagged(timm, name) if is_model else timm.list_models()
    if is_model and ("." not in name or name in known_names):
        return name
    offers = find_similar_names(name, known_names) or (known_names if is_model else [])
    hint = f"Nearest: {join_names(offers)}." if offers else "timm.list_models() lists them."
    raise ModelError(f"timm has no model {shorten(name)}. {hint}")


def _list_tagged(timm: Any, name: str) -> list[str]:
    """Return the model's name with each tag of its weights; an empty list for a folder or a hub repository."""
    return [] if name.startswith(SOURCES) else timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)


def _find_weights(timm: Any, name: str) -> dict[str, Any]:
    """Return timm's options to load or download weights; raise `ModelError` if there are no weights."""
    if name.startswith(SOURCES):
        return {"pretrained": True}
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        advice = "give --weights FILE (weights= in Python), or choose another model."
        raise ModelError(f"timm has no weights for {name}: {advice}")
    if config.hf_hub_id:
        cached = _find_cached(config.hf_hub_id, [config.hf_hub_filename] if config.hf_hub_filename else FILES)
        if cached is not None:
            read_checkpoint(cached)
            return {"pretrained": True, "pretrained_cfg_overlay": {"file": str(cached)}}
        _require(f"{base.hub_address()}/{config.hf_hub_id}", base.hub_address())
        return {"pretrained": True}
    path = Path(torch.hub.get_dir()) / "checkpoints" / config.url.rpartition("/")[2]
    if not path.exists():
        _require(config.url)
    elif path.suffix in PICKLES:
        read_checkpoint(path)
    return {"pretrained": True}


def _find_cached(repository: str, names: Sequence[str]) -> Path | None:
    hub = import_extra("huggingface_hub", "timm")
    repository, _, revision = repository.partition("@")
    paths = (hub.try_to_load_from_cache(repository, name, revision=revision or None) for name in names)
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def _require(source: str, address: str | None = None) -> None:
    """Raise `ModelError` if the server does not respond. Without this check, timm would retry for nearly a minute."""
    if reason := base.reason_unreachable(address or source):
        problem = f"The weights are not in the cache and cannot be downloaded ({reason}). Download them from {source}"
        advice = "on another computer, and give them with --weights FILE (weights= in Python)."
        raise ModelError(f"{problem} {advice} {base.NO_DOWNLOAD_HINT}")


def _build(timm: Any, name: str, classes: int | None = None, **options: Any) -> nn.Module:
    """Build timm's model; convert any error to `ModelError`."""
    try:
        return timm.create_model(name, num_classes=classes, **options)
    except Exception as error:  # timm raises errors of many types.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"timm cannot build {shorten(name)}: {reason}") from error


def _to_parts(timm: Any, model: Any, classes: int | None) -> Parts:
    preprocess, config = to_preprocessing(timm.data.resolve_model_data_config(model)), model.pretrained_cfg
    names, descriptions = config.get("label_names"), config.get("label_descriptions") or {}
    labels = [str(descriptions.get(name, name)) for name in names] if names else None
    return Parts(model, preprocess, labels=labels, classes=classes)


def _name_classes(parts: Parts) -> Parts:
    """Return the parts with saved class names. If there are none, use ImageNet's names if the number of classes fits."""
    is_named = parts.labels is not None and len(parts.labels) == parts.classes
    return parts if is_named else name_classes(replace(parts, labels=None))


def read_settings(model: nn.Module, settings: dict[str, Any]) -> Preprocessing:
    """Return the preprocessing in a model's `pretrained_cfg`, with the image size of the model's constructor."""
    defaults = {"interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}  # as in timm
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or settings["input_size"][1:]
    settings = {key: value for key, value in settings.items() if value}
    return to_preprocessing(defaults | settings | {"input_size": (None, *size)})


def to_preprocessing(config: dict[str, Any]) -> Preprocessing:
    """Convert timm's transform for a data config to a `Preprocessing`; raise `ModelError` if the transform pads."""
    size, mode = tuple(config["input_size"][1:]), config["crop_mode"]
    scaled = tuple(math.floor(side / config["crop_pct"]) for side in size)
    if mode == "border" or (mode == "center" and scaled[0] != scaled[1]):
        problem = f"timm pads images for this model (crop mode '{mode}', {size[0]} x {size[1]} pixels)"
        advice = "load the model with your own function, and give --size and --crop."
        raise ModelError(f"{problem}, which is not supported: {advice}")
    interpolation = "bilinear" if config["interpolation"] == "random" else config["interpolation"]
    resize = scaled if mode == "squash" else scaled[0]
    return Preprocessing(size, resize, tuple(config["mean"]), tuple(config["std"]), interpolation)
