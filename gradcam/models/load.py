"""Load a model by name, with its preprocessing, as a `Classifier` or a model for another task."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradcam.adapters import find_main_family
from gradcam.adapters.base import DetectorAdapter, Family, name_classes
from gradcam.adapters.segmentation import find_pixel_logits as find_maps
from gradcam.errors import ModelError, shorten, warn
from gradcam.fit import parse_fit
from gradcam.hooks.containers import list_tensors
from gradcam.layers.find import find_layer, refuse_foreign_models, unwrap
from gradcam.layers.model_names import MODELING
from gradcam.models import device as placing
from gradcam.models.adjust import UNADJUSTED, Adjustment, adjust, to_adjustment
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_device, first_channels
from gradcam.models.fits import check_sizes, find_step, get_steps
from gradcam.models.labels import check_labels, fit_labels
from gradcam.models.preprocess import ASSUMED_GREY, Preprocess, Preprocessing, WholeImage, read_image_file, to_reader
from gradcam.models.probe import choose_activation, find_defaults, make_noise, run
from gradcam.models.providers import DEFAULT_MODEL, load_parts
from gradcam.models.providers.base import Parts
from gradcam.models.providers.custom import to_parts
from gradcam.models.task_models import TASK_MODELS, Detector, Matcher, Segmenter, TaskModel, require_family
from gradcam.options import ACTIVATIONS, TASKS, check_choice, check_number
from gradcam.plugins import import_object
from gradcam.targets.heads import ends_in_features, find_output_module

CLIP_METHODS = ("encode_image", "encode_text")  # methods in the interface of OpenAI's CLIP
USE_A_FUNCTION = "use gradcam.explain(model, images, target=...) with a function from the output to scores per image."
OTHER_TASK = rf"{MODELING}\w+?For(?!\w*Classification)(\w+)"  # classes in transformers for other tasks
OTHER_MAPS = re.compile("pose|keypoint|heatmap|landmark|depth(?!wise)")  # in names of models that do not return masks
KEYPOINT_COUNTS = (16, 17, 68, 98, 133)  # in MPII, COCO, 300-W, WFLW and COCO-WholeBody
SHORTER_SIDE_PIXELS = 520  # as in torchvision's segmenters


def load_classifier(
    name: str | nn.Module = DEFAULT_MODEL,
    *,
    weights: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | str | os.PathLike[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    size: int | tuple[int, ...] | None = None,
    crop: float | None = None,
    activation: str = "auto",
    reader: Callable[[Any], Any] | str | None = None,
    layer: str | None = None,
    device: str = "auto",
    precision: str = "fp32",
    fit: str = "crop",
    predictions: str = "own",
) -> Classifier:
    """Load a classifier with its preprocessing and its labels, to explain images from files.

    The default is the small ImageNet classifier that is included in the package, and needs no download.
    The classifier's `notes` list the assumptions about the model.

    Parameters
    ----------
    name : str or nn.Module, default "efficientnet_lite0"
        A model's name, or your own module. Names are "resnet50" or "resnet50:IMAGENET1K_V1" for torchvision, and
        "timm:NAME" or "hf:NAME" for models from the hub or a folder. For your own function, give "file.py:function",
        "package.module:function" or the entry point of an installed package (group `gradcam.models`). The function is
        called without arguments. `gradcam models` lists all names. Your own module is not moved, not frozen and not
        switched to evaluation mode, so that you can explain it between two training steps.
    weights : str or path, default None
        A checkpoint (safetensors, or written by `torch.save`) that replaces the model's default weights. If `name` is
        your own module, the checkpoint is loaded into this module. For torchvision, timm and Hugging Face, the
        checkpoint also determines the number of classes. Official checkpoints of torchvision and timm are recognised by
        hash or name, and get the preprocessing of their training; `notes` report this. You can also pass the name of
        official weights: "IMAGENET1K_V1".
    labels : sequence of str, or path, default None
        The class names, or the path of a file: one name per line, CSV, or JSON. None uses the model's labels.
    mean : float or sequence of float, default None
        The mean per channel, for values in [0,1]. A single number means greyscale images. None uses the mean in the
        model's settings, which models of timm, open_clip and transformers have. If the settings have no mean,
        ImageNet's mean is used, with a warning.
    std : float or sequence of float, default None
        The standard deviation per channel, in the same form as `mean`.
    size : int or (int, int), default None
        The input size in pixels. With one number, the model sees a square crop from the centre of the image. With
        (height, width), the whole image is stretched to that size. None uses the size
        in the model's settings, or else 224.
    crop : float, default None
        The fraction of the resized image that the centre crop keeps, in (0,1]. None uses the fraction in the model's
        settings, or else 0.875.
    activation : str, default "auto"
        How logits become probabilities: "softmax", "sigmoid" (multi-label), "none" (the outputs are probabilities, or a
        single value), "applied" (the output is a single probability), or "auto". "auto" uses the model's known
        activation. If the activation is unknown, "auto" uses sigmoid for a single logit and softmax for several.
    reader : callable or str, default None
        A function from a path to an array, or to an array and the image to draw on. You can also pass the function's
        name, "module:function". None reads the formats of `gradcam.read_image`, and DICOM.
    layer : str, default None
        The default target layer. None uses the last layer that has a spatial grid and that affects the score.
    device : str, default "auto"
        "auto", "cpu", "cuda", "cuda:N" or "mps". A model that is spread over several devices keeps its devices.
    precision : str, default "fp32"
        The precision of the model: "fp32", "bf16" or "fp16". Batch norms, probabilities and maps always use float32.
        bf16 is faster than fp32 if the CPU or GPU has instructions for it, and slower otherwise.
    fit : str, default "crop"
        Which part of the image the model sees. "crop" is the model's default preprocessing, usually a centre crop.
        "whole" is the whole image in its own aspect ratio, at the scale of "crop". "whole" works for networks that
        take any size, and for transformers whose position embeddings can be interpolated. "tiles" is for small objects
        in large images. "tiles" splits the image into overlapping windows of the model's input size. "tiles:512" uses
        windows of 512 pixels. Evaluation and inspection always use "crop".
    predictions : str, default "own"
        The part of the image that the predictions are computed from. "own" is the model's default crop, and "seen" is
        the part that is explained. With tiles, "seen" averages the logits of all windows. By default, the most probable
        class of these predictions is explained.

    Returns
    -------
    Classifier
        Its methods `explain`, `compare` and `attribute` take images.

    Raises
    ------
    ModelError
        If the model, weights, labels, preprocessing, activation, reader, device or precision is unknown, missing or
        invalid.
    LayerError
        If the layer is unknown.
    GradcamError
        If `fit` or `predictions` is unknown.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> classifier.explain("photo.jpg").label()
    'Egyptian cat'

    Your own model:

    >>> import torchvision
    >>> model = torchvision.models.resnet18(weights=None, num_classes=3)
    >>> classifier = gradcam.load_classifier(model, labels=["nothing", "coffee", "tea"])
    >>> classifier.explain("photo.jpg", target="coffee").caption()
    'coffee (1), ... %, by gradcam at layer4'
    """
    changes = (mean, std, size, crop)
    options = _Options(weights, labels, changes, activation, reader, layer, device, precision, fit, predictions)
    parts = options.load(name, task="classification")
    if (task := _find_known_task(parts)) not in (None, "classification"):
        advice = "use gradcam.load_model()." if task in TASKS else USE_A_FUNCTION
        raise ModelError(f"{name_model(name)} is a model for {task}, not a classifier: {advice}")
    return _make_classifier(name, options, parts)


def load_model(
    name: str | nn.Module = DEFAULT_MODEL,
    *,
    task: str = "auto",
    prompts: Sequence[str] = (),
    threshold: float | None = None,
    processor: Any = None,
    weights: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | str | os.PathLike[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    size: int | tuple[int, ...] | None = None,
    crop: float | None = None,
    activation: str = "auto",
    reader: Callable[[Any], Any] | str | None = None,
    layer: str | None = None,
    device: str = "auto",
    precision: str = "fp32",
    fit: str = "crop",
    predictions: str = "own",
) -> Classifier:
    """Load a model for any task (classification, detection and so on), with its preprocessing and its labels.

    Parameters
    ----------
    name : str or nn.Module, default "efficientnet_lite0"
        As in `load_classifier`. The name may also be a torchvision detector or segmenter, "hf:NAME" for any task,
        "open_clip:NAME", "smp:FOLDER" or "yolo:FILE.pt".
    task : str, default "auto"
        "classification", "regression", "detection", "segmentation", "matching" (comparing images with sentences or with
        reference images), "captioning" or "pose". "auto" determines the task from the model.
    prompts : sequence of str, default ()
        Text prompts for a detector that takes them, one per class. For a vision-language model, one default prompt.
    threshold : float, default None
        The minimum score of the boxes that a detector returns. None uses the model's threshold.
    processor : Any, default None
        The processor of a vision-language model or captioner, such as ``transformers.AutoProcessor.from_pretrained(name)``.
        None reads the processor from the model's folder.
    weights : str or path, default None
        This parameter and all parameters below are as in `load_classifier`.
    labels : sequence of str, or path, default None
        The class names.
    mean : float or sequence of float, default None
        The mean per channel.
    std : float or sequence of float, default None
        The standard deviation per channel.
    size : int or (int, int), default None
        The input size. For models that take the whole image, give the length of the image's shorter side.
    crop : float, default None
        Only for classifiers.
    activation : str, default "auto"
        Only for classifiers.
    reader : callable or str, default None
        A function that reads an image.
    layer : str, default None
        The default target layer.
    device : str, default "auto"
        The device of the model.
    precision : str, default "fp32"
        The precision of the model.
    fit : str, default "crop"
        Only for classifiers.
    predictions : str, default "own"
        Only for classifiers.

    Returns
    -------
    Classifier
        A `Classifier`, or one of its subclasses `Detector`, `Segmenter`, `Matcher`, `Captioner` and `PoseFinder`.

    Raises
    ------
    GradcamError
        As in `load_classifier`. Also if the task is unknown, or cannot be determined from the model.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    >>> gradcam.load_model(model).task
    'detection'
    """
    if task != "auto":
        check_choice(task, "task", TASKS, ModelError)
    if are_values := task == "regression":
        task, activation = "classification", "none" if activation == "auto" else activation
    changes = (mean, std, size, crop)
    options = _Options(weights, labels, changes, activation, reader, layer, device, precision, fit, predictions)
    parts = options.load(name, task=None if task == "auto" else task, prompts=prompts)
    task = _find_task(parts, options) if task == "auto" else task
    if processor is not None and task != "captioning":
        problem = f"A processor is for captioning models, but {name_model(name)} is for {task}"
        raise ModelError(f"{problem}: leave processor= out.")
    if prompts and not parts.inputs and task not in ("matching", "captioning"):
        raise ModelError(f"{name_model(name)} is a model for {task} and takes no text prompts: leave out the prompts.")
    if task not in TASKS:
        raise ModelError(f"{name_model(name)} is a model for {task}, which is not supported: {USE_A_FUNCTION}")
    if task == "classification":
        model = _make_classifier(name, options, parts)
        names = model.labels or [f"output {index}" for index in range(model.classes)]
        return replace(model, labels=names) if are_values else model
    if task == "captioning":
        return _make_captioner(name, options, parts, prompts, processor)
    return _make_task_model(name, options, parts, task, threshold)


def load_detector(name: str | nn.Module, **options: Any) -> Detector:
    """Load a detector with its preprocessing and its labels.

    Parameters
    ----------
    name : str or nn.Module
        As in `load_model`.
    **options : Any
        The options of `load_model`, except `task`.

    Returns
    -------
    Detector
        Its methods `explain` and `compare` take images.

    Raises
    ------
    GradcamError
        As in `load_model`.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    >>> gradcam.load_detector(model, threshold=0.0).explain("photo.jpg").instances[0][0].kind
    'box'
    """
    return cast("Detector", load_model(name, task="detection", **options))


def load_segmenter(name: str | nn.Module, **options: Any) -> Segmenter:
    """Load a semantic segmentation model with its preprocessing and its labels.

    Parameters
    ----------
    name : str or nn.Module
        As in `load_model`.
    **options : Any
        The options of `load_model`, except `task`.

    Returns
    -------
    Segmenter
        Its methods `explain` and `compare` take images.

    Raises
    ------
    GradcamError
        As in `load_model`.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    >>> gradcam.load_segmenter(model).explain("photo.jpg").instances[0][0].kind
    'mask'
    """
    return cast("Segmenter", load_model(name, task="segmentation", **options))


def load_matcher(name: str | nn.Module, **options: Any) -> Matcher:
    """Load a model that compares images with sentences or with reference images.

    Parameters
    ----------
    name : str or nn.Module
        As in `load_model`. If `name` is a timm classifier, its features are compared.
    **options : Any
        The options of `load_model`, except `task`.

    Returns
    -------
    Matcher
        Its methods `explain` and `compare` take images.

    Raises
    ------
    GradcamError
        As in `load_model`.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None)
    >>> model.fc = torch.nn.Identity()
    >>> explanation = gradcam.load_matcher(model).explain("photo.jpg", target=gradcam.targets.Like("photo.jpg"))
    >>> round(explanation.scores.item(), 3)
    1.0
    """
    return cast("Matcher", load_model(name, task="matching", **options))


@dataclass(frozen=True)
class _Options:
    """The user's options for loading a model, validated before anything is loaded."""

    weights: Any
    labels: Any
    sizes: tuple[Any, ...]
    activation: Any
    reader: Any
    layer: str | None
    device: str
    precision: str
    fit: str
    predictions: str

    def load(self, name: str | nn.Module, task: str | None = None, prompts: Sequence[str] = ()) -> Parts:
        self.check()
        with torch.random.fork_rng(devices=()):  # Building a model changes the random state.
            return _find_parts(name, self, task, prompts)

    def check(self) -> None:
        if self.precision != "fp32":
            placing.find_precision(self.precision)
        if self.fit != "crop":
            parse_fit(self.fit)
        if self.device != "auto":  # "auto" needs no check: it always finds a device.
            placing.find_device(self.device)
        if not isinstance(self.weights, (str, os.PathLike, type(None))):
            raise ModelError(f"The weights are {shorten(self.weights)}, expected the path of a checkpoint.")
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            activations = ", ".join(ACTIVATIONS)
            raise ModelError(f"There is no activation {shorten(self.activation)}: choose one of {activations}.")
        _ = self.names, self.edits, self.reader_function

    @cached_property
    def names(self) -> list[str] | None:
        return None if self.labels is None else check_labels(self.labels)

    @cached_property
    def edits(self) -> Adjustment:
        return to_adjustment(*self.sizes) if any(size is not None for size in self.sizes) else UNADJUSTED

    @cached_property
    def reader_function(self) -> Callable[[Any], Any]:
        if self.reader is None:
            return read_image_file
        return to_reader(import_object(self.reader) if isinstance(self.reader, str) else self.reader)


