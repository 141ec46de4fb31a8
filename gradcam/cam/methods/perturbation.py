"""Methods that see what becomes of the score where something is changed: channels, places of the grid, or the picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.cam.forward import Recorded, recorded_pass
from gradcam.cam.grid import GridActivations, blind_layer
from gradcam.cam.methods.one_pass import Join, add_up
from gradcam.cam.methods.rerun import Variants, layer_output, require_effect, score_input, score_layer
from gradcam.cam.rounding import TURNS, Settled, Shake, compare, settle, shake
from gradcam.errors import GradcamError, shorten
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import jacobian
from gradcam.hooks.memory import RerunBudget
from gradcam.hooks.nested import Batch
from gradcam.options import check_count

MODES = {2: "bilinear", 3: "trilinear"}  # of resizing, by how many sides a picture has
MOST_SEED = 2**62 - 1  # that a generator takes
MASKS_AT_ONCE = 64  # in RISE's sum; their scores are computed in chunks that fit the memory budget


def ablationcam(recorded: Recorded, site: GridActivations, budget: RerunBudget, *, join: Join = add_up) -> Settled:
    """Ablation-CAM: the channels, each weighted by how much of the score is lost where it is zero.

    Maps (N,K,...), before the ReLU. Desai and Ramaswamy, WACV 2020, equations 4 and 5: the weight is (y - y_k) / y. Divided
    by |y| here, since a negative score would turn every weight round, and by nothing where y is 0. A channel is zero
    everywhere: on a transformer's class token and its like, too, where no function for `reshape` leaves them out.
    A weight has the sign of what the channel contributes: where activations may be negative, as before a ReLU, that is not
    the sign of its gradient. Choose a layer behind one.
    Raises `LayerError` where no channel changes the score, `GradcamError` as `score_layer` does.
    """

    def ablate(copies: Tensor, numbers: range) -> None:
        def switch_off(channels: Tensor) -> None:
            variants = channels.unflatten(0, (len(numbers), -1)).transpose(1, 2)
            variants[range(len(numbers)), numbers] = 0

        site.layout.change_channels(copies, switch_off)

    found = score_layer(recorded, site, Variants(layer_output(site), site.grid.shape[1], ablate), budget)
    require_effect(found, site, recorded)
    without = found.values.permute(1, 2, 0)  # (N,K,C)

    def weigh(shake: Shake) -> Tensor:
        plain = shake(found.plain, 2)[..., None]
        lost = plain - shake(without, 2)
        weights = torch.where(plain == 0, lost, lost / plain.abs())
        return join(site.grid, weights.to(site.grid))  # which may be on another device than the scores

    return settle(weigh, recorded.score_slack)


def reciprocam(recorded: Recorded, site: GridActivations, budget: RerunBudget) -> Settled:
    """Recipro-CAM: at each place of the grid, the score of what lies around it alone.

    Maps (N,K,...) of either sign. Byun and Lee, arXiv:2209.14074, section 3: the activations are multiplied by a Gaussian
    window, (1 2 1; 2 4 2; 1 2 1) / 16, around the place, and cut off at the border. The score is the one that was asked for,
    where the paper has the probability. Its zero is anywhere, and the paper's heatmaps take their minimum away; here zero is
    what the model scores where nothing is left on the grid: a positive value speaks for the class, a negative one against
    it, and the paper's heatmap is (m - m.min()) / (m.max() - m.min()) of these maps. A volume's window is the product of
    (1 2 1) / 4 along its three axes. Class tokens and their like stay as they are.
    Raises as `ablationcam` does.
    """
    output, lengths = layer_output(site), site.grid.shape[2:]
    places = lengths.numel()

    def look_through_window(copies: Tensor, numbers: range) -> None:
        windows = _windows(numbers, lengths).to(copies)[:, None, None]
        site.layout.change_grid(copies, lambda grid: grid.unflatten(0, (len(numbers), -1)).mul_(windows))

    found = score_layer(recorded, site, Variants(output, places + 1, look_through_window), budget)
    require_effect(found, site, recorded)
    scores = found.values.permute(1, 2, 0)  # (N,K,V)

    def subtract(shake: Shake) -> Tensor:
        shaken = shake(scores, 2)
        return (shaken[..., :-1] - shaken[..., -1:]).unflatten(2, lengths)

    return settle(subtract, recorded.score_slack)


def _windows(numbers: range, lengths: torch.Size) -> Tensor:
    """The windows (v,...) around the places of these numbers; zero for the number behind the last."""
    inside = [number for number in numbers if number < lengths.numel()]
    places = torch.tensor(inside, dtype=torch.int64, device="cpu")
    windows = torch.ones(len(places), *[1] * len(lengths), dtype=torch.float32, device="cpu")
    for axis, (length, index) in enumerate(zip(lengths, torch.unravel_index(places, lengths))):
        distances = (torch.arange(length, dtype=torch.float32, device="cpu")[None] - index[:, None]).abs()
        profile = (0.5 - distances / 4).relu()  # 1/2 at the place, 1/4 beside it
        windows = windows * profile.reshape(-1, *[length if other == axis else 1 for other in range(len(lengths))])
    return torch.cat([windows, windows.new_zeros(len(numbers) - len(places), *lengths)])


def check_number(method: str, option: str, value: Any, most: float = math.inf) -> None:
    """Raises `GradcamError` for anything but a number above 0, finite and below `most`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < most:
        limit = "" if most == math.inf else f" and below {most:g}"
        raise GradcamError(f"{method}: {option} is {shorten(value)}, expected a number above 0{limit}.")


