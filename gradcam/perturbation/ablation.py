"""Methods that take parts of a layer's output away, and look at what becomes of the score."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.effort import Effort
from gradcam.methods.joining import Join, add_up
from gradcam.perturbation.rerun import layer_output, require_effect, score_layer
from gradcam.perturbation.variants import Variants
from gradcam.recording import Recorded
from gradcam.rounding import Settled, Shake, find_score_slack, settle
from gradcam.sites import Site


def ablationcam(recorded: Recorded, site: Site, effort: Effort, *, join: Join = add_up) -> Settled:
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

    found = score_layer(recorded, site, Variants(layer_output(site), site.grid.shape[1], ablate), effort)
    require_effect(found, site, recorded)
    without = found.values.permute(1, 2, 0)  # (N,K,C)

    def weigh(shake: Shake) -> Tensor:
        plain = shake(found.plain, 2)[..., None]
        lost = plain - shake(without, 2)
        weights = torch.where(plain == 0, lost, lost / plain.abs())
        return join(site.grid, weights.to(site.grid))  # which may be on another device than the scores

    return settle(weigh, find_score_slack(recorded))


def reciprocam(recorded: Recorded, site: Site, effort: Effort) -> Settled:
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

    found = score_layer(recorded, site, Variants(output, places + 1, look_through_window), effort)
    require_effect(found, site, recorded)
    scores = found.values.permute(1, 2, 0)  # (N,K,V)

    def subtract(shake: Shake) -> Tensor:
        shaken = shake(scores, 2)
        return (shaken[..., :-1] - shaken[..., -1:]).unflatten(2, lengths)

    return settle(subtract, find_score_slack(recorded))


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
