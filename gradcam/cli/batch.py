"""`gradcam batch`: explain a folder of any size, and go on where it was stopped; `gradcam report`: its gallery again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from gradcam.batch.formats import FORMATS, Destination, Format, OpenRun, find_format
from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import ask, load_model, say
from gradcam.cli._page import PageMaking
from gradcam.cli._settings import ModelChoice, Output, Settings, to_settings
from gradcam.cli._terminal import (
    Display,
    TerminationSignal,
    custom_code_context,
    import_torch,
    report_waits,
    format_written_path,
)
from gradcam.errors import ClusterError, DeviceError, GradcamError, OutputError, StoreError, printable
from gradcam.options import FORMATS as PICTURE_FORMATS
from gradcam.options import MAX_BATCH_SIZE, MAX_WORKERS, PIXELS
from gradcam.plugins import installed, is_own

if TYPE_CHECKING:
    from gradcam.batch.engine import Engine, Work
    from gradcam.batch.findings import MakePage, Request
    from gradcam.batch.names import Saving
    from gradcam.images.jpeg import Codec
    from gradcam.models.classifier import Classifier
    from gradcam.sources.list import Listing
    from gradcam.sources.shards import FailureLimit, Shard
    from gradcam.storage.clear import Mode
    from gradcam.storage.store import Store

DEVICES = ("auto", "cpu", "cuda")  # that Ray has


def load_on(choice: ModelChoice, layer: str | None, device: str) -> Classifier:
    """The model of that choice, on that device. Raises `GradcamError`."""
    return load_model(replace(choice, device=device), layer=layer)


def describe_settings(settings: Settings, work: Work, saving: Saving) -> dict[str, Any]:
    """The choices, by the names of the options, with what was found where nothing was said; all of it is JSON."""
    from gradcam.batch.findings import name_target
    from gradcam.models.preprocess import describe_preprocess

    classifier, request = work.classifier, work.request
    target = cast(Any, request.target)
    reshape, name = settings.options.get("reshape"), name_target(target)  # as it was typed
    asked = {"target": name} if name else {
        "classes": None if target.classes is None else [int(index) for index in target.classes[0]],
        "top_k": target.top,
        "score": target.score,
        "against": [int(index) for index in target.against or ()],
    } if classifier.task == "classification" else _describe_things(settings, classifier)  # fmt: skip
    task = "regression" if (classifier.classes, classifier.activation) == (1, "none") else classifier.task
    if task != "classification":  # of classifiers' runs, the settings are as they always were
        asked["task"] = task
    # Options that the shell does not have are as they always were, and stay out: an earlier version's run is gone on with.
    options = {name: it for name, it in request.options.items() if name in settings.options and name != "reshape"}
    fit = {} if classifier.fit == "crop" else {"fit": classifier.fit, "predictions": classifier.predictions}  # as those
    return {
        "model": classifier.name,
        "device": work.device or classifier.device.type,
        "precision": settings.model.precision,
        "preprocessing": describe_preprocess(classifier.preprocess),
        "activation": classifier.activation.replace("applied", "none"),  # As earlier versions, whose runs resume.
        "reader": settings.model.reader,
        "layers": request.list_layers(classifier),
        "reshape": list(reshape) if isinstance(reshape, tuple) else reshape,
        "methods": [method.name for method in request.all_methods],
        **asked,
        **options,
        **fit,
        "batch_size": work.batch_size,
        "audit": work.audit,
        **{("save" if name == "kinds" else name): value for name, value in asdict(saving).items() if name != "views"},
    }


def _describe_things(settings: Settings, model: Classifier) -> dict[str, Any]:
    classes = [model.find_class(name) for name in dict.fromkeys(settings.classes)]
    found = {"classes": classes, "against": list(settings.against), "threshold": settings.model.threshold}
    said = {name: value for name, value in found.items() if value not in ([], None)}
    return said | settings.wanted.describe()


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
    processes: int
    pixels: str
    resume: bool
    overwrite: bool
    report: bool
    limit: FailureLimit | None
    shard: Shard | None
    audit: bool
    engine: str
    address: str | None
    actors_per_gpu: int
    pages: bool = False
    make_page: MakePage | None = None

    @property
    def destination(self) -> Destination:
        """Where results go, and what is done about an earlier run."""
        mode: Mode = "resume" if self.resume else "overwrite" if self.overwrite else "new"
        return Destination(self.folder, mode, self.shard, self.report)


@dataclass(frozen=True)
class Typed:
    """All that was typed: of which pictures, what is asked, how they are worked on, and how it is told."""

    inputs: Sequence[str]
    settings: Settings
    choice: BatchChoice
    output: Output


def explain_all(typed: Typed) -> int:
    """Explain the pictures, say what became of them, and give the exit status. Raises before the first picture alone."""
    from gradcam.batch.names import Saving, check_outputs, check_panel, plan_stems
    from gradcam.sources.list import list_inputs

    choice, settings = typed.choice, typed.settings
    with report_waits(typed.output), contextlib.ExitStack() as stack:
        # Before torch is imported, and a model loaded.
        choice.output_format.check_place(choice.destination)
        listing = list_inputs(typed.inputs, exclude=choice.folder)
        import_torch()
        engine, device = _start_engine(choice, settings, stack)
        work = _resolve(_find_work(typed, listing, device), typed)
        if choice.resume:
            from gradcam.batch.formats.records import check_classes

            check_classes(choice.folder, work.items, work.classifier)
        kinds, stems = tuple(dict.fromkeys(choice.saved)), plan_stems(listing.items)
        saving = Saving(kinds, choice.format, choice.quality, settings.alpha, settings.colormap, views=choice.report)
        if not choice.output_format.has_files:  # no name can be another's, or an input's
            check_panel(saving, work.request)
        else:
            others = settings.wanted.files
            check_outputs(choice.folder, listing.items, stems, saving=saving, request=work.request, others=others)
        results = stack.enter_context(contextlib.closing(_open_results(typed, listing, work, saving, stems)))
        say(results.notes, typed.output)
        return _explain(results, stems, saving, work, typed, engine=engine, left_out=listing.left_out)


def _start_engine(choice: BatchChoice, settings: Settings, stack: contextlib.ExitStack) -> tuple[Engine, str | None]:
    """What does the work until the stack is closed; also what models compute on, where other processes have them, and
    this one only asks its."""
    model, layers = settings.model, settings.layers
    load = partial(load_on, model, layers[0] if layers else None)
    if choice.engine == "local":
        from gradcam.batch.engine import explain_here
        from gradcam.models.device import find_device, list_gpus

        gpus = list_gpus() if model.device == "cuda" else []
        if len(gpus) < 2 and choice.processes == 1:
            return explain_here, None
        from gradcam.batch.processes import ProcessEngine

        device = "cuda" if gpus else str(find_device(model.device))
        return ProcessEngine(load, (gpus or [device]) * choice.processes, choice.workers), device.partition(":")[0]
    from gradcam.batch.ray.engine import RayEngine
    from gradcam.batch.ray.session import find_layout, joined

    if model.device not in DEVICES:
        raise click.UsageError(
            f"--device {model.device} does not work with --engine ray: use one of {', '.join(DEVICES)}."
        )
    if choice.actors_per_gpu > 1 and model.device == "cpu":
        raise click.UsageError("--actors-per-gpu needs GPUs, but --device is cpu: remove one of them.")
    ray = stack.enter_context(joined(choice.address))
    layout = find_layout(ray, model.device, choice.actors_per_gpu)
    return RayEngine(ray, layout, load, choice.workers), layout.device


def _find_work(typed: Typed, listing: Listing, device: str | None) -> Work:
    """The model, and the pictures of this share. Raises `click.UsageError` where options and the list say which classes."""
    from gradcam.batch.engine import Work
    from gradcam.batch.pool import choose_batch_size
    from gradcam.options import count_cores

    choice, settings = typed.choice, typed.settings
    here = settings if device is None else replace(settings, model=replace(settings.model, device="cpu"))
    classifier, request = ask(here, typed.output)
    if (
        choice.pixels == "device"
        and device in (None, "cpu")
        and settings.model.device == "auto"
        and classifier.device.type == "cpu"
    ):
        raise DeviceError(
            "--pixels device needs a GPU, but no GPU was found: remove --pixels, or add --device cpu to decode, resize and "
            "draw with PyTorch on the CPU."
        )
    request = replace(request, make_page=choice.make_page)
    if listing.has_classes and (settings.classes or settings.top_k > 1):
        raise click.UsageError("The list already names the classes to explain: remove --class and --top-k.")
    named = settings.wanted.given if classifier.task not in ("detection", "segmentation") else []
    named += ["--target"] if settings.target is not None else []
    if listing.has_classes and named:
        raise click.UsageError(
            f"The list names the classes to explain, but {named[0]} does not explain a class: remove {named[0]}."
        )
    for name in dict.fromkeys(item.wanted for item in listing.items if item.wanted is not None):
        classifier.find_class(name)
    return Work(
        classifier=classifier,
        request=request,
        items=[item for item in listing.items if choice.shard is None or choice.shard.takes(item.name)],
        batch_size=choice.batch_size or choose_batch_size(classifier, device),
        workers=choice.workers or count_cores(),
        device=device,
        audit=choice.audit,
        pixels="cpu" if _find_codec(choice, classifier, request, device) is None else "device",
    )


def _find_codec(choice: BatchChoice, model: Classifier, request: Request, device: str | None) -> Codec | None:
    """What decodes and encodes where pixels are on the device; Ray's actors leave them on the processor."""
    from gradcam.batch.device import find_pixels

    return find_pixels("cpu" if choice.engine == "ray" else choice.pixels, model, request, device)


