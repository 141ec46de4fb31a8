"""`gradcam batch`: explain a folder of any size, and go on where it was stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.batch.formats import FORMATS, Destination, Format, Results, find_format
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import ask, load_model, say
from gradcam.cli._settings import ModelChoice, Output, Settings, to_settings
from gradcam.cli._terminal import Display, Terminated, how_to_go_on, telling_waits
from gradcam.errors import ClusterError, GradcamError, OutputError, StoreError
from gradcam.options import FORMATS as PICTURE_FORMATS
from gradcam.plugins import installed, is_own

if TYPE_CHECKING:
    from gradcam.batch.engine import Engine, Work
    from gradcam.batch.names import Saving
    from gradcam.batch.save import Saver
    from gradcam.models.classifier import Classifier
    from gradcam.sources.list import Listing
    from gradcam.sources.shards import FailureLimit, Shard
    from gradcam.storage.clear import Mode
    from gradcam.storage.store import Store


class Means:
    """What a batch is done with; to be closed. Once it is started, `engine` does the work.

    `device`: what models compute on, where that is not where this process's own is, which with Ray only answers questions.
    """

    def __init__(self, typed: Typed) -> None:
        self._typed = typed
        self._stack = contextlib.ExitStack()
        self.device: str | None = None
        self.engine: Engine

    def start(self) -> None:
        """Have the engine ready. Raises `ClusterError` and `click.UsageError`."""
        choice = self._typed.choice
        if choice.engine == "local":
            from gradcam.batch.engine import explain_here

            self.engine = explain_here
            return
        from gradcam.batch.ray.engine import RayEngine
        from gradcam.batch.ray.session import find_layout, joined

        model, layers = self._typed.settings.model, self._typed.settings.layers
        if model.device not in DEVICES:
            raise click.UsageError(
                f"--device is {model.device}, and Ray gives each actor its own: choose one of {', '.join(DEVICES)}."
            )
        if choice.actors_per_gpu > 1 and model.device == "cpu":
            raise click.UsageError("--actors-per-gpu is for GPUs, and --device is cpu: leave one of them out.")
        ray = self._stack.enter_context(joined(choice.address))
        self._stack.enter_context(self._last_words(ray))
        layout = find_layout(ray, model.device, choice.actors_per_gpu)
        self.device = layout.device
        load = partial(load_on, model, layers[0] if layers else None)
        self.engine = RayEngine(ray, layout, load, choice.workers)

    def _last_words(self, ray: Any) -> contextlib.AbstractContextManager[None]:
        from gradcam.batch.ray.ending import last_words
        from gradcam.batch.ray.session import find_address

        text = f"Ray has ended, and this with it: its head is gone, or was told to end. {how_to_go_on()}"
        is_own = find_address(self._typed.choice.address) == "local"
        head = ray.get_runtime_context().gcs_address
        return last_words(head, text, is_own=is_own)

    def to_settings(self) -> Settings:
        """What was typed; with Ray, this process's own model is on the CPU."""
        settings = self._typed.settings
        return settings if self.device is None else replace(settings, model=replace(settings.model, device="cpu"))

    def close(self) -> None:
        """Let go of it."""
        self._stack.close()


DEVICES = ("auto", "cpu", "cuda")  # that Ray has


def load_on(choice: ModelChoice, layer: str | None, device: str) -> Classifier:
    """The model of that choice, on that device. Raises `GradcamError`."""
    return load_model(replace(choice, device=device), layer=layer)


def describe_settings(settings: Settings, work: Work, saving: Saving) -> dict[str, Any]:
    """The choices, by the names of the options, with what was found where nothing was said; all of it is JSON."""
    classifier, request, target = work.classifier, work.request, work.request.target
    chosen, reshape = settings.model, request.options["reshape"]
    # Options that the shell does not have are as they always were, and stay out: an earlier version's run is gone on with.
    options = {name: it for name, it in request.options.items() if name in settings.options and name != "reshape"}
    return {
        "model": classifier.name,
        "device": work.device or classifier.device.type,
        "precision": chosen.precision,
        "preprocessing": _describe_preprocess(classifier.preprocess),
        "activation": classifier.activation,
        "reader": chosen.reader,
        "layers": request.list_layers(classifier),
        "reshape": list(reshape) if isinstance(reshape, tuple) else reshape,
        "methods": [method.name for method in request.all_methods],
        **_describe_target(target),
        **options,
        **_describe_fit(classifier),
        "batch_size": work.batch_size,
        "audit": work.audit,
        **{("save" if name == "kinds" else name): value for name, value in asdict(saving).items() if name != "views"},
    }


