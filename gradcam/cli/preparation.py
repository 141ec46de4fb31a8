"""From what was typed to a job: the model is loaded, and all is checked before the first picture is touched."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from gradcam.attributions import ATTRIBUTIONS
from gradcam.cli import options
from gradcam.cli.job import Job
from gradcam.naming import OutputNames

Value = TypeVar("Value")


def prepare(settings: options.Settings, images: Sequence[Path], *, one_picture_each: bool) -> Job:
    """Load the model and check all that was typed before the first picture is touched.

    Raises `GradcamError` and `click.UsageError`.
    """
    from gradcam.classifiers import DEFAULT, load_classifier
    from gradcam.drawing import find_colormap
    from gradcam.evidence import check_evidence
    from gradcam.layers import find_layer
    from gradcam.methods import find_methods, smooth
    from gradcam.targets import ClassTarget

    for reader in ("PIL", "pydicom"):
        warnings.filterwarnings("ignore", module=reader)  # about metadata that nobody asked for
    find_colormap(settings.colormap)
    attributions = [name for name in settings.methods if name in ATTRIBUTIONS]
    methods = [name for name in settings.methods if name not in ATTRIBUTIONS]
    if methods:
        check_evidence(settings.evidence, smooth(find_methods(methods), settings.smoothing))
    classifier = load_classifier(
        settings.model or DEFAULT, weights=settings.weights, device=settings.device, precision=settings.precision
    )
    layers = _once_each(find_layer(classifier.model, layer)[0] for layer in settings.layers or (classifier.layer,))
    classes, against = (
        _once_each(classifier.find_class(name) for name in names) for names in (settings.classes, settings.against)
    )
    _check_classes(settings, classes, against, classifier.classes)
    places = sum(len(layers) if options.has_layer(name) else 1 for name in _once_each(settings.methods))
    each = 1 if one_picture_each else places * max(len(classes), settings.top_k)
    destination = options.find_destination(settings.output, images, len(images) * each)
    return Job(
        settings=settings,
        classifier=classifier,
        layers=layers,
        methods=_once_each(methods),
        attributions=_once_each(attributions),
        target=ClassTarget([classes] if classes else None, top=settings.top_k, score=settings.score, against=against),
        destination=destination,
        names=OutputNames(destination.folder, images),
    )


def _check_classes(settings: options.Settings, classes: Sequence[int], against: Sequence[int], count: int) -> None:
    """Raises `click.UsageError` where there are fewer classes than are asked for, or one is against itself."""
    if settings.top_k > count:
        raise click.UsageError(f"--top-k is {settings.top_k}, and this model has {count} classes.")
    if set(classes) & set(against):
        raise click.UsageError("--against names a class that is explained: a class cannot be contrasted with itself.")


def _once_each(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))
