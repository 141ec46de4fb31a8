"""Read class names from files, and find the class that a user names."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcam.errors import ModelError, TargetError, find_similar_names, join_names, shorten
from gradcam.images.files import read_text_file

INDEX = re.compile(r"\d{1,9}", re.ASCII)


def name_class(index: int | None, label: str | None, *, with_index: bool = False) -> str:
    """Return a class's display name: its label, or "class 282" if it has none."""
    return f"class {index}" if label is None else f"{label} ({index})" if with_index else label


def find_class(labels: Sequence[str] | None, name: str, count: int | None = None) -> int:
    """Find a class by its label (ignoring case) or by its index in digits, and return the index.

    `name:7` means the class with the label "7". `count` is the number of classes if there are no labels; None means
    unknown. Raises `TargetError` for an unknown or ambiguous name, with the most similar labels in the message.
    """
    if re.fullmatch(r"\s*[+-]?\d+\s*", name):
        index, class_count = int(name), len(labels or ()) or count
        if index < 0 and class_count is None:
            raise TargetError(f"Class {index} does not exist: classes are counted from 0.")
        if class_count is not None and not 0 <= index < class_count:
            classes = f"{class_count} classes, 0 to {class_count - 1}"
            raise TargetError(f"Class {index} does not exist: this model has {classes}.")
        return index
    if labels is None:
        reason = "this model has no class names"
        raise TargetError(f"No class is called '{name}': {reason}. Give an index, or labels (--labels).")
    simplified = _simplify(name.removeprefix("name:"))
    matches = [index for index, label in enumerate(labels) if _simplify(label) == simplified]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = ", ".join(f"{index} ({labels[index]})" for index in matches)
        raise TargetError(f"Several classes are called '{name}': choose one by its index, {choices}.")
    hint = f"the model has {len(labels)} classes, such as {join_names(labels[:3])}"
    if offers := find_similar_names(simplified, labels):
        hint = f"nearest: {join_names(offers)}"
    raise TargetError(f"No class is called '{name}'; {hint}.")


def _simplify(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


class FileLabels(list[str]):
    """Class names from a file, with the file's path for error messages."""

    def __init__(self, names: Sequence[str], path: str | os.PathLike[str]) -> None:
        super().__init__(names)
        self.path = path


def read_labels(path: str | os.PathLike[str]) -> FileLabels:
    """Read class names from a file, in the order of their indices.

    A text file has one name per line. A ``.csv`` file has an index and a name per line, with or without a header. A
    JSON file has a list, {"0": "name"}, {"0": ["n01440764", "name"]}, {"name": 0} as in torchvision's `class_to_idx`,
    or "id2label" as in config.json.
    """
    try:
        text = read_text_file(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ModelError(f"{path}: cannot be read as labels ({reason})") from error
    if Path(path).suffix.lower() == ".json" or text.lstrip()[:1] in ("{", "["):
        return FileLabels(_read_json(path, text), path)
    if Path(path).suffix.lower() == ".csv" and (pairs := _find_pairs(text)):
        return FileLabels(_in_order(path, pairs), path)
    lines = [line.strip() for line in text.strip().split("\n")]  # `splitlines` would also split at form feeds
    if "" in lines:
        raise ModelError(f"{path}: line {lines.index('') + 1} is empty, expected one label per line.")
    return FileLabels(lines, path)


def check_labels(labels: Any) -> list[str]:
    """Validate class names, or read them from the file at a path; raise `ModelError` for other values."""
    if isinstance(labels, (str, os.PathLike)):
        return read_labels(labels)
    if not isinstance(labels, (list, tuple)) or not labels or not all(isinstance(label, str) for label in labels):
        expected = "class names, or the path of a file with one name per line"
        raise ModelError(f"The labels are {shorten(labels)}, expected {expected}.")
    return list(labels)


def fit_labels(labels: Sequence[str], logits: int, classes: int) -> list[str]:
    """Return one label per class; raise `ModelError` if the number of labels does not match.

    If the model has a single logit, a single label is the name of the positive class.
    """
    if logits == 1 and len(labels) == 1:
        return [f"not {labels[0]}", labels[0]] if classes == 2 else list(labels)
    if len(labels) != classes:
        single = "a single logit: expected one label, or two (negative, positive)"
        start = f"{labels.path} has" if isinstance(labels, FileLabels) else "There are"
        outputs = f"{classes} classes" if logits > 1 else single
        raise ModelError(f"{start} {len(labels)} labels, but the model has {outputs}.")
    return list(labels)


def _read_json(path: str | os.PathLike[str], text: str) -> list[str]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: is not valid JSON ({error})") from error
    if isinstance(content, dict) and isinstance(content.get("id2label"), dict):
        content = content["id2label"]
    if isinstance(content, dict) and content and all(type(index) is int for index in content.values()):
        content = {index: name for name, index in content.items()}
    if isinstance(content, dict):
        # In ImageNet's class index, a value such as ["n01440764", "tench"] has the readable name last.
        names = ((index, name[-1] if isinstance(name, list) and name else name) for index, name in content.items())
        content = _in_order(path, [(str(index), name) for index, name in names])
    if not isinstance(content, list) or not content or not all(isinstance(name, str) for name in content):
        raise ModelError(f'{path}: is {shorten(content)}, expected a list of names, or {{"0": "name", ...}}.')
    return content


def _in_order(path: str | os.PathLike[str], pairs: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the names sorted by index; raise `ModelError` if an index is missing or occurs twice."""
    by_index = dict(pairs)
    for index in range(len(pairs)):
        if str(index) not in by_index:
            raise ModelError(f"{path}: there are {len(pairs)} labels, but none for class {index}.")
    return [by_index[str(index)] for index in range(len(pairs))]


def _find_pairs(text: str) -> list[tuple[str, str]]:
    """Return the (index, name) pairs of a CSV text without its header; an empty list if a line is not a pair."""
    try:
        table = list(csv.reader(text.strip().split("\n"), skipinitialspace=True))
    except csv.Error:  # a NUL byte, or an unclosed quote
        return []
    rows = [[cell.strip() for cell in row] for row in table]
    if len(rows[0]) == 2 and not INDEX.fullmatch(rows[0][0]):
        rows = rows[1:]
    if not all(len(row) == 2 and INDEX.fullmatch(row[0]) and row[1] for row in rows):
        return []
    return [(str(int(index)), name) for index, name in rows]
