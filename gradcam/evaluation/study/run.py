"""A study of methods over pictures: each picture on its own, then mosaics of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcam.batch.read import read_item
from gradcam.errors import GradcamError, describe_failure
from gradcam.evaluation.explainers import Explain, Explainer
from gradcam.evaluation.metrics import METRICS
from gradcam.evaluation.metrics.grid import grid_pointing_game
from gradcam.evaluation.metrics.localisation import Localisation, energy_pointing_game, localisation, pointing_game
from gradcam.evaluation.metrics.perturbation import (
    ConfidenceChange,
    Curve,
    adcc,
    coherency,
    complexity,
    confidence_change,
    deletion,
    insertion,
    road,
    sufficiency,
)
from gradcam.evaluation.metrics.soundness import class_difference, max_sensitivity, randomisation
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import Plan
from gradcam.evaluation.study.results import Conditions, Entry, Results
from gradcam.evaluation.subject import Subject, derive
from gradcam.models.classifier import Classifier, Prepared
from gradcam.models.device import find_input_dtype
from gradcam.sources.contents import Item

if TYPE_CHECKING:
    from gradcam.evaluation.annotations import Annotations, Truth
    from gradcam.evaluation.metrics.grid import Mosaic


CURVES = ("insertion", "deletion")  # metrics that are areas under one


@dataclass(frozen=True, eq=False)
class Case:
    """One map of one picture, and all that its numbers are made of; what several of them share is computed once.

    `subject`: of one image, which all methods share. `heatmaps`: (1,H,W). `explain`: the method itself. `truth`: where the
    object is, None where nobody says so. `seed`: of whatever is drawn.
    """

    subject: Subject
    heatmaps: Tensor
    explain: Explain
    truth: Truth | None = None
    seed: int = field(default=0, kw_only=True)

    @cached_property
    def insertion(self) -> Curve:
        return insertion(self.subject, self.heatmaps, seed=self.seed)

    @cached_property
    def deletion(self) -> Curve:
        return deletion(self.subject, self.heatmaps, seed=self.seed)

    @cached_property
    def change(self) -> ConfidenceChange:
        return confidence_change(self.subject, self.heatmaps)

    @cached_property
    def coherency(self) -> Tensor:
        return coherency(self.subject, self.heatmaps, self.explain)

    @cached_property
    def complexity(self) -> Tensor:
        return complexity(self.heatmaps)

    @cached_property
    def localisation(self) -> Localisation:
        return localisation(self.heatmaps, _require(self).boxes)


def _require(case: Case) -> Truth:
    if case.truth is None:
        raise GradcamError("This picture has no annotations, of which the metric is made.")
    return case.truth


MEASURES: Mapping[str, Callable[[Case], Tensor]] = {
    "average-drop": lambda case: case.change.drop,
    "increase": lambda case: case.change.increase,
    "average-gain": lambda case: case.change.gain,
    "insertion": lambda case: case.insertion.areas,
    "deletion": lambda case: case.deletion.areas,
    "road": lambda case: road(case.subject, case.heatmaps, seed=case.seed).combined,
    "sufficiency": lambda case: sufficiency(case.subject, case.heatmaps, seed=case.seed),
    "pointing-game": lambda case: pointing_game(case.heatmaps, _require(case).masks),
    "energy-pointing": lambda case: energy_pointing_game(case.heatmaps, _require(case).masks),
    "iou": lambda case: case.localisation.iou,
    "localisation-error": lambda case: case.localisation.errors,
    # The mean over the stages: from the topmost layer alone to all of them.
    "randomisation": lambda case: randomisation(
        case.subject, case.explain, case.heatmaps, seed=case.seed
    ).correlations.mean(1),
    "max-sensitivity": lambda case: max_sensitivity(case.subject, case.explain, case.heatmaps, seed=case.seed),
    "class-difference": lambda case: class_difference(case.subject, case.explain, heatmaps=case.heatmaps),
    "adcc": lambda case: adcc(case.change.drop, case.coherency, case.complexity),
    "coherency": lambda case: case.coherency,
    "complexity": lambda case: case.complexity,
}


def measure(case: Case, metrics: Sequence[str]) -> dict[str, float]:
    """The numbers of one map by these metrics; those that need annotations are left out where there are none.

    Raises as the metrics do, and `GradcamError` for a number that is NaN or infinite.
    """
    wanted = [name for name in metrics if case.truth is not None or METRICS[name].group != "annotations"]
    return {name: _to_number(name, MEASURES[name](case)) for name in wanted}


def list_curves(case: Case, metrics: Sequence[str]) -> dict[str, list[float]]:
    """The probabilities along the curves of these metrics, of those that have one."""
    curves = {"insertion": lambda: case.insertion, "deletion": lambda: case.deletion}
    return {name: curves[name]().probabilities[0].tolist() for name in CURVES if name in metrics}


def measure_mosaic(heatmaps: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """The numbers of a mosaic's maps (1,4,H,W), one for each of its classes: means over the four.

    Raises as `grid_pointing_game` does.
    """
    found = grid_pointing_game(heatmaps)
    numbers = {"grid-mass": found.mass, "grid-maximum": found.hits}
    return {name: _to_number(name, numbers[name].float().mean(1)) for name in metrics if name in numbers}


def _to_number(name: str, value: Tensor) -> float:
    """Of one image. Raises `GradcamError` where it is no number that a mean could be made of."""
    number = float(value.reshape(-1)[0])
    if not math.isfinite(number):
        raise GradcamError(f"{name} is {number} here: the model's output, or the map, has no number of it.")
    return number


Step = Callable[[], None]  # told after each map


@dataclass(frozen=True, eq=False)
class Judge:
    """What is the same for all pictures: the model, the plan, the layer, the score and the seed.

    Chance is drawn from the seed and the picture's own bytes, so that neither its name nor its neighbours change its
    numbers, and all methods meet the same.
    """

    classifier: Classifier
    plan: Plan
    layer: str | Mapping[str, str]
    score: str = "logit"
    reshape: Any = None
    seed: int = field(default=0, kw_only=True)

    def explain(self, images: Tensor, classes: Tensor, sha256: str) -> dict[str, Tensor]:
        """Heatmaps (1,K,H,W) of one image for classes (1,K), by method."""
        return self._explainer(sha256).explain(self.classifier.model, images, classes)

    def look(self, prepared: Prepared, index: int | None) -> Subject:
        """One picture and its class, by default the most probable one; it runs the model once."""
        return Subject(
            self.classifier.model,
            self._to_batch(prepared.image),
            None if index is None else [index],
            activation=self.classifier.activation,
        )

    def judge(
        self, name: str, sha256: str, subject: Subject, truth: Truth | None, step: Step
    ) -> tuple[Entry, Mapping[str, Tensor]]:
        """The numbers of one picture's maps by all methods, and the heatmaps (1,H,W) themselves."""
        index = int(subject.classes)
        explainer = self._explainer(sha256)
        found = explainer.explain(self.classifier.model, subject.images, subject.classes[:, None])
        heatmaps = {method: maps[:, 0] for method, maps in found.items()}
        values, curves = {}, {}
        for method, maps in heatmaps.items():
            case = Case(subject, maps, explainer.only(method), truth, seed=derive(self.seed, sha256))
            values[method] = measure(case, self.plan.of_pictures)
            curves[method] = list_curves(case, self.plan.of_pictures)
            step()
        entry = Entry(
            image=name,
            sha256=sha256,
            index=index,
            label=self.classifier.label(index),
            probability=float(subject.probabilities),
            values=values,
            curves=curves,
        )
        return entry, heatmaps

    def judge_mosaic(self, mosaic: Mosaic, sha256: str, step: Step) -> Entry:
        """The numbers of one mosaic's maps by all methods, each a mean over its four classes."""
        classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=self.classifier.device)
        values = {}
        for method, maps in self.explain(self._to_batch(mosaic.image), classes, sha256).items():
            values[method] = measure_mosaic(maps, self.plan.metrics)
            step()
        labels = [self.classifier.label(index) or f"class {index}" for index in mosaic.classes]
        return Entry(name_mosaic(mosaic), "mosaic", sha256, label=" + ".join(labels), values=values)

    def _explainer(self, sha256: str) -> Explainer:
        return Explainer(
            names=self.plan.names,
            layer=self.layer,
            score=self.score,
            activation=self.classifier.activation,
            reshape=self.reshape,
            seed=derive(self.seed, sha256),
        )

    def _to_batch(self, image: Tensor) -> Tensor:
        return image[None].to(self.classifier.device, find_input_dtype(self.classifier.model))


