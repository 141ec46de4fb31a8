"""What of a map is nothing but rounding: found by changing the last digits of the numbers that it is made from.

Where terms cancel, as those of HiResCAM do in front of a layer norm, their rounding is left, of either sign, and a heatmap
would draw it at full strength. How large it is depends on the terms alone, and not on how small the map is: that of a tiny
probability is tiny, and right. So a method is run again on numbers of which each is changed by what rounding may have done
to it, up or down. A map whose largest value is no larger than that change says nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcam.cam.readings import Ranges, Readings
from gradcam.errors import warn

TURNS = 2  # in one alone, changes could cancel as well
ONE_SIDE = 1 / 8  # of the change, for one sign beside another that is larger: few values, which may be right if small
MOST_BYTES = 2**25  # of derivatives that are changed at once

# From a tensor, and how many of its first axes belong to images and classes, to what takes its place.
Shake = Callable[[Tensor, int], Tensor]


class Settled(NamedTuple):
    """Maps (N,K,...) without what is nothing but rounding, and where that was: (N,K,2), of positive and negative values;
    None if nowhere."""

    maps: Tensor
    was_rounding: Tensor | None = None


def settle(compute: Callable[[Shake], Tensor], slack: float) -> Settled:
    """Maps (N,K,...) of either sign as `compute` makes them, with zeros for whichever sign has nothing but rounding.
    `compute` passes all that may be rounded through the function that it is given. `slack`: by how much of itself a
    number may be off."""
    shaken = [compute(functools.partial(shake, slack=slack, turn=turn)) for turn in range(TURNS)]
    return compare(compute(lambda tensor, leading: tensor), shaken)


def settle_method(
    compute: Callable[..., Tensor],
    slack: float,
    activations: Tensor,
    *derivatives: Tensor,
    peaks: Sequence[Ranges] = (),
    readings: Readings | None = None,
) -> list[Settled]:
    """As `settle`, of a function of activations (N,C,...) and derivatives (N,K,C,...), a few classes at a time. With
    `readings` the maps of a list of one may be others once these are read. `peaks`: of activations and derivatives, if
    they are read as well."""
    classes = max(1, MOST_BYTES // max(1, derivatives[0][:, :1].numel() * derivatives[0].element_size()))
    pieces: list[Settled] = []
    is_whole = classes >= derivatives[0].shape[1]
    parts = [derivatives] if is_whole else list(zip(*(each.split(classes, 1) for each in derivatives)))
    later = readings if readings is not None and len(parts) == 1 else Readings()
    for few in parts:
        maps = compute(activations, *few)
        pieces.append(undoubted(maps))

        def judge(ranges: list[float], maps: Tensor = maps, few: Sequence[Tensor] = few) -> None:
            limit = math.inf
            if peaks and all(peaks):
                largest, steepest = (max(max(-low, high) for low, high in ranges_of) for ranges_of in peaks)
                limit = 2 * slack * activations.shape[1] * largest * steepest
            if not _are_beyond(limit, ranges) and not _is_clear(maps, slack, activations, few):
                pieces[-1] = settle(
                    lambda shake: compute(shake(activations, 1), *(shake(each, 2) for each in few)), slack
                )

        later.ask(judge, *torch.aminmax(maps.flatten(2), dim=2))
        if later is not readings:
            later.read()
    return pieces


def _are_beyond(limit: float, ranges: Sequence[float]) -> bool:
    """Return whether all lowest and highest values of maps are beyond a limit, or of the other sign."""
    count = len(ranges) // 2
    return all(low >= 0 or -low > limit for low in ranges[:count]) and all(
        high <= 0 or high > limit for high in ranges[count:]
    )


def _is_clear(maps: Tensor, slack: float, activations: Tensor, derivatives: Sequence[Tensor]) -> bool:
    """Whether maps are beyond all that rounding may do to a sum of products, so that nothing has to be tried out. No
    sum over the channels is larger than that of the products of each one's largest values."""
    low, high = torch.aminmax(maps.flatten(2), dim=2)
    places = tuple(range(2, activations.ndim))
    # Not a norm of infinite order, nor one of order 2, which take many times as long where the channels come last.
    slopes = torch.stack([each.abs().amax([axis + 1 for axis in places]) for each in derivatives]).sum(0)
    most = 2 * slack * (activations.abs().amax(places)[:, None] * slopes).sum(2)
    return bool((((high > most) | (high <= 0)) & ((-low > most) | (low >= 0))).all())


def compare(maps: Tensor, shaken: Sequence[Tensor]) -> Settled:
    """The same for maps, and those of shaken numbers, that are there already."""
    noise = torch.stack([(other - maps).flatten(2).abs().amax(2) for other in shaken]).amax(0)
    low, high = torch.aminmax(maps.flatten(2), dim=2)
    peaks = torch.stack([high, -low], 2)
    is_all_noise = peaks.amax(2, keepdim=True) <= noise[..., None]
    was_rounding = (peaks > 0) & (is_all_noise | (peaks <= ONE_SIDE * noise[..., None]))
    above, below = was_rounding.reshape(*maps.shape[:2], *[1] * (maps.ndim - 2), 2).unbind(-1)
    return Settled(maps.masked_fill((above & (maps > 0)) | (below & (maps < 0)), 0), was_rounding)


def undoubted(maps: Tensor) -> Settled:
    """Maps (N,K,...) in which nothing can cancel."""
    return Settled(maps)


def warn_of_rounding(drawn: Tensor, was_rounding: Tensor, evidence: str, what: str) -> None:
    """Say how many of the maps (N,K,...) that are drawn have nothing left; `was_rounding` (V N,K,2) is of all views."""
    sides = {"positive": [0], "negative": [1], "signed": [0, 1]}[evidence]
    was_there = was_rounding[..., sides].any(2).unflatten(0, (-1, len(drawn))).any(0)
    blank = was_there & ~drawn.flatten(2).any(2)
    count = int(blank.sum())
    if count:
        which = "The heatmap" if blank.numel() == 1 else f"{count} of {blank.numel()} heatmaps"
        warn(
            f"{which} of {what} contained only rounding errors, and {'is' if count == 1 else 'are'} blank: "
            "positive and negative contributions cancel, as before a normalisation layer. Choose another layer, method or "
            "score."
        )


def shake(tensor: Tensor, leading: int, slack: float, turn: int) -> Tensor:
    """Each number a little larger or smaller, by `slack` of itself: the same way for all images and classes."""
    changes = _signs(1, turn, tensor.dtype, tensor.device)
    for axis in range(leading, tensor.ndim):  # a sign for each channel, row and column, and their product
        signs = _signs(tensor.shape[axis], turn + axis, tensor.dtype, tensor.device)
        changes = changes * signs.reshape(-1, *[1] * (tensor.ndim - 1 - axis))
    return torch.addcmul(tensor, tensor, changes, value=slack)


@functools.lru_cache(maxsize=256)
def _signs(count: int, turn: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 and -1 without a pattern, the same every time: a hash of each place's number, made where it is needed."""
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    hashed = numbers.add_(turn * 0x5BD1E995).mul_(-0x61C88647)
    hashed = hashed.bitwise_xor_(hashed >> 15).mul_(0x2C1B3C6D)
    return 1 - 2 * (hashed >> 16).bitwise_and_(1).to(dtype)
