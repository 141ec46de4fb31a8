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


@dataclass
class Readings:
    """What is asked of numbers, each with who judges them; `read` has all judged, in the order in which they came."""

    _waiting: list[tuple[Tensor, Judge]] = field(default_factory=list)

    def ask(self, numbers: Tensor, judge: Judge) -> None:
        """Have these few numbers judged once they are read."""
        self._waiting.append((numbers.flatten(), judge))

    def ask_range(self, tensor: Tensor, what: str, tell: Callable[[Range], None] = lambda found: None) -> None:
        """The least and the largest value. Reading raises `ModelError` where one is NaN or infinite: both pass through."""
        kind = tensor.dtype

        def judge(values: list[float]) -> None:
            _require_finite(values, kind, what)
            tell((values[0], values[1]))

        self.ask(torch.stack(torch.aminmax(tensor)), judge)

    def ask_ranges(self, tensor: Tensor, what: str, tell: Callable[[list[Range]], None]) -> None:
        """The same of each row."""
        kind, axes = tensor.dtype, tuple(range(1, tensor.ndim))

        def judge(values: list[float]) -> None:
            _require_finite(values, kind, what)
            tell(list(zip(values[::2], values[1::2])))

        self.ask(torch.stack([tensor.amin(axes), tensor.amax(axes)], 1), judge)

    def ask_zeros(self, tensor: Tensor, what: str) -> list[bool]:
        """Whether each row is zero, in a list that reading fills. Raises as `ask_range`."""
        found: list[bool] = []
        self.ask_ranges(tensor, what, lambda ranges: found.extend(each == (0, 0) for each in ranges))
        return found

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
    readings, found = Readings(), list[Range]()
    readings.ask_range(tensor, what, found.append)
    readings.read()
    return found[0]


def check_ranges(tensor: Tensor, what: str) -> list[Range]:
    """The same of each row."""
    readings, found = Readings(), list[Range]()
    readings.ask_ranges(tensor, what, found.extend)
    readings.read()
    return found


def _require_finite(values: Iterable[float], kind: torch.dtype, what: str) -> None:
    for value in itertools.filterfalse(math.isfinite, values):
        which = "NaN" if math.isnan(value) else "infinite"
        hint = " float16 holds nothing above 65504: use bfloat16 or float32." if kind == torch.float16 else ""
        raise ModelError(
            f"{what} {which} in places: look for NaN and for huge values in the input and the weights.{hint}"
        )
