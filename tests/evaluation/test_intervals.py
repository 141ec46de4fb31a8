"""Intervals of means over pictures: against SciPy's bootstrap, a slow loop, and values worked by hand."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch

import gradcam
from gradcam.evaluation import Interval, intervals, mean_interval, paired_difference

VALUES = [0.12, 0.5, 0.31, 0.77, 0.05, 0.93, 0.4]
OTHERS = [0.10, 0.6, 0.22, 0.71, 0.07, 0.80, 0.4]


def test_an_interval_is_that_of_scipys_percentile_bootstrap() -> None:
    found = mean_interval(VALUES, samples=500, seed=3, level=0.9)
    expected = scipy.stats.bootstrap(
        (VALUES,), np.mean, n_resamples=500, confidence_level=0.9, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.mean == pytest.approx(sum(VALUES) / 7, rel=1e-15)
    assert found.n == 7


def test_an_interval_is_that_of_a_slow_loop() -> None:
    generator = np.random.default_rng(0)
    means = []
    for _ in range(2000):
        drawn = [VALUES[generator.integers(0, 7)] for _ in VALUES]
        means.append(sum(drawn) / 7)
    means.sort()

    def quantile(share: float) -> float:
        place = share * (len(means) - 1)
        below = int(place)
        return means[below] + (place - below) * (means[below + 1] - means[below])

    found = mean_interval(VALUES)
    assert (found.low, found.high) == pytest.approx((quantile(0.025), quantile(0.975)), rel=1e-9)


def test_two_pictures_by_hand() -> None:
    """Of 0 and 1, a quarter of all samples are 0, half are 1/2, a quarter are 1: tails over a quarter end at 1/2."""
    assert mean_interval([0, 1], level=0.4) == Interval(0.5, 0.5, 0.5, 2)


def test_four_pictures_by_all_of_their_samples() -> None:
    """With many samples, the quantiles are those of the 256 that there can be."""
    values = [0.0, 1.0, 5.0, 6.5]
    every = [sum(drawn) / 4 for drawn in product(values, repeat=4)]
    low, high = np.quantile(every, [0.1, 0.9], method="inverted_cdf")
    found = mean_interval(values, samples=50_000, level=0.8)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)


@pytest.mark.parametrize(("level", "needed"), [(0.95, 6), (0.9, 5), (0.8, 4), (0.99, 8), (0.5, 2)])
def test_of_too_few_pictures_nothing_is_known(level: float, needed: int) -> None:
    """As many as SciPy's exact paired test needs, however clear the differences are."""
    for count in range(1, needed + 1):
        differences = np.linspace(1, 2, count)
        is_enough = scipy.stats.wilcoxon(differences, method="exact").pvalue <= 1 - level + 1e-12
        assert is_enough == (count == needed)
        found = mean_interval(differences, level=level)
        assert found.is_known == found.excludes(0) == is_enough
        assert found.mean == pytest.approx(1.5 if count > 1 else 1)
        fields = found.to_fields()
        assert (fields["low"], fields["high"]) == ((found.low, found.high) if is_enough else (None, None))
        assert fields["n"] == count


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for seed in range(400):
        found = mean_interval(generator.normal(2.0, 1.0, 40), samples=400, seed=seed)
        held += found.low <= 2.0 <= found.high
    assert 0.90 <= held / 400 <= 0.975


def test_pictures_without_a_number_are_left_out() -> None:
    assert mean_interval([0.2, None, *VALUES, math.nan]) == mean_interval([0.2, *VALUES])
    assert mean_interval([0.2, None, 0.4]).n == 2


def test_of_one_picture_nothing_is_known_of_the_spread() -> None:
    found = mean_interval([0.25])
    assert found == Interval(0.25, -math.inf, math.inf, 1)
    assert not found.excludes(0.0)
    assert not found.excludes(17.0)


@pytest.mark.parametrize("values", [[], [None, math.nan], np.zeros(0)])
def test_of_no_picture_there_is_no_mean(values: object) -> None:
    found = mean_interval(values)  # type: ignore[arg-type]
    assert math.isnan(found.mean)
    assert (found.low, found.high, found.n) == (-math.inf, math.inf, 0)
    assert not found.excludes()


