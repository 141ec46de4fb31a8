"""From what was typed to a job: the model is loaded, and all is checked before the first picture is touched."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.cli._settings import ModelChoice, Output, OutputPlace, Settings, check_task, find_destination, to_target
from gradcam.cli._terminal import custom_code_context, format_report, import_torch, show_pass_progress
from gradcam.errors import (
    GradcamError,
    GradcamWarning,
    ImageError,
    OutputError,
    describe_failure,
    join_names,
    nearest,
    printable,
)
from gradcam.images.files import WRITE_SUFFIXES, OutputNames, join_name, write_whole
from gradcam.storage.records import Record, Report

if TYPE_CHECKING:
    from gradcam.batch.findings import PictureResult, Request
    from gradcam.batch.names import Saving
    from gradcam.images.edit import Edit
    from gradcam.images.read import Pixels
    from gradcam.models.classifier import Classifier
    from gradcam.models.preprocess import Prepared


Value = TypeVar("Value")

LOOKED_AT = 1000  # files of a folder, when one is not there

Choose = Callable[["Classifier"], Sequence[Method]]  # the methods for a model, where nobody named any


class Outcome(Protocol):
    """What became of one picture, as a line of JSON and as lines for people; with an error there are none of these."""

    @property
    def error(self) -> str | None:
        """A line that names the picture; None where all went well."""

    def to_json(self) -> str: ...

    def format(self) -> str: ...


def tell_each(
    images: Sequence[Path], look: Callable[[Path], Outcome], fail: Callable[[str, str], Outcome], output: Output
) -> int:
    """`look` at each picture, print what became of it, and give the exit status; `fail` makes an outcome of an error."""
    status = 0
    for attempt in map(Attempt, images):
        with attempt.going_on():
            outcome = look(attempt.image)
        if attempt.error is not None:
            outcome, status = fail(str(attempt.image), attempt.error), 1
        tell(outcome.error, outcome.to_json, outcome.format, output)
    return status


def tell(error: str | None, to_json: Callable[[], str], to_lines: Callable[[], str], output: Output) -> None:
    """Print what became of a picture: its error, and a line of JSON, or lines for people, as was asked for."""
    if error is not None:
        click.echo(error, err=True)
    if output.as_json:
        click.echo(to_json())
    elif not output.quiet and error is None:
        click.echo(to_lines())


@dataclass
class Attempt:
    """Work on one of several pictures. What goes wrong with it is its `error`, a line that names it, and stops no other."""

    image: Path
    found: PictureResult | None = None
    error: str | None = None
    start: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Around a part of the work; what a model of the user's prints goes to standard error meanwhile."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (Exception, SystemExit) as error:
            self.error = describe_failure(str(self.image), error) + _offer(self.image)


def _offer(image: Path) -> str:
    offers: list[str] = []
    if not os.path.lexists(image):
        with contextlib.suppress(OSError):
            there = {os.path.splitext(name)[0]: name for name in os.listdir(image.parent)[:LOOKED_AT]}
            offers = [there[stem] for stem in nearest(image.stem, there, 1)]
    return f"; nearest: {join_names(str(image.with_name(name)) for name in offers)}" if offers else ""


@dataclass(frozen=True)
class Job:
    """What is done with each picture: what is asked, what is written, and where. `ending`: of a picture's name. `panel`:
    what records call a panel."""

    classifier: Classifier
    request: Request
    saving: Saving
    destination: OutputPlace
    names: OutputNames
    ending: str
    panel: str = "panel"
    edits: Sequence[Edit] = ()

    def prepare(self, image: Path) -> Prepared:
        """The picture as the model takes it, without what is taken away from it."""
        from gradcam.models.preprocess import edit_reading

        prepared = self.classifier.prepare(image)
        return self.classifier.prepare(edit_reading(prepared.reading, self.edits)) if self.edits else prepared


def work(job: Job, images: Sequence[Path], output: Output) -> int:
    """Explain the pictures one after another, write and print what came of each, and give the exit status."""
    status = 0
    for attempt in explain_each(job, images, output):
        record, grids = Record(str(attempt.image), job.classifier.name), []
        if attempt.found is not None:
            with attempt.going_on():
                make_folder(job.destination.folder)
                written = write_result(job, attempt.image, attempt.found)
                record = attempt.found.to_record(record.image, record.model, written)
                record = replace(record, edits=[str(it) for it in job.edits] or None)
                grids = [result.grid for result in attempt.found.results]
        if attempt.error is not None:
            record, status = replace(record, error=attempt.error), 1
        seconds, device = time.perf_counter() - attempt.start, str(job.classifier.device)
        report = Report(record, seconds, grids=grids, device=device, task=job.classifier.task)
        tell(attempt.error, record.to_json, partial(format_report, report), output)
    return status


def explain_each(job: Job, images: Sequence[Path], output: Output) -> Iterator[Attempt]:
    """What is found in each picture, or why there is nothing."""
    from gradcam.batch.findings import find

    request = job.request
    is_shown = any(it.runs_again for it in request.methods) or any(it.has_progress for it in request.attributions)
    is_shown |= job.classifier.fit != "crop"
    for attempt in map(Attempt, images):
        with attempt.going_on(), show_pass_progress(output) if is_shown else contextlib.nullcontext() as progress:
            asked = replace(request, options=request.options | {"progress": progress})
            (found,) = find(job.classifier, asked, [job.prepare(attempt.image)])
            if isinstance(found, GradcamError):
                raise found
            attempt.found = found
        yield attempt


def write_result(job: Job, image: Path, found: PictureResult) -> list[dict[str, str]]:
    """Write each kind of file that is asked for, and give their paths for each result."""
    from gradcam.batch.names import name_files, panel_ending
    from gradcam.models.panels import panel

    saving, suffix = job.saving, job.ending
    look: dict[str, Any] = {"alpha": saving.alpha, "colormap": saving.colormap}
    # The last ones are on another picture, which has no part in a panel.
    results = [it for it in found.results if it.entry.on is None or saving.kinds != ("panel",)]
    named = name_files(image.stem, job.request, results, saving, suffix=suffix)
    names = [name for kinds in named for name in kinds.values()]
    if "panel" in saving.kinds:
        names.append(join_name(image.stem, panel_ending(job.request.options["evidence"], suffix=suffix)))
    paths = iter([job.destination.file] if job.destination.file is not None else job.names.claim(names))
    written = []
    for result, kinds in zip(results, named):
        overlay = result.draw(**look) if "overlay" in kinds else None
        made = result.draw_kinds(overlay, saving.kinds, saving.colormap)
        written.append({kind: _write(next(paths), content) for kind, content in made})
    if "panel" in saving.kinds:
        path = _write(next(paths), panel(found.maps, **look))
        written = [
            {**kinds, job.panel: path} if result.entry.on is None else kinds for kinds, result in zip(written, results)
        ]
    return written


def _write(path: Path, content: Pixels | bytes) -> str:
    from gradcam.images.write import write_image

    if not isinstance(content, bytes):
        write_image(path, content)
        return str(path)
    try:
        write_whole(path, content)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    return str(path)


def make_folder(folder: Path) -> None:
    """Make the folder, if need be. Raises `GradcamError` where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcamError(
            f"{folder}: the folder cannot be created ({error.strerror}); choose another --output"
        ) from error


