"""Prepare a study: find all errors that can be found before the first image is evaluated."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gradcam.batch.image_results import name_target_function
from gradcam.batch.read_items import read_item
from gradcam.errors import GradcamError, ModelError, TargetError
from gradcam.evaluation.annotations import read_annotations
from gradcam.evaluation.metrics import Metric
from gradcam.evaluation.metrics.mosaic import DEFAULT_MOSAICS, make_mosaics
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import DEFAULT_METHODS, StudyOptions, StudyPlan, make_plan
from gradcam.evaluation.study.results import NAME_SEPARATOR, Results, list_conditions
from gradcam.evaluation.study.run import Evaluator, NamedMosaic, Study
from gradcam.evaluation.subject import Subject, check_probabilities, derive_seed
from gradcam.images.read import to_numpy
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier
from gradcam.models.labels import name_class
from gradcam.models.preprocess import Prepared
from gradcam.models.task_models import TaskModel
from gradcam.options import SCORES, Progress, argument_error, check_count
from gradcam.sources.collect import Inputs, list_inputs
from gradcam.sources.contents import InputImage
from gradcam.targets.classes import check_class_range

MAX_MOSAIC_CANDIDATES = 512  # largest number of images for mosaics; all are in memory at once
MAX_TRIAL_IMAGES = 8  # largest number of images to try until an image has a target, such as a detection
HALVED_NOTE = "The model does not accept larger inputs, so each image in a mosaic has half its height and width."


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

    The numbers of an image do not depend on the other images or on their order, except "corloc", whose threshold is
    chosen on other images. If an image cannot be read or explained, the results contain its error, and the other images
    are evaluated. The same images, seed and versions give exactly the same numbers on the same machine.

    Parameters
    ----------
    classifier : Classifier
        The model.
    inputs : path, URL or image, or several
        Files, folders, globs, lists, archives and images, as in `gradcam.explain_files`.
    methods : sequence of str, Method or callable
        Keys of `gradcam.METHODS`, "single-pass" or "all"; methods such as ``METHODS["rise"].using(masks=500)``; or
        functions, as in `check`. Names may also be `FILE.py:NAME`, or entry points of installed packages. The default is
        six methods that need one forward pass each.
    metrics : sequence of str or Metric, default None
        Keys of `METRICS`, names of groups, "all", or functions decorated with `metric`. Names may also be
        `FILE.py:NAME`, or entry points of installed packages. None selects all groups that need only images, except the
        costly soundness group. If annotations are given, None selects the annotations group as well.
    controls : sequence of str, default None
        Control maps to compare with, keys of `CONTROLS`; None for all.
    layer : str, default None
        The target layer's dotted name. None uses `classifier.layer_for(method)` for each method.
    target : str or int, default None
        The class to explain in all images, by label or index. If None, the class of each image is taken from the input
        list, if the list has classes. Otherwise, the class is the most probable annotated class, or without annotations
        the top class. For models of other tasks, such as detectors: a target as in `explain`, or None for the
        highest-scoring detection of each image.
    score : str, default "logit"
        As in `targets.ClassTarget`. Methods with a fixed score ignore this parameter.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.
    annotations : str or path, default None
        Object annotations, as in `read_annotations`.
    limit : int, default None
        The largest number of images, sampled at random. A smaller limit selects a subset of the images that a larger
        limit selects.
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
    >>> [(row.image, row.method, round(row.value, 1)) for row in results.measurements if row.method == "constant"]
    [('coffee.jpg', 'constant', 1.0), ('rocket.jpg', 'constant', 1.0)]
    """
    plan = make_plan(methods, metrics, controls=controls, has_annotations=annotations is not None)
    annotations_path = None if annotations is None else Path(annotations)
    options = StudyOptions(layer, target, score, reshape, annotations_path, limit, seed)
    study = prepare_study(classifier, list_inputs(inputs).items, plan, options)
    run = study.conditions.to_run(len(study.items))
    with nullcontext() if journal is None else Journal.open(Path(journal), run) as open_journal:
        return study.conclude(list(study.run(open_journal, progress=progress)))


