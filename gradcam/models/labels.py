"""Names of classes: from a file, and from what a person types to an index."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcam.errors import ModelError, TargetError, join_names, nearest, shorten
from gradcam.images.files import read_text_file


def name_class(index: int | None, label: str | None, *, with_index: bool = False) -> str:
    """What people read of a class: its label, "tiger cat" or "tiger cat (282)", or "class 282" where nobody named it."""
    return f"class {index}" if label is None else f"{label} ({index})" if with_index else label


def find_class(labels: Sequence[str] | None, wanted: str, count: int | None = None) -> int:
    """The index of a class by its name, in any case, or by its index in digits; `name:7` is the class that is called
    "7". `count`: of classes without names, None where nobody knows. Raises `TargetError` for an unknown or ambiguous
    name, and lists the nearest."""
    if re.fullmatch(r"\s*[+-]?\d+\s*", wanted):
        index, known = int(wanted), len(labels or ()) or count
        if index < 0 and known is None:
            raise TargetError(f"Class {index} does not exist: classes are counted from 0.")
        if known is not None and not 0 <= index < known:
            raise TargetError(f"Class {index} does not exist: this model has {known} classes, 0 to {known - 1}.")
        return index
    if labels is None:
        why = "this model has no class names"
        raise TargetError(f"No class is called '{wanted}': {why}. Give an index, or labels (--labels).")
    name = _simplify(wanted.removeprefix("name:"))
    found = [index for index, label in enumerate(labels) if _simplify(label) == name]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{index} ({labels[index]})" for index in found)
        raise TargetError(f"Several classes are called '{wanted}': choose one by its index, {choices}.")
    offers = nearest(name, labels)
    hint = (
        f"nearest: {join_names(offers)}"
        if offers
        else f"the model has {len(labels)} classes, such as {join_names(labels[:3])}"
    )
    raise TargetError(f"No class is called '{wanted}'; {hint}.")


def _simplify(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


class FileLabels(list[str]):
    """Names of classes that know the file they are from."""

    def __init__(self, names: Sequence[str], path: str | os.PathLike[str]) -> None:
        super().__init__(names)
        self.path = path


def read_labels(path: str | os.PathLike[str]) -> FileLabels:
    """Names of classes from a file, in the order of their indices. One on each line; or a ``.csv`` of indices and names,
    with a header or without; or JSON: a list, {"0": "name"}, {"0": ["n01440764", "name"]}, {"name": 0} as torchvision's
    `class_to_idx` is, or a config.json with "id2label"."""
    try:
        text = read_text_file(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ModelError(f"{path}: cannot be read as labels ({reason})") from error
    if Path(path).suffix.lower() == ".json" or text.lstrip()[:1] in ("{", "["):
        return FileLabels(_read_json(path, text), path)
    if Path(path).suffix.lower() == ".csv" and (pairs := _find_pairs(text)):
        return FileLabels(_in_order(path, pairs), path)
    lines = [line.strip() for line in text.strip().split("\n")]  # a form feed ends no line
    if "" in lines:
        raise ModelError(f"{path}: line {lines.index('') + 1} is empty, expected one label per line.")
    return FileLabels(lines, path)


def check_labels(labels: Any) -> list[str]:
    """Names of classes from a sequence of them or a file, which they then know. Raises `ModelError` for anything else."""
    if isinstance(labels, (str, os.PathLike)):
        return read_labels(labels)
    if not isinstance(labels, (list, tuple)) or not labels or not all(isinstance(label, str) for label in labels):
        what = "class names, or the path of a file with one name per line"
        raise ModelError(f"The labels are {shorten(labels)}, expected {what}.")
    return list(labels)


def fit_labels(labels: Sequence[str], logits: int, classes: int) -> list[str]:
    """Labels for so many classes; one for a single logit is what it speaks for. Raises `ModelError` for another number."""
    if logits == 1 and len(labels) == 1:
        return [f"not {labels[0]}", labels[0]] if classes == 2 else list(labels)
    if len(labels) != classes:
        what = f"{classes} classes" if logits > 1 else "a single logit: expected one label, or two (negative, positive)"
        start = f"{labels.path} has" if isinstance(labels, FileLabels) else "There are"
        raise ModelError(f"{start} {len(labels)} labels, but the model has {what}.")
    return list(labels)


def _read_json(path: str | os.PathLike[str], text: str) -> list[str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: is not valid JSON ({error})") from error
    if isinstance(found, dict) and isinstance(found.get("id2label"), dict):
        found = found["id2label"]
    if isinstance(found, dict) and found and all(type(index) is int for index in found.values()):
        found = {index: name for name, index in found.items()}
    if isinstance(found, dict):
        # Of ["n01440764", "tench"], as ImageNet's class index has it, the last is the one for people.
        names = ((index, name[-1] if isinstance(name, list) and name else name) for index, name in found.items())
        found = _in_order(path, [(str(index), name) for index, name in names])
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise ModelError(f'{path}: is {shorten(found)}, expected a list of names, or {{"0": "name", ...}}.')
    return found


def _in_order(path: str | os.PathLike[str], pairs: Sequence[tuple[str, Any]]) -> list[Any]:
    """Names by their indices in digits. Raises `ModelError` where an index is left out, or is there twice."""
    by_index = dict(pairs)
    for index in range(len(pairs)):
        if str(index) not in by_index:
            raise ModelError(f"{path}: has {len(pairs)} labels, but none for class {index}.")
    return [by_index[str(index)] for index in range(len(pairs))]


def _find_pairs(text: str) -> list[tuple[str, str]]:
    """Indices and names, if that is what all lines but a header have; otherwise nothing is certain, and there are none."""
    try:
        table = list(csv.reader(text.strip().split("\n"), skipinitialspace=True))
    except csv.Error:  # NUL, or a cell without an end
        return []
    rows = [[cell.strip() for cell in row] for row in table]
    if len(rows[0]) == 2 and not _is_index(rows[0][0]):
        rows = rows[1:]
    if not all(len(row) == 2 and _is_index(row[0]) and row[1] for row in rows):
        return []
    return [(str(int(index)), name) for index, name in rows]


def _is_index(cell: str) -> bool:
    return re.fullmatch(r"\d{1,9}", cell, re.ASCII) is not None
