"""How methods stand by each metric: means, intervals, the best, and how far the others are from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradcam.evaluation.intervals import Interval, count_needed, mean_interval, paired_difference
from gradcam.evaluation.metrics import METRICS
from gradcam.evaluation.study.results import Results

ROUNDING = 1e-6  # differences below that are of the order in which float32 numbers were added up


@dataclass(frozen=True)
class Standing:
    """One method by one metric.

    `interval`: its mean over pictures, or mosaics. `difference`: its mean minus the best method's, picture by picture; None
    for the best itself. `is_best`: of the methods, the first where several have the same mean. `is_level`: a method whose
    difference from the best may be chance: its interval holds zero. `is_control`: a map that knows nothing; it is never the
    best, and `beats_all` where it is at least as good as the best method, so that the metric says little.
    Of too few pictures (`count_needed`) none is the best, and nothing is compared.
    """

    method: str
    metric: str
    interval: Interval
    difference: Interval | None
    is_best: bool = False
    is_level: bool = False
    is_control: bool = False
    beats_all: bool = False


def describe_shortage(standings: Mapping[tuple[str, str], Standing]) -> str | None:
    """Why some metrics, or all, have neither intervals nor a best method: of too few pictures; None where all have."""
    needed = count_needed()
    if all(it.interval.n >= needed for it in standings.values()):
        return None
    return (
        f"Too few: of fewer than {needed} pictures or mosaics (n) no interval is given, and no method is called the best. "
        f"With {needed - 1} a paired test has a p-value of 2 / 2^{needed - 1} = {2 / 2 ** (needed - 1):.2f} at least."
    )


def compare_methods(results: Results) -> Mapping[tuple[str, str], Standing]:
    """The standing of each method and control by each metric: by (method, metric), of metrics that have numbers."""
    found = {}
    for metric in results.plan.metrics:
        values = {name: results.values(name, metric) for name in results.plan.names}
        if any(value is not None for row in values.values() for value in row):
            for standing in _compare(results, metric, values):
                found[standing.method, metric] = standing
    return found


def _compare(results: Results, metric: str, values: Mapping[str, list[float | None]]) -> list[Standing]:
    seed = results.conditions.seed
    means = {name: mean_interval(row, seed=seed) for name, row in values.items()}
    sign = 1 if METRICS[metric].better == "higher" else -1
    best = _find_best({name: sign * means[name].mean for name in results.plan.methods if means[name].is_known})
    standings = []
    for name, row in values.items():
        is_control = name in results.plan.controls
        is_other = best is not None and name != best
        difference = paired_difference(row, values[best], seed=seed) if best is not None and is_other else None
        standings.append(
            Standing(
                method=name,
                metric=metric,
                interval=means[name],
                difference=difference,
                is_best=name == best,
                is_level=difference is not None and not is_control and _is_level(difference),
                is_control=is_control,
                beats_all=difference is not None and is_control and sign * difference.mean >= -ROUNDING,
            )
        )
    return standings


def _find_best(means: Mapping[str, float]) -> str | None:
    """The first of those with the highest mean, None where there is no method."""
    most = max(means.values(), default=0.0)
    return next((name for name, mean in means.items() if mean >= most - ROUNDING), None)


def _is_level(difference: Interval) -> bool:
    return not difference.excludes(0) or abs(difference.mean) <= ROUNDING
