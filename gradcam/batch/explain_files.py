"""Many pictures from Python: a stream of results, for a sink of the caller's."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from gradcam.attributions.table import ATTRIBUTIONS, AttributionMethod
from gradcam.batch.device import open_pixels
from gradcam.batch.findings import PictureResult, Request, find
from gradcam.batch.pipeline import compute_items
from gradcam.batch.pool import choose_batch_size
from gradcam.batch.read import Fetched
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.errors import GradcamError, LayerError, ModelError, TargetError, shorten, show_fields
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier
from gradcam.models.load import load_classifier
from gradcam.models.results import PictureAttribution, PictureExplanation
from gradcam.options import ExplainOptions, check_count, count_cores
from gradcam.sources.list import Inputs, list_inputs
from gradcam.storage.records import Prediction
from gradcam.targets.base import Target
from gradcam.targets.classes import ClassTarget, check_classes, is_function


@dataclass(frozen=True, eq=False)
class FileResult:
    """What became of one picture: it failed, and `error` says why, or there are explanations of it alone (N is 1).
    `name`: relative to the input's root, with "/" between folders; `inputs[3]` for a picture that is not given by its
    path. `path`: None for such a one, and for what lies in an archive or in a store. `explanations`: by (layer,
    method). `predictions`: the most probable classes, or what was found. `note`: what a person should know of how the
    picture is shown."""

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
    methods: Iterable[str | Method | AttributionMethod] | None = None,
    target: Any = None,
    batch_size: int | str = "auto",
    workers: int | None = None,
    pixels: str = "auto",
    **options: Unpack[ExplainOptions],
) -> Generator[FileResult, None, None]:
    """Show where a model looked in each of many pictures: a result for each, in their order, as soon as it is there.

    Only a few batches are in memory at once. The model runs in the thread that asks for results; close the generator to
    stop. A picture that cannot be explained has its result too, with the error in it, and stops nothing. Images of a
    store that does not answer come last, once it has had a minute to recover.

    Parameters
    ----------
    inputs : path, URL or picture, or several
        Files, folders, globs, lists and archives, by their paths or URLs ("s3://bucket/photos/"), and pictures in any
        other form that `gradcam.read_image` takes.
    classifier : Classifier, default None
        None for the one that comes with the package. What `gradcam.load_model` gives for another task, such as a
        detector, is taken as well.
    layers : list of str, default None
        Dotted names. None for each method's own layer.
    methods : list of str, Method or AttributionMethod, default None
        Keys of `gradcam.METHODS` and of `gradcam.attributions.ATTRIBUTIONS`, or their values, such as
        ``gradcam.METHODS["rise"].using(masks=2000)``. None is "gradcam", or what suits the model's task.
    target : Any, default None
        What is explained in every picture that no list asks a class for: a class by its index or label, or several of
        them; a `ClassTarget` with one row of classes at most; a box, a mask, a sentence or another of
        `gradcam.targets`, for a model of that task; or a function from the model's output to scores (N,) or (N,K).
        None for each picture's top class, or the surest of what a model of another task finds.
    batch_size : int or "auto", default "auto"
        Pictures to explain at once; halved on a device that they do not fit into.
    workers : int, default None
        Threads that read. None for one on each core.
    pixels : str, default "auto"
        Where pictures are decoded and resized: "cpu", "device" for the model's own, or "auto" for the device where that
        is CUDA and can decode JPEG. What it cannot decode, the processor does.
    **options : Any
        The options of `explain`.

    Yields
    ------
    FileResult
        Its fields are `name`, the picture's, relative to the input's root; `path`, None for what is given in another
        form and for what lies in an archive or a store; `error`, None where the picture was explained; `explanations`,
        a dict by layer name and method name; `attributions`; `predictions`, the most probable classes, or what the
        model found, such as its boxes; and `note`, what a person should know of how the picture is shown.

    Raises
    ------
    GradcamError
        For arguments that are unknown or do not fit, at the call, before any picture is read.
    DeviceError
        For "device" where pixels cannot be there, at the call; and where a GPU is lost.
    InputError
        For inputs that cannot be listed, at the call too.
    StoreError
        Where a store that has to be listed does not answer, at the call.

    Examples
    --------
    >>> import gradcam
    >>> for result in gradcam.explain_files("photos/"):
    ...     print(result.name, result.error or result.explanations["layer4", "gradcam"].label())
    coffee.jpg espresso
    rocket.jpg missile
    """
    if classifier is not None and not isinstance(classifier, Classifier):
        raise ModelError(
            f"classifier is {shorten(classifier)}, expected what gradcam.load_classifier gives, which takes any model."
        )
    classifier = classifier or load_classifier()
    if layers is not None and (not isinstance(layers, (list, tuple)) or not layers):
        raise LayerError(f"layers is {shorten(layers)}, expected a list of at least one dotted name, or None.")
    found = list(dict.fromkeys(find_layer(classifier.model, layer).name for layer in layers or ()))
    methods = [classifier.default_method] if methods is None and classifier.task == "classification" else methods
    maps: Any = methods
    attributions: list[AttributionMethod] = []
    if isinstance(methods, (list, tuple)):
        named = [ATTRIBUTIONS.get(each, each) if isinstance(each, str) else each for each in methods]
        attributions = list(dict.fromkeys(each for each in named if isinstance(each, AttributionMethod)))
        maps = [each for each in named if not isinstance(each, AttributionMethod)]
    chosen = find_methods(maps) if methods is not None and (maps or not attributions) else []
    of_pictures: dict[str, Any] = {"layers": found, "attributions": attributions}
    request = Request.of(chosen, _to_target(classifier, target), options, "explain_files", **of_pictures)
    size = choose_batch_size(classifier) if batch_size == "auto" else batch_size
    threads = count_cores() if workers is None else workers
    stages = open_pixels(pixels, classifier, request)
    return compute_items(
        classifier,
        partial(find, classifier, request),
        list_inputs(inputs).items,
        finish=_to_result,
        batch_size=check_count(size, "batch_size", "a number of pictures to explain at once, 1 or more."),
        workers=check_count(threads, "workers", "a number of threads, 1 or more."),
        pixels=stages,
    )


def _to_result(fetched: Fetched, found: PictureResult | GradcamError) -> FileResult:
    name, path = fetched.item.name, fetched.item.content.path
    if isinstance(found, GradcamError):
        return FileResult(name, path, found)
    return FileResult(name, path, None, found.maps, found.attributions, found.predictions, found.note)


def _to_target(classifier: Classifier, target: Any) -> Any:
    """The target with one row of classes, which is every picture's. Raises `TargetError` for what the model has not."""
    if classifier.task != "classification" or is_function(target) or isinstance(target, Target):
        return target
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
