"""Pixels in a map's order, from the most relevant to the least."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.evaluation.seeds import draw


def rank_pixels(heatmaps: Tensor, seed: int = 0) -> Tensor:
    """Each pixel's place in its map's order, int64 (N,H,W): 0 for the most relevant one, of heatmaps (N,H,W).

    Pixels of one value are in an order by chance, the same for the same seed: a constant map has no order, and scanning
    it by rows would give it one.
    """
    values = heatmaps.flatten(1)
    shuffled = torch.randperm(values.shape[1], generator=draw(seed, "ties"), dtype=torch.int64, device="cpu").to(
        values.device
    )
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    places = torch.arange(values.shape[1], dtype=torch.int64, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places).reshape(heatmaps.shape)


def count_pixels(share: float, pixels: int) -> int:
    """How many pixels a share of them is, to the nearest; halves are rounded up."""
    return int(share * pixels + 0.5)
