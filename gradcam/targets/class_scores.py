"""Compute class scores from logits: probabilities, and checks of class indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import TargetError, shorten
from gradcam.hooks.pytorch import find_last_operation
from gradcam.targets.heads import NO_CLASSES

VALID_TARGETS = (
    "an int for all images, one int per image, a nested (N,K) sequence for K classes per image, or a function of the "
    "output"
)


MIN_HALF_PRECISION_LENGTH = 64  # dimensions: shorter half-precision vectors may have norm 1 by chance
MAX_SUM_ERROR = 1e-2  # the rounding error of the sum of a thousand half-precision probabilities


def check_classes(classes: Any, images: int, count: int) -> Tensor:
    """Convert classes in any form to int64 (N,K). Raise `TargetError` if they are invalid."""
    if type(classes) is int:
        check_class_range([classes], count)
        return torch.full((images, 1), classes, dtype=torch.int64, device="cpu")
    values = to_integers(classes)
    if values.ndim == 0:
        values = np.full((images, 1), values)
    elif values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or len(values) != images or values.shape[1] == 0:
        is_row = images == 1 and values.ndim == 2
        hint = f" For several classes of one image, write [{list(classes)}]." if is_row else ""
        raise TargetError(f"The target {shorten(classes)} does not fit {images} image(s): pass {VALID_TARGETS}.{hint}")
    check_class_range(values.flatten().tolist(), count)
    return torch.from_numpy(values.astype(np.int64))


def check_class_range(classes: Sequence[int], count: int) -> None:
    """Raise `TargetError` for a class that a model with `count` classes does not have."""
    if min(classes) < 0 or max(classes) >= count:
        class_ = min(classes) if min(classes) < 0 else max(classes)
        raise TargetError(f"Class {class_} does not exist: this model has {count} classes, 0 to {count - 1}.")


def to_integers(classes: Any) -> np.ndarray[Any, Any]:
    """Return class indices in any form as an integer array. Raise `TargetError` for other values."""
    try:
        values = np.asarray(classes.detach().cpu() if isinstance(classes, Tensor) else _without_tensors(classes))
    except (ValueError, TypeError, RuntimeError):  # a ragged sequence, or a tensor that NumPy cannot represent
        values = np.asarray(None)
    if values.dtype.kind not in "iu":
        raise TargetError(f"The target {shorten(classes)} does not contain class indices: pass {VALID_TARGETS}.")
    return values


def _without_tensors(classes: Any) -> Any:
    """Convert nested sequences of tensors and arrays to plain ones; return None if one contains a bool."""
    if isinstance(classes, (list, tuple)):
        values = [_without_tensors(value) for value in classes]
        return None if any(value is None or isinstance(value, (bool, np.bool_)) for value in values) else values
    if isinstance(classes, (Tensor, np.ndarray)):
        return _without_tensors(classes.tolist())
    return classes


def logit(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the logits of the classes."""
    return logits.gather(1, classes)


def probability(logits: Tensor, classes: Tensor, activation: str = "auto") -> Tensor:
    """Return the probabilities of the classes."""
    return probabilities(logits, activation).gather(1, classes)


def to_two_classes(logits: Tensor, activation: str) -> Tensor:
    """Convert a single logit z (N,1) to two classes: -z and z, or 1 - p and p if it is a probability p."""
    return torch.cat([1 - logits if activation == "applied" else -logits, logits], 1)


def probabilities(logits: Tensor, activation: str = "auto") -> Tensor:
    """Return the probabilities (N,C) of all classes, computed by one of the `options.ACTIVATIONS`."""
    if activation in ("none", "applied"):
        return logits
    if activation == "sigmoid" or (activation == "auto" and logits.shape[1] == 1):
        return logits.sigmoid()
    return logits.softmax(1)


def are_probabilities(values: Tensor) -> bool:
    """Return whether the values (N,C) are not negative and each row sums to 1."""
    if values.ndim < 2 or values.shape[1] < 2:
        return False
    values = values.detach().float()
    return bool((values.amin() >= 0) & ((values.sum(1) - 1).abs().amax() < MAX_SUM_ERROR))


def is_dense_float(tensor: Tensor) -> bool:
    """Return whether a tensor supports arithmetic: floats of at least 16 bits, dense, and not on the meta device."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    return is_dense and tensor.is_floating_point() and tensor.dtype.itemsize > 1


def describe_type(tensor: Tensor) -> str:
    """Return a tensor's dtype, and its layout if that is unusual."""
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} ".removeprefix("torch.")
    return f"{'meta ' if tensor.is_meta else layout}{tensor.dtype}"


def _advise(values: Any) -> str:
    """Return a hint for an output that is not (N,C): which target to use, or "" if only a function can help."""
    if isinstance(values, Tensor) and values.ndim == 4:
        return "for a segmentation use targets.Mask(class, mask) (--task segmentation); for anything else "
    is_boxes = not isinstance(values, Tensor) or values.ndim == 3
    return "for a detector use targets.Box(number) (--task detection); for anything else " if is_boxes else ""


def _is_normalised(logits: Tensor) -> bool:
    """Return whether all rows have norm 1; False for one-hot probabilities and short half-precision vectors."""
    values, itemsize = logits.detach(), logits.dtype.itemsize
    if logits.shape[1] < (MIN_HALF_PRECISION_LENGTH if itemsize < 4 else 2):
        return False
    # A linear layer does not normalise its output.
    if logits.grad_fn is not None and find_last_operation(logits) == "linear":
        return False
    tolerance = torch.finfo(logits.dtype).eps * (4 if itemsize > 2 else 1)
    if not all(abs(length - 1) < tolerance for length in torch.linalg.vector_norm(values, dim=1).tolist()):
        return False
    return not bool((values >= 0).all() and (values.sum(1) - 1).abs().max() < 1e-2)


def to_logits(logits: Any, output_type: type, images: int) -> Tensor:
    """Return logits (N,C) in at least float32. Raise `TargetError` for other shapes, and for embeddings of norm 1."""
    if isinstance(logits, Tensor) and logits.shape == (images,):
        logits = logits[:, None]
    is_usable = isinstance(logits, Tensor) and is_dense_float(logits) and logits.ndim == 2
    if not is_usable or len(logits) != images or logits.shape[1] == 0:
        description = (
            f"{describe_type(logits)} {tuple(logits.shape)}" if isinstance(logits, Tensor) else output_type.__name__
        )
        raise TargetError(
            f"The output is {description}, expected class scores ({images}, classes) for {images} image(s): "
            f"{_advise(logits)}pass target=, a function from the model's output to one score per image."
        )
    if _is_normalised(logits):
        raise TargetError(f"The output's vectors have norm 1, like embeddings and unlike logits: {NO_CLASSES}")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