def _describe_target(target: Any) -> dict[str, Any]:
    from gradcam.batch.findings import name_target

    if name_target(target):
        return {"target": name_target(target)}
    return {
        "classes": None if target.classes is None else [int(index) for index in target.classes[0]],
        "top_k": target.top,
        "score": target.score,
        "against": [int(index) for index in target.against or ()],
    }


def _describe_fit(classifier: Classifier) -> dict[str, str]:
    """Nothing where it is as it always was: an earlier version's run is gone on with."""
    return {} if classifier.fit == "crop" else {"fit": classifier.fit, "predictions": classifier.predictions}


def _describe_preprocess(preprocess: Any) -> Any:
    """Its values, or, of code that is not ours, its name: a repr may have an address in it."""
    is_ours = is_dataclass(preprocess) and not isinstance(preprocess, type)
    return asdict(preprocess) if is_ours else type(preprocess).__qualname__


@dataclass(frozen=True)
class BatchChoice:
    """What was chosen beside the questions that `gradcam run` has too, as typed."""

    folder: Path | Store
    saved: tuple[str, ...]
    format: str
    quality: int
    output_format: Format
    batch_size: int | None
    workers: int | None
    resume: bool
    overwrite: bool
    report: bool
    limit: FailureLimit | None
    shard: Shard | None
    audit: bool
    engine: str
    address: str | None
    actors_per_gpu: int

    @property
    def mode(self) -> Mode:
        """What is done about an earlier run."""
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"

    @property
    def destination(self) -> Destination:
        """Where results go."""
        return Destination(self.folder, self.mode, self.shard, self.report)


@dataclass(frozen=True)
class Typed:
    """All that was typed: of which pictures, what is asked, how they are worked on, and how it is told."""

    inputs: Sequence[str]
    settings: Settings
    choice: BatchChoice
    output: Output


def explain_all(typed: Typed) -> int:
    """Explain the pictures, say what became of them, and give the exit status.

    Raises `GradcamError` and `click.UsageError`, both before the first picture.
    """
    with telling_waits(typed.output), contextlib.closing(Means(typed)) as means:
        return _explain_all(typed, means)


def _explain_all(typed: Typed, means: Means) -> int:
    from gradcam.batch.names import check_outputs, check_panel, plan_stems
    from gradcam.sources.list import list_inputs

    choice = typed.choice
    # Before torch is imported, and a model loaded.
    choice.output_format.check_place(choice.destination)
    listing = list_inputs(typed.inputs, exclude=choice.folder)
    work = _find_work(typed, listing, means)
    if choice.resume:
        from gradcam.batch.formats.records import check_classes

        check_classes(choice.folder, work.items, work.classifier)
    saving, stems = _to_saving(typed), plan_stems(listing.items)
    if not choice.output_format.has_files:  # no name can be another's, or an input's
        check_panel(saving, work.request)
    else:
        check_outputs(
            choice.folder, listing.items, stems, saving=saving, request=work.request, labels=work.classifier.labels
        )
    with contextlib.closing(_open_results(typed, listing, work, saving, stems)) as results:
        say(results.notes, typed.output)
        saver = _to_saver(results, stems, saving, work)
        return _Run(results, saver, work, typed, means.engine).explain(listing.left_out)


def _find_work(typed: Typed, listing: Listing, means: Means) -> Work:
    """The model, and the pictures of this share."""
    from gradcam.batch.cores import count_cores
    from gradcam.batch.engine import Work
    from gradcam.batch.pool import choose_batch_size

    choice = typed.choice
    means.start()
    classifier, request = ask(means.to_settings(), typed.output)
    _check_listed_classes(classifier, listing, typed.settings)
    return Work(
        classifier=classifier,
        request=request,
        items=[item for item in listing.items if choice.shard is None or choice.shard.takes(item.name)],
        batch_size=choice.batch_size or choose_batch_size(classifier, means.device),
        workers=choice.workers or count_cores(),
        device=means.device,
        audit=choice.audit,
    )


