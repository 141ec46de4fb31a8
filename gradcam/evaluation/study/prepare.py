"""From what was asked to a study: all that can be found out before the first picture is judged is found out here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gradcam.batch.findings import name_target
from gradcam.batch.read import read_item
from gradcam.errors import GradcamError, ModelError, TargetError
from gradcam.evaluation.annotations import read_annotations
from gradcam.evaluation.metrics import Metric
from gradcam.evaluation.metrics.grid import MOSAICS, make_mosaics
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import DEFAULT_METHODS, Agenda, StudyOptions, make_plan
from gradcam.evaluation.study.results import Results, list_conditions
from gradcam.evaluation.study.run import Composition, Evaluator, Study
from gradcam.evaluation.subject import Subject, check_probabilities, derive
from gradcam.images.read import to_numpy
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier
from gradcam.models.kinds import TaskModel
from gradcam.models.labels import name_class
from gradcam.models.preprocess import Prepared
from gradcam.options import SCORES, Progress, check_count, refuse
from gradcam.sources.contents import Item
from gradcam.sources.list import Inputs, list_inputs
from gradcam.targets.classes import check_range

CANDIDATES = 512  # pictures that are looked at for mosaics, since all of them are held at once
MOST_TRIED = 8  # pictures of which one has what is judged
HALVED = "The model does not accept larger inputs, so each image in a mosaic has half its height and width."


def evaluate(
    classifier: Classifier,
    inputs: Inputs,
    *,
    methods: Sequence[Any] = DEFAULT_METHODS,
    metrics: Sequence[str | Metric] | None = None,
    controls: Sequence[str] | None = None,
    layer: str | None = None,
    target: Any = None,
    score: str = "logit",
    reshape: Any = None,
    annotations: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Results:
    """Evaluate the heatmaps of several methods on many images, under the same conditions.

    The numbers of an image do not depend on the other images or on their order. If an image cannot be read or explained,
    the results contain its error, and the other images are evaluated. The same images, seed and versions give exactly the
    same numbers on the same machine.

    Parameters
    ----------
    classifier : Classifier
        The model.
    inputs : path, URL or image, or several
        Files, folders, globs, lists, archives and images, as in `gradcam.explain_files`.
    methods : sequence of str, Method or callable
        Keys of `gradcam.METHODS`, "single-pass" or "all"; methods such as ``METHODS["rise"].using(masks=500)``; or
        functions, as in `check`. Names may also be `FILE.py:NAME`, or come from installed packages. The default is six
        methods that need one forward pass each.
    metrics : sequence of str or Metric, default None
        Keys of `METRICS`, names of groups, "all", or functions decorated with `metric`. Names may also be
        `FILE.py:NAME`, or come from installed packages. If None, all groups that need only images are used, except the
        costly soundness group. If annotations are given, the annotations group is used as well.
    controls : sequence of str, default None
        Control maps to compare with, keys of `CONTROLS`; None for all.
    layer : str, default None
        The target layer's dotted name. None uses `classifier.layer_for(method)` for each method.
    target : str or int, default None
        The class to explain in all images, by label or index. If None, each image's class comes from the input list, if
        that list has classes. Otherwise, it is the most probable annotated class, or the top class if there are no
        annotations. For models of other tasks, such as detectors: a target as in `explain`, or None for the
        highest-scoring detection of each image.
    score : str, default "logit"
        As in `targets.ClassTarget`. Methods with their own score keep it.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.
    annotations : str or path, default None
        Object annotations, as in `read_annotations`.
    limit : int, default None
        The largest number of images, sampled at random. A smaller limit gives a subset of the images that a larger limit
        gives.
    seed : int, default 0
        Random seed.
    progress : callable, default None
        Called with the number of evaluated heatmaps and the total.
    journal : str or path, default None
        A file that stores the results, so that a stopped study can be resumed.

    Returns
    -------
    Results
        The results: `measurements` has a `Measurement` for each number.

    Raises
    ------
    GradcamError
        If a name is unknown, or if a requested metric or method cannot be used. Grid metrics need confident images of
        four classes, localisation metrics need annotations, and some methods need attention.
    InputError
        If there is no image.
    OutputError
        If the journal belongs to a different study.

    Examples
    --------
    >>> import gradcam
    >>> options = {"methods": ["gradcam"], "metrics": ["complexity"], "controls": ["constant"]}
    >>> results = gradcam.evaluation.evaluate(gradcam.load_classifier(), "photos/", **options)
    >>> [(each.image, each.method, round(each.value, 1)) for each in results.measurements if each.method == "constant"]
    [('coffee.jpg', 'constant', 1.0), ('rocket.jpg', 'constant', 1.0)]
    """
    plan = make_plan(methods, metrics, controls=controls, has_annotations=annotations is not None)
    where = None if annotations is None else Path(annotations)
    options = StudyOptions(layer, target, score, reshape, where, limit, seed)
    study = prepare_study(classifier, list_inputs(inputs).items, plan, options)
    if journal is None:
        return study.conclude(list(study.run(progress=progress)))
    with Journal.open(Path(journal), study.conditions.to_run(len(study.items))) as kept:
        return study.conclude(list(study.run(kept, progress=progress)))


def prepare_study(classifier: Classifier, items: Sequence[Item], plan: Agenda, options: StudyOptions) -> Study:
    """A study of these pictures, ready to run; where mosaics are made, the model runs once on each. Raises as `evaluate`."""
    if options.score not in SCORES:
        raise refuse(options.score, "score", f"one of {', '.join(SCORES)}.")
    for name, value, least in (("limit", options.limit, 1), ("seed", options.seed, 0)):
        if value is not None:
            check_count(value, name, f"an integer, {least} or more.", least=least)
    check_probabilities(classifier.classes, classifier.activation)
    is_task = isinstance(classifier, TaskModel)
    wanted = options.target if is_task and not isinstance(options.target, (str, int)) else None
    index, annotations = _find_target(classifier, None if wanted is not None else options.target, items), None
    if options.annotations is not None:
        names = [item.name for item in items]
        annotations = read_annotations(options.annotations, names=names, find_class=classifier.find_class)
    items = choose_items(items, options.limit, options.seed)
    layer = _find_layers(classifier, plan, options.layer)
    evaluator = Evaluator(classifier, plan, layer, options.score, options.reshape, seed=options.seed, wanted=wanted)
    evaluator, left_out = _without_unfit(evaluator, items)
    evaluator, compositions, notes = _with_mosaics(evaluator, items)
    place = _describe_layers(layer, evaluator.plan)
    best = "the highest-scoring detection" if is_task else "the most probable class"
    target = best if annotations is None else "the most probable annotated class"
    if wanted is not None:
        target = _describe_target(wanted)
    if index is not None:
        target = name_class(index, classifier.label(index), with_index=True)
    elif any(item.wanted is not None for item in items):
        target = "the class in the list, or the most probable one"
    conditions = list_conditions(classifier, evaluator.plan, options, layer=place, target=target)
    notes = [*(() if annotations is None else annotations.notes), *left_out, *notes]
    return Study(evaluator, items, compositions, conditions, index, annotations, notes)


def _describe_target(target: Any) -> str:
    """A target as its kind and what was said of it, arrays by their hash; a function by its name."""
    if not is_dataclass(target) or isinstance(target, type):
        return name_target(target)
    said = {it.name: getattr(target, it.name) for it in fields(target)}
    arrays = {name: to_numpy(it) for name, it in said.items() if isinstance(it, (Tensor, np.ndarray))}
    said |= {name: f"sha256:{hashlib.sha256(it.tobytes()).hexdigest()}" for name, it in arrays.items()}
    plain = {name: it for name, it in said.items() if isinstance(it, (str, int, float, Path, list, tuple)) and it != ()}
    return f"{type(target).__name__}({', '.join(f'{name}={it!r}' for name, it in plain.items())})"


def _find_target(classifier: Classifier, target: Any, items: Iterable[Item]) -> int | None:
    """The class of all pictures. Raises `GradcamError` for one that there is not, also of a list."""
    wanted = dict.fromkeys(item.wanted for item in items if item.wanted is not None)
    if wanted and target is not None:
        raise GradcamError("The list already contains the classes to explain: leave the target (--class) out.")
    for name in wanted:
        classifier.find_class(name)
    if isinstance(target, str):
        return classifier.find_class(target)
    if target is not None:
        if isinstance(target, bool) or not isinstance(target, int):
            raise refuse(target, "target", "one class for all images, by label or index.")
        if classifier.classes:  # else nobody knows how many
            check_range([target], classifier.classes)
    return target


def choose_items(items: Sequence[Item], limit: int | None, seed: int) -> Sequence[Item]:
    """At most so many, in their order: drawn, as those of a folder may be sorted by what they show."""
    if limit is None or limit >= len(items):
        return items
    chosen = {item.name for item in sorted(items, key=lambda item: derive(seed, "limit", item.name))[:limit]}
    return [item for item in items if item.name in chosen]


def _find_layers(classifier: Classifier, plan: Agenda, wanted: str | None) -> str | dict[str, str]:
    if wanted is not None:
        return find_layer(classifier.model, wanted).name
    methods = [it for it in map(plan.explained, plan.methods) if it.place == "layer"]
    own = {it.name: classifier.layer_for(it) for it in methods}
    return own if len(set(own.values())) > 1 else next(iter(own.values()), classifier.layer)


def _describe_layers(layer: str | dict[str, str], plan: Agenda) -> str:
    """In one line: "layer4", or "layer4; head.0 for xgradcam, scorecam"."""
    if isinstance(layer, str):
        return layer
    used = [name for name in plan.methods if name in layer]
    methods = {layer[name]: [it for it in used if layer[it] == layer[name]] for name in used}
    first, *others = sorted(methods, key=lambda it: -len(methods[it])) or [""]
    return "; ".join([first, *(f"{it} for {', '.join(methods[it])}" for it in others)])


def _without_unfit(evaluator: Evaluator, items: Iterable[Item]) -> tuple[Evaluator, list[str]]:
    """The evaluator without the methods that this model cannot have, as the first picture shows, and why. Those that
    run the model many times over are not tried. Raises `ModelError` where one was named."""
    plan = evaluator.plan
    tried = [it.name for it in map(plan.explained, plan.methods) if it.needs or it.place in ("attention", "own")]
    read = (read_item(evaluator.classifier, item).picture for item in (items if tried else ()))
    found = (_try_to_look(evaluator, picture) for picture in read if isinstance(picture, Prepared))
    first = next((each for each in islice(found, MOST_TRIED) if each is not None), None)
    if first is None or _find_reason(first, tried) is None:
        return evaluator, []
    reasons = {name: reason for name in tried if (reason := _find_reason(first, [name])) is not None}
    for name, reason in reasons.items():
        if name in plan.asked_methods:
            raise ModelError(f"{name} cannot be used with this model: {reason}")
    plan = replace(plan, methods=tuple(name for name in plan.methods if name not in reasons))
    return replace(evaluator, plan=plan), [f"{name} is left out: {reason}" for name, reason in reasons.items()]


def _try_to_look(evaluator: Evaluator, prepared: Prepared) -> tuple[Evaluator, Subject] | None:
    """What is judged of a picture; None where there is no such thing in it, of which each picture tells by itself."""
    with suppress(TargetError):
        own = evaluator.fit(prepared)
        return own, own.look(prepared, None)
    return None


def _find_reason(trial: tuple[Evaluator, Subject], methods: Sequence[str]) -> str | None:
    """Why a picture cannot be explained by these; None where it can."""
    evaluator, subject = trial
    try:
        replace(evaluator, plan=replace(evaluator.plan, methods=tuple(methods), controls=())).explain(subject, "")
    except (GradcamError, RuntimeError) as error:  # of a model whose operations have no second derivative, say
        return " ".join(str(error).split())
    return None


def _with_mosaics(evaluator: Evaluator, items: Sequence[Item]) -> tuple[Evaluator, Sequence[Composition], list[str]]:
    """The mosaics, by the pictures' names in order, that the metrics need; if none can be, the evaluator without, and
    why. Pictures that cannot be read are passed over. Raises `GradcamError` where such metrics were named."""
    plan, classifier, seed = evaluator.plan, evaluator.classifier, evaluator.seed
    wanted = [it.name for it in plan.of_mosaics]
    if not wanted:
        return evaluator, (), []
    images: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    try:
        if isinstance(classifier, TaskModel):
            raise GradcamError("mosaics need a classifier.")
        for item in sorted(choose_items(items, CANDIDATES, seed), key=lambda item: item.name):
            read = read_item(classifier, item, audit=True)
            if isinstance(read.picture, Prepared) and read.fetched.sha256 is not None:
                images[item.name], digests[item.name] = read.picture.image, read.fetched.sha256
        mosaics = make_mosaics(classifier, images, limit=min(MOSAICS, max(1, len(images))), seed=seed)
    except GradcamError as error:
        kept = tuple(it.name for it in plan.of_pictures)
        if plan.asked_metrics.intersection(wanted) or not kept:
            raise
        names = " and ".join(filter(None, [", ".join(wanted[:-1]), wanted[-1]]))
        note = f"{names} {'is' if len(wanted) == 1 else 'are'} left out: {error}"
        return replace(evaluator, plan=replace(plan, metrics=kept)), (), [note]
    hashes = [hashlib.sha256("\n".join(digests[name] for name in it.names).encode()).hexdigest() for it in mosaics]
    found = [Composition(" + ".join(it.names), it, sha256) for it, sha256 in zip(mosaics, hashes)]
    is_halved = mosaics[0].image.shape == images[mosaics[0].names[0]].shape
    return evaluator, found, [HALVED] if is_halved else []
