"""Where the maps of one picture disagree: of shifted and mirrored views, and under noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import shorten
from gradcam.evaluation.controls import Explain
from gradcam.evaluation.explainers import run_explain
from gradcam.evaluation.subject import check_heatmaps, draw, to_unit
from gradcam.options import check_count, refuse

NEAR, FAR = 16, 4  # of a side's length, the part by which a view is shifted
NOISE = 0.02  # the largest change of a value, as a share of the images' range


def uncertainty(
    explain: Explain, model: nn.Module, images: Tensor, classes: Any, *, samples: int = 4, seed: int = 0
) -> Tensor:
    """Measure how uncertain a heatmap is at each pixel, over shifted, mirrored and noisy views of the image.

    Each image is explained unchanged, shifted in four directions by a sixteenth of its sides, mirrored, and with noise
    of up to 2 % of the image's range of values. The heatmaps are moved back into place, and each is divided by its
    maximum. The result is their standard deviation at each pixel.

    Parameters
    ----------
    explain : callable
        A function of a model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W), such as the result of
        `Explainer.only`.
    model : nn.Module
        The model.
    images : Tensor (N,C,H,W)
        Preprocessed images.
    classes : Tensor (N,)
        The classes to explain.
    samples : int, default 4
        Number of noise samples.
    seed : int, default 0
        Random seed of the noise.

    Returns
    -------
    Tensor (N,H,W)
        float32, 0 where all heatmaps agree, 1/2 at most.

    Raises
    ------
    ImageError
        If `explain` does not return heatmaps of the images' size. Other errors of `explain` are passed on.
    GradcamError
        If the number of samples is below 0, or the images are not a tensor.

    Examples
    --------
    >>> import gradcam, torch
    >>> classifier = gradcam.load_classifier()
    >>> explain = gradcam.evaluation.Explainer(["gradcam"], "layer4").only("gradcam")
    >>> images, classes = classifier.batch(["photo.jpg"]), torch.tensor([285])
    >>> found = gradcam.evaluation.uncertainty(explain, classifier.model, images, classes)
    >>> found.shape, bool(found.amax() <= 0.5)
    (torch.Size([1, 224, 224]), True)
    """
    check_count(samples, "samples", "the number of noise samples, 0 or more.", least=0)
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise refuse(shorten(images), "images", "a floating-point tensor (N,C,H,W).")
    generator, found = draw(seed, "uncertainty"), []
    for image, index in zip(
        images.split(1), torch.as_tensor(classes, dtype=torch.int64, device=images.device).reshape(-1, 1)
    ):
        radius = NOISE * float(image.amax() - image.amin())
        drawn = torch.rand((samples, *image.shape[1:]), generator=generator, dtype=torch.float32, device="cpu")
        noisy = image + ((2 * drawn - 1) * radius).to(image.device, image.dtype)
        shown = torch.cat([image, noisy, view_images(image)]).split(1)
        maps = [
            check_heatmaps(run_explain(explain, model, it, index), (1, *image.shape[2:]), image.device) for it in shown
        ]
        plain, views = torch.cat(maps[: 1 + samples]), torch.cat(maps[1 + samples :])
        found.append(spread(torch.cat([plain, undo_views(views)])))
    return torch.stack(found)


def view_images(images: Tensor, *, far: bool = False) -> Tensor:
    """An image (1,C,H,W), shifted to four sides, around its borders, and mirrored: (5,C,H,W)."""
    return torch.cat([*(images.roll(way, (2, 3)) for way in _list_ways(images.shape[2:], far=far)), images.flip(3)])


def undo_views(heatmaps: Tensor, *, far: bool = False) -> Tensor:
    """The maps (5,H,W) of such views, brought back."""
    ways = _list_ways(heatmaps.shape[1:], far=far)
    back = [heatmap.roll((-way[0], -way[1]), (0, 1)) for heatmap, way in zip(heatmaps, ways)]
    return torch.stack([*back, heatmaps[-1].flip(1)])


def _list_ways(size: Any, *, far: bool) -> list[tuple[int, int]]:
    down, right = (max(1, round(length / (FAR if far else NEAR))) for length in size)
    return [(down, 0), (-down, 0), (0, right), (0, -right)]


def spread(heatmaps: Tensor) -> Tensor:
    """The standard deviation (H,W) of maps (V,H,W), each divided by its maximum."""
    return to_unit(heatmaps).std(0, correction=0)
