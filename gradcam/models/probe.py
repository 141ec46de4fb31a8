"""What a model makes of one picture of noise: how many classes it has, and how they become probabilities; and its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.explain import explain
from gradcam.cam.suggest import find_suggestion
from gradcam.errors import ModelError, TargetError
from gradcam.hooks.nested import first_floating, tensors, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.hooks.pytorch import find_last_operation
from gradcam.layers.find import find_layer, unwrap
from gradcam.layers.layout import takes_volumes
from gradcam.models.device import find_input_device, find_input_dtype
from gradcam.models.preprocess import Preprocess, Preprocessing
from gradcam.models.providers.base import Parts
from gradcam.targets.classes import (
    BINARY,
    PROBABILITIES,
    are_probabilities,
    find_activation,
    find_logits,
)
from gradcam.targets.heads import refuse_features

VOLUMES = (
    "The model takes volumes or clips (N,C,D,H,W), not images: explain them in Python, with "
    "gradcam.explain(model, volume). `gradcam layers` and `gradcam inspect trace` support such models."
)
SIDE = 224  # of the picture, for preprocessing that says nothing of sizes
# The activation still to be applied, by the last operation of a model.
REMAINING = {"softmax": "none", "sigmoid": "none", "log_softmax": "softmax"}


@dataclass(frozen=True)
class Findings:
    """What a model made of one picture."""

    logits: int  # how many
    activation: str | None  # how they become probabilities, where that is certain
    in_unit_interval: bool  # whether all of them are


def look(parts: Parts, preprocess: Preprocess, wanted: str | None) -> tuple[Findings, str, str | None]:
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


def choose_activation(asked: str, known: str | None, findings: Findings) -> tuple[str, Sequence[str]]:
    """How logits become probabilities, and a note where that is assumed. Raises `ModelError` for what cannot be."""
    if asked != "auto":
        if asked == "softmax" and findings.logits == 1:
            raise ModelError(
                "The model has a single logit, whose softmax is always 1: use --activation sigmoid, or auto."
            )
        return asked, ()
    if findings.activation == "none":
        applied = "applied" if findings.logits == 1 else "none"
        return applied, (PROBABILITIES.format("probabilities").replace("none", applied),)
    if certain := findings.activation or (known if findings.logits > 1 or known == "none" else None):
        return certain, ()
    if findings.logits == 1:
        return "sigmoid", (BINARY.format('--task regression (activation="none" in Python)'),)
    hint = (
        " The output is between 0 and 1: if these values are probabilities, use --activation none."
        if findings.in_unit_interval
        else ""
    )
    return "softmax", (
        "Assumed softmax for the class probabilities. For a multi-label model, use --activation sigmoid "
        f'(activation="sigmoid" in Python).{hint}',
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
    output = run(model, images)
    try:
        refuse_features(unwrap(model))
        logits = find_logits(output, 1)
    except TargetError as error:
        if takes_volumes(unwrap(model)):
            raise ModelError(VOLUMES) from None
        tensor = first_floating(getattr(output, "logits", output))
        what = type(output).__name__ if tensor is None else f"a tensor {tuple(tensor.shape)}"
        if tensor is not None and tensor.ndim <= 2 and len(tensor) == 1:  # The shape is not the reason.
            raise ModelError(str(error)) from None
        raise ModelError(
            f"The model returns {what} for one image, expected (1, classes): it is not a classifier. For other models, use "
            "gradcam.explain() with a function as target=."
        ) from None
    in_unit_interval = bool(((logits >= 0) & (logits <= 1)).all())
    activation = REMAINING.get(find_last_operation(logits))
    # A model that returns its probabilities as well tells how they are made.
    related = {find_activation(values, logits) for values in tensors(output) if values.is_floating_point()}
    activation = activation or next((name for name in ("softmax", "sigmoid") if name in related), None)
    if activation is None and are_probabilities(logits):
        activation = "none"
    return Findings(logits.shape[1], activation, in_unit_interval)


def run(model: nn.Module, images: Tensor) -> Any:
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
        said = " ".join(str(error).split())[:300] or "no message"
        channels, height, width = images.shape[1:]
        raise ModelError(
            f"The model fails on an image of {height} x {width} with {channels} channel(s), {type(error).__name__}: "
            f"{said.rstrip('.')}. If the model takes a different size, give --size. If it takes a different number of "
            "channels, give --mean and --std with one value per channel (size=, mean=, std= in Python)."
        ) from error
