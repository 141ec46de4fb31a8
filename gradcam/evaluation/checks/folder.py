"""Find the bugs that repeat over a set of images: displaced heatmaps, wrong class indices, wrong colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, TargetError, format_fields
from gradcam.evaluation.checks import map_evidence as hypotheses
from gradcam.evaluation.checks.findings import Outcome
from gradcam.evaluation.checks.map_evidence import EXACT, MAX_SHIFT, MapEvidence, measure_evidence
from gradcam.evaluation.checks.verdict import Verdict
from gradcam.evaluation.explainers import Explainer
from gradcam.evaluation.heatmap_sources import find_explainable
from gradcam.evaluation.intervals import MIN_IMAGES_FOR_INTERVAL, Interval, mean_interval
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier, ImageInput
from gradcam.models.task_models import TaskModel

MIN_FIT = 0.9  # With a lower mean correlation, the reference is not the exact map of the supplied heatmaps.
MIN_EXPLAINED_FIT = 0.5  # With a lower mean correlation, no hypothesis explains the supplied heatmaps.
MIN_GAIN, MIN_INEXACT_GAIN = 0.02, 0.1  # gain in mean correlation of a bug, with and without an exact map
MIN_SHIFT, MIN_INEXACT_SHIFT = 0.25, 0.75  # smallest displacement in cells, with and without an exact map
MIN_COLOUR_GAIN = 0.2  # smallest mean gain of the class that shows a wrong colour order or normalisation
SAME_OFFSET_CELLS = 0.2  # A displacement this close to the network's offset places cells on their receptive fields.
TIE = 1e-3  # A smaller gain in correlation counts for neither hypothesis.
RESAMPLES = 999
MAX_OTHER_IMAGES = 8  # number of images of the set to compare an image with
DISPLACED = "displaced"
BUGS = {
    "mirrored": ("mirrored", "The heatmaps are mirrored: left and right are swapped."),
    "upside down": ("mirrored", "The heatmaps are upside down: top and bottom are swapped."),
    "rotated": ("mirrored", "The heatmaps are rotated by 180 degrees."),
    "swapped": ("swapped", "The axes x and y of the heatmaps are swapped (transposed)."),
    "class": ("class", "The heatmaps explain another class: {}."),
    "BGR": ("colour", "The heatmaps explain images in BGR order: pass RGB images to the model."),
    "crop": (
        "crop",
        "The heatmaps of a centre crop are stretched over the whole image: draw the heatmaps on the crop.",
    ),
    "scaled": ("scaled", "The heatmaps are {} around the centre of the image."),
}
OTHER_BUG = (
    "normalisation",
    "The heatmaps match images that were prepared with {}: use the classifier's normalisation.",
)
Fits = dict[str, NDArray[np.float64]]  # for each hypothesis, the correlations (N,) with the supplied heatmaps


@dataclass(frozen=True)
class Bug:
    """A systematic bug: its `kind`, a sentence, and the `gain` if the bug is assumed, with its 95 % interval.

    `kind` is "displaced", "mirrored", "swapped", "crop", "scaled", "class", "colour" or "normalisation". The gain is in
    correlation with the exact map. For a bug in the classifier's preprocessing, the gain is in standard deviations of
    the class scores, and its interval is a 90 % interval.
    """

    kind: str
    text: str
    gain: Interval

    __repr__ = format_fields


@dataclass(frozen=True, eq=False)
class FolderVerdict:
    """The result of a check of several images: the verdict on each image, and the bugs that repeat over the images.

    Attributes
    ----------
    verdicts : tuple of Verdict
        The verdict on each image.
    evidence : tuple of MapEvidence
        The comparison of each image's heatmap with exact maps. Empty for targets other than classes.
    seed : int
        The random seed of the bootstrap.

    Examples
    --------
    >>> import gradcam
    >>> paths = ["photo.jpg", "other.png", "photos/coffee.jpg", "photos/rocket.jpg", "photo.jpg", "other.png"]
    >>> folder = gradcam.evaluation.check(gradcam.load_classifier(), paths, method="centre")
    >>> folder.outcome, len(folder.verdicts), folder.bugs
    ('failed', 6, ())
    """

    verdicts: tuple[Verdict, ...]
    evidence: tuple[MapEvidence, ...] = field(repr=False)
    seed: int = 0

    __repr__ = format_fields

    @cached_property
    def fits(self) -> Fits:
        """Return the correlation of each image's heatmap with the exact map under each hypothesis.

        The reference is the method that fits best under its best hypothesis.
        """
        return self._find_reference()[1]

    @property
    def reference(self) -> str | None:
        """Return the name of the reference method; None for targets other than classes."""
        return self._find_reference()[0] if self.evidence else None

    def _find_reference(self) -> tuple[str, Fits]:
        candidates = {method: combine_fits(self.evidence, method) for method in self.evidence[0].fits}
        # Of methods that fit equally well, take the first.
        return max(candidates.items(), key=lambda item: round(max(fit.mean() for fit in item[1].values()), 3))

    @cached_property
    def displacement(self) -> dict[str, Interval]:
        """Return the common displacement from the exact maps in cells, with 95 % intervals; {} without exact maps.

        The keys are "across", "down" and "distance".
        """
        if not self.evidence or not self.evidence[0].surfaces:
            return {}
        surfaces, n = stack_surfaces(self.evidence, str(self.reference)), len(self.evidence)
        counts = np.random.default_rng(self.seed).multinomial(n, [1 / n] * n, RESAMPLES)
        means = np.tensordot(np.concatenate([np.ones((1, n)), counts]) / n, surfaces, 1)
        scales = [median(item.cells[axis] for item in self.evidence) / hypotheses.SAMPLES for axis in (1, 0)]
        shifts = np.array([find_peak(mean) for mean in means]) * scales
        values = np.column_stack([shifts, np.hypot(*shifts.T)])
        ends = np.percentile(values[1:], (2.5, 97.5), axis=0)
        rows = zip(("across", "down", "distance"), np.vstack([values[:1], ends]).T.tolist())
        return {name: Interval(mean, low, high, n) for name, (mean, low, high) in rows}

    @cached_property
    def network_offset(self) -> tuple[float, float] | None:
        """Return the median distance (across, down), in cells, of receptive fields from the places of their cells."""
        offsets = [item.network_offset for item in self.evidence if item.network_offset is not None]
        return (median(x for x, _ in offsets), median(y for _, y in offsets)) if offsets else None

    @cached_property
    def bugs(self) -> tuple[Bug, ...]:
        """Return the systematic bugs: at most one of the heatmaps, and one of the images' preprocessing."""
        return (*self._find_map_bugs(), *self._find_preprocessing_bugs()) if self.evidence else ()

    def _find_map_bugs(self) -> Iterator[Bug]:
        name = max(self.fits, key=lambda name: self.fits[name].mean())
        gains, fit = self.fits[name] - self.fits[EXACT], self.fits[name].mean()
        gain, is_exact = mean_interval(gains), fit >= MIN_FIT
        wins = mean_interval(gains[abs(gains) > TIE] > 0)  # The gains are too skewed for an interval of their mean.
        if wins.low <= 1 / 2 or gain.mean < (MIN_GAIN if is_exact else MIN_INEXACT_GAIN) or fit < MIN_EXPLAINED_FIT:
            return
        if name != DISPLACED:
            # Of many scales, one fits better than the exact map by chance, if no exact map is known.
            if is_exact or not name.startswith("scaled"):
                yield Bug(*self._describe(name), gain)
            return
        offset = self.network_offset or (0.0, 0.0)
        shift = self.displacement["across"].mean, self.displacement["down"].mean
        is_corrected = math.hypot(*offset) >= MIN_SHIFT and math.dist(offset, shift) < SAME_OFFSET_CELLS
        if not is_corrected and self.displacement["distance"].low >= (MIN_SHIFT if is_exact else MIN_INEXACT_SHIFT):
            yield Bug(DISPLACED, self._describe_displacement(*shift), gain)

    def _describe(self, name: str) -> tuple[str, str]:
        is_wide = median(item.size[1] / item.size[0] for item in self.evidence) > 1
        is_crop = name.startswith("scaled") and float(name.split()[2]) > 1 and name.endswith("x" if is_wide else "y")
        key = "crop" if is_crop else next((key for key in BUGS if name.startswith(key)), "")
        kind, text = BUGS.get(key, OTHER_BUG)
        return kind, text.format({hypotheses.RIVAL: "the most probable other class"}.get(name, name))

    def _describe_displacement(self, across: float, down: float) -> str:
        axes = ((across, "right", "left"), (down, "down", "up"))
        parts = [
            f"{abs(cells):.1f} grid cells {words[cells < 0]}" for cells, *words in axes if abs(cells) >= MIN_SHIFT / 2
        ]
        height, width = (median(item.size[axis] / item.cells[axis] for item in self.evidence) for axis in (0, 1))
        low, high = self.displacement["distance"].low, self.displacement["distance"].high
        pixels = (
            f"{math.hypot(across * width, down * height):.0f} pixels; 95 % interval: {low:.1f} to {high:.1f} grid cells"
        )
        return f"The heatmaps are displaced {' and '.join(parts)} ({pixels})."

    def _find_preprocessing_bugs(self) -> Iterator[Bug]:
        names = self.evidence[0].gains
        # Correct preprocessing has negative gains, so a one-sided test of 5 % seldom finds a bug that does not exist.
        gains = {name: mean_interval([item.gains[name] for item in self.evidence], level=0.9) for name in names}
        gains = {name: gain for name, gain in gains.items() if gain.low > 0 and gain.mean >= MIN_COLOUR_GAIN}
        # For images of one class, each change of the images may favour this class.
        if gains and len({item.class_index for item in self.evidence}) > 1:
            name = max(gains, key=lambda name: gains[name].mean)
            text = f"The model recognises the images better with {name}: correct the classifier's preprocessing."
            yield Bug("colour" if name.startswith(hypotheses.BGR) else "normalisation", text, gains[name])

    @property
    def passed(self) -> Interval:
        """Return the share of images that passed, and its 95 % interval."""
        return mean_interval([verdict.outcome == "passed" for verdict in self.verdicts])

    @property
    def outcome(self) -> Outcome:
        """Return "failed" if there is a systematic bug or most images failed, "passed" if most images passed."""
        failed = sum(verdict.outcome == "failed" for verdict in self.verdicts)
        if self.bugs or 2 * failed > len(self.verdicts):
            return "failed"
        return "passed" if self.passed.mean > 1 / 2 else "undecided"

    @property
    def notes(self) -> list[str]:
        """Return sentences that report the limits of the comparison."""
        n, offset = len(self.evidence), self.network_offset or (0.0, 0.0)
        unsure = sum(item.probability < 1 / 2 for item in self.evidence)
        constant = sum(item.is_constant for item in self.evidence)
        distance = f"({offset[0]:.2f}, {offset[1]:.2f}) grid cells (across, down)"
        fit = max(values.mean() for values in self.fits.values()) if n else 1.0
        notes = {
            "Systematic bugs are tested only if the target is a class.": not n,
            f"In {unsure} of {n} images, the class has a probability below 50 %: add clearer images.": unsure,
            f"{constant} of {n} heatmaps are constant: they highlight no part of the image.": constant,
            "All images have the same class, so the test for a wrong class index covers only this class.": n
            and len({item.class_index for item in self.evidence}) == 1,
            f"The heatmaps match neither gradcam's heatmaps nor a known bug: the highest correlation is {fit:.2f}.": fit
            < MIN_EXPLAINED_FIT,
            f"The receptive fields are offset by {distance} from the layer's grid, which is not a bug.": math.hypot(
                *offset
            )
            >= MIN_SHIFT,
        }
        return [note for note, applies in notes.items() if applies]

    @property
    def summary(self) -> str:
        """Return the result in sentences."""
        share, count = self.passed, sum(verdict.outcome == "passed" for verdict in self.verdicts)
        interval = f"95 % interval: {share.low * 100:.0f} % to {share.high * 100:.0f} %"
        sentences = [f"{count} of {share.n} images passed ({interval})."]
        sentences += [bug.text for bug in self.bugs] or (["No systematic bug was found."] if self.evidence else [])
        if self.displacement:
            deviations, ranks = (self.to_record()[key] for key in ("deviations", "rank_correlations"))
            values = f"up to {median(deviations):.2g} (median of the images; rank correlation {median(ranks):.2f})"
            sentences.append(f"The heatmaps differ from gradcam's {self.reference} heatmaps by {values}.")
        return " ".join([*sentences, *self.notes])

    def to_record(self) -> dict[str, Any]:
        """Return the result over all images, ready for JSON.

        Returns
        -------
        dict of str to Any
            `deviations` are the largest differences of each heatmap from the exact map, after both maps are scaled to
            [0,1]. The verdicts on single images are not included.
        """
        return {
            "images": len(self.verdicts),
            "outcome": self.outcome,
            "passed": self.passed.to_fields(),
            "bugs": [{"kind": bug.kind, "text": bug.text, "gain": bug.gain.to_fields()} for bug in self.bugs],
            "displacement": {name: interval.to_fields() for name, interval in self.displacement.items()} or None,
            "network_offset": self.network_offset,
            "reference": self.reference,
            "deviations": [item.deviation[str(self.reference)] for item in self.evidence],
            "rank_correlations": [item.rank_correlation[str(self.reference)] for item in self.evidence],
            "notes": self.notes,
        }


