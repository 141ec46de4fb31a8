"""Maps that know nothing of the model: what every method has to beat, and every check to refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.evaluation.seeds import draw

CENTRE = 0.25  # the blob's standard deviation, as a share of each side
CELLS = 7  # of the random map, along each side: as coarse as the maps of most networks


@dataclass(frozen=True)
class Control:
    """A map that is made without the model: `make` takes images (N,C,H,W) and a seed, and gives heatmaps (N,H,W)."""

    name: str
    summary: str
    make: Callable[[Tensor, int], Tensor] = field(repr=False)


def _scale(maps: Tensor) -> Tensor:
    largest = maps.amax((1, 2), keepdim=True)
    return maps / torch.where(largest > 0, largest, 1.0)


def make_constant(images: Tensor, seed: int = 0) -> Tensor:
    """One everywhere."""
    return torch.ones(len(images), *images.shape[2:], dtype=torch.float32, device=images.device)


def make_centre(images: Tensor, seed: int = 0) -> Tensor:
    """A blob in the middle, where photographers put things: a Gaussian, a quarter of each side wide."""
    rows, columns = (
        torch.exp(-(((_count(length, images.device) + 0.5) / length - 0.5) ** 2) / (2 * CENTRE**2))
        for length in images.shape[2:]
    )
    return _scale((rows[:, None] * columns)[None]).expand(len(images), -1, -1)


def _count(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, dtype=torch.float32, device=device)


def make_random(images: Tensor, seed: int = 0) -> Tensor:
    """Noise on a coarse grid, enlarged as smoothly as class activation maps are."""
    generator = draw(seed, "random map")
    noise = torch.rand(len(images), 1, CELLS, CELLS, generator=generator, dtype=torch.float32, device="cpu")
    size = (int(images.shape[2]), int(images.shape[3]))
    return _scale(
        F.interpolate(noise.to(images.device), size=size, mode="bicubic", align_corners=False)[:, 0].clamp(min=0)
    )


def make_edges(images: Tensor, seed: int = 0) -> Tensor:
    """The picture's edges: the length of the Sobel gradient of the channels' mean."""
    sobel = [[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]
    kernel = torch.tensor(sobel, dtype=torch.float32, device=images.device)
    grey = F.pad(images.float().mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    gradients = F.conv2d(grey, torch.stack([kernel, kernel.T])[:, None])
    return _scale(gradients.norm(dim=1))


CONTROLS: Mapping[str, Control] = {
    control.name: control
    for control in (
        Control("random", "noise on a 7 x 7 grid", make_random),
        Control("centre", "a blob in the middle of every picture", make_centre),
        Control("edges", "the picture's Sobel edges", make_edges),
        Control("constant", "one everywhere", make_constant),
    )
}
