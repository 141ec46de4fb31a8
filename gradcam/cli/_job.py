"""Load the model, check all options, explain the images one after another, and write the results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.cli._settings import ModelChoice, OutputMode, Settings, TargetChoice, check_task, to_target
from gradcam.cli._terminal import custom_code_context, format_report, import_torch, show_pass_progress
from gradcam.errors import (
    GradcamError,
    GradcamWarning,
    ImageError,
    OutputError,
    describe_failure,
    escape_controls,
    find_similar_names,
    join_names,
)
from gradcam.images.files import READ_SUFFIXES, WRITE_SUFFIXES, OutputNames, join_name, to_safe_name, write_atomically
from gradcam.storage.disk import describe_os_error
from gradcam.storage.records import SCHEMA, ImageOutcome, Record

if TYPE_CHECKING:
    from gradcam.batch.image_results import ExplainedImage, ExplainRequest
    from gradcam.batch.result_names import OutputOptions
    from gradcam.images.edit import Edit
    from gradcam.images.read import Pixels
    from gradcam.models.classifier import Classifier
    from gradcam.models.preprocess import Prepared


Value = TypeVar("Value")

MAX_SUGGESTED_FILES = 1000  # number of files to compare with a misspelt name

ChooseMethods = Callable[["Classifier"], Sequence[Method]]  # a function that returns the default methods for a model


# A result has two parts: the fields of the image's JSON record, and a function that returns the text to print.
ImageResult = tuple[dict[str, Any], Callable[[], str]]


def process_images(
    images: Sequence[Path],
    process: Callable[[Path], ImageResult],
    output: OutputMode,
    model: str,
    empty: dict[str, Any],
) -> int:
    """Process each image, print its result, and return the exit status. `empty` has the fields for failed images."""
    status = 0
    for attempt in map(Attempt, images):
        result: ImageResult = (empty, str)
        with attempt.catch_errors():
            result = process(attempt.image)
        fields, to_text = result
        status |= attempt.error is not None
        to_json = partial(to_record, str(attempt.image), model, attempt.error, fields)
        print_outcome(attempt.error, to_json, to_text, output)
    return status


def to_record(image: str, model: str, error: str | None, fields: dict[str, Any]) -> str:
    """Return a record as a line of JSON. NaN and infinite numbers become null."""
    start = {"schema": SCHEMA, "image": image, "status": "ok" if error is None else "failed", "error": error}
    return json.dumps(_replace_non_finite(start | {"model": model} | fields), allow_nan=False)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(field) for key, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_outcome(
    error: str | None, to_json: Callable[[], str], to_lines: Callable[[], str], output: OutputMode
) -> None:
    """Print the error, if any. Also print the JSON record or the text, depending on `output`."""
    if error is not None:
        click.echo(error, err=True)
    if output.as_json:
        click.echo(to_json())
    elif not output.quiet and error is None:
        click.echo(to_lines())


@dataclass
class Attempt:
    """An attempt to process an image. An exception is stored as `error`, so that other images are still processed."""

    image: Path
    error: str | None = None
    start: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def catch_errors(self) -> Iterator[None]:
        """Store an exception as `error`, and redirect the prints of custom models to standard error."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (Exception, SystemExit) as error:
            self.error = describe_failure(str(self.image), error) + _suggest_files(self.image)


def _suggest_files(image: Path) -> str:
    offers: list[str] = []
    if not os.path.lexists(image):
        with contextlib.suppress(OSError):
            names_by_stem = {os.path.splitext(name)[0]: name for name in os.listdir(image.parent)[:MAX_SUGGESTED_FILES]}
            offers = [names_by_stem[stem] for stem in find_similar_names(image.stem, names_by_stem, 1)]
    return f"; nearest: {join_names(str(image.with_name(name)) for name in offers)}" if offers else ""


