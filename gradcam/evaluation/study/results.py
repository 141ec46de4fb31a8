"""The results of a study: the values of each image, the conditions, and the ranking of the methods by each metric."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from gradcam._version import __version__
from gradcam.batch.image_results import ExplainRequest, resolve_settings
from gradcam.batch.save import describe_weights
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, format_fields, shorten
from gradcam.evaluation import intervals
from gradcam.evaluation.intervals import MIN_IMAGES_TO_COMPARE, Interval
from gradcam.evaluation.study.plan import StudyOptions, StudyPlan
from gradcam.images.files import hash_file
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.models.preprocess import Preprocessing, WholeImage, describe_preprocess
from gradcam.renames import JOURNAL, RUN, add_old_keys, to_new_value
from gradcam.storage.run_file import SCHEMA, describe_versions
from gradcam.targets.classes import ClassTarget

# A journal can be resumed only if it describes the target by the same text as the current run. Earlier versions described
# these targets by other texts. The earlier texts are therefore still written.
EARLIER_TARGETS = {
    "the highest-scoring detection": "the surest of what was found",
    "the class in the list, or the most probable one": "the class that the list asks for, or the most probable one",
}
NAME_SEPARATOR = " + "  # between the names of the images in a mosaic
ROUNDING_TOLERANCE = 1e-6  # Smaller differences can come from a different order of float32 additions.

Kind = Literal["image", "mosaic"]
Values = Mapping[str, Mapping[str, float]]  # by method and metric
Curves = Mapping[str, Mapping[str, Sequence[float]]]  # by method and metric: probabilities at equally spaced points


@dataclass(frozen=True)
class Conditions:
    """The conditions of a study: everything that the numbers depend on.

    `weights` and `annotations` are SHA-256 hashes. `target` (the explained class) and `resizing` are descriptions in
    words. `versions` has the versions of the libraries that affect the numbers. `resolved` has settings that the
    package determined: the layouts of the layers, and which output of the model is used.
    """

    model: str
    weights: str
    device: str
    precision: str
    layer: str
    score: str
    target: str
    resizing: str
    seed: int
    annotations: str | None
    versions: Mapping[str, str]
    settings: Mapping[str, Any] = field(repr=False)
    resolved: Mapping[str, Any] = field(default_factory=dict, repr=False)

    __repr__ = format_fields

    def to_fields(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("settings", "resolved")}

    def to_run(self, image_count: int) -> dict[str, Any]:
        """Return the first line of a journal, in the format of run.json. Runs with equal lines give equal numbers."""
        names, versions = ("layer", "score", "target", "seed", "annotations", "precision"), dict(self.versions)
        settings = {**{name: getattr(self, name) for name in names}, **self.settings}
        settings["target"] = EARLIER_TARGETS.get(self.target, self.target)
        run = {
            "schema": SCHEMA, "gradcam": versions.pop("gradcam"), "versions": versions, "device": self.device,
            "model": {"name": self.model, "weights": {"sha256": self.weights}},
            "settings": settings, "images": image_count, "resolved": self.resolved,
        }  # fmt: skip
        return json.loads(json.dumps(add_old_keys(RUN, run)))


def list_conditions(
    classifier: Classifier, plan: StudyPlan, options: StudyOptions, layer: str, target: str
) -> Conditions:
    """Collect the conditions of a study. Raise `OSError` if the annotations cannot be read."""
    reshape, annotations = options.reshape, options.annotations
    methods = [method for method in map(plan.method, plan.methods) if isinstance(method, Method)]
    layers = [] if options.layer is None else [options.layer]
    request = ExplainRequest.of(methods, ClassTarget(), {"reshape": reshape}, "evaluate", layers=layers)
    resolved = resolve_settings(classifier, request)
    settings = {
        # Earlier versions wrote "none" instead of "applied". Journals of earlier versions must remain resumable.
        "activation": classifier.activation.replace("applied", "none"),
        "preprocessing": describe_preprocess(classifier.preprocess),
        "reshape": reshape if isinstance(reshape, (str, type(None))) else repr(reshape),
        "methods": list(plan.names), "metrics": list(plan.metrics), **plan.describe_custom(),
    }  # fmt: skip
    return Conditions(
        model=classifier.name, weights=describe_weights(classifier)["sha256"], device=str(classifier.device),
        precision=str(find_input_dtype(classifier.model)).removeprefix("torch."), layer=layer, score=options.score,
        target=target, resizing=describe_resizing(classifier.preprocess), seed=options.seed,
        annotations=None if annotations is None else _hash_files(annotations),
        versions={"gradcam": __version__, **describe_versions()}, settings=settings,
        resolved={name: resolved[name] for name in ("layouts", "output") if name in resolved},
    )  # fmt: skip


def describe_resizing(preprocess: Any) -> str:
    """Describe how an image is resized for the model."""
    if isinstance(preprocess, WholeImage):
        side = "original size" if preprocess.side is None else f"shorter side to {preprocess.side}"
        return f"whole image, {side}"
    if not isinstance(preprocess, Preprocessing):
        return f"preprocessed by {type(preprocess).__name__}"
    size, resize = " x ".join(map(str, preprocess.size)), preprocess.resize
    part, sides = ("shorter side", [resize]) if isinstance(resize, int) else ("whole image", resize)
    resized = f"{part} to {' x '.join(map(str, sides))}"
    return f"{resized}{'' if resize == preprocess.size else f', centre crop {size}'}, {preprocess.interpolation}"


def _hash_files(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files in a folder. Raise `OSError`."""
    if not path.is_dir():
        return hash_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    text = "".join(f"{file.relative_to(path).as_posix()} {hash_file(file)}\n" for file in files)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Measurement:
    """The value of one metric for one method and one image.

    Attributes
    ----------
    image : str
        The image's name; for a mosaic, the names of its four images, joined by " + ".
    method : str
        The name of a method or control map.
    metric : str
        The name of a metric.
    value : float
        The number.
    index : int or None
        The explained class; None for a mosaic, which has four classes.
    label : str or None
        The class name, if known.

    Examples
    --------
    >>> import gradcam
    >>> options = {"methods": ["gradcam"], "metrics": ["complexity"], "controls": ["constant"]}
    >>> results = gradcam.evaluation.evaluate(gradcam.load_classifier(), "photos/coffee.jpg", **options)
    >>> first: gradcam.evaluation.Measurement = results.measurements[0]
    >>> first.metric, first.label
    ('complexity', 'espresso')
    """

    image: str
    method: str
    metric: str
    value: float
    index: int | None
    label: str | None


