"""Methods that binarise the activations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.methods.joining import ROUNDING, Join, add_up

SIGMAS = 2.0


def fem(activations: Tensor, *, join: Join = add_up) -> Tensor:
    """FEM: the places where a channel is two standard deviations above its mean, summed with that mean; of no class.

    Activations (N,C,...) to maps (N,...), before the ReLU. Fuad et al., IPTA 2020, section III; a channel that is the same
    everywhere, up to rounding, has no such place.
    """
    a = activations.flatten(2)
    mean = a.mean(2, keepdim=True)
    deviation = (a - mean).square().mean(2, keepdim=True).sqrt()
    varies = deviation > ROUNDING * torch.finfo(a.dtype).eps * mean.abs()
    strong = (a >= mean + SIGMAS * deviation) & varies
    return join(strong.to(a.dtype).view_as(activations), mean[:, None, :, 0])[:, 0]