def name_model(name: str | nn.Module) -> str:
    """Return the display name of a model: the name that the user gave, or the name of the model's class."""
    return name if isinstance(name, str) else type(name).__name__


def _make_classifier(name: str | nn.Module, options: _Options, parts: Parts) -> Classifier:
    display_name, is_complete = name_model(name), options.edits is UNADJUSTED and not parts.is_assumed
    preprocess, assumed = (parts.preprocess, ()) if is_complete else adjust(parts, options.edits)
    try:
        findings, layer, positive = find_defaults(parts, preprocess, options.layer)
    except ModelError:
        if (grey := _to_grey(parts, options)) is None:
            raise
        return _make_classifier(name, options, grey)
    activation, guesses = choose_activation(options.activation, parts.activation, findings)
    classes = 2 if findings.logits == 1 and activation in ("sigmoid", "applied") else findings.logits
    labels = options.names or parts.labels or (["output"] if classes == 1 and activation == "none" else None)
    labels = None if labels is None else fit_labels(labels, findings.logits, classes)
    required = display_name, parts.model, preprocess, classes, labels, layer
    fields: dict[str, Any] = {"layer_for_positive": positive, "activation": activation, "fit": options.fit}
    fields |= {"reader": options.reader_function, "predictions": options.predictions}
    classifier = Classifier(*required, notes=(*parts.notes, *assumed, *guesses), **fields)
    if isinstance(name, nn.Module):
        _warn_of_assumptions([*assumed, *(guesses if findings.logits == 1 else ())])
    if options.fit == "whole":
        check_sizes(parts.model, make_noise(get_steps(preprocess), parts.model), find_step(parts.model))
    return classifier