def combine_fits(evidence: Sequence[MapEvidence], method: str) -> Fits:
    """Return the correlations of all images for each hypothesis. A hypothesis that an image lacks fits as no bug does."""
    rows = [item.fits[method] for item in evidence]
    names = dict.fromkeys(name for row in rows for name in row)
    fits = {name: np.array([row.get(name, row[EXACT]) for row in rows]) for name in names}
    if evidence[0].surfaces:
        surfaces = stack_surfaces(evidence, method)
        row, column = np.unravel_index(surfaces.mean(0).argmax(), surfaces.shape[1:])
        displaced = surfaces[:, row, column]
        fits |= {DISPLACED: displaced} if (row, column) != (MAX_SHIFT, MAX_SHIFT) else {}
    return fits


def stack_surfaces(evidence: Sequence[MapEvidence], method: str) -> NDArray[np.float64]:
    """Return the correlation of each image at all displacements: (N,2S+1,2S+1)."""
    return np.stack([item.surfaces[method].numpy() for item in evidence])


def find_peak(surface: NDArray[np.float64]) -> list[float]:
    """Return the displacement (across, down) of the highest correlation, in samples, refined by parabolas."""
    row, column = map(int, np.unravel_index(surface.argmax(), surface.shape))
    shift = []
    for line, i in ((surface[row], column), (surface[:, column], row)):
        before, peak, after = line[max(i - 1, 0)], line[i], line[min(i + 1, len(line) - 1)]
        bend = before - 2 * peak + after
        shift.append(i - MAX_SHIFT + (float((before - after) / (2 * bend)) if bend < 0 else 0.0))
    return shift