def test_equal_values_have_no_spread() -> None:
    assert mean_interval([0.1] * 7) == Interval(0.1, pytest.approx(0.1, abs=1e-16), pytest.approx(0.1, abs=1e-16), 7)


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    assert mean_interval(VALUES, seed=5) == mean_interval(VALUES, seed=5)
    assert mean_interval(VALUES, seed=5) != mean_interval(VALUES, seed=6)


def test_arrays_tensors_and_generators_are_alike() -> None:
    expected = mean_interval(VALUES)
    assert mean_interval(np.array(VALUES)) == expected
    assert mean_interval(torch.tensor(VALUES, dtype=torch.float64)) == expected
    assert mean_interval(value for value in VALUES) == expected


def test_drawing_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mean_interval(VALUES, samples=100)
    monkeypatch.setattr(intervals, "MOST_DRAWN", 50)  # seven samples of seven at once
    assert mean_interval(VALUES, samples=100) == whole


def test_a_paired_difference_draws_the_same_pictures_for_both() -> None:
    """That is the difference of the two means in each sample, not that of two samples of their own."""
    generator = np.random.default_rng(4)
    drawn = generator.integers(0, 7, (300, 7))
    means = np.array(VALUES)[drawn].mean(1) - np.array(OTHERS)[drawn].mean(1)
    found = paired_difference(VALUES, OTHERS, samples=300, seed=4)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), rel=1e-9)
    assert found.mean == pytest.approx((sum(VALUES) - sum(OTHERS)) / 7, rel=1e-12)


def test_a_small_difference_on_pictures_that_differ_much_is_clear_only_if_paired() -> None:
    hard = np.linspace(0, 1, 30)
    better, worse = hard + 0.02, hard + 0.001 * np.arange(30)[::-1] / 30
    assert paired_difference(better, worse).excludes(0)
    assert not mean_interval(better).excludes(mean_interval(worse).mean)


def test_a_method_does_not_differ_from_itself() -> None:
    assert paired_difference(VALUES, VALUES) == Interval(0.0, 0.0, 0.0, 7)
    assert not paired_difference(VALUES, VALUES).excludes()


def test_a_difference_leaves_out_the_pictures_that_one_of_the_two_lacks() -> None:
    found = paired_difference([1.0, None, 3.0, 5.0, *VALUES], [0.0, 1.0, math.nan, 2.0, *OTHERS])
    assert found == mean_interval([1.0, 3.0, *(a - b for a, b in zip(VALUES, OTHERS))])


def test_which_values_an_interval_excludes() -> None:
    interval = Interval(0.5, 0.25, 0.75, 9)
    assert [interval.excludes(value) for value in (0.0, 0.25, 0.5, 0.75, 0.76)] == [True, False, False, False, True]
    assert Interval(-0.5, -0.75, -0.25, 9).excludes()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["a"], {}, "expected numbers, one per picture"),
        (0.5, {}, "expected numbers, one per picture"),
        (torch.zeros(2, 2), {}, "expected numbers, one per picture"),
        ([0.5, math.inf], {}, "infinite"),
        ([0.5], {"samples": 0}, "samples is 0, expected how many"),
        ([0.5], {"samples": True}, "samples is True"),
        ([0.5], {"seed": -1}, "seed is -1, expected an integer"),
        ([0.5], {"seed": 1.5}, "seed is 1.5"),
        ([0.5], {"level": 1}, "level is 1, expected a share between 0 and 1"),
        ([0.5], {"level": 95}, "level is 95"),
    ],
)
def test_what_has_no_interval(values: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(gradcam.GradcamError, match=message):
        mean_interval(values, **options)  # type: ignore[arg-type]


def test_a_difference_needs_as_many_of_both() -> None:
    with pytest.raises(gradcam.GradcamError, match="3 values and 2 of the reference"):
        paired_difference([1, 2, 3], [1, 2])
