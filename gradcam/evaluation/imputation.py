"""Pixels that are taken away, replaced by what their neighbours tell of them: noisy linear imputation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradcam.errors import GradcamError, ImageError, shorten
from gradcam.evaluation.multigrid import fill
from gradcam.evaluation.seeds import draw

NOISE = 0.01
# Images at once. On a processor, few: their grids stay in its cache, and larger batches take longer for each.
AT_ONCE, AT_ONCE_ON_DEVICE = 4, 64


def impute(images: Tensor, known: Tensor, *, noise: float = NOISE, generator: torch.Generator | None = None) -> Tensor:
    """Images (N,C,H,W) whose pixels that are not `known`, bool (N,H,W), are imputed; the known ones are as they were.

    Noisy linear imputation (Rong et al., ICML 2022, section 5.1, equation 6): each unknown pixel is the mean of its eight
    neighbours, known or not, with weights of 1/6 for the direct and 1/12 for the diagonal ones; at the border, of those
    that there are, their weights over the sum of these. All equations are solved together, and to each unknown value noise
    is added, normally distributed, with the standard deviation `noise` in the images' units.

    The solution is exact to 1/1000 of the range of the known values: with images from -1 to 1, to a fifth of the default
    noise at worst, and usually to a hundredth. What stands in unknown pixels is not read. Where an image has no known pixel
    at all, every constant solves the equations; it is zero then, and noise.

    `generator`: the noise's, by default that of seed 0. One draw (C,H,W) serves all images, so what one becomes does not
    depend on those beside it. Computed in float32, or float64 where images are; the result has the images' type and device.
    Raises `ImageError` for images and masks of another form, `GradcamError` for noise that is no number from zero up.
    """
    _check(images, known, noise)
    precise = images.detach() if images.dtype == torch.float64 else images.detach().float()
    known = known.to(images.device)
    hopeless = ~known.flatten(1).any(1)
    unknown = ~known & ~hopeless[:, None, None]
    at_once = AT_ONCE if images.device.type == "cpu" else AT_ONCE_ON_DEVICE
    parts = zip(precise.split(at_once), unknown.split(at_once))
    found = torch.cat([fill(*part) for part in parts]).masked_fill_(hopeless[:, None, None, None], 0)
    if noise:
        source = draw(0, "imputation") if generator is None else generator
        drawn = torch.randn(images.shape[1:], generator=source, dtype=torch.float32, device=source.device)
        found.add_(drawn.to(found), alpha=noise)
    return torch.where(known[:, None], images.detach(), found.to(images.dtype))


def _check(images: Tensor, known: Tensor, noise: float) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        raise ImageError(f"The images are {_describe(images)}, expected a floating tensor (N,C,H,W).")
    if not isinstance(known, Tensor) or known.dtype != torch.bool or known.shape != (len(images), *images.shape[2:]):
        raise ImageError(
            f"known is {_describe(known)}, expected torch.bool {(len(images), *images.shape[2:])}: which pixels of each "
            "image are known."
        )
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < math.inf:
        raise GradcamError(f"noise is {shorten(noise)}, expected a standard deviation: a number, 0 or more.")


def _describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else shorten(value)