def _warn_of_assumptions(notes: Sequence[str]) -> None:
    """Warn of assumptions about a model object. For models loaded by name, the command line prints the notes."""
    for note in notes:
        if note.startswith("Assumed"):
            warn(note)


def _find_known_task(parts: Parts) -> str | None:
    """Return the task of a model, from its provider, family, class or methods; None if it is unknown."""
    if parts.task is not None:
        return parts.task
    model = unwrap(parts.model)
    if (family := find_main_family(model)) is not None:
        return family.task
    if match := re.fullmatch(OTHER_TASK, f"{type(model).__module__}.{type(model).__name__}"):
        return re.sub("(?<!^)(?=[A-Z])", " ", match[1]).lower()
    return "matching" if all(callable(getattr(model, name, None)) for name in CLIP_METHODS) else None


def _find_task(parts: Parts, options: _Options) -> str:
    """Return a model's known task, or the task that its output suggests; raise `ModelError` if neither is certain."""
    if (task := _find_known_task(parts)) is not None:
        return task
    if parts.classes is not None or parts.labels is not None:
        return "classification"
    model, images = unwrap(parts.model), make_noise(adjust(parts, options.edits)[0], parts.model)
    try:
        output = run(parts.model, images)
    except ModelError:
        if (grey := _to_grey(parts, options)) is None:
            raise
        return _find_task(grey, options)
    maps = find_maps(output)
    if not isinstance(maps, Tensor) or maps.ndim != 4 or max(maps.shape[2:]) == 1:
        return "classification"
    names = [type(model).__name__, *(name for name, _ in model.named_children())]
    is_heatmap = maps.shape[1] in KEYPOINT_COUNTS and maps.shape[2] < images.shape[2]
    is_pyramid = isinstance(output, list) and len({tensor.shape[1:2] for tensor in list_tensors(output)}) > 1
    is_features = (end := find_output_module(model)) is not model and ends_in_features(end)
    if is_heatmap or is_pyramid or is_features or any(OTHER_MAPS.search(name.lower()) for name in names):
        output_form = f"{tuple(maps.shape)}, which may be keypoint heatmaps, depth or features"
        advice = f"Give --task segmentation or --task pose (task= in Python). For other tasks, {USE_A_FUNCTION}"
        raise ModelError(f"{type(model).__name__} returns {output_form}. {advice}")
    return "segmentation"


