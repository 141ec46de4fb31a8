"""From what was typed to a job: the model is loaded, and all is checked before the first picture is touched."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from gradcam.attributions.table import ATTRIBUTIONS
from gradcam.batch.names import has_layer
from gradcam.cam.methods.table import METHODS
from gradcam.cli._settings import Destination, ModelChoice, Output, Settings, find_destination
from gradcam.cli._terminal import Result, import_torch, shown_passes
from gradcam.errors import (
    GradcamError,
    GradcamWarning,
    ModelError,
    describe_failure,
    describe_unexpected,
    join_names,
    nearest,
    printable,
)
from gradcam.images.files import WRITE_SUFFIXES, OutputNames
from gradcam.storage.records import Record

if TYPE_CHECKING:
    from gradcam.batch.findings import Finding, Question
    from gradcam.models.classifier import Classifier


LOOKED_AT = 1000  # files of a folder, when one is not there


class Outcome(Protocol):
    """What became of one picture, as a line of JSON and as lines for people; with an error there are none of these."""

    @property
    def error(self) -> str | None:
        """A line that names the picture; None where all went well."""

    def to_json(self) -> str: ...

    def format(self) -> str: ...


def tell_each(
    images: Sequence[Path],
    look: Callable[[Path], Outcome],
    fail: Callable[[str, str], Outcome],
    output: Output,
) -> int:
    """`look` at each picture, print what became of it, and give the exit status: 1 where one failed.

    `fail` makes the outcome of a picture and an error. Errors go to standard error, as does what a model of the user's
    prints.
    """
    status = 0
    for image in images:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                outcome = look(image)
        except (Exception, SystemExit) as error:  # one broken picture does not stop the others
            outcome, status = fail(str(image), describe_failure(str(image), error) + _offer(image)), 1
        _tell(outcome, output)
    return status


def _offer(image: Path) -> str:
    """What somebody may have meant who named a file that is not there."""
    offers: list[str] = []
    if not os.path.lexists(image):
        with contextlib.suppress(OSError):
            there = {os.path.splitext(name)[0]: name for name in os.listdir(image.parent)[:LOOKED_AT]}
            offers = [there[stem] for stem in nearest(image.stem, there, 1)]
    return f"; nearest: {join_names(str(image.with_name(name)) for name in offers)}" if offers else ""


def _tell(outcome: Outcome, output: Output) -> None:
    if outcome.error is not None:
        click.echo(outcome.error, err=True)
    if output.as_json:
        click.echo(outcome.to_json())
    elif not output.quiet and outcome.error is None:
        click.echo(outcome.format())


# Writes what was found, and gives the file of each kind of `choices.SAVED` for each drawing.
Write = Callable[["Job", Path, "Finding"], Sequence[Mapping[str, Path]]]


@dataclass(frozen=True)
class Job:
    """What is done with each picture."""

    settings: Settings
    classifier: Classifier
    question: Question
    destination: Destination
    names: OutputNames

    def explain(self, image: Path, write: Write, output: Output) -> Result:
        """Explain one picture and write what is to be drawn of it."""
        start = time.perf_counter()
        found = self._find(image, output)
        make_folder(self.destination.folder)
        written = write(self, image, found)
        size: tuple[int, int] = found.picture.shape[:2]
        label = self.classifier.label
        entries = [drawing.to_entry(label(drawing.index)) for drawing in found.drawings]
        files: list[dict[str, Any]] = [{kind: str(path) for kind, path in each.items()} for each in written]
        explained = [replace(entry, **each) for entry, each in zip(entries, files)]
        return Result(
            record=Record(
                str(image),
                self.classifier.name,
                predictions=found.predictions,
                explained=explained,
                note=found.note,
                size=size,
                region=found.region,
                fit=found.fit,
            ),
            grids=[drawing.grid for drawing in found.drawings],
            device=str(self.classifier.device),
            seconds=time.perf_counter() - start,
        )

    def _find(self, image: Path, output: Output) -> Finding:
        from gradcam.batch.findings import find

        many = [name for name in self.question.methods if not METHODS[name].needs]
        many += [name for name in self.question.attributions if ATTRIBUTIONS[name].has_progress]
        with shown_passes(output, wanted=bool(many) or self.classifier.fit != "crop") as progress:
            (found,) = find(self.classifier, self.question, [self.classifier.prepare(image)], progress=progress)
        if isinstance(found, GradcamError):
            raise found
        return found


def work(job: Job, images: Sequence[Path], write: Write, output: Output) -> int:
    """Explain the pictures one after another, print what became of each, and give the exit status."""
    name = job.classifier.name
    return tell_each(
        images,
        lambda image: job.explain(image, write, output),
        lambda image, error: Result(Record(image, name, error=error)),
        output,
    )


def make_folder(folder: Path) -> None:
    """Make the folder, if need be. Raises `GradcamError` where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcamError(f"{folder}: cannot be made a folder ({error.strerror}); choose another --output") from error


Value = TypeVar("Value")


def prepare(settings: Settings, images: Sequence[Path], output: Output, *, one_picture_each: bool) -> Job:
    """Load the model and check all that was typed before the first picture is touched.

    What was assumed of the model is said on standard error. Raises `GradcamError` and `click.UsageError`.
    """
    from gradcam.batch.names import MAP_SUFFIX

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
    from gradcam.cam.methods.table import check_evidence, find_methods, smooth
    from gradcam.images.draw import find_colormap
    from gradcam.layers.find import find_layer
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
    from gradcam.models.load import load_classifier
    from gradcam.models.providers import DEFAULT

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
