"""Models with all that is theirs: preprocessing, labels, default layer. One comes with the package."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from gradcam.classifiers.attribution import PictureAttribution
from gradcam.classifiers.classifier import Classifier, Prepared
from gradcam.classifiers.explanation import PictureExplanation
from gradcam.classifiers.loading import Options, load
from gradcam.classifiers.providers import DEFAULT

__all__ = ["DEFAULT", "Classifier", "PictureAttribution", "PictureExplanation", "Prepared", "load_classifier"]


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
    """A classifier that explains pictures from files: the one that comes with the package needs no download.

    `name`: "efficientnet_lite0"; any of torchvision's classification models, with its weights or without ("resnet50",
    "resnet50:IMAGENET1K_V1"); "timm:NAME" or "hf:NAME", of the hub or a folder; "file.py:function" or
    "package.module:function", called without arguments for a model of your own; or such a model itself. `gradcam models`
    lists them.
    `weights`: a checkpoint (safetensors, or what torch.save wrote) in place of the model's own; its number of classes is
    taken from it. One that torchvision or timm published is prepared for as it was trained, by its hash or its name; the
    notes say which preprocessing was taken. Or the name of some of the model's own: "IMAGENET1K_V1".
    `labels`: the classes' names, or a file of them: a line each, or JSON.
    `mean`, `std`: of values in [0,1], one for each channel; one alone is of grey pictures. `size`: of what the network
    takes, a number (the picture's centre) or (height, width) (all of it, whatever its aspect). `crop`: the share of the
    resized picture that is kept, in (0,1]. They change the model's own; of a model of yours they are 224, 0.875 and
    ImageNet's, where nothing else is said.
    `activation`: how logits become probabilities, a key of `choices.ACTIVATIONS`; "auto" is softmax, or sigmoid for a
    single logit, or what the model is known to need. `reader`: a function from a path to an array, as
    `readers.to_reader` takes one, or its name "module:function". `layer`: what is explained where nothing else is said;
    None for the last layer with a grid that the score depends on.
    `device`: "auto", "cpu", "cuda", "cuda:N" or "mps". `precision`: "fp32", or "bf16" or "fp16", with which the model
    computes; batch norms, probabilities and maps are float32 anyway. bf16 is faster than fp32 where the processor or GPU has
    instructions for it, and slower elsewhere. A model that lies on several devices is left where it lies.

    `fit`: what of a picture is explained. "crop": what the model's own preprocessing takes of it, mostly its centre.
    "whole": all of it, in its own aspect, at the scale of that preprocessing; for networks that take any size, and
    transformers whose positions can be interpolated. "tiles": windows that overlap, of as many pixels of the picture as the
    network takes, or "tiles:512" of that many, for large pictures of small things. `predictions`: the classes, of which the
    most probable is explained, are those of the model's "own" preprocessing, or of what is "seen" (with tiles, the mean of
    the windows' logits). Evaluation and inspection keep to the model's own preprocessing.

    A module of the caller's is neither moved, frozen nor switched to evaluation mode, so that it can be explained between
    two steps of its training; `weights` are loaded into it.
    What was assumed is in the classifier's `notes`. Raises `ModelError` for whatever of this is unknown, missing or does not
    fit, and `LayerError` for an unknown layer; see each one's message.
    """
    options = Options(
        weights=weights,
        labels=labels,
        mean=mean,
        std=std,
        size=size,
        crop=crop,
        activation=activation,
        reader=reader,
        layer=layer,
        device=device,
        precision=precision,
        fit=fit,
        predictions=predictions,
    )
    return load(name, options)
