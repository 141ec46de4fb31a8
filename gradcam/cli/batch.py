"""`gradcam batch`: explain a folder of any size, resume interrupted runs. `gradcam report`: write a gallery."""

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
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._job import list_input_files, load_model, prepare_request, print_notes
from gradcam.cli._page_maker import PageMaker
from gradcam.cli._settings import ModelChoice, OutputMode, Settings, to_settings
from gradcam.errors import ClusterError, DeviceError, GradcamError, OutputError, StoreError, escape_controls
from gradcam.options import FORMATS as PICTURE_FORMATS
from gradcam.options import MAX_BATCH_SIZE, MAX_WORKERS, PIXEL_DEVICES, REPORT_FORMATS
from gradcam.plugins import is_custom, list_entry_points

if TYPE_CHECKING:
    from gradcam.batch.engine import BatchWork, Engine
    from gradcam.batch.image_results import ExplainRequest, MakePage
    from gradcam.batch.result_names import OutputOptions
    from gradcam.batch.save import Saver
    from gradcam.images.jpeg import Codec
    from gradcam.models.classifier import Classifier
    from gradcam.sources.collect import InputListing
    from gradcam.sources.shards import FailureLimit, Shard
    from gradcam.storage.clear import ExistingRunMode
    from gradcam.storage.store import Store

RAY_DEVICES = ("auto", "cpu", "cuda")


def load_on(choice: ModelChoice, layer: str | None, device: str) -> Classifier:
    """Load the model on a device. Raise `GradcamError` if it cannot be loaded."""
    return load_model(replace(choice, device=device), layer=layer)


def describe_settings(settings: Settings, work: BatchWork, saving: OutputOptions) -> dict[str, Any]:
    """Return the settings for run.json, by option name. Automatic values are replaced by the values in use."""
    from gradcam.batch.image_results import name_target_function
    from gradcam.models.preprocess import describe_preprocess

    classifier, request = work.classifier, work.request
    target = cast(Any, request.target)
    reshape, name = settings.options.get("reshape"), name_target_function(target)  # --reshape as given
    target_settings = {"target": name} if name else {
        "classes": None if target.classes is None else [int(index) for index in target.classes[0]],
        "top_k": target.top,
        "score": target.score,
        "against": [int(index) for index in target.against or ()],
    } if classifier.task == "classification" else _describe_targets(settings, classifier)  # fmt: skip
    task = "regression" if (classifier.classes, classifier.activation) == (1, "none") else classifier.task
    if task != "classification":  # Earlier versions stored no task for classifiers. Earlier runs must be resumable.
        target_settings["task"] = task
    # Earlier versions stored only command-line options. Store no other options, so that earlier runs can be resumed.
    options = {name: value for name, value in request.options.items() if name in settings.options and name != "reshape"}
    # Earlier versions stored no fit. Store the fit only if it is not the default, so that earlier runs can be resumed.
    fit = {} if classifier.fit == "crop" else {"fit": classifier.fit, "predictions": classifier.predictions}
    # Earlier versions had no boxes. Store the box settings only if they are used, so that earlier runs can be resumed.
    unused = {"views"} | (set() if {"mask", "boxes"} & {*saving.kinds} else {"box_threshold", "box_method"})
    return {
        "model": classifier.name,
        "device": work.device or classifier.device.type,
        "precision": settings.model.precision,
        "preprocessing": describe_preprocess(classifier.preprocess),
        "activation": classifier.activation.replace("applied", "none"),  # Earlier versions stored "none".
        "reader": settings.model.reader,
        "layers": request.list_layers(classifier),
        "reshape": list(reshape) if isinstance(reshape, tuple) else reshape,
        "methods": [method.name for method in request.all_methods],
        **target_settings,
        **options,
        **fit,
        "batch_size": work.batch_size,
        "audit": work.audit,
        **{
            ("save" if name == "kinds" else name): value for name, value in asdict(saving).items() if name not in unused
        },
    }


def _describe_targets(settings: Settings, model: Classifier) -> dict[str, Any]:
    classes = [model.find_class(name) for name in dict.fromkeys(settings.classes)]
    values = {"classes": classes, "against": list(settings.against), "threshold": settings.model.threshold}
    description = {name: value for name, value in values.items() if value not in ([], None)}
    return description | settings.target_choice.describe()