def scorecam(recorded: Recorded, site: GridActivations, budget: RerunBudget, *, join: Join = add_up) -> Settled:
    """Score-CAM: the channels, weighted by the softmax of the scores of the pictures seen through each of them.

    Maps (N,K,...), before the ReLU. Wang et al., CVPR workshops 2020, algorithm 1: a channel is resized to the pictures'
    size, brought to [0,1] and multiplied by the picture. The baseline's score is the same for all channels, and the softmax
    does not feel it. A channel that is the same everywhere, up to rounding, has no mask; it gets no weight and does not
    count in the softmax: it could only add the same to every place, and one of zeros would only scale the map.
    Raises `GradcamError` where the memory budget holds not one variant.
    """
    return _join(recorded, site, _weights(recorded, site, budget, most=site.grid.shape[1]), join)


def fasterscorecam(
    recorded: Recorded, site: GridActivations, budget: RerunBudget, *, channels: int, join: Join = add_up
) -> Settled:
    """Faster-Score-CAM: Score-CAM of the channels that vary most over the grid, so many of each image. Maps (N,K,...),
    before the ReLU. From tf-keras-vis, which has no paper for it. Raises as `scorecam` does, and `GradcamError` for
    fewer than one channel."""
    check_count(channels, "fasterscorecam: channels", "an int, 1 or more.")
    return _join(recorded, site, _weights(recorded, site, budget, most=channels), join)


def sscam(
    recorded: Recorded,
    site: GridActivations,
    budget: RerunBudget,
    *,
    samples: int,
    noise: float,
    seed: int,
    join: Join = add_up,
) -> Settled:
    """SS-CAM: Score-CAM with scores averaged over masks with Gaussian noise. Maps (N,K,...), before the ReLU. Wang et
    al., arXiv:2006.14255, its first kind: `samples` times noise of standard deviation `noise` is added to each mask in
    [0,1]. The same noise for all images, so that none depends on its neighbours; it depends on `seed` alone. Raises as
    `scorecam` does, and `GradcamError` for options that cannot be."""
    check_count(samples, "sscam: samples", "an int, 1 or more.")
    check_number("sscam", "noise", noise)
    check_count(seed, "sscam: seed", "an int, 0 or more.", least=0, most=MOST_SEED)

    def add_noise(masks: Tensor, numbers: range) -> Tensor:
        drawn = torch.stack([_draw_noise(masks.shape[3:], seed + number) for number in numbers])
        return masks + noise * drawn.to(masks)[:, None, None]

    weights = _weights(recorded, site, budget, most=site.grid.shape[1], rounds=samples, alter=add_noise)
    return _join(recorded, site, weights, join)


def _draw_noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")


def iscam(
    recorded: Recorded, site: GridActivations, budget: RerunBudget, *, steps: int, join: Join = add_up
) -> Settled:
    """IS-CAM: Score-CAM with scores averaged on the way from an empty mask to the whole. Maps (N,K,...), before the
    ReLU. Naidu et al., arXiv:2010.03023: the integral as the mean of masks times 1/n, 2/n, ... 1. Raises as `scorecam`
    does, and `GradcamError` for fewer than one step."""
    check_count(steps, "iscam: steps", "an int, 1 or more.")

    def scale(masks: Tensor, numbers: range) -> Tensor:
        shares = [(number % steps + 1) / steps for number in numbers]
        return masks * torch.tensor(shares, dtype=masks.dtype, device=masks.device).reshape(-1, *[1] * (masks.ndim - 1))

    weights = _weights(recorded, site, budget, most=site.grid.shape[1], rounds=steps, alter=scale)
    return _join(recorded, site, weights, join)


