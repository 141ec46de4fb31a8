"""Contrast the logit of a class with those of its rivals."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import TargetError, shorten
from gradcam.targets.class_scores import check_class_range, logit, to_integers

MAX_RIVALS = 5
MAX_FINER_RIVALS = 3
FINER_RIVAL_WEIGHT = 0.6


def to_rivals(against: Any) -> np.ndarray[Any, Any]:
    """Return the distinct classes to contrast with, int64 (R,)."""
    is_empty = not against if isinstance(against, (list, tuple)) else np.size(against) == 0
    if against is None or is_empty:
        return np.empty(0, np.int64)
    with contextlib.suppress(TargetError):
        values = to_integers(against)
        if values.ndim <= 1:
            return np.unique(values).astype(np.int64)
    raise TargetError(f"against is {shorten(against)}, expected a class index, or a list of class indices.")


def choose_rivals(against: Any, logits: Tensor, classes: Tensor) -> Tensor:
    """Return the rivals (N,K,R) of each class: the classes `against`, or the five strongest if there are none.

    Raises `TargetError` if the model does not have a rival, or if a class would be contrasted with itself.
    """
    indices = to_rivals(against)
    if not len(indices):
        return find_strongest(logits.detach(), classes)
    check_class_range(indices.tolist(), logits.shape[1])
    self_contrasted = sorted(set(indices.tolist()) & set(classes.flatten().tolist()))
    if self_contrasted:
        raise TargetError(f"Class {self_contrasted[0]} cannot be contrasted with itself: leave it out of `against`.")
    return torch.from_numpy(indices).to(logits.device).expand(*classes.shape, -1)


def compute_contrast(logits: Tensor, classes: Tensor, rivals: Tensor, share: float = 1.0) -> Tensor:
    """Return each class's logit minus `share` times the mean logit of its rivals (N,K,R), if there are rivals."""
    class_logits = logit(logits, classes)
    if rivals.shape[2] == 0:
        return class_logits
    return class_logits - share * logits[:, None].expand(-1, classes.shape[1], -1).gather(2, rivals).mean(2)


def find_strongest(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the five strongest rivals of each class, (N,K,R). There are fewer if the model has fewer classes."""
    rival_logits = logits[:, None].expand(-1, classes.shape[1], -1).scatter(2, classes[..., None], float("-inf"))
    return rival_logits.topk(min(MAX_RIVALS, logits.shape[1] - 1), dim=2).indices


def find_nearest_rivals(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the three classes with the logits nearest to each class's logit, (N,K,R); fewer if the model has fewer."""
    distances = (logits[:, None] - logit(logits, classes)[..., None]).abs()
    distances = distances.scatter(2, classes[..., None], float("inf"))
    return distances.topk(min(MAX_FINER_RIVALS, logits.shape[1] - 1), dim=2, largest=False).indices
