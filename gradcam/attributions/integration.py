"""Integrated gradients: the gradient along the straight way from a baseline to the picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.attributions.attribution import Attribution
from gradcam.attributions.averaging import Point, check_count, sum_gradients
from gradcam.attributions.differentiation import differentiable, with_classes
from gradcam.effort import Progress, check_effort
from gradcam.errors import ImageError
from gradcam.sites import at_least_float32


def integrated_gradients(
    model: nn.Module,
    images: Any,
    *,
    target: Any = None,
    baseline: Tensor | None = None,
    steps: int = 50,
    chunk: int = 1,
    progress: Progress | None = None,
) -> Attribution:
    """The picture's difference to a baseline, times the mean gradient on the straight line between them.

    Sundararajan et al. 2017, equation 1; the integral by Gauss-Legendre quadrature at `steps` points.
    `baseline`: what stands for "nothing", a tensor that broadcasts to the pictures; zeros without it, which in pictures
    that were normalised is the mean colour, not black.
    `gaps` of the result, (N,K), is how far its values are from being complete: their sum, minus the score of the picture
    less the baseline's. Completeness (their proposition 1) says that the integral itself has a gap of 0: where the
    gap is not small beside that difference, take more `steps`. Each image's top class is the picture's own.
    `chunk`: how many steps share one forward pass, as in `smoothgrad`. `progress`: called with the steps done and all.
    `images`, `target`: as in `gradcam.explain`, `input_gradients`, whose errors this raises too.

    Raises `GradcamError` for `steps` or `chunk` below 1, `ImageError` for a baseline of another form.
    """
    check_count(steps, "steps")
    check_count(chunk, "chunk")
    check_effort(None, progress)
    with differentiable(model, images) as subject:
        start = _to_baseline(baseline, subject.pictures)
        with torch.no_grad():
            end = subject.run(subject.pictures, target)
            fixed = with_classes(target, end.classes)
            start_scores = subject.run(start, fixed).scores
        mean = sum_gradients(
            subject,
            _points_between(start, subject.pictures, steps),
            fixed,
            count=steps,
            chunk=chunk,
            progress=progress,
        )
        difference = at_least_float32(subject.pictures) - at_least_float32(start)
        values = mean.mul_(difference[:, None])
        gaps = values.flatten(2).sum(2) - (end.scores - start_scores).to(values.device)
        return subject.attribution(end, values, "integrated-gradients", gaps=gaps)


def _points_between(start: Tensor, end: Tensor, steps: int) -> Iterator[Point]:
    """The quadrature's points on the way, with their weights, which sum to 1."""
    first = at_least_float32(start)
    way = at_least_float32(end) - first
    # On the interval from -1 to 1, which is twice as long as the way's.
    for position, weight in zip(*(values.tolist() for values in np.polynomial.legendre.leggauss(steps))):
        yield weight / 2, (first + (1 + position) / 2 * way).to(end.dtype)


def _to_baseline(baseline: Any, pictures: Tensor) -> Tensor:
    """The baseline in the pictures' own shape and kind."""
    if baseline is None:
        return torch.zeros_like(pictures)
    if not isinstance(baseline, Tensor) or baseline.is_complex() or baseline.layout != torch.strided:
        raise ImageError(f"The baseline is {type(baseline).__name__}, expected a tensor that broadcasts to the images.")
    try:
        expanded = baseline.detach().to(pictures).expand_as(pictures)
    except RuntimeError:
        raise ImageError(
            f"The baseline is {tuple(baseline.shape)}, which does not broadcast to the images, {tuple(pictures.shape)}: "
            "expected one value, one for each channel (C,1,1), one picture (C,H,W), or one for each image."
        ) from None
    if not expanded.isfinite().all():
        raise ImageError("The baseline is NaN or infinite in places.")
    return expanded.clone(memory_format=torch.preserve_format)
