"""Measure the uncertainty of a heatmap: the variation over shifted, mirrored and noisy views of the image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import shorten
from gradcam.evaluation.explainers import run_explain
from gradcam.evaluation.heatmap_sources import ExplainFunction
from gradcam.evaluation.subject import check_heatmaps, make_generator, scale_to_unit
from gradcam.options import argument_error, check_count

SHIFT_DIVISOR = 16  # Views are shifted by the image's height or width, divided by this number.
MAX_NOISE_SHARE = 0.02  # largest change of a value, as a share of the image's range


def uncertainty(
    explain: ExplainFunction, model: nn.Module, images: Tensor, classes: Any, *, samples: int = 4, seed: int = 0
) -> Tensor:
    """Measure how much a heatmap varies at each pixel over shifted, mirrored and noisy views of the image.

    Each image is explained several times: unchanged, shifted in four directions by a sixteenth of the height or width,
    mirrored, and with noise of up to 2 % of the image's range of values. Each heatmap is moved back into place, and
    divided by its maximum. The result is the standard deviation of the heatmaps at each pixel.

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
    >>> deviations = gradcam.evaluation.uncertainty(explain, classifier.model, images, classes)
    >>> deviations.shape, bool(deviations.amax() <= 0.5)
    (torch.Size([1, 224, 224]), True)
    """
    check_count(samples, "samples", "the number of noise samples, 0 or more.", least=0)
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise argument_error(shorten(images), "images", "a floating-point tensor (N,C,H,W).")
    generator, deviations = make_generator(seed, "uncertainty"), []
    indices = torch.as_tensor(classes, dtype=torch.int64, device=images.device).reshape(-1, 1)
    for image, index in zip(images.split(1), indices):
        views = torch.cat([image, add_noise(image, samples, generator), view_images(image)])
        size = (1, *image.shape[2:])
        maps = [check_heatmaps(run_explain(explain, model, view, index), size, image.device) for view in views.split(1)]
        unmoved, moved = torch.cat(maps[: 1 + samples]), torch.cat(maps[1 + samples :])
        deviations.append(spread(torch.cat([unmoved, undo_views(moved)])))
    return torch.stack(deviations)


def add_noise(image: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Return noisy copies (samples,C,H,W) of an image (1,C,H,W)."""
    radius = MAX_NOISE_SHARE * float(image.amax() - image.amin())
    noise = torch.rand((samples, *image.shape[1:]), generator=generator, dtype=torch.float32, device="cpu")
    return image + ((2 * noise - 1) * radius).to(image.device, image.dtype)


def view_images(image: Tensor, divisor: int = SHIFT_DIVISOR) -> Tensor:
    """Return an image (1,C,H,W) shifted in four directions, with wrap-around, and mirrored: (5,C,H,W)."""
    shifts = _list_shifts(image.shape[2:], divisor)
    return torch.cat([*(image.roll(shift, (2, 3)) for shift in shifts), image.flip(3)])


def undo_views(heatmaps: Tensor, divisor: int = SHIFT_DIVISOR) -> Tensor:
    """Return the heatmaps (5,H,W) of the views from `view_images`, moved back into place."""
    shifts = _list_shifts(heatmaps.shape[1:], divisor)
    unshifted = [heatmap.roll((-down, -across), (0, 1)) for heatmap, (down, across) in zip(heatmaps, shifts)]
    return torch.stack([*unshifted, heatmaps[-1].flip(1)])


def _list_shifts(size: Any, divisor: int) -> list[tuple[int, int]]:
    down, across = (max(1, round(length / divisor)) for length in size)
    return [(down, 0), (-down, 0), (0, across), (0, -across)]


def spread(heatmaps: Tensor) -> Tensor:
    """Return the standard deviation (H,W) of heatmaps (V,H,W), each divided by its maximum."""
    return scale_to_unit(heatmaps).std(0, correction=0)