def name_mosaic(mosaic: Mosaic) -> str:
    """Its four pictures' names."""
    return " + ".join(mosaic.names)


EXAMPLES = 5  # pictures whose heatmaps are kept, to be shown
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Composition:
    """A mosaic, and the SHA-256 of its pictures' own."""

    mosaic: Mosaic
    sha256: str


@dataclass(frozen=True, eq=False)
class Study:
    """All that is settled before the first picture is judged.

    `index`: the class that is explained in all pictures; None for what a list asks for, the most probable one of those
    that annotations name, or the most probable of all. `notes`: what was left out, and why.
    `kept`: heatmaps (1,H,W) of the first pictures, by name and method, as far as they were computed here.
    """

    judge: Judge
    items: Sequence[Item]
    compositions: Sequence[Composition]
    conditions: Conditions
    index: int | None = None
    annotations: Annotations | None = None
    notes: Sequence[str] = ()
    kept: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def classifier(self) -> Classifier:
        """The model, with its preprocessing."""
        return self.judge.classifier

    @property
    def maps(self) -> int:
        """How many maps are judged of each picture and mosaic."""
        return len(self.judge.plan.names)

    @property
    def total(self) -> int:
        """How many maps are judged in all."""
        return self.maps * (len(self.items) + len(self.compositions))

    def run(self, journal: Journal | None = None, *, progress: Progress | None = None) -> Iterator[Entry]:
        """What is measured of each picture, in their order, then of each mosaic; a picture that fails has an error.

        What the journal has is not computed again; the rest is added to it before it is given. `progress` is told how
        many maps are judged, and of how many.
        """
        counter = _Counter(self.total, progress)
        for number, item in enumerate(self.items, 1):
            entry = self._judge_item(item, journal, counter.step)
            counter.reach(number * self.maps)
            yield entry
        for number, composition in enumerate(self.compositions, len(self.items) + 1):
            entry = self._judge_mosaic(composition, journal, counter.step)
            counter.reach(number * self.maps)
            yield entry

    def conclude(self, entries: Sequence[Entry]) -> Results:
        """The results of all entries."""
        return Results(self.judge.plan, self.conditions, tuple(entries), tuple(self.notes))

    def choose_class(self, prepared: Prepared, name: str, wanted: int | None) -> Subject:
        """One picture and the class that is explained in it."""
        index = self.index if wanted is None else wanted
        subject = self.judge.look(prepared, index)
        annotated = () if index is not None or self.annotations is None else self.annotations.classes(name)
        if not annotated:
            return subject
        probabilities = subject.all_probabilities[0]
        return self.judge.look(prepared, max(sorted(annotated), key=lambda it: float(probabilities[it])))

    def _judge_item(self, item: Item, journal: Journal | None, step: Step) -> Entry:
        read = read_item(self.classifier, item, audit=True)
        sha256 = read.fetched.sha256
        earlier = None if journal is None else journal.find(item.name, sha256)
        if earlier is not None:
            return earlier
        if isinstance(read.picture, GradcamError):
            return _add(journal, Entry(item.name, sha256=sha256, error=str(read.picture)))
        try:
            entry = self._judge_picture(item, read.picture, sha256 or "", read.wanted, step)
        except (Exception, SystemExit) as error:  # one picture does not stop the others
            entry = Entry(item.name, sha256=sha256, error=describe_failure(item.name, error))
        return _add(journal, entry)

    def _judge_picture(self, item: Item, prepared: Prepared, sha256: str, wanted: int | None, step: Step) -> Entry:
        subject = self.choose_class(prepared, item.name, wanted)
        truth = self._find_truth(item.name, prepared, subject)
        entry, heatmaps = self.judge.judge(item.name, sha256, subject, truth, step)
        if item in self.items[:EXAMPLES]:
            self.kept[item.name] = {name: maps.cpu() for name, maps in heatmaps.items()}
        return entry

    def _find_truth(self, name: str, prepared: Prepared, subject: Subject) -> Truth | None:
        if self.annotations is None:
            return None
        height, width = prepared.reading.picture.shape[:2]
        region = self.classifier.region(height, width)
        return self.annotations.truth(name, region, subject.size[1:], int(subject.classes), picture=(height, width))

    def _judge_mosaic(self, composition: Composition, journal: Journal | None, step: Step) -> Entry:
        name = name_mosaic(composition.mosaic)
        earlier = None if journal is None else journal.find(name, composition.sha256)
        if earlier is not None:
            return earlier
        try:
            entry = self.judge.judge_mosaic(composition.mosaic, composition.sha256, step)
        except (Exception, SystemExit) as error:
            entry = Entry(name, "mosaic", composition.sha256, error=describe_failure(name, error))
        return _add(journal, entry)


@dataclass
class _Counter:
    """How many maps are judged, and somebody who wants to know."""

    total: int
    progress: Progress | None
    done: int = 0

    def step(self) -> None:
        """One more."""
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        """So many."""
        if self.progress is not None and done != self.done:
            self.progress(done, self.total)
        self.done = done


def _add(journal: Journal | None, entry: Entry) -> Entry:
    if journal is not None:
        journal.append(entry)
    return entry