def prepare(settings: Settings, images: Sequence[Path], output: Output, choose: Choose | None = None) -> Job:
    """Load the model and check all that was typed before the first picture is touched. `choose`: the methods, where
    nobody named any; None for the usual one."""
    from gradcam.batch.names import MAP_SUFFIX, Saving, check_panel

    require_images(images, output)
    saving = Saving(settings.saved, "png", alpha=settings.alpha, colormap=settings.colormap)
    classifier, request = ask(settings, output, choose)
    if "panel" in saving.kinds:
        check_panel(saving, request)
    results = request.count_results() * len({*saving.kinds} - {"panel"}) + ("panel" in saving.kinds)
    suffixes = frozenset([MAP_SUFFIX]) if saving.kinds == ("map",) else WRITE_SUFFIXES
    inputs = [*images, *settings.wanted.files]
    destination = find_destination(settings.output, inputs, len(images) * results, suffixes)
    ending, names = settings.model.ending, OutputNames(destination.folder, inputs)
    ending = f"-edited{ending}" if settings.edits else ending
    return Job(classifier, request, saving, destination, names, ending, edits=settings.edits)


def require_images(images: Sequence[Path], output: Output) -> None:
    """Exit with status 1 before PyTorch is loaded if none of the images exists; JSON has a record for each all the same."""
    if output.as_json or any(map(os.path.lexists, images)):
        return
    attempts = [Attempt(image) for image in images]
    for attempt in attempts:
        with attempt.going_on():
            raise ImageError("does not exist")
    click.echo("\n".join(str(attempt.error) for attempt in attempts), err=True)
    raise click.exceptions.Exit(1)