def _join(recorded: Recorded, site: GridActivations, weights: Tensor, join: Join) -> Settled:
    """The weighted channels' sum, which may cancel where there are activations of either sign."""
    return settle(lambda shake: join(shake(site.grid, 1), weights), recorded.slack)


def _weights(
    recorded: Recorded,
    site: GridActivations,
    budget: RerunBudget,
    *,
    most: int,
    rounds: int = 1,
    alter: Callable[[Tensor, range], Tensor] | None = None,
) -> Tensor:
    """Weights (N,K,C) of at most so many channels of each image, those that vary most; their scores are means of
    rounds. `alter(masks, numbers)`: masks (v,N,1,...) in [0,1], of which each has `rounds` numbers, one after
    another."""
    channels, is_there = _rank_channels(site.grid, most, recorded.slack)
    count = channels.shape[1]
    if count == 0:  # all are the same everywhere
        return site.grid.new_zeros(*recorded.scored.values.shape, site.grid.shape[1])

    def see_through(copies: Tensor, numbers: range) -> None:
        masks = _masks(site.grid, channels[:, [number // rounds for number in numbers]], budget.batch.size)
        masks = masks if alter is None else alter(masks, numbers)
        copies.mul_(masks.flatten(0, 1).to(copies))

    found = score_input(recorded, Variants(budget.batch.pictures, rounds * count, see_through), budget)
    # A model on several devices may give its scores on another one than the layer's.
    scores = found.values.to(site.grid.device).unflatten(0, (count, rounds)).mean(1).permute(1, 2, 0)  # (N,K,V)
    shares = scores.masked_fill(~is_there[:, None], -torch.inf).softmax(2).nan_to_num(0)  # NaN: an image without masks
    weights = shares.new_zeros(*shares.shape[:2], site.grid.shape[1])
    return weights.scatter_(2, channels[:, None].expand_as(shares), shares).to(site.grid.dtype)


def _rank_channels(grid: Tensor, most: int, slack: float) -> tuple[Tensor, Tensor]:
    """For each image the channels (N,V) that vary over the grid, at most so many, the most varied first; and which
    count. By more than rounding, which is `slack` of their values. Images in which fewer vary have others in the places
    that do not count."""
    values = grid.flatten(2)
    varies = values.amax(2) - values.amin(2) > slack * values.abs().amax(2)
    order = values.var(2, correction=0).masked_fill(~varies, -1).argsort(dim=1, descending=True, stable=True)
    counts = varies.sum(1).clamp(max=most)
    order = order[:, : int(counts.max())]
    return order, torch.arange(order.shape[1], dtype=torch.int64, device=grid.device) < counts[:, None]


def _masks(grid: Tensor, channels: Tensor, size: Sequence[int]) -> Tensor:
    chosen = grid[torch.arange(len(grid), dtype=torch.int64, device=grid.device), channels.mT]
    large = F.interpolate(chosen, size=tuple(size), mode=MODES[len(size)], align_corners=False).flatten(2)
    low, high = large.amin(2, keepdim=True), large.amax(2, keepdim=True)
    span = torch.where(high > low, high - low, 1)
    return ((large - low) / span).unflatten(2, tuple(size))[:, :, None]


def rise(recorded: Recorded, budget: RerunBudget, *, masks: int, cells: int, probability: float, seed: int) -> Settled:
    """RISE: where showing a place raises the score above its mean over random masks, and where it lowers it.

    Maps (N,K,...) at the pictures' own size, of either sign. Petsiuk et al., BMVC 2018, equation 6: the sum of the masks
    times their scores, by their number and by `probability`. The mean of the scores is taken from each first. It would only
    add nearly the same to every place, and the paper's pictures take it away again with their minimum; without it zero means
    that a place makes no difference. `cells`: of the grid along each side, of which each is seen with `probability`, before
    it is resized and shifted at random (section 3.2). The masks depend on `seed` alone, and are the same for all images.
    Raises `GradcamError` for options that cannot be, and where the memory budget holds not one variant.
    """
    check_count(masks, "rise: masks", "an int, 1 or more.")
    check_count(cells, "rise: cells", "an int, 1 or more.")
    check_number("rise", "probability", probability, most=1)
    check_count(seed, "rise: seed", "an int, 0 or more.", least=0, most=MOST_SEED)
    pictures, size = budget.batch.pictures, budget.batch.size

    def draw(numbers: range) -> Tensor:
        drawn = [_draw_mask(size, cells, probability, seed + number) for number in numbers]
        return torch.stack(drawn).to(pictures.device)

    def see_through(copies: Tensor, numbers: range) -> None:
        copies.unflatten(0, (len(numbers), -1)).mul_(draw(numbers).to(copies)[:, None, None])

    scores = score_input(recorded, Variants(pictures, masks, see_through), budget).values
    slack, in_order = recorded.score_slack, scores.permute(1, 2, 0)
    shaken = [shake(in_order, 2, slack, turn).permute(2, 0, 1) for turn in range(TURNS)]
    above = torch.stack([each - each.mean(0) for each in (scores, *shaken)], 1)  # (V,turns,N,K)
    total = above.new_zeros((*above.shape[1:], *size))
    for start in range(0, masks, MASKS_AT_ONCE):
        numbers = range(start, min(start + MASKS_AT_ONCE, masks))
        total += torch.tensordot(above[numbers.start : numbers.stop], draw(numbers).to(above), dims=([0], [0]))
    maps, *others = total.div_(masks * probability).unbind()
    return compare(maps, others)


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


def smooth_gradcam_pp(
    recorded: Recorded,
    site: GridActivations,
    budget: RerunBudget,
    *,
    samples: int,
    noise: float,
    seed: int,
    join: Join = add_up,
) -> Settled:
    """Smooth Grad-CAM++: channels weighted as in Grad-CAM++, from means of derivatives over noisy copies of the pictures.

    Maps (N,K,...). Omeiza et al., arXiv:1908.01224, equation 8: the first three derivatives are averaged over `samples`
    copies with Gaussian noise, of standard deviation `noise` times the range of each picture's values (which is SmoothGrad's
    measure; the paper names none). As in our Grad-CAM++ they are powers of the score's gradient. The classes and the
    activations are those of the picture without noise. The noise is the same for all images, and depends on `seed` alone.
    Raises `GradcamError` for options that cannot be, `LayerError` where no copy has a gradient at the layer.
    """
    check_count(samples, "smoothgradcam-pp: samples", "an int, 1 or more.")
    check_number("smoothgradcam-pp", "noise", noise)
    check_count(seed, "smoothgradcam-pp: seed", "an int, 0 or more.", least=0, most=MOST_SEED)
    sums: list[Tensor] = []
    is_blind = True
    for sample in range(samples):
        gradients = _gradients(recorded, site, _add_noise(budget.batch, noise, seed + sample))
        is_blind = is_blind and not gradients.any()
        powers = [gradients, gradients.square(), gradients.pow(3)]
        sums = [total.add_(power) for total, power in zip(sums, powers)] if sums else powers
        budget.report(sample + 1, samples)
    if is_blind:
        raise blind_layer(site)
    first, second, third = (total.flatten(3) / samples for total in sums)
    denominators = 2 * second + site.grid.flatten(2).sum(2)[:, None, :, None] * third
    coefficients = (second / denominators).masked_fill(denominators == 0, 0)
    weights = (coefficients * first.relu()).sum(3)
    return settle(lambda shake: join(shake(site.grid, 1), weights), recorded.slack)


def _gradients(recorded: Recorded, site: GridActivations, batch: Batch) -> Tensor:
    layer = site.layer
    device, autocast = recorded.scored.values.device.type, recorded.autocast
    with (
        pytorch.autocast(device, autocast),
        recorded_pass(recorded.model, batch, [recorded.outlets[layer]], recorded.scored.target) as again,
    ):
        chunks = jacobian(again.scored.values, [again.activations[layer]], scaled=again.has_float16)
        return torch.cat([site.to_grid(gradient, "gradients")[0] for (gradient,) in chunks], 1)


def _add_noise(batch: Batch, noise: float, seed: int) -> Batch:
    pictures = batch.pictures
    drawn = _draw_noise(pictures.shape[1:], seed).to(pictures)
    values = pictures.flatten(1)
    ranges = (values.amax(1) - values.amin(1)).reshape(-1, *[1] * (pictures.ndim - 1))
    return batch.copy(pictures=pictures + noise * ranges * drawn)
