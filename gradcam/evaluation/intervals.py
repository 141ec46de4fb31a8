"""How sure a mean over pictures is, and which of several methods are told apart.

Which intervals, was chosen by simulation (tests/evaluation/test_intervals.py): from 8 pictures on they hold the true mean in
93 to 97 of 100 cases, for normal, skewed and bounded numbers; of 8 exponential ones Student's t has 89, and BCa 86. They
hold it too often (98) for numbers that are nearly all 0 or 1, too seldom (89 of 8) for lognormal ones with a deviation of 1.
Differences of methods are about symmetric, and Student's t is right there. Mosaics share pictures, so that their numbers
depend on one another: what a picture and what a mosaic has of its own are told apart there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, shorten
from gradcam.options import accept_old_parameters, refuse

LEVEL = 0.95
TINY = 1e-6  # spread or skewness that is rounding
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)  # of a quadrature
FEWEST = 6  # pictures of an interval: of five, no paired test could tell two methods apart
ENOUGH = 8  # pictures of a comparison: of fewer, an interval of skewed numbers holds the true mean too seldom


@dataclass(frozen=True)
class Interval:
    """A mean over images and its confidence interval.

    Attributes
    ----------
    mean : float
        The mean; NaN without images.
    low : float
        The lower end; minus infinity if there are too few images.
    high : float
        The upper end; infinity if there are too few images.
    n : int
        The number of images.

    Examples
    --------
    >>> from gradcam.evaluation import mean_interval
    >>> interval = mean_interval([0.4, 0.6, 0.5, 0.7, 0.3, 0.5, 0.4, 0.6])
    >>> interval.n, round(interval.mean, 1), interval.low < 0.5 < interval.high
    (8, 0.5, True)
    >>> interval.is_known, interval.excludes(0)
    (True, True)
    >>> mean_interval([0.5, 0.5]).to_fields()  # too few images
    {'n': 2, 'mean': 0.5, 'low': None, 'high': None}
    """

    mean: float
    low: float
    high: float
    n: int

    def excludes(self, value: float = 0.0) -> bool:
        """Return whether a value is outside the interval.

        A difference whose interval excludes zero is significant. With too few images, the interval excludes nothing.

        Parameters
        ----------
        value : float, default 0.0
            The value.

        Returns
        -------
        bool
            True if the value is below the lower end or above the upper end.
        """
        return not self.low <= value <= self.high

    @property
    def is_known(self) -> bool:
        """Whether there were enough images for an interval."""
        return math.isfinite(self.high - self.low)

    def to_fields(self) -> dict[str, float | int | None]:
        """Return the numbers for JSON, without infinity and NaN.

        Returns
        -------
        dict of str to float, int or None
            n, mean, low and high; None for unknown numbers.
        """
        numbers = {"mean": self.mean, "low": self.low, "high": self.high}
        return {"n": self.n, **{name: value if math.isfinite(value) else None for name, value in numbers.items()}}


@accept_old_parameters
def mean_interval(
    values: Iterable[Any], *, level: float = LEVEL, images: Sequence[Sequence[Hashable]] | None = None
) -> Interval:
    """Compute the mean of one number per image, and its confidence interval.

    Overlaps and probabilities are skewed, and so is the mean of a few of them. The interval is therefore Student's t,
    corrected for skewness by Hall's transformation. If all numbers are 0 or 1, such as hits, it is Wilson's interval: 8
    hits in 8 images give 0.68 to 1.

    Parameters
    ----------
    values : iterable of float, array or Tensor (N,)
        One number per image. None and NaN mean that an image has no number, and are left out.
    level : float, default 0.95
        The confidence level, between 0 and 1.
    images : sequence of sequences, default None
        The images that each number depends on, if there are several, such as the four images of a mosaic. Numbers that
        share images are correlated. A least-squares fit over all pairs of numbers therefore splits the variance into a
        part of the images and a part of the numbers, and the interval is Student's t.

    Returns
    -------
    Interval
        The mean and its interval. The interval is infinite if there are fewer than 6 numbers or 6 images.

    Raises
    ------
    GradcamError
        If a value is infinite or not a number, if the level is out of range, or if `images` does not have one entry
        per value.

    Examples
    --------
    >>> from gradcam.evaluation import mean_interval
    >>> found = mean_interval([0.4, 0.6, 0.5, 0.7, 0.3, 0.5, 0.4, 0.6, None])
    >>> found.n, round(found.mean, 1), round(found.low, 1), round(found.high, 1)
    (8, 0.5, 0.4, 0.6)

    References
    ----------
    Hall, "On the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B, 1992. Wilson,
    "Probable Inference, the Law of Succession, and Statistical Inference", JASA, 1927.
    """
    return _to_interval(_to_floats(values), level, images, is_skewed=images is None)


def _to_interval(
    values: Sequence[float], level: float, pictures: Sequence[Sequence[Hashable]] | None, *, is_skewed: bool
) -> Interval:
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
        raise refuse(level, "level", "a number between 0 and 1, such as 0.95.")
    found = _estimate(values, pictures)
    if found.freedom == 0:
        return Interval(found.mean, -math.inf, math.inf, found.n)
    if is_skewed:
        present = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
        if {*present} <= {0, 1}:
            low, high = bound_share(found.mean, found.n, NormalDist().inv_cdf((1 + level) / 2))
        else:
            low, high = _bound_skewed(present, level)
        return Interval(found.mean, low, high, found.n)
    half = _find_quantile(level, found.freedom) * found.error
    return Interval(found.mean, found.mean - half, found.mean + half, found.n)


def bound_share(share: float, n: int, z: float) -> tuple[float, float]:
    """Wilson's interval of a share of n, equation (1), for a normal distribution's quantile z."""
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _bound_skewed(numbers: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Hall's interval. For W, the mean's error in standard deviations of a number, and the skewness g, the cubic
    W + g W^2 / 3 + g^2 W^3 / 27 + g / 6n is about as symmetric as Student's t is: it is solved for W at both of t's ends."""
    mean, n, apart = float(numbers.mean()), len(numbers), numbers - numbers.mean()
    spread = float(numbers.std(ddof=1))
    skewness = float((apart**3).mean() / (apart**2).mean() ** 1.5) if spread > TINY else 0.0
    quantile = _find_quantile(level, n - 1) / math.sqrt(n)
    ends = []
    for end in (quantile, -quantile):
        centred = end - skewness / (6 * n)
        is_straight = abs(skewness) < TINY
        error = centred if is_straight else 3 / skewness * (float(np.cbrt(1 + skewness * centred)) - 1)
        ends.append(mean - spread * error)
    return ends[0], ends[1]


