"""Test intervals of means over images: against SciPy, slow loops, and simulations of their coverage."""

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
from gradcam.evaluation.intervals import find_distinguished_pairs

VALUES = [0.12, 0.5, 0.31, 0.77, 0.05, 0.93, 0.4, 0.62]
SECOND_VALUES = [0.10, 0.6, 0.22, 0.71, 0.07, 0.80, 0.4, 0.51]
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@pytest.mark.parametrize("count", [8, 9, 12, 31])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_an_interval_of_differences_is_students(count: int, level: float) -> None:
    values = np.random.default_rng(count).gamma(2, size=count)
    interval = paired_difference(values, np.zeros(count), level=level)
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(level)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert (interval.mean, interval.n) == (pytest.approx(values.mean()), count)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_too_few_images_have_no_interval(count: int) -> None:
    interval = mean_interval(np.linspace(1, 2, count))
    assert not interval.is_known
    assert not interval.excludes(0)
    assert not interval.excludes(17.0)
    assert interval.to_fields() == {
        "n": count,
        "mean": pytest.approx(1.5 if count > 1 else 1),
        "low": None,
        "high": None,
    }
    assert mean_interval(np.linspace(1, 2, 6)).excludes(0)


@pytest.mark.parametrize("values", [[], [None], [math.nan, None]])
def test_no_pictures(values: list[float | None]) -> None:
    interval = mean_interval(values)
    assert math.isnan(interval.mean)
    assert (interval.n, interval.excludes()) == (0, False)
    assert interval.to_fields() == {"n": 0, "mean": None, "low": None, "high": None}


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
    interval = paired_difference(VALUES, SECOND_VALUES)
    expected = scipy.stats.ttest_rel(VALUES, SECOND_VALUES).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert paired_difference(VALUES, VALUES) == Interval(0.0, 0.0, 0.0, 8)
    some = paired_difference([1.0, None, 3.0, 5.0, *VALUES], [0.0, 1.0, math.nan, 2.0, *SECOND_VALUES])
    assert some == paired_difference([1.0, 3.0, *(a - b for a, b in zip(VALUES, SECOND_VALUES))], [0.0] * 10)


def test_pairing_removes_the_difficulty_of_each_image() -> None:
    worse = np.linspace(0, 1, 20)
    better = worse + 0.01 + 0.001 * np.random.default_rng(0).normal(size=20)
    assert paired_difference(better, worse).excludes(0)
    assert not mean_interval(better).excludes(mean_interval(worse).mean)


def test_excludes_what_lies_outside() -> None:
    interval = Interval(0.5, 0.25, 0.75, 9)
    assert [interval.excludes(value) for value in (0.0, 0.25, 0.5, 0.75, 0.76)] == [True, False, False, False, True]


# Coverage

NUMBERS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda generator, size: generator.normal(0, 1, size), 0),
    "exponential": (lambda generator, size: generator.exponential(1, size), 1),
    "gamma": (lambda generator, size: generator.gamma(2, 1, size), 2),
    "shares in the middle": (lambda generator, size: generator.beta(2, 3, size), 2 / 5),
    "mostly high": (lambda generator, size: generator.beta(5, 1, size), 5 / 6),
    "mostly none": (lambda generator, size: generator.beta(0.5, 2, size), 1 / 5),
}
DIFFERENCES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda generator, size: generator.normal(0.3, 1, size), 0.3),
    "of skewed ones": (lambda generator, size: generator.exponential(1, size) - generator.exponential(2, size), -1),
    "of shares": (lambda generator, size: generator.beta(2, 2, size) - generator.beta(2, 5, size), 1 / 2 - 2 / 7),
    "of nearly 0 or 1": (lambda generator, size: generator.beta(0.5, 0.5, size) - 0.5, 0),
    "heavy tails": (lambda generator, size: generator.standard_t(5, size), 0),
}


def compute_coverage(intervals: list[Interval], mean: float) -> float:
    return float(np.mean([not interval.excludes(mean) for interval in intervals]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 12, 20, 50])