@dataclass(frozen=True)
class OutputLocation:
    """The folder for results. If the user has chosen the name of a single result, `file` is its path."""

    folder: Path
    file: Path | None
    names: OutputNames

    def claim(self, image: Path, ending: str) -> Path:
        """Create the folder. Return the file that the user chose, or an unused path made of image stem and `ending`."""
        make_folder(self.folder)
        return self.file or self.names.claim([join_name(image.stem, ending)])[0]


@dataclass(frozen=True)
class ExplainJob:
    """The plan for each image: the explanations to compute, and the files to write.

    Each output name ends in `suffix`. A record stores the path of a panel under the key given by `panel`. `figure` is
    the file for a figure of all images. If `writes_files` is False, only the figure is written.
    """

    classifier: Classifier
    request: ExplainRequest
    saving: OutputOptions
    destination: OutputLocation
    suffix: str
    panel: str = "panel"
    edits: Sequence[Edit] = ()
    figure: Path | None = None
    writes_files: bool = True

    def prepare(self, image: Path) -> Prepared:
        """Read the image, apply the edits, and preprocess it."""
        from gradcam.models.preprocess import edit_reading

        prepared = self.classifier.prepare(image)
        return self.classifier.prepare(edit_reading(prepared.reading, self.edits)) if self.edits else prepared


def explain_images(job: ExplainJob, images: Sequence[Path], output: OutputMode) -> int:
    """Explain the images one after another, write and print the results, and return the exit status.

    If the job draws a figure, the results are printed after the figure has been written.
    """
    status, results = 0, (_explain_image(job, image, output) for image in images)
    outcomes = (outcome for outcome, _ in results) if job.figure is None else _draw_figure(job, [*results])
    for outcome in outcomes:
        error = outcome.record.error
        status |= error is not None
        print_outcome(error, outcome.record.to_json, partial(format_report, outcome), output)
    return status


def _explain_image(job: ExplainJob, path: Path, output: OutputMode) -> tuple[ImageOutcome, ExplainedImage | None]:
    """Explain one image, and write its files. If this fails, the record has an error, and there is no result."""
    from gradcam.batch.image_results import explain_batch

    classifier, request, attempt = job.classifier, job.request, Attempt(path)
    has_progress = any(method.runs_again for method in request.methods) or classifier.fit != "crop"
    has_progress |= any(method.has_progress for method in request.attributions)
    record, grids, image_result = Record(str(path), classifier.name), [], None
    with attempt.catch_errors():
        with show_pass_progress(output) if has_progress else contextlib.nullcontext() as progress:
            image_request = replace(request, options=request.options | {"progress": progress})
            (result,) = explain_batch(classifier, image_request, [job.prepare(path)])
        if isinstance(result, GradcamError):
            raise result
        record = result.to_record(record.image, record.model, write_result(job, path, result))
        record = replace(record, edits=[str(edit) for edit in job.edits] or None)
        grids, image_result = [layer_result.grid for layer_result in result.results], result
    if attempt.error is not None:
        record, image_result = replace(record, error=attempt.error), None
    seconds, device = time.perf_counter() - attempt.start, str(classifier.device)
    return ImageOutcome(record, seconds, grids=grids, device=device, task=classifier.task), image_result


def _draw_figure(job: ExplainJob, pairs: Sequence[tuple[ImageOutcome, ExplainedImage | None]]) -> list[ImageOutcome]:
    """Draw the figure of all images without an error, and return all outcomes with the figure in their records."""
    from gradcam.models.figures import figure

    drawn = [(Path(outcome.record.image).name, result) for outcome, result in pairs if result is not None]
    fields: dict[str, Any] = {"names": [name for name, _ in drawn] if len(pairs) > 1 else None}
    fields |= job.saving.look
    changes: dict[str, Any] = {"figure": str(job.figure)}
    try:
        if drawn:
            figure([[*result.maps.values(), *result.attributions] for _, result in drawn], job.figure, **fields)
    except Exception as error:
        changes = {"error": describe_failure(str(job.figure), error), "predictions": (), "explained": ()}
    return [
        outcome if result is None else replace(outcome, record=replace(outcome.record, **changes))
        for outcome, result in pairs
    ]


