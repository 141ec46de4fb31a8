"""A study of methods over pictures: each picture on its own, then mosaics of them."""

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

from gradcam.batch.read import read_item
from gradcam.errors import GradcamError, TargetError, describe_failure, describe_unexpected
from gradcam.evaluation.annotations import Annotations, Truth
from gradcam.evaluation.explainers import Counter, Explainer
from gradcam.evaluation.metrics import METRICS, Metric
from gradcam.evaluation.metrics.grid import Mosaic
from gradcam.evaluation.metrics.perturbation import Curve
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import Agenda
from gradcam.evaluation.study.results import Conditions, Judgement, Kind, Results
from gradcam.evaluation.subject import Subject, derive, describe, to_tensor
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.models.kinds import TaskModel
from gradcam.models.labels import name_class
from gradcam.models.preprocess import Prepared, find_canvas
from gradcam.models.scores import PictureScores, to_classifier
from gradcam.options import Progress
from gradcam.sources.contents import Item

EXAMPLES = 5  # pictures whose heatmaps are kept, to be shown


@dataclass(frozen=True, eq=False)
class Composition:
    """A mosaic, named by its pictures, and the SHA-256 of these pictures' own."""

    name: str
    mosaic: Mosaic
    sha256: str


@dataclass(frozen=True, eq=False)
class Study:
    """All that is settled before the first picture is judged. `notes`: what was left out, and why. `index`: the class
    of all pictures; None for what a list asks for, or the most probable one, of those annotated if any. `kept`:
    heatmaps (1,H,W) of the first pictures, by name and method, as far as they were computed here."""

    evaluator: Evaluator
    items: Sequence[Item]
    compositions: Sequence[Composition]
    conditions: Conditions
    index: int | None = None
    annotations: Annotations | None = None
    notes: Sequence[str] = ()
    kept: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def plan(self) -> Agenda:
        return self.evaluator.plan

    @property
    def classifier(self) -> Classifier:
        return self.evaluator.classifier

    @property
    def total(self) -> int:
        return len(self.plan.names) * (len(self.items) + len(self.compositions))

    def run(self, journal: Journal | None = None, *, progress: Progress | None = None) -> Iterator[Judgement]:
        """What is measured of each picture, in their order, then of each mosaic; a picture that fails has an error.
        What the journal has is not computed again; the rest is added to it before it is given. `progress`: of maps."""
        counter = Counter(progress, self.total)
        of_pictures = (self._judge_item(item, journal, counter) for item in self.items)
        of_mosaics = (
            _recall_or(partial(self.evaluator.judge_mosaic, it, counter), journal, it.name, "mosaic", it.sha256)
            for it in self.compositions
        )
        for number, entry in enumerate(chain(of_pictures, of_mosaics), 1):
            counter.reach(number * len(self.plan.names))
            yield entry

    def conclude(self, entries: Sequence[Judgement]) -> Results:
        return Results(self.plan, self.conditions, tuple(entries), tuple(self.notes))

    def _judge_item(self, item: Item, journal: Journal | None, counter: Counter) -> Judgement:
        read = read_item(self.classifier, item, audit=True)
        sha256 = read.fetched.sha256

        def judge() -> Judgement:
            if isinstance(read.picture, GradcamError):
                return Judgement(item.name, sha256=sha256, error=str(read.picture))
            evaluator, subject, index = self.look(item, read.picture, read.wanted)
            size: tuple[int, int] = read.picture.reading.picture.shape[:2]
            truth = None
            if self.annotations is not None and index is not None:
                region = find_canvas(evaluator.classifier.preprocess, read.picture)
                truth = self.annotations.truth(item.name, region, subject.size[1:], index, image_size=size)
            entry, heatmaps = evaluator.judge(item.name, sha256 or "", subject, truth, counter)
            if item in self.items[:EXAMPLES]:
                self.kept[item.name] = {name: maps.cpu() for name, maps in heatmaps.items()}
            return entry

        return _recall_or(judge, journal, item.name, "image", sha256)

    def look(self, item: Item, picture: Prepared, wanted: int | None) -> tuple[Evaluator, Subject, int | None]:
        """What is judged of a picture, by which evaluator, and the class whose annotations are of it: that which a list
        wants, or all have, or the most probable of those that are annotated. Of a model of another task, the surest of
        what was found."""
        index = self.index if wanted is None else wanted
        annotated = [] if self.annotations is None or index is not None else self.annotations.classes(item.name)
        evaluator = self.evaluator.fit(picture, index, annotated)
        found = evaluator.classifier
        if isinstance(found, PictureScores):
            i = next((k for k, each in enumerate(found.instances) if each.index in annotated), 0)
            return evaluator, evaluator.look(picture, found.find_instance(i)), found.instances[i].index
        subject = evaluator.look(picture, index)
        if annotated:
            subject = evaluator.look(picture, max(annotated, key=subject.all_probabilities[0].tolist().__getitem__))
        return evaluator, subject, int(subject.classes)


