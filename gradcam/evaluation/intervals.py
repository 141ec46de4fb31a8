"""Confidence intervals of means over images, and tests for significant differences between methods.

The intervals were chosen by simulation (tests/evaluation/test_intervals.py, `scripts/bench --only intervals`). With 8
or more images, a 95 % interval contains the true mean in 93 to 97 of 100 cases, for normal, skewed, bounded and measured
numbers. There are two exceptions. If many numbers are near 0 or 1, the interval contains the true mean too often (98
cases or more). With 8 lognormal numbers (sigma 1), the interval contains the true mean too seldom (89 cases). Simpler
intervals are worse. For 8 exponentially distributed numbers, Student's t contains the true mean in only 89 cases, and
BCa (a bootstrap interval) in only 86 cases. Differences between methods are distributed roughly symmetrically, so
Student's t is accurate for differences.

If two mosaics share an image, their numbers are correlated. The variance is therefore split into a part that comes from
the images and a part that comes from the mosaics.
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
from gradcam.options import accept_old_parameters, argument_error

CONFIDENCE = 0.95
ROUNDING_LIMIT = 1e-6  # A smaller standard deviation or skewness counts as zero.
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)  # Gauss-Legendre quadrature
# An interval needs six images, because a sign test of five pairs is never significant: its smallest p is 2 / 2**5. A
# comparison needs eight images. With fewer, the intervals of skewed numbers contain the true mean too seldom.
MIN_IMAGES_FOR_INTERVAL, MIN_IMAGES_TO_COMPARE = 6, 8
# With fewer images in mosaics, 6 to 9 % of simulated studies mark one of eight equal methods as worse.
MIN_MOSAIC_IMAGES_TO_COMPARE = 12
# The fraction of the variance between mosaics that is attributed at least to their images. The measured fractions are 0.6
# to 0.8. The tests of all pairs depend on the tails of the distribution, so they attribute all of the variance.
MIN_SHARED_FRACTION, MIN_SHARED_FRACTION_OF_TESTS = 0.75, 1.0
# A smaller skewness of few numbers is mostly due to chance. It is shrunk by this power of its ratio to the limit.
RELIABLE_SKEWNESS, SHRINKAGE_POWER = 1.5, 5
ImageGroups = Sequence[Sequence[Hashable]]  # for each number, the images from which the number was computed


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

        If the interval of a difference excludes zero, the difference is significant. With too few images, the interval
        is infinite and excludes no value.

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
        """Return True if there were enough images for an interval."""
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
def mean_interval(values: Iterable[Any], *, level: float = CONFIDENCE, images: ImageGroups | None = None) -> Interval:
    """Compute the mean of one number per image, and its confidence interval.

    Metrics such as IoU and probabilities have skewed distributions, so means over few images are skewed as well. The
    interval is therefore Student's t, extended by Hall's transformation, which corrects for skewness. If all numbers are
    0 or 1, such as hits, the interval is Wilson's. For example, 8 hits in 8 images give 0.68 to 1.

    Parameters
    ----------
    values : iterable of float, array or Tensor (N,)
        One number per image. None and NaN mean that an image has no number; such images are left out.
    level : float, default 0.95
        The confidence level, between 0 and 1.
    images : sequence of sequences, default None
        For each number, the images that the number depends on, such as the four images of a mosaic. None means one
        image per number. If numbers share images, the numbers are correlated. The variance is therefore split, by least
        squares over all pairs of numbers, into a part that comes from the images and an individual part of each number.
        The interval is then Student's t, or Wilson's if all numbers are 0 or 1.

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
    >>> interval = mean_interval([0.4, 0.6, 0.5, 0.7, 0.3, 0.5, 0.4, 0.6, None])
    >>> interval.n, round(interval.mean, 1), round(interval.low, 1), round(interval.high, 1)
    (8, 0.5, 0.4, 0.6)

    References
    ----------
    Hall, "On the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B, 1992. Wilson,
    "Probable Inference, the Law of Succession, and Statistical Inference", JASA, 1927.
    """
    return _to_interval(_to_floats(values), level, images, is_difference=False)


def _to_interval(values: Sequence[float], level: float, images: ImageGroups | None, *, is_difference: bool) -> Interval:
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
        raise argument_error(level, "level", "a number between 0 and 1, such as 0.95.")
    mean, error, freedom, n = _estimate_mean(values, images)
    numbers = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
    if freedom == 0:
        low, high = -math.inf, math.inf
    elif not is_difference and {*numbers} <= {0, 1}:
        # If all mosaics are 1, their variance is 0, so an interval by Student's t would have no width.
        low, high = wilson_interval(mean, freedom + 1, NormalDist().inv_cdf((1 + level) / 2))
    elif is_difference or images is not None:
        # The tests of all pairs need more extreme quantiles, so they count only half as many degrees of freedom.
        half_width = _find_t_quantile(level, min(n - 1, 2 * freedom + 1)) * error
        low, high = mean - half_width, mean + half_width
    else:
        low, high = _bound_skewed(numbers, level)
    return Interval(mean, low, high, n)


def wilson_interval(share: float, n: int, z: float) -> tuple[float, float]:
    """Return Wilson's confidence interval for a proportion `share` of n cases; z is a normal quantile."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def _bound_skewed(numbers: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Return Hall's interval of a mean, extended to include Student's t interval.

    With few numbers, the estimated skewness is inaccurate. Hall's interval alone contains the true mean less often.

    Let W be the error of the mean, divided by the standard deviation of the numbers, and let g be the skewness of the
    numbers. The cubic W + g W^2 / 3 + g^2 W^3 / 27 + g / (6 n) is distributed nearly like Student's t divided by
    sqrt(n). The cubic is solved for W at both quantiles of t. A small skewness is shrunk towards 0 first. Otherwise, the
    interval of bounded numbers such as `sufficiency` contains the true mean too often. The skewness of few numbers from a
    skewed distribution is estimated too low. The usual correction (Joanes and Gill, "Comparing Measures of Sample Skewness
    and Kurtosis", The Statistician, 1998) is too small for such numbers, so it is applied twice.
    """
    mean, n, deviations = float(numbers.mean()), len(numbers), numbers - numbers.mean()
    spread = float(numbers.std(ddof=1))
    skewness = float((deviations**3).mean() / (deviations**2).mean() ** 1.5) if spread > ROUNDING_LIMIT else 0.0
    skewness *= n * (n - 1) / (n - 2) ** 2
    skewness *= min(1.0, (abs(skewness) / RELIABLE_SKEWNESS) ** SHRINKAGE_POWER)
    t_end = _find_t_quantile(level, n - 1) / math.sqrt(n)
    errors = np.array([t_end, -t_end]) - skewness / (6 * n)
    if abs(skewness) >= ROUNDING_LIMIT:
        errors = 3 / skewness * (np.cbrt(1 + skewness * errors) - 1)
    low, high = (mean - spread * errors).tolist()
    return min(low, mean - spread * t_end), max(high, mean + spread * t_end)


@accept_old_parameters
def paired_difference(
    values: Sequence[Any], reference: Sequence[Any], *, level: float = CONFIDENCE, images: ImageGroups | None = None
) -> Interval:
    """Compute the mean over images of `values` minus `reference`, and its interval by Student's t.

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
    >>> difference = paired_difference(ours, theirs)
    >>> round(difference.mean, 1), difference.excludes(0)  # a small but significant difference
    (0.1, True)

    References
    ----------
    Student, "The Probable Error of a Mean", Biometrika, 1908.
    """
    return _to_interval(_subtract(values, reference), level, images, is_difference=True)


def find_distinguished_pairs(rows: Mapping[str, Sequence[Any]], images: ImageGroups | None) -> set[frozenset[str]]:
    """Return the pairs of methods whose means over the same images differ significantly.

    The same numbers choose the best method and are then tested. The tests of all pairs are therefore corrected by
    Holm's method. If all methods are equally good, the probability is at most 5 % that any method differs significantly
    from the best method. For pairs without the best method, the error rate can be higher if the numbers are skewed and
    one method has a much larger spread. In a simulation, the error rate is 20 % for eight methods with exponentially
    distributed numbers and spreads from 1 to 10. For mosaics of fewer than 12 images, the result is empty.
    """
    if images is not None and len({name for group in images for name in group}) < MIN_MOSAIC_IMAGES_TO_COMPARE:
        return set()
    p_values = {}
    for first, second in itertools.combinations(sorted(rows), 2):
        differences = _subtract(rows[first], rows[second])
        mean, error, freedom, _ = _estimate_mean(differences, images, MIN_SHARED_FRACTION_OF_TESTS)
        ratio = math.inf if error == 0 and mean != 0 else abs(mean) / (error or 1.0)
        p_values[frozenset((first, second))] = 1 - _find_t_probability(ratio, freedom) if freedom else 1.0
    significant: set[frozenset[str]] = set()
    for rank, pair in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[pair] > (1 - CONFIDENCE) / (len(p_values) - rank):
            break
        significant.add(pair)
    return significant


def _estimate_mean(
    values: Sequence[float], images: ImageGroups | None, min_shared_fraction: float = MIN_SHARED_FRACTION
) -> tuple[float, float, int, int]:
    """Return the mean, its standard error, the degrees of freedom (0 for too few numbers), and the count of numbers."""
    if images is not None and len(images) != len(values):
        counts = f"{len(values)} values and {len(images)} lists of images"
        raise GradcamError(f"There are {counts}: give one list per value.")
    valid = [i for i, value in enumerate(values) if not math.isnan(value)]
    numbers = np.array([values[i] for i in valid], dtype=np.float64)
    n = len(numbers)
    mean = math.fsum(numbers) / n if n else math.nan
    names = list(dict.fromkeys(name for i in valid for name in images[i])) if images else []
    if n < MIN_IMAGES_FOR_INTERVAL or (images is not None and len(names) < MIN_IMAGES_FOR_INTERVAL):
        return mean, math.inf, 0, n
    if images is None:
        return mean, float(numbers.std(ddof=1)) / math.sqrt(n), n - 1, n
    uses_image = np.array([[name in images[i] for name in names] for i in valid], dtype=np.float64)
    image_variance, number_variance = _split_variance(numbers, uses_image, min_shared_fraction)
    error = math.sqrt((uses_image.sum(0) ** 2).sum() / n**2 * image_variance + number_variance / n)
    return mean, error, max(1, min(n, len(names) // 2) - 1), n


def _split_variance(numbers: Any, uses_image: Any, min_shared_fraction: float) -> tuple[float, float]:
    """Estimate the variance of the images' contributions and the variance of the individual parts, by least squares.

    In the model, each number is the sum of its images' contributions and an individual part. For a pair of numbers, let
    d be half the count of images that belong to only one of the two numbers. The expected value of half the squared
    difference is then d times the first variance, plus the second variance. A line is fitted to all pairs: the slope is
    the first variance, and the intercept is the second.
    """
    first, second = np.triu_indices(len(numbers), 1)
    squares = (numbers[first] - numbers[second]) ** 2 / 2
    sizes = uses_image.sum(1)
    unshared = (sizes[first] + sizes[second]) / 2 - (uses_image @ uses_image.T)[first, second]
    mean_unshared, spread = unshared.mean(), ((unshared - unshared.mean()) ** 2).sum()
    if spread == 0:  # If d is the same for all pairs, no line can be fitted. All variance is attributed to the images.
        return float(squares.mean() / mean_unshared) if mean_unshared else 0.0, 0.0
    # With few mosaics, the slope is often near 0 by chance, and the interval would be too narrow.
    min_slope = min_shared_fraction * float(squares.mean() / sizes.mean())
    slope = max(min_slope, float(((unshared - mean_unshared) * (squares - squares.mean())).sum() / spread))
    intercept = float(squares.mean() - slope * mean_unshared)
    return (slope, intercept) if intercept >= 0 else (float(squares.mean() / mean_unshared), 0.0)


@functools.lru_cache(maxsize=1024)
def _find_t_quantile(level: float, freedom: int) -> float:
    """Return the two-sided quantile q of Student's t: t lies between -q and q with probability `level`."""
    low, high = 0.0, 1.0
    while _find_t_probability(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _find_t_probability(middle, freedom) < level else (low, middle)
    return high


def _find_t_probability(ratio: float, freedom: int) -> float:
    """Return the probability that Student's t lies between -`ratio` and `ratio`.

    With the substitution t = sqrt(freedom) * tan(angle), the density is a power of the angle's cosine (Abramowitz and
    Stegun, Handbook of Mathematical Functions, 26.7.1).
    """

    def integrate(end: float) -> float:
        return end * float(WEIGHTS @ np.cos(end * (NODES + 1) / 2) ** (freedom - 1))

    return integrate(math.atan(ratio / math.sqrt(freedom))) / integrate(math.pi / 2)


def _subtract(values: Sequence[Any], reference: Sequence[Any]) -> list[float]:
    ours, theirs = _to_floats(values), _to_floats(reference)
    if len(ours) != len(theirs):
        expected = "a value and a reference value for each image, in the same order; None for images without a value"
        raise GradcamError(f"There are {len(ours)} values and {len(theirs)} reference values: expected {expected}.")
    return [a - b for a, b in zip(ours, theirs)]


def _to_floats(values: Iterable[Any]) -> list[float]:
    try:
        numbers = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError, RuntimeError):  # For a tensor of several numbers, `float` raises RuntimeError.
        expected = "one number per image, or None for images without a value"
        raise GradcamError(f"The values are {shorten(values)}, expected {expected}.") from None
    if any(map(math.isinf, numbers)):
        raise GradcamError("At least one value is infinite, so the values have no mean.")
    return numbers
