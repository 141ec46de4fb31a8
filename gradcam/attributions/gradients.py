"""Gradients at the picture: plain, and their means over noisy copies and along the way from a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.attributions.base import Attribution, Point, differentiable, refuse_zero, sum_gradients, with_classes
from gradcam.cam.grid import at_least_float32
from gradcam.errors import ImageError
from gradcam.options import Progress, check_count, check_number, check_progress

LARGEST_SEED = 2**63 - 1


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

    Sundararajan et al. 2017, equation 1; the integral by Gauss-Legendre quadrature at `steps` points. `baseline`: what
    stands for "nothing", a tensor that broadcasts to the pictures; zeros without it, the mean colour once normalised.
    `gaps` of the result, (N,K), is how far its values are from being complete: their sum, minus the score of the picture
    less the baseline's. Completeness (their proposition 1) says that the integral itself has a gap of 0: where the gap is
    not small beside that difference, take more `steps`. Each image's top class is the picture's own.
    `chunk`: how many steps share one forward pass, as in `smoothgrad`. `progress`: called with the steps done and all.
    `images`, `target`: as in `gradcam.explain`, `input_gradients`, whose errors this raises too.
    Raises `GradcamError` for `steps` or `chunk` below 1, `ImageError` for a baseline of another form.
    """
    check_count(steps, "steps")
    check_count(chunk, "chunk")
    check_progress(progress)
    with differentiable(model, images) as subject:
        start = _to_baseline(baseline, subject.pictures)
        with torch.no_grad():
            end = subject.run(subject.pictures, target)
            fixed = with_classes(target, end.classes)
            start_scores = subject.run(start, fixed).scores
        first = at_least_float32(start)
        way = at_least_float32(subject.pictures) - first
        # On the interval from -1 to 1, which is twice as long as the way's: the weights sum to 1.
        quadrature = zip(*(values.tolist() for values in np.polynomial.legendre.leggauss(steps)))
        points = ((weight / 2, (first + (1 + at) / 2 * way).to(start.dtype)) for at, weight in quadrature)
        mean = sum_gradients(subject, points, fixed, count=steps, chunk=chunk, progress=progress)
        values = mean.mul_(way[:, None])
        gaps = values.flatten(2).sum(2) - (end.scores - start_scores).to(values.device)
        return subject.attribution(end, values, "integrated-gradients", gaps=gaps)


def _to_baseline(baseline: Any, pictures: Tensor) -> Tensor:
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


def input_gradients(model: nn.Module, images: Any, *, target: Any = None) -> Attribution:
    """The gradient of the score at each value of the picture: how much the score changes with it.

    Simonyan et al. 2014, equation 3, with its sign; their saliency map is `values.abs().amax(2)`. `images`, `target`, and
    what is left of it on the model (nothing): as in `gradcam.explain`. The picture is the first floating 4-D or 5-D tensor
    among the images; all K scores share the forward pass.
    Raises `ModelError` where the score has no gradient at the picture, or one of zeros alone, and as `gradcam.explain` does.
    """
    with differentiable(model, images) as subject:
        run = subject.run(subject.pictures, target)
        gradients = subject.gradients(run)
        refuse_zero(gradients)
        return subject.attribution(run, gradients, "input-gradients")


def smoothgrad(
    model: nn.Module,
    images: Any,
    *,
    target: Any = None,
    samples: int = 25,
    noise: float = 0.15,
    seed: int = 0,
    chunk: int = 1,
    progress: Progress | None = None,
) -> Attribution:
    """The mean of the gradients at `samples` copies of each picture, with Gaussian noise on them.

    Smilkov et al. 2017, section 3. `noise`: the noise's standard deviation, as a share of the picture's largest value minus
    its smallest. It is drawn from a generator of its own, started with `seed`, on the CPU, once for all images: an image's
    attribution depends neither on its neighbours nor on the device. Each image's top class, scores and output are those of
    the picture without noise.
    `chunk`: how many copies of all images share one forward pass. More is faster where the device is not busy, and takes
    that many times the memory; every other tensor of the input that has a row for each image is repeated with them.
    `progress`: called with the copies done and all. `images`, `target`: as in `gradcam.explain`, `input_gradients`, whose
    errors this raises too.
    Raises `GradcamError` for `samples` or `chunk` below 1, `noise` that is negative or not finite, and a `seed` below 0.
    """
    check_count(samples, "samples")
    check_count(chunk, "chunk")
    check_progress(progress)
    check_number(noise, "noise", "a share of the picture's range, 0 or more, such as 0.15.")
    check_count(seed, "seed", f"a whole number from 0 to {LARGEST_SEED}.", least=0, most=LARGEST_SEED)
    with differentiable(model, images) as subject:
        with torch.no_grad():
            clean = subject.run(subject.pictures, target)
        copies, fixed = _noisy_copies(subject.pictures, samples, noise, seed), with_classes(target, clean.classes)
        mean = sum_gradients(subject, copies, fixed, count=samples, chunk=chunk, progress=progress)
        return subject.attribution(clean, mean, "smoothgrad")


def _noisy_copies(pictures: Tensor, samples: int, noise: float, seed: int) -> Iterator[Point]:
    generator = torch.Generator(device="cpu").manual_seed(seed)  # PyTorch's own is left alone
    values = at_least_float32(pictures)
    lowest, highest = torch.aminmax(values.flatten(1), dim=1)
    deviation = noise * (highest - lowest).reshape(-1, *[1] * (values.ndim - 1))
    for _ in range(samples):
        drawn = torch.randn(values.shape[1:], generator=generator, dtype=values.dtype, device="cpu")
        yield 1 / samples, (values + deviation * drawn.to(values.device)).to(pictures.dtype)