@accept_old_parameters
def paired_difference(
    values: Sequence[Any],
    reference: Sequence[Any],
    *,
    level: float = LEVEL,
    images: Sequence[Sequence[Hashable]] | None = None,
) -> Interval:
    """Compute the mean of the differences `values` minus `reference`, image by image, and its interval by Student's t.

    Differences are roughly symmetric, so skewness needs no correction. The differences are paired, so images that are
    difficult for both methods do not widen the interval. Images with None or NaN in either sequence are left out.

    Parameters
    ----------
    values : sequence of float
        One number per image.
    reference : sequence of float
        The numbers of the same images, in the same order.
    level : float, default 0.95
        As in `mean_interval`.
    images : sequence of sequences, default None
        As in `mean_interval`.

    Returns
    -------
    Interval
        The mean difference and its interval.

    Raises
    ------
    GradcamError
        If `values` and `reference` differ in length. Also as in `mean_interval`.

    Examples
    --------
    >>> from gradcam.evaluation import paired_difference
    >>> ours, theirs = [0.6, 0.7, 0.8, 0.5, 0.6, 0.9, 0.7, 0.6], [0.5, 0.6, 0.6, 0.4, 0.5, 0.8, 0.5, 0.5]
    >>> found = paired_difference(ours, theirs)
    >>> round(found.mean, 1), found.excludes(0)  # a small but significant difference
    (0.1, True)

    References
    ----------
    Student, "The Probable Error of a Mean", Biometrika, 1908.
    """
    return _to_interval(_subtract(values, reference), level, images, is_skewed=False)


def find_told_apart(
    rows: Mapping[str, Sequence[Any]],
    *,
    level: float = LEVEL,
    pictures: Sequence[Sequence[Hashable]] | None = None,
) -> set[frozenset[str]]:
    """The pairs of methods whose means differ by more than chance, of the methods' numbers for the same pictures. All
    pairs are tested, by Holm's procedure, since the best of several is chosen by its numbers: where all are alike, the
    probability that any is told apart from the best is 1 - `level` at most. Two that are not the best may be more often,
    where one is skewed and has a far larger spread: in 20 % for eight exponential ones whose spreads are 1 to 10."""
    pairs = [frozenset(pair) for pair in itertools.combinations(rows, 2)]
    chances = {}
    for pair in pairs:
        one, other = sorted(pair)
        found = _estimate(_subtract(rows[one], rows[other]), pictures)
        ratio = math.inf if found.error == 0 and found.mean != 0 else abs(found.mean) / (found.error or 1.0)
        chances[pair] = 1.0 if found.freedom == 0 else 1 - _find_share(ratio, found.freedom)
    told: set[frozenset[str]] = set()
    for place, pair in enumerate(sorted(pairs, key=chances.__getitem__)):
        if chances[pair] > (1 - level) / (len(pairs) - place):
            break
        told.add(pair)
    return told


