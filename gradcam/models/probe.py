"""Run a model on an image of noise to find its number of classes, its activation and its default layers."""

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
from gradcam.hooks.containers import find_floating_tensor, list_tensors, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.hooks.pytorch import find_last_operation
from gradcam.layers.find import find_layer, unwrap
from gradcam.layers.token_layout import takes_volumes
from gradcam.models.device import find_input_device, find_input_dtype
from gradcam.models.preprocess import Preprocess, Preprocessing
from gradcam.models.providers.base import Parts
from gradcam.targets.classes import BINARY_LOGIT_WARNING, PROBABILITIES_WARNING, find_logits
from gradcam.targets.heads import are_probabilities, require_class_head
from gradcam.targets.output_heads import find_activation

VOLUMES = (
    "The model takes volumes or clips (N,C,D,H,W), not images: explain them in Python, with "
    "gradcam.explain(model, volume). `gradcam layers` and `gradcam inspect trace` support such models."
)
SOFTMAX_NOTE = (
    "Assumed softmax for the class probabilities. For a multi-label model, use --activation sigmoid "
    '(activation="sigmoid" in Python).'
)
UNIT_INTERVAL_HINT = " The output is between 0 and 1: if these values are probabilities, use --activation none."
INPUT_HINT = (
    "If the model takes a different size, give --size. If it takes a different number of channels, give --mean and --std "
    "with one value per channel (size=, mean=, std= in Python)."
)
NOISE_SIDE = 224  # pixels, if the preprocessing does not define a size
# Maps the last operation of a model to the activation that turns the model's output into probabilities.
REMAINING = {"softmax": "none", "sigmoid": "none", "log_softmax": "softmax"}


@dataclass(frozen=True)
class Findings:
    """The results of running a model on one image of noise."""

    logits: int  # number of logits
    activation: str | None  # how logits become probabilities; None if uncertain
    in_unit_interval: bool  # True if all logits are between 0 and 1


def find_defaults(parts: Parts, preprocess: Preprocess, layer_name: str | None) -> tuple[Findings, str, str | None]:
    """Return findings, `layer` and `layer_for_positive`. Run the model on noise if the parts lack a value."""
    layer, positive = parts.layer, parts.layer_for_positive
    if layer_name is not None:
        layer, positive = find_layer(unwrap(parts.model), layer_name).name, None
    if parts.classes is not None and layer is not None and preprocess is parts.preprocess:
        return Findings(parts.classes, None, False), layer, positive
    images = make_noise(preprocess, parts.model)
    findings = _probe(parts.model, images)
    if layer is None:
        suggestion = find_suggestion(unwrap(parts.model), to_batch(images))
        layer, positive = suggestion.layers[0], suggestion.behind_activation
        positive = None if positive == layer else positive
        # Prefer the layer that `gradcam.explain` chooses. Ignore errors: on noise, `explain` may fail (for example, if
        # the head is all zeros), although it works on real images.
        with contextlib.suppress(Exception):
            layer = explain(parts.model, images).layer
    return findings, str(layer), positive


def choose_activation(requested: str, provided: str | None, findings: Findings) -> tuple[str, Sequence[str]]:
    """Return how logits become probabilities, and notes on assumptions; raise `ModelError` for softmax of one logit."""
    if requested != "auto":
        if requested == "softmax" and findings.logits == 1:
            problem = "The model has a single logit, whose softmax is always 1"
            raise ModelError(f"{problem}: use --activation sigmoid, or auto.")
        return requested, ()
    if findings.activation == "none":
        applied = "applied" if findings.logits == 1 else "none"
        return applied, (PROBABILITIES_WARNING.format("probabilities").replace("none", applied),)
    if certain := findings.activation or (provided if findings.logits > 1 or provided == "none" else None):
        return certain, ()
    if findings.logits == 1:
        return "sigmoid", (BINARY_LOGIT_WARNING.format('--task regression (activation="none" in Python)'),)
    return "softmax", (SOFTMAX_NOTE + (UNIT_INTERVAL_HINT if findings.in_unit_interval else ""),)


def make_noise(preprocess: Preprocess, model: nn.Module) -> Tensor:
    """Return an image of noise (1,C,H,W), on the model's device and in its precision."""
    generator = np.random.default_rng(0)
    if isinstance(preprocess, Preprocessing):
        images = torch.from_numpy(generator.standard_normal((1, len(preprocess.mean), *preprocess.size)))
    else:
        images = preprocess(generator.integers(0, 256, (NOISE_SIDE, NOISE_SIDE, 3), dtype=np.uint8))[None]
    return images.to(find_input_device(model), find_input_dtype(model))


def _probe(model: nn.Module, images: Tensor) -> Findings:
    """Run the model once, and return the findings; raise `ModelError` if the output is not class scores."""
    output = run(model, images)
    try:
        require_class_head(unwrap(model))
        logits = find_logits(output, 1)
    except TargetError as error:
        if takes_volumes(unwrap(model)):
            raise ModelError(VOLUMES) from None
        tensor = find_floating_tensor(getattr(output, "logits", output))
        returned = type(output).__name__ if tensor is None else f"a tensor {tuple(tensor.shape)}"
        # If the shape is valid, report the reason in `error`.
        if tensor is not None and tensor.ndim <= 2 and len(tensor) == 1:
            raise ModelError(str(error)) from None
        problem = f"The model returns {returned} for one image, expected (1, classes): it is not a classifier"
        raise ModelError(f"{problem}. For other models, use gradcam.explain() with a function as target=.") from None
    in_unit_interval = bool(((logits >= 0) & (logits <= 1)).all())
    activation = REMAINING.get(find_last_operation(logits))
    # If the model returns logits and probabilities, a comparison of the two tensors shows the activation.
    related = {find_activation(values, logits) for values in list_tensors(output) if values.is_floating_point()}
    activation = activation or next((name for name in ("softmax", "sigmoid") if name in related), None)
    if activation is None and are_probabilities(logits):
        activation = "none"
    return Findings(logits.shape[1], activation, in_unit_interval)


def run(model: nn.Module, images: Tensor) -> Any:
    """Return the model's output, if possible with an autograd graph; raise `ModelError` if the model fails."""
    # Try with autograd first. Some models run only without autograd.
    with contextlib.suppress(Exception), preserve_state(unwrap(model)), torch.enable_grad():
        return model(images.detach().requires_grad_().clone())
    try:
        with preserve_state(unwrap(model)), torch.no_grad():
            return model(images.clone())
    except ModelError:
        raise
    except Exception as error:
        if takes_volumes(unwrap(model)):
            raise ModelError(VOLUMES) from error
        message = " ".join(str(error).split())[:300] or "no message"
        channels, height, width = images.shape[1:]
        problem = f"The model fails on an image of {height} x {width} with {channels} channel(s)"
        raise ModelError(f"{problem}, {type(error).__name__}: {message.rstrip('.')}. {INPUT_HINT}") from error
