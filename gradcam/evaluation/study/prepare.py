"""From what was asked to a study: all that can be found out before the first picture is judged is found out here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gradcam.batch.read import read_item
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, ModelError, shorten
from gradcam.evaluation.annotations import Annotations, read_annotations
from gradcam.evaluation.metrics.grid import MOSAICS, make_mosaics
from gradcam.evaluation.study.plan import Plan
from gradcam.evaluation.study.results import describe_conditions
from gradcam.evaluation.study.run import Composition, Judge, Study
from gradcam.evaluation.subject import derive
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier, Prepared
from gradcam.options import SCORES
from gradcam.sources.contents import Item
from gradcam.targets import check_range

CANDIDATES = 512  # pictures that are looked at for mosaics, since all of them are held at once
HALVED = "The network takes no larger input than its own: pictures in mosaics have half their height and width."


def choose_items(items: Sequence[Item], limit: int | None, seed: int) -> Sequence[Item]:
    """At most so many, in their order: drawn, as those of a folder may be sorted by what they show."""
    if limit is None or limit >= len(items):
        return items
    chosen = {item.name for item in sorted(items, key=lambda item: derive(seed, "limit", item.name))[:limit]}
    return [item for item in items if item.name in chosen]


def compose(judge: Judge, items: Sequence[Item]) -> tuple[list[Composition], list[str]]:
    """Mosaics of the pictures in the order of their names, and notes of how they were made.

    Pictures that cannot be read are passed over. Raises `GradcamError` where fewer than four classes are confident.
    """
    images: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for item in sorted(choose_items(items, CANDIDATES, judge.seed), key=lambda item: item.name):
        read = read_item(judge.classifier, item, audit=True)
        if isinstance(read.picture, Prepared) and read.fetched.sha256 is not None:
            images[item.name], digests[item.name] = read.picture.image, read.fetched.sha256
    mosaics = make_mosaics(judge.classifier, images, limit=min(MOSAICS, max(1, len(images))), seed=judge.seed)
    found = [Composition(mosaic, _join([digests[name] for name in mosaic.names])) for mosaic in mosaics]
    is_halved = mosaics[0].image.shape == images[mosaics[0].names[0]].shape
    return found, [HALVED] if is_halved else []


def _join(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


@dataclass(frozen=True)
class Wish:
    """What was asked beside methods and metrics, as `evaluate` takes it."""

    layer: str | None = None
    target: str | int | None = None
    score: str = "logit"
    reshape: Any = None
    annotations: Path | None = None
    limit: int | None = None
    seed: int = 0


def prepare_study(classifier: Classifier, items: Sequence[Item], plan: Plan, wish: Wish) -> Study:
    """A study of these pictures, ready to run; where mosaics are made, the model runs once on each of them.

    Raises as `evaluate` does.
    """
    _check_options(wish)
    index = _find_target(classifier, wish.target, items)
    annotations = _read_annotations(classifier, wish.annotations, items)
    items = choose_items(items, wish.limit, wish.seed)
    layer = _find_layers(classifier, plan, wish.layer)
    judge = Judge(classifier, plan, layer, wish.score, wish.reshape, seed=wish.seed)
    judge, left_out = _without_unfit(judge, items)
    judge, compositions, notes = _with_mosaics(judge, items)
    conditions = describe_conditions(
        classifier,
        judge.plan,
        layer=_describe_layers(layer, judge.plan),
        score=wish.score,
        target=_describe_target(classifier, index, items, annotations),
        reshape=wish.reshape,
        seed=wish.seed,
        annotations=wish.annotations,
    )
    notes = [*(() if annotations is None else annotations.notes), *left_out, *notes]
    return Study(judge, items, compositions, conditions, index, annotations, notes)


def _find_layers(classifier: Classifier, plan: Plan, wanted: str | None) -> str | dict[str, str]:
    """The layer of all methods, or each one's own where none is named."""
    if wanted is not None:
        return find_layer(classifier.model, wanted).name
    own = {name: classifier.layer_for(name) for name in plan.methods if METHODS[name].place == "layer"}
    return own if len(set(own.values())) > 1 else next(iter(own.values()), classifier.layer)


def _describe_layers(layer: str | dict[str, str], plan: Plan) -> str:
    """In one line: "layer4", or "layer4; head.0 for xgradcam, scorecam"."""
    if isinstance(layer, str):
        return layer
    methods: dict[str, list[str]] = {}
    for name in plan.methods:
        if name in layer:
            methods.setdefault(layer[name], []).append(name)
    first, *others = sorted(methods, key=lambda it: -len(methods[it])) or [""]
    return "; ".join([first, *(f"{it} for {', '.join(methods[it])}" for it in others)])


