"""Remove maps that contain nothing but rounding errors.

If the terms of a map cancel, only rounding errors remain, and a heatmap would show these errors at full strength. For
example, the terms of HiResCAM cancel before a layer norm. The size of a map does not show whether the map is noise: the
map of a tiny probability is tiny, but right. So each method runs again on perturbed inputs, in which each value is
raised or lowered by a possible rounding error. If a map's maximum does not exceed the change of the map, the map is
rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradcam.cam.deferred_checks import DeferredChecks, RowRanges
from gradcam.errors import BlindLayerError, warn

NUM_PERTURBATIONS = 2  # The number of perturbed computations. In a single one, the changes may cancel by chance.
# The values of one sign (positive or negative) count as noise if they are at most this share of the change under
# perturbation. The share is low, because a map may have a few small, but correct values of one sign.
MAX_MINOR_SIGN_RATIO = 1 / 8
MAX_DERIVATIVE_BYTES = 2**25  # Larger derivatives are perturbed in chunks of a few classes.

# A function of a tensor and the number of its leading axes (images and classes). It returns the perturbed tensor.
Perturb = Callable[[Tensor, int], Tensor]


class DenoisedMaps(NamedTuple):
    """Maps (N,K,...) without rounding noise, and a mask of the maps that contained rounding noise.

    `rounding_mask` (N,K,2) is True for maps whose positive or negative values were set to zero; None if no map was
    changed.
    """

    maps: Tensor
    rounding_mask: Tensor | None = None


class MethodMaps(NamedTuple):
    """The maps of a method at a layer (`site`), in pieces (N,k,...) of a few classes each.

    `blind` is True for images without a gradient, or holds the gradients' ranges; None if unknown. `error` is raised if
    no layer has a gradient.
    """

    site: str
    method: str
    pieces: list[DenoisedMaps]
    blind: list[bool] | RowRanges | None = None
    error: BlindLayerError | None = None


def denoise(compute: Callable[[Perturb], Tensor], tolerance: float) -> DenoisedMaps:
    """Return signed maps (N,K,...) from `compute`, with zeros instead of values that are only rounding errors.

    `compute` takes a `Perturb` function, and has to apply this function to all values that may be rounded. `tolerance`
    is the relative error of a value.
    """
    perturbed = [compute(partial(perturb, tolerance=tolerance, seed=seed)) for seed in range(NUM_PERTURBATIONS)]
    return remove_noise(compute(lambda tensor, leading: tensor), perturbed)


def denoise_method(
    compute: Callable[..., Tensor],
    tolerance: float,
    activations: Tensor,
    *derivatives: Tensor,
    peaks: Sequence[RowRanges] = (),
    checks: DeferredChecks | None = None,
) -> list[DenoisedMaps]:
    """Compute maps from activations (N,C,...) and derivatives (N,K,C,...), and remove their rounding noise.

    Returns a list of pieces, each with the maps of a few classes. If `checks` are passed and there is only one piece,
    `checks.flush` removes the noise. `peaks` are the ranges of the activations and derivatives; an empty list if the
    ranges are unknown.
    """
    classes = max(1, MAX_DERIVATIVE_BYTES // max(1, derivatives[0][:, :1].numel() * derivatives[0].element_size()))
    pieces: list[DenoisedMaps] = []
    chunks = [derivatives]
    if classes < derivatives[0].shape[1]:
        chunks = list(zip(*(derivative.split(classes, 1) for derivative in derivatives)))
    pending = checks if checks is not None and len(chunks) == 1 else DeferredChecks()
    for chunk in chunks:
        maps = compute(activations, *chunk)
        pieces.append(DenoisedMaps(maps))

        def check(ranges: list[float], maps: Tensor = maps, chunk: Sequence[Tensor] = chunk) -> None:
            limit = math.inf
            if peaks and all(peaks):
                largest, steepest = (max(max(-low, high) for low, high in peak_ranges) for peak_ranges in peaks)
                limit = 2 * tolerance * activations.shape[1] * largest * steepest
            if not _are_beyond(limit, ranges) and not bool(are_clear(maps, tolerance, activations, chunk)):
                pieces[-1] = denoise(
                    lambda perturb: compute(perturb(activations, 1), *(perturb(derivative, 2) for derivative in chunk)),
                    tolerance,
                )

        pending.add(check, *torch.aminmax(maps.flatten(2), dim=2))
        if pending is not checks:
            pending.flush()
    return pieces


def _are_beyond(limit: float, ranges: Sequence[float]) -> bool:
    """Return whether the magnitudes of all negative minima and of all positive maxima exceed the limit."""
    lows, highs = ranges[: len(ranges) // 2], ranges[len(ranges) // 2 :]
    return all(low >= 0 or -low > limit for low in lows) and all(high <= 0 or high > limit for high in highs)


def are_clear(maps: Tensor, tolerance: float, activations: Tensor, derivatives: Sequence[Tensor]) -> Tensor:
    """Return whether all maps exceed any rounding error of a sum of products, so that no perturbation is needed.

    In each channel, the largest activation times the largest derivative is an upper bound for all cells. The rounding
    error of the sum over the channels is at most `tolerance` times the sum of these bounds, times a margin of 2.
    """
    low, high = torch.aminmax(maps.flatten(2), dim=2)
    places = tuple(range(2, activations.ndim))
    # `torch.linalg.vector_norm` takes many times as long for channels-last tensors, so `abs` and `amax` are used.
    slopes = torch.stack([derivative.abs().amax([axis + 1 for axis in places]) for derivative in derivatives]).sum(0)
    bound = 2 * tolerance * (activations.abs().amax(places)[:, None] * slopes).sum(2)
    return (((high > bound) | (high <= 0)) & ((-low > bound) | (low >= 0))).all()


def remove_noise(maps: Tensor, perturbed: Sequence[Tensor]) -> DenoisedMaps:
    """Set rounding errors in maps to zero. The change of a map under perturbation is the size of its errors.

    An entire map is set to zero if its largest magnitude is at most this change. One sign of a map is set to zero if
    the sign's largest magnitude is at most `MAX_MINOR_SIGN_RATIO` times this change.
    """
    noise = torch.stack([(perturbed_maps - maps).flatten(2).abs().amax(2) for perturbed_maps in perturbed]).amax(0)
    low, high = torch.aminmax(maps.flatten(2), dim=2)
    peaks = torch.stack([high, -low], 2)
    is_all_noise = peaks.amax(2, keepdim=True) <= noise[..., None]
    rounding_mask = (peaks > 0) & (is_all_noise | (peaks <= MAX_MINOR_SIGN_RATIO * noise[..., None]))
    above, below = rounding_mask.reshape(*maps.shape[:2], *[1] * (maps.ndim - 2), 2).unbind(-1)
    return DenoisedMaps(maps.masked_fill((above & (maps > 0)) | (below & (maps < 0)), 0), rounding_mask)


def warn_of_rounding(maps: Tensor, rounding_mask: Tensor, evidence: str, subject: str) -> None:
    """Warn of maps (N,K,...) that are blank because rounding errors were removed.

    `rounding_mask` (V N,K,2) is for all views.
    """
    sides = {"positive": [0], "negative": [1], "signed": [0, 1]}[evidence]
    had_noise = rounding_mask[..., sides].any(2).unflatten(0, (-1, len(maps))).any(0)
    blank = had_noise & ~maps.flatten(2).any(2)
    count = int(blank.sum())
    if count:
        heatmaps = "The heatmap" if blank.numel() == 1 else f"{count} of {blank.numel()} heatmaps"
        warn(
            f"{heatmaps} of {subject} contained only rounding errors, and {'is' if count == 1 else 'are'} blank: "
            "positive and negative contributions cancel. Such cancellation is common before a normalisation layer. Choose "
            "another layer, method or score."
        )


def perturb(tensor: Tensor, leading: int, tolerance: float, seed: int) -> Tensor:
    """Raise or lower each value by the relative `tolerance`, in the same way for all images and classes."""
    changes = _make_signs(1, seed, tensor.dtype, tensor.device)
    # The sign is a product of random signs for the channel, the row and the column.
    for axis in range(leading, tensor.ndim):
        signs = _make_signs(tensor.shape[axis], seed + axis, tensor.dtype, tensor.device)
        changes = changes * signs.reshape(-1, *[1] * (tensor.ndim - 1 - axis))
    return torch.addcmul(tensor, tensor, changes, value=tolerance)


@lru_cache(maxsize=256)
def _make_signs(count: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return pseudo-random signs (1 and -1), computed on the device from a hash of each index and the seed."""
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    hashed = numbers.add_(seed * 0x5BD1E995).mul_(-0x61C88647)
    hashed = hashed.bitwise_xor_(hashed >> 15).mul_(0x2C1B3C6D)
    return 1 - 2 * (hashed >> 16).bitwise_and_(1).to(dtype)


Key = tuple[str, str]  # (layer, method), or (place, method) for a method without a layer.


def mark_rounding(piece: DenoisedMaps) -> Tensor:
    """Return the rounding mask of a piece of maps; all False if no values were removed."""
    nowhere = piece.maps.new_zeros((*piece.maps.shape[:2], 2), dtype=torch.bool)
    return nowhere if piece.rounding_mask is None else piece.rounding_mask