def _check_listed_classes(classifier: Classifier, listing: Listing, settings: Settings) -> None:
    """Raises `click.UsageError` where options say which classes as well, and `GradcamError` for one that there is not."""
    wanted = dict.fromkeys(item.wanted for item in listing.items if item.wanted is not None)
    if listing.has_classes and (settings.classes or settings.top_k > 1):
        raise click.UsageError("The list says which classes to explain, and so do --class or --top-k: leave those out.")
    if listing.has_classes and settings.target is not None:
        raise click.UsageError("The list says which classes to explain, and --target explains none: leave it out.")
    for name in wanted:
        classifier.find_class(name)


def _to_saving(typed: Typed) -> Saving:
    from gradcam.batch.names import Saving

    settings, choice = typed.settings, typed.choice
    kinds = tuple(dict.fromkeys(choice.saved))
    return Saving(kinds, choice.format, choice.quality, settings.alpha, settings.colormap, views=choice.report)


def _open_results(typed: Typed, listing: Listing, work: Work, saving: Saving, stems: dict[str, str]) -> Results:
    from gradcam.batch.formats.records import open_results
    from gradcam.batch.save import describe_weights
    from gradcam.storage.run_file import Run, describe_files, describe_root

    settings, choice = typed.settings, typed.choice
    ours = {"listed_classes": listing.has_classes, "output_format": choice.output_format.name}
    brought: dict[str, object] = {method.name: method for method in work.request.methods}
    brought |= {"target": work.request.target, choice.output_format.name: choice.output_format.open}
    run = Run(
        device=str(work.device or work.classifier.device),
        model=work.classifier.name,
        weights=describe_weights(work.classifier, settings.model.weights),
        settings=describe_settings(settings, work, saving) | ours | describe_files(brought),
        inputs=list(typed.inputs),
        root=describe_root(listing.root, choice.folder),
        pictures=len(work.items),
        left_out=listing.left_out,
    )
    return open_results(choice.output_format, choice.destination, run, listing, stems)


def _to_saver(results: Results, stems: dict[str, str], saving: Saving, work: Work) -> Saver:
    from gradcam.batch.save import Saver
    from gradcam.report.views import draw_views

    return Saver(
        place=results.place,
        stems=stems,
        saving=saving,
        classifier=work.classifier,
        request=work.request,
        draw_views=draw_views,
    )


@dataclass(frozen=True)
class _Run:
    """Pictures on their way to open results."""

    results: Results
    saver: Saver
    work: Work
    typed: Typed
    engine: Engine

    def explain(self, left_out: int) -> int:
        """Explain the pictures, say what became of them, and give the exit status."""
        from gradcam.sources.shards import TooManyFailuresError

        names = [item.name for item in self.work.items]
        display = Display(self.typed.output, len(names), sum(name in self.results.done for name in names))
        try:
            self._go_through(display)
            self.results.close(names)
            report = self._report()
        except (OutputError, StoreError, ClusterError, TooManyFailuresError) as error:
            display.tell_failures(self.results.manifest)
            self._stop(display, str(error))
            return 1
        except (KeyboardInterrupt, Terminated):
            self._stop(display, "Stopped.")
            raise
        display.tell_failures(self.results.manifest)
        display.tell_end(str(self.typed.choice.folder), left_out=left_out, report=report)
        return int(display.has_failures)

    def _stop(self, display: Display, reason: str) -> None:
        """What is finished is kept before it is counted; first of all the reason, as a store may need a while."""
        display.tell_reason(reason)
        with contextlib.suppress(OutputError, StoreError):  # of the same place, about which all is said
            self.results.close()
        display.tell_stop(self.results.recorded)

    def _go_through(self, display: Display) -> None:
        from gradcam.batch.engine import explain_into

        limit = self.typed.choice.limit
        records = explain_into(self.results, self.saver, self.work, limit, engine=self.engine)
        # Closed here: the error that ends it would keep its threads at work after the folder is another's.
        with contextlib.closing(records), display.shown():
            for record in records:
                display.add(record)

    def _report(self) -> str | None:
        from gradcam.report.pages import write_report

        return str(write_report(self.typed.choice.folder)) if self.typed.choice.report else None