def _recall_or(
    judge: Callable[[], Judgement], journal: Journal | None, name: str, kind: Kind, sha256: str | None
) -> Judgement:
    """What the journal has of an image, or else what `judge` gives, which is added to the journal."""
    if journal is not None and (earlier := journal.find(name, sha256)) is not None:
        return earlier
    try:
        entry = judge()
    except (Exception, SystemExit) as error:  # one picture does not stop the others
        entry = Judgement(name, kind, sha256, error=describe_failure(name, error))
    if journal is not None:
        journal.append(entry)
    return entry


@dataclass(frozen=True, eq=False)
class Evaluator:
    """What is the same for all pictures. Chance is drawn from the seed and a picture's own bytes: neither its name nor
    its neighbours change its numbers. `wanted`: what is judged of a model of another task than to classify."""

    classifier: Classifier
    plan: Agenda
    layer: str | Mapping[str, str]
    score: str = "logit"
    reshape: Any = None
    seed: int = field(default=0, kw_only=True)
    wanted: Any = field(default=None, kw_only=True)

    def fit(self, picture: Prepared, index: int | None = None, annotated: Sequence[int] = ()) -> Evaluator:
        """The evaluator for a picture: of a model of another task than to classify, what was found there are classes.
        `index`: of that class alone. `annotated`: classes that come first where nothing is wanted."""
        if not isinstance(self.classifier, TaskModel):
            return self
        own = self._find(self.classifier, picture, index, annotated)
        return replace(self, classifier=own, layer=self.layer if self.classifier.is_chosen else own.layer)

    def _find(self, model: TaskModel, picture: Prepared, index: int | None, annotated: Sequence[int]) -> PictureScores:
        at_layers = [method for method in map(self.plan.explained, self.plan.methods) if method.place == "layer"]
        to_own = partial(to_classifier, model, picture, methods=at_layers[:1])
        if index is not None:
            return to_own(index)
        if self.wanted is None and model.list_all() is None:  # one class at a time
            for each in annotated:
                with suppress(TargetError):
                    return to_own(each)
        return to_own(self.wanted)

    def explainer(self, sha256: str) -> Explainer:
        names, seed = [self.plan.explained(name) for name in self.plan.names], derive(self.seed, sha256)
        return Explainer(names, self.layer, self.score, self.classifier.activation, self.reshape, seed)

    def explain(self, subject: Subject, sha256: str) -> dict[str, Tensor]:  # heatmaps (1,H,W), by method
        found = self.explainer(sha256).explain(self.classifier.model, subject.images, subject.classes[:, None])
        return {name: maps[:, 0] for name, maps in found.items()}

    def look(self, prepared: Prepared, index: int | None) -> Subject:
        """One picture and its class, by default the most probable one; it runs the model once."""
        images, classes = self._to_batch(prepared.image), None if index is None else [index]
        return Subject(self.classifier.model, images, classes, activation=self.classifier.activation)

    def judge(
        self, name: str, sha256: str, subject: Subject, truth: Truth | None, counter: Counter
    ) -> tuple[Judgement, Mapping[str, Tensor]]:
        """The numbers of one picture's maps by all methods, and the heatmaps (1,H,W) themselves."""
        explainer, heatmaps = self.explainer(sha256), self.explain(subject, sha256)
        given: dict[str, Any] = {} if truth is None else {"masks": truth.masks, "boxes": truth.boxes}
        given |= {"subject": subject, "seed": derive(self.seed, sha256)}
        values, curves = {}, {}
        for method, maps in heatmaps.items():
            case = Case(heatmaps=maps, explain=explainer.only(method), **given)
            values[method] = case.measure(self.plan.of_pictures)
            curves[method] = case.curves(self.plan.of_pictures)
            counter.step()
        found = int(subject.classes)
        label, probability = self.classifier.label(found), float(subject.probabilities)
        index = self.classifier.instance(found).index if isinstance(self.classifier, PictureScores) else found
        return Judgement(name, "image", sha256, None, index, label, probability, values, curves), heatmaps

    def judge_mosaic(self, composition: Composition, counter: Counter) -> Judgement:
        """The numbers of one mosaic's maps by all methods, each a mean over its four classes."""
        mosaic, sha256 = composition.mosaic, composition.sha256
        classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=self.classifier.device)
        found = self.explainer(sha256).explain(self.classifier.model, self._to_batch(mosaic.image), classes)
        values = {}
        for method, maps in found.items():
            values[method] = Case(mosaic=maps).measure(self.plan.of_mosaics)
            counter.step()
        labels = [name_class(index, self.classifier.label(index) or None) for index in mosaic.classes]
        return Judgement(composition.name, "mosaic", sha256, label=" + ".join(labels), values=values)

    def _to_batch(self, image: Tensor) -> Tensor:
        return image[None].to(self.classifier.device, find_input_dtype(self.classifier.model))


