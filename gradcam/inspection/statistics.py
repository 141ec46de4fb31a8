"""A tensor in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """A tensor's values in a few numbers.

    `count`: how many values. `norm`: the Euclidean one. `mean`, `std`: the deviation with count - 1, 0 of one value.
    `zeros`: the share of values that are exactly zero, in [0,1]. `largest`: the greatest absolute value.
    `nans`, `infinities`: how many; where there are any, the other numbers are what arithmetic makes of them.
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


def measure(tensor: Tensor) -> Tensor:
    """The numbers of `Statistics` behind the count, as float64 (7,) on the tensor's device: nothing waits for a GPU."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.double()
    magnitudes = values.abs()
    numbers = [
        torch.linalg.vector_norm(values),
        values.mean(),
        values.std() if values.numel() > 1 else torch.zeros_like(values.sum()),
        (values == 0).double().mean(),
        magnitudes.max(),
        values.isnan().sum().double(),
        values.isinf().sum().double(),
    ]
    return torch.stack(numbers)


def to_statistics(count: int, numbers: Tensor) -> Statistics:
    """`numbers` as `measure` gives them, of a tensor of so many values."""
    norm, mean, std, zeros, largest, nans, infinities = numbers.tolist()
    return Statistics(count, norm, mean, std, zeros, largest, int(nans), int(infinities))