def ask(settings: Settings, output: Output, choose: Choose | None = None) -> tuple[Classifier, Request]:
    """The model, loaded, of which it is said what was assumed, and what is asked of it about each picture, checked."""
    request = None
    if settings.methods:  # Options that do not suit them are refused before the model is loaded.
        import_torch()
        request = _to_request(settings, settings.methods)
    classifier = load_model(settings.model, layer=settings.layers[0] if settings.layers else None)
    check_task(settings, classifier)
    from gradcam.layers.find import find_layer

    if request is None:
        usual = [classifier.default_method] if classifier.task == "classification" else []
        request = _to_request(settings, usual if choose is None else choose(classifier))
    layers = [classifier.layer for _ in settings.layers[:1]]  # found already
    layers = _once_each([*layers, *(find_layer(classifier.model, layer).name for layer in settings.layers[1:])])
    find_target = _to_classes if classifier.task == "classification" else to_target
    target = find_target(settings, classifier)
    say(classifier.notes, output)
    return classifier, replace(request, layers=layers, target=target)


def _to_request(settings: Settings, methods: Sequence[str | Method | AttributionMethod]) -> Request:
    """Return the request for these methods. Raises `GradcamError` for options that do not suit them."""
    from gradcam.batch.findings import Request

    attributions = [method for method in methods if isinstance(method, AttributionMethod)]
    others = [method for method in methods if not isinstance(method, AttributionMethod)]
    map_methods = find_methods(others) if others else []
    return Request.of(map_methods, None, settings.options, "ask", attributions=attributions)


def _to_classes(settings: Settings, classifier: Classifier) -> Any:
    from gradcam.targets.classes import ClassTarget

    classes, against = (
        _once_each(classifier.find_class(name) for name in names) for names in (settings.classes, settings.against)
    )
    if settings.top_k > classifier.classes:
        raise click.UsageError(f"--top-k is {settings.top_k}, but this model has {classifier.classes} classes.")
    if set(classes) & set(against):
        raise click.UsageError("--class and --against name the same class: give a different class to --against.")
    return settings.target or ClassTarget(
        [classes] if classes else None, top=settings.top_k, score=settings.score, against=against
    )


def load_model(choice: ModelChoice, *, layer: str | None = None) -> Classifier:
    """Load the chosen model. Its code may be imported from the current folder, and prints to standard error."""
    check_model_name(choice.model)
    options = {name: value for name, value in vars(choice).items() if choice.task is not None or name not in OF_TASKS}
    name = options.pop("model")
    if not str(name).startswith("hf:"):  # No other model takes text prompts, as `check_task` reports.
        options.pop("prompts", None)
    import_torch()
    from gradcam.models import load
    from gradcam.models.providers import DEFAULT

    load_kind = load.load_classifier if choice.task is None else load.load_model
    with custom_code_context(name, choice.reader):
        return load_kind(name or DEFAULT, layer=layer, **options)


OF_TASKS = ("task", "threshold", "prompts")  # what only models of several tasks are loaded with


def check_model_name(name: str | None) -> None:
    """Raises `click.UsageError` for a name that is empty, such as a variable of the shell that is not set."""
    if name is not None and not name.strip():
        raise click.UsageError("The model's name is empty: remove --model, or give a name (see `gradcam models`).")


def say(notes: Sequence[str], output: Output) -> None:
    """Notes on standard error, for people who want to know; whoever does not is not warned of maps either."""
    if output.quiet:
        warnings.simplefilter("ignore", GradcamWarning)
    for note in () if output.quiet else notes:
        click.echo(f"Note: {printable(note)}", err=True)


def _once_each(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))