class Case:
    """One map, and all that its numbers are made of, by the names of `Metric.needs`; what is shared is computed once."""

    def __init__(self, **given: Any) -> None:
        self._given = given
        self._made: dict[Any, Any] = {}  # by function

    def measure(self, metrics: Iterable[Metric]) -> dict[str, float]:
        """The numbers by these metrics; those that need annotations are left out where there are none. Raises as the
        metrics do, and `GradcamError` for a number that is NaN or infinite."""
        found: dict[str, float] = {}
        for it in metrics:
            if not it.needs_annotations or "masks" in self._given:
                numbers = self._compute(it)
                number = float(numbers.float().flatten(1).mean(1)[0] if numbers.ndim > 1 else numbers[0])
                if not math.isfinite(number):
                    why = "check the model's output and the heatmap."
                    raise GradcamError(f"{it.name} is {number}: {why}")
                found[it.name] = number
        return found

    def curves(self, metrics: Iterable[Metric]) -> dict[str, list[float]]:
        """The probabilities along the curves that these metrics are areas under, as far as they were measured."""
        made = {it.name: self._made.get(it.key) for it in metrics}
        return {name: it.probabilities[0].tolist() for name, it in made.items() if isinstance(it, Curve)}

    def _compute(self, metric: Metric) -> Any:
        """What it gives for each image, (N,) or (N,...)."""
        if metric.key not in self._made:
            needs = [need for need in metric.needs if need != "seed"]
            given = [self._compute(METRICS[need]) if need in METRICS else self._given[need] for need in needs]
            options = {"seed": self._given["seed"]} if "seed" in metric.needs else {}
            images = self._given["subject"].images if "subject" in self._given else [None]
            compute = metric if metric.name in METRICS else partial(_call_own, metric, len(images))
            self._made[metric.key] = compute(*given, **options)
        made = self._made[metric.key]
        return getattr(made, metric.part) if metric.part else made


def _call_own(metric: Metric, images: int, *given: Any, **options: Any) -> Tensor:
    """The numbers (N,) by a user's metric, which has copies, and whatever it gives is looked at."""
    copies = [it.clone() if isinstance(it, Tensor) else it for it in given]
    try:
        made = metric.compute(*copies, **options)
    except GradcamError:
        raise
    except Exception as error:
        raise GradcamError(f"The metric {metric.name!r} failed: {describe_unexpected(error)}") from error
    with suppress(TypeError, ValueError, RuntimeError):
        numbers = to_tensor(made)
        if np.shape(made) == (images,) and numbers.is_floating_point():
            return numbers
    said, expected = describe(made, Tensor, np.ndarray), f"expected floats ({images},): one number per image."
    raise GradcamError(f"The metric {metric.name!r} returned {said}, {expected}")