def _check_options(wish: Wish) -> None:
    if wish.score not in SCORES:
        raise GradcamError(f"score is {shorten(wish.score)}, expected one of {', '.join(SCORES)}.")
    for name, value, least in (("limit", wish.limit, 1), ("seed", wish.seed, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise GradcamError(f"{name} is {shorten(value)}, expected an integer, {least} or more.")


def _find_target(classifier: Classifier, target: str | int | None, items: Iterable[Item]) -> int | None:
    """The class of all pictures. Raises `GradcamError` for one that there is not, also of a list."""
    wanted = dict.fromkeys(item.wanted for item in items if item.wanted is not None)
    if wanted and target is not None:
        raise GradcamError("The list says which classes to explain, and so does the target: leave that out.")
    for name in wanted:
        classifier.find_class(name)
    if target is None or isinstance(target, str):
        return None if target is None else classifier.find_class(target)
    if isinstance(target, bool) or not isinstance(target, int):
        raise GradcamError(f"target is {shorten(target)}, expected one class for all pictures, by label or index.")
    check_range([target], classifier.classes)
    return target


def _read_annotations(classifier: Classifier, path: Path | None, items: Iterable[Item]) -> Annotations | None:
    if path is None:
        return None
    return read_annotations(path, names=[item.name for item in items], find_class=classifier.find_class)


def _describe_target(
    classifier: Classifier, index: int | None, items: Iterable[Item], annotations: Annotations | None
) -> str:
    if index is not None:
        return f"class {index}" if classifier.label(index) is None else f"{classifier.label(index)} ({index})"
    if any(item.wanted is not None for item in items):
        return "the class that the list asks for, or the most probable one"
    return "the most probable annotated class" if annotations is not None else "the most probable class"


def _read_first(classifier: Classifier, items: Iterable[Item]) -> Prepared | None:
    """The first picture that can be read."""
    read = (read_item(classifier, item).picture for item in items)
    return next((picture for picture in read if isinstance(picture, Prepared)), None)


def _without_unfit(judge: Judge, items: Iterable[Item]) -> tuple[Judge, list[str]]:
    """The judge without the methods that this model cannot have, as the first picture shows, and why.

    Those that run the model many times over are not tried. Raises `ModelError` where one was named that it cannot have.
    """
    tried = [name for name in judge.plan.methods if METHODS[name].needs or METHODS[name].place == "attention"]
    first = _read_first(judge.classifier, items) if tried else None
    if first is None or _find_reason(judge, tried, first) is None:
        return judge, []
    reasons = {name: reason for name in tried if (reason := _find_reason(judge, [name], first)) is not None}
    for name, reason in reasons.items():
        if name in judge.plan.asked_methods:
            raise ModelError(f"{name} cannot be had of this model: {reason}")
    kept = tuple(name for name in judge.plan.methods if name not in reasons)
    judge = replace(judge, plan=replace(judge.plan, methods=kept))
    return judge, [f"{name} is left out: {reason}" for name, reason in reasons.items()]


def _find_reason(judge: Judge, methods: Sequence[str], prepared: Prepared) -> str | None:
    """Why a picture cannot be explained by these; None where it can."""
    trial = replace(judge, plan=replace(judge.plan, methods=tuple(methods), controls=()))
    try:
        subject = trial.look(prepared, None)
        trial.explain(subject.images, subject.classes[:, None], "")
    except (GradcamError, RuntimeError) as error:  # of a model whose operations have no second derivative, say
        return " ".join(str(error).split())
    return None


def _with_mosaics(judge: Judge, items: Sequence[Item]) -> tuple[Judge, Sequence[Composition], list[str]]:
    """The mosaics that the plan's metrics need; where there can be none, the judge without these, and why.

    Raises `GradcamError` for that where they were named.
    """
    wanted = judge.plan.of_group("grid")
    if not wanted:
        return judge, (), []
    try:
        compositions, notes = compose(judge, items)
    except GradcamError as error:
        kept = tuple(name for name in judge.plan.metrics if name not in wanted)
        if judge.plan.asked_metrics.intersection(wanted) or not kept:
            raise
        return (
            replace(judge, plan=replace(judge.plan, metrics=kept)),
            (),
            [f"{' and '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} left out: {error}"],
        )
    return judge, compositions, notes
