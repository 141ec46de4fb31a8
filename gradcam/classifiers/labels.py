"""Names of classes: from a file, and from what a person types to an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcam.errors import ModelError, TargetError, join_names, nearest, shorten


def find_class(labels: Sequence[str] | None, wanted: str, count: int | None = None) -> int:
    """The index of a class by its name, in any case, or by its index in digits; `name:7` is the class that is called "7".

    `count`: of classes, for a model whose classes have no names.
    Raises `TargetError` for an unknown or ambiguous name, and lists the nearest.
    """
    if re.fullmatch(r"\s*[+-]?\d+\s*", wanted):
        return _check_index(int(wanted), len(labels or ()) or count or 0)
    if labels is None:
        raise TargetError(
            f"No class is called '{wanted}': nobody named this model's classes. Give an index, or labels."
        )
    name = _simplify(wanted.removeprefix("name:"))
    found = [index for index, label in enumerate(labels) if _simplify(label) == name]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{index} ({labels[index]})" for index in found)
        raise TargetError(f"Several classes are called '{wanted}': choose one by its index, {choices}.")
    offers = nearest(name, labels)
    hint = f"nearest: {join_names(offers)}" if offers else f"there are {len(labels)}, such as {join_names(labels[:3])}"
    raise TargetError(f"No class is called '{wanted}'; {hint}.")


def _simplify(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def _check_index(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise TargetError(f"Class {index} does not exist: this model has {count} classes, 0 to {count - 1}.")
    return index


def read_labels(path: str | os.PathLike[str]) -> list[str]:
    """Names of classes from a file, in the order of their indices.

    One on each line; or JSON: a list, {"0": "name"}, or {"name": 0} as torchvision's `class_to_idx` is.
    Raises `ModelError` for a file that is neither, or that leaves an index out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ModelError(f"{path}: cannot be read as labels ({reason})") from error
    if Path(path).suffix.lower() == ".json" or text.lstrip()[:1] in ("{", "["):
        return _read_json(path, text)
    lines = [line.strip() for line in text.strip().splitlines()]
    if not lines:
        raise ModelError(f"{path}: is empty, expected a label on each line.")
    if "" in lines:
        raise ModelError(f"{path}: line {lines.index('') + 1} is empty, expected a label on each line.")
    return lines


def check_labels(labels: Any) -> list[str]:
    """Names of classes from a sequence of them or a file. Raises `ModelError` for anything else."""
    if isinstance(labels, (str, os.PathLike)):
        return read_labels(labels)
    if not isinstance(labels, (list, tuple)) or not labels or not all(isinstance(label, str) for label in labels):
        raise ModelError(
            f"The labels are {shorten(labels)}, expected names, or the path of a file with one on each line."
        )
    return list(labels)


def fit_labels(labels: Sequence[str], logits: int, classes: int) -> list[str]:
    """Labels for so many classes; one for a single logit is what it speaks for. Raises `ModelError` for another number."""
    if logits == 1 and len(labels) == 1:
        return [f"not {labels[0]}", labels[0]] if classes == 2 else list(labels)
    if len(labels) != classes:
        what = f"{classes} classes" if logits > 1 else "a single logit: expected one label, or two, against and for"
        raise ModelError(f"There are {len(labels)} labels, and the model has {what}.")
    return list(labels)


def _read_json(path: str | os.PathLike[str], text: str) -> list[str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: is no JSON ({error})") from error
    if isinstance(found, dict) and found and all(type(index) is int for index in found.values()):
        found = {index: name for name, index in found.items()}
    if isinstance(found, dict):
        by_index = {str(index): name for index, name in found.items()}
        missing = [index for index in range(len(found)) if str(index) not in by_index]
        if missing:
            raise ModelError(f"{path}: has {len(found)} labels, but none for class {missing[0]}.")
        found = [by_index[str(index)] for index in range(len(found))]
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise ModelError(f'{path}: is {shorten(found)}, expected a list of names, or {{"0": "name", ...}}.')
    return found
