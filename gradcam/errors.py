"""Define the errors that a user can cause. Each message states the given value, the expected values, and a remedy."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
import sys
import traceback
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

MAX_VALUE_CHARACTERS = 60  # The maximum length of a user's value in a message.
MAX_REPR_CHARACTERS = 180  # The maximum length of a result's repr at a Python prompt.
# Matches characters that move a terminal's cursor, change its state or reverse the text. Also matches surrogates, by
# which Python represents undecodable bytes in file names.
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Escape the control characters of a text, such as a file name, as `repr` does. The result is one line."""
    return CONTROL_CHARACTERS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character, code = match.group(), ord(match.group())
    if 0xDC80 <= code <= 0xDCFF:  # The surrogate represents an undecodable byte.
        return f"\\x{code - 0xDC00:02x}"
    return repr(character)[1:-1] if code < 0x80 else f"\\u{code:04x}"


class GradcamError(Exception):
    """An error that a user can fix. It is the base class of all errors that this package raises on purpose.

    Each argument is a line of the message. Control characters in the message are escaped.

    Examples
    --------
    >>> import gradcam
    >>> try:
    ...     gradcam.load_classifier("resnet51")
    ... except gradcam.GradcamError as error:
    ...     print(type(error).__name__)
    ModelError
    """

    def __str__(self) -> str:
        return "\n".join(escape_controls(str(line)) for line in self.args)


class ModelError(GradcamError):
    """The model cannot be explained, or cannot be loaded.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.load_classifier("photo.jpg:model")
    Traceback (most recent call last):
    gradcam.errors.ModelError: ...
    """


class LayerError(GradcamError):
    """The layer does not exist, or cannot be a target layer.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.load_classifier().explain("photo.jpg", "layer9")
    Traceback (most recent call last):
    gradcam.errors.LayerError: ...
    """


class BlindLayerError(LayerError):
    """The score does not depend on the layer, or the score's gradient at the layer is exactly zero.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.load_classifier().explain("photo.jpg", target=lambda logits: 0 * logits[:, 0])
    Traceback (most recent call last):
    gradcam.errors.BlindLayerError: ...
    """


class GradientError(GradcamError):
    """Gradients are not finite, or cannot be edited or watched as requested.

    Examples
    --------
    >>> import gradcam, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with gradcam.inspection.edit_gradients(model, lambda gradient: gradient[:1, :1]):
    ...     model(torch.rand(3, 2)).sum().backward()
    Traceback (most recent call last):
    gradcam.errors.GradientError: ...
    """


class TargetError(GradcamError):
    """The target does not fit the model's output.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.load_classifier().explain("photo.jpg", target="expresso")
    Traceback (most recent call last):
    gradcam.errors.TargetError: ...espresso...
    """


class ImageError(GradcamError):
    """An image, or an input tensor, cannot be read, used or written.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.read_image("missing.jpg")
    Traceback (most recent call last):
    gradcam.errors.ImageError: missing.jpg: ...
    """


class InputError(GradcamError):
    """The input files cannot be listed.

    Examples
    --------
    >>> import gradcam
    >>> list(gradcam.explain_files("nowhere/"))
    Traceback (most recent call last):
    gradcam.errors.InputError: ...
    """


class OutputError(GradcamError):
    """The output folder, or an earlier run's files in it, cannot be used, written or read.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.read_manifest("photos/")
    Traceback (most recent call last):
    gradcam.errors.OutputError: ...contains no manifest.jsonl...
    """


class StoreError(GradcamError):
    """An object store cannot be reached, or returns an error.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.read_manifest("nowhere://bucket/explained/")
    Traceback (most recent call last):
    gradcam.errors.StoreError: ...
    """


class ClusterError(GradcamError):
    """A Ray cluster cannot be started or reached, or its workers fail.

    Examples
    --------
    >>> from gradcam.cli import cli
    >>> options = ["--engine", "ray", "--ray-address", "nowhere:1"]
    >>> cli.main(["batch", "photos/", "-o", "out", *options], standalone_mode=False)
    Traceback (most recent call last):
    gradcam.errors.ClusterError: ...
    """


