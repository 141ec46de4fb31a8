"""What to explain a model with: every combination that was tried, in numbers, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradcam.errors import show_fields
from gradcam.evaluation.intervals import Interval, mean_interval, paired_difference

SAME = 1e-4  # of a mass: differences that make none


@dataclass(frozen=True)
class Combination:
    """A method, the score that it explains, and a layer. `score`: None where the method has its own, or none."""

    method: str
    score: str | None
    layer: str

    def __str__(self) -> str:
        return f"{self.method}{f' of the {self.score}' if self.score else ''} at {self.layer}"


@dataclass(frozen=True)
class Row:
    """One combination's numbers, as means over pictures with their intervals.

    `mass`, `maximum`: of the grid pointing game, a picture's being its mean over the mosaics that it is in. `behind`: the
    mass minus that of the combination with most of it, picture by picture. `road`: None where that was not measured, since
    the mass is clearly less; `road_behind`: the same minus the best one's.
    """

    combination: Combination
    mass: Interval
    maximum: Interval
    behind: Interval
    road: Interval | None = None
    road_behind: Interval | None = None

    __repr__ = show_fields

    @property
    def is_clearly_less(self) -> bool:
        """Whether the mass is clearly less than the most, so that it cannot be the best."""
        return self.behind.high < -SAME


@dataclass(frozen=True)
class Recommendation:
    """The best combination of method, score and layer for a model, on somebody's pictures.

    `rows`: all combinations; first those that ROAD was measured of, the best ROAD first, then the others by mass.
    `best`: of those whose mass is not clearly less than the most, the one with the best ROAD. `default`: what is taken
    where nothing is said, None where no map can be taken there; `gain` and `road_gain` are the best one's mass and ROAD
    minus the default's, picture by picture. `pictures`: the names of those that took part, and `mosaics`, how many were
    made of them, each of `size` (height, width). `left_out`: combinations that have no map, and why.
    """

    model: str
    rows: tuple[Row, ...]
    best: Row
    default: Row | None
    gain: Interval | None
    road_gain: Interval | None
    pictures: tuple[str, ...]
    mosaics: int
    size: tuple[int, int]
    seed: int
    left_out: Mapping[Combination, str]

    def __repr__(self) -> str:
        default = ", the default" if self.is_default else ""
        return (
            f"Recommendation({self.best.combination}{default}, for {self.model}: the best of {len(self.rows)} on "
            f"{len(self.pictures)} picture(s) in {self.mosaics} mosaic(s))"
        )

    @property
    def is_default(self) -> bool:
        """Whether the best is what is taken anyway."""
        return self.default is not None and self.best.combination == self.default.combination

    def to_dict(self) -> dict[str, Any]:
        """All of it in lists, dicts, strings and numbers, as JSON has them."""
        return {
            "model": self.model,
            "best": _name(self.best.combination),
            "default": None if self.default is None else _name(self.default.combination),
            "gain": self.gain and self.gain.to_fields(),
            "road_gain": self.road_gain and self.road_gain.to_fields(),
            "pictures": list(self.pictures),
            "mosaics": self.mosaics,
            "size": list(self.size),
            "seed": self.seed,
            "rows": [_row_to_dict(row) for row in self.rows],
            "left_out": [{**_name(it), "reason": reason} for it, reason in self.left_out.items()],
        }


def _row_to_dict(row: Row) -> dict[str, Any]:
    numbers = {"mass": row.mass, "maximum": row.maximum, "behind": row.behind, "road": row.road}
    numbers["road_behind"] = row.road_behind
    return {**_name(row.combination), **{name: it and it.to_fields() for name, it in numbers.items()}}


def _name(combination: Combination) -> dict[str, str | None]:
    return {"method": combination.method, "score": combination.score, "layer": combination.layer}


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
