"""How sure a mean over pictures is: intervals by the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcam.errors import GradcamError, shorten
from gradcam.options import check_count, refuse

SAMPLES = 2000
LEVEL = 0.95
MOST_DRAWN = 2**22  # numbers at once, so that many pictures need no more memory than few


@dataclass(frozen=True)
class Interval:
    """A mean over pictures, and between which values it would lie if other pictures like these had been taken.

    Attributes
    ----------
    mean : float
        The mean; NaN where there are no pictures.
    low : float
        The lower end; minus infinity where there are too few pictures.
    high : float
        The upper end; infinity where there are too few pictures.
    n : int
        How many pictures the mean is of.

    Examples
    --------
    >>> from gradcam.evaluation import mean_interval
    >>> interval = mean_interval([0.4, 0.6, 0.5, 0.7, 0.3, 0.5])
    >>> interval.n, round(interval.mean, 1), interval.low < 0.5 < interval.high
    (6, 0.5, True)
    >>> interval.is_known, interval.excludes(0)
    (True, True)
    >>> mean_interval([0.5, 0.5]).to_fields()  # too few pictures
    {'n': 2, 'mean': 0.5, 'low': None, 'high': None}
    """

    mean: float
    low: float
    high: float
    n: int

    def excludes(self, value: float = 0.0) -> bool:
        """Say whether a value lies outside of the interval.

        A difference that excludes zero is more than chance. An interval of too few pictures excludes nothing.

        Parameters
        ----------
        value : float, default 0.0
            The value.

        Returns
        -------
        bool
            Whether it lies below the lower end or above the upper one.
        """
        return not self.low <= value <= self.high

    @property
    def is_known(self) -> bool:
        """Whether there were enough pictures for an interval."""
        return math.isfinite(self.high - self.low)

    def to_fields(self) -> dict[str, float | int | None]:
        """Give the numbers as JSON takes them, without infinity and NaN.

        Returns
        -------
        dict of str to float, int or None
            n, mean, low and high, None where a number is not known.
        """
        numbers = {"mean": self.mean, "low": self.low, "high": self.high}
        return {"n": self.n, **{name: value if math.isfinite(value) else None for name, value in numbers.items()}}


def count_needed(level: float = LEVEL) -> int:
    """How many pictures an interval takes: 6 at 95 %. Of methods that are alike, all n differences have one sign with
    the chance 2 / 2^n: no paired test has a smaller p-value."""
    return math.ceil(1 - math.log2(1 - level))


def mean_interval(values: Iterable[Any], *, samples: int = SAMPLES, seed: int = 0, level: float = LEVEL) -> Interval:
    """Compute the mean of one number per picture, and its interval by the percentile bootstrap.

    Of the n numbers, n are drawn with replacement, `samples` times. The interval goes from the (1 - level) / 2 quantile
    of the samples' means to the (1 + level) / 2 quantile, interpolated linearly. Under about ten pictures it is too
    narrow. The same seed draws the same pictures, whatever the values: intervals of several methods are of one chance.

    Parameters
    ----------
    values : iterable of float, array or Tensor (N,)
        One number per picture. None and NaN say that a picture has none (no object in sight, say), and are left out.
    samples : int, default 2000
        How often n pictures are drawn.
    seed : int, default 0
        The seed of NumPy's generator, which draws them; 0 or more.
    level : float, default 0.95
        The level of the interval, between 0 and 1.

    Returns
    -------
    Interval
        The mean and its interval, which is infinite where there are too few pictures: at 95 %, fewer than 6.

    Raises
    ------
    GradcamError
        For values that are no numbers, or infinite, and for options out of range.

    Examples
    --------
    >>> from gradcam.evaluation import mean_interval
    >>> found = mean_interval([0.4, 0.6, 0.5, 0.7, 0.3, 0.5, None])
    >>> found.n, round(found.mean, 1), round(found.low, 1), round(found.high, 1)
    (6, 0.5, 0.4, 0.6)

    References
    ----------
    Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics, 1979.
    """
    check_count(samples, "samples", "how many samples to draw, 1 or more, such as 2000.")
    check_count(seed, "seed", "an integer, 0 or more.", least=0)
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
        raise refuse(level, "level", "a share between 0 and 1, such as 0.95.")
    present = np.array([value for value in _to_floats(values) if not math.isnan(value)], dtype=np.float64)
    if not len(present):
        return Interval(math.nan, -math.inf, math.inf, 0)
    mean = math.fsum(present) / len(present)
    if len(present) < count_needed(level):
        return Interval(mean, -math.inf, math.inf, len(present))
    generator, rows = np.random.default_rng(seed), max(1, MOST_DRAWN // len(present))
    parts = [(min(rows, samples - start), len(present)) for start in range(0, samples, rows)]
    means = np.concatenate([present[generator.integers(0, len(present), part)].mean(1) for part in parts])
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high), len(present))


def paired_difference(
    values: Sequence[Any], reference: Sequence[Any], *, samples: int = SAMPLES, seed: int = 0, level: float = LEVEL
) -> Interval:
    """Compute the mean of values minus reference, picture by picture, and its interval as in `mean_interval`.

    Each sample draws the same pictures for both: what makes a picture hard for both is no part of the interval. A
    picture that has None or NaN in one of the two is left out of both.

    Parameters
    ----------
    values : sequence of float
        One number per picture.
    reference : sequence of float
        The numbers of the same pictures, in the same order.
    samples : int, default 2000
        As in `mean_interval`.
    seed : int, default 0
        As in `mean_interval`.
    level : float, default 0.95
        As in `mean_interval`.

    Returns
    -------
    Interval
        The mean difference and its interval.

    Raises
    ------
    GradcamError
        Where there are not as many numbers of one as of the other, and as `mean_interval` does.

    Examples
    --------
    >>> from gradcam.evaluation import paired_difference
    >>> found = paired_difference([0.6, 0.7, 0.8, 0.5, 0.6, 0.9], [0.5, 0.6, 0.6, 0.4, 0.5, 0.8])
    >>> round(found.mean, 1), found.excludes(0)  # a small difference, but more than chance
    (0.1, True)
    """
    ours, theirs = _to_floats(values), _to_floats(reference)
    if len(ours) != len(theirs):
        raise GradcamError(
            f"There are {len(ours)} values and {len(theirs)} of the reference: expected one of each for every picture, in "
            "one order, and None where a picture has none."
        )
    return mean_interval([a - b for a, b in zip(ours, theirs)], samples=samples, seed=seed, level=level)


def _to_floats(values: Iterable[Any]) -> list[float]:
    try:
        found = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: of a tensor of several numbers
        raise GradcamError(
            f"The values are {shorten(values)}, expected numbers, one per picture, or None where a picture has none."
        ) from None
    if any(map(math.isinf, found)):
        raise GradcamError("The values hold an infinite one: a mean of these would say nothing.")
    return found
