"""Many pictures from Python: a stream of results, for a sink of the caller's."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradcam.attributions.table import ATTRIBUTIONS
from gradcam.batch.findings import Finding, Question
from gradcam.batch.pipeline import check_count, explain_items
from gradcam.batch.pool import choose_batch_size, count_cores
from gradcam.batch.read import Fetched
from gradcam.cam.methods.table import check_evidence, find_methods, smooth
from gradcam.cam.postprocess import check_augmentation
from gradcam.errors import GradcamError, LayerError, ModelError, TargetError, shorten, show_fields
from gradcam.layers.find import find_layer
from gradcam.layers.reshape import to_reshape
from gradcam.models.classifier import Classifier
from gradcam.models.load import load_classifier
from gradcam.models.results import PictureAttribution, PictureExplanation
from gradcam.sources.list import Inputs, list_inputs
from gradcam.storage.records import Prediction
from gradcam.targets import ClassTarget, check_classes


@dataclass(frozen=True, eq=False)
class FileResult:
    """What became of one picture: it failed, and `error` says why, or there are explanations of it alone (N is 1).

    `name`: relative to the input's root, with "/" between folders; `inputs[3]` for a picture that is not given by its path.
    `path`: None for such a one, and for what lies in an archive or in a store. `explanations`: by (layer, method).
    `predictions`: the most probable classes. `note`: what a person should know of how the picture is shown.
    """

    name: str
    path: Path | None
    error: GradcamError | None = None
    explanations: Mapping[tuple[str, str], PictureExplanation] = field(default_factory=dict, repr=False)
    attributions: Sequence[PictureAttribution] = field(default=(), repr=False)
    predictions: Sequence[Prediction] = field(default=(), repr=False)
    note: str | None = None

    __repr__ = show_fields


def explain_files(
    inputs: Inputs,
    classifier: Classifier | None = None,
    *,
    layers: Sequence[str] | None = None,
    methods: Sequence[str] = ("gradcam",),
    target: Any = None,
    evidence: str = "positive",
    augmentation: str = "none",
    smoothing: str = "none",
    reshape: str | tuple[int, ...] | None = None,
    batch_size: int | str = "auto",
    workers: int | None = None,
) -> Generator[FileResult, None, None]:
    """Show where a model looked in each of many pictures: a result for each, in their order, as soon as it is there.

    `inputs`: files, folders, globs, lists and archives, one or several, by their paths or URLs (`s3://bucket/photos/`); and
    pictures in any other form that `gradcam.read_image` takes.
    `classifier`: None for the one that comes with the package. `layers`: dotted names, None for each method's own.
    `methods`: keys of `gradcam.METHODS` and of `gradcam.attributions.ATTRIBUTIONS`. `target`: of every picture that no
    list asks a class for: a class by index or label, or several of them, or a `ClassTarget` with one row of classes at
    most; None for each picture's top class. The rest as in `gradcam.explain`.
    `batch_size`: pictures to explain at once; halved on a device that they do not fit into. `workers`: threads that read,
    None for one on each core.

    A picture that cannot be explained has its result too, with the error in it, and stops nothing. Only a few batches are in
    memory at once. The model runs in the thread that asks for results; close the generator to stop.
    Raises `GradcamError`, before any picture is read, for whatever of this is unknown or does not fit; `StoreError` also
    later, where a store does not answer any more.
    """
    classifier = _to_classifier(classifier)
    question = Question(
        layers=_find_layers(classifier, layers),
        methods=methods,
        target=_to_target(classifier, target),
        evidence=evidence,
        augmentation=augmentation,
        smoothing=smoothing,
        reshape=to_reshape(reshape),  # type: ignore[arg-type]  # a function is what the classifier takes as well
    )
    question = _sort_methods(question)
    size = choose_batch_size(classifier) if batch_size == "auto" else batch_size
    threads = count_cores() if workers is None else workers
    return explain_items(
        classifier,
        question,
        list_inputs(inputs).items,
        finish=_to_result,
        batch_size=check_count("batch_size", size, "pictures to explain at once"),
        workers=check_count("workers", threads, "threads"),
    )


def _to_classifier(classifier: Any) -> Classifier:
    if classifier is not None and not isinstance(classifier, Classifier):
        raise ModelError(
            f"classifier is {shorten(classifier)}, expected what gradcam.load_classifier gives, which takes any model."
        )
    return load_classifier() if classifier is None else classifier


def _to_result(fetched: Fetched, found: Finding | GradcamError) -> FileResult:
    item = fetched.item
    if isinstance(found, GradcamError):
        return FileResult(item.name, item.content.path, found)
    return FileResult(
        name=item.name,
        path=item.content.path,
        explanations=found.maps,
        attributions=found.attributions,
        predictions=found.predictions,
        note=found.note,
    )


def _find_layers(classifier: Classifier, layers: Sequence[str] | None) -> list[str]:
    if layers is not None and (not isinstance(layers, (list, tuple)) or not layers):
        raise LayerError(f"layers is {shorten(layers)}, expected a list of at least one dotted name, or None.")
    return list(dict.fromkeys(find_layer(classifier.model, layer).name for layer in layers or ()))


def _sort_methods(asked: Question) -> Question:
    """The question with attributions apart from what makes maps, checked as far as it can be without a picture."""
    names = asked.methods
    attributions = [name for name in names if name in ATTRIBUTIONS] if isinstance(names, (list, tuple)) else []
    maps = [name for name in names if name not in ATTRIBUTIONS] if attributions else names
    methods = find_methods(maps) if maps or not attributions else []
    check_evidence(asked.evidence, smooth(methods, asked.smoothing))
    check_augmentation(asked.augmentation)
    return replace(asked, methods=[method.name for method in methods], attributions=list(dict.fromkeys(attributions)))


def _to_target(classifier: Classifier, target: Any) -> ClassTarget:
    """The target with one row of classes, which is every picture's. Raises `TargetError` for what the model has not."""
    if callable(target):
        raise TargetError(f"The target is {shorten(target)}, expected classes, a ClassTarget, or None.")
    chosen = target if isinstance(target, ClassTarget) else ClassTarget(target)
    if chosen.top > classifier.classes:
        raise TargetError(f"The top {chosen.top} classes are asked for: this model has {classifier.classes}.")
    if chosen.classes is None:
        return chosen
    given = chosen.classes.tolist() if hasattr(chosen.classes, "tolist") else chosen.classes
    row = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(row) == 1 and isinstance(row[0], (list, tuple)):
        row = list(row[0])
    indices = [classifier.find_class(each) if isinstance(each, str) else each for each in row]
    return replace(chosen, classes=check_classes([indices], 1, classifier.classes).tolist())
