"""Smooth Grad-CAM++: Grad-CAM++ from derivatives that are averaged over noisy copies of the picture."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.arguments import Batch
from gradcam.effort import Effort
from gradcam.gradients import jacobian
from gradcam.methods.joining import Join, add_up
from gradcam.perturbation.options import check_integer, check_number, check_seed
from gradcam.recording import Recorded, recorded_pass
from gradcam.rounding import Settled, find_slack, settle
from gradcam.sites import Site, blind_layer


def smooth_gradcam_pp(
    recorded: Recorded, site: Site, effort: Effort, *, samples: int, noise: float, seed: int, join: Join = add_up
) -> Settled:
    """Smooth Grad-CAM++: channels weighted as in Grad-CAM++, from means of derivatives over noisy copies of the pictures.

    Maps (N,K,...). Omeiza et al., arXiv:1908.01224, equation 8: the first three derivatives are averaged over `samples`
    copies with Gaussian noise, of standard deviation `noise` times the range of each picture's values (which is SmoothGrad's
    measure; the paper names none). As in our Grad-CAM++ they are powers of the score's gradient. The classes and the
    activations are those of the picture without noise. The noise is the same for all images, and depends on `seed` alone.
    Raises `GradcamError` for options that cannot be, `LayerError` where no copy has a gradient at the layer.
    """
    check_integer("smoothgradcam-pp", "samples", samples, 1)
    check_number("smoothgradcam-pp", "noise", noise)
    check_seed("smoothgradcam-pp", seed)
    sums: list[Tensor] = []
    is_blind = True
    for sample in range(samples):
        gradients = _gradients(recorded, site, _add_noise(effort.batch, noise, seed + sample))
        is_blind = is_blind and not gradients.any()
        powers = [gradients, gradients.square(), gradients.pow(3)]
        sums = [total.add_(power) for total, power in zip(sums, powers)] if sums else powers
        effort.report(sample + 1, samples)
    if is_blind:
        raise blind_layer(site)
    first, second, third = (total.flatten(3) / samples for total in sums)
    denominators = 2 * second + site.grid.flatten(2).sum(2)[:, None, :, None] * third
    coefficients = (second / denominators).masked_fill(denominators == 0, 0)
    weights = (coefficients * first.relu()).sum(3)
    return settle(lambda shake: join(shake(site.grid, 1), weights), find_slack(recorded))


def _gradients(recorded: Recorded, site: Site, batch: Batch) -> Tensor:
    """The gradients (N,K,C,...) of the same classes' scores for other pictures."""
    layer = site.layer
    device, autocast = recorded.scored.values.device.type, recorded.autocast
    with (
        torch.autocast(device, dtype=autocast, enabled=autocast is not None),
        recorded_pass(recorded.model, batch, [recorded.outlets[layer]], recorded.scored.target) as again,
    ):
        chunks = jacobian(again.scored.values, [again.activations[layer]], scaled=again.has_float16)
        return torch.cat([site.to_grid(gradient, "gradients")[0] for (gradient,) in chunks], 1)


def _add_noise(batch: Batch, noise: float, seed: int) -> Batch:
    pictures = batch.pictures
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(pictures.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(pictures)
    values = pictures.flatten(1)
    ranges = (values.amax(1) - values.amin(1)).reshape(-1, *[1] * (pictures.ndim - 1))
    return batch.copy(pictures=pictures + noise * ranges * drawn)
