"""The errors that a user can cause. Each says what was received, what was expected, and what to do."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable

LONGEST = 60  # characters of somebody's value in a message
LONGEST_RESULT = 180  # of a result at a prompt


class GradcamError(Exception):
    """Something that a user can mend; every error that this package raises on purpose is one."""


class ModelError(GradcamError):
    """The model cannot be explained, or cannot be loaded."""


class LayerError(GradcamError):
    """The layer does not exist, or no class activation map can be taken there."""


class BlindLayerError(LayerError):
    """The score does not depend on the layer, or its gradient there is exactly zero."""


class GradientError(GradcamError):
    """What an edit makes of a gradient cannot take its place, or gradients are not what was asked for."""


class TargetError(GradcamError):
    """What is to be explained does not fit the model's output."""


class ImageError(GradcamError):
    """A picture, or an input tensor, cannot be read, used or written."""


class InputError(GradcamError):
    """What was given to be explained cannot be listed."""


class OutputError(GradcamError):
    """The folder that results go to, or what an earlier run left in it, cannot be used, written to or read back."""


class StoreError(GradcamError):
    """An object store cannot be asked, or does not answer as it should."""


class ClusterError(GradcamError):
    """Ray cannot be started or joined, or what works there cannot do its work."""


class GradcamWarning(UserWarning):
    """A map that was made, and what a person should know before believing it."""


def warn(message: str) -> None:
    """Warn whoever asked for a map, at their own line: the nearest one outside this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "gradcam",
        "contextlib",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GradcamWarning, stacklevel=level)


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """The known names that look most like `name`, best first: what an error offers in place of an unknown one."""
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    wanted = name.lower()
    as_word = [candidate for candidate in by_lower_case if wanted in candidate.split()]
    alike = difflib.get_close_matches(wanted, by_lower_case, n=count, cutoff=0.6)
    inside = [candidate for candidate in by_lower_case if wanted and wanted in candidate]
    return [by_lower_case[candidate] for candidate in dict.fromkeys([*as_word, *alike, *inside])][:count]


def shorten(value: object) -> str:
    """The repr of anything in one line, for a sentence."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def show_fields(result: object) -> str:
    """The repr of a dataclass in one line that fits a prompt: arrays by their shapes, and what is long cut off."""
    named = ((field.name, getattr(result, field.name)) for field in dataclasses.fields(result) if field.repr)  # type: ignore[arg-type]
    text = ", ".join(f"{name}={_show_value(value)}" for name, value in named)
    most = LONGEST_RESULT - len(type(result).__name__) - 2
    return f"{type(result).__name__}({text if len(text) <= most else f'{text[: most - 3]}...'})"


def _show_value(value: object) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, (list, tuple)) and any(hasattr(one, "dtype") for one in value[:1]):
        return f"[{_show_value(value[0])}{', ...' if len(value) > 1 else ''}]"
    return shorten(value)


def join_names(names: Iterable[str]) -> str:
    """Names in quotes, for a sentence."""
    return ", ".join(f"'{name}'" for name in names)


def describe_failure(name: str, error: BaseException) -> str:
    """One line that names a picture, once, and the reason why it failed; GRADCAM_TRACEBACK=1 prints where as well."""
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
    named = reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
    return " ".join(named.split())


def describe_unexpected(error: BaseException) -> str:
    """The kind and the reason of an error that nobody expected, and how to see where it arose."""
    reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return f"{reason} (GRADCAM_TRACEBACK=1 shows where)"
