"""Complete names when the user presses Tab. This module must not import torch, because the import takes seconds."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

TORCHVISION_FOLDERS = (".", "detection", "segmentation")  # folders of torchvision.models
MODEL_PREFIXES = ("timm:", "hf:", "open_clip:", "smp:", "yolo:")  # Model names of other libraries have a prefix.

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete(find: Callable[[click.Context], Iterable[str]]) -> Complete:
    """Return a function that completes the last name of a comma-separated list. `find` returns all names."""

    def offer(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        before, comma, prefix = typed.rpartition(",")
        return [CompletionItem(before + comma + name) for name in find(context) if name.startswith(prefix)]

    return offer


def list_models(context: click.Context) -> list[str]:
    """List the embedded model, the torchvision models and the prefixes of other model names.

    The function searches torchvision's source files for model names, because importing torchvision would import torch.
    """
    package = importlib.util.find_spec("torchvision")
    folders = (package.submodule_search_locations or []) if package else []
    names = set()
    for folder in folders:
        for file in (
            path for folder_name in TORCHVISION_FOLDERS for path in Path(folder, "models", folder_name).glob("*.py")
        ):
            text = file.read_text(encoding="utf-8")
            names |= set(re.findall(r"^@register_model\(.*\)\n(?:[@ )].*\n)*def (\w+)", text, re.MULTILINE))
    return [_embedded("*.safetensors").stem, *sorted(names), *MODEL_PREFIXES]


def list_layers(context: click.Context) -> list[str]:
    """List the layers with weights in a .safetensors file. For models without such a file, list nothing."""
    weights, model = context.params.get("weights"), context.params.get("model")
    file = _embedded("*.safetensors")
    if weights is not None:
        file = Path(weights)
    elif model not in (None, file.stem):
        return []
    if file.suffix != ".safetensors" or not file.is_file():
        return []
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    names = [name.split(".")[:-1] for name in header if name != "__metadata__"]
    return list(dict.fromkeys(".".join(parts[:count]) for parts in names for count in range(1, len(parts) + 1)))


def list_classes(context: click.Context) -> list[str]:
    """List the labels of the embedded model or of a .txt file. Spaces become underscores, to avoid quotes."""
    labels, model = context.params.get("labels"), context.params.get("model")
    if labels is None and model not in (None, _embedded("*.safetensors").stem):
        return []
    file = _embedded("imagenet_labels.txt") if labels is None else Path(labels)
    if file.suffix != ".txt" or not file.is_file():
        return []
    return [label.replace(" ", "_") for label in file.read_text(encoding="utf-8").splitlines()]


def list_colormaps(context: click.Context) -> list[str]:
    """List the names of OpenCV's colour maps."""
    from gradcam.images.draw import COLORMAPS

    return list(COLORMAPS)


def _embedded(pattern: str) -> Path:
    return next(Path(__file__).parent.parent.rglob(pattern))
