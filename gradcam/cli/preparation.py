"""From what was typed to a job: the model is loaded, and all is checked before the first picture is touched."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from gradcam.attributions import ATTRIBUTIONS
from gradcam.batch.output.result_names import has_layer
from gradcam.cli.job import Job
from gradcam.cli.settings import ModelChoice, Output, Settings, find_destination
from gradcam.cli.waiting import import_torch
from gradcam.errors import GradcamWarning, ModelError, describe_unexpected, printable
from gradcam.naming import WRITE_SUFFIXES, OutputNames

if TYPE_CHECKING:
    from gradcam.batch.findings import Question
    from gradcam.classifiers import Classifier

Value = TypeVar("Value")


def prepare(settings: Settings, images: Sequence[Path], output: Output, *, one_picture_each: bool) -> Job:
    """Load the model and check all that was typed before the first picture is touched.

    What was assumed of the model is said on standard error. Raises `GradcamError` and `click.UsageError`.
    """
    from gradcam.batch.output.saving import MAP_SUFFIX

    classifier, question = ask(settings, output)
    places = sum((len(question.layers) or 1) if has_layer(name) else 1 for name in _once_each(settings.methods))
    kinds = [kind for kind in settings.saved if kind != "panel"]
    each = 1 if one_picture_each else places * question.classes * len(kinds) + ("panel" in settings.saved)
    suffixes = frozenset([MAP_SUFFIX]) if settings.saved == ("map",) else WRITE_SUFFIXES
    destination = find_destination(settings.output, images, len(images) * each, suffixes)
    return Job(
        settings=settings,
        classifier=classifier,
        question=question,
        destination=destination,
        names=OutputNames(destination.folder, images),
    )


def ask(settings: Settings, output: Output) -> tuple[Classifier, Question]:
    """The model, loaded, and what is asked of it about each picture, checked.

    What was assumed of the model is said on standard error. Raises `GradcamError` and `click.UsageError`.
    """
    import_torch()
    from gradcam.batch.findings import Question
    from gradcam.drawing import find_colormap
    from gradcam.evidence import check_evidence
    from gradcam.layers import find_layer
    from gradcam.methods import find_methods, smooth
    from gradcam.targets import ClassTarget

    find_colormap(settings.colormap)
    attributions = [name for name in settings.methods if name in ATTRIBUTIONS]
    methods = [name for name in settings.methods if name not in ATTRIBUTIONS]
    if methods:
        check_evidence(settings.evidence, smooth(find_methods(methods), settings.smoothing))
    classifier = load_model(settings.model, layer=settings.layers[0] if settings.layers else None)
    layers = _once_each(find_layer(classifier.model, layer).name for layer in settings.layers)
    classes, against = (
        _once_each(classifier.find_class(name) for name in names) for names in (settings.classes, settings.against)
    )
    _check_classes(settings, classes, against, classifier.classes)
    say(classifier.notes, output)
    target = ClassTarget([classes] if classes else None, top=settings.top_k, score=settings.score, against=against)
    question = Question(
        layers=layers,
        methods=_once_each(methods),
        attributions=_once_each(attributions),
        target=target,
        evidence=settings.evidence,
        augmentation=settings.augmentation,
        smoothing=settings.smoothing,
        reshape=settings.reshape,
    )
    return classifier, question


def load_model(choice: ModelChoice, *, layer: str | None = None) -> Classifier:
    """The model of that choice; its code may be imported from the current folder, and prints to standard error.

    Raises `GradcamError`.
    """
    check_model_name(choice.model)
    import_torch()
    from gradcam.classifiers import DEFAULT, load_classifier

    with code_of_the_user(choice.model, choice.reader):
        return load_classifier(
            choice.model or DEFAULT,
            weights=choice.weights,
            labels=choice.labels,
            mean=choice.mean,
            std=choice.std,
            size=choice.size,
            crop=choice.crop,
            activation=choice.activation,
            reader=choice.reader,
            layer=layer,
            device=choice.device,
            precision=choice.precision,
            fit=choice.fit,
            predictions=choice.predictions,
        )


@contextlib.contextmanager
def code_of_the_user(*names: str | None) -> Iterator[None]:
    """While code runs that may be named so: it can be imported from the current folder, and prints to standard error."""
    if any(name is not None and ":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:  # it would end the program, and say nothing
        raise ModelError(f"The model's code ended the program, {describe_unexpected(error)}.") from error


def check_model_name(name: str | None) -> None:
    """Raises `click.UsageError` for a name that is empty, such as a variable of the shell that is not set."""
    if name is not None and not name.strip():
        raise click.UsageError(
            "The model's name is empty: give one of those that `gradcam models` lists, or leave it out."
        )


def say(notes: Sequence[str], output: Output) -> None:
    """Notes on standard error, for people who want to know; whoever does not is not warned of maps either."""
    if output.quiet:
        warnings.simplefilter("ignore", GradcamWarning)
    for note in () if output.quiet else notes:
        click.echo(f"Note: {printable(note)}", err=True)


def _check_classes(settings: Settings, classes: Sequence[int], against: Sequence[int], count: int) -> None:
    """Raises `click.UsageError` where there are fewer classes than are asked for, or one is against itself."""
    if settings.top_k > count:
        raise click.UsageError(f"--top-k is {settings.top_k}, and this model has {count} classes.")
    if set(classes) & set(against):
        raise click.UsageError("--against names a class that is explained: a class cannot be contrasted with itself.")


def _once_each(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))
