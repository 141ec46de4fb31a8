"""Names of classes: from what a person types to an index."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradcam.errors import TargetError, join_names, nearest


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