@pytest.mark.parametrize("kind", NUMBERS)
def test_intervals_hold_the_true_mean_as_often_as_they_say(kind: str, count: int) -> None:
    make, mean = NUMBERS[kind]
    rows = make(np.random.default_rng(1), (3000, count))
    assert 0.93 <= compute_coverage([mean_interval(row) for row in rows], mean) <= 0.975
    if (kind, count) == ("exponential", 8):
        # Student's t covers the mean less often.
        assert compute_coverage([paired_difference(row, np.zeros(8)) for row in rows], mean) < 0.91


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 12, 20, 50])
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_intervals_of_differences_hold_the_true_mean_as_often_as_they_say(kind: str, count: int) -> None:
    make, mean = DIFFERENCES[kind]
    rows = make(np.random.default_rng(2), (3000, count))
    assert 0.93 <= compute_coverage([paired_difference(row, np.zeros(count)) for row in rows], mean) <= 0.97


@pytest.mark.parametrize("count", [8, 12, 20, 50])
def test_intervals_of_hits_hold_the_share_on_average_over_shares(count: int) -> None:
    """For a single share, the coverage jumps from one number of hits to the next.

    It is computed exactly, by the binomial distribution.
    """
    shares = np.linspace(0.05, 0.95, 91)
    ends = [mean_interval([1.0] * hits + [0.0] * (count - hits)) for hits in range(count + 1)]
    coverage = [
        sum(
            scipy.stats.binom.pmf(hits, count, share)
            for hits, interval in enumerate(ends)
            if not interval.excludes(share)
        )
        for share in shares
    ]
    assert 0.94 <= np.mean(coverage) <= 0.97
    assert min(coverage) >= 0.83


def test_an_interval_joins_the_solutions_of_halls_cubic_and_students_interval() -> None:
    generator = np.random.default_rng(6)
    for numbers in (generator.exponential(1, 9), -generator.gamma(2, 1, 14), generator.exponential(1, 20)):
        n, ends = len(numbers), []
        skewness = scipy.stats.skew(numbers, bias=False) ** 2 / scipy.stats.skew(numbers)
        if abs(skewness) < 1.5:  # mostly due to chance
            skewness = np.sign(skewness) * abs(skewness) ** 6 / 1.5**5
        for share in (0.95, 0.05):
            quantile = scipy.stats.t.ppf(share, n - 1) / math.sqrt(n)
            cubic = [skewness**2 / 27, skewness / 3, 1, skewness / (6 * n) - quantile]
            (error,) = (root.real for root in np.roots(cubic) if abs(root.imag) < 1e-9)
            ends.append(numbers.mean() - numbers.std(ddof=1) * error)
        student = scipy.stats.ttest_1samp(numbers, 0).confidence_interval(0.9)
        expected = min(ends[0], student.low), max(ends[1], student.high)
        interval = mean_interval(numbers, level=0.9)
        assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-6)
        assert (interval.low, interval.high) != pytest.approx((student.low, student.high), rel=1e-6)


@pytest.mark.parametrize("hits", [0, 1, 5, 9, 10])
def test_an_interval_of_hits_is_wilsons(hits: int) -> None:
    interval = mean_interval([1] * hits + [0] * (10 - hits))
    expected = scipy.stats.binomtest(hits, 10).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def draw_mosaics(
    generator: np.random.Generator, pictures: int, count: int, share: float
) -> tuple[np.ndarray, list[list[int]]]:
    """Sample values of mosaics, and their images.

    A value depends on its images (by `share`) and on noise. Images are used equally often.
    """
    levels, uses, fours = generator.beta(2, 3, pictures), np.zeros(pictures), []
    for _ in range(count):
        four = np.argsort(uses + generator.random(pictures))[:4]
        uses[four] += 1
        fours.append(four.tolist())
    noise = generator.beta(2, 3, count)
    return share * levels[np.array(fours)].mean(1) + (1 - share) * noise, fours


