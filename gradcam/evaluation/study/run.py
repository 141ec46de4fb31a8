"""Run a study: evaluate the methods on each image, then on each mosaic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcam.batch.read_items import read_item
from gradcam.errors import GradcamError, TargetError, describe_failure, describe_unexpected
from gradcam.evaluation.annotations import Annotations, Truth
from gradcam.evaluation.explainers import Explainer, StepCounter
from gradcam.evaluation.metrics import METRICS, Metric
from gradcam.evaluation.metrics.localisation import CorLoc, find_held_out_hits
from gradcam.evaluation.metrics.mosaic import Mosaic
from gradcam.evaluation.metrics.perturbation import Curve
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import StudyPlan
from gradcam.evaluation.study.results import NAME_SEPARATOR, Conditions, Kind, Results, StudyEntry
from gradcam.evaluation.subject import Subject, derive_seed, describe_tensor, to_batch, to_tensor
from gradcam.models.classifier import Classifier
from gradcam.models.instance_scores import ImageScores, to_instance_classifier
from gradcam.models.labels import name_class
from gradcam.models.preprocess import Prepared, find_canvas
from gradcam.models.task_models import TaskModel
from gradcam.options import Progress
from gradcam.sources.contents import InputImage

MAX_EXAMPLES = 5  # The heatmaps of this many images are cached, to draw examples.
NamedMosaic = tuple[str, Mosaic, str]  # (joined names of the images, mosaic, SHA-256 of the images' hashes)


@dataclass(frozen=True, eq=False)
class Study:
    """A study that is ready to run.

    `index` is the class to explain in all images. If `index` is None, `make_subject` chooses the class of each image.
    `notes` report which methods, metrics and annotations were left out. `example_heatmaps` caches the heatmaps (1,H,W)
    of the first images, by image name and method, unless the images' entries came from the journal.
    """

    evaluator: Evaluator
    items: Sequence[InputImage]
    compositions: Sequence[NamedMosaic]
    conditions: Conditions
    index: int | None = None
    annotations: Annotations | None = None
    notes: Sequence[str] = ()
    example_heatmaps: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def plan(self) -> StudyPlan:
        return self.evaluator.plan

    @property
    def classifier(self) -> Classifier:
        return self.evaluator.classifier

    @property
    def total(self) -> int:
        return len(self.plan.names) * (len(self.items) + len(self.compositions))

    def run(self, journal: Journal | None = None, *, progress: Progress | None = None) -> Iterator[StudyEntry]:
        """Yield the entry of each image in order, then of each mosaic. An image that fails has an entry with an error.

        Entries in the journal are not computed again. Other entries are written to the journal before they are yielded.
        `progress` receives the number of evaluated heatmaps and the total.
        """
        counter = StepCounter(progress, self.total)
        image_entries = (self._evaluate_item(item, journal, counter) for item in self.items)
        mosaic_entries = (
            _load_or_evaluate(
                partial(self.evaluator.evaluate_mosaic, name, mosaic, sha256, counter), journal, name, "mosaic", sha256
            )
            for name, mosaic, sha256 in self.compositions
        )
        for number, entry in enumerate(chain(image_entries, mosaic_entries), 1):
            counter.reach(number * len(self.plan.names))
            yield entry

    def conclude(self, entries: Sequence[StudyEntry]) -> Results:
        return Results(self.plan, self.conditions, tuple(_hold_out_thresholds(entries)), tuple(self.notes))

    def _evaluate_item(self, item: InputImage, journal: Journal | None, counter: StepCounter) -> StudyEntry:
        read = read_item(self.classifier, item, audit=True)
        sha256 = read.fetched.sha256

        def evaluate() -> StudyEntry:
            if isinstance(read.picture, GradcamError):
                return StudyEntry(item.name, sha256=sha256, error=str(read.picture))
            evaluator, subject, index = self.make_subject(item, read.picture, read.wanted)
            size: tuple[int, int] = read.picture.reading.picture.shape[:2]
            truth = None
            if self.annotations is not None and index is not None:
                region = find_canvas(evaluator.classifier.preprocess, read.picture)
                truth = self.annotations.truth(item.name, region, subject.size[1:], index, image_size=size)
            entry, heatmaps = evaluator.evaluate(item.name, sha256 or "", subject, truth, counter)
            if item in self.items[:MAX_EXAMPLES]:
                self.example_heatmaps[item.name] = {name: maps.cpu() for name, maps in heatmaps.items()}
            return entry

        return _load_or_evaluate(evaluate, journal, item.name, "image", sha256)

    def make_subject(
        self, item: InputImage, prepared: Prepared, class_index: int | None
    ) -> tuple[Evaluator, Subject, int | None]:
        """Return the evaluator and the subject for an image, and the class for selecting annotations.

        The explained class is the first of these classes that is known: the class in the input list, the study's class,
        the most probable annotated class, the top class. A detector or segmenter uses the class of the highest-scoring
        detection, and prefers detections of annotated classes.
        """
        index = self.index if class_index is None else class_index
        annotated = [] if self.annotations is None or index is not None else self.annotations.classes(item.name)
        evaluator = self.evaluator.adapt(prepared, index, annotated)
        classifier = evaluator.classifier
        if isinstance(classifier, ImageScores):
            i = next((k for k, instance in enumerate(classifier.instances) if instance.index in annotated), 0)
            subject = evaluator.make_subject(prepared, classifier.find_instance(i))
            return evaluator, subject, classifier.instances[i].index
        subject = evaluator.make_subject(prepared, index)
        if annotated:
            index = max(annotated, key=subject.all_probabilities[0].tolist().__getitem__)
            subject = evaluator.make_subject(prepared, index)
        return evaluator, subject, int(subject.classes)


def _hold_out_thresholds(entries: Sequence[StudyEntry]) -> list[StudyEntry]:
    """Replace each image's CorLoc by the number at the threshold that is best for the other half of the images."""
    concluded = list(entries)
    for method in dict.fromkeys(name for entry in entries for name in entry.curves):
        rows = [i for i, entry in enumerate(entries) if "corloc" in entry.curves.get(method, {})]
        rows.sort(key=lambda i: (entries[i].sha256 or "", entries[i].image))
        hits = find_held_out_hits(np.array([entries[i].curves[method]["corloc"] for i in rows]))
        for i, hit in zip(rows, hits.tolist()):
            values = concluded[i].values
            concluded[i] = replace(concluded[i], values={**values, method: {**values[method], "corloc": hit}})
    return concluded


