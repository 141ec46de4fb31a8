"""What the shell offers when Tab is pressed. Nothing here imports torch, which would take seconds."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

PLACES = (".", "detection", "segmentation")  # of torchvision's models
FORMS = ("timm:", "hf:", "open_clip:", "smp:", "yolo:")  # how other names begin

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete(find: Callable[[click.Context], Iterable[str]]) -> Complete:
    """Offer what is found for what was typed so far; of names with commas between them, for the last."""

    def offer(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        before, comma, last = typed.rpartition(",")
        return [CompletionItem(before + comma + name) for name in find(context) if name.startswith(last)]

    return offer


def list_models(context: click.Context) -> list[str]:
    """The embedded model, torchvision's, as the files of that package define them, and forms of other names."""
    package = importlib.util.find_spec("torchvision")
    folders = (package.submodule_search_locations or []) if package else []
    found = set()
    for folder in folders:
        for file in (path for place in PLACES for path in Path(folder, "models", place).glob("*.py")):
            text = file.read_text(encoding="utf-8")
            found |= set(re.findall(r"^@register_model\(.*\)\n(?:[@ )].*\n)*def (\w+)", text, re.MULTILINE))
    return [_embedded("*.safetensors").stem, *sorted(found), *FORMS]


def list_layers(context: click.Context) -> list[str]:
    """Layers with weights, of the embedded model or in a .safetensors file that was given; of any other model, none."""
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
    """The embedded model's labels, or those of a file with one on each line; in a form that needs no quotes."""
    labels, model = context.params.get("labels"), context.params.get("model")
    if labels is None and model not in (None, _embedded("*.safetensors").stem):
        return []
    file = _embedded("imagenet_labels.txt") if labels is None else Path(labels)
    if file.suffix != ".txt" or not file.is_file():
        return []
    return [label.replace(" ", "_") for label in file.read_text(encoding="utf-8").splitlines()]


def list_colormaps(context: click.Context) -> list[str]:
    """OpenCV's."""
    from gradcam.images.draw import COLORMAPS

    return list(COLORMAPS)


def _embedded(pattern: str) -> Path:
    return next(Path(__file__).parent.parent.rglob(pattern))