def check_folder(
    check_image: Callable[..., Verdict], classifier: Classifier, images: Sequence[ImageInput], options: dict[str, Any]
) -> FolderVerdict:
    """Check each image with `check_image`, and find systematic bugs. `options` are the options of `check`."""
    require_images(len(images))
    targets, progress = options["target"], options["progress"]
    targets = targets if isinstance(targets, (list, tuple)) else [targets] * len(images)
    if len(targets) != len(images):
        problem = f"There are {len(targets)} targets and {len(images)} images"
        raise TargetError(f"{problem}: pass one target, or one per image.")
    prepared, verdicts, evidence = [classifier.prepare(image) for image in images], list[Verdict](), list[MapEvidence]()
    for i, (image, target) in enumerate(zip(prepared, targets)):
        others = options["other_images"] or [other for other in prepared if other is not image][:MAX_OTHER_IMAGES]
        report = progress and (lambda done, total, i=i: progress(i * total + done, len(images) * total))
        changes = {"target": target, "other_images": others, "progress": report}
        try:
            verdicts.append(check_image(classifier, image, **options | changes))
            evidence += measure_image(classifier, image, options | changes)
        except GradcamError as error:
            raise type(error)(f"Image {i + 1} of {len(images)}: {error}") from error
    return FolderVerdict(tuple(verdicts), tuple(evidence), options["seed"])


def require_images(count: int) -> None:
    """Raise `GradcamError` if there are too few images for a verdict over all images."""
    if count < MIN_IMAGES_FOR_INTERVAL:
        problem = f"A verdict over several images needs at least {MIN_IMAGES_FOR_INTERVAL} images, got {count}"
        raise GradcamError(f"{problem}: add images, or check the images one by one.")


def measure_image(classifier: Classifier, image: ImageInput, options: Mapping[str, Any]) -> list[MapEvidence]:
    """Return the evidence of one image in a list, which is empty for models of other tasks. `options` as in `check`."""
    if isinstance(classifier, TaskModel):
        return []
    source, target = find_explainable(options["method"] or classifier.default_method), options["target"]
    layer = options.get("layer") or (classifier.layer_for(source) if isinstance(source, Method) else classifier.layer)
    names = find_layer(unwrap(classifier.model), layer).name, options["score"], classifier.activation
    explainer = Explainer((source,), *names, options["reshape"], options["seed"])
    index = classifier.find_class(target) if isinstance(target, str) else target
    return [measure_evidence(classifier, classifier.prepare(image), source, explainer, index)]