def _load_or_evaluate(
    evaluate: Callable[[], StudyEntry], journal: Journal | None, name: str, kind: Kind, sha256: str | None
) -> StudyEntry:
    """Return the entry from the journal, or call `evaluate` and add its entry to the journal."""
    if journal is not None and (earlier := journal.find(name, sha256)) is not None:
        return earlier
    try:
        entry = evaluate()
    except (Exception, SystemExit) as error:  # If one image fails, the study continues.
        entry = StudyEntry(name, kind, sha256, error=describe_failure(name, error))
    if journal is not None:
        journal.append(entry)
    return entry


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates images with the same settings.

    Random numbers depend on the seed and the bytes of the image, not on its name or on other images. `target` is for
    models of tasks other than classification; None selects the highest-scoring detection.
    """

    classifier: Classifier
    plan: StudyPlan
    layer: str | Mapping[str, str]
    score: str = "logit"
    reshape: Any = None
    seed: int = 0
    target: Any = None

    def adapt(self, prepared: Prepared, index: int | None = None, annotated: Sequence[int] = ()) -> Evaluator:
        """Return the evaluator for an image. For models of other tasks, the detections in the image become the classes.

        `index` selects the detections of one class. If `index` is None, `annotated` classes are preferred.
        """
        if not isinstance(self.classifier, TaskModel):
            return self
        at_layers = [method for method in map(self.plan.method, self.plan.methods) if method.place == "layer"]
        to_scores = partial(to_instance_classifier, self.classifier, prepared, methods=at_layers[:1])
        target, scores = self.target if index is None else index, None
        if target is None and self.classifier.list_all() is None:  # The model detects only requested classes.
            for class_index in annotated:
                with suppress(TargetError):
                    scores = to_scores(class_index)
                    break
        scores = to_scores(target) if scores is None else scores
        return replace(self, classifier=scores, layer=self.layer if self.classifier.is_chosen else scores.layer)

    def make_explainer(self, sha256: str) -> Explainer:
        names, seed = [self.plan.method(name) for name in self.plan.names], derive_seed(self.seed, sha256)
        return Explainer(names, self.layer, self.score, self.classifier.activation, self.reshape, seed)

    def explain(self, subject: Subject, sha256: str) -> dict[str, Tensor]:  # heatmaps (1,H,W), by method
        heatmaps = self.make_explainer(sha256).explain(self.classifier.model, subject.images, subject.classes[:, None])
        return {name: maps[:, 0] for name, maps in heatmaps.items()}

    def make_subject(self, prepared: Prepared, index: int | None) -> Subject:
        """Make the subject from an image and a class; None selects the top class. This runs the model once."""
        images, classes = self.classifier.batch([prepared]), None if index is None else [index]
        return Subject(self.classifier.model, images, classes, activation=self.classifier.activation)

    def evaluate(
        self, name: str, sha256: str, subject: Subject, truth: Truth | None, counter: StepCounter
    ) -> tuple[StudyEntry, Mapping[str, Tensor]]:
        """Measure the heatmaps of all methods for one image; return the entry and the heatmaps (1,H,W)."""
        explainer, heatmaps = self.make_explainer(sha256), self.explain(subject, sha256)
        inputs: dict[str, Any] = {} if truth is None else {"masks": truth.masks, "boxes": truth.boxes}
        inputs |= {"subject": subject, "seed": derive_seed(self.seed, sha256)}
        values, curves = {}, {}
        for method, maps in heatmaps.items():
            metric_inputs = MetricInputs(heatmaps=maps, explain=explainer.only(method), **inputs)
            values[method] = metric_inputs.measure(self.plan.image_metrics)
            curves[method] = metric_inputs.curves(self.plan.image_metrics)
            counter.step()
        k = int(subject.classes)
        label, probability = self.classifier.label(k), float(subject.probabilities)
        index = self.classifier.instance(k).index if isinstance(self.classifier, ImageScores) else k
        return StudyEntry(name, "image", sha256, None, index, label, probability, values, curves), heatmaps

    def evaluate_mosaic(self, name: str, mosaic: Mosaic, sha256: str, counter: StepCounter) -> StudyEntry:
        """Measure the heatmaps of all methods for one mosaic. Each value is a mean over the mosaic's four classes."""
        classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=self.classifier.device)
        images = to_batch(self.classifier, [mosaic.image])
        heatmaps = self.make_explainer(sha256).explain(self.classifier.model, images, classes)
        values = {}
        for method, maps in heatmaps.items():
            values[method] = MetricInputs(mosaic=maps).measure(self.plan.mosaic_metrics)
            counter.step()
        labels = [name_class(index, self.classifier.label(index) or None) for index in mosaic.classes]
        return StudyEntry(name, "mosaic", sha256, label=NAME_SEPARATOR.join(labels), values=values)


