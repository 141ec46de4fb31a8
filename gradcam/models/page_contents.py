"""Convert explanations to the contents of a page: maps, names, and the code that computes each map."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradcam.errors import GradcamError
from gradcam.models.labels import name_class
from gradcam.models.providers import DEFAULT_MODEL
from gradcam.targets.base import Instance, crop_mask
from gradcam.web.page import MapSet, Page, PageTargets

MAX_MASK_SIDE = 256  # maximum of the longer side of a mask on a page, in pixels
COSINE_KINDS = ("text", "like")
TARGET_CLASSES = {
    "box": "Box", "missed": "MissedBox", "mask": "Mask", "keypoint": "Keypoint", "word": "Token", "text": "Text",
    "like": "Like",
}  # fmt: skip
PARTIAL_NOTE = "This page has heatmaps of {some} of the model's {total} classes. Use gradcam page for all classes."


def show_explanation(explanation: Any, i: int, name: str) -> Page:
    """Return the page of image i with the maps of an explanation; raise the errors of `Explanation.select`."""
    single = explanation.select(i).cpu() if len(explanation.images) > 1 else explanation.cpu()
    page_targets, order = list_things(single)
    maps = to_map_set(single.maps[0].numpy()[order], single)
    total = 0
    with contextlib.suppress(GradcamError):  # Outputs without class scores raise an error.
        total = single.probabilities().shape[1] if page_targets.kind == "class" else 0
    notes = [PARTIAL_NOTE.format(some=len(page_targets.names), total=total)] if total > len(page_targets.names) else []
    notes += [note for note in single.notes if note]
    words, code = describe_model(single.model, single.fit, is_class=page_targets.kind == "class")
    fields: dict[str, Any] = {"total": total, "notes": notes, "words": words, "code": code}
    return Page(name, single.images[0], single.regions[0], single.model or "model", page_targets, [maps], **fields)


def describe_model(name: str | None, fit: str | None, *, is_class: bool) -> tuple[list[str], str]:
    """Return the options of `gradcam run`, and the Python expression, that load the model with this name."""
    names = [] if name in (None, DEFAULT_MODEL) else [name]
    words = [*(word for value in names for word in ("--model", str(value))), *([] if fit is None else ["--fit", fit])]
    return words, f"gradcam.{'load_classifier' if is_class else 'load_model'}({format_arguments(names, {'fit': fit})})"


def to_map_set(maps: Any, explanation: Any, target_indices: Sequence[int] | None = None) -> MapSet:
    """Convert maps (K,h,w) of an explanation to a `MapSet`. Negative evidence becomes negative values."""
    sign, evidence = (-1, "signed") if explanation.evidence == "negative" else (1, explanation.evidence)
    values = sign * np.asarray(maps, np.float32)
    return MapSet(explanation.layer or "input", explanation.method, evidence, values, targets=target_indices)


def list_things(explanation: Any) -> tuple[PageTargets, list[int]]:
    """Return the explained targets, and the indices of their maps in the same order. Sort classes by probability."""
    count = explanation.maps.shape[1]
    instances = [explanation.instance(0, k) for k in range(count)]
    if any(instance is not None for instance in instances):
        return _list_instances(explanation, instances), list(range(count))
    if explanation.classes is None:
        names = [explanation.name_class(0, k) for k in range(count)]
        blank = [None] * count
        return PageTargets("score", names, blank, blank, words=blank, code=blank), list(range(count))
    indices = [int(index) for index in explanation.classes[0]]
    probabilities: list[float | None] = [None] * count
    with contextlib.suppress(GradcamError):
        probabilities = [float(probability) for probability in explanation.probabilities()[0, indices]]
    order = sorted(range(count), key=lambda k: -(probabilities[k] or 0))
    return list_classes([indices[k] for k in order], explanation.labels, [probabilities[k] for k in order]), order


def list_classes(indices: Sequence[int], labels: Sequence[str] | None, probabilities: Sequence[Any]) -> PageTargets:
    """Return page targets for the classes `indices`, in the same order."""
    names = [name_class(index, None if labels is None else labels[index]) for index in indices]
    return PageTargets("class", names, indices, probabilities)


def _list_instances(explanation: Any, instances: Sequence[Instance | None]) -> PageTargets:
    entries = [instance if instance is not None else Instance("score", "") for instance in instances]
    kind, masks = entries[0].kind, [entry.mask for entry in entries]
    numbers = ["" if instance.number is None else f"{instance.kind} {instance.number}, " for instance in entries]
    names = [_to_name(instance) or explanation.name_class(0, k) for k, instance in enumerate(entries)]
    names = [f"{number}{name}" for number, name in zip(numbers, names)]
    indices = [instance.index for instance in entries]
    boxes = [None if entry.box is None else [round(float(edge), 1) for edge in entry.box] for entry in entries]
    words, code = map(list, zip(*map(_to_words, entries)))
    columns: dict[str, Any] = {"boxes": boxes, "words": words, "code": code}
    if any(mask is not None for mask in masks):
        columns["masks"] = [None if mask is None else shrink_mask(mask) for mask in masks]
        columns["areas"] = [None if mask is None else int(mask.count_nonzero()) / mask.numel() for mask in masks]
    if kind in COSINE_KINDS:
        columns["values"] = [entry.score for entry in entries]
    if kind == "word":
        columns["texts"] = [entry.text or f" {entry.name}" for entry in entries]
    return PageTargets(kind, names, indices, [find_probability(entry) for entry in entries], **columns)


def shrink_mask(mask: Tensor) -> NDArray[np.bool_]:
    """Return a mask (H,W) with at most `MAX_MASK_SIDE` pixels on its longer side."""
    height, width = mask.shape
    scale = min(1, MAX_MASK_SIDE / max(height, width))
    size = [max(1, round(side * scale)) for side in (height, width)]
    return crop_mask(mask.cpu(), (0, 0, height, width), size).numpy()


def find_probability(instance: Instance) -> float | None:
    """Return the score of an instance; None if the score is a cosine, or if there is no score."""
    return None if instance.score is None or instance.kind in COSINE_KINDS else float(instance.score)


def _to_name(instance: Instance) -> str:
    """Return an instance's display name. Pages are shared, so folders of reference images are left out."""
    return f"like {PurePath(instance.name).name}" if instance.kind == "like" else instance.name


