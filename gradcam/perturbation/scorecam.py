"""Score-CAM and its kin: channels weighted by the score of the picture that each of them lets through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.effort import Effort
from gradcam.methods.joining import Join, add_up
from gradcam.perturbation.options import check_integer, check_number, check_seed
from gradcam.perturbation.rerun import score_input
from gradcam.perturbation.variants import Variants
from gradcam.recording import Recorded
from gradcam.rounding import Settled, find_slack, settle
from gradcam.sites import Site

MODES = {2: "bilinear", 3: "trilinear"}


def scorecam(recorded: Recorded, site: Site, effort: Effort, *, join: Join = add_up) -> Settled:
    """Score-CAM: the channels, weighted by the softmax of the scores of the pictures seen through each of them.

    Maps (N,K,...), before the ReLU. Wang et al., CVPR workshops 2020, algorithm 1: a channel is resized to the pictures'
    size, brought to [0,1] and multiplied by the picture. The baseline's score is the same for all channels, and the softmax
    does not feel it. A channel that is the same everywhere, up to rounding, has no mask; it gets no weight and does not
    count in the softmax: it could only add the same to every place, and one of zeros would only scale the map.
    Raises `GradcamError` where the memory budget holds not one variant.
    """
    return _join(recorded, site, _weights(recorded, site, effort, most=site.grid.shape[1]), join)


def fasterscorecam(recorded: Recorded, site: Site, effort: Effort, *, channels: int, join: Join = add_up) -> Settled:
    """Faster-Score-CAM: Score-CAM of the channels that vary most over the grid, so many of each image.

    Maps (N,K,...), before the ReLU. From tf-keras-vis, which has no paper for it. Raises as `scorecam` does, and
    `GradcamError` for fewer than one channel.
    """
    check_integer("fasterscorecam", "channels", channels, 1)
    return _join(recorded, site, _weights(recorded, site, effort, most=channels), join)


def sscam(
    recorded: Recorded, site: Site, effort: Effort, *, samples: int, noise: float, seed: int, join: Join = add_up
) -> Settled:
    """SS-CAM: Score-CAM with scores averaged over masks with Gaussian noise.

    Maps (N,K,...), before the ReLU. Wang et al., arXiv:2006.14255, its first kind: `samples` times noise of standard
    deviation `noise` is added to each mask in [0,1]. The same noise for all images, so that none depends on its neighbours;
    it depends on `seed` alone. Raises as `scorecam` does, and `GradcamError` for options that cannot be.
    """
    check_integer("sscam", "samples", samples, 1)
    check_number("sscam", "noise", noise)
    check_seed("sscam", seed)

    def add_noise(masks: Tensor, numbers: range) -> Tensor:
        drawn = torch.stack([_draw_noise(masks.shape[3:], seed + number) for number in numbers])
        return masks + noise * drawn.to(masks)[:, None, None]

    weights = _weights(recorded, site, effort, most=site.grid.shape[1], rounds=samples, alter=add_noise)
    return _join(recorded, site, weights, join)


def _draw_noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")


def iscam(recorded: Recorded, site: Site, effort: Effort, *, steps: int, join: Join = add_up) -> Settled:
    """IS-CAM: Score-CAM with scores averaged on the way from an empty mask to the whole.

    Maps (N,K,...), before the ReLU. Naidu et al., arXiv:2010.03023: the integral as the mean of masks times 1/n, 2/n, ... 1.
    Raises as `scorecam` does, and `GradcamError` for fewer than one step.
    """
    check_integer("iscam", "steps", steps, 1)

    def scale(masks: Tensor, numbers: range) -> Tensor:
        shares = [(number % steps + 1) / steps for number in numbers]
        return masks * torch.tensor(shares, dtype=masks.dtype, device=masks.device).reshape(-1, *[1] * (masks.ndim - 1))

    weights = _weights(recorded, site, effort, most=site.grid.shape[1], rounds=steps, alter=scale)
    return _join(recorded, site, weights, join)


def _join(recorded: Recorded, site: Site, weights: Tensor, join: Join) -> Settled:
    """The weighted channels' sum, which may cancel where there are activations of either sign."""
    return settle(lambda shake: join(shake(site.grid, 1), weights), find_slack(recorded))


def _weights(
    recorded: Recorded,
    site: Site,
    effort: Effort,
    *,
    most: int,
    rounds: int = 1,
    alter: Callable[[Tensor, range], Tensor] | None = None,
) -> Tensor:
    """Weights (N,K,C) of at most so many channels of each image, those that vary most; their scores are means of rounds.

    `alter(masks, numbers)`: masks (v,N,1,...) in [0,1], of which each has `rounds` numbers, one after another.
    """
    channels, is_there = _rank_channels(site.grid, most, find_slack(recorded))
    count = channels.shape[1]
    if count == 0:  # all are the same everywhere
        return site.grid.new_zeros(*recorded.scored.values.shape, site.grid.shape[1])

    def see_through(copies: Tensor, numbers: range) -> None:
        masks = _masks(site.grid, channels[:, [number // rounds for number in numbers]], effort.batch.size)
        masks = masks if alter is None else alter(masks, numbers)
        copies.mul_(masks.flatten(0, 1).to(copies))

    found = score_input(recorded, Variants(effort.batch.pictures, rounds * count, see_through), effort)
    # A model on several devices may give its scores on another one than the layer's.
    scores = found.values.to(site.grid.device).unflatten(0, (count, rounds)).mean(1).permute(1, 2, 0)  # (N,K,V)
    shares = scores.masked_fill(~is_there[:, None], -torch.inf).softmax(2).nan_to_num(0)  # NaN: an image without masks
    weights = shares.new_zeros(*shares.shape[:2], site.grid.shape[1])
    return weights.scatter_(2, channels[:, None].expand_as(shares), shares).to(site.grid.dtype)


def _rank_channels(grid: Tensor, most: int, slack: float) -> tuple[Tensor, Tensor]:
    """For each image the channels (N,V) that vary over the grid, at most so many, the most varied first; and which count.

    By more than rounding, which is `slack` of their values.

    Images in which fewer vary have others in the places that do not count.
    """
    values = grid.flatten(2)
    varies = values.amax(2) - values.amin(2) > slack * values.abs().amax(2)
    order = values.var(2, correction=0).masked_fill(~varies, -1).argsort(dim=1, descending=True, stable=True)
    counts = varies.sum(1).clamp(max=most)
    order = order[:, : int(counts.max())]
    return order, torch.arange(order.shape[1], dtype=torch.int64, device=grid.device) < counts[:, None]


def _masks(grid: Tensor, channels: Tensor, size: Sequence[int]) -> Tensor:
    """The channels (N,v) as masks (v,N,1,...) of the pictures' size, each from 0 to 1."""
    chosen = grid[torch.arange(len(grid), dtype=torch.int64, device=grid.device), channels.mT]
    large = F.interpolate(chosen, size=tuple(size), mode=MODES[len(size)], align_corners=False).flatten(2)
    low, high = large.amin(2, keepdim=True), large.amax(2, keepdim=True)
    span = torch.where(high > low, high - low, 1)
    return ((large - low) / span).unflatten(2, tuple(size))[:, :, None]