class MetricInputs:
    """One heatmap and the other inputs of its metrics, by the names in `Metric.needs`. Shared results are cached."""

    def __init__(self, **inputs: Any) -> None:
        self._inputs = inputs
        self._computed: dict[Any, Any] = {}  # results by `Metric.key`

    def measure(self, metrics: Iterable[Metric]) -> dict[str, float]:
        """Compute the metrics. Without annotations, leave out the metrics that need annotations.

        Raise `GradcamError` if a value is NaN or infinite. Errors of the metrics are passed on.
        """
        values: dict[str, float] = {}
        for metric in metrics:
            if not metric.needs_annotations or "masks" in self._inputs:
                numbers = self._compute(metric)
                number = float(numbers.float().flatten(1).mean(1)[0] if numbers.ndim > 1 else numbers[0])
                if not math.isfinite(number):
                    raise GradcamError(
                        f"The metric {metric.name} is {number}: check the model's output and the heatmap."
                    )
                values[metric.name] = number
        return values

    def curves(self, metrics: Iterable[Metric]) -> dict[str, list[float]]:
        """Return a curve for each computed metric that has one: probabilities, or the overlaps of boxes."""
        computed = {metric.name: self._computed.get(metric.key) for metric in metrics}
        curves = {name: curve for name, curve in computed.items() if isinstance(curve, (Curve, CorLoc))}
        return {name: (c.probabilities if isinstance(c, Curve) else c.iou)[0].tolist() for name, c in curves.items()}

    def _compute(self, metric: Metric) -> Any:
        """Return a metric's result, (N,) or (N,...)."""
        if metric.key not in self._computed:
            needs = [need for need in metric.needs if need != "seed"]
            arguments = [self._compute(METRICS[need]) if need in METRICS else self._inputs[need] for need in needs]
            options = {"seed": self._inputs["seed"]} if "seed" in metric.needs else {}
            compute = metric if metric.name in METRICS else partial(_call_custom, metric)
            self._computed[metric.key] = compute(*arguments, **options)
        result = self._computed[metric.key]
        return getattr(result, metric.part) if metric.part else result


def _call_custom(metric: Metric, *arguments: Any, **options: Any) -> Tensor:
    """Call a user-defined metric with copies of its arguments, and validate its value (1,)."""
    copies = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
    try:
        returned = metric.compute(*copies, **options)
    except GradcamError:
        raise
    except Exception as error:
        raise GradcamError(f"The metric {metric.name!r} failed: {describe_unexpected(error)}") from error
    with suppress(TypeError, ValueError, RuntimeError):
        numbers = to_tensor(returned)
        if np.shape(returned) == (1,) and numbers.is_floating_point():
            return numbers
    value = describe_tensor(returned, Tensor, np.ndarray)
    raise GradcamError(f"The metric {metric.name!r} returned {value}, expected floats (1,): one number per image.")
