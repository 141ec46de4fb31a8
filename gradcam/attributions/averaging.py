"""Weighted sums of gradients at several points, shared by the methods that look around the picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradcam.attributions.differentiation import Subject, refuse_zero
from gradcam.effort import Progress
from gradcam.errors import GradcamError, shorten

Point = tuple[float, Tensor]  # a weight, and pictures (N,C,...)


def sum_gradients(
    subject: Subject, points: Iterable[Point], target: Any, *, count: int, chunk: int, progress: Progress | None = None
) -> Tensor:
    """The weighted sum (N,K,C,...) of the gradients at so many points, `chunk` points to a forward pass.

    `progress`: called with the points done and all of them. Raises `ModelError` where it is zero, or not finite.
    """
    total: Tensor | None = None
    done = 0
    for group in _groups(points, chunk):
        # The pass is given no name: it would be kept, with all that it recorded, until the next one has been recorded too.
        gradients = subject.gradients(subject.run(torch.cat([pictures for _, pictures in group]), target))
        gradients = gradients.unflatten(0, (len(group), subject.batch.images))
        for (weight, _), gradient in zip(group, gradients):
            total = gradient * weight if total is None else total.add_(gradient, alpha=weight)
        done += len(group)
        if progress is not None:
            progress(done, count)
    if total is None:
        raise GradcamError("There are no points to take gradients at.")
    refuse_zero(total)
    return total


def check_count(value: Any, name: str) -> int:
    """A whole number, 1 or more. Raises `GradcamError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GradcamError(f"{name} is {shorten(value)}, expected a whole number, 1 or more.")
    return value


def _groups(points: Iterable[Point], size: int) -> Iterator[list[Point]]:
    points = iter(points)
    while group := list(itertools.islice(points, size)):
        yield group
