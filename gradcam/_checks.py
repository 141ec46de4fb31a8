"""Checks of arguments: numbers, counts and choices, each refused by a sentence of what came and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gradcam.errors import GradcamError, join_names, shorten

Kind = type[GradcamError]


def refuse(value: object, name: str, expected: str, error: Kind = GradcamError) -> GradcamError:
    """The error for an argument of that name."""
    return error(f"{name} is {shorten(value)}, expected {expected}")


def check_count(
    value: Any,
    name: str,
    expected: str = "a whole number, 1 or more.",
    *,
    least: int = 1,
    most: float = math.inf,
    error: Kind = GradcamError,
) -> int:
    """A whole number in this range, ends included. Raises `error`, which ends with what was `expected`, otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse(value, name, expected, error)
    return value


def check_number(
    value: Any, name: str, expected: str, *, least: float = 0, most: float = math.inf, error: Kind = GradcamError
) -> float:
    """A finite number in this range, ends included. Raises `error`, which ends with what was `expected`, otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise refuse(value, name, expected, error)
    return float(value)


def check_choice(value: Any, name: str, known: Iterable[str], error: Kind = GradcamError) -> str:
    """One of the known words. Raises `error`, which lists them, for anything else."""
    if not isinstance(value, str) or value not in known:
        raise refuse(value, name, f"one of {join_names(known)}.", error)
    return value