def write_result(job: ExplainJob, image: Path, image_result: ExplainedImage) -> list[dict[str, Any]]:
    """Write the results of an image. Return a dict for each result: the paths of the files, and the boxes."""
    from gradcam.batch.result_names import list_endings, name_kinds, panel_suffix
    from gradcam.models.panels import panel

    if not job.writes_files:
        return [{} for _ in image_result.results]
    make_folder(job.destination.folder)
    saving, suffix = job.saving, job.suffix
    # The panel does not contain the heatmaps on the second image of --like. If only a panel is written, leave them out.
    results = [result for result in image_result.results if result.entry.on is None or saving.kinds != ("panel",)]
    endings = list_endings(job.request, results, stem=image.stem, suffix=suffix)
    names_by_kind, appearance = [name_kinds(name, saving) for name in endings], saving.appearance
    names = [name for kinds in names_by_kind for name in kinds.values()]
    if "panel" in saving.kinds:
        names.append(join_name(image.stem, panel_suffix(job.request.options["evidence"], suffix=suffix)))
    paths = iter([job.destination.file] if job.destination.file is not None else job.destination.names.claim(names))
    paths_by_kind = []
    for result in results:
        drawings = result.draw_kinds(saving.kinds, **appearance)
        boxes = drawings.pop("boxes", None)
        paths_by_kind.append({"boxes": boxes} | {kind: write_file(next(paths), drawings[kind]) for kind in drawings})
    if "panel" in saving.kinds:
        path = write_file(next(paths), panel(image_result.maps, **saving.look))
        for result, kind_paths in zip(results, paths_by_kind):
            if result.entry.on is None:
                kind_paths[job.panel] = path
    return paths_by_kind


def write_file(path: Path, content: Pixels | bytes) -> str:
    """Write an image or bytes to a file, and return the path. If writing fails, no incomplete file remains."""
    from gradcam.images.write import write_image

    try:
        if isinstance(content, bytes):
            write_atomically(path, content)
        else:
            write_image(path, content)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({describe_os_error(error)})") from error
    return str(path)


def make_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raise `GradcamError` if the folder cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcamError(
            f"{folder}: the folder cannot be created ({error.strerror}); choose another --output"
        ) from error


def find_destination(
    output: str, images: Sequence[Path], results: int, suffixes: frozenset[str] = WRITE_SUFFIXES
) -> OutputLocation:
    """Return the folder or file for the results.

    If `output` is a file, it must have one of the `suffixes`, hold a single result, and differ from the input images.
    Otherwise, raise `click.UsageError`.
    """
    path = Path(output)
    is_folder = output.endswith(("/", os.sep)) or os.path.isdir(path)
    if path.suffix.lower() not in READ_SUFFIXES | suffixes or is_folder:
        return OutputLocation(path, None, OutputNames(path, images))
    if path.suffix.lower() not in suffixes:
        noun = "maps" if ".npy" in suffixes else "images" if suffixes is WRITE_SUFFIXES else "masks"
        raise click.UsageError(f"{path}: {noun} can only be written as {', '.join(sorted(suffixes))}.")
    if results > 1:
        raise click.UsageError(f"{path} is one file, but there are several results: give a folder to --output.")
    if any(is_same_file(path, image) for image in images):
        raise click.UsageError(f"{path} is the input image, which is never overwritten: choose another name.")
    return OutputLocation(path.parent, path, OutputNames(path.parent, images))


def find_suffix(choice: ModelChoice) -> str:
    """Return the end of output names: the model, weights and fit if they differ from the defaults, then `.png`."""
    from gradcam.models.providers import DEFAULT_MODEL

    parts = [] if choice.model in (None, DEFAULT_MODEL) else [str(choice.model).rpartition("/")[2]]
    parts += [] if choice.weights is None else [choice.weights.stem]
    parts += [] if choice.fit == "crop" else [choice.fit.replace(":", "-")]
    return "".join(f"-{to_safe_name(name)}" for name in parts) + ".png"