def _resolve(work: Work, typed: Typed) -> Work:
    """Return the work with what it resolves; a resumed run keeps the layers that it began with."""
    from gradcam.batch.findings import resolve
    from gradcam.storage.clear import list_earlier_layers

    where, classifier = typed.choice.destination, work.classifier
    layers = list_earlier_layers(where.place, where.part, where.mode)
    with contextlib.redirect_stdout(sys.stderr):  # What a user's model prints.
        resolved = resolve(classifier, work.request)
        if layers and layers != resolved.get("layers", layers):
            fields = work.request.to_layer_fields(classifier, layers)
            classifier = replace(classifier, **fields)
            work = replace(work, classifier=classifier, resumed_layers=fields)
            resolved = resolve(classifier, work.request)
    return replace(work, resolved=resolved)


def _open_results(typed: Typed, listing: Listing, work: Work, saving: Saving, stems: dict[str, str]) -> OpenRun:
    from gradcam.batch.device import describe_pixels
    from gradcam.batch.formats.records import open_results
    from gradcam.batch.save import describe_weights
    from gradcam.storage.run_file import Run, describe_files, describe_root

    settings, choice = typed.settings, typed.choice
    ours = {"listed_classes": listing.has_classes, "output_format": choice.output_format.name}
    brought = {"target": work.request.target, choice.output_format.name: choice.output_format.open}
    brought |= {f"method {it.name}" if it.name in brought else it.name: it for it in work.request.methods}
    changed = {it.name: dict(it.options) for it in work.request.methods if it != METHODS.get(it.name, it)}
    ours |= {"method_options": changed} if changed else {}
    ours |= {"pages": True} if choice.pages else {}
    codec = _find_codec(choice, work.classifier, work.request, work.device)
    ours |= {} if codec is None else {"pixels": describe_pixels(codec, saving)}  # without, all is as it always was
    run = Run(
        device=str(work.device or work.classifier.device),
        model=work.classifier.name,
        weights=describe_weights(work.classifier, settings.model.weights),
        settings=describe_settings(settings, work, saving) | ours | describe_files(brought),
        inputs=list(typed.inputs),
        root=describe_root(listing.root, choice.folder),
        images=len(work.items),
        left_out=listing.left_out,
        resolved=work.resolved,
    )
    return open_results(choice.output_format, choice.destination, run, listing, stems)


