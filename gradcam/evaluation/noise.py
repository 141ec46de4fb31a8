"""Whether a map stays as it is when the picture hardly changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import GradcamError, shorten
from gradcam.evaluation.explainers import Explain, run_explain
from gradcam.evaluation.heatmaps import check_heatmaps
from gradcam.evaluation.seeds import draw
from gradcam.evaluation.subject import Subject


def max_sensitivity(
    subject: Subject, explain: Explain, heatmaps: Any = None, *, radius: float = 0.02, samples: int = 10, seed: int = 0
) -> Tensor:
    """Max-sensitivity (Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019, equation 2).

    The largest change of a map under noise, max over e of |E(x + e) - E(x)| / |E(x)|, with the Euclidean norm and each
    value of e uniform in [-radius, radius]: float32 (N,), from 0, which is best. The maximum is over `samples` draws. As
    usual it is divided by the map's own norm, so that maps of any scale compare; a blank map's change is left as it is.
    `radius` is in the units of the images, as preprocessed. `explain` makes heatmaps (N,H,W) from a model, images and
    classes, which are the subject's with noise too; `heatmaps` are those without noise, made by it where not given.

    Raises `GradcamError` for a radius or a number of samples that cannot be, `ImageError` for heatmaps of another form.
    """
    is_number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
    if not is_number or not 0 <= radius < math.inf:
        raise GradcamError(f"radius is {shorten(radius)}, expected how far a value may change, a number from 0 on.")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise GradcamError(f"samples is {shorten(samples)}, expected how often to draw noise, 1 or more.")
    images = subject.images
    made = run_explain(explain, subject.model, images, subject.classes) if heatmaps is None else heatmaps
    before = check_heatmaps(made, subject.size, images.device)
    generator = draw(seed, "noise")
    most = torch.zeros(len(images), dtype=torch.float32, device=images.device)
    for _ in range(samples):
        drawn = torch.rand(images.shape, generator=generator, dtype=torch.float32, device="cpu")
        noise = (2 * drawn - 1) * radius
        after = run_explain(explain, subject.model, images + noise.to(images.device, images.dtype), subject.classes)
        change = check_heatmaps(after, subject.size, images.device) - before
        most = torch.maximum(most, change.flatten(1).norm(dim=1))
    length = before.flatten(1).norm(dim=1)
    return most / torch.where(length > 0, length, 1.0)
