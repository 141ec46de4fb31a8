"""Remove and debias: how much the model misses what the map marks, and how little what it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import GradcamError, shorten, show_fields
from gradcam.evaluation.heatmaps import check_heatmaps
from gradcam.evaluation.imputation import NOISE, impute
from gradcam.evaluation.ordering import count_pixels, rank_pixels
from gradcam.evaluation.seeds import draw
from gradcam.evaluation.subject import Subject

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Road:
    """ROAD of N images at S shares. `combined`: (N,), from -1/2 to 1/2, higher is better; 0 is what chance has.

    `most`: (N,S), the classes' probabilities with the most relevant pixels imputed; `least`: with the least relevant.
    `shares`: of the pixels that are imputed.
    """

    combined: Tensor
    most: Tensor = field(repr=False)
    least: Tensor = field(repr=False)
    shares: tuple[float, ...] = field(repr=False)

    __repr__ = show_fields


def road(
    subject: Subject, heatmaps: Any, *, shares: Sequence[float] = SHARES, noise: float = NOISE, seed: int = 0
) -> Road:
    """ROAD, combined, for heatmaps (N,H,W) of the subject's images: of any library, sign and scale, by order alone.

    Rong et al., ICML 2022, section 5: a share of the pixels is taken away, the most relevant ones first (MoRF) or the least
    relevant ones first (LeRF), and imputed by `impute`, which leaves no mask that the model might see. Combined as in the
    package grad-cam: the mean over the shares of (p_least - p_most) / 2, with the class's probabilities. Higher is better.
    grad-cam's percentile is 100 x (1 - share), which is what stays.

    Exactly so many pixels are taken away, `count_pixels`, also where many have one value: pixels of one value are in an
    order by chance, the seed's, the same for both ends. So a constant map scores what a random one does, about 0.
    grad-cam takes away all pixels that are as high as the percentile, which may be the whole picture.
    Share 0 is the image itself; share 1, where nothing is known, is zero and noise.

    `noise`, drawn by the seed: one draw for each share. Probabilities of 0 and 1 need no rule: nothing is divided by them.
    Raises `ImageError` for heatmaps of another form, `GradcamError` for shares that are not in [0,1] and for the noise.
    """
    maps = check_heatmaps(heatmaps, subject.size, subject.images.device)
    checked = _check(shares)
    scores = subject.score(_remove(subject.images, rank_pixels(maps, seed), checked, noise, seed))
    most, least = scores[0::2].T.contiguous(), scores[1::2].T.contiguous()
    return Road((least - most).mean(1) / 2, most, least, checked)


def _remove(images: Tensor, places: Tensor, shares: Sequence[float], noise: float, seed: int) -> Iterator[Tensor]:
    """The images (N,C,H,W) without the most relevant pixels, and without the least relevant, of each share in turn."""
    pixels = places[0].numel()
    twice = torch.cat([images, images])
    for share in shares:
        count = count_pixels(share, pixels)
        known = torch.cat([places >= count, places < pixels - count])
        yield from impute(twice, known, noise=noise, generator=draw(seed, "road", share)).split(len(images))


def _check(shares: Sequence[float]) -> tuple[float, ...]:
    found = tuple(shares) if isinstance(shares, Sequence) else ()
    if not found or not all(_is_number(share) and 0 <= share <= 1 for share in found):
        raise GradcamError(
            f"shares is {shorten(shares)}, expected numbers from 0 to 1: the parts of the pixels to take."
        )
    return tuple(map(float, found))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
