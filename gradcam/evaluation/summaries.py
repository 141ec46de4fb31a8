"""Several properties of a map in one number, and how much of the picture it marks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradcam.errors import GradcamError, shorten
from gradcam.evaluation.heatmaps import check_heatmaps, to_unit


def complexity(heatmaps: Any) -> Tensor:
    """How much of the picture a map marks: its mean in [0,1], float32 (N,); less is better.

    Poppi et al., CVPR Workshops 2021 (ADCC): the map's L1 norm, by the number of its pixels. Negative values are zero, and
    the rest is divided by the maximum: a blank map has 0, and a constant one 1. `heatmaps`: (N,H,W), as `check_heatmaps`
    takes them, which says what it raises.
    """
    return to_unit(check_heatmaps(heatmaps)).mean((1, 2))


def adcc(drop: Any, coherency: Any, complexity: Any) -> Tensor:
    """The harmonic mean of coherency, 1 - complexity and 1 - drop: float32 (N,) in [0,1]; more is better.

    Poppi et al., CVPR Workshops 2021: 3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - drop)), of each image. The three
    are what `coherency`, `complexity` and `confidence_change(...).drop` give: (N,), in [0,1]. Where one of the three parts
    is zero, so is their mean.
    Raises `GradcamError` for values of another form, or outside [0,1].
    """
    values = {"drop": drop, "coherency": coherency, "complexity": complexity}
    shares = {name: _check_shares(name, value) for name, value in values.items()}
    if len({len(share) for share in shares.values()}) > 1:
        lengths = ", ".join(f"{len(share)} of {name}" for name, share in shares.items())
        raise GradcamError(f"There are {lengths}, expected one of each for every image.")
    parts = torch.stack([shares["coherency"], 1 - shares["complexity"], 1 - shares["drop"]])
    inverse = (1 / torch.where(parts > 0, parts, 1.0)).sum(0)
    return torch.where((parts > 0).all(0), len(parts) / inverse, 0.0)


def _check_shares(name: str, value: Any) -> Tensor:
    try:
        found = torch.as_tensor(value, dtype=torch.float32, device=value.device if isinstance(value, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty((), dtype=torch.float32, device="cpu")
    if found.ndim != 1 or not ((found >= 0) & (found <= 1)).all():
        raise GradcamError(f"The {name} is {shorten(value)}, expected a tensor (N,) of values from 0 to 1.")
    return found
