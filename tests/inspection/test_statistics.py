"""Compare the statistics of a tensor with NumPy in long double, for all memory layouts and special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gradcam.inspection import flow as statistics
from gradcam.inspection.flow import Statistics, measure, measure_whole, to_statistics


def expected(tensor: Tensor) -> Statistics:
    values = np.array(tensor.detach().double().flatten().tolist(), dtype=np.longdouble)
    away = values - values.mean()
    return Statistics(
        count=len(values),
        norm=float(np.sqrt((values * values).sum())),
        mean=float(values.mean()),
        std=float(np.sqrt((away * away).sum() / max(1, len(values) - 1))),
        zeros=sum(value == 0 for value in values.tolist()) / len(values),
        largest=float(max(abs(values))),
        nans=0,
        infinities=0,
    )


def assert_close(summary: Statistics, reference: Statistics) -> None:
    close = {"rel": 1e-6, "abs": 1e-12 * reference.largest}
    assert (summary.count, summary.nans, summary.infinities) == (reference.count, reference.nans, reference.infinities)
    assert summary.zeros == pytest.approx(reference.zeros, rel=1e-12)
    assert summary.largest == reference.largest
    assert summary.norm == pytest.approx(reference.norm, **close)
    assert summary.std == pytest.approx(reference.std, **close)
    # The terms of a mean may cancel, so its error scales with the values.
    assert summary.mean == pytest.approx(reference.mean, rel=1e-6, abs=1e-9 * reference.largest)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": measure,
    "at once": lambda tensor: measure_whole(tensor.reshape(-1)),  # the code for devices other than the processor
}

VALUES = {
    "normal": torch.randn(4, 8, 33, 35),
    "half zeros": torch.randn(4, 8, 33, 35).relu(),
    "small": torch.randn(3, 1001) * 1e-30,
    "large": torch.randn(3, 1001) * 1e30,
    "a mean far above the deviation": 1000 + 1e-3 * torch.randn(3, 1001),
    "a mean that cancels the squares": 3e4 + 0.5 * torch.randn(70_000),
    "one far off": torch.cat([torch.zeros(70_000), torch.tensor([-1e10])]),
    "zeros": torch.zeros(5, 7),
    "constant": torch.full((70_001,), 0.1),
    "one value": torch.tensor([-3.5]),
    "no dimension": torch.tensor(2.5),
    "negative zeros": torch.tensor([-0.0, 0.0, 1.0, -2.0]),
    "float64": torch.randn(70_001, dtype=torch.float64),
    "float16 near its limit": (torch.rand(2, 999) * 6e4).half(),
    "bfloat16": torch.randn(2, 70_001).bfloat16(),
    "integers": torch.randint(-9, 9, (2, 999)),
    "truth": torch.rand(999) > 0.3,
    "channels last": torch.randn(2, 8, 33, 35).to(memory_format=torch.channels_last),
    "strided": torch.randn(4, 60, 70)[:, ::2, 3::5].transpose(0, 2),
    "expanded": torch.randn(5, 1).expand(5, 300),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", VALUES)
def test_the_numbers_are_right(case: str, way: str) -> None:
    tensor = VALUES[case]
    numbers = WAYS[way](tensor)
    assert numbers.dtype == torch.float64
    assert_close(to_statistics(tensor.numel(), numbers), expected(tensor))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_chunk_counts_and_the_last_is_shorter(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.zeros(2 * statistics.CHUNK_VALUES * threads + 3)
        values[0], values[-1], values[statistics.CHUNK_VALUES] = 1, -5, 2
        assert_close(to_statistics(len(values), measure(values)), expected(values))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_squares_beyond_float64_do_not_matter(scale: float) -> None:
    summary = to_statistics(3, measure(torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64) * scale))
    assert summary.norm == pytest.approx(5 * scale, rel=1e-12)
    assert summary.mean == pytest.approx(-scale / 3, rel=1e-12)
    assert summary.std == pytest.approx(math.sqrt((25 - 1 / 3) / 2) * scale, rel=1e-12)
    assert (summary.zeros, summary.largest) == (1 / 3, 4 * scale)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 70_000, 140_001])
def test_values_that_are_not_finite_are_counted_anywhere(place: int, way: str) -> None:
    values = torch.ones(140_002)
    values[[5, 6]] = 0
    values[place] = -math.inf
    summary = to_statistics(len(values), WAYS[way](values))
    assert (summary.nans, summary.infinities, summary.is_finite) == (0, 1, False)
    assert (summary.norm, summary.mean, summary.largest) == (math.inf, -math.inf, math.inf)
    assert math.isnan(summary.std)
    assert summary.zeros == 2 / 140_002
    values[[7, 8]] = math.nan
    summary = to_statistics(len(values), WAYS[way](values))
    assert (summary.nans, summary.infinities, summary.is_finite) == (2, 1, False)
    assert all(math.isnan(number) for number in (summary.norm, summary.mean, summary.std, summary.largest))
    assert summary.zeros == 2 / 140_002


def test_finite_values_are_reported_as_finite() -> None:
    assert to_statistics(2, measure(torch.tensor([1.0, 3e38]))).is_finite


def test_nothing_is_measured_of_an_empty_tensor() -> None:
    summary = to_statistics(0, measure(torch.empty(0, 3)))
    assert (summary.count, summary.norm, summary.largest, summary.nans, summary.infinities) == (0, 0, 0, 0, 0)
    assert all(math.isnan(number) for number in (summary.mean, summary.std, summary.zeros))


def test_parts_of_complex_numbers_are_values_of_their_own() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for tensor, imaginary in ((numbers, [2.0, -4.0]), (numbers.conj(), [-2.0, 4.0])):
        assert torch.equal(measure(tensor), measure(torch.tensor([1.0, 3.0, *imaginary])))
    assert measure(numbers)[0] == pytest.approx(math.sqrt(30))


def test_other_layouts_are_measured_with_all_their_zeros() -> None:
    dense = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 5.0]])
    assert torch.equal(measure(dense.to_sparse()), measure(dense))
    ragged = torch.nested.nested_tensor([torch.tensor([1.0, 0.0]), torch.tensor([2.0])], layout=torch.jagged)
    assert torch.equal(measure(ragged), measure(torch.tensor([1.0, 0.0, 2.0])))


def test_a_tensor_that_requires_gradients_is_measured_without_a_graph() -> None:
    tensor = torch.randn(5, requires_grad=True)
    assert not measure(tensor * 2).requires_grad


@pytest.mark.cuda
@pytest.mark.parametrize("case", VALUES)
def test_a_gpu_gives_the_same(case: str) -> None:
    tensor = VALUES[case].cuda()
    assert measure(tensor).device.type == "cuda"
    assert_close(to_statistics(tensor.numel(), measure(tensor)), expected(VALUES[case]))
