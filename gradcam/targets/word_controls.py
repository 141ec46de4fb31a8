"""Controls for the maps of words: text alone, earlier words, and cells that are hot for every word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradcam.errors import warn
from gradcam.hooks.containers import Batch
from gradcam.targets.base import MIN_PROBABILITY_RATIO, Instance

MIN_HOT_VALUE = 0.5  # A cell is hot if its value is at least this share of the map's maximum.
MIN_HOT_MAPS = 0.9  # A sink is hot in at least this share of the maps.
MIN_MAPS = 5  # With fewer words, a cell may be hot in all maps by chance.


def blank_images(batch: Batch) -> Batch:
    """Return the batch with images of one grey value, their mean. If images may be padded, zeros stay zero."""
    pixels = batch.pictures
    may_be_padded = any(field is not None for field in (batch.pieces, batch.listed, batch.windows))
    is_image = pixels != 0 if may_be_padded else torch.ones_like(pixels, dtype=torch.bool)
    return batch.copy(pictures=torch.where(is_image, pixels[is_image].mean(), pixels))


def subtract_context(maps: Tensor) -> Tensor:
    """Subtract from each map (N,K,h,w) what the maps of earlier words explain.

    The part to subtract is the non-negative combination of the earlier maps that is closest to the map, as in TAM (Li
    et al., ICCV 2025), which scales one weighted sum of the earlier maps.
    """
    if bool((maps < 0).any()):  # For signed evidence, each sign has its own context.
        return subtract_context(maps.relu()) - subtract_context((-maps).relu())
    rows = maps.flatten(2).double()
    results = rows.clone()
    for row, result in zip(rows, results):
        gram = row @ row.mT
        for k in range(1, len(row)):
            result[k] -= _solve_non_negative(gram[:k, :k], gram[:k, k]) @ row[:k]
    return results.clamp(min=0).to(maps.dtype).unflatten(2, maps.shape[2:])


def _solve_non_negative(gram: Tensor, right: Tensor) -> Tensor:
    """Return the non-negative weights (k,) that minimise w.gram.w / 2 - w.right (Lawson and Hanson, 1974)."""
    weights, is_free = torch.zeros_like(right), torch.zeros_like(right, dtype=torch.bool)
    for _ in range(3 * len(right)):
        slopes = (right - gram @ weights).masked_fill(is_free, -torch.inf)
        if slopes.max() <= 1e-9 * right.abs().max():
            break
        is_free[slopes.argmax()] = True
        while True:
            best = torch.zeros_like(right)
            best[is_free] = torch.linalg.pinv(gram[is_free][:, is_free], hermitian=True) @ right[is_free]
            is_negative = is_free & (best <= 0)
            if not is_negative.any():
                break
            # Move as far as all weights stay non-negative, and fix the weights that become zero.
            step = (weights[is_negative] / (weights[is_negative] - best[is_negative])).min()
            weights += step * (best - weights)
            is_free &= weights > 1e-12
        weights = best
    return weights


def warn_of_sinks(maps: Tensor) -> None:
    """Warn of cells that are hot in the maps (N,K,h,w) of nearly all words of an image."""
    for image_maps in maps.abs():
        peaks = image_maps.amax((1, 2), keepdim=True)
        used = image_maps[peaks[:, 0, 0] > 0] / peaks[peaks[:, 0, 0] > 0]
        hot: Any = ((used >= MIN_HOT_VALUE).float().mean(0) >= MIN_HOT_MAPS).nonzero().tolist()
        if hot and len(used) >= MIN_MAPS:
            row, column = hot[0]
            more = f", and at {len(hot) - 1} more" if len(hot) > 1 else ""
            place = f"At the cell in row {row}, column {column}{more}"
            problem = f"{place}, the heatmaps of nearly all {len(used)} words are high"
            warn(f"{problem}: these values say little about any word. Such cells may be attention sinks.")
            return


def describe_word_from_text(word: Instance) -> str | None:
    """Return a sentence that says why the word follows from the text before it; None if it depends on the image."""
    if not word.is_from_text:
        return None
    change = "lowers" if (word.score or 0) * MIN_PROBABILITY_RATIO < (word.without_image or 0) else "hardly changes"
    return (
        f"The image {change} the probability of {word.name!r} ({word.score:#.2g} with it, {word.without_image:#.2g} "
        "without): the map of this word says nothing about the image."
    )
