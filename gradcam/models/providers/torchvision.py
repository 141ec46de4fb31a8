"""torchvision's models for classification, detection and segmentation, with their weights, transforms and categories."""

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
from gradcam.errors import ModelError, join_names, nearest, shorten
from gradcam.models.checkpoints.read import Checkpoint, describe_unsupported_model, read_checkpoint
from gradcam.models.preprocess import Preprocessing, WholePicture
from gradcam.models.providers import DEFAULT, PROVIDERS
from gradcam.models.providers import embedded as imagenet
from gradcam.models.providers import own as factory
from gradcam.models.providers.base import (
    USUAL_SIZE,
    Blueprint,
    Parts,
    build_for,
    describe_preprocessing,
    fetch,
    fill,
    recognise,
)

NAME_OF_WEIGHTS = re.compile(r"(\w+_Weights\.)?\w+")
WITH_OWN_SCALE = ("googlenet", "inception_v3")  # their weights expect pictures scaled in the model


def load(name: str, weights: Path | None) -> Parts:
    """`resnet50`, or `resnet50:IMAGENET1K_V1`, with those weights, or others of its by name, or with a checkpoint. A
    checkpoint that is one of torchvision's own files is prepared for as those weights are; any other as for the weights
    that are named, or the model's best."""
    found = _find_model(name)
    if found is None:
        return factory.load(name, weights)
    name, enum, is_chosen = found
    task = find_task_of(name)
    if weights is not None and not weights.exists() and NAME_OF_WEIGHTS.fullmatch(str(weights)):
        enum, weights = find_weights(name, str(weights)), None
    if weights is not None:
        return (
            _load_file(name, enum, weights, is_chosen)
            if task == "classification"
            else _load_places(name, enum, weights)
        )
    path = cached_file(enum)
    if not path.exists():
        prefix = torch.hub.HASH_REGEX.search(path.name)
        fetch(enum.url, path, prefix.group(1) if prefix else None)
    try:
        checkpoint = read_checkpoint(path)
    except ModelError as error:
        what = str(error).rstrip(".")
        raise ModelError(f"{what}. Delete the file to download it again from {enum.url}") from error
    if task != "classification":
        return _load_places(name, enum, path)
    preprocess, labels = to_preprocessing(enum.transforms()), _categories(enum)
    model, _, _ = build_for(checkpoint, partial(_build, name, enum), len(labels))
    return Parts(model, preprocess, labels=labels, classes=len(labels), activation="softmax")


def _load_places(name: str, enum: Any, weights: Path) -> Parts:
    """A detector or a segmenter, which is shown all of a picture; the number of classes is the checkpoint's."""
    checkpoint, labels = read_checkpoint(weights), _categories(enum)
    classes = _count_outputs(name, checkpoint) or len(labels)
    model, notes = fill(checkpoint, partial(_build_places, name, classes))
    if classes != len(labels):
        labels = [f"class {index}" for index in range(classes)]
    if find_task_of(name) == "detection":
        return Parts(model, WholePicture(), labels=labels, notes=notes, task="detection")
    transforms = enum.transforms()
    (side,) = transforms.resize_size
    shown = WholePicture(side, None, tuple(transforms.mean), tuple(transforms.std), transforms.interpolation.value)
    return Parts(model, shown, labels=labels, notes=notes, task="segmentation")


def _count_outputs(name: str, checkpoint: Checkpoint) -> int | None:
    """How many classes a checkpoint has: told by the tensors that are larger where there is a class more."""
    with torch.device("meta"):
        shapes = [dict(_build_places(name, classes).named_parameters()) for classes in (2, 3)]
    for key, small in shapes[0].items():
        step = shapes[1][key].shape[0] - small.shape[0] if small.ndim else 0
        found = next((it for own, it in checkpoint.tensors.items() if own.endswith(key)), None) if step else None
        if found is not None and found.ndim and (found.shape[0] - small.shape[0]) % step == 0:
            return 2 + (found.shape[0] - small.shape[0]) // step
    return None


def _build_places(name: str, classes: int) -> nn.Module:
    """Without the auxiliary head of some segmenters, which only training reads, and not every checkpoint has."""
    return models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)


def find_task_of(name: str) -> str:
    """What the model of that name does."""
    if name in models.list_models(module=models.detection):
        return "detection"
    return "segmentation" if name in models.list_models(module=models.segmentation) else "classification"


def _load_file(name: str, enum: Any, weights: Path, is_chosen: bool) -> Parts:
    """The model with a checkpoint; `is_chosen`: whether a person named the weights `enum`, whose preprocessing is taken."""
    entries = {cached_file(entry).name: entry for entry in list_weights(name) if entry.meta.get("categories")}
    checkpoint, found = read_checkpoint(weights), recognise(weights, entries)
    if is_chosen and found is not None and entries[found.name] is not enum:
        found = None
    enum = enum if found is None else entries[found.name]
    model, classes, notes = build_for(checkpoint, partial(_build, name, enum), imagenet.CLASSES)
    preprocess = to_preprocessing(enum.transforms())
    note = f"Using the preprocessing of {enum}, as requested."
    if not is_chosen or found is not None:
        note = describe_preprocessing(weights, found, "torchvision", str(enum), preprocess)
    if found is not None and found.is_certain:
        return Parts(model, preprocess, labels=_categories(enum), classes=classes, activation="softmax", notes=[note])
    return imagenet.name_classes(Parts(model, preprocess, classes=classes, notes=[*notes, note]))


