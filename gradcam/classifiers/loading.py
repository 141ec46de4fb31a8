"""From a name and what a person says of it to a `Classifier`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradcam.choices import ACTIVATIONS, to_fit
from gradcam.classifiers.adjustment import ASSUMED_GREY, adjust, to_adjustment
from gradcam.classifiers.classifier import Classifier
from gradcam.classifiers.fits import check_sizes, find_step, get_steps
from gradcam.classifiers.functions import find_function
from gradcam.classifiers.labels import check_labels, fit_labels
from gradcam.classifiers.preparation import first_channels, place
from gradcam.classifiers.preprocessing import Preprocess
from gradcam.classifiers.probing import Findings, find_automatic_layers, make_noise, probe
from gradcam.classifiers.providers import load_parts
from gradcam.classifiers.providers.parts import Parts
from gradcam.classifiers.readers import Reader, read_picture, to_reader
from gradcam.devices import find_device, find_precision
from gradcam.errors import ModelError, shorten
from gradcam.layers import find_layer, refuse_other_kinds, unwrap


@dataclass(frozen=True)
class Options:
    """What a person says of a model, as in `load_classifier`."""

    weights: Any
    labels: Any
    mean: Any
    std: Any
    size: Any
    crop: Any
    activation: str
    reader: Any
    layer: str | None
    device: str
    precision: str
    fit: str
    predictions: str


def load(name: str | nn.Module, options: Options) -> Classifier:
    """The classifier. All that can be checked without the model is checked first. Raises as `load_classifier` says."""
    _check(options)
    labels = None if options.labels is None else check_labels(options.labels)
    wish = to_adjustment(options.mean, options.std, options.size, options.crop)
    reader = _find_reader(options.reader)
    with torch.random.fork_rng(devices=()):  # models are born with random weights
        parts = _find_parts(name, options)
    preprocess, assumed = adjust(parts, wish)
    try:
        findings, layer, layer_for_positive = _look(parts, preprocess, options.layer)
    except ModelError:
        if not parts.is_assumed or wish.mean or wish.std or first_channels(parts.model) != 1:
            raise
        parts = replace(parts, preprocess=ASSUMED_GREY)
        preprocess, assumed = adjust(parts, wish)
        findings, layer, layer_for_positive = _look(parts, preprocess, options.layer)
    activation, guessed = _choose_activation(options.activation, parts.activation, findings)
    classes = 2 if findings.logits == 1 and activation != "softmax" else findings.logits
    known = labels or parts.labels
    classifier = Classifier(
        name=name if isinstance(name, str) else type(name).__name__,
        model=parts.model,
        preprocess=preprocess,
        classes=classes,
        labels=None if known is None else fit_labels(known, findings.logits, classes),
        layer=layer,
        layer_for_positive=layer_for_positive,
        activation=activation,
        reader=reader,
        notes=(*parts.notes, *assumed, *guessed),
        fit=options.fit,
        predictions=options.predictions,
    )
    if to_fit(options.fit).kind == "whole":
        check_sizes(parts.model, make_noise(get_steps(preprocess), parts.model), find_step(parts.model))
    return classifier


def _look(parts: Parts, preprocess: Preprocess, wanted: str | None) -> tuple[Findings, str, str | None]:
    """What the model makes of a picture, and its layers; without running it where all is known."""
    named = None if wanted is None else find_layer(unwrap(parts.model), wanted).name
    layers = (named, None) if named is not None else (parts.layer, parts.layer_for_positive)
    if parts.classes is not None and layers[0] is not None and preprocess is parts.preprocess:
        return Findings(parts.classes, None, False), layers[0], layers[1]
    images = make_noise(preprocess, parts.model)
    findings = probe(parts.model, images)
    layer, layer_for_positive = layers if layers[0] is not None else find_automatic_layers(parts.model, images)
    return findings, str(layer), layer_for_positive


def _check(options: Options) -> None:
    find_precision(options.precision)
    to_fit(options.fit)
    if options.device != "auto":  # what lies on several devices needs none
        find_device(options.device)
    if not isinstance(options.weights, (str, os.PathLike, type(None))):
        raise ModelError(f"The weights are {shorten(options.weights)}, expected the path of a checkpoint.")
    if not isinstance(options.activation, str) or options.activation not in ACTIVATIONS:
        raise ModelError(
            f"There is no activation {shorten(options.activation)}: choose one of {', '.join(ACTIVATIONS)}."
        )


def _find_parts(name: str | nn.Module, options: Options) -> Parts:
    weights = None if options.weights is None else Path(options.weights)
    refuse_other_kinds(name)
    if not isinstance(name, nn.Module):
        parts = load_parts(name, weights)
        unwrap(parts.model)
        place(parts.model, options.device, options.precision)
        return parts
    from gradcam.classifiers.providers.factory import to_parts

    unwrap(name)
    if options.device != "auto" or options.precision != "fp32":
        raise ModelError(
            "A module of yours is explained where it lies and as precisely as it is: move it yourself, and leave the device "
            "at 'auto' and the precision at 'fp32'."
        )
    return to_parts(name, weights)


def _find_reader(given: Any) -> Reader:
    if given is None:
        return read_picture
    return to_reader(find_function(given) if isinstance(given, str) else given)


def _choose_activation(asked: str, known: str | None, findings: Findings) -> tuple[str, Sequence[str]]:
    """How logits become probabilities, and a note where that is a guess."""
    if asked != "auto":
        if asked == "softmax" and findings.logits == 1:
            raise ModelError("The model has a single logit, whose softmax is always 1: its activation is sigmoid.")
        return asked, ()
    if findings.activation is not None:
        return findings.activation, ()
    if findings.logits == 1 and known != "none":  # which a regression has
        return "sigmoid", ()
    if known is not None:
        return known, ()
    hint = " Its output lies between 0 and 1: say none if it is probabilities." if findings.in_unit_interval else ""
    return "softmax", (
        "Assumed that probabilities are the softmax of its output: where each class stands for itself, say --activation "
        f'sigmoid (activation="sigmoid" in Python).{hint}',
    )
