"""What a study found: the numbers of each picture, what was the same for all methods, and how these rank by each metric."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gradcam._version import __version__
from gradcam.batch.findings import Request, resolve
from gradcam.batch.save import describe_weights
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, shorten, show_fields
from gradcam.evaluation.intervals import ENOUGH, FEWEST, Interval, find_told_apart, mean_interval, paired_difference
from gradcam.evaluation.study.plan import Agenda, StudyOptions
from gradcam.images.files import hash_file
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.models.preprocess import Preprocessing, WholePicture, describe_preprocess
from gradcam.renames import JOURNAL, RUN, add_old_keys, to_new_value
from gradcam.storage.run_file import SCHEMA, describe_versions
from gradcam.targets.classes import ClassTarget

# Texts of earlier versions, whose journals resume.
EARLIER_TARGETS = {
    "the highest-scoring detection": "the surest of what was found",
    "the class in the list, or the most probable one": "the class that the list asks for, or the most probable one",
}
JOINED = " + "  # between the names of a mosaic's pictures
ROUNDING = 1e-6  # differences below that are of the order in which float32 numbers were added up

Kind = Literal["image", "mosaic"]
Values = Mapping[str, Mapping[str, float]]  # by method and metric
Curves = Mapping[str, Mapping[str, Sequence[float]]]  # by method and metric, probabilities at equal distances


@dataclass(frozen=True)
class Conditions:
    """Of one study. `weights`, `annotations`: SHA-256s, of the model's tensors and of what says where objects are.
    `target`: which class of each picture is explained; `resizing`: from a picture to what the network takes, both in
    words. `versions`: of whatever has a part in the numbers. `settings`: the rest of what they depend on. `resolved`: the
    layouts and the output that the package chose."""

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

    __repr__ = show_fields

    def to_fields(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("settings", "resolved")}

    def to_run(self, pictures: int) -> dict[str, Any]:
        """What a journal begins with, of the form of a batch's run.json: where all of it is alike, the numbers are."""
        names, versions = ("layer", "score", "target", "seed", "annotations", "precision"), dict(self.versions)
        counted = {
            "schema": SCHEMA,
            "gradcam": versions.pop("gradcam"),
            "versions": versions,
            "device": self.device,
            "model": {"name": self.model, "weights": {"sha256": self.weights}},
            "settings": {
                **{name: getattr(self, name) for name in names},
                "target": EARLIER_TARGETS.get(self.target, self.target),
                **self.settings,
            },
            "images": pictures,
            "resolved": self.resolved,
        }
        return json.loads(json.dumps(add_old_keys(RUN, counted)))


def list_conditions(classifier: Classifier, plan: Agenda, options: StudyOptions, layer: str, target: str) -> Conditions:
    """The conditions of a study. Raises `OSError` where the annotations cannot be read."""
    reshape, annotations = options.reshape, options.annotations
    methods = [method for method in map(plan.explained, plan.methods) if isinstance(method, Method)]
    layers = [] if options.layer is None else [options.layer]
    request = Request.of(methods, ClassTarget(), {"reshape": reshape}, "evaluate", layers=layers)
    resolved = resolve(classifier, request)
    return Conditions(
        model=classifier.name,
        weights=describe_weights(classifier)["sha256"],
        device=str(classifier.device),
        precision=str(find_input_dtype(classifier.model)).removeprefix("torch."),
        layer=layer,
        score=options.score,
        target=target,
        resizing=describe_resizing(classifier.preprocess),
        seed=options.seed,
        annotations=None if annotations is None else _hash_all(annotations),
        versions={"gradcam": __version__, **describe_versions()},
        settings={
            "activation": classifier.activation.replace("applied", "none"),  # As earlier versions, whose runs resume.
            "preprocessing": describe_preprocess(classifier.preprocess),
            "reshape": reshape if isinstance(reshape, (str, type(None))) else repr(reshape),
            "methods": list(plan.names),
            "metrics": list(plan.metrics),
            **plan.describe_own(),
        },
        resolved={name: resolved[name] for name in ("layouts", "output") if name in resolved},
    )


def describe_resizing(preprocess: Any) -> str:
    """What is done to a picture before the network sees it, for a sentence."""
    if isinstance(preprocess, WholePicture):
        side = "original size" if preprocess.side is None else f"shorter side to {preprocess.side}"
        return f"whole image, {side}"
    if not isinstance(preprocess, Preprocessing):
        return f"preprocessed by {type(preprocess).__name__}"
    size, resize = " x ".join(map(str, preprocess.size)), preprocess.resize
    part, sides = ("shorter side", [resize]) if isinstance(resize, int) else ("whole image", resize)
    done = f"{part} to {' x '.join(map(str, sides))}"
    return f"{done}{'' if resize == preprocess.size else f', centre crop {size}'}, {preprocess.interpolation}"


