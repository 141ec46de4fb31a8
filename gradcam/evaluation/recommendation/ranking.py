"""From each combination's numbers, picture by picture, to the best: what is compared with what, and how surely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradcam.evaluation.intervals import Interval, mean_interval, paired_difference
from gradcam.evaluation.recommendation.outcome import SAME, Combination, Row

Values = Mapping[Combination, Tensor]  # float64 (P,): one number for each picture


def subtract(values: Tensor, reference: Tensor, seed: int) -> Interval:
    """The mean difference, and its interval over pictures."""
    return paired_difference(values.tolist(), reference.tolist(), seed=seed)


def find_twins(mass: Values, hits: Values) -> dict[Combination, Combination]:
    """For each combination the first with the same numbers in all pictures, whose maps are the same then.

    Where the model is linear behind a layer, several methods are one.
    """
    twins: dict[Combination, Combination] = {}
    for it in mass:
        same = (one for one in mass if _is_same(mass[one], mass[it]) and _is_same(hits[one], hits[it]))
        first = next(same, it)
        twins[it] = twins.get(first, first)
    return twins


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= SAME)


def find_most(mass: Values) -> Combination:
    """The combination with the most mass in the right cell; of equal ones, the first."""
    return max(mass, key=lambda it: float(mass[it].mean()))


def list_best(mass: Values, twins: Mapping[Combination, Combination], *, seed: int, most: int) -> list[Combination]:
    """The combinations whose mass is not clearly less than the most, twins left out; those with more mass first."""
    first = mass[find_most(mass)]
    ordered = sorted((it for it in mass if twins[it] == it), key=lambda it: -float(mass[it].mean()))
    return [it for it in ordered if subtract(mass[it], first, seed).high >= -SAME][:most]


def find_best(roads: Values, shortlist: Sequence[Combination], default: Combination) -> Combination:
    """The combination with the best ROAD among those of the shortlist and their twins; of equal ones the default."""
    return max(shortlist, key=lambda it: (float(roads[it].mean()), it == default))


def to_rows(mass: Values, hits: Values, roads: Values, best: Combination, seed: int) -> list[Row]:
    """All combinations' rows: the best, then the others with a ROAD by that, then those without by their mass."""
    first = mass[find_most(mass)]
    rows = [
        Row(
            combination=it,
            mass=mean_interval(mass[it].tolist(), seed=seed),
            maximum=mean_interval(hits[it].tolist(), seed=seed),
            behind=subtract(mass[it], first, seed),
            road=mean_interval(roads[it].tolist(), seed=seed) if it in roads else None,
            road_behind=subtract(roads[it], roads[best], seed) if it in roads else None,
        )
        for it in mass
    ]
    return sorted(rows, key=lambda row: (row.combination != best, row.road is None, -(row.road or row.mass).mean))
