"""Methods that change channels, cells of the grid, or the image, and measure the effect on the score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.cam.forward import RecordedPass, recorded_pass
from gradcam.cam.grid import GridActivations, blind_layer
from gradcam.cam.methods.one_pass import Join, add_up
from gradcam.cam.methods.rerun import Variants, layer_output, score_input, score_layer
from gradcam.cam.rounding import NUM_PERTURBATIONS, DenoisedMaps, Perturb, denoise, perturb, remove_noise
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import jacobian
from gradcam.hooks.containers import Batch
from gradcam.hooks.memory import RerunBudget
from gradcam.options import MAX_COUNT, argument_error, check_count

MODES = {2: "bilinear", 3: "trilinear"}  # Resizing modes, by the number of spatial axes.
MAX_SEED = 2**62 - 1  # The sum of a seed and the index of a mask must be a valid seed of a torch generator.
MASKS_PER_STEP = 64  # RISE adds up this many masks at a time, independently of the memory budget.


def ablationcam(
    recorded: RecordedPass, site: GridActivations, budget: RerunBudget, *, join: Join = add_up
) -> DenoisedMaps:
    """Compute Ablation-CAM: weight each channel by the share of the score that is lost if the channel is zero.

    Returns maps (N,K,...) before the ReLU. Desai and Ramaswamy, WACV 2020, equations 4 and 5: the weight is (y-y_k)/y,
    where y_k is the score without channel k. Here, the divisor is |y|, because a negative score would reverse the sign
    of every weight. If y is 0, the weight is y-y_k. A channel is set to zero at all cells, and at extra tokens such as
    a class token. A `reshape` function may exclude extra tokens. A weight has the sign of the channel's contribution to
    the score. If activations are negative, this sign may differ from the sign of the gradient: choose a layer after a
    ReLU. Raises `LayerError` if no channel changes the score, and the errors of `score_layer`.
    """

    def ablate(copies: Tensor, numbers: range) -> None:
        def switch_off(channels: Tensor) -> None:
            variants = channels.unflatten(0, (len(numbers), -1)).transpose(1, 2)
            variants[range(len(numbers)), numbers] = 0

        site.layout.change_channels(copies, switch_off)

    variants = Variants(layer_output(site), site.grid.shape[1], ablate)
    ablated_scores, unchanged_scores = score_layer(recorded, site, variants, budget)

    def weigh(perturb: Perturb) -> Tensor:
        unchanged = perturb(unchanged_scores, 2)[..., None]
        loss = unchanged - perturb(ablated_scores.permute(1, 2, 0), 2)  # (N,K,C)
        weights = torch.where(unchanged == 0, loss, loss / unchanged.abs())
        return join(site.grid, weights.to(site.grid))  # The layer and the scores may be on different devices.

    return denoise(weigh, recorded.score_tolerance)


def reciprocam(recorded: RecordedPass, site: GridActivations, budget: RerunBudget) -> DenoisedMaps:
    """Compute Recipro-CAM: the value of a cell is the score if only the activations around the cell are kept.

    Returns maps (N,K,...) with values of either sign. Byun and Lee, arXiv:2209.14074, section 3: the activations are
    multiplied by a Gaussian window around the cell, (1 2 1; 2 4 2; 1 2 1) / 16. At the border of the grid, the window
    is cut off. The requested score replaces the paper's probability. The paper scales each map from its minimum to its
    maximum, so its zero has no meaning. Here, the score for an empty grid is subtracted. A positive value is therefore
    evidence for the class, and a negative value is evidence against the class. For volumes, the window is the product
    of (1 2 1) / 4 along the three axes. Extra tokens such as class tokens stay unchanged. Raises the errors of
    `ablationcam`.
    """
    lengths = site.grid.shape[2:]

    def apply_window(copies: Tensor, numbers: range) -> None:
        windows = _make_windows(numbers, lengths).to(copies)[:, None, None]
        site.layout.change_grid(copies, lambda grid: grid.unflatten(0, (len(numbers), -1)).mul_(windows))

    variants = Variants(layer_output(site), lengths.numel() + 1, apply_window)
    scores = score_layer(recorded, site, variants, budget)[0].permute(1, 2, 0)  # (N,K,V)

    def subtract(perturb: Perturb) -> Tensor:
        perturbed = perturb(scores, 2)
        return (perturbed[..., :-1] - perturbed[..., -1:]).unflatten(2, lengths)

    return denoise(subtract, recorded.score_tolerance)


def _make_windows(numbers: range, lengths: torch.Size) -> Tensor:
    """Return Gaussian windows (v,...) around the numbered cells. The number after the last cell gives zeros."""
    inside = [number for number in numbers if number < lengths.numel()]
    cells = torch.tensor(inside, dtype=torch.int64, device="cpu")
    windows = torch.ones(len(cells), *[1] * len(lengths), dtype=torch.float32, device="cpu")
    for axis, (length, index) in enumerate(zip(lengths, torch.unravel_index(cells, lengths))):
        distances = (torch.arange(length, dtype=torch.float32, device="cpu")[None] - index[:, None]).abs()
        profile = (0.5 - distances / 4).relu()  # 1/2 at the cell, 1/4 at its neighbours.
        windows = windows * profile.reshape(-1, *[length if i == axis else 1 for i in range(len(lengths))])
    return torch.cat([windows, windows.new_zeros(len(numbers) - len(cells), *lengths)])


def check_number(method: str, option: str, value: Any, most: float = math.inf) -> None:
    """Raise `GradcamError` unless the value is a finite number above 0 and below `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < most:
        limit = "" if most == math.inf else f" and below {most:g}"
        raise argument_error(value, f"{method}: {option}", f"a number above 0{limit}.")


def scorecam(
    recorded: RecordedPass, site: GridActivations, budget: RerunBudget, *, join: Join = add_up
) -> DenoisedMaps:
    """Compute Score-CAM: mask the image by each channel, and weight the channels by the softmax of the scores.

    Returns maps (N,K,...) before the ReLU. Wang et al., CVPR workshops 2020, algorithm 1: a channel is resized to the
    image, scaled to [0,1] and multiplied by the image. The paper subtracts the score of a baseline image. Here, this
    step is omitted, because the softmax does not depend on a constant. If a channel is constant up to rounding, it
    gives no mask, and is excluded from the softmax and from the map. Such a channel could only scale the map or add a
    constant. Raises `GradcamError` if the memory budget is too small for one masked copy of the images.
    """
    return _mask_channels(recorded, site, budget, join)


def fasterscorecam(
    recorded: RecordedPass, site: GridActivations, budget: RerunBudget, *, channels: int, join: Join = add_up
) -> DenoisedMaps:
    """Compute Faster-Score-CAM: Score-CAM with only the channels of each image that vary most over the grid.

    Returns maps (N,K,...) before the ReLU. `channels` is the number of channels. The method is from tf-keras-vis; there
    is no paper. Raises the errors of `scorecam`, and `GradcamError` if `channels` is below 1.
    """
    check_count(channels, "fasterscorecam: channels", "an int, 1 or more.")
    return _mask_channels(recorded, site, budget, join, max_channels=channels)


def sscam(
    recorded: RecordedPass,
    site: GridActivations,
    budget: RerunBudget,
    *,
    samples: int,
    noise: float,
    seed: int,
    join: Join = add_up,
) -> DenoisedMaps:
    """Compute SS-CAM: Score-CAM with scores averaged over masks with Gaussian noise.

    Returns maps (N,K,...) before the ReLU. Wang et al., arXiv:2006.14255, first variant: each mask in [0,1] is used
    `samples` times, each time with other noise of standard deviation `noise`. All images get the same noise, so that no
    map depends on the rest of the batch. The noise depends only on `seed`. Raises the errors of `scorecam`, and
    `GradcamError` for invalid options.
    """
    check_count(samples, "sscam: samples", "an int, 1 or more.")
    check_number("sscam", "noise", noise)
    check_count(seed, "sscam: seed", "an int, 0 or more.", least=0, most=MAX_SEED)

    def add_noise(masks: Tensor, numbers: range) -> Tensor:
        noise_maps = torch.stack([_sample_noise(masks.shape[3:], seed + number) for number in numbers])
        return masks + noise * noise_maps.to(masks)[:, None, None]

    return _mask_channels(recorded, site, budget, join, rounds=samples, alter=add_noise)


def _sample_noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")


def iscam(
    recorded: RecordedPass, site: GridActivations, budget: RerunBudget, *, steps: int, join: Join = add_up
) -> DenoisedMaps:
    """Compute IS-CAM: Score-CAM with scores averaged over masks of increasing strength, from empty to full.

    Returns maps (N,K,...) before the ReLU. Naidu et al., arXiv:2010.03023: each mask is multiplied by 1/n, 2/n, ..., 1,
    and the mean of the n scores replaces the integral. Raises the errors of `scorecam`, and `GradcamError` if `steps`
    is below 1.
    """
    check_count(steps, "iscam: steps", "an int, 1 or more.")

    def scale(masks: Tensor, numbers: range) -> Tensor:
        shares = [(number % steps + 1) / steps for number in numbers]
        return masks * torch.tensor(shares, dtype=masks.dtype, device=masks.device).reshape(-1, *[1] * (masks.ndim - 1))

    return _mask_channels(recorded, site, budget, join, rounds=steps, alter=scale)


def _join(recorded: RecordedPass, site: GridActivations, weights: Tensor, join: Join) -> DenoisedMaps:
    """Return the weighted sum of the channels, without values that are only rounding error.

    If positive and negative terms cancel, the sum is only rounding error, and is replaced by zero.
    """
    return denoise(lambda perturb: join(perturb(site.grid, 1), weights), recorded.tolerance)


def _mask_channels(
    recorded: RecordedPass,
    site: GridActivations,
    budget: RerunBudget,
    join: Join,
    *,
    max_channels: int = MAX_COUNT,
    rounds: int = 1,
    alter: Callable[[Tensor, range], Tensor] = lambda masks, _: masks,
) -> DenoisedMaps:
    """Return the sum of each image's most variable channels, weighted by the scores of masked images.

    At most `max_channels` channels are used. Each channel gives `rounds` masks with consecutive numbers, and its score
    is the mean of their scores. `alter(masks, numbers)` changes masks (v,N,1,...) in [0,1].
    """
    channels, is_valid = _rank_channels(site.grid, max_channels, recorded.tolerance)
    count = channels.shape[1]
    if count == 0:  # All channels are constant.
        return _join(recorded, site, site.grid.new_zeros(*recorded.scored.values.shape, site.grid.shape[1]), join)

    def apply_masks(copies: Tensor, numbers: range) -> None:
        masks = _make_masks(site.grid, channels[:, [number // rounds for number in numbers]], budget.batch.size)
        copies.mul_(alter(masks, numbers).flatten(0, 1).to(copies))

    scores, _ = score_input(recorded, Variants(budget.batch.pictures, rounds * count, apply_masks), budget)
    # The scores and the layer may be on different devices.
    means = scores.to(site.grid.device).unflatten(0, (count, rounds)).mean(1).permute(1, 2, 0)  # (N,K,V)
    # If an image has no valid channel, its softmax is NaN. Replace NaN by 0.
    shares = means.masked_fill(~is_valid[:, None], -torch.inf).softmax(2).nan_to_num(0)
    weights = shares.new_zeros(*shares.shape[:2], site.grid.shape[1])
    weights = weights.scatter_(2, channels[:, None].expand_as(shares), shares)
    return _join(recorded, site, weights.to(site.grid.dtype), join)


def _rank_channels(grid: Tensor, max_channels: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the indices (N,V) of the channels of each image that vary most, and a mask (N,V) of the valid indices.

    The most variable channel comes first. A channel varies over the grid if its range exceeds rounding errors:
    `tolerance` times its largest magnitude. If an image has fewer such channels than another image, its other indices
    are invalid.
    """
    values = grid.flatten(2)
    varies = values.amax(2) - values.amin(2) > tolerance * values.abs().amax(2)
    order = values.var(2, correction=0).masked_fill(~varies, -1).argsort(dim=1, descending=True, stable=True)
    counts = varies.sum(1).clamp(max=max_channels)
    order = order[:, : int(counts.max())]
    return order, torch.arange(order.shape[1], dtype=torch.int64, device=grid.device) < counts[:, None]


def _make_masks(grid: Tensor, channels: Tensor, size: Sequence[int]) -> Tensor:
    maps = grid[torch.arange(len(grid), dtype=torch.int64, device=grid.device), channels.mT]
    resized = F.interpolate(maps, size=tuple(size), mode=MODES[len(size)], align_corners=False).flatten(2)
    low, high = resized.amin(2, keepdim=True), resized.amax(2, keepdim=True)
    span = torch.where(high > low, high - low, 1)
    return ((resized - low) / span).unflatten(2, tuple(size))[:, :, None]


def rise(
    recorded: RecordedPass, budget: RerunBudget, *, masks: int, cells: int, probability: float, seed: int
) -> DenoisedMaps:
    """Compute RISE: how much the score rises above the mean score of random masks if a pixel is visible.

    Returns maps (N,K,...) at the images' size, with values of either sign. Petsiuk et al., BMVC 2018, equation 6: the
    sum of the masks times their scores, divided by the number of masks and by `probability`. The mean score is
    subtracted first. A value of zero therefore means that a pixel makes no difference. Without the subtraction, the
    mean would add nearly the same value to every pixel. (In the paper, each heatmap's minimum is subtracted instead.)

    A mask is a grid with `cells` cells along each side. Each cell is visible with `probability`. The grid is resized to
    the image, and shifted at random (section 3.2). The masks depend only on `seed`, and are the same for all images.
    Raises `GradcamError` for invalid options, and if the memory budget is too small for one masked copy of the images.
    """
    check_count(masks, "rise: masks", "an int, 1 or more.")
    check_count(cells, "rise: cells", "an int, 1 or more.")
    check_number("rise", "probability", probability, most=1)
    check_count(seed, "rise: seed", "an int, 0 or more.", least=0, most=MAX_SEED)
    pictures, size = budget.batch.pictures, budget.batch.size

    def make_masks(numbers: range) -> Tensor:
        return torch.stack([_sample_mask(size, cells, probability, seed + i) for i in numbers]).to(pictures.device)

    def apply_masks(copies: Tensor, numbers: range) -> None:
        copies.unflatten(0, (len(numbers), -1)).mul_(make_masks(numbers).to(copies)[:, None, None])

    scores, _ = score_input(recorded, Variants(pictures, masks, apply_masks), budget)
    tolerance, class_scores = recorded.score_tolerance, scores.permute(1, 2, 0)
    perturbed = [perturb(class_scores, 2, tolerance, i).permute(2, 0, 1) for i in range(NUM_PERTURBATIONS)]
    # The shape is (V, 1 + perturbations, N, K).
    deviations = torch.stack([values - values.mean(0) for values in (scores, *perturbed)], 1)
    total = deviations.new_zeros((*deviations.shape[1:], *size))
    for start in range(0, masks, MASKS_PER_STEP):
        numbers = range(start, min(start + MASKS_PER_STEP, masks))
        values = deviations[numbers.start : numbers.stop]
        total += torch.tensordot(values, make_masks(numbers).to(deviations), dims=([0], [0]))
    maps, *perturbed_maps = total.div_(masks * probability).unbind()
    return remove_noise(maps, perturbed_maps)


def _sample_mask(size: Sequence[int], cells: int, probability: float, seed: int) -> Tensor:
    """Return one random mask in [0,1], upsampled from a coarse grid of visible and hidden cells.

    The grid is resized to the image plus a margin of one cell, and cropped at a random position.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    is_open = torch.rand([cells] * len(size), generator=generator, dtype=torch.float32, device="cpu") < probability
    lengths = [math.ceil(length / cells) for length in size]  # The side lengths of a cell in pixels.
    size_with_margin = [(cells + 1) * length for length in lengths]
    grid = is_open.float()[None, None]
    mask = F.interpolate(grid, size=size_with_margin, mode=MODES[len(size)], align_corners=False)[0, 0]
    for axis, (length, cell) in enumerate(zip(size, lengths)):
        start = int(torch.randint(cell, (1,), generator=generator, dtype=torch.int64, device="cpu"))
        mask = mask.narrow(axis, start, length)
    return mask


def smooth_gradcam_pp(
    recorded: RecordedPass,
    site: GridActivations,
    budget: RerunBudget,
    *,
    samples: int,
    noise: float,
    seed: int,
    join: Join = add_up,
) -> DenoisedMaps:
    """Compute Smooth Grad-CAM++: channels weighted as in Grad-CAM++, with derivatives averaged over noisy images.

    Returns maps (N,K,...). Omeiza et al., arXiv:1908.01224, equation 8: the first three derivatives are averaged over
    `samples` copies with Gaussian noise. The paper does not specify the noise. As in SmoothGrad, its standard deviation
    is `noise` times the range of each image's values. As in `gradcam_pp`, the derivatives are powers of the score's
    gradient. Classes and activations are taken from the image without noise. The noise is the same for all images, and
    depends only on `seed`. Raises `GradcamError` for invalid options, and `LayerError` if the gradients of all copies
    are zero at the layer.
    """
    check_count(samples, "smoothgradcam-pp: samples", "an int, 1 or more.")
    check_number("smoothgradcam-pp", "noise", noise)
    check_count(seed, "smoothgradcam-pp: seed", "an int, 0 or more.", least=0, most=MAX_SEED)
    sums: list[Tensor] = []
    is_blind = True
    for sample in range(samples):
        gradients = _compute_gradients(recorded, site, _add_noise(budget.batch, noise, seed + sample))
        is_blind = is_blind and not gradients.any()
        powers = [gradients, gradients.square(), gradients.pow(3)]
        sums = [total.add_(power) for total, power in zip(sums, powers)] if sums else powers
        budget.report(sample + 1, samples)
    if is_blind:
        raise blind_layer(site)
    first, second, third = (total.flatten(3) / samples for total in sums)
    denominators = 2 * second + site.grid.flatten(2).sum(2)[:, None, :, None] * third
    coefficients = (second / denominators).masked_fill(denominators == 0, 0)
    return _join(recorded, site, (coefficients * first.relu()).sum(3), join)


def _compute_gradients(recorded: RecordedPass, site: GridActivations, batch: Batch) -> Tensor:
    noisy_pass = recorded_pass(recorded.model, batch, [recorded.outlets[site.layer]], recorded.scored.target)
    with pytorch.autocast(recorded.scored.values.device.type, recorded.autocast), noisy_pass as noisy:
        chunks = jacobian(noisy.scored.values, [noisy.activations[site.layer]], scaled=noisy.has_float16)
        return torch.cat([site.to_grid(gradient, "gradients")[0] for (gradient,) in chunks], 1)


def _add_noise(batch: Batch, noise: float, seed: int) -> Batch:
    pictures = batch.pictures
    noise_map = _sample_noise(pictures.shape[1:], seed).to(pictures)
    values = pictures.flatten(1)
    ranges = (values.amax(1) - values.amin(1)).reshape(-1, *[1] * (pictures.ndim - 1))
    return batch.copy(pictures=pictures + noise * ranges * noise_map)
