"""Test rank correlation: by hand, against a slow definition, and against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.evaluation.metrics.soundness import rank_correlation


def slow_ranks(values: list[float]) -> list[float]:
    """Return ranks from 1. Equal values share the mean of their ranks."""
    return [sum(item < value for item in values) + (1 + sum(item == value for item in values)) / 2 for value in values]


def slow_correlation(a: Tensor, b: Tensor) -> float:
    ranks_a, ranks_b = (np.array(slow_ranks(values.double().flatten().tolist())) for values in (a, b))
    ranks_a, ranks_b = ranks_a - ranks_a.mean(), ranks_b - ranks_b.mean()
    return float((ranks_a * ranks_b).sum() / np.sqrt((ranks_a**2).sum() * (ranks_b**2).sum()))


def maps(seed: int, *, steps: int | None = None) -> Tensor:
    values = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(seed))
    return values if steps is None else (values * steps).round() / steps


def test_a_value_worked_by_hand() -> None:
    """The ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4 correlate by 4.5 over the square root of 4.5 times 5."""
    a, b = torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]), torch.tensor([[[-1.0, 7.0], [0.5, 100.0]]])
    assert rank_correlation(a, b).item() == pytest.approx(4.5 / (4.5 * 5) ** 0.5, abs=1e-7)


@pytest.mark.parametrize("steps", [None, 2, 1])
def test_the_slow_definition_agrees(steps: int | None) -> None:
    a, b = maps(0, steps=steps), maps(1, steps=steps)
    b = b + a / 2 if steps is None else b
    expected = [slow_correlation(map_a, map_b) for map_a, map_b in zip(a, b)]
    correlations = rank_correlation(a, b)
    assert correlations.dtype == torch.float32
    np.testing.assert_allclose(correlations.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("steps", [None, 1])
def test_scipy_agrees(steps: int | None) -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = maps(2, steps=steps), maps(3, steps=steps)
    expected = [stats.spearmanr(map_a.flatten(), map_b.flatten()).statistic for map_a, map_b in zip(a, b)]
    np.testing.assert_allclose(rank_correlation(a, b).numpy(), expected, atol=1e-6)


def test_only_the_order_counts() -> None:
    a = maps(4).expand(3, 6, 7)
    assert rank_correlation(a, a.exp() * 10).tolist() == [1, 1, 1]
    assert rank_correlation(a, -(a**3)).tolist() == [-1, -1, -1]


def test_a_large_map_with_many_zeros_is_like_itself() -> None:
    large = torch.randn(2, 224, 224).relu()
    assert rank_correlation(large, large.clone()).tolist() == pytest.approx([1, 1], abs=1e-7)
    assert abs(rank_correlation(large, torch.randn(2, 224, 224)).max()) < 0.03


def test_each_image_by_itself() -> None:
    a, b = maps(5), maps(6)
    one_by_one = [rank_correlation(a[i : i + 1], b[i : i + 1]).item() for i in range(3)]
    assert rank_correlation(a, b).tolist() == one_by_one
    assert len(set(one_by_one)) == 3


def test_constant_maps_agree_with_one_another_and_with_nothing_else() -> None:
    blank, full, ramp = torch.zeros(1, 3, 3), torch.ones(1, 3, 3), torch.arange(9.0).reshape(1, 3, 3)
    assert rank_correlation(blank, full).item() == 1
    assert rank_correlation(blank, ramp).item() == 0
    assert rank_correlation(ramp, full).item() == 0
    correlations = rank_correlation(torch.cat([blank, ramp, ramp]), torch.cat([blank, blank, ramp]))
    assert correlations.tolist() == [1, 0, 1]


def test_arrays_and_maps_with_a_class_axis() -> None:
    a, b = maps(7), maps(8)
    assert torch.equal(rank_correlation(a.numpy(), b[:, None]), rank_correlation(a, b))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 4, 4), torch.zeros(2, 4, 5), r"have the shape \(2, 4, 5\), expected \(2, 4, 4\)"),
        (torch.zeros(4, 4), torch.zeros(4, 4), "expected \\(N,H,W\\)"),
        (torch.full((1, 2, 2), torch.nan), torch.zeros(1, 2, 2), "NaN or infinite"),
        ("map", torch.zeros(1, 2, 2), "expected a tensor or an array"),
    ],
)
def test_what_are_no_two_maps(a: object, b: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        rank_correlation(a, b)
