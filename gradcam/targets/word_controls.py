"""Controls for the maps of words: text alone, earlier words, and cells that are hot for every word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradcam.errors import warn
from gradcam.hooks.containers import Batch

HOT = 0.5  # A cell is hot if its value is at least this share of the map's maximum.
HOT_SHARE = 0.9  # A sink is hot in at least this share of the maps.
MIN_MAPS = 5  # With fewer words, a cell may be hot in all maps by chance.


def blank_images(batch: Batch) -> Batch:
    """Return the batch with images of one grey value, their mean. Padding, which is zero, stays zero."""
    pixels = batch.pictures
    return batch.copy(pictures=torch.where(pixels == 0, pixels, pixels[pixels != 0].mean()))


def subtract_context(maps: Tensor) -> Tensor:
    """Subtract from each map (N,K,h,w) what the maps of earlier words explain.

    The part to subtract is the non-negative combination of the earlier maps that is closest to the map, as in TAM (Li
    et al., ICCV 2025), which scales one weighted sum of the earlier maps.
    """
    if bool((maps < 0).any()):  # For signed evidence, each sign has its own context.
        return subtract_context(maps.relu()) - subtract_context((-maps).relu())
    rows = maps.flatten(2)
    results = [rows[:, 0]]
    for k in range(1, rows.shape[1]):
        earlier, current = rows[:, :k].mT, rows[:, k, :, None]
        explained = earlier @ _solve_non_negative(earlier, current)
        results.append((current - explained).clamp(min=0)[..., 0])
    return torch.stack(results, 1).unflatten(2, maps.shape[2:])


def _solve_non_negative(columns: Tensor, goal: Tensor, steps: int = 20) -> Tensor:
    """Return non-negative weights (N,k,1) so that columns (N,P,k) @ weights is close to goal (N,P,1)."""
    gram, right = columns.mT @ columns, columns.mT @ goal
    diagonal = gram.diagonal(dim1=1, dim2=2)[..., None].clamp(min=torch.finfo(gram.dtype).tiny)
    weights = torch.zeros_like(right)
    for _ in range(steps):  # coordinate descent, one coordinate at a time
        for i in range(weights.shape[1]):
            residual = right[:, i] - (gram[:, i, None] @ weights)[:, 0]
            weights[:, i] = (weights[:, i] + residual / diagonal[:, i]).clamp(min=0)
    return weights


def warn_of_sinks(maps: Tensor) -> None:
    """Warn of cells that are hot in the maps (N,K,h,w) of nearly all words of an image."""
    for image_maps in maps.abs():
        peaks = image_maps.amax((1, 2), keepdim=True)
        used = image_maps[peaks[:, 0, 0] > 0] / peaks[peaks[:, 0, 0] > 0]
        if len(used) < MIN_MAPS:
            continue
        hot: Any = ((used >= HOT).float().mean(0) >= HOT_SHARE).nonzero().tolist()
        if hot:
            row, column = hot[0]
            more = f" and {len(hot) - 1} more" if len(hot) > 1 else ""
            warn(
                f"The cell in row {row}, column {column}{more} is hot for nearly all of the {len(used)} words: it says "
                "little about any of them. It may be an attention sink."
            )
            return
