"""Find the class scores among several tensors in a model's output."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import TargetError, shorten, warn
from gradcam.hooks.containers import find_floating_tensor
from gradcam.hooks.pytorch import find_last_operation
from gradcam.targets.heads import MAX_SUM_ERROR, NO_CLASSES, are_probabilities

LOGIT_NAMES = ("logits", "logits_per_image")
EMBEDDING_NAME = re.compile("embed|pool|feature|hidden|flatten|latent|descriptor", re.IGNORECASE)
# If an output has a tensor with such a name, the output has one score per object, and not one score per image.
OBJECT_NAME = re.compile("keypoint|boxes|descriptor|matches", re.IGNORECASE)


def choose_tensor(output: Any, images: int, head: str | int | None) -> Any:
    """Return the class scores in an output or, if there are none, its first floating-point tensor.

    If `head` is given, return the tensor with this key or index.
    """
    heads = _list_heads(output)
    if isinstance(head, int) and isinstance(output, tuple) and head < len(output):
        head = list(heads)[head]  # For a named tuple, `head` may also be an index.
    if head is not None and head not in heads:
        names = ", ".join(map(shorten, list(heads)[:6])) + (", ..." if len(heads) > 6 else "")
        content = f"it has {names}" if heads else "it is a single tensor, or has no keys"
        raise TargetError(f"The output has no {shorten(head)}: {content}.")
    head = next(filter(heads.__contains__, LOGIT_NAMES), None) if head is None else head
    if head is not None:
        return heads[head]
    if heads:
        has_objects = any(isinstance(part, Mapping) and "boxes" in part for part in heads.values())
        return None if has_objects else _choose_head(heads, images)
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) else find_floating_tensor(logits)


def find_output_name(output: Any, logits: Tensor) -> str | None:
    """Return the key or index of the tensor in the output that equals the logits; None for a single tensor."""
    for name, value in _list_heads(output).items():
        is_candidate = isinstance(value, Tensor) and value.is_floating_point() and value.numel() == logits.numel()
        if is_candidate and torch.equal(value.detach().reshape(logits.shape).to(logits), logits.detach()):
            return str(name)
    return None


def find_activation(values: Tensor, logits: Tensor) -> str | None:
    """Return the activation that maps the logits to the values; None if there is no such activation.

    The result is "softmax", "log_softmax" or "sigmoid".
    """
    if values is logits or values.shape != logits.shape or not values.is_floating_point():
        return None
    if are_probabilities(values) and not are_probabilities(logits):
        # The values are not compared with softmax(logits), because the model may divide the logits by a temperature.
        return "softmax"
    tolerance = 1e-5 if min(values.dtype.itemsize, logits.dtype.itemsize) > 2 else MAX_SUM_ERROR
    values, logits = values.detach().float(), logits.detach().float()
    results = {"softmax": logits.softmax(-1), "log_softmax": logits.log_softmax(-1), "sigmoid": logits.sigmoid()}
    return next((name for name, result in results.items() if torch.allclose(values, result, 0, tolerance)), None)


def _list_heads(output: Any) -> dict[str | int, Any]:
    """Return the parts of an output by key or index; an empty dict for a tensor."""
    if isinstance(output, Tensor):
        return {}
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, (tuple, list)):
        return dict(zip(getattr(output, "_fields", range(len(output))), output))
    return dict(output) if isinstance(output, Mapping) else {}


def _choose_head(heads: Mapping[str | int, Any], images: int) -> Tensor | None:
    """Return the class scores or, if there are none, the first floating-point tensor.

    Raises `TargetError` if several tensors may be the class scores.
    """
    first = next(iter(heads.values()), None)
    if isinstance(first, (tuple, list)) and _find_class_scores(_list_heads(first), images):
        return _choose_head(_list_heads(first), images)
    names = _find_class_scores(heads, images)
    if not names:
        return find_floating_tensor(list(heads.values()))
    logits, form = heads[names[0]], "C"
    rivals = names if isinstance(names[0], str) else names[:1]
    if logits.numel() == images:  # A tensor with one number per image may be a regression value.
        rows = [name for name in _list_rows(heads, images) if not EMBEDDING_NAME.search(str(name))]
        rows = [name for name in rows if find_activation(heads[name], logits) is None]
        if isinstance(names[0], str) or rows[0] != names[0]:
            rivals, form = rows, "..."
    if len(rivals) > 1:
        choice = f"targets.ClassTarget(..., output={names[0]!r}), or pass a function as target="
        tensors = f"{len(rivals)} tensors ({images}, {form}): {', '.join(map(shorten, rivals))}"
        raise TargetError(f"The output has {tensors}. Choose the class scores with {choice}.")
    return logits


def _find_class_scores(heads: Mapping[str | int, Any], images: int) -> list[str | int]:
    """Return the names of tensors that may be logits. Raise `TargetError` if all are embeddings or object scores."""
    rows = {name: tensor for name, tensor in _list_rows(heads, images).items() if tensor.is_floating_point()}
    rows = {name: tensor for name, tensor in rows.items() if tensor.ndim == 2} or rows
    scores = {name: tensor for name, tensor in rows.items() if not EMBEDDING_NAME.search(str(name))}
    if rows and not scores:
        raise TargetError(f"The output's {next(iter(rows))!r} is an embedding: {NO_CLASSES}")
    if rows and (objects := [name for name in heads if OBJECT_NAME.search(str(name))]):
        raise TargetError(f"The output has {objects[0]!r}, so its scores belong to objects: {NO_CLASSES}")
    logit_names = [x for x in scores if not any(find_activation(scores[x], logits) for logits in scores.values())]
    return logit_names or list(scores)[:1]


def _list_rows(heads: Mapping[str | int, Any], images: int) -> dict[str | int, Tensor]:
    """Return the tensors in an output that have the shape (N,) or (N,C), by name."""
    return {name: x for name, x in heads.items() if isinstance(x, Tensor) and x.ndim in (1, 2) and len(x) == images}


def warn_of_further_heads(output: Any, images: int, *, is_linear: bool) -> None:
    """Warn if an output has several tensors of class scores.

    `is_linear` is True if a linear layer computed the first tensor.
    """
    heads = _list_heads(output)
    if not heads or any(name in heads for name in LOGIT_NAMES):
        return
    further_heads = _find_class_scores(heads, images)[1:]
    if is_linear:  # Features, which models often return after the logits, rarely come from a linear layer.
        further_heads = [name for name in further_heads if find_last_operation(heads[name]) == "linear"]
    if further_heads:
        choice = f"Choose a tensor with targets.ClassTarget(..., output={further_heads[0]!r})"
        problem = f"The output has several tensors ({images}, C), and the first one is explained"
        warn(
            f"{problem}. {choice}. To explain the first tensor without this warning, pass its index or name as output=."
        )
