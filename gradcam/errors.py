"""The errors that a user can cause. Each says what was received, what was expected, and what to do."""

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

LONGEST = 60  # characters of somebody's value in a message
LONGEST_RESULT = 180  # of a result at a prompt
# Characters that move a terminal's cursor, change what it is, or turn the text around; and bytes of names that are no text.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text of somebody's, such as a file's name, in one line, with its control characters as Python would write them."""
    return CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character, code = found.group(), ord(found.group())
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no text
        return f"\\x{code - 0xDC00:02x}"
    return repr(character)[1:-1] if code < 0x80 else f"\\u{code:04x}"


class GradcamError(Exception):
    """An error that a user can fix. It is the base class of all errors that this package raises on purpose.

    Each argument is a line of the message; control characters in it are escaped.

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
        return "\n".join(printable(str(line)) for line in self.args)


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
    """The score does not depend on the layer, or its gradient there is exactly zero.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.load_classifier().explain("photo.jpg", target=lambda logits: 0 * logits[:, 0])
    Traceback (most recent call last):
    gradcam.errors.BlindLayerError: ...
    """


class GradientError(GradcamError):
    """An edit returned an invalid gradient, or gradients are not as requested.

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
    """Ray cannot be started or joined, or its workers cannot do their work.

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
    >>> warnings.simplefilter("error", gradcam.GradcamWarning)  # to stop at the first
    >>> warnings.simplefilter("default", gradcam.GradcamWarning)
    """


def warn(message: str) -> None:
    """Warn whoever asked for a map, at their own line: the nearest one outside this package."""
    frame, level = sys._getframe(1), 2
    ours = ("gradcam", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
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


class _Short(reprlib.Repr):
    """As much of a repr as a sentence can show: that of lists in lists may be billions of characters long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 20
        self.maxstring = self.maxlong = self.maxother = 4 * LONGEST

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In its own order, which `reprlib` would not keep."""
        if level <= 0:
            return "{...}" if x else "{}"
        cells = (f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in x.items())
        return "{" + ", ".join(islice(cells, self.maxdict)) + "}"

    repr_OrderedDict = repr_Counter = repr_dict  # by their types' names


_short = _Short()


def shorten(value: object) -> str:
    """The repr of anything in one line, for a sentence."""
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def show_fields(result: object) -> str:
    """The repr of a dataclass in one line that fits a prompt: arrays by their shapes, and what is long cut off."""
    shown = [field.name for field in dataclasses.fields(result) if field.repr]  # type: ignore[arg-type]  # a dataclass
    text = ", ".join(f"{name}={_show_value(getattr(result, name))}" for name in shown)
    most = LONGEST_RESULT - len(type(result).__name__) - 2
    return f"{type(result).__name__}({text if len(text) <= most else f'{text[: most - 3]}...'})"


def _show_value(value: object) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, (list, tuple)) and any(hasattr(one, "dtype") for one in value[:1]):
        return f"[{_show_value(value[0])}{', ...' if len(value) > 1 else ''}]"
    return shorten(value)


def to_pip_command(extra: str) -> str:
    """Return what installs the packages of an extra. The distribution is not published, so that it takes a clone."""
    return f'pip install ".[{extra}]" in a clone of gradcam'


def join_names(names: Iterable[str]) -> str:
    """Names in quotes, for a sentence."""
    return ", ".join(f"'{name}'" for name in names)


def describe_failure(name: str, error: BaseException) -> str:
    """One line that names a picture, once, and the reason why it failed; GRADCAM_TRACEBACK=1 prints where as well."""
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
    name = printable(name)
    named = reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
    return " ".join(named.split())


def describe_unexpected(error: BaseException) -> str:
    """The kind and the reason of an error that nobody expected, and how to see where it arose."""
    reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return f"{printable(reason)} (GRADCAM_TRACEBACK=1 shows where)"
