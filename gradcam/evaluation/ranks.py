"""How far two maps put their pixels in one order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradcam.evaluation.heatmaps import check_heatmaps


def rank_correlation(a: Any, b: Any) -> Tensor:
    """Spearman's rank correlation of heatmaps `a` and `b` (N,H,W), of any library: float32 (N,) in [-1,1].

    Pixels of one value share the mean of their ranks. 1 is the same order, -1 the opposite one. What a constant map, such
    as a blank one, has in common with others is not defined; here it is 1 where both are constant, since they agree
    everywhere, and 0 where one is.

    Raises `ImageError` where the heatmaps are none, hold NaN, or are not of one size.
    """
    size = tuple(getattr(getattr(a, "heatmaps", a), "shape", ()))
    first = check_heatmaps(a, (size[0], *size[-2:]) if len(size) in (3, 4) else size)
    second = check_heatmaps(b, first.shape, first.device)
    one, other = (_centre(_rank(maps.flatten(1))) for maps in (first, second))
    lengths = one.norm(dim=1), other.norm(dim=1)
    are_constant = [length == 0 for length in lengths]
    products = (one * other).sum(1) / torch.where(are_constant[0] | are_constant[1], 1.0, lengths[0] * lengths[1])
    return torch.where(are_constant[0] & are_constant[1], 1.0, products).clamp(-1, 1).float()


def _rank(values: Tensor) -> Tensor:
    """Each value's place in its row (N,P), from the least; equal ones have the mean of theirs."""
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    before, through = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    precision = torch.float32 if values.device.type == "mps" else torch.float64  # which that device does not have
    return (before + through - 1).to(precision) / 2


def _centre(ranks: Tensor) -> Tensor:
    """Around zero: the mean of ranks 0 to P - 1 is known, whatever the ties."""
    return ranks - (ranks.shape[1] - 1) / 2
