"""Methods that weight the activations by their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM: the sum of the channels, each weighted by the mean of its gradient over the grid.

    Activations (N,C,...) and gradients (N,K,C,...) to maps (N,K,...), before the ReLU.
    Selvaraju et al., ICCV 2017, equations 1 and 2.
    """
    weights = gradients.flatten(3).mean(3)
    maps = weights @ activations.flatten(2)
    return maps.unflatten(2, activations.shape[2:])
