"""Explain many images from Python, as a stream of results."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from gradcam.attributions.table import ATTRIBUTIONS, AttributionMethod
from gradcam.batch.device import open_device_pixels
from gradcam.batch.image_results import ExplainedImage, ExplainRequest, explain_batch
from gradcam.batch.pipeline import compute_items
from gradcam.batch.pool import choose_batch_size
from gradcam.batch.read_items import HashedItem
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.errors import GradcamError, LayerError, ModelError, TargetError, format_fields, shorten
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier
from gradcam.models.load import load_classifier
from gradcam.models.results import ImageAttribution, ImageExplanation
from gradcam.options import ExplainOptions, check_count, count_cores
from gradcam.sources.collect import Inputs, list_inputs
from gradcam.storage.records import Prediction
from gradcam.targets.base import Target
from gradcam.targets.classes import ClassTarget, check_classes, is_function


@dataclass(frozen=True, eq=False)
class FileResult:
    """The result of one image: an error, or explanations with a batch size N of 1.

    `name` is relative to the input's root, with "/" between folders. An image that is not given by a path, such as an
    array, has a name like `inputs[3]`. `path` is None for such an image, and for images in archives and object stores.
    The keys of `explanations` are (layer, method). `predictions` are the most probable classes, or the detections.
    `note` is a remark on how the image was read or is displayed.
    """

    name: str
    path: Path | None
    error: GradcamError | None = None
    explanations: Mapping[tuple[str, str], ImageExplanation] = field(default_factory=dict, repr=False)
    attributions: Sequence[ImageAttribution] = field(default=(), repr=False)
    predictions: Sequence[Prediction] = field(default=(), repr=False)
    note: str | None = None

    __repr__ = format_fields


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
    """Explain many images. Yield one result per image, in input order, as soon as the result is computed.

    Only a few batches are in memory at a time. The model runs in the thread that iterates over the results. To stop
    early, close the generator. An image that cannot be explained yields a result with its error, and the run continues.
    If an object store does not answer, its images are read last, and the store gets a minute to recover.

    Parameters
    ----------
    inputs : path, URL or image, or several
        Files, folders, globs, lists and archives, by path or URL ("s3://bucket/photos/"). Arrays, tensors, PIL images,
        bytes and open files are accepted as well, as in `gradcam.read_image`.
    classifier : Classifier, default None
        None uses the included model. Models that are not classifiers, such as the detectors of `gradcam.load_model`,
        are accepted as well.
    layers : list of str, default None
        Dotted names of target layers. None uses the default layer of each method.
    methods : list of str, Method or AttributionMethod, default None
        Keys of `gradcam.METHODS` and of `gradcam.attributions.ATTRIBUTIONS`, or method objects, such as
        ``gradcam.METHODS["rise"].using(masks=2000)``. None uses "gradcam", or the default method of the model's task.
    target : Any, default None
        The target of every image. If an input list gives a class for an image, that class replaces this target.
        Classifiers accept one or several classes by index or label, or a `ClassTarget` with at most one row of classes.
        Other models accept a target of `gradcam.targets`, such as a box, a mask or a sentence. All models accept a
        function that maps the model's output to scores (N,) or (N,K). None explains the top class of each image, or the
        default target of the model's task, such as the highest-scoring box.
    batch_size : int or "auto", default "auto"
        The number of images per batch. "auto" chooses the number for the device. If the device runs out of memory, the
        number is halved.
    workers : int, default None
        The number of threads that read images. None uses one thread per core.
    pixels : str, default "auto"
        Where images are decoded and resized: "cpu", "device" (the model's device) or "auto". "auto" uses the CPU.
        "device" is experimental. With "device", the CPU decodes the images that the device cannot decode.
    **options : Any
        The options of `explain`.

    Yields
    ------
    FileResult
        `name` is the image's name, relative to the input's root. `path` is None for images in archives and stores, and
        for images that are not given by path, such as arrays. `error` is None if the image was explained.
        `explanations` is a dict by layer name and method name. `attributions` are the results of attribution methods.
        `predictions` are the most probable classes, or the model's detections. `note` is a remark on how the image was
        read or is displayed.

    Raises
    ------
    GradcamError
        If an argument is unknown or invalid. This error is raised at the call, before any image is read.
    DeviceError
        If `pixels` is "device" and the device cannot process images: this error is raised at the call. Also if a GPU is
        lost during the run.
    InputError
        If the inputs cannot be listed. This error is raised at the call.
    StoreError
        If an object store does not answer while its files are listed. This error is raised at the call.

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
            f"classifier is {shorten(classifier)}, expected a model from gradcam.load_classifier or gradcam.load_model."
        )
    classifier = classifier or load_classifier()
    if layers is not None and (not isinstance(layers, (list, tuple)) or not layers):
        raise LayerError(f"layers is {shorten(layers)}, expected a list of at least one dotted name, or None.")
    layer_names = list(dict.fromkeys(find_layer(classifier.model, layer).name for layer in layers or ()))
    methods = [classifier.default_method] if methods is None and classifier.task == "classification" else methods
    maps: Any = methods
    attributions: list[AttributionMethod] = []
    if isinstance(methods, (list, tuple)):
        method_objects = [ATTRIBUTIONS.get(method, method) if isinstance(method, str) else method for method in methods]
        attributions = list(dict.fromkeys(method for method in method_objects if isinstance(method, AttributionMethod)))
        maps = [method for method in method_objects if not isinstance(method, AttributionMethod)]
    map_methods = find_methods(maps) if methods is not None and (maps or not attributions) else []
    extra: dict[str, Any] = {"layers": layer_names, "attributions": attributions}
    request = ExplainRequest.of(map_methods, _to_target(classifier, target), options, "explain_files", **extra)
    size = choose_batch_size(classifier) if batch_size == "auto" else batch_size
    thread_count = count_cores() if workers is None else workers
    settings: dict[str, Any] = {"pixels": open_device_pixels(pixels, classifier, request), "finish": _to_result}
    items, run = list_inputs(inputs).items, partial(explain_batch, classifier, request)
    settings["batch_size"] = check_count(size, "batch_size", "a number of images, 1 or more.")
    settings["workers"] = check_count(thread_count, "workers", "a number of threads, 1 or more.")
    return compute_items(classifier, run, items, **settings)


def _to_result(fetched: HashedItem, result: ExplainedImage | GradcamError) -> FileResult:
    name, path = fetched.item.name, fetched.item.content.path
    if isinstance(result, GradcamError):
        return FileResult(name, path, result)
    return FileResult(name, path, None, result.maps, result.attributions, result.predictions, result.note)


def _to_target(classifier: Classifier, target: Any) -> Any:
    """Return the target with class indices instead of labels.

    The target of a classifier has at most one row of classes, for all images. Raises `TargetError` for unknown classes.
    """
    if classifier.task != "classification" or is_function(target) or isinstance(target, Target):
        return target
    class_target = target if isinstance(target, ClassTarget) else ClassTarget(target)
    top, count = class_target.top, classifier.classes
    if top > count:
        raise TargetError(f"The top {top} classes were requested, but this model has {count}.")
    if class_target.classes is None:
        return class_target
    classes = class_target.classes.tolist() if hasattr(class_target.classes, "tolist") else class_target.classes
    row = list(classes) if isinstance(classes, (list, tuple)) else [classes]
    if len(row) == 1 and isinstance(row[0], (list, tuple)):
        row = list(row[0])
    indices = [classifier.find_class(class_) if isinstance(class_, str) else class_ for class_ in row]
    return replace(class_target, classes=check_classes([indices], 1, count).tolist())