@pytest.mark.slow
@pytest.mark.parametrize(("pictures", "count"), [(32, 8), (16, 12), (24, 40), (60, 64)])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_mosaics_that_share_pictures_are_not_counted_as_so_many(pictures: int, count: int, share: float) -> None:
    generator, covered, covered_naively = np.random.default_rng(2), 0, 0
    rounds = 500
    for _ in range(rounds):
        values, fours = draw_mosaics(generator, pictures, count, share)
        covered += not mean_interval(values, images=fours).excludes(2 / 5)
        covered_naively += not mean_interval(values).excludes(2 / 5)
    # If the images matter little, the intervals are too wide, so that they are never too narrow if the images matter.
    assert 0.92 <= covered / rounds <= (0.99 if share == 0.7 else 1)
    if (pictures, count, share) == (24, 40, 0.7):
        assert covered_naively / rounds < 0.85  # ignores that mosaics share images


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_error_of_mosaics_splits_their_variance_between_images_and_mosaics(share: float) -> None:
    generator = np.random.default_rng(8)
    for pictures, count in [(9, 9), (20, 20), (12, 40), (40, 16)]:
        values, fours = draw_mosaics(generator, pictures, count, share)
        pairs = [*itertools.combinations(range(count), 2)]
        unshared = [4 - len({*fours[a]} & {*fours[b]}) for a, b in pairs]
        squares = [(values[a] - values[b]) ** 2 / 2 for a, b in pairs]
        slope = scipy.stats.linregress(unshared, squares).slope
        all_of_images = np.mean(squares) / np.mean(unshared)
        image_variance = min(max(slope, 0.75 * np.var(values, ddof=1) / 4), all_of_images)
        own_variance = np.mean(squares) - image_variance * np.mean(unshared)
        weights = [sum(image in four for four in fours) / count for image in {i for four in fours for i in four}]
        error = math.sqrt(sum(weight**2 for weight in weights) * image_variance + own_variance / count)
        freedom = min(count - 1, 2 * min(count, len(weights) // 2) - 1)
        interval = mean_interval(values, images=fours)
        assert interval.high - values.mean() == pytest.approx(scipy.stats.t.ppf(0.975, freedom) * error, rel=1e-6)


def test_mosaics_without_common_images_are_independent_values() -> None:
    pictures = [[f"{number}{part}" for part in "abcd"] for number in range(8)]
    interval = mean_interval(VALUES, images=pictures)
    expected = paired_difference(VALUES, [0.0] * 8)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert not mean_interval(VALUES, images=[["a", "b", "c", "d"]] * 8).is_known  # these are only four images


def test_mosaics_that_are_all_hits_have_wilsons_interval_of_the_independent_mosaics() -> None:
    pictures = [[4 * number + part for part in range(4)] for number in range(8)]
    expected = scipy.stats.binomtest(8, 8).proportion_ci(method="wilson")
    interval = mean_interval([1.0] * 8, images=pictures)
    assert (interval.low, interval.high) == pytest.approx((expected.low, 1.0), abs=1e-12)
    assert paired_difference([1.0] * 8, [0.0] * 8, images=pictures).excludes(0)


ALIKE: dict[str, Draw] = {  # eight methods, for all of which the same images are hard
    "normal": lambda generator, size: generator.beta(2, 3, (size[0], 1)) + 0.2 * generator.normal(size=size),
    "skewed, of several spreads": lambda generator, size: (generator.exponential(1, size) - 1) * np.linspace(0.2, 2, 8),
    "hits": lambda generator, size: (generator.random(size) < generator.beta(2, 1, (size[0], 1))).astype(float),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 20])
@pytest.mark.parametrize("kind", ALIKE)
def test_methods_that_are_alike_are_rarely_told_apart(kind: str, count: int) -> None:
    """Test the familywise error when methods are compared with the best one, chosen by the same values.

    Pair by pair, it is far higher.
    """
    generator, rounds, wrong, naive = np.random.default_rng(3), 200, 0, 0
    for _ in range(rounds):
        table = ALIKE[kind](generator, (count, 8))
        place = table.mean(0).argmax()
        told_apart = find_distinguished_pairs(dict(zip("abcdefgh", table.T)), None)
        wrong += any("abcdefgh"[place] in pair for pair in told_apart)
        with np.errstate(invalid="ignore", divide="ignore"):
            naive += (scipy.stats.ttest_1samp(table[:, [place]] - table, 0).pvalue < 0.05).any()
    assert wrong / rounds <= 0.05
    assert naive / rounds > 0.15


@pytest.mark.slow
@pytest.mark.parametrize("pictures", [12, 20, 50])
def test_methods_that_are_alike_on_mosaics_are_rarely_told_apart(pictures: int) -> None:
    """A method's value of a mosaic depends almost only on its four images, so that few images decide."""
    generator, rounds, wrong = np.random.default_rng(77), 300, 0
    for _ in range(rounds):
        _, fours = draw_mosaics(generator, pictures, pictures, 0.5)
        levels = generator.permuted(np.tile([0.25, 0.25, 0.25, 0.7, 0.75, 0.8, 0.85, 0.9], (pictures, 1)), axis=1)
        table = levels[np.array(fours)].mean(1) + 0.01 * generator.normal(size=(pictures, 8))
        told_apart = find_distinguished_pairs(dict(zip("abcdefgh", table.T)), fours)
        wrong += any("abcdefgh"[table.mean(0).argmax()] in pair for pair in told_apart)
    assert wrong / rounds <= 0.07  # The limit is 5 %. The Monte Carlo error of 300 rounds is 1.3 %.


def test_methods_that_differ_are_told_apart() -> None:
    generator = np.random.default_rng(4)
    levels = generator.beta(2, 3, 20)
    rows = {name: levels + shift + 0.05 * generator.normal(size=20) for name, shift in zip("abc", (0, 0.01, 0.3))}
    assert find_distinguished_pairs(rows, None) == {frozenset("ac"), frozenset("bc")}
    assert find_distinguished_pairs({name: row[:5] for name, row in rows.items()}, None) == set()
    with_equal_rows = {"a": [0.5] * 8, "b": [0.5] * 8, "c": [0.4] * 8}
    assert find_distinguished_pairs(with_equal_rows, None) == {frozenset("ac"), frozenset("bc")}


@pytest.mark.parametrize(("pictures", "is_enough"), [(8, False), (11, False), (12, True)])
def test_mosaics_of_few_images_distinguish_no_methods(pictures: int, is_enough: bool) -> None:
    generator = np.random.default_rng(7)
    values, fours = draw_mosaics(generator, pictures, pictures, 0.5)
    rows = {"a": values, "b": values + 0.5 + 0.01 * generator.normal(size=pictures)}
    assert find_distinguished_pairs(rows, fours) == ({frozenset("ab")} if is_enough else set())


def test_pairs_are_tested_by_holms_procedure() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        rows = {name: generator.normal(shift, 1, 10) for name, shift in zip("abcd", (0, 0.3, 0.8, 1.6))}
        pairs = [*itertools.combinations("abcd", 2)]
        chances = [scipy.stats.ttest_rel(rows[a], rows[b]).pvalue for a, b in pairs]
        adjusted, largest = {}, 0.0
        for rank, number in enumerate(np.argsort(chances)):
            largest = max(largest, chances[number] * (len(pairs) - rank))
            adjusted[frozenset(pairs[number])] = largest
        assert find_distinguished_pairs(rows, None) == {pair for pair, value in adjusted.items() if value <= 0.05}


# Invalid values


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["a"], {}, "expected one number per image"), ([[1.0, 2.0]], {}, "expected one number per image"),
        ([1.0, math.inf], {}, "At least one value is infinite"),
        ([1.0], {"level": 1}, "level is 1, expected a number between 0 and 1"),
        ([1.0], {"level": True}, "level is True"), ([1.0], {"level": "high"}, "level is 'high'"),
        ([1.0, 2.0], {"images": [["a"]]}, "There are 2 values and 1 lists of images"),
    ],
)  # fmt: skip
def test_what_is_no_number(values: list[object], options: dict[str, object], message: str) -> None:
    with pytest.raises(gradcam.GradcamError, match=message):
        mean_interval(values, **options)  # type: ignore[arg-type]


def test_pairs_of_other_lengths() -> None:
    with pytest.raises(gradcam.GradcamError, match="There are 3 values and 2 reference values"):
        paired_difference([1, 2, 3], [1, 2])