@dataclass(frozen=True)
class BatchOptions:
    """The inputs of a batch, the settings of the explanations, and the options of the batch."""

    inputs: Sequence[str]
    settings: Settings
    output: OutputMode
    folder: Path | Store
    saved: tuple[str, ...] = ("overlay",)
    format: str = "jpg"
    quality: int = 90
    output_format: Format = FORMATS["files"]
    batch_size: int | None = None
    workers: int | None = None
    processes: int = 1
    pixels: str = "cpu"
    resume: bool = False
    overwrite: bool = False
    report: bool = False
    limit: FailureLimit | None = None
    shard: Shard | None = None
    audit: bool = False
    engine: str = "local"
    address: str | None = None
    actors_per_gpu: int = 1
    pages: bool = False
    make_page: MakePage | None = None

    @property
    def destination(self) -> Destination:
        """Return the destination of the results, with the mode for an earlier run: resume, overwrite or new."""
        mode: ExistingRunMode = "resume" if self.resume else "overwrite" if self.overwrite else "new"
        return Destination(self.folder, mode, self.shard, self.report)


def _check_options(batch: BatchOptions) -> None:
    """Raise `click.UsageError` if two options contradict each other."""
    is_ray, has_files = batch.engine == "ray", batch.output_format.has_files
    no_files = f"needs files, but --output-format {batch.output_format.name} writes none: remove one of them."
    has_address, has_actors = batch.address is not None, batch.actors_per_gpu > 1
    both_modes = "--resume continues an earlier run, but --overwrite deletes it: give only one of them."
    device_pixels = "--pixels device does not work with --engine ray: remove --pixels, or use --engine local."
    refusals = {
        both_modes: batch.resume and batch.overwrite,
        f"--report {no_files}": batch.report and not has_files,
        "--ray-address needs --engine ray: add --engine ray, or remove --ray-address.": has_address and not is_ray,
        "--actors-per-gpu needs --engine ray: add --engine ray, or remove --actors-per-gpu.": has_actors and not is_ray,
        "--processes is for --engine local: use --actors-per-gpu with Ray.": batch.processes > 1 and is_ray,
        device_pixels: batch.pixels == "device" and is_ray,
        f"--pages {no_files}": batch.pages and not has_files,
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise click.UsageError(message)


def run_batch(batch: BatchOptions) -> int:
    """Explain the images, print a summary, and return the exit status.

    An error before the first explanation is raised. A later error is printed, and the status is 1.
    """
    from gradcam.batch.result_names import OutputOptions, check_kinds, check_outputs, plan_stems
    from gradcam.report import draw_views
    from gradcam.sources.collect import list_inputs
    from gradcam.storage.clear import list_earlier_look

    _check_options(batch)
    settings = batch.settings
    with terminal.report_waits(batch.output), contextlib.ExitStack() as stack:
        # Check the output before torch is imported and a model is loaded, which takes seconds.
        batch.output_format.check_place(batch.destination)
        listing = list_inputs(batch.inputs, exclude=batch.folder)
        terminal.import_torch()
        from gradcam.batch.save import Saver  # This module imports torch.

        engine, device = _start_engine(batch, stack)
        work = _resolve(_find_work(batch, listing, device), batch)
        if batch.resume:
            from gradcam.batch.formats.records import check_recorded_classes

            check_recorded_classes(batch.folder, work.items, work.classifier)
        kinds, stems = tuple(dict.fromkeys(batch.saved)), plan_stems(listing.items)
        look = (
            list_earlier_look(batch.destination.place, batch.destination.part, batch.destination.mode) | settings.look
        )
        saving = OutputOptions(kinds, batch.format, batch.quality, views=batch.report, **settings.appearance | look)
        if not batch.output_format.has_files:  # Without files, no names can collide.
            check_kinds(saving, work.request)
        else:
            others = list_input_files([], settings.target_choice)
            check_outputs(batch.folder, listing.items, stems, saving=saving, request=work.request, others=others)
        results = stack.enter_context(contextlib.closing(_open_results(batch, listing, work, saving, stems)))
        print_notes(results.notes, batch.output)
        saver = Saver(results.place, stems, saving, work.classifier, work.request, draw_views)
        return _explain(results, saver, work, batch, engine=engine, left_out=listing.left_out)


def _start_engine(batch: BatchOptions, stack: contextlib.ExitStack) -> tuple[Engine, str | None]:
    """Return the engine, and the device type of its models. The type is None if the model runs in this process.

    If models run in other processes, the model of this process only prepares the request. The engine ends when
    `stack` is closed.
    """
    model, layers = batch.settings.model, batch.settings.layers
    load = partial(load_on, model, layers[0] if layers else None)
    if batch.engine == "local":
        from gradcam.batch.engine import explain_locally
        from gradcam.models.device import find_device, list_gpus

        gpus = list_gpus() if model.device == "cuda" else []
        if len(gpus) < 2 and batch.processes == 1:
            return explain_locally, None
        from gradcam.batch.processes import ProcessEngine

        device = "cuda" if gpus else str(find_device(model.device))
        return ProcessEngine(load, (gpus or [device]) * batch.processes, batch.workers), device.partition(":")[0]
    from gradcam.batch.ray.engine import RayEngine
    from gradcam.batch.ray.session import connect, find_layout

    if model.device not in RAY_DEVICES:
        raise click.UsageError(
            f"--device {model.device} does not work with --engine ray: use one of {', '.join(RAY_DEVICES)}."
        )
    if batch.actors_per_gpu > 1 and model.device == "cpu":
        raise click.UsageError("--actors-per-gpu needs GPUs, but --device is cpu: remove one of them.")
    ray = stack.enter_context(connect(batch.address))
    layout = find_layout(ray, model.device, batch.actors_per_gpu)
    return RayEngine(ray, layout, load, batch.workers), layout.device


def _find_work(batch: BatchOptions, listing: InputListing, device: str | None) -> BatchWork:
    """Load the model and collect this shard's images. Raise `click.UsageError` if options contradict the inputs."""
    from gradcam.batch.engine import BatchWork
    from gradcam.batch.pool import choose_batch_size
    from gradcam.options import count_cores

    settings = batch.settings
    local_settings = settings if device is None else replace(settings, model=replace(settings.model, device="cpu"))
    classifier, request = prepare_request(local_settings, batch.output)
    found_no_gpu = settings.model.device == "auto" and classifier.device.type == "cpu" and device in (None, "cpu")
    if batch.pixels == "device" and found_no_gpu:
        raise DeviceError(
            "--pixels device needs a GPU, but no GPU was found: remove --pixels. To process images with PyTorch on the "
            "CPU, add --device cpu."
        )
    request = replace(request, make_page=batch.make_page)
    if listing.has_classes and (settings.classes or settings.top_k > 1):
        raise click.UsageError("The list already names the classes to explain: remove --class and --top-k.")
    unfit = settings.target_choice.option_names if classifier.task not in ("detection", "segmentation") else []
    unfit += ["--target"] if settings.target is not None else []
    if listing.has_classes and unfit:
        raise click.UsageError(
            f"The list names the classes to explain, but {unfit[0]} does not explain a class: remove {unfit[0]}."
        )
    for name in dict.fromkeys(item.wanted for item in listing.items if item.wanted is not None):
        classifier.find_class(name)
    return BatchWork(
        classifier=classifier,
        request=request,
        items=[item for item in listing.items if batch.shard is None or batch.shard.takes(item.name)],
        batch_size=batch.batch_size or choose_batch_size(classifier, device),
        workers=batch.workers or count_cores(),
        device=device,
        audit=batch.audit,
        pixels="cpu" if _find_codec(batch, classifier, request, device) is None else "device",
    )


def _find_codec(batch: BatchOptions, model: Classifier, request: ExplainRequest, device: str | None) -> Codec | None:
    """Return the codec that processes images on the device, or None on the CPU. Ray's actors decode on the CPU."""
    from gradcam.batch.device import find_device_codec

    return find_device_codec("cpu" if batch.engine == "ray" else batch.pixels, model, request, device)


def _resolve(work: BatchWork, batch: BatchOptions) -> BatchWork:
    """Resolve the automatic settings of the work. A resumed run keeps its original layers."""
    from gradcam.batch.image_results import resolve_settings
    from gradcam.storage.clear import list_earlier_layers

    destination, classifier = batch.destination, work.classifier
    layers = list_earlier_layers(destination.place, destination.part, destination.mode)
    with contextlib.redirect_stdout(sys.stderr):  # Custom models may print.
        resolved = resolve_settings(classifier, work.request)
        if layers and layers != resolved.get("layers", layers):
            fields = work.request.to_layer_fields(classifier, layers)
            classifier = replace(classifier, **fields)
            work = replace(work, classifier=classifier, resumed_layers=fields)
            resolved = resolve_settings(classifier, work.request)
    return replace(work, resolved=resolved)


def _open_results(
    batch: BatchOptions, listing: InputListing, work: BatchWork, saving: OutputOptions, stems: dict[str, str]
) -> OpenRun:
    from gradcam.batch.device import describe_image_processing
    from gradcam.batch.formats.records import open_results
    from gradcam.batch.save import describe_weights
    from gradcam.storage.run_file import RunSettings, describe_root, fingerprint_user_files

    settings, output_format, methods = batch.settings, batch.output_format, work.request.methods
    extras: dict[str, Any] = {"listed_classes": listing.has_classes, "output_format": output_format.name}
    custom_code = {"target": work.request.target, output_format.name: output_format.open}
    custom_code |= {
        f"method {method.name}" if method.name in custom_code else method.name: method for method in methods
    }
    changed = {method.name: dict(method.options) for method in methods if method != METHODS.get(method.name, method)}
    extras |= {"method_options": changed} if changed else {}
    extras |= {"pages": True} if batch.pages else {}
    codec = _find_codec(batch, work.classifier, work.request, work.device)
    # Earlier versions stored no "pixels". Store "pixels" only for a device, so that earlier runs can be resumed.
    extras |= {} if codec is None else {"pixels": describe_image_processing(codec, saving)}
    run = RunSettings(
        device=str(work.device or work.classifier.device),
        model=work.classifier.name,
        weights=describe_weights(work.classifier, settings.model.weights),
        settings=describe_settings(settings, work, saving) | extras | fingerprint_user_files(custom_code),
        inputs=list(batch.inputs),
        root=describe_root(listing.root, batch.folder),
        images=len(work.items),
        left_out=listing.left_out,
        resolved=work.resolved,
    )
    return open_results(output_format, batch.destination, run, listing, stems)


def _explain(
    results: OpenRun, saver: Saver, work: BatchWork, batch: BatchOptions, *, engine: Engine, left_out: int
) -> int:
    from gradcam.batch.engine import explain_to_run
    from gradcam.report import write_report
    from gradcam.sources.shards import TooManyFailuresError

    names = [item.name for item in work.items]
    total, done_before = len(names), sum(name in results.done for name in names)
    display = terminal.Display(batch.output, total, done_before)

    def stop(reason: str) -> None:
        click.echo(escape_controls(reason), err=True)  # Print the reason first, because closing a store may take long.
        with contextlib.suppress(OutputError, StoreError):  # The error has already been printed.
            results.close()
        display.print_stop(results.recorded)

    try:
        records = explain_to_run(results, saver, work, batch.limit, engine=engine)
        # Close the generator, which ends its threads. Otherwise, a traceback would keep the generator and its threads
        # alive while another run uses the folder.
        bar = terminal.show_progress_bar(batch.output, "images", total, done_before)
        with contextlib.closing(records), bar as display.bar:
            for record in records:
                display.add(record)
        results.close(names)
        report = str(write_report(batch.folder)) if batch.report else None
    except (OutputError, StoreError, ClusterError, DeviceError, TooManyFailuresError) as error:
        display.print_failures(results.manifest)
        stop(str(error))
        return 1
    except (KeyboardInterrupt, terminal.TerminationSignal):
        stop("Stopped.")
        raise
    display.print_failures(results.manifest)
    display.print_summary(str(batch.folder), left_out=left_out, report=report)
    return int(display.failed > 0)


class FormatName(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic in some versions of click
    """The parameter type of --output-format: the name of a format, or `FILE.py:NAME` of a custom format."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Format:
        if isinstance(value, Format):
            return value
        name = value if is_custom(value) else super().convert(value, parameter, context)
        try:
            with terminal.custom_code_context(name):
                return find_format(name)
        except GradcamError as error:
            self.fail(str(error), parameter, context)


@click.command("batch", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.option(
    "-o --output DIR",
    "Folder for the results, or a URL in an object store, such as s3://bucket/explained.",
    options.FOLDER,
    name="folder",
    required=True,
)
@options.explain_options()
@options.appearance
@options.save
@options.choice("--format", PICTURE_FORMATS, "Image format.")
@options.number("--quality Q", "Quality of jpg and webp, from 1 to 100.", 90, maximum=100)
@options.option(
    "--output-format",
    "Format of the results. "
    + "; ".join(f"{output_format.name}: {output_format.summary}" for output_format in FORMATS.values())
    + ". FILE.py:NAME is your own format.",
    FormatName([*FORMATS, *(name for name in list_entry_points("formats") if name not in FORMATS)]),
    default="files",
)
@options.number(
    "--batch-size",
    "Number of images per pass of the model. If memory runs out, the number is halved. Without --batch-size, the number "
    "is chosen for the device.",
    maximum=MAX_BATCH_SIZE,
)
@options.number(
    "--workers", "Number of threads that read, draw and write.  [default: one per core]", maximum=MAX_WORKERS
)
@options.number("--processes", "Number of processes per GPU, each with its own model.", 1, maximum=100)
@options.choice(
    "--pixels",
    PIXEL_DEVICES,
    "Where images are decoded, resized, drawn and encoded. auto: on the CPU; device: on the GPU, experimental.",
)
@click.option("--resume", is_flag=True, help="Continue an earlier run: explain only missing and failed images.")
@click.option("--overwrite", is_flag=True, help="Delete the results of an earlier run, and start again.")
@click.option("--report", is_flag=True, help="Also write a gallery, index.html.")
@click.option("--pages", is_flag=True, help="Also write an HTML page per image, with the heatmaps of every class.")
@options.option(
    "--max-failures N|P%",
    "Stop if more than N images, or more than P % of all images, fail. With --resume, images that failed in an "
    "earlier run do not count again.",
    options.FAILURE_LIMIT,
    name="limit",
)
@options.option(
    "--shard I/N",
    "Split the images into N parts and explain only part I, so that several machines can share one output folder.",
    options.SHARD,
)
@options.choice(
    "--engine",
    ["local", "ray"],
    "Engine that explains the images. local: this machine; ray: Ray actors, on one machine or a cluster.",
)
@options.option(
    "--ray-address HOST:PORT",
    "Ray cluster to connect to.  [default: RAY_ADDRESS, or a new local cluster]",
    name="address",
)
@options.number("--actors-per-gpu", "Number of Ray actors per GPU, each with its own model.", 1, maximum=100)
@click.option("--audit", is_flag=True, help="Add the SHA-256 of each input to its record.")
@options.printing
def batch_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Explain many images: write an overlay for each, and resume an interrupted run.

    INPUT is a file, a folder, a glob, a list (.txt, .csv, or - for standard input), or an archive (.zip, .tar). INPUT
    may also be a URL, such as s3://bucket/photos/. "shards-{000000..000146}.tar" names the shards of a WebDataset.

    Overlays have the names of the images, in the same subfolders. manifest.jsonl has a record per image, as printed by
    `gradcam run --json`. An image that cannot be read does not stop the run. If a run stopped early, --resume
    continues with the images that have no heatmap yet.
    """
    names = {field.name for field in fields(BatchOptions)}
    settings = to_settings({name: value for name, value in params.items() if name not in names})
    selected = {name: value for name, value in params.items() if name in names}
    make_page = PageMaker(settings) if params["pages"] else None
    return run_batch(BatchOptions(inputs, settings, OutputMode(as_json, quiet), **selected, make_page=make_page))


@click.command("report", cls=Command)
@click.argument("folder", metavar="DIR", type=options.FOLDER)
@options.choice(
    "--format",
    REPORT_FORMATS,
    "Format to write. html writes a gallery. The other formats need boxes (--save boxes) and write them as "
    "coco.json, as one text file per image in yolo/labels/, or as labelstudio.json.",
)
@options.option(
    "--image-root TEXT",
    "Folder or URL to put before each image's name, for coco and labelstudio.",
    default="",
)
@options.max_pixels
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def report_command(folder: Path | Store, format: str, image_root: str, quiet: bool) -> int:
    """Turn the results of `gradcam batch` into an HTML gallery (DIR/index.html), or export their boxes.

    DIR is the output folder of the batch, or its URL in an object store.
    """
    from gradcam.report import exports, write_report

    if image_root and format not in ("coco", "labelstudio"):
        raise click.UsageError(f"--image-root is for --format coco and labelstudio, but the format is {format}.")
    with terminal.report_waits(OutputMode(as_json=False, quiet=quiet)):
        paths = [write_report(folder)] if format == "html" else exports.write_export(folder, format, image_root)
    for path in () if quiet else paths:
        click.echo(terminal.format_written_path(str(path)))
    return 0
