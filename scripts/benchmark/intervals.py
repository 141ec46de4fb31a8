"""Simulate studies with measured values: how often intervals contain the mean, and how often equal methods rank apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.interval_values import IMAGE_METRICS, METHODS, MOSAIC_METRICS, IntervalValues, load_values
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

COUNTS = (8, 12, 20, 50)  # images in a study
STUDIES, RANKED_STUDIES = 1000, 400
CELLS = 4
Sample = tuple[np.ndarray, list[list[int]] | None]  # values (N, methods, metrics), and the images of each value


@dataclass(frozen=True)
class Rates:
    """The shares of studies, each with its Monte Carlo standard error."""

    covered: tuple[float, float]
    wrong: tuple[float, float]


def compare_intervals(settings: Settings) -> Iterator[Table]:
    """Sample images with replacement from the measured images, and mosaics from the sampled images."""
    values = load_values()
    kinds: list[tuple[tuple[str, ...], Callable[[np.random.Generator, int], Sample]]] = [
        (IMAGE_METRICS, lambda rng, count: (values.images[rng.integers(len(values.images), size=count)], None)),
        (MOSAIC_METRICS, MosaicSampler(values).sample),
    ]
    rows, raw = [], []
    for metrics, sample in kinds:
        for count in COUNTS:
            report_progress("intervals", f"{count} images", metrics)
            for metric, rates in zip(metrics, simulate(sample, count, len(metrics))):
                cells = [f"{100 * rate:.1f} ± {100 * error:.1f} %" for rate, error in (rates.covered, rates.wrong)]
                rows.append([metric, str(count), *cells])
                raw.append({"metric": metric, "images": count, "covered": rates.covered, "wrong": rates.wrong})
    notes = [
        f"Measured once: {len(values.images)} crops of photographs and {len(values.cells)} mosaics, embedded model, "
        f"{', '.join(METHODS)}. With ±: the Monte Carlo standard error.",
        f"{STUDIES} studies of gradcam for the intervals, {RANKED_STUDIES} studies of all methods for the rankings. For the "
        "rankings, each method's measured values are shifted so that all methods have the same mean.",
    ]
    header = ["metric", "images", "interval contains the mean", "an equal method is marked as worse"]
    yield Table("intervals", "Confidence intervals", header, rows, notes, raw)


@dataclass(frozen=True)
class MosaicSampler:
    """Sample as many mosaics as images, as `gradcam evaluate` does.

    A cell's value is one of the values that were measured in this image's cells, next to random other images.
    """

    values: IntervalValues

    def sample(self, rng: np.random.Generator, count: int) -> Sample:
        images = rng.integers(len(self.values.classes), size=count)
        while len(set(self.values.classes[images])) < CELLS:
            images = rng.integers(len(self.values.classes), size=count)
        uses, rows, members, sets = np.zeros(count), [], [], set()
        for _ in range(50 * count):
            noise, chosen = 1 + len(sets) / count, {}
            for i in np.argsort(uses + noise * rng.random(count)):  # the least used images first
                chosen.setdefault(self.values.classes[images[i]], int(i))
            quartet = list(chosen.values())[:CELLS]
            if len(sets) < count and frozenset(quartet) not in sets:
                sets.add(frozenset(quartet))
                uses[quartet] += 1
                members.append(quartet)
                rows.append(np.mean([self._sample_cell(rng, images[i]) for i in quartet], axis=0))
        return np.stack(rows), members

    def _sample_cell(self, rng: np.random.Generator, image: int) -> Any:
        mosaics, cells = np.nonzero(self.values.members == image)
        i = rng.integers(len(mosaics))
        return self.values.cells[mosaics[i], cells[i]]


def simulate(
    sample: Callable[[np.random.Generator, int], Sample], count: int, metric_count: int
) -> Iterator[Rates]:
    """Yield the rates of each metric."""
    from gradcam.evaluation import mean_interval
    from gradcam.evaluation.intervals import find_distinguished_pairs

    rng = np.random.default_rng(count)
    studies = [sample(rng, count) for _ in range(STUDIES)]
    means = np.mean([rows.mean(0) for rows, _ in studies], axis=0)  # (methods, metrics)
    for k in range(metric_count):
        intervals = [mean_interval(rows[:, 0, k], images=members) for rows, members in studies]
        covered = [not interval.excludes(means[0, k]) for interval in intervals]
        wrong = []
        for rows, members in studies[:RANKED_STUDIES]:
            table = rows[:, :, k] - means[:, k]
            pairs = find_distinguished_pairs(dict(zip(METHODS, table.T)), members)
            best = METHODS[int(table.mean(0).argmax())]
            wrong.append(any(best in pair for pair in pairs))
        yield Rates(to_rate(covered), to_rate(wrong))


def to_rate(flags: list[bool]) -> tuple[float, float]:
    rate = float(np.mean(flags))
    return rate, float(np.sqrt(rate * (1 - rate) / len(flags)))