def list_input_files(images: Sequence[Path], target_choice: TargetChoice) -> list[Path]:
    """List the files that must not be overwritten: the images, and the files of --like, --mask and --with."""
    paths = (target_choice.like, target_choice.mask, *target_choice.with_images)
    return [*images, *(path for path in paths if isinstance(path, Path))]


def is_same_file(first: Path, second: Path) -> bool:
    """Return whether two paths lead to the same file."""
    with contextlib.suppress(OSError):  # If a file is missing or unreadable, compare the resolved paths.
        return os.path.samefile(first, second)
    return os.path.realpath(first) == os.path.realpath(second)


def prepare_job(
    settings: Settings, images: Sequence[Path], output: OutputMode, choose_methods: ChooseMethods | None = None
) -> ExplainJob:
    """Load the model and check all options before the first image is read.

    If no method is given, `choose_methods` chooses the methods. Without `choose_methods`, the model's default
    method is used.
    """
    from gradcam.batch.result_names import KIND_SUFFIXES, OutputOptions, check_kinds
    from gradcam.models.figures import MAX_PANELS, check_plots

    require_images(images, output)
    inputs = list_input_files(images, settings.target_choice)
    figure = settings.figure
    if figure is not None:
        check_plots()
        if any(is_same_file(figure, file) for file in inputs):
            raise click.UsageError(f"{figure} is an input file, which is never overwritten: choose another name.")
    saving = OutputOptions(settings.saved, "png", **settings.appearance)
    classifier, request = prepare_request(settings, output, choose_methods)
    if not {"panel", "mask", "boxes"}.isdisjoint(saving.kinds):
        check_kinds(saving, request)
    kinds = {*saving.kinds} - {"panel", "boxes"}
    results = request.count_results() * len(kinds) + ("panel" in saving.kinds)
    fixed = frozenset(suffix for kind, suffix in KIND_SUFFIXES.items() if kind in kinds)
    suffixes = fixed if len(kinds) == len(fixed) == 1 else WRITE_SUFFIXES
    if figure is not None and (count := len(images) * (1 + request.count_results())) > MAX_PANELS:
        advice = "give fewer images, classes or methods, or make a gallery with gradcam batch --report"
        raise click.UsageError(f"--figure would draw {count} panels, but the limit is {MAX_PANELS}: {advice}.")
    destination = find_destination(settings.output, inputs, len(images) * results, suffixes)
    suffix = f"{'-edited' if settings.edits else ''}{find_suffix(settings.model)}"
    given = [click.get_current_context().get_parameter_source(name) for name in ("saved", "output")]
    writes_files = figure is None or ParameterSource.COMMANDLINE in given
    fields: Any = {"edits": settings.edits, "figure": figure, "writes_files": writes_files}
    return ExplainJob(classifier, request, saving, destination, suffix, **fields)


def require_images(images: Sequence[Path], output: OutputMode) -> None:
    """If none of the images exists, exit with status 1 before PyTorch is loaded.

    With `--json`, do not exit, because every image must have a record.
    """
    if output.as_json or any(map(os.path.lexists, images)):
        return
    attempts = [Attempt(image) for image in images]
    for attempt in attempts:
        with attempt.catch_errors():
            raise ImageError("does not exist")
    click.echo("\n".join(str(attempt.error) for attempt in attempts), err=True)
    raise click.exceptions.Exit(1)


