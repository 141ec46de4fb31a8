"""Delay checks of tensor values, so that many checks share one device synchronisation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcam.errors import ModelError, warn

Check = Callable[[list[float]], None]
UNDERFLOW = (
    "too small for float32: heatmaps lose precision or are blank. Pass target=, a function that multiplies the score by a "
    "large constant."
)
ValueRange = tuple[float, float]  # (minimum, maximum)


class RowRanges(list[ValueRange]):
    """A list of the minimum and maximum of each row; empty until `DeferredChecks.flush` has read the values."""


@dataclass
class DeferredChecks:
    """Pending checks of small tensors.

    Each time a value is read, the program waits for the device. So `flush` reads all pending values at once. Then
    `flush` runs the checks in the order in which they were added.
    """

    _pending: list[tuple[Check, tuple[Tensor, ...]]] = field(default_factory=list)

    def add(self, check: Check, *tensors: Tensor) -> None:
        """Add a check. `flush` calls `check` with a single list that contains all values of the tensors."""
        self._pending.append((check, tensors))

    def add_range(self, tensor: Tensor, sentence_start: str) -> RowRanges:
        """Add a check that a tensor is finite; return a list that `flush` fills with the tensor's minimum and maximum.

        If the minimum or the maximum is NaN or infinite, `flush` raises `ModelError`. The message begins with
        `sentence_start`, such as "The scores are".
        """
        return self._add_ranges(*torch.aminmax(tensor), sentence_start)

    def add_row_ranges(self, tensor: Tensor, sentence_start: str, *, min_magnitude: float = 0) -> RowRanges:
        """Add a check that a tensor is finite; return a list that `flush` fills with each row's minimum and maximum.

        `flush` also warns if the largest magnitude in a row is below `min_magnitude`, but not zero.
        """
        axes = tuple(range(1, tensor.ndim))
        extremes = torch.aminmax(tensor) if len(tensor) == 1 else (tensor.amin(axes), tensor.amax(axes))
        return self._add_ranges(*extremes, sentence_start, min_magnitude)

    def _add_ranges(self, lows: Tensor, highs: Tensor, sentence_start: str, min_magnitude: float = 0) -> RowRanges:
        ranges = RowRanges()

        def check(values: list[float]) -> None:
            for value in itertools.filterfalse(math.isfinite, values):
                hint = " float16 overflows above 65504: use bfloat16 or float32." if lows.dtype == torch.float16 else ""
                kind = "NaN" if math.isnan(value) else "infinite"
                problem = f"{sentence_start} {kind} at some positions"
                raise ModelError(f"{problem}: check the input and the weights for NaN and very large values.{hint}")
            ranges.extend(zip(values[: lows.numel()], values[lows.numel() :]))
            if min_magnitude and any(0 < max(-low, high) < min_magnitude for low, high in ranges):
                warn(f"{sentence_start} {UNDERFLOW}")

        self.add(check, lows, highs)
        return ranges

    def flush(self) -> None:
        """Read all pending values and run their checks."""
        pending, self._pending = self._pending, []
        tensors = [tensor for _, group in pending for tensor in group]
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        values = {device: iter(read_values([x for x in tensors if x.device == device])) for device in devices}
        for check, group in pending:
            check([next(values[tensor.device]) for tensor in group for _ in range(tensor.numel())])


def read_values(tensors: Sequence[Tensor]) -> list[float]:
    """Return all values of tensors on the same device, after a single synchronisation."""
    if all(tensor.is_cpu and tensor.numel() == 1 for tensor in tensors):
        return [tensor.item() for tensor in tensors]  # There is no device to wait for, so joining would only take time.
    values: list[float] = torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
    return values


def read_range(tensor: Tensor, sentence_start: str) -> ValueRange:
    """Return the minimum and maximum of a tensor; raise `ModelError` if a value is not finite."""
    return read_row_ranges(tensor[None], sentence_start)[0]


def read_row_ranges(tensor: Tensor, sentence_start: str) -> RowRanges:
    """Return the minimum and maximum of each row of a tensor; raise `ModelError` if a value is not finite."""
    checks = DeferredChecks()
    ranges = checks.add_row_ranges(tensor, sentence_start)
    checks.flush()
    return ranges