def prepare_study(classifier: Classifier, items: Sequence[InputImage], plan: StudyPlan, options: StudyOptions) -> Study:
    """Prepare a study. If metrics need mosaics, the model runs once per image. Raise the errors of `evaluate`."""
    if options.score not in SCORES:
        raise argument_error(options.score, "score", f"one of {', '.join(SCORES)}.")
    for name, value, minimum in (("limit", options.limit, 1), ("seed", options.seed, 0)):
        if value is not None:
            check_count(value, name, f"an integer, {minimum} or more.", least=minimum)
    check_probabilities(classifier.classes, classifier.activation)
    is_task = isinstance(classifier, TaskModel)
    task_target = options.target if is_task and not isinstance(options.target, (str, int)) else None
    index, annotations = _find_target(classifier, None if task_target is not None else options.target, items), None
    if options.annotations is not None:
        names = [item.name for item in items]
        annotations = read_annotations(options.annotations, names=names, find_class=classifier.find_class)
    items = choose_items(items, options.limit, options.seed)
    layer = _find_layers(classifier, plan, options.layer)
    evaluator = Evaluator(classifier, plan, layer, options.score, options.reshape, options.seed, task_target)
    evaluator, left_out = _leave_out_unusable(evaluator, items)
    evaluator, mosaics, notes = _add_mosaics(evaluator, items)
    target = "the highest-scoring detection" if is_task else "the most probable class"
    if index is not None:
        target = name_class(index, classifier.label(index), with_index=True)
    elif any(item.wanted is not None for item in items):
        target = "the class in the list, or the most probable one"
    elif task_target is not None:
        target = _describe_target(task_target)
    elif annotations is not None:
        target = "the most probable annotated class"
    layers_text = _describe_layers(layer, evaluator.plan)
    conditions = list_conditions(classifier, evaluator.plan, options, layer=layers_text, target=target)
    notes = [*(annotations.notes if annotations else ()), *left_out, *notes]
    return Study(evaluator, items, mosaics, conditions, index, annotations, notes)


def _describe_target(target: Any) -> str:
    """Describe a target by its type and its fields (arrays by their hash), or a target function by its name."""
    if not is_dataclass(target) or isinstance(target, type):
        return name_target_function(target)
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    arrays = {name: to_numpy(value) for name, value in values.items() if isinstance(value, (Tensor, np.ndarray))}
    values |= {name: f"sha256:{hashlib.sha256(value.tobytes()).hexdigest()}" for name, value in arrays.items()}
    simple = (str, int, float, Path, list, tuple)
    parts = [f"{name}={value!r}" for name, value in values.items() if isinstance(value, simple) and value != ()]
    return f"{type(target).__name__}({', '.join(parts)})"


def _find_target(classifier: Classifier, target: Any, items: Iterable[InputImage]) -> int | None:
    """Return the target's class index; None without a target. Raise `GradcamError` if the target is invalid."""
    class_names = dict.fromkeys(item.wanted for item in items if item.wanted is not None)
    if class_names and target is not None:
        raise GradcamError("The list already contains the classes to explain: leave the target (--class) out.")
    for name in class_names:
        classifier.find_class(name)
    if isinstance(target, str):
        return classifier.find_class(target)
    if target is not None:
        if isinstance(target, bool) or not isinstance(target, int):
            raise argument_error(target, "target", "one class for all images, by label or index.")
        if classifier.classes:  # `classes` is 0 if the number of classes is unknown.
            check_class_range([target], classifier.classes)
    return target


def choose_items(items: Sequence[InputImage], limit: int | None, seed: int) -> Sequence[InputImage]:
    """Sample at most `limit` images at random, and keep their order.

    The first images of an input are not suitable, because all of them could belong to one class.
    """
    if limit is None or limit >= len(items):
        return items
    names = {item.name for item in sorted(items, key=lambda item: derive_seed(seed, "limit", item.name))[:limit]}
    return [item for item in items if item.name in names]


def _find_layers(classifier: Classifier, plan: StudyPlan, requested: str | None) -> str | dict[str, str]:
    if requested is not None:
        return find_layer(classifier.model, requested).name
    methods = [method for method in map(plan.method, plan.methods) if method.place == "layer"]
    layers = {method.name: classifier.layer_for(method) for method in methods}
    return layers if len(set(layers.values())) > 1 else next(iter(layers.values()), classifier.layer)


def _describe_layers(layer: str | dict[str, str], plan: StudyPlan) -> str:
    """Describe the layers in one line: "layer4", or "layer4; head.0 for xgradcam, scorecam"."""
    if isinstance(layer, str):
        return layer
    used = [name for name in plan.methods if name in layer]
    methods = {layer[name]: [method for method in used if layer[method] == layer[name]] for name in used}
    first, *further = sorted(methods, key=lambda layer_name: -len(methods[layer_name])) or [""]
    return "; ".join([first, *(f"{layer_name} for {', '.join(methods[layer_name])}" for layer_name in further)])


