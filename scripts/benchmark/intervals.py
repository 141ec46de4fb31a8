"""Simulate studies with measured values: how often intervals contain the mean, and how often equal methods rank apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from benchmark.interval_values import IMAGE_METRICS, METHODS, IntervalValues, load_values
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

COUNTS = (8, 12, 20, 50)  # images in a study
STUDIES, MOSAIC_STUDIES, RANKED_STUDIES = 20000, 2000, 800
MOSAIC_METRICS = ("grid-order", "grid-mass")  # the first two metrics of the measured cells
MIN_SPREAD = 1e-6  # Means with a smaller spread over studies are constant up to rounding, so they need no interval.
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
        (MOSAIC_METRICS, MosaicSampler(values, values.classes).sample),
        (tuple(f"{metric}, no class twice" for metric in MOSAIC_METRICS), MosaicSampler(values, None).sample),
    ]
    rows, raw = [], []
    for metrics, sample in kinds:
        studies = STUDIES if metrics == IMAGE_METRICS else MOSAIC_STUDIES
        for count in COUNTS:
            report_progress("intervals", f"{count} images", metrics)
            for metric, rates in zip(metrics, simulate(sample, count, len(metrics), studies)):
                cells = [f"{100 * rate:.1f} ± {100 * error:.1f} %" for rate, error in (rates.covered, rates.wrong)]
                rows.append([metric, str(count), *cells])
                raw.append({"metric": metric, "images": count, "covered": rates.covered, "wrong": rates.wrong})
    notes = [
        f"Measured once: {len(values.images)} crops of photographs and {len(values.cells)} mosaics, embedded model, "
        f"{', '.join(METHODS)}. With ±: the Monte Carlo standard error.",
        f"{STUDIES} studies for the intervals (the mean over the methods), {MOSAIC_STUDIES} if they have mosaics, and "
        f"{RANKED_STUDIES} for the rankings. For the rankings, the values of each image are assigned to the methods in "
        "random order, so all methods are equal.",
    ]
    header = ["metric", "images", "interval contains the mean", "an equal method is marked as worse"]
    yield Table("intervals", "Confidence intervals", header, rows, notes, raw)


def sample_images(values: IntervalValues, rng: np.random.Generator, count: int, are_equal: bool) -> Sample:
    rows = values.images[rng.integers(len(values.images), size=count)]
    return np.stack([rng.permutation(row) for row in rows]) if are_equal else rows, None


@dataclass(frozen=True)
class MosaicSampler:
    """Sample as many mosaics as images, as `gradcam evaluate` does.

    A heatmap depends on the image in its cell, and on the other three images of the mosaic (the neighbours). A simulated
    cell has the value of a random measured cell of its image, minus the effects of the measured neighbours, plus the
    effects of the simulated neighbours. `classes` (I,) are the classes of the measured images. A mosaic has four classes.
    """

    values: IntervalValues
    classes: np.ndarray | None  # None: each sampled image has a class of its own

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The measured cells (M,4,8,2) without their neighbours, and the effect of each image on a neighbour (I,8,2).

        The effects of the images are estimated by least squares.
        """
        count, cells = len(self.values.classes), self.values.cells[..., : len(MOSAIC_METRICS)].astype(float)
        in_cell = np.eye(count)[self.values.members]  # (M,4,I)
        neighbours = in_cell.sum(1, keepdims=True) - in_cell
        design = np.concatenate([in_cell, neighbours], -1).reshape(-1, 2 * count)
        effects = np.linalg.lstsq(design, cells.reshape(len(design), -1), rcond=None)[0][count:]
        effects = (effects - effects.mean(0)).reshape(count, *cells.shape[2:])
        return cells - np.tensordot(neighbours, effects, 1), effects

    def sample(self, rng: np.random.Generator, count: int, are_equal: bool) -> Sample:
        cells, effects = self.parts
        orders = np.tile(np.arange(len(METHODS)), (count, 1))
        orders = rng.permuted(orders, axis=1) if are_equal else orders
        images = rng.integers(len(effects), size=count)
        while self.classes is not None and len(set(self.classes[images])) < CELLS:
            images = rng.integers(len(effects), size=count)
        members = choose_mosaics(rng, np.arange(count) if self.classes is None else self.classes[images])
        measured = [np.argwhere(self.values.members == image) for image in images]
        places = np.array([[rng.choice(measured[i]) for i in mosaic] for mosaic in members])  # (N,4,2)
        order = orders[..., None]
        own = np.take_along_axis(cells[places[..., 0], places[..., 1]], order[members], 2)  # (N,4,8,2)
        shifts = np.take_along_axis(effects[images], order, 1)[members]
        return (own + shifts.sum(1, keepdims=True) - shifts).mean(1), members


def choose_mosaics(rng: np.random.Generator, classes: np.ndarray) -> list[list[int]]:
    """Choose different sets of four images with four classes. Prefer the least used images, as `make_mosaics` does."""
    uses, mosaics = np.zeros(len(classes)), []
    for _ in classes:
        for attempt in range(MAX_ATTEMPTS):
            image_of_class: dict[int, int] = {}
            for i in np.argsort(uses + (1 + attempt / 10) * rng.random(len(classes))):
                image_of_class.setdefault(int(classes[i]), int(i))
            mosaic = sorted([*image_of_class.values()][:CELLS])
            if mosaic not in mosaics:
                uses[mosaic] += 1
                mosaics.append(mosaic)
                break
    return mosaics


def simulate(
    sample: Callable[[np.random.Generator, int, bool], Sample], count: int, metric_count: int, study_count: int
) -> Iterator[Rates]:
    """Yield the rates of each metric."""
    from gradcam.evaluation import mean_interval
    from gradcam.evaluation.intervals import find_distinguished_pairs

    rng = np.random.default_rng(count)
    studies = [sample(rng, count, False) for _ in range(study_count)]
    equal_studies = [sample(rng, count, True) for _ in range(RANKED_STUDIES)]
    means = np.mean([rows.mean(0) for rows, _ in studies], axis=0)  # (methods, metrics)
    for k in range(metric_count):
        varied = [j for j in range(len(METHODS)) if np.std([rows[:, j, k].mean() for rows, _ in studies]) > MIN_SPREAD]
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