@dataclass(frozen=True)
class _Estimate:
    """A mean of n numbers, its standard error, and the degrees of freedom of that; 0 of too few."""

    mean: float
    error: float
    freedom: int
    n: int


def _estimate(values: Sequence[float], pictures: Sequence[Sequence[Hashable]] | None) -> _Estimate:
    if pictures is not None and len(pictures) != len(values):
        raise GradcamError(
            f"There are {len(values)} values and {len(pictures)} lists of images: give one list per value."
        )
    kept = [number for number, value in enumerate(values) if not math.isnan(value)]
    numbers = np.array([values[number] for number in kept], dtype=np.float64)
    n = len(numbers)
    mean = math.fsum(numbers) / n if n else math.nan
    if pictures is None:
        freedom = n - 1 if n >= FEWEST else 0
        return _Estimate(mean, float(numbers.std(ddof=1)) / math.sqrt(n) if freedom else math.inf, freedom, n)
    names = {name: place for place, name in enumerate(dict.fromkeys(it for number in kept for it in pictures[number]))}
    if min(n, len(names)) < FEWEST:
        return _Estimate(mean, math.inf, 0, n)
    shows = np.zeros((n, len(names)))
    for row, number in enumerate(kept):
        shows[row, [names[it] for it in pictures[number]]] = 1
    of_pictures, of_numbers = _divide_variance(numbers, shows)
    error = math.sqrt((shows.sum(0) ** 2).sum() / n**2 * of_pictures + of_numbers / n)
    return _Estimate(mean, error, max(1, min(n, len(names) // 2) - 1), n)


def _divide_variance(numbers: Any, shows: Any) -> tuple[float, float]:
    """The variances of what a picture and of what a number has of its own, where each number is a sum of its pictures'
    and its own part. Half the squared difference of two numbers has the expectation of the second, and as many times the
    first as there are pictures in one of them and not in the other: a line through all pairs."""
    one, other = np.triu_indices(len(numbers), 1)
    squares = (numbers[one] - numbers[other]) ** 2 / 2
    sizes = shows.sum(1)
    apart = (sizes[one] + sizes[other]) / 2 - (shows @ shows.T)[one, other]
    middle, spread = apart.mean(), ((apart - apart.mean()) ** 2).sum()
    if spread == 0:  # all share as much, as where no two share anything
        return float(squares.mean() / middle) if middle else 0.0, 0.0
    slope = max(0.0, float(((apart - middle) * (squares - squares.mean())).sum() / spread))
    rest = float(squares.mean() - slope * middle)
    return (slope, rest) if rest >= 0 else (float(squares.mean() / middle), 0.0)


@functools.lru_cache(maxsize=1024)
def _find_quantile(level: float, freedom: int) -> float:
    """How far from 0 Student's t is with this probability at most."""
    low, high = 0.0, 1.0
    while _find_share(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _find_share(middle, freedom) < level else (low, middle)
    return high


def _find_share(ratio: float, freedom: int) -> float:
    """The probability that Student's t lies within this of 0. Its density is a power of the cosine of an angle: Abramowitz
    and Stegun, Handbook of Mathematical Functions, 26.7.1."""

    def integrate(end: float) -> float:
        return end * float(WEIGHTS @ np.cos(end * (NODES + 1) / 2) ** (freedom - 1))

    return integrate(math.atan(ratio / math.sqrt(freedom))) / integrate(math.pi / 2)


def _subtract(values: Sequence[Any], reference: Sequence[Any]) -> list[float]:
    ours, theirs = _to_floats(values), _to_floats(reference)
    if len(ours) != len(theirs):
        raise GradcamError(
            f"There are {len(ours)} values and {len(theirs)} reference values: expected one of each per image, in the same "
            "order, with None for images without a value."
        )
    return [a - b for a, b in zip(ours, theirs)]


def _to_floats(values: Iterable[Any]) -> list[float]:
    try:
        found = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: of a tensor of several numbers
        raise GradcamError(
            f"The values are {shorten(values)}, expected one number per image, or None for images without a value."
        ) from None
    if any(map(math.isinf, found)):
        raise GradcamError("The values contain an infinite number, so they have no mean.")
    return found