def _explain(
    results: OpenRun, stems: dict[str, str], saving: Saving, work: Work, typed: Typed, *, engine: Engine, left_out: int
) -> int:
    from gradcam.batch.engine import explain_into
    from gradcam.batch.save import Saver
    from gradcam.report import draw_views, write_report
    from gradcam.sources.shards import TooManyFailuresError

    saver = Saver(results.place, stems, saving, work.classifier, work.request, draw_views)
    choice, names = typed.choice, [item.name for item in work.items]
    display = Display(typed.output, len(names), sum(name in results.done for name in names))

    def stop(reason: str) -> None:  # it is said first, as a store may be slow; what is finished is kept, and counted
        click.echo(printable(reason), err=True)
        with contextlib.suppress(OutputError, StoreError):  # of the same place, about which all is said
            results.close()
        display.print_stop(results.recorded)

    try:
        records = explain_into(results, saver, work, choice.limit, engine=engine)
        # Closed here: the error that ends it would keep its threads at work after the folder is another's.
        with contextlib.closing(records), display.show_bar():
            for record in records:
                display.add(record)
        results.close(names)
        report = str(write_report(choice.folder)) if choice.report else None
    except (OutputError, StoreError, ClusterError, DeviceError, TooManyFailuresError) as error:
        display.print_failures(results.manifest)
        stop(str(error))
        return 1
    except (KeyboardInterrupt, TerminationSignal):
        stop("Stopped.")
        raise
    display.print_failures(results.manifest)
    display.print_summary(str(choice.folder), left_out=left_out, report=report)
    return int(display.has_failures)