def _to_grey(parts: Parts, options: _Options) -> Parts | None:
    """Return the parts with greyscale preprocessing; None if the model takes colours, or its preprocessing is known."""
    unset = parts.is_assumed and parts.preprocess is not ASSUMED_GREY and not (options.edits.mean or options.edits.std)
    return replace(parts, preprocess=ASSUMED_GREY) if unset and first_channels(parts.model) == 1 else None


def _make_task_model(name: Any, options: _Options, parts: Parts, task: str, threshold: float | None) -> TaskModel:
    family = require_family(parts.model, task)
    if threshold is not None and family is not None:
        check_number(threshold, "threshold", "the lowest score of a box, from 0 to 1.", most=1, error=ModelError)
        family.set_threshold(threshold)
    preprocess, notes = _use_whole(parts, family, task, options)
    if isinstance(name, nn.Module):
        _warn_of_assumptions(notes if options.edits else [*parts.notes, *notes])
    default = None if family is None else family.layer
    layer = default if options.layer is None else find_layer(unwrap(parts.model), options.layer).name
    labels = options.names or parts.labels or (None if family is None else family.labels)
    if options.names and task in ("detection", "segmentation"):
        labels, label_notes = _fit_task_labels(options.names, parts.model, family, preprocess)
        notes = [*notes, *label_notes]
    if labels is not None:
        name_classes(unwrap(parts.model) if family is None else family.model, labels)
    inputs = {key: value.to(find_input_device(parts.model)) for key, value in parts.inputs.items()}
    required = name_model(name), parts.model, preprocess, len(labels or ()), labels, layer or ""
    fields: dict[str, Any] = {"family": family, "is_chosen": options.layer is not None, "inputs": inputs}
    return TASK_MODELS[task](*required, reader=options.reader_function, notes=(*parts.notes, *notes), **fields)