def _to_words(instance: Instance) -> tuple[list[str] | None, str | None]:
    """Return the arguments of `gradcam run`, and the Python code, that select an instance; or (None, None)."""
    number, index, kind = instance.number, instance.index, instance.kind
    options: list[tuple[str, Any]]
    arguments: list[Any]
    keywords: dict[str, Any] = {}
    if kind == "box" and number is not None:
        options, arguments, keywords = [("box", number), ("edge", instance.edge)], [number], {"edge": instance.edge}
    elif kind == "missed" and instance.box is not None:
        box = _round(instance.box)
        options, arguments, keywords = [("missed", box), ("class", index)], [box], {"class_": index}
    elif kind == "mask" and instance.form in ("predicted", "point", "box"):
        place = _round({"point": instance.point, "box": instance.box}.get(instance.form))
        options, arguments, keywords = [("class", index), ("mask", place)], [index], {"mask": place}
    elif kind == "keypoint" and number is not None:
        keywords = {"axis": instance.axis, "box": instance.box_number or None}
        options, arguments = [("keypoint", number), *keywords.items()], [number]
    elif kind == "word" and number is not None:
        is_word = instance.form == "word"
        keywords = {"word": number if is_word else None, "against": next(iter(instance.against), None)}
        options, arguments = [("word", number), ("against", keywords["against"])], [] if is_word else [None, [number]]
    elif kind == "text" and instance.form == "text":
        against = list(instance.against)
        options = [("text", instance.name), *(("against", sentence) for sentence in against)]
        arguments, keywords = [instance.name], {"against": against or None}
    elif kind == "like" and PurePath(instance.name).suffix:  # The name is a file name.
        options, arguments = [("like", PurePath(instance.name).name)], [PurePath(instance.name).name]
    else:
        return None, None
    words = [word for name, value in options if value is not None for word in (f"--{name}", _to_word(value))]
    return words, f"gradcam.targets.{TARGET_CLASSES[kind]}({format_arguments(arguments, keywords)})"


def _round(numbers: Sequence[float] | None) -> tuple[float, ...] | None:
    """Round pixel coordinates to thousandths, to remove rounding errors of the conversion from the model's input."""
    rounded = [round(float(number), 3) + 0.0 for number in numbers or ()]
    return tuple(int(number) if number.is_integer() else number for number in rounded) or None


def _to_word(value: Any) -> str:
    """Format the value of an option."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def format_arguments(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Format the arguments of a call in Python, without keywords that are None."""
    named = [f"{name}={_quote(value)}" for name, value in keywords.items() if value is not None]
    return ", ".join([*map(_quote, arguments), *named])


def _quote(value: Any) -> str:
    """Format a value in Python, with double quotes around strings if possible."""
    text = repr(str(value) if isinstance(value, PurePath) else value)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text