def _hash_all(path: Path) -> str:
    """The SHA-256 of a file, or of all files in a folder with their names. Raises `OSError`."""
    if not path.is_dir():
        return hash_file(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    text = "".join(f"{each.relative_to(path).as_posix()} {hash_file(each)}\n" for each in files)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Measurement:
    """One metric of one method's heatmap of one image.

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
        The explained class; None for a mosaic, which has four.
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
class Judgement:
    """What was measured of one image by all methods; one that failed has an error, and nothing measured. `sha256`: of
    the file, None where it could not be read; of a mosaic, of its pictures'. `index`, `label`, `probability`: of the
    class that was explained; a mosaic has four, and only their labels are here."""

    __repr__ = show_fields
    image: str
    kind: Kind = "image"
    sha256: str | None = None
    error: str | None = None
    index: int | None = None
    label: str | None = None
    probability: float | None = None
    values: Values = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)

    @property
    def measurements(self) -> list[Measurement]:
        return [
            Measurement(self.image, method, metric, value, self.index, self.label)
            for method, numbers in self.values.items()
            for metric, value in numbers.items()
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Judgement:
        """The entry in one line, as `to_json` gives it, without unknown keys. Raises `GradcamError` for what is no entry."""
        try:
            found = json.loads(line)
            values = {each.name: found[each.name] for each in fields(Judgement)}
            entry = Judgement(**values | {"kind": to_new_value(JOURNAL, values["kind"])})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GradcamError(f"it is not a complete entry of a study ({type(error).__name__}: {error})") from error
        tables = (entry.values, entry.curves)
        are_tables = all(isinstance(it, dict) and all(isinstance(row, dict) for row in it.values()) for it in tables)
        if not isinstance(entry.image, str) or not are_tables:
            raise GradcamError(f"it is {shorten(found)}, expected an entry of a study")
        return entry


@dataclass(frozen=True)
class Results:
    """The entries of pictures, in their order, then those of mosaics. `notes`: what a person should know of them."""

    plan: Agenda
    conditions: Conditions
    entries: Sequence[Judgement] = field(repr=False)
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return (
            f"Results({len(self.judged())} image(s), {len(self.failures)} failed, "
            f"methods {shorten(self.plan.methods)}, metrics {shorten(self.plan.metrics)})"
        )

    @property
    def measurements(self) -> list[Measurement]:
        return [measurement for entry in self.entries for measurement in entry.measurements]

    @property
    def failures(self) -> list[Judgement]:
        """What could not be judged; each has an error that names it."""
        return [entry for entry in self.entries if entry.error is not None]

    @property
    def data(self) -> str:
        """The SHA-256 of the judged pictures' own, sorted: it tells the same pictures, however they are called."""
        found = sorted(entry.sha256 or "" for entry in self.judged())
        return hashlib.sha256("\n".join(found).encode()).hexdigest()

    def judged(self, kind: Kind = "image") -> list[Judgement]:
        """The entries of one kind that did not fail."""
        return [entry for entry in self.entries if entry.kind == kind and entry.error is None]

    def values(self, method: str, metric: str) -> list[float | None]:
        """One number for each entry that has numbers of this metric, None where this method has none."""
        return [entry.values.get(method, {}).get(metric) for entry in self._having(metric)]

    def pictures(self, metric: str) -> list[Sequence[str]] | None:
        """Of each of these entries the pictures that it shows; None where each is a picture."""
        having = self._having(metric)
        is_of_mosaics = any(entry.kind == "mosaic" for entry in having)
        return [entry.image.split(JOINED) for entry in having] if is_of_mosaics else None

    def _having(self, metric: str) -> list[Judgement]:
        return [entry for entry in self.entries if any(metric in numbers for numbers in entry.values.values())]

    def curves(self, method: str, metric: str) -> list[Sequence[float]]:
        """The probabilities along a metric's curve, one for each picture that has some."""
        found = (entry.curves.get(method, {}).get(metric) for entry in self.entries)
        return [curve for curve in found if curve]


@dataclass(frozen=True)
class Ranking:
    """Where one method stands by one metric; of fewer than 8 pictures none is the best, and none is compared.
    `interval`: its mean over pictures, or mosaics. `difference`: its mean minus the best method's, picture by picture;
    None for the best, the first of several. `is_level`: a method that is not told apart from the best, where all pairs of
    methods are compared at once (`find_told_apart`): the difference's own interval is of one comparison. `is_control`:
    knows nothing, is never the best, and `beats_all` where it is as good as that."""

    method: str
    metric: str
    interval: Interval
    difference: Interval | None
    is_best: bool = False
    is_level: bool = False
    is_control: bool = False
    beats_all: bool = False


def describe_shortage(rankings: Mapping[tuple[str, str], Ranking]) -> str | None:
    """Why some metrics, or all, have neither intervals nor a best method: of too few pictures; None where all have."""
    if all(_is_enough(it.interval) for it in rankings.values()):
        return None
    return (
        f"Too few images (n): a best method needs {ENOUGH} images, and an interval needs {FEWEST}. With so few images, "
        "apparent differences are often due to chance."
    )


def _is_enough(interval: Interval) -> bool:
    return interval.is_known and interval.n >= ENOUGH


def compare_methods(results: Results) -> Mapping[tuple[str, str], Ranking]:
    """How each method and control ranks by each metric: by (method, metric), of metrics that have numbers."""
    found, plan = {}, results.plan
    for metric in plan.metrics:
        values = {name: results.values(name, metric) for name in plan.names}
        if all(value is None for row in values.values() for value in row):
            continue
        pictures = results.pictures(metric)
        means = {name: mean_interval(row, images=pictures) for name, row in values.items()}
        sign = 1 if plan.metric(metric).better == "higher" else -1
        known = {name: sign * means[name].mean for name in plan.methods if _is_enough(means[name])}
        best = next((name for name, mean in known.items() if mean >= max(known.values()) - ROUNDING), None)
        told_apart = find_told_apart({name: values[name] for name in known}, pictures=pictures)
        for name, row in values.items():
            is_control, is_level, beats_all = name in plan.controls, False, False
            difference = None if best in (None, name) else paired_difference(row, values[best], images=pictures)
            if difference is not None:
                is_near = frozenset((name, best)) not in told_apart or abs(difference.mean) <= ROUNDING
                is_level, beats_all = not is_control and is_near, is_control and sign * difference.mean >= -ROUNDING
            own, is_best = means[name], name == best
            found[name, metric] = Ranking(name, metric, own, difference, is_best, is_level, is_control, beats_all)
    return found
