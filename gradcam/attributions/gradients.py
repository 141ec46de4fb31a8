"""Compute gradients at the image: the gradient, its mean over noisy copies, and its mean on a path from a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.attributions.base import Attribution, Point, differentiable, fix_target, require_nonzero
from gradcam.errors import ImageError
from gradcam.hooks.containers import at_least_float32
from gradcam.options import MAX_SEED, Progress, check_count, check_number, check_progress


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
    """Compute integrated gradients: the mean gradient between a baseline and the image, times image minus baseline.

    The gradients are averaged along the straight line from the baseline to the image, by Gauss-Legendre quadrature. By
    completeness (the paper's proposition 1), the values sum to the score of the image minus the score of the baseline.
    `gaps` is the sum of the values minus this difference of scores. If a gap is not small compared with the difference,
    increase `steps`. If `target` is None, the top class of the image (not of the baseline) is explained.

    Parameters
    ----------
    model : nn.Module
        As in `gradcam.explain`.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `input_gradients`.
    target : Any, default None
        As in `gradcam.explain`.
    baseline : Tensor, default None
        The reference input, broadcast to the images. None means zeros; in normalised images, zero is the
        mean colour.
    steps : int, default 50
        The number of quadrature points.
    chunk : int, default 1
        The number of quadrature points per forward pass, as in `smoothgrad`.
    progress : callable, default None
        A function that is called with the number of finished steps and the total number.

    Returns
    -------
    Attribution
        Signed values (N,K,C,H,W), with `gaps` (N,K).

    Raises
    ------
    GradcamError
        If `steps` or `chunk` is below 1, or `progress` is not callable. Also for the reasons in `input_gradients`.
    ImageError
        If the baseline is invalid.

    Examples
    --------
    >>> import gradcam, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2), torch.nn.Softplus())
    >>> attribution = gradcam.attributions.integrated_gradients(model, torch.rand(1, 3, 2, 2), target=1)
    >>> round(abs(attribution.gaps.item()), 3)  # the model is smooth, so the quadrature is accurate
    0.0

    References
    ----------
    Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017, equation 1.
    """
    check_count(steps, "steps")
    check_count(chunk, "chunk")
    check_progress(progress)
    with differentiable(model, images, target) as subject:
        start = _to_baseline(baseline, subject.images)
        with torch.no_grad():
            end = subject.run(subject.images, subject.target)
            fixed_target = fix_target(subject.target, end)
            start_scores = subject.run(start, fixed_target).scores
        origin = at_least_float32(start)
        difference = at_least_float32(subject.images) - origin
        # Halve the weights of the quadrature: its interval from -1 to 1 has length 2, but the path has length 1.
        nodes = zip(*(values.tolist() for values in np.polynomial.legendre.leggauss(steps)))
        points = ((weight / 2, (origin + (1 + node) / 2 * difference).to(start.dtype)) for node, weight in nodes)
        mean = subject.sum_gradients(points, fixed_target, count=steps, chunk=chunk, progress=progress)
        values = mean.mul_(difference[:, None])
        gaps = values.flatten(2).sum(2) - (end.scores - start_scores).to(values.device)
        return subject.attribution(end, values, "integrated-gradients", gaps)


def _to_baseline(baseline: Any, images: Tensor) -> Tensor:
    if baseline is None:
        return torch.zeros_like(images)
    if not isinstance(baseline, Tensor) or baseline.is_complex() or baseline.layout != torch.strided:
        raise ImageError(f"The baseline is {type(baseline).__name__}, expected a tensor that broadcasts to the images.")
    try:
        expanded = baseline.detach().to(images).expand_as(images)
    except RuntimeError:
        expected = "one value, one per channel (C,1,1), one image (C,H,W), or one per image"
        problem = f"{tuple(baseline.shape)}, which does not broadcast to the images, {tuple(images.shape)}"
        raise ImageError(f"The baseline is {problem}: expected {expected}.") from None
    if not expanded.isfinite().all():
        raise ImageError("The baseline contains NaN or infinite values.")
    return expanded.clone(memory_format=torch.preserve_format)


def input_gradients(model: nn.Module, images: Any, *, target: Any = None) -> Attribution:
    """Compute the gradient of the score with respect to each value of the image (saliency map).

    All K scores share the forward pass. The model is left unchanged.

    Parameters
    ----------
    model : nn.Module
        As in `gradcam.explain`.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`. The first floating-point tensor with 4 or 5 axes contains the images.
    target : Any, default None
        As in `gradcam.explain`.

    Returns
    -------
    Attribution
        Signed `values` (N,K,C,H,W); the paper's saliency map is `values.abs().amax(2)`.

    Raises
    ------
    ModelError
        If the score has no gradient at the image, or the gradient is exactly zero.
    GradcamError
        As in `gradcam.explain`.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> attribution = gradcam.attributions.input_gradients(classifier.model, images, target=[[285, 967]])
    >>> attribution.values.shape
    torch.Size([1, 2, 3, 224, 224])

    References
    ----------
    Simonyan et al., "Deep Inside Convolutional Networks", ICLR Workshops 2014, equation 3.
    """
    with differentiable(model, images, target) as subject:
        run = subject.run(subject.images, subject.target)
        gradients = subject.gradients(run)
        require_nonzero(gradients)
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
    """Compute SmoothGrad: the mean gradient over copies of each image with Gaussian noise.

    The noise is sampled on the CPU, with its own generator, and is the same for all images. An image's attribution
    therefore depends neither on the other images nor on the device. The top class, the scores and the output come from
    the image without noise.

    Parameters
    ----------
    model : nn.Module
        As in `gradcam.explain`.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `input_gradients`.
    target : Any, default None
        As in `gradcam.explain`.
    samples : int, default 25
        The number of noisy copies.
    noise : float, default 0.15
        The standard deviation of the noise, as a fraction of the image's range (its largest value minus its smallest).
    seed : int, default 0
        Random seed of the noise, from 0 to 2^63 - 1.
    chunk : int, default 1
        The number of copies of all images per forward pass. A larger number is faster on a device with free capacity,
        and needs proportionally more memory. Other input tensors with one row per image are repeated to match.
    progress : callable, default None
        A function that is called with the number of finished copies and the total number.

    Returns
    -------
    Attribution
        Signed values (N,K,C,H,W).

    Raises
    ------
    GradcamError
        If `samples` or `chunk` is below 1, if `noise` is negative or not finite, if `seed` is out of range, or if
        `progress` is not callable. Also for the reasons in `input_gradients`.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> attribution = gradcam.attributions.smoothgrad(classifier.model, classifier.batch(["photo.jpg"]), samples=3)
    >>> gradcam.write_image("smooth.png", gradcam.attributions.draw_attribution(attribution.values[0, 0]))

    References
    ----------
    Smilkov et al., "SmoothGrad: removing noise by adding noise", 2017, section 3.
    """
    check_count(samples, "samples")
    check_count(chunk, "chunk")
    check_progress(progress)
    check_number(noise, "noise", "a fraction of the image's range, 0 or more, such as 0.15.")
    check_count(seed, "seed", f"a whole number from 0 to {MAX_SEED}.", least=0, most=MAX_SEED)
    with differentiable(model, images, target) as subject:
        with torch.no_grad():
            clean = subject.run(subject.images, subject.target)
        copies, fixed_target = _noisy_copies(subject.images, samples, noise, seed), fix_target(subject.target, clean)
        mean = subject.sum_gradients(copies, fixed_target, count=samples, chunk=chunk, progress=progress)
        return subject.attribution(clean, mean, "smoothgrad")


def _noisy_copies(images: Tensor, samples: int, noise: float, seed: int) -> Iterator[Point]:
    generator = torch.Generator(device="cpu").manual_seed(seed)  # The global RNG state must not change.
    values = at_least_float32(images)
    lowest, highest = torch.aminmax(values.flatten(1), dim=1)
    deviation = noise * (highest - lowest).reshape(-1, *[1] * (values.ndim - 1))
    for _ in range(samples):
        gaussian = torch.randn(values.shape[1:], generator=generator, dtype=values.dtype, device="cpu")
        yield 1 / samples, (values + deviation * gaussian.to(values.device)).to(images.dtype)
