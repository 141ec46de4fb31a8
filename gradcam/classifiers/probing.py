"""One look at a model with a picture of noise: does it take such pictures, how many classes has it, which layer is best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.arguments import to_batch
from gradcam.classifiers.preparation import find_input_device, find_input_dtype
from gradcam.classifiers.preprocessing import Preprocess, Preprocessing
from gradcam.errors import ModelError, TargetError
from gradcam.explanation import explain
from gradcam.isolation import undisturbed
from gradcam.layers import unwrap
from gradcam.nested import first_floating
from gradcam.patches import takes_volumes
from gradcam.suggestion import find_suggestion
from gradcam.targets import find_logits

SIDE = 224  # of the picture, for preprocessing that says nothing of sizes
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}

# What the last operation of a model says of its output, by the name that autograd has for it.
LAST = {"Softmax": "none", "Sigmoid": "none", "LogSoftmax": "softmax"}
# Operations that leave values as they are.
RESHAPING = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Select", "Slice")


@dataclass(frozen=True)
class Findings:
    """`logits`: how many there are. `activation`: what is certain of how they become probabilities, None if nothing is.

    `in_unit_interval`: whether all of them lie between 0 and 1.
    """

    logits: int
    activation: str | None
    in_unit_interval: bool


def make_noise(preprocess: Preprocess, model: nn.Module) -> Tensor:
    """A picture of noise as the model takes it: (1,C,H,W)."""
    generator = np.random.default_rng(0)
    if isinstance(preprocess, Preprocessing):
        shape = (1, len(preprocess.mean), *preprocess.size)
        images = torch.from_numpy(generator.standard_normal(shape))
    else:
        images = preprocess(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))[None]
    return images.to(find_input_device(model), find_input_dtype(model))


def probe(model: nn.Module, images: Tensor) -> Findings:
    """What the model makes of one picture (1,C,H,W).

    Raises `ModelError` where it does not take one of this size, and where its output is not one of classes.
    """
    output = _run(model, images)
    try:
        logits = find_logits(output, 1).detach()
    except TargetError:
        if takes_volumes(unwrap(model)):
            raise _volumes() from None
        tensor = first_floating(getattr(output, "logits", output))
        what = type(output).__name__ if tensor is None else f"a tensor {tuple(tensor.shape)}"
        raise ModelError(
            f"The model gives {what} for one picture, expected one of (1, classes): it is no classifier. gradcam.explain() "
            "explains any model, with a function for target=."
        ) from None
    in_unit_interval = bool(((logits >= 0) & (logits <= 1)).all())
    activation = _last_operation(output)
    if activation is None and in_unit_interval and logits.shape[1] > 1:
        tolerance = TOLERANCE.get(images.dtype, 1e-3)
        activation = "none" if abs(logits.sum().item() - 1) < tolerance else None
    return Findings(logits.shape[1], activation, in_unit_interval)


def find_automatic_layers(model: nn.Module, images: Tensor) -> tuple[str, str | None]:
    """The layer that `gradcam.explain` takes, and the one for methods that assume activations that are not negative.

    The first is without its gradient where none has one; the second is None where it is the same.
    Raises `LayerError` where no layer has a grid.
    """
    found = find_suggestion(unwrap(model), to_batch(images))
    positive = None if found.behind_activation == found.layers[0] else found.behind_activation
    try:
        return explain(model, images).layer, positive
    except Exception:  # a head that is all zeros, say: what is explained later may be something else
        return found.layers[0], positive


def _run(model: nn.Module, images: Tensor) -> Any:
    """The output, with its graph if that can be had. Raises `ModelError`, with its words, where it takes no such picture."""
    try:
        with undisturbed(unwrap(model)), torch.enable_grad():
            return model(images.detach().requires_grad_().clone())
    except ModelError:
        raise
    except Exception:
        return _run_plainly(model, images)


def _run_plainly(model: nn.Module, images: Tensor) -> Any:
    try:
        with undisturbed(unwrap(model)), torch.no_grad():
            return model(images.clone())
    except Exception as error:
        if takes_volumes(unwrap(model)):
            raise _volumes() from error
        said = " ".join(str(error).split())[:300] or "nothing more"
        channels, height, width = images.shape[1:]
        what = f"{height} x {width} with {channels} channel(s)"
        raise ModelError(
            f"The model fails on a picture of {what}, {type(error).__name__}: {said.rstrip('.')}. If it takes others, say "
            "which: --size, and --mean and --std with a value for each channel (size=, mean=, std= in Python)."
        ) from error


def _volumes() -> ModelError:
    return ModelError(
        "The model takes volumes or clips (N,C,D,H,W), which a picture is not, nor what a reader gives: explain one in "
        "Python, gradcam.explain(model, volume). `gradcam layers` and `gradcam inspect trace` take it as it is."
    )


def _last_operation(output: Any) -> str | None:
    """What the operation that made the logits says of them; None where it is another one, or unknown."""
    tensor = first_floating(getattr(output, "logits", output))
    node: Any = None if tensor is None else tensor.grad_fn
    while node is not None:
        name = node.name().partition("Backward")[0].lstrip("_")
        if not name.startswith(RESHAPING):
            return LAST.get(name)
        node = node.next_functions[0][0]
    return None
