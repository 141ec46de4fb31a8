"""Checks of numbers that are still being computed: to read one waits for the device, and one wait serves for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcam.errors import ModelError

Judge = Callable[[list[float]], None]
Range = tuple[float, float]  # the least and the largest value


class Ranges(list[Range]):
    """The ranges of rows; of some that were not read yet, an empty list."""

    @property
    def are_zero(self) -> list[bool]:
        return [each == (0, 0) for each in self]

    @property
    def peak(self) -> float:
        """The largest absolute value."""
        return max(max(-low, high) for low, high in self)


@dataclass
class Readings:
    """What is asked of numbers, each with who judges them; `read` has all judged, in the order in which they came."""

    _waiting: list[tuple[Tensor, Judge]] = field(default_factory=list)

    def ask(self, numbers: Tensor, judge: Judge) -> None:
        """Have these few numbers judged once they are read."""
        self._waiting.append((numbers.flatten(), judge))

    def ask_range(self, tensor: Tensor, what: str) -> Ranges:
        """Return a list that gets the range of all values when it is read.

        Reading raises `ModelError` where one is NaN or infinite: both pass through.
        """
        return self._ask_ranges(torch.stack(torch.aminmax(tensor)), tensor.dtype, what)

    def ask_ranges(self, tensor: Tensor, what: str) -> Ranges:
        """The same of each row."""
        if len(tensor) == 1:
            return self.ask_range(tensor, what)
        axes = tuple(range(1, tensor.ndim))
        return self._ask_ranges(torch.stack([tensor.amin(axes), tensor.amax(axes)], 1), tensor.dtype, what)

    def _ask_ranges(self, numbers: Tensor, kind: torch.dtype, what: str) -> Ranges:
        ranges = Ranges()

        def judge(values: list[float]) -> None:
            _require_finite(values, kind, what)
            ranges.extend(zip(values[::2], values[1::2]))

        self.ask(numbers, judge)
        return ranges

    def read(self) -> None:
        """Read and judge all that waits."""
        waiting, self._waiting = self._waiting, []
        devices = dict.fromkeys(numbers.device for numbers, _ in waiting)
        values = {
            device: iter(torch.cat([numbers for numbers, _ in waiting if numbers.device == device]).tolist())
            for device in devices
        }
        for numbers, judge in waiting:
            judge(list(itertools.islice(values[numbers.device], len(numbers))))


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
        hint = " float16 holds nothing above 65504: use bfloat16 or float32." if kind == torch.float16 else ""
        raise ModelError(
            f"{what} {which} in places: look for NaN and for huge values in the input and the weights.{hint}"
        )
