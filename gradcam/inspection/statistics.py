"""A tensor in a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**16  # values, of each of the processor's threads: as float64 half a megabyte, which a core keeps at hand
MOST_THREADS = 4  # that a chunk is for; the part that NumPy does has one
SMALLEST, GREATEST = 1e-290, 1e290  # sums of squares in which float64 is as precise as it should be
NEAR = 1e-6  # a deviation of less than this part of the squares is measured from the mean, before rounding hides it


@dataclass(frozen=True)
class Statistics:
    """A tensor's values in a few numbers.

    `count`: how many values. `norm`: the Euclidean one. `mean`, `std`: the deviation with count - 1, 0 of one value.
    `zeros`: the share of values that are exactly zero, in [0,1]. `largest`: the greatest absolute value.
    `nans`, `infinities`: how many; where there are any, the other numbers are what arithmetic makes of them.
    Of an empty tensor norm and largest are 0, and what is a mean of no values is NaN.
    """

    count: int
    norm: float
    mean: float
    std: float
    zeros: float
    largest: float
    nans: int
    infinities: int

    @property
    def is_finite(self) -> bool:
        """Whether every value is a number, and none infinite."""
        return not self.nans and not self.infinities


@torch.no_grad()
def measure(tensor: Tensor) -> Tensor:
    """The numbers of `Statistics` behind the count, as float64 (7,) on the tensor's device: nothing waits for a GPU.

    Right to 1e-6 in relation to what is measured, whatever the dtype, the layout and the scale (float32 on MPS, which
    has no float64). The real and the imaginary parts of complex numbers are values of their own.
    """
    values = _flatten(tensor.detach())
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    if not values.numel():
        return values.new_tensor([0, math.nan, math.nan, math.nan, 0, 0, 0], dtype=exact)
    if values.device.type != "cpu":
        return measure_at_once(values, exact)
    return torch.tensor(_measure_in_chunks(values), dtype=exact, device="cpu")


def to_statistics(count: int, numbers: Tensor) -> Statistics:
    """`numbers` as `measure` gives them, of a tensor of so many values."""
    norm, mean, std, zeros, largest, nans, infinities = numbers.tolist()
    return Statistics(count, norm, mean, std, zeros, largest, int(nans), int(infinities))


def measure_at_once(values: Tensor, exact: torch.dtype = torch.float64) -> Tensor:
    """The numbers of (n,) values by a few operations on all of them: for devices that run ahead of Python."""
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float() if values.is_floating_point() else values.to(exact)
    count = values.numel()
    mean = values.mean(dtype=exact)
    centre = mean.to(values.dtype)
    # A difference from the rounded mean is as precise as the values are, and what the rounding shifts is known.
    squares = torch.linalg.vector_norm(values - centre, dtype=exact) ** 2 - count * (mean - centre) ** 2
    low, high = values.aminmax()
    numbers = [
        torch.linalg.vector_norm(values, dtype=exact),
        mean,
        (squares.clamp(min=0) / max(1, count - 1)).sqrt(),
        (values == 0).sum().to(exact) / count,
        torch.maximum(-low, high),
        values.isnan().sum(),
        values.isinf().sum(),
    ]
    return torch.stack([number.to(exact) for number in numbers])


def _measure_in_chunks(values: Tensor) -> list[float]:
    """The same on the processor, by chunks, so that each value is fetched from memory once."""
    count = len(values)
    total, squares, largest, zeros, nans, infinities = _sum_up(values)
    if nans or infinities:
        greatest = math.nan if nans else math.inf
        return [greatest, total / count, math.nan, zeros / count, greatest, nans, infinities]
    if largest and not SMALLEST < squares < GREATEST:  # float64 alone can hold such values
        norm, mean, std, share, *_ = _measure_in_chunks(values / largest)
        return [norm * largest, mean * largest, std * largest, share, largest, 0, 0]
    spread = squares - total / count * total
    if spread <= NEAR * squares:
        total_away, squares_away, *_ = _sum_up(values.double() - total / count)
        spread = max(0.0, squares_away - total_away / count * total_away)
    std = math.sqrt(spread / max(1, count - 1))
    return [math.sqrt(squares), total / count, std, zeros / count, largest, 0, 0]


def _sum_up(values: Tensor) -> tuple[float, float, float, int, int, int]:
    """Sum, sum of squares, greatest absolute value, and how many zeros, NaN and infinities, by chunks as float64."""
    size = CHUNK * min(MOST_THREADS, torch.get_num_threads())
    buffer = torch.empty(min(size, len(values)), dtype=torch.float64, device="cpu")
    total = squares = largest = 0.0
    zeros = nans = infinities = 0
    for chunk in values.split(size):
        part = buffer[: len(chunk)].copy_(chunk)
        low, high = (number.item() for number in part.aminmax())
        total += part.sum().item()
        squares += torch.dot(part, part).item()
        largest = max(largest, -low, high)
        zeros += int(np.count_nonzero(part.numpy() == 0))  # faster than PyTorch's own, which branches
        if not (math.isfinite(low) and math.isfinite(high)):
            nans += int(np.count_nonzero(np.isnan(part.numpy())))
            infinities += int(np.count_nonzero(np.isinf(part.numpy())))
    return total, squares, largest, zeros, nans, infinities


def _flatten(tensor: Tensor) -> Tensor:
    """All values as (n,), in the order in which they lie in memory, so that none need be moved; real and strided."""
    if tensor.is_nested:
        tensor = torch.cat([each.reshape(-1) for each in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis])).reshape(-1)
