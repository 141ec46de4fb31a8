"""The errors that a user can cause. Each says what was received, what was expected, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 60  # characters of somebody's value in a message


class GradcamError(Exception):
    """Something that a user can mend; every error that this package raises on purpose is one."""


class ModelError(GradcamError):
    """The model cannot be explained, or cannot be loaded."""


class LayerError(GradcamError):
    """The layer does not exist, or no class activation map can be taken there."""


class BlindLayerError(LayerError):
    """The score does not depend on the layer, or its gradient there is exactly zero."""


class TargetError(GradcamError):
    """What is to be explained does not fit the model's output."""


class ImageError(GradcamError):
    """A picture, or an input tensor, cannot be read, used or written."""


class OutputError(GradcamError):
    """The folder that results go to, or what an earlier run left in it, cannot be used, written to or read back."""


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


def join_names(names: Iterable[str]) -> str:
    """Names in quotes, for a sentence."""
    return ", ".join(f"'{name}'" for name in names)
