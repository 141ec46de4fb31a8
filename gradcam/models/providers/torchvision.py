"""Load torchvision's classifiers, detectors and segmenters, with their weights, transforms and class names."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn
from torchvision import models

from gradcam import plugins
from gradcam.errors import ModelError, find_similar_names, join_names, shorten
from gradcam.models.checkpoints.read import Checkpoint, describe_unsupported_model, read_checkpoint
from gradcam.models.preprocess import Preprocessing, WholeImage
from gradcam.models.providers import DEFAULT_MODEL, PROVIDERS, base
from gradcam.models.providers import custom as factory
from gradcam.models.providers import embedded as imagenet
from gradcam.models.providers.base import DEFAULT_SIZE, Blueprint, Parts, build_for, fetch, fill

WEIGHTS_NAME = re.compile(r"(\w+_Weights\.)?\w+")
SCALING_MODELS = ("googlenet", "inception_v3")  # Official weights expect `transform_input`.


def load(name: str, weights: Path | None) -> Parts:
    """Load `resnet50` or `resnet50:IMAGENET1K_V1`; `weights` may be a checkpoint, or the name of official weights.

    An official checkpoint of torchvision gets the preprocessing of its weights. Any other checkpoint gets the
    preprocessing of the weights in the name, or else of the model's best weights.
    """
    match = _find_model(name)
    if match is None:
        return factory.load(name, weights)
    name, enum, is_chosen = match
    task = find_task(name)
    if weights is not None and not weights.exists() and WEIGHTS_NAME.fullmatch(str(weights)):
        enum, weights = find_weights(name, str(weights)), None
    if weights is not None:
        if task == "classification":
            return _load_file(name, enum, weights, is_chosen)
        return _load_whole_image_model(name, enum, weights)
    path = find_cache_path(enum)
    if not path.exists():
        prefix = torch.hub.HASH_REGEX.search(path.name)
        fetch(enum.url, path, prefix.group(1) if prefix else None)
    try:
        checkpoint = read_checkpoint(path)
    except ModelError as error:
        advice = f"Delete the file to download it again from {enum.url}"
        raise ModelError(f"{str(error).rstrip('.')}. {advice}") from error
    if task != "classification":
        return _load_whole_image_model(name, enum, path)
    preprocess, labels = to_preprocessing(enum.transforms()), _categories(enum)
    model, _, _ = build_for(checkpoint, partial(_build, name, enum), len(labels))
    return Parts(model, preprocess, labels=labels, classes=len(labels), activation="softmax")


def _load_whole_image_model(name: str, enum: Any, weights: Path) -> Parts:
    """Load a detector or a segmenter with the checkpoint's number of classes. The model sees the whole image."""
    checkpoint, labels = read_checkpoint(weights), _categories(enum)
    classes = _count_outputs(name, checkpoint) or len(labels)
    model, notes = fill(checkpoint, partial(_build_whole_image_model, name, classes))
    if classes != len(labels):
        labels = [f"class {index}" for index in range(classes)]
    preprocess, task, transforms = WholeImage(), find_task(name), enum.transforms()
    if task == "segmentation":
        (side,), mean, std = transforms.resize_size, tuple(transforms.mean), tuple(transforms.std)
        preprocess = WholeImage(side, None, mean, std, transforms.interpolation.value)
    return Parts(model, preprocess, labels=labels, notes=notes, task=task)


def _count_outputs(name: str, checkpoint: Checkpoint) -> int | None:
    """Return a checkpoint's number of classes; None if it is unknown.

    The model is built for two and for three classes. The shapes that differ depend on the number of classes.
    """
    with torch.device("meta"):
        shapes = [dict(_build_whole_image_model(name, classes).named_parameters()) for classes in (2, 3)]
    for key, smaller in shapes[0].items():
        step = shapes[1][key].shape[0] - smaller.shape[0] if smaller.ndim else 0
        tensors = [value for file_key, value in checkpoint.tensors.items() if step and file_key.endswith(key)]
        if tensors and tensors[0].ndim and (tensors[0].shape[0] - smaller.shape[0]) % step == 0:
            return 2 + (tensors[0].shape[0] - smaller.shape[0]) // step
    return None


def _build_whole_image_model(name: str, classes: int) -> nn.Module:
    """Build the model without the auxiliary head of some segmenters, which is used only in training."""
    return models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)


def find_task(name: str) -> str:
    """Return the task of the model with this name."""
    if name in models.list_models(module=models.detection):
        return "detection"
    return "segmentation" if name in models.list_models(module=models.segmentation) else "classification"