def prepare_request(
    settings: Settings, output: OutputMode, choose_methods: ChooseMethods | None = None
) -> tuple[Classifier, ExplainRequest]:
    """Load the model, check the options, and print the model's notes. Return the model and the request."""
    request = None
    if settings.methods:  # Refuse unsuitable options before the model is loaded.
        import_torch()
        request = _to_request(settings, settings.methods)
    classifier = load_model(settings.model, layer=settings.layers[0] if settings.layers else None)
    check_task(settings, classifier)
    from gradcam.layers.find import find_layer

    if request is None:
        default_methods = [classifier.default_method] if classifier.task == "classification" else []
        request = _to_request(settings, default_methods if choose_methods is None else choose_methods(classifier))
    layers = [classifier.layer for _ in settings.layers[:1]]  # the full name of the first layer
    layers = _unique([*layers, *(find_layer(classifier.model, layer).name for layer in settings.layers[1:])])
    find_target = _to_classes if classifier.task == "classification" else to_target
    target = find_target(settings, classifier)
    print_notes(classifier.notes, output)
    further = settings.target_choice.with_images
    if further and not getattr(getattr(classifier, "family", None), "takes_pieces", False):
        raise click.UsageError(f"{classifier.name} takes one image at a time: remove --with.")
    if len(set(further)) < len(further):
        raise click.UsageError("--with has the same image twice: remove one.")
    others = {str(path): classifier.prepare(path) for path in further}
    return classifier, replace(request, layers=layers, target=target, others=others)


def _to_request(settings: Settings, methods: Sequence[str | Method | AttributionMethod]) -> ExplainRequest:
    """Return the request for these methods. Raise `GradcamError` if a method does not support an option."""
    from gradcam.batch.image_results import ExplainRequest

    attributions = [method for method in methods if isinstance(method, AttributionMethod)]
    cam_methods = [method for method in methods if not isinstance(method, AttributionMethod)]
    map_methods = find_methods(cam_methods) if cam_methods else []
    return ExplainRequest.of(map_methods, None, settings.options, "ask", attributions=attributions)


def _to_classes(settings: Settings, classifier: Classifier) -> Any:
    from gradcam.targets.classes import ClassTarget

    classes = _unique(map(classifier.find_class, settings.classes))
    against = _unique(map(classifier.find_class, settings.against))
    if settings.top_k > classifier.classes:
        raise click.UsageError(f"--top-k is {settings.top_k}, but this model has {classifier.classes} classes.")
    if set(classes) & set(against):
        raise click.UsageError("--class and --against name the same class: give a different class to --against.")
    options: Any = {"top": settings.top_k, "score": settings.score, "against": against}
    return settings.target or ClassTarget([classes] if classes else None, **options)


def load_model(choice: ModelChoice, *, layer: str | None = None) -> Classifier:
    """Load the chosen model. Custom code can import from the current folder, and its prints go to standard error."""
    check_model_name(choice.model)
    unused = TASK_FIELDS if choice.task is None else ()
    options = {name: value for name, value in vars(choice).items() if name not in unused}
    name = options.pop("model")
    if not str(name).startswith("hf:"):  # Other models take no prompts. `check_task` reports the error.
        options.pop("prompts", None)
    import_torch()
    from gradcam.models import load
    from gradcam.models.providers import DEFAULT_MODEL

    load_kind = load.load_classifier if choice.task is None else load.load_model
    with custom_code_context(name, choice.reader):
        return load_kind(name or DEFAULT_MODEL, layer=layer, **options)


TASK_FIELDS = ("task", "threshold", "prompts")  # arguments of `load_model` that `load_classifier` does not have


def check_model_name(name: str | None) -> None:
    """Raise `click.UsageError` for an empty name, for instance from a shell variable that is not set."""
    if name is not None and not name.strip():
        raise click.UsageError("The model's name is empty: remove --model, or give a name (see `gradcam models`).")


def print_notes(notes: Sequence[str], output: OutputMode) -> None:
    """Print notes on standard error. With `--quiet`, print nothing, and hide later warnings of the package as well."""
    if output.quiet:
        warnings.simplefilter("ignore", GradcamWarning)
    for note in () if output.quiet else notes:
        click.echo(f"Note: {escape_controls(note)}", err=True)


def _unique(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))
