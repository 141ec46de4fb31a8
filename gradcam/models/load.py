"""From a name and what a person says of it, the preprocessing included, to a `Classifier`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.explain import explain
from gradcam.cam.suggest import find_suggestion
from gradcam.errors import ModelError, TargetError, shorten
from gradcam.hooks.nested import first_floating, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, refuse_other_kinds, unwrap
from gradcam.layers.layout import takes_volumes
from gradcam.models import device as placing
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_device, find_input_dtype, first_channels
from gradcam.models.fits import check_sizes, find_step, get_steps
from gradcam.models.labels import check_labels, fit_labels
from gradcam.models.preprocess import ASSUMED_GREY, Preprocess, Preprocessing, read_picture, to_reader
from gradcam.models.providers import DEFAULT, load_parts
from gradcam.models.providers.base import Parts
from gradcam.models.providers.own import to_parts
from gradcam.options import ACTIVATIONS, to_fit
from gradcam.plugins import find_function
from gradcam.targets.classes import find_logits

VOLUMES = (
    "The model takes volumes or clips (N,C,D,H,W), which a picture is not, nor what a reader gives: explain one in "
    "Python, gradcam.explain(model, volume). `gradcam layers` and `gradcam inspect trace` take it as it is."
)
SIDE = 224  # of the picture, for preprocessing that says nothing of sizes
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}

# What the last operation of a model says of its output, by the name that autograd has for it.
LAST = {"Softmax": "none", "Sigmoid": "none", "LogSoftmax": "softmax"}
# Operations that leave values as they are.
RESHAPING = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Select", "Slice")


def load_classifier(
    name: str | nn.Module = DEFAULT,
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
    """Load a model with its preprocessing and its labels, to explain pictures from files.

    Without arguments it is the small ImageNet classifier that comes with the package and needs no download. What was
    assumed of a model is in the classifier's `notes`.

    Parameters
    ----------
    name : str or nn.Module, default "efficientnet_lite0"
        One of torchvision's classification models, with its weights or without ("resnet50", "resnet50:IMAGENET1K_V1");
        "timm:NAME" or "hf:NAME", of the hub or a folder; "file.py:function", "package.module:function" or the entry
        point of an installed package (group `gradcam.models`), called without arguments; or a module of yours. `gradcam
        models` lists them. A module of yours is neither moved, frozen nor switched to evaluation mode, so that it can
        be explained between two steps of its training.
    weights : str or path, default None
        A checkpoint (safetensors, or what `torch.save` wrote) in place of the model's own; the number of classes is
        taken from it. It is loaded into a module of yours. A checkpoint that torchvision or timm published is known by
        its hash or its name, and pictures are prepared for it as in its training; `notes` say how. Or the name of some
        of the model's own weights: "IMAGENET1K_V1".
    labels : sequence of str, or path, default None
        The names of the classes, or a file of them: a line each, or JSON. None for the model's own.
    mean : float or sequence of float, default None
        One for each channel, of values in [0,1]; a single number is for grey pictures. None is the model's own; for a
        model of yours it is ImageNet's.
    std : float or sequence of float, default None
        The standard deviations, given as `mean` is.
    size : int or (int, int), default None
        What the network takes, in pixels: a number takes the centre of the picture, (height, width) all of it, whatever
        its aspect. None is the model's own; for a model of yours it is 224.
    crop : float, default None
        The share of the resized picture that is kept, in (0,1]. None is the model's own; for a model of yours it is
        0.875.
    activation : str, default "auto"
        How logits become probabilities: "softmax", "sigmoid", "none" (they are probabilities), or "auto": what the
        model is known to need, or else sigmoid for a single logit and softmax for several.
    reader : callable or str, default None
        A function from a path to an array, or to an array and the picture to draw on; or its name, "module:function".
        None reads what `gradcam.read_image` reads, and DICOM.
    layer : str, default None
        The layer that is explained where no other is named. None for the last layer with a grid that the score depends
        on.
    device : str, default "auto"
        "auto", "cpu", "cuda", "cuda:N" or "mps". A model that lies on several devices is left where it lies.
    precision : str, default "fp32"
        What the model computes with: "fp32", "bf16" or "fp16". Batch norms, probabilities and maps are float32 anyway.
        bf16 is faster than fp32 where the processor or GPU has instructions for it, and slower elsewhere.
    fit : str, default "crop"
        What of a picture is explained. "crop" is what the model's own preprocessing takes, mostly the centre. "whole"
        is all of it, in its own aspect, at the scale of that preprocessing; for networks that take any size, and for
        transformers whose positions can be interpolated. "tiles" is overlapping windows of as many pixels of the
        picture as the network takes, "tiles:512" of that many; for large pictures of small things. Evaluation and
        inspection keep to "crop".
    predictions : str, default "own"
        Where the classes come from, of which the most probable is explained: from the model's "own" preprocessing, or
        from what is "seen" (with tiles, the mean of the windows' logits).

    Returns
    -------
    Classifier
        With `explain`, `compare` and `attribute` for pictures.

    Raises
    ------
    ModelError
        For a model, weights, labels, preprocessing, activation, reader, device or precision that is unknown, missing or
        does not fit.
    LayerError
        For an unknown layer.
    GradcamError
        For an unknown `fit` or `predictions`.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> classifier.explain("photo.jpg").label()
    'Egyptian cat'

    A model of yours:

    >>> import torchvision
    >>> model = torchvision.models.resnet18(weights=None, num_classes=3)
    >>> classifier = gradcam.load_classifier(model, labels=["nothing", "coffee", "tea"])
    >>> classifier.explain("photo.jpg", target="coffee").caption()
    'coffee (1), ... %, by gradcam at layer4'
    """
    _check(weights, activation, device, precision, fit)
    names = None if labels is None else check_labels(labels)
    wish = to_adjustment(mean, std, size, crop)
    read = read_picture if reader is None else to_reader(find_function(reader) if isinstance(reader, str) else reader)
    with torch.random.fork_rng(devices=()):  # models are born with random weights
        parts = _find_parts(name, None if weights is None else Path(weights), device, precision)
    preprocess, assumed = adjust(parts, wish)
    try:
        findings, at, at_for_positive = _look(parts, preprocess, layer)
    except ModelError:
        if not parts.is_assumed or wish.mean or wish.std or first_channels(parts.model) != 1:
            raise
        parts = replace(parts, preprocess=ASSUMED_GREY)
        preprocess, assumed = adjust(parts, wish)
        findings, at, at_for_positive = _look(parts, preprocess, layer)
    chosen, guessed = _choose_activation(activation, parts.activation, findings)
    classes = 2 if findings.logits == 1 and chosen != "softmax" else findings.logits
    known = names or parts.labels
    known = None if known is None else fit_labels(known, findings.logits, classes)
    classifier = Classifier(
        name if isinstance(name, str) else type(name).__name__,
        parts.model,
        preprocess,
        classes,
        known,
        at,
        layer_for_positive=at_for_positive,
        activation=chosen,
        reader=read,
        notes=(*parts.notes, *assumed, *guessed),
        fit=fit,
        predictions=predictions,
    )
    if fit == "whole":
        check_sizes(parts.model, make_noise(get_steps(preprocess), parts.model), find_step(parts.model))
    return classifier


def _check(weights: Any, activation: Any, device: str, precision: str, fit: str) -> None:
    placing.find_precision(precision)
    if fit != "crop":
        to_fit(fit)
    if device != "auto":  # what lies on several devices needs none
        placing.find_device(device)
    if not isinstance(weights, (str, os.PathLike, type(None))):
        raise ModelError(f"The weights are {shorten(weights)}, expected the path of a checkpoint.")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ModelError(f"There is no activation {shorten(activation)}: choose one of {', '.join(ACTIVATIONS)}.")


def _find_parts(name: str | nn.Module, weights: Path | None, device: str, precision: str) -> Parts:
    refuse_other_kinds(name)
    if not isinstance(name, nn.Module):
        parts = load_parts(name, weights)
        unwrap(parts.model)
        placing.place(parts.model, device, precision)
        return parts
    unwrap(name)
    if device != "auto" or precision != "fp32":
        raise ModelError(
            "A module of yours is explained where it lies and as precisely as it is: move it yourself, and leave the device "
            "at 'auto' and the precision at 'fp32'."
        )
    return to_parts(name, weights)


@dataclass(frozen=True)
class Findings:
    """What a model made of one picture."""

    logits: int  # how many
    activation: str | None  # how they become probabilities, where that is certain
    in_unit_interval: bool  # whether all of them are


def _look(parts: Parts, preprocess: Preprocess, wanted: str | None) -> tuple[Findings, str, str | None]:
    """What the model makes of a picture, and its layers; without running it where all is known."""
    named = None if wanted is None else find_layer(unwrap(parts.model), wanted).name
    layer, positive = (named, None) if named is not None else (parts.layer, parts.layer_for_positive)
    if parts.classes is not None and layer is not None and preprocess is parts.preprocess:
        return Findings(parts.classes, None, False), layer, positive
    images = make_noise(preprocess, parts.model)
    findings = _probe(parts.model, images)
    if layer is None:
        found = find_suggestion(unwrap(parts.model), to_batch(images))
        layer, positive = found.layers[0], found.behind_activation
        positive = None if positive == layer else positive
        # That of `gradcam.explain`, but for a head that is all zeros, say: what is explained later may be something else.
        with contextlib.suppress(Exception):
            layer = explain(parts.model, images).layer
    return findings, str(layer), positive


def _choose_activation(asked: str, known: str | None, findings: Findings) -> tuple[str, Sequence[str]]:
    if asked != "auto":
        if asked == "softmax" and findings.logits == 1:
            raise ModelError("The model has a single logit, whose softmax is always 1: its activation is sigmoid.")
        return asked, ()
    single = "sigmoid" if findings.logits == 1 and known != "none" else None  # which a regression has
    if certain := findings.activation or single or known:
        return certain, ()
    hint = " Its output lies between 0 and 1: say none if it is probabilities." if findings.in_unit_interval else ""
    return "softmax", (
        "Assumed that probabilities are the softmax of its output: where each class stands for itself, say --activation "
        f'sigmoid (activation="sigmoid" in Python).{hint}',
    )


def make_noise(preprocess: Preprocess, model: nn.Module) -> Tensor:
    """A picture of noise as the model takes it: (1,C,H,W)."""
    generator = np.random.default_rng(0)
    if isinstance(preprocess, Preprocessing):
        images = torch.from_numpy(generator.standard_normal((1, len(preprocess.mean), *preprocess.size)))
    else:
        images = preprocess(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))[None]
    return images.to(find_input_device(model), find_input_dtype(model))


def _probe(model: nn.Module, images: Tensor) -> Findings:
    """Raises `ModelError` where it does not take a picture of this size, and where its output is not one of classes."""
    output = _run(model, images)
    try:
        logits = find_logits(output, 1).detach()
    except TargetError:
        if takes_volumes(unwrap(model)):
            raise ModelError(VOLUMES) from None
        tensor = first_floating(getattr(output, "logits", output))
        what = type(output).__name__ if tensor is None else f"a tensor {tuple(tensor.shape)}"
        raise ModelError(
            f"The model gives {what} for one picture, expected one of (1, classes): it is no classifier. gradcam.explain() "
            "explains any model, with a function for target=."
        ) from None
    in_unit_interval = bool(((logits >= 0) & (logits <= 1)).all())
    tensor, activation = first_floating(getattr(output, "logits", output)), None
    node: Any = None if tensor is None else tensor.grad_fn
    while node is not None:  # what the operation that made the logits says of them, if it is a known one
        name = node.name().partition("Backward")[0].lstrip("_")
        activation, known = LAST.get(name), not name.startswith(RESHAPING)
        node = None if known else node.next_functions[0][0]
    if activation is None and in_unit_interval and logits.shape[1] > 1:
        tolerance = TOLERANCE.get(images.dtype, 1e-3)
        activation = "none" if abs(logits.sum().item() - 1) < tolerance else None
    return Findings(logits.shape[1], activation, in_unit_interval)


def _run(model: nn.Module, images: Tensor) -> Any:
    """The output, with its graph if that can be had. Raises `ModelError`, with its words, where it takes no such picture."""
    try:
        with preserve_state(unwrap(model)), torch.enable_grad():
            return model(images.detach().requires_grad_().clone())
    except ModelError:
        raise
    except Exception:  # what cannot be recorded may well run unrecorded
        pass
    try:
        with preserve_state(unwrap(model)), torch.no_grad():
            return model(images.clone())
    except Exception as error:
        if takes_volumes(unwrap(model)):
            raise ModelError(VOLUMES) from error
        said = " ".join(str(error).split())[:300] or "nothing more"
        channels, height, width = images.shape[1:]
        raise ModelError(
            f"The model fails on a picture of {height} x {width} with {channels} channel(s), {type(error).__name__}: "
            f"{said.rstrip('.')}. If it takes others, say which: --size, and --mean and --std with a value for each channel "
            "(size=, mean=, std= in Python)."
        ) from error


LARGEST = 8192  # pixels of a side: what networks take is far smaller, and memory for more may not be there


@dataclass(frozen=True)
class Adjustment:
    """What a person said of the preprocessing, None for what was not said. `mean`, `std`: one for each channel, of
    values in [0,1] for pictures of 8 and 16 bits. `size`: of the shorter side, of which the centre is taken, or
    (height, width) to which the whole picture is resized. `crop`: the share of the resized sides that is kept."""

    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    size: int | tuple[int, int] | None
    crop: float | None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


def to_adjustment(mean: Any, std: Any, size: Any, crop: Any) -> Adjustment:
    """The same, checked. Raises `ModelError` for what is not a number, or not one that there can be."""
    if crop is not None and not (_is_number(crop) and 0 < crop <= 1):
        what = "the share of the resized picture that is kept: 1 for all of it"
        raise ModelError(f"crop is {shorten(crop)}, expected {what}.")
    means, stds = _to_values("mean", mean), _to_values("std", std)
    if stds is not None and min(stds) <= 0:
        raise ModelError(f"std is {shorten(std)}, expected values above 0.")
    return Adjustment(means, stds, _to_size(size), None if crop is None else float(crop))


def adjust(parts: Parts, wish: Adjustment) -> tuple[Preprocess, Sequence[str]]:
    """The preprocessing as it is wished, and a note on what is assumed."""
    plain = parts.plain or parts.preprocess
    notes = _say_what_is_assumed(plain, wish) if parts.is_assumed and isinstance(plain, Preprocessing) else []
    # Means of another scale than pictures of 8 and 16 bits have are right for other files, DICOM's say.
    large = " and ".join(name for name in ("mean", "std") if max(getattr(wish, name) or (0,)) > 1)
    if large:
        notes.append(f"The {large} is above 1: pictures of 8 and 16 bits have values in [0,1]; divide by 255 for them.")
    if not wish:
        return parts.preprocess, notes
    if not isinstance(plain, Preprocessing):
        raise ModelError("The preprocessing of this model is its own, and takes no size, crop, mean or std.")
    mean, std = wish.mean or plain.mean, wish.std or plain.std
    if len(mean) != len(std):
        counts = f"mean has {len(mean)} value(s) and std has {len(std)}"
        raise ModelError(f"{counts}: give both, with a value for each channel.")
    size, resize = _find_sizes(plain, wish)
    return replace(plain, mean=mean, std=std, size=size, resize=resize), notes


def _find_sizes(plain: Preprocessing, wish: Adjustment) -> tuple[tuple[int, int], int | tuple[int, int]]:
    """What the network takes, and what pictures are resized to before; sides are rounded as timm does."""
    if wish.size is None and wish.crop is None:
        return plain.size, plain.resize
    is_squeezed = isinstance(wish.size, tuple) or isinstance(plain.resize, tuple)
    before = plain.resize if isinstance(plain.resize, tuple) else (plain.resize, plain.resize)
    size = plain.size if wish.size is None else wish.size if isinstance(wish.size, tuple) else (wish.size, wish.size)
    if wish.crop is not None:
        shares = [1 / wish.crop] * 2
    else:
        shares = [1.0, 1.0] if isinstance(wish.size, tuple) else [big / side for big, side in zip(before, plain.size)]
    height, width = (max(1, math.floor(side * share + 1e-9)) for side, share in zip(size, shares))
    return size, (height, width) if is_squeezed else min(height, width)


def _say_what_is_assumed(plain: Preprocessing, wish: Adjustment) -> list[str]:
    statistics = " and ".join(name for name in ("mean", "std") if getattr(wish, name) is None)
    possible = {
        "grey pictures": len(plain.mean) == 1,
        f"a size of {plain.size[0]}": wish.size is None,
        "a crop of 0.875": wish.crop is None and not isinstance(wish.size, tuple),
        f"ImageNet's {statistics}": bool(statistics),
    }
    assumed = ", ".join(what for what, is_assumed in possible.items() if is_assumed)
    hint = "--size, --crop, --mean and --std say otherwise (size=, ... in Python)."
    return [f"Assumed {assumed}: {hint}"] if assumed else []


def _to_values(name: str, given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        values = np.atleast_1d(np.asarray(given, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ModelError(f"{name} is {shorten(given)}, expected a number for each channel.")
    return tuple(values.tolist())


def _to_size(given: Any) -> int | tuple[int, int] | None:
    if given is None:
        return None
    sides = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(sides) not in (1, 2) or not all(_is_number(side) and side == int(side) >= 1 for side in sides):
        raise ModelError(f"size is {shorten(given)}, expected pixels, as a number or as (height, width).")
    if max(sides) > LARGEST:
        raise ModelError(f"size is {shorten(given)}, expected {LARGEST} pixels at most.")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
