"""Simulate studies with measured values: how often intervals contain the mean, and how often equal methods rank apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from benchmark.interval_values import IMAGE_METRICS, METHODS, MOSAIC_METRICS, IntervalValues, load_values
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

COUNTS = (8, 12, 20, 50)  # images in a study
STUDIES, RANKED_STUDIES = 400, 200
MAX_ATTEMPTS = 50  # per mosaic
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
    kinds: list[tuple[tuple[str, ...], Callable[[np.random.Generator, int, bool], Sample]]] = [
        (IMAGE_METRICS, partial(sample_images, values)),
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
        f"{STUDIES} studies for the intervals (the mean over the methods), {RANKED_STUDIES} for the rankings. For the "
        "rankings, the values of each image are assigned to the methods in random order, so all methods are equal.",
    ]
    header = ["metric", "images", "interval contains the mean", "an equal method is marked as worse"]
    yield Table("intervals", "Confidence intervals", header, rows, notes, raw)


def sample_images(values: IntervalValues, rng: np.random.Generator, count: int, are_equal: bool) -> Sample:
    rows = values.images[rng.integers(len(values.images), size=count)]
    return np.stack([rng.permutation(row) for row in rows]) if are_equal else rows, None


@dataclass(frozen=True)
class MosaicSampler:
    """Sample as many mosaics as images, as `gradcam evaluate` does.

    A cell's value is one of the values that were measured in this image's cells, next to random other images.
    """

    values: IntervalValues

    @cached_property
    def cells(self) -> list[np.ndarray]:
        """The values (cells, methods, metrics) that were measured for each image."""
        return [self.values.cells[self.values.members == image] for image in range(len(self.values.classes))]

    def sample(self, rng: np.random.Generator, count: int, are_equal: bool) -> Sample:
        orders = np.stack([rng.permutation(len(METHODS)) for _ in range(count)]) if are_equal else None
        images = rng.integers(len(self.values.classes), size=count)
        while len(set(self.values.classes[images])) < CELLS:
            images = rng.integers(len(self.values.classes), size=count)
        uses, rows, members, sets = np.zeros(count), [], [], set()
        for _ in range(MAX_ATTEMPTS * count):
            if len(sets) == count:
                break
            noise, chosen = 1 + len(sets) / count, {}
            for i in np.argsort(uses + noise * rng.random(count)):  # the least used images first
                chosen.setdefault(self.values.classes[images[i]], int(i))
            quartet = list(chosen.values())[:CELLS]
            if frozenset(quartet) not in sets:
                sets.add(frozenset(quartet))
                uses[quartet] += 1
                members.append(quartet)
                rows.append(
                    np.mean(
                        [
                            self._sample_cell(rng, images[i], slice(None) if orders is None else orders[i])
                            for i in quartet
                        ],
                        axis=0,
                    )
                )
        return np.stack(rows), members

    def _sample_cell(self, rng: np.random.Generator, image: int, order: Any) -> Any:
        return rng.choice(self.cells[image])[order]


def simulate(
    sample: Callable[[np.random.Generator, int, bool], Sample], count: int, metric_count: int
) -> Iterator[Rates]:
    """Yield the rates of each metric."""
    from gradcam.evaluation import mean_interval
    from gradcam.evaluation.intervals import find_distinguished_pairs

    rng = np.random.default_rng(count)
    studies = [sample(rng, count, False) for _ in range(STUDIES)]
    equal_studies = [sample(rng, count, True) for _ in range(RANKED_STUDIES)]
    means = np.mean([rows.mean(0) for rows, _ in studies], axis=0)  # (methods, metrics)
    for k in range(metric_count):
        varied = [j for j in range(len(METHODS)) if np.std([rows[:, j, k].mean() for rows, _ in studies]) > 0]
        covered = [
            float(np.mean([not mean_interval(rows[:, j, k], images=members).excludes(means[j, k]) for j in varied]))
            for rows, members in studies
        ]
        wrong = []
        for rows, members in equal_studies:
            table = rows[:, :, k]
            pairs = find_distinguished_pairs(dict(zip(METHODS, table.T)), members)
            best = METHODS[int(table.mean(0).argmax())]
            wrong.append(any(best in pair for pair in pairs))
        yield Rates(to_rate(covered), to_rate(wrong))


def to_rate(flags: Sequence[float]) -> tuple[float, float]:
    rate = float(np.mean(flags))
    return rate, float(np.std(flags) / np.sqrt(len(flags)))