def plan(name: str) -> Blueprint:
    """The model without its weights. Raises `ModelError` for an unknown name."""
    found = _find_model(name)
    if found is None:
        return factory.plan(name)
    name, enum, _ = found
    if find_task_of(name) != "classification":
        return Blueprint(partial(_build_places, name, len(_categories(enum))), USUAL_SIZE)
    return Blueprint(partial(_build, name, enum, imagenet.CLASSES), to_preprocessing(enum.transforms()).size)


def list_names() -> list[str]:
    """The names of torchvision's models: those that classify, detectors and segmenters."""
    return [name for module in (models, models.detection, models.segmentation) for name in models.list_models(module)]


def list_installed() -> dict[str, str]:
    """The models of installed packages, each with where it is from, none imported; but for names that are taken."""
    entries = plugins.installed("models")
    taken = {DEFAULT, *list_names()} if entries else set()
    found = {name: entry for name, entry in entries.items() if name not in taken}
    return {name: it.value + (f", from {it.dist.name}" if it.dist else "") for name, it in found.items()}


def list_weights(name: str) -> Any:
    """The enum of a model's weights."""
    return models.get_model_weights(name)


def cached_file(enum: Any) -> Path:
    """Where the file of weights lies, or will, in torch hub's cache."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(enum.url).path).name


def find_weights(name: str, wanted: str) -> Any:
    """The weights that are called so, or the model's best. Raises `ModelError` for unknown ones."""
    enum = list_weights(name)
    wanted = wanted.rpartition(".")[2]  # people also type ResNet50_Weights.IMAGENET1K_V1
    if not wanted or wanted.upper() == "DEFAULT":
        return enum.DEFAULT
    found = {member.name.lower(): member for member in enum}.get(wanted.lower())
    if found is None:
        offers = join_names(member.name for member in enum)
        raise ModelError(f"{name} has no weights {shorten(wanted)}: choose one of {offers}.")
    _categories(found)
    return found


def _find_model(typed: str) -> tuple[str, Any, bool] | None:
    """The model's name, its weights' enum, and whether these were named; None for a package's or a module's function."""
    name, _, wanted = typed.partition(":")
    if name in list_names():
        return name, find_weights(name, wanted), bool(wanted)
    if typed in plugins.installed("models"):
        return None
    with contextlib.suppress(ImportError, ValueError):
        if wanted and importlib.util.find_spec(name) is not None:  # which does not import it
            return None
    if other := describe_unsupported_model(Path(typed)):
        raise ModelError(f"{typed}: {other}.")
    offers = nearest(name, [DEFAULT, *list_names(), *plugins.installed("models")])
    hint = " ".join([*([f"Nearest: {join_names(offers)}."] if offers else []), *_guess_meaning(typed)])
    forms = ", ".join(provider.form for provider in PROVIDERS[1:-1])
    hint = hint or f"`gradcam models` lists all names. A model can also be given as {forms}."
    raise ModelError(f"There is no model {shorten(typed)}. {hint}")


def _guess_meaning(typed: str) -> list[str]:
    path = Path(typed)
    if path.suffix.lower() in (".pth", ".pt", ".ckpt", ".safetensors", ".bin"):
        return [f"A checkpoint needs an architecture: --model NAME --weights {typed}."]
    if typed and path.is_dir():
        return [f"For a folder, give hf:{typed} if transformers saved it, or timm:{typed} if timm did."]
    if "/" in typed:
        return [f"For a Hugging Face model, give hf:{typed}."]
    if ":" in typed:
        return ["No module of this name was found. For your own function, give FILE.py:FUNCTION or MODULE:FUNCTION."]
    return []


def _build(name: str, enum: Any, classes: int) -> nn.Module:
    options: dict[str, Any] = {"num_classes": classes}
    if name in WITH_OWN_SCALE:
        options |= {"transform_input": True, "init_weights": False, "aux_logits": False}
    if name.startswith("vit_"):
        options["image_size"] = enum.meta["min_size"][0]
    return models.get_model(name, weights=None, **options)


def _categories(enum: Any) -> list[str]:
    """The classes' names. Raises `ModelError` for weights that are not a classifier's."""
    if enum.meta.get("categories") is None:
        raise ModelError(
            f"The weights {enum} have no classifier, because their last layers are empty: choose other weights."
        )
    return list(enum.meta["categories"])


def to_preprocessing(transforms: Any) -> Preprocessing:
    """What torchvision's own transforms do."""
    (size,), (resize,), it = transforms.crop_size, transforms.resize_size, transforms
    return Preprocessing((size, size), resize, tuple(it.mean), tuple(it.std), it.interpolation.value)
