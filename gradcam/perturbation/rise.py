"""RISE: the mean of random masks, weighted by what the model scores where it sees the picture through them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.effort import Effort
from gradcam.perturbation.options import check_integer, check_number, check_seed
from gradcam.perturbation.rerun import score_input
from gradcam.perturbation.scorecam import MODES
from gradcam.perturbation.variants import Variants
from gradcam.recording import Recorded
from gradcam.rounding import TURNS, Settled, compare, find_score_slack, shake

MASKS_AT_ONCE = 64  # in the sum; their scores are computed in chunks that fit the memory budget


def rise(recorded: Recorded, effort: Effort, *, masks: int, cells: int, probability: float, seed: int) -> Settled:
    """RISE: where showing a place raises the score above its mean over random masks, and where it lowers it.

    Maps (N,K,...) at the pictures' own size, of either sign. Petsiuk et al., BMVC 2018, equation 6: the sum of the masks
    times their scores, by their number and by `probability`. The mean of the scores is taken from each first. It would only
    add nearly the same to every place, and the paper's pictures take it away again with their minimum; without it zero means
    that a place makes no difference. `cells`: of the grid along each side, of which each is seen with `probability`, before
    it is resized and shifted at random (section 3.2). The masks depend on `seed` alone, and are the same for all images.
    Raises `GradcamError` for options that cannot be, and where the memory budget holds not one variant.
    """
    check_integer("rise", "masks", masks, 1)
    check_integer("rise", "cells", cells, 1)
    check_number("rise", "probability", probability, most=1)
    check_seed("rise", seed)
    pictures, size = effort.batch.pictures, effort.batch.size

    def draw(numbers: range) -> Tensor:
        drawn = [_draw_mask(size, cells, probability, seed + number) for number in numbers]
        return torch.stack(drawn).to(pictures.device)

    def see_through(copies: Tensor, numbers: range) -> None:
        copies.unflatten(0, (len(numbers), -1)).mul_(draw(numbers).to(copies)[:, None, None])

    scores = score_input(recorded, Variants(pictures, masks, see_through), effort).values
    slack, in_order = find_score_slack(recorded), scores.permute(1, 2, 0)
    shaken = [shake(in_order, 2, slack, turn).permute(2, 0, 1) for turn in range(TURNS)]
    above = torch.stack([each - each.mean(0) for each in (scores, *shaken)], 1)  # (V,turns,N,K)
    total = above.new_zeros((*above.shape[1:], *size))
    for numbers in _slices(masks):
        total += torch.tensordot(above[numbers.start : numbers.stop], draw(numbers).to(above), dims=([0], [0]))
    maps, *others = total.div_(masks * probability).unbind()
    return compare(maps, others)


def _slices(count: int) -> Iterator[range]:
    return (range(start, min(start + MASKS_AT_ONCE, count)) for start in range(0, count, MASKS_AT_ONCE))


def _draw_mask(size: Sequence[int], cells: int, probability: float, seed: int) -> Tensor:
    """One mask of this size in [0,1]: cells, open or not, resized to one more in each direction, and a window of that."""
    generator = torch.Generator("cpu").manual_seed(seed)
    is_open = torch.rand([cells] * len(size), generator=generator, dtype=torch.float32, device="cpu") < probability
    lengths = [math.ceil(length / cells) for length in size]  # of a cell
    large = [(cells + 1) * length for length in lengths]
    mask = F.interpolate(is_open.float()[None, None], size=large, mode=MODES[len(size)], align_corners=False)[0, 0]
    for axis, (length, cell) in enumerate(zip(size, lengths)):
        start = int(torch.randint(cell, (1,), generator=generator, dtype=torch.int64, device="cpu"))
        mask = mask.narrow(axis, start, length)
    return mask
