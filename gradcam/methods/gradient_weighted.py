"""Methods that weight each channel of the activations by one number, made from its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.methods.joining import ROUNDING, Join, add_up


def gradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Grad-CAM: the sum of the channels, each weighted by the mean of its gradient over the grid.

    Activations (N,C,...) and gradients (N,K,C,...) to maps (N,K,...), before the ReLU.
    Selvaraju et al., ICCV 2017, equations 1 and 2. Finer-CAM is the same with the gradient of another score: of the
    class's logit minus a share of its rivals' (Zhang et al., CVPR 2025, section 3).
    """
    return join(activations, gradients.flatten(3).mean(3))


def gradcam_pp(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Grad-CAM++: weighted by the sum of the positive gradients, each with a coefficient of its own.

    Activations (N,C,...) and gradients (N,K,C,...) to maps (N,K,...).
    Chattopadhyay et al., WACV 2018, equations 7 and 19, with Y = exp(score): the derivatives of Y are then powers of the
    score's gradient g, and the factor exp(score) cancels in the coefficients g^2 / (2 g^2 + sum(A) g^3). It remains as one
    positive factor of the whole map, which is left out here. A coefficient whose denominator is zero is zero.
    """
    g = gradients.flatten(3)
    total = activations.flatten(2).sum(2)[:, None, :, None]
    denominators = 2 + total * g  # g^2, in both, is left out as well
    coefficients = (1 / denominators).masked_fill(denominators == 0, 0)
    return join(activations, (coefficients * g.relu()).sum(3))


def xgradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """XGrad-CAM: weighted by the mean of the gradient, in which each place counts by its share of the channel's sum.

    Activations (N,C,...) and gradients (N,K,C,...) to maps (N,K,...), before the ReLU.
    Fu et al., BMVC 2020, section 3: the weight is sum(A g) / sum(A). A channel whose sum is zero has weight zero, and one
    of whose sum nothing but rounding is left, as behind an instance norm.
    """
    a = activations.flatten(2)[:, None]
    total = a.sum(3)
    products = (a * gradients.flatten(3)).sum(3)
    is_nothing = total.abs() <= ROUNDING * torch.finfo(a.dtype).eps * a.abs().sum(3)
    return join(activations, (products / total).masked_fill(is_nothing, 0))


def shapleycam(activations: Tensor, gradients: Tensor, curvatures: Tensor, *, join: Join = add_up) -> Tensor:
    """Shapley-CAM: weighted by the mean of the gradient minus half of the Hessian times the activations.

    Activations (N,C,...), gradients and curvatures (N,K,C,...), the latter being H A, to maps (N,K,...), before the ReLU.
    Cai, arXiv:2501.06261, the second-order expansion of the Shapley value. Behind the layer, a network that is linear in it
    has no curvature, and this is Grad-CAM.
    """
    return join(activations, (gradients - curvatures / 2).flatten(3).mean(3))