def _load_file(name: str, enum: Any, weights: Path, is_chosen: bool) -> Parts:
    """Load the model with a checkpoint; `is_chosen` is True if the user chose the weights `enum` by name."""
    entries = {find_cache_path(entry).name: entry for entry in list_weights(name) if entry.meta.get("categories")}
    checkpoint, (file, criterion) = read_checkpoint(weights), base.recognise(weights, entries)
    if is_chosen and file is not None and entries[file] is not enum:
        file, criterion = None, ""
    enum = enum if file is None else entries[file]
    model, classes, notes = build_for(checkpoint, partial(_build, name, enum), imagenet.CLASSES)
    preprocess = to_preprocessing(enum.transforms())
    note = f"Using the preprocessing of {enum}, as requested."
    if not is_chosen or criterion:
        note = base.describe_preprocessing(weights, criterion, "torchvision", str(enum), preprocess)
    if criterion == "content":
        return Parts(model, preprocess, labels=_categories(enum), classes=classes, activation="softmax", notes=[note])
    return imagenet.name_classes(Parts(model, preprocess, classes=classes, notes=[*notes, note]))


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model, without its weights; raise `ModelError` for an unknown name."""
    match = _find_model(name)
    if match is None:
        return factory.plan(name)
    name, enum, _ = match
    if find_task(name) != "classification":
        return Blueprint(partial(_build_whole_image_model, name, len(_categories(enum))), DEFAULT_SIZE)
    return Blueprint(partial(_build, name, enum, imagenet.CLASSES), to_preprocessing(enum.transforms()).size)


def list_names() -> list[str]:
    """Return the names of torchvision's classifiers, detectors and segmenters."""
    return [name for module in (models, models.detection, models.segmentation) for name in models.list_models(module)]


def list_installed() -> dict[str, str]:
    """Return the models of installed packages, with their origins. Import no package, and skip reserved names."""
    entries = plugins.list_entry_points("models")
    reserved = {DEFAULT_MODEL, *list_names()} if entries else set()
    origins = {name: f", from {entry.dist.name}" if entry.dist else "" for name, entry in entries.items()}
    return {name: entry.value + origins[name] for name, entry in entries.items() if name not in reserved}


def list_weights(name: str) -> Any:
    """Return the enum of a model's weights."""
    return models.get_model_weights(name)


def find_cache_path(enum: Any) -> Path:
    """Return the path of the weights in torch hub's cache. The file need not exist."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(enum.url).path).name


def find_weights(name: str, weights_name: str) -> Any:
    """Return the weights with this name; "" means the best weights. Raise `ModelError` for an unknown name."""
    enum = list_weights(name)
    weights_name = weights_name.rpartition(".")[2]  # Accept ResNet50_Weights.IMAGENET1K_V1 too.
    if not weights_name or weights_name.upper() == "DEFAULT":
        return enum.DEFAULT
    member = {member.name.lower(): member for member in enum}.get(weights_name.lower())
    if member is None:
        offers = join_names(member.name for member in enum)
        raise ModelError(f"{name} has no weights {shorten(weights_name)}: choose one of {offers}.")
    _categories(member)
    return member


def _find_model(typed: str) -> tuple[str, Any, bool] | None:
    """Return the model's name, its weights, and whether the user named the weights; None for a custom function."""
    name, _, weights_name = typed.partition(":")
    if name in list_names():
        return name, find_weights(name, weights_name), bool(weights_name)
    if typed in plugins.list_entry_points("models"):
        return None
    with contextlib.suppress(ImportError, ValueError):
        if weights_name and importlib.util.find_spec(name) is not None:  # find_spec does not import the module.
            return None
    if description := describe_unsupported_model(Path(typed)):
        raise ModelError(f"{typed}: {description}.")
    offers = find_similar_names(name, [DEFAULT_MODEL, *list_names(), *plugins.list_entry_points("models")])
    hints = [f"Nearest: {join_names(offers)}." if offers else "", _guess_meaning(typed)]
    forms = ", ".join(provider.form for provider in PROVIDERS[1:-1])
    hint = " ".join(filter(None, hints)) or f"`gradcam models` lists all names. A model can also be given as {forms}."
    raise ModelError(f"There is no model {shorten(typed)}. {hint}")


def _guess_meaning(typed: str) -> str:
    path = Path(typed)
    if path.suffix.lower() in (".pth", ".pt", ".ckpt", ".safetensors", ".bin"):
        return f"A checkpoint needs an architecture: --model NAME --weights {typed}."
    if typed and path.is_dir():
        return f"For a folder, give hf:{typed} if transformers saved it, or timm:{typed} if timm did."
    if "/" in typed:
        return f"For a Hugging Face model, give hf:{typed}."
    own_function = "For your own function, give FILE.py:FUNCTION or MODULE:FUNCTION."
    return f"No module of this name was found. {own_function}" if ":" in typed else ""


def _build(name: str, enum: Any, classes: int) -> nn.Module:
    options: dict[str, Any] = {"num_classes": classes}
    if name in SCALING_MODELS:
        options |= {"transform_input": True, "init_weights": False, "aux_logits": False}
    if name.startswith("vit_"):
        options["image_size"] = enum.meta["min_size"][0]
    return models.get_model(name, weights=None, **options)


def _categories(enum: Any) -> list[str]:
    """Return the class names; raise `ModelError` for weights without a classifier."""
    if enum.meta.get("categories") is None:
        problem = f"The weights {enum} have no classifier, because their last layers are empty"
        raise ModelError(f"{problem}: choose other weights.")
    return list(enum.meta["categories"])


def to_preprocessing(transforms: Any) -> Preprocessing:
    """Convert torchvision's transforms to a `Preprocessing`."""
    (size,), (resize,), settings = transforms.crop_size, transforms.resize_size, transforms
    return Preprocessing((size, size), resize, tuple(settings.mean), tuple(settings.std), settings.interpolation.value)
