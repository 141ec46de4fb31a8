"""Intervals of means over pictures: against SciPy, slow loops, and simulations of what they promise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch

import gradcam
from gradcam.evaluation import Interval, mean_interval, paired_difference
from gradcam.evaluation.intervals import find_told_apart

VALUES = [0.12, 0.5, 0.31, 0.77, 0.05, 0.93, 0.4, 0.62]
OTHERS = [0.10, 0.6, 0.22, 0.71, 0.07, 0.80, 0.4, 0.51]
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@pytest.mark.parametrize("count", [8, 9, 12, 31])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_an_interval_is_students(count: int, level: float) -> None:
    values = np.random.default_rng(count).gamma(2, size=count)
    found = mean_interval(values, level=level)
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(level)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert (found.mean, found.n) == (pytest.approx(values.mean()), count)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_of_too_few_pictures_nothing_is_known(count: int) -> None:
    found = mean_interval(np.linspace(1, 2, count))
    assert not found.is_known
    assert not found.excludes(0)
    assert not found.excludes(17.0)
    assert found.to_fields() == {"n": count, "mean": pytest.approx(1.5 if count > 1 else 1), "low": None, "high": None}
    assert mean_interval(np.linspace(1, 2, 6)).excludes(0)


@pytest.mark.parametrize("values", [[], [None], [math.nan, None]])
def test_no_pictures(values: list[float | None]) -> None:
    found = mean_interval(values)
    assert math.isnan(found.mean)
    assert (found.n, found.excludes()) == (0, False)
    assert found.to_fields() == {"n": 0, "mean": None, "low": None, "high": None}


def test_pictures_without_a_number_are_left_out() -> None:
    assert mean_interval([0.2, None, *VALUES, math.nan]) == mean_interval([0.2, *VALUES])
    assert mean_interval([0.2, None, 0.4]).n == 2


def test_numbers_that_are_alike_have_no_width() -> None:
    assert mean_interval([0.1] * 8) == Interval(0.1, pytest.approx(0.1), pytest.approx(0.1), 8)


def test_values_may_be_of_any_kind() -> None:
    expected = mean_interval(VALUES)
    assert mean_interval(np.array(VALUES)) == expected
    assert mean_interval(torch.tensor(VALUES, dtype=torch.float64)) == expected
    assert mean_interval(value for value in VALUES) == expected


def test_a_paired_difference_is_the_paired_tests() -> None:
    found = paired_difference(VALUES, OTHERS)
    expected = scipy.stats.ttest_rel(VALUES, OTHERS).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert paired_difference(VALUES, VALUES) == Interval(0.0, 0.0, 0.0, 8)
    some = paired_difference([1.0, None, 3.0, 5.0, *VALUES], [0.0, 1.0, math.nan, 2.0, *OTHERS])
    assert some == mean_interval([1.0, 3.0, *(a - b for a, b in zip(VALUES, OTHERS))])


def test_pairing_takes_off_what_is_hard_for_both() -> None:
    worse = np.linspace(0, 1, 20)
    better = worse + 0.01 + 0.001 * np.random.default_rng(0).normal(size=20)
    assert paired_difference(better, worse).excludes(0)
    assert not mean_interval(better).excludes(mean_interval(worse).mean)


def test_excludes_what_lies_outside() -> None:
    interval = Interval(0.5, 0.25, 0.75, 9)
    assert [interval.excludes(value) for value in (0.0, 0.25, 0.5, 0.75, 0.76)] == [True, False, False, False, True]


# What they promise

NUMBERS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda generator, size: generator.normal(0, 1, size), 0),
    "shares": (lambda generator, size: generator.beta(2, 3, size), 2 / 5),
    "all or nothing, nearly": (lambda generator, size: generator.beta(0.5, 0.5, size), 1 / 2),
    "differences of skewed ones": (lambda generator, size: generator.beta(2, 5, size) - generator.beta(2, 5, size), 0),
    "heavy tails": (lambda generator, size: generator.standard_t(5, size), 0),
}


@pytest.mark.parametrize("count", [8, 12, 20, 50])
@pytest.mark.parametrize("kind", NUMBERS)
def test_intervals_hold_the_true_mean_as_often_as_they_say(kind: str, count: int) -> None:
    make, mean = NUMBERS[kind]
    found = [mean_interval(row) for row in make(np.random.default_rng(1), (1500, count))]
    assert 0.93 <= np.mean([not it.excludes(mean) for it in found]) <= 0.97


def draw_mosaics(
    generator: np.random.Generator, pictures: int, count: int, share: float
) -> tuple[np.ndarray, list[list[int]]]:
    """Numbers of mosaics of pictures that have their own level, with as much of their own; each picture is in as many."""
    levels, uses, fours = generator.beta(2, 3, pictures), np.zeros(pictures), []
    for _ in range(count):
        four = np.argsort(uses + generator.random(pictures))[:4]
        uses[four] += 1
        fours.append(four.tolist())
    own = generator.beta(2, 3, count)
    return share * levels[np.array(fours)].mean(1) + (1 - share) * own, fours


@pytest.mark.parametrize(("pictures", "count"), [(32, 8), (16, 12), (24, 40), (60, 64)])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_mosaics_that_share_pictures_are_not_counted_as_so_many(pictures: int, count: int, share: float) -> None:
    generator, held, naive = np.random.default_rng(2), 0, 0
    rounds = 500
    for _ in range(rounds):
        values, fours = draw_mosaics(generator, pictures, count, share)
        held += not mean_interval(values, pictures=fours).excludes(2 / 5)
        naive += not mean_interval(values).excludes(2 / 5)
    assert 0.92 <= held / rounds <= 0.98
    if (pictures, count, share) == (24, 40, 0.7):
        assert naive / rounds < 0.85  # as if they shared none


def test_mosaics_that_share_nothing_are_numbers_like_others() -> None:
    pictures = [[f"{number}{part}" for part in "abcd"] for number in range(8)]
    found = mean_interval(VALUES, pictures=pictures)
    expected = mean_interval(VALUES)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert not mean_interval(VALUES, pictures=[["a", "b", "c", "d"]] * 8).is_known  # four pictures


def test_methods_that_are_alike_are_rarely_told_apart() -> None:
    generator, rounds = np.random.default_rng(3), 1000
    wrong = 0
    for _ in range(rounds):
        levels = generator.beta(2, 3, 12)  # of the pictures, which all methods share
        rows = {name: levels + 0.2 * generator.normal(size=12) for name in "abcdefgh"}
        wrong += bool(find_told_apart(rows))
    assert wrong / rounds <= 0.05


def test_methods_that_differ_are_told_apart() -> None:
    generator = np.random.default_rng(4)
    levels = generator.beta(2, 3, 20)
    rows = {name: levels + shift + 0.05 * generator.normal(size=20) for name, shift in zip("abc", (0, 0.01, 0.3))}
    assert find_told_apart(rows) == {frozenset("ac"), frozenset("bc")}
    assert find_told_apart({name: row[:5] for name, row in rows.items()}) == set()
    same = {"a": [0.5] * 8, "b": [0.5] * 8, "c": [0.4] * 8}
    assert find_told_apart(same) == {frozenset("ac"), frozenset("bc")}


def test_pairs_are_tested_by_holms_procedure() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        rows = {name: generator.normal(shift, 1, 10) for name, shift in zip("abcd", (0, 0.3, 0.8, 1.6))}
        pairs = [*itertools.combinations("abcd", 2)]
        chances = [scipy.stats.ttest_rel(rows[one], rows[other]).pvalue for one, other in pairs]
        adjusted, most = {}, 0.0
        for rank, number in enumerate(np.argsort(chances)):
            most = max(most, chances[number] * (len(pairs) - rank))
            adjusted[frozenset(pairs[number])] = most
        assert find_told_apart(rows) == {pair for pair, value in adjusted.items() if value <= 0.05}


# What is refused


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["a"], {}, "expected numbers, one per picture"),
        ([[1.0, 2.0]], {}, "expected numbers, one per picture"),
        ([1.0, math.inf], {}, "hold an infinite one"),
        ([1.0], {"level": 1}, "level is 1, expected a share between 0 and 1"),
        ([1.0], {"level": True}, "level is True"),
        ([1.0], {"level": "high"}, "level is 'high'"),
        ([1.0, 2.0], {"pictures": [["a"]]}, "There are 2 values, and the pictures of 1"),
    ],
)
def test_what_is_no_number(values: list[object], options: dict[str, object], message: str) -> None:
    with pytest.raises(gradcam.GradcamError, match=message):
        mean_interval(values, **options)  # type: ignore[arg-type]


def test_pairs_of_other_lengths() -> None:
    with pytest.raises(gradcam.GradcamError, match="There are 3 values and 2 of the reference"):
        paired_difference([1, 2, 3], [1, 2])