class FormatName(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic in some versions
    """The name of a format, or `FILE.py:NAME` of the user's own."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Format:
        """The format."""
        if isinstance(value, Format):
            return value
        name = value if is_own(value) else super().convert(value, parameter, context)
        try:
            return find_format(name)
        except GradcamError as error:
            self.fail(str(error), parameter, context)


@click.command("batch", cls=Command, short_help="Explain a folder of any size, and go on where it was stopped.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    metavar="DIR",
    type=options.FOLDER,
    help="The folder for results, or the URL of one in a store, such as s3://bucket/explained.",
)
@options.choices(methods=("gradcam",))
@options.appearance
@options.save
@options.choice("--format", PICTURE_FORMATS, "Of pictures.")
@click.option(
    "--quality",
    type=click.IntRange(1, 100),
    default=90,
    show_default=True,
    metavar="Q",
    help="Quality of jpg and webp.",
)
@click.option(
    "--output-format",
    type=FormatName([*FORMATS, *(name for name in installed("formats") if name not in FORMATS)]),
    default="files",
    show_default=True,
    help=", or ".join(each.summary for each in FORMATS.values()) + ", or your own, by FILE.py:NAME.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Pictures in one pass of the model; halved where memory is short.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads that read, draw and write.  [default: one for each core]",
)
@click.option("--resume", is_flag=True, help="Go on with an earlier run: do what is missing, or failed.")
@click.option("--overwrite", is_flag=True, help="Remove what an earlier run wrote, and start anew.")
@click.option("--report", is_flag=True, help="Write index.html as well, a gallery to look through.")
@click.option(
    "--max-failures",
    "limit",
    type=options.LIMIT,
    metavar="N|P%",
    help="Stop when more pictures than that failed; those of an earlier run do not count again with --resume.",
)
@click.option(
    "--shard",
    type=options.SHARE,
    metavar="I/N",
    help="The I-th of N shares alone, for machines that share one output folder.",
)
@options.choice("--engine", ["local", "ray"], "Who does the work: this process, or actors of Ray.")
@click.option(
    "--ray-address",
    "address",
    metavar="HOST:PORT",
    help="The Ray cluster to join.  [default: RAY_ADDRESS, or one that is started here]",
)
@click.option(
    "--actors-per-gpu",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="Actors of Ray on each GPU, each with a model of its own.",
)
@click.option("--audit", is_flag=True, help="Add each input's SHA-256 to its record.")
@options.printing
def batch_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain many pictures: files, folders, globs, lists (.txt, .csv, or - for standard input), .zip and .tar archives.

    Each may be a URL as well, such as s3://bucket/photos/, and "shards-{000000..000146}.tar" are those of a WebDataset.

    Overlays get the pictures' own relative names; manifest.jsonl has a record of each, as `gradcam run --json` prints it.
    A broken picture never stops the others. However a run ended, --resume does what is missing.
    """
    names = {field.name for field in fields(BatchChoice)}
    choice = BatchChoice(**{name: value for name, value in chosen.items() if name in names})
    settings = to_settings({name: value for name, value in chosen.items() if name not in names} | {"output": ""})
    if choice.resume and choice.overwrite:
        raise click.UsageError("--resume goes on with an earlier run, and --overwrite removes it: give one of them.")
    if choice.report and not choice.output_format.has_files:
        raise click.UsageError(
            f"--report shows files, and --output-format {choice.output_format.name} writes none: leave one of them out."
        )
    if choice.address is not None and choice.engine != "ray":
        raise click.UsageError("--ray-address is for --engine ray: give that as well, or leave it out.")
    if choice.actors_per_gpu > 1 and choice.engine != "ray":
        raise click.UsageError("--actors-per-gpu is for --engine ray: give that as well, or leave it out.")
    return explain_all(Typed(inputs, settings, choice, Output(as_json, quiet)))