def _make_captioner(name: Any, options: _Options, parts: Parts, prompts: Sequence[str], processor: Any) -> TaskModel:
    """Return a captioner. Vision-language models need their own processor, and other captioners only for a prompt."""
    from gradcam.models.providers import huggingface

    family: Any = require_family(parts.model, "captioning")
    kind, folder = type(family.model).__name__, str(getattr(family.model, "name_or_path", ""))
    if len(prompts) > 1 or (prompts and family.plain_prompt is None):
        number = "no prompt" if family.plain_prompt is None else "one prompt"
        raise ModelError(f"{kind} takes {number}, but {len(prompts)} were given.")
    prompt = next(iter([*prompts, *(family.usual_prompts or ())]), None)
    with contextlib.nullcontext() if prompt or processor else contextlib.suppress(ModelError):
        processor = huggingface.load_processor(folder, processor)
    if family.takes_pieces:
        if options.edits:
            raise ModelError(f"{kind}'s own processor prepares the images: leave out size, crop, mean and std.")
        parts = replace(parts, preprocess=huggingface.make_prompt_preprocess(processor), is_assumed=False)
    model: Any = _make_task_model(name, options, parts, "captioning", None)
    model.family.processor = processor
    return cast("TaskModel", replace(model, prompt=prompt))