class FormatName(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic in some versions
    """The name of a format, or `FILE.py:NAME` of the user's own."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Format:
        if isinstance(value, Format):
            return value
        name = value if is_own(value) else super().convert(value, parameter, context)
        try:
            with custom_code_context(name):
                return find_format(name)
        except GradcamError as error:
            self.fail(str(error), parameter, context)


@click.command("batch", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    metavar="DIR",
    type=options.FOLDER,
    help="Folder for the results, or its URL in a store, such as s3://bucket/explained.",
)
@options.choices()
@options.appearance
@options.save
@options.choice("--format", PICTURE_FORMATS, "Image format.")
@options.number("--quality", "Quality of jpg and webp, from 1 to 100.", 90, maximum=100, metavar="Q")
@click.option(
    "--output-format",
    type=FormatName([*FORMATS, *(name for name in installed("formats") if name not in FORMATS)]),
    default="files",
    show_default=True,
    help="Format of the results. "
    + "; ".join(f"{output_format.name}: {output_format.summary}" for output_format in FORMATS.values())
    + ". FILE.py:NAME is your own format.",
)
@options.number(
    "--batch-size",
    "Batch size: number of images per pass of the model. It is halved if memory runs out. Without --batch-size, it is "
    "chosen for the device.",
    maximum=MAX_BATCH_SIZE,
)
@options.number("--workers", "Number of threads that read, draw and write.  [default: one per core]", maximum=MAX_WORKERS)
@options.number("--processes", "Number of processes per GPU, each with its own model.", 1, maximum=100)
@options.choice(
    "--pixels",
    PIXELS,
    "Where images are decoded, resized, drawn and encoded. auto: on the CPU; device: on the GPU, experimental.",
)
@click.option("--resume", is_flag=True, help="Continue an earlier run: explain images that are missing or failed.")
@click.option("--overwrite", is_flag=True, help="Delete the results of an earlier run, and start again.")
@click.option("--report", is_flag=True, help="Also write a gallery, index.html.")
@click.option("--pages", is_flag=True, help="Also write an HTML page per image, with the heatmaps of every class.")
@click.option(
    "--max-failures",
    "limit",
    type=options.LIMIT,
    metavar="N|P%",
    help="Stop if more than N images, or more than P % of all images, fail. With --resume, images that failed in an "
    "earlier run do not count again.",
)
@click.option(
    "--shard",
    type=options.SHARE,
    metavar="I/N",
    help="Split the images into N parts and explain only part I, so that several machines can share one output folder.",
)
@options.choice(
    "--engine",
    ["local", "ray"],
    "Engine that explains the images. local: this machine; ray: Ray actors, on one machine or a cluster.",
)
@click.option(
    "--ray-address",
    "address",
    metavar="HOST:PORT",
    help="Ray cluster to connect to.  [default: RAY_ADDRESS, or a new local cluster]",
)
@options.number("--actors-per-gpu", "Number of Ray actors per GPU, each with its own model.", 1, maximum=100)
@click.option("--audit", is_flag=True, help="Add the SHA-256 of each input to its record.")
@options.printing
def batch_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain many images: write an overlay for each, and resume an interrupted run.

    INPUT is a file, a folder, a glob, a list (.txt, .csv, or - for standard input), or an archive (.zip, .tar). It may also
    be a URL, such as s3://bucket/photos/. "shards-{000000..000146}.tar" names the shards of a WebDataset.

    Overlays have the names of the images, in the same subfolders. manifest.jsonl has a record per image, as printed by
    `gradcam run --json`. An image that cannot be read does not stop the run. After a run that stopped early, --resume
    explains the missing images.
    """
    names = {field.name for field in fields(BatchChoice)}
    choice = BatchChoice(**{name: value for name, value in chosen.items() if name in names})
    settings = to_settings({name: value for name, value in chosen.items() if name not in names} | {"output": ""})
    if choice.resume and choice.overwrite:
        raise click.UsageError("--resume continues an earlier run, but --overwrite deletes it: give only one of them.")
    if choice.report and not choice.output_format.has_files:
        raise click.UsageError(
            f"--report needs files, but --output-format {choice.output_format.name} writes none: remove one of them."
        )
    if choice.address is not None and choice.engine != "ray":
        raise click.UsageError("--ray-address needs --engine ray: add --engine ray, or remove --ray-address.")
    if choice.actors_per_gpu > 1 and choice.engine != "ray":
        raise click.UsageError("--actors-per-gpu needs --engine ray: add --engine ray, or remove --actors-per-gpu.")
    if choice.processes > 1 and choice.engine == "ray":
        raise click.UsageError("--processes is for --engine local: use --actors-per-gpu with Ray.")
    if choice.pixels == "device" and choice.engine == "ray":
        raise click.UsageError(
            "--pixels device does not work with --engine ray: remove --pixels, or use --engine local."
        )
    if choice.pages and not choice.output_format.has_files:
        raise click.UsageError(
            f"--pages needs files, but --output-format {choice.output_format.name} writes none: remove one of them."
        )
    if choice.pages:
        choice = replace(choice, make_page=PageMaking(settings))
    return explain_all(Typed(inputs, settings, choice, Output(as_json, quiet)))


@click.command("report", cls=Command)
@click.argument("folder", metavar="DIR", type=options.FOLDER)
@options.max_pixels
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def report_command(folder: Path | Store, quiet: bool) -> int:
    """Write a gallery, DIR/index.html, of the results of `gradcam batch`.

    DIR is the output folder of the batch, or its URL in a store.
    """
    from gradcam.report.pages import write_report

    with report_waits(Output(as_json=False, quiet=quiet)):
        page = write_report(folder)
    if not quiet:
        click.echo(format_written_path(str(page)))
    return 0