def _leave_out_unusable(evaluator: Evaluator, items: Iterable[InputImage]) -> tuple[Evaluator, list[str]]:
    """Remove the methods that fail with this model on the first usable image, and return the reasons as notes.

    Methods that run the model many times are not tried. Raise `ModelError` if a requested method fails.
    """
    plan = evaluator.plan
    methods = map(plan.method, plan.methods)
    trial_methods = [method.name for method in methods if method.needs or method.place in ("attention", "text", "own")]
    images = (read_item(evaluator.classifier, item).picture for item in (items if trial_methods else ()))
    trials = (_try_subject(evaluator, image) for image in images if isinstance(image, Prepared))
    first = next((trial for trial in islice(trials, MAX_TRIAL_IMAGES) if trial is not None), None)
    if first is None or _find_reason(first, trial_methods) is None:
        return evaluator, []
    reasons = {name: reason for name in trial_methods if (reason := _find_reason(first, [name])) is not None}
    for name, reason in reasons.items():
        if name in plan.requested_methods:
            raise ModelError(f"{name} cannot be used with this model: {reason}")
    plan = replace(plan, methods=tuple(name for name in plan.methods if name not in reasons))
    return replace(evaluator, plan=plan), [f"{name} is left out: {reason}" for name, reason in reasons.items()]


def _try_subject(evaluator: Evaluator, prepared: Prepared) -> tuple[Evaluator, Subject] | None:
    """Return the evaluator and subject for an image; None if the image has no target, such as a detection."""
    with suppress(TargetError):
        adapted = evaluator.adapt(prepared)
        return adapted, adapted.make_subject(prepared, None)
    return None


def _find_reason(trial: tuple[Evaluator, Subject], methods: Sequence[str]) -> str | None:
    """Return the reason why one of the methods cannot explain an image; None if no method fails."""
    evaluator, subject = trial
    try:
        replace(evaluator, plan=replace(evaluator.plan, methods=tuple(methods), controls=())).explain(subject, "")
    except (GradcamError, RuntimeError) as error:  # For example, an operation has no second derivative.
        return " ".join(str(error).split())
    return None


def _add_mosaics(evaluator: Evaluator, items: Sequence[InputImage]) -> tuple[Evaluator, list[NamedMosaic], list[str]]:
    """Make the mosaics that metrics need.

    The images are sorted by name, so that their order does not matter. Images that cannot be read are skipped. If no
    mosaics can be made, the metrics of mosaics are removed, and the reason is returned as a note. If the user requested
    such a metric, or if no other metric is left, `GradcamError` is raised instead.
    """
    plan, classifier, seed = evaluator.plan, evaluator.classifier, evaluator.seed
    metric_names = [metric.name for metric in plan.mosaic_metrics]
    if not metric_names:
        return evaluator, [], []
    images: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    try:
        if isinstance(classifier, TaskModel):
            raise GradcamError("mosaics need a classifier.")
        for item in sorted(choose_items(items, MAX_MOSAIC_CANDIDATES, seed), key=lambda item: item.name):
            read = read_item(classifier, item, audit=True)
            if isinstance(read.picture, Prepared) and read.fetched.sha256 is not None:
                images[item.name], digests[item.name] = read.picture.image, read.fetched.sha256
        mosaics = make_mosaics(classifier, images, limit=min(DEFAULT_MOSAICS, max(1, len(images))), seed=seed)
    except GradcamError as error:
        remaining = tuple(metric.name for metric in plan.image_metrics)
        if plan.requested_metrics.intersection(metric_names) or not remaining:
            raise
        names = " and ".join(filter(None, [", ".join(metric_names[:-1]), metric_names[-1]]))
        note = f"{names} {'is' if len(metric_names) == 1 else 'are'} left out: {error}"
        return replace(evaluator, plan=replace(plan, metrics=remaining)), [], [note]
    named_mosaics = []
    for mosaic in mosaics:
        hashes = "\n".join(digests[name] for name in mosaic.names)
        named_mosaics.append((NAME_SEPARATOR.join(mosaic.names), mosaic, hashlib.sha256(hashes.encode()).hexdigest()))
    is_halved = mosaics[0].image.shape == images[mosaics[0].names[0]].shape
    return evaluator, named_mosaics, [HALVED_NOTE] if is_halved else []
