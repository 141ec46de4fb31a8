"""SmoothGrad: the mean gradient around the picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.attributions.attribution import Attribution
from gradcam.attributions.averaging import Point, check_count, sum_gradients
from gradcam.attributions.differentiation import differentiable, with_classes
from gradcam.effort import Progress, check_effort
from gradcam.errors import GradcamError, shorten
from gradcam.sites import at_least_float32

LARGEST_SEED = 2**63 - 1


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
    its smallest. It is drawn from a generator of its own, started with `seed`, on the CPU, once for all images: an
    image's attribution depends neither on its neighbours nor on the device. Each image's top class, scores and output
    are those of the picture without noise.
    `chunk`: how many copies of all images share one forward pass. More is faster where the device is not busy, and takes
    that many times the memory; every other tensor of the input that has a row for each image is repeated with them.
    `progress`: called with the copies done and all of them, as in `gradcam.explain`.
    `images`, `target`: as in `gradcam.explain`, `input_gradients`, whose errors this raises too.

    Raises `GradcamError` for `samples` or `chunk` below 1, a `noise` that is negative or not finite, and a `seed` that is
    not a whole number from 0 on.
    """
    check_count(samples, "samples")
    check_count(chunk, "chunk")
    check_effort(None, progress)
    _check_noise(noise)
    _check_seed(seed)
    with differentiable(model, images) as subject:
        with torch.no_grad():
            clean = subject.run(subject.pictures, target)
        copies = _noisy_copies(subject.pictures, samples, noise, seed)
        fixed = with_classes(target, clean.classes)
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


def _check_noise(noise: Any) -> None:
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not math.isfinite(noise) or noise < 0:
        raise GradcamError(
            f"noise is {shorten(noise)}, expected a share of the picture's range, 0 or more, such as 0.15."
        )


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise GradcamError(f"seed is {shorten(seed)}, expected a whole number from 0 to {LARGEST_SEED}.")