@dataclass(frozen=True)
class StudyEntry:
    """The values of one image or mosaic for all methods and metrics, or the error that prevented the evaluation.

    `sha256` is the hash of the image's file; for a mosaic, it is the hash of its images' hashes. `sha256` is None if
    the file could not be read. `index`, `label` and `probability` belong to the explained class. The entry of a mosaic
    has only `label`, with the names of all four classes.
    """

    __repr__ = format_fields
    image: str
    kind: Kind = "image"
    sha256: str | None = None
    error: str | None = None
    index: int | None = None
    label: str | None = None
    probability: float | None = None
    values: Values = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> StudyEntry:
        """Parse a line from `to_json`, ignoring unknown keys. Raise `GradcamError` if the line is not an entry."""
        try:
            content = json.loads(line)
            values = {field.name: content[field.name] for field in fields(StudyEntry)}
            entry = StudyEntry(**values | {"kind": to_new_value(JOURNAL, values["kind"])})
            rows = [*entry.values.values(), *entry.curves.values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GradcamError(f"it is not a complete entry of a study ({type(error).__name__}: {error})") from error
        if not isinstance(entry.image, str) or not all(isinstance(row, dict) for row in rows):
            raise GradcamError(f"it is {shorten(content)}, expected an entry of a study")
        return entry


@dataclass(frozen=True)
class Results:
    """The results of a study: the entries of the images and then of the mosaics, and notes for the user."""

    plan: StudyPlan
    conditions: Conditions
    entries: Sequence[StudyEntry] = field(repr=False)
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return (
            f"Results({len(self.judged())} image(s), {len(self.failures)} failed, "
            f"methods {shorten(self.plan.methods)}, metrics {shorten(self.plan.metrics)})"
        )

    @property
    def measurements(self) -> list[Measurement]:
        return [
            Measurement(entry.image, method, metric, value, entry.index, entry.label)
            for entry in self.entries
            for method, numbers in entry.values.items()
            for metric, value in numbers.items()
        ]

    @property
    def failures(self) -> list[StudyEntry]:
        """Return the entries of images that could not be evaluated. Each error names the image."""
        return [entry for entry in self.entries if entry.error is not None]

    @property
    def data(self) -> str:
        """Return the SHA-256 of the images' sorted hashes. The names of the images do not change the result."""
        return hashlib.sha256("\n".join(sorted(entry.sha256 or "" for entry in self.judged())).encode()).hexdigest()

    def judged(self, kind: Kind = "image") -> list[StudyEntry]:
        """Return the entries of images, or of mosaics, that did not fail."""
        return [entry for entry in self.entries if entry.kind == kind and entry.error is None]

    def values(self, method: str, metric: str) -> list[float | None]:
        """Return a method's value for each entry that has this metric; None if the method has no value."""
        return [entry.values.get(method, {}).get(metric) for entry in self._entries_with(metric)]

    def mosaic_images(self, metric: str) -> list[Sequence[str]] | None:
        """Return the image names of each mosaic with a value of the metric; None if the metric is not of mosaics."""
        entries = self._entries_with(metric)
        is_of_mosaics = any(entry.kind == "mosaic" for entry in entries)
        return [entry.image.split(NAME_SEPARATOR) for entry in entries] if is_of_mosaics else None

    def _entries_with(self, metric: str) -> list[StudyEntry]:
        return [entry for entry in self.entries if any(metric in numbers for numbers in entry.values.values())]

    def curves(self, method: str, metric: str) -> list[Sequence[float]]:
        """Return the probabilities along a metric's curve for each image that has a curve."""
        curves = (entry.curves.get(method, {}).get(metric) for entry in self.entries)
        return [curve for curve in curves if curve]


@dataclass(frozen=True)
class Ranking:
    """The comparison of one method or control with the best method, by one metric.

    The best method is the method with the best mean. Only a method with values for at least 8 images can be the best method.
    `interval` is the mean over images or mosaics, with a confidence interval. `difference` is the paired difference
    from the best method. For the best method itself, and if there is no best method, `difference` is None. The interval
    of `difference` is not corrected for multiple comparisons. `is_level` marks a method that does not differ
    significantly from the best method. This test is corrected for the comparison of all pairs by
    `find_distinguished_pairs`. `is_control` marks a control, which is never the best. `beats_all` marks a control that
    is at least as good as the best method.
    """

    method: str
    metric: str
    interval: Interval
    difference: Interval | None
    is_best: bool = False
    is_level: bool = False
    is_control: bool = False
    beats_all: bool = False


def describe_too_few_images(rankings: Mapping[tuple[str, str], Ranking]) -> str | None:
    """Explain that there are too few images for intervals or a best method; None if each metric has enough images."""
    if all(_is_enough(ranking.interval) for ranking in rankings.values()):
        return None
    return (
        f"Too few images (n): naming a best method needs {MIN_IMAGES_TO_COMPARE} images, and an interval needs "
        f"{intervals.MIN_IMAGES_FOR_INTERVAL}. With so few images, apparent differences are often due to chance."
    )


def _is_enough(interval: Interval) -> bool:
    return interval.is_known and interval.n >= MIN_IMAGES_TO_COMPARE


def compare_methods(results: Results) -> Mapping[tuple[str, str], Ranking]:
    """Compare methods and controls by each metric that has values, and return the rankings by (method, metric)."""
    rankings, plan = {}, results.plan
    for metric in plan.metrics:
        values = {name: results.values(name, metric) for name in plan.names}
        if all(value is None for row in values.values() for value in row):
            continue
        images = results.mosaic_images(metric)
        means = {name: intervals.mean_interval(row, images=images) for name, row in values.items()}
        sign = 1 if plan.metric(metric).better == "higher" else -1
        scores = {name: sign * means[name].mean for name in plan.methods if _is_enough(means[name])}
        top_score = max(scores.values(), default=0) - ROUNDING_TOLERANCE
        best = next((name for name, score in scores.items() if score >= top_score), None)
        distinguished = intervals.find_distinguished_pairs({name: values[name] for name in scores}, images)
        for name, row in values.items():
            ranking = Ranking(name, metric, means[name], None, is_best=name == best, is_control=name in plan.controls)
            if best not in (None, name):
                gap = intervals.paired_difference(row, values[best], images=images)
                is_close = frozenset((name, best)) not in distinguished or abs(gap.mean) <= ROUNDING_TOLERANCE
                is_level = is_close and not ranking.is_control
                beats_all = ranking.is_control and sign * gap.mean >= -ROUNDING_TOLERANCE
                ranking = replace(ranking, difference=gap, is_level=is_level, beats_all=beats_all)
            rankings[name, metric] = ranking
    return rankings