def _fit_task_labels(labels: Sequence[str], model: nn.Module, family: Family | None, preprocess: Preprocess) -> Any:
    """Return labels for all classes of a detector or segmenter; if a background label is added, also a note."""
    count = None if family is None else family.class_count
    if count is None and not isinstance(family, DetectorAdapter):
        maps = find_maps(run(model, make_noise(preprocess, model)))
        count = maps.shape[1] if isinstance(maps, Tensor) and maps.ndim == 4 else None
    if count is None:
        return labels, ()
    is_named = any(label.casefold().strip("_") == "background" for label in labels)
    if is_named or len(labels) != count - 1 or count == 1 or (family is not None and family.own_labels):
        return fit_labels(labels, count, max(2, count)), ()
    note = f"There are {len(labels)} labels for {count} classes: assuming class 0 is background and class 1 is {labels[0]}."
    return ["background", *labels], [note]


def _use_whole(parts: Parts, family: Family | None, task: str, options: _Options) -> tuple[Preprocess, Sequence[str]]:
    """Return preprocessing and notes. By default, detectors, segmenters and pose models see the whole image."""
    adjustment, default, notes = options.edits, parts.preprocess, list[str]()
    is_default = (parts.is_assumed or parts.is_of_part) and task in ("detection", "segmentation", "pose")
    if is_default and isinstance(default, Preprocessing):
        is_scaled = family is not None and family.has_own_scale
        default = default if _to_grey(parts, options) is None else ASSUMED_GREY
        scaled = WholeImage(SHORTER_SIDE_PIXELS, None, default.mean, default.std, default.interpolation)
        preprocess = WholeImage() if is_scaled else scaled
        parts = replace(parts, preprocess=preprocess)
        if not is_scaled and not (adjustment.size and adjustment.mean and adjustment.std):
            kind = "greyscale image" if len(preprocess.mean) == 1 else "image"
            statistics = ", ImageNet's mean and std" if parts.is_assumed else ""
            assumption = f"the whole {kind} with a shorter side of {SHORTER_SIDE_PIXELS} pixels{statistics}"
            notes = [f"Assumed {assumption}. Override with --size, --mean, --std (size=, ... in Python)."]
    if not isinstance(parts.preprocess, WholeImage):
        return adjust(parts, adjustment)
    if isinstance(adjustment.size, tuple) or adjustment.crop is not None:
        advice = "give size as one number, the length of the shorter side in pixels, and no crop."
        raise ModelError(f"The model takes the whole image in its own aspect ratio: {advice}")
    preprocess = parts.preprocess
    mean, std = adjustment.mean or preprocess.mean, adjustment.std or preprocess.std
    return replace(preprocess, side=adjustment.size or preprocess.side, mean=mean, std=std), notes


def _find_parts(name: str | nn.Module, options: _Options, task: str | None, prompts: Sequence[str]) -> Parts:
    weights = None if options.weights is None else Path(options.weights)
    if not isinstance(name, str):
        refuse_foreign_models(name)
    if not isinstance(name, nn.Module):
        parts = load_parts(name, weights, task, prompts)
        unwrap(parts.model)
        placing.place_model(parts.model, options.device, options.precision)
        return parts
    unwrap(name)
    if options.device != "auto" or options.precision != "fp32":
        advice = "move the model yourself, and leave the device at 'auto' and the precision at 'fp32'."
        raise ModelError(f"A model object keeps its device and precision: {advice}")
    return to_parts(name, weights)