class DeviceError(GradcamError):
    """A GPU was lost during a run, or pixels cannot be processed on the requested device.

    Examples
    --------
    >>> from gradcam.cli import cli
    >>> options = ["--pixels", "device", "--fit", "whole"]
    >>> cli.main(["batch", "photos/", "-o", "out", *options], standalone_mode=False)
    Traceback (most recent call last):
    gradcam.errors.DeviceError: ...
    """


class GradcamWarning(UserWarning):
    """A heatmap was computed, but has a known limitation.

    Examples
    --------
    >>> import gradcam, warnings
    >>> warnings.simplefilter("error", gradcam.GradcamWarning)  # raise warnings as errors
    >>> warnings.simplefilter("default", gradcam.GradcamWarning)
    """


def warn(message: str) -> None:
    """Issue a `GradcamWarning` that points to the nearest caller outside this package."""
    frame, level = sys._getframe(1), 2
    ours = ("gradcam", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GradcamWarning, stacklevel=level)


def find_similar_names(name: str, names: Iterable[str], count: int = 5) -> list[str]:
    """Return the known names that are most similar to `name`, best first, as suggestions for an error message."""
    by_lower_case = {candidate.lower(): candidate for candidate in names}
    lower_name = name.lower()
    word_matches = [candidate for candidate in by_lower_case if lower_name in candidate.split()]
    similar = difflib.get_close_matches(lower_name, by_lower_case, n=count, cutoff=0.6)
    partial = [candidate for candidate in by_lower_case if lower_name and lower_name in candidate]
    return [by_lower_case[candidate] for candidate in dict.fromkeys([*word_matches, *similar, *partial])][:count]


class _ShortRepr(reprlib.Repr):
    """A repr of limited length, because the full repr of nested lists can have billions of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 20
        self.maxstring = self.maxlong = self.maxother = 4 * MAX_VALUE_CHARACTERS

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return the repr of a dict without sorting the keys, which `reprlib` would do."""
        if level <= 0:
            return "{...}" if x else "{}"
        cells = (f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in x.items())
        return "{" + ", ".join(islice(cells, self.maxdict)) + "}"

    repr_OrderedDict = repr_Counter = repr_dict  # `reprlib` finds a method by the name of the value's type.


_short_repr = _ShortRepr()


def shorten(value: object) -> str:
    """Return the repr of a value in one line of limited length, for a message."""
    text = " ".join(_short_repr.repr(value).split())
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def format_fields(result: object) -> str:
    """Return the repr of a dataclass in one short line. Arrays are replaced by their dtype and shape."""
    # The type checker does not know that every caller passes a dataclass.
    names = [field.name for field in dataclasses.fields(result) if field.repr]  # type: ignore[arg-type]
    text = ", ".join(f"{name}={_show_value(getattr(result, name))}" for name in names)
    max_length = MAX_REPR_CHARACTERS - len(type(result).__name__) - 2
    return f"{type(result).__name__}({text if len(text) <= max_length else f'{text[: max_length - 3]}...'})"


def _show_value(value: object) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, (list, tuple)) and any(hasattr(item, "dtype") for item in value[:1]):
        return f"[{_show_value(value[0])}{', ...' if len(value) > 1 else ''}]"
    return shorten(value)


def to_pip_command(extra: str) -> str:
    """Return the pip command that installs an extra from a clone, because the package is not published."""
    return f'pip install ".[{extra}]" in a clone of gradcam'


def join_names(names: Iterable[str]) -> str:
    """Return names in quotes, for a message."""
    return ", ".join(f"'{name}'" for name in names)


def describe_failure(name: str, error: BaseException) -> str:
    """Return one line with the name of an image and the reason for its failure.

    If the reason begins with the name, the name is not repeated. If the environment variable GRADCAM_TRACEBACK is 1,
    this function also prints the traceback.
    """
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
    name = escape_controls(name)
    line = reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
    return " ".join(line.split())


def describe_unexpected(error: BaseException) -> str:
    """Return a message for an unexpected error: its type, its text, and how to print the traceback."""
    reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return f"{escape_controls(reason)} (for the traceback, set GRADCAM_TRACEBACK=1)"
