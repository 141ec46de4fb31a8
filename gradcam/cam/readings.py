"""Checks of numbers that are still being computed: to read one waits for the device, and one wait serves for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcam.errors import ModelError, warn

Judge = Callable[[list[float]], None]
UNDERFLOW = (
    "too small for float32: heatmaps lose precision or are blank. Pass target=, a function that multiplies the score by a "
    "large constant."
)
Range = tuple[float, float]  # the least and the largest value


class Ranges(list[Range]):
    """The ranges of rows; of some that were not read yet, an empty list."""


@dataclass
class Readings:
    """What is asked of numbers, each with who judges them; `read` has all judged, in the order in which they came."""

    _waiting: list[tuple[Judge, tuple[Tensor, ...]]] = field(default_factory=list)

    def ask(self, judge: Judge, *numbers: Tensor) -> None:
        """Have these few numbers judged once they are read, as one list."""
        self._waiting.append((judge, numbers))

    def ask_range(self, tensor: Tensor, what: str) -> Ranges:
        """Return a list that gets the range of all values when it is read.

        Reading raises `ModelError` where one is NaN or infinite: both pass through.
        """
        return self._ask_ranges(*torch.aminmax(tensor), what)

    def ask_ranges(self, tensor: Tensor, what: str, *, least: float = 0) -> Ranges:
        """The same of each row. Reading warns of rows that are not zero, and all of whose values are below `least`."""
        axes = tuple(range(1, tensor.ndim))
        extremes = torch.aminmax(tensor) if len(tensor) == 1 else (tensor.amin(axes), tensor.amax(axes))
        return self._ask_ranges(*extremes, what, least)

    def _ask_ranges(self, lows: Tensor, highs: Tensor, what: str, least: float = 0) -> Ranges:
        ranges = Ranges()

        def judge(values: list[float]) -> None:
            _require_finite(values, lows.dtype, what)
            ranges.extend(zip(values[: lows.numel()], values[lows.numel() :]))
            if least and any(0 < max(-low, high) < least for low, high in ranges):
                warn(f"{what} {UNDERFLOW}")

        self.ask(judge, lows, highs)
        return ranges

    def read(self) -> None:
        """Read and judge all that waits."""
        waiting, self._waiting = self._waiting, []
        tensors = [tensor for _, numbers in waiting for tensor in numbers]
        values = {device: iter(_read(tensors, device)) for device in dict.fromkeys(it.device for it in tensors)}
        for judge, numbers in waiting:
            judge([next(values[tensor.device]) for tensor in numbers for _ in range(tensor.numel())])


def _read(tensors: Iterable[Tensor], device: torch.device) -> list[float]:
    """Return all numbers in the tensors of a device, after one wait for it."""
    values: list[float] = torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.device == device]).tolist()
    return values


def check_range(tensor: Tensor, what: str) -> Range:
    """The least and the largest value, read now. Raises as `Readings.ask_range`."""
    return check_ranges(tensor[None], what)[0]


def check_ranges(tensor: Tensor, what: str) -> Ranges:
    """The same of each row."""
    readings = Readings()
    ranges = readings.ask_ranges(tensor, what)
    readings.read()
    return ranges


def _require_finite(values: Iterable[float], kind: torch.dtype, what: str) -> None:
    for value in itertools.filterfalse(math.isfinite, values):
        which = "NaN" if math.isnan(value) else "infinite"
        hint = " float16 overflows above 65504: use bfloat16 or float32." if kind == torch.float16 else ""
        raise ModelError(
            f"{what} {which} in places: check the input and the weights for NaN and very large values.{hint}"
        )
