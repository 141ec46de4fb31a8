"""Compute the maps of one-pass methods, by pure functions of activations and gradients on a grid.

These methods weight the channels and add them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 64.0  # A sum counts as rounding error if it is at most this many eps times the sum of the absolute terms.

SIGMAS = 2.0  # FEM counts an activation as strong if it is this many standard deviations above its channel's mean.

# A function of activations (N,C,...) and weights, (N,K,C) per channel or (N,K,C,...) per cell. It returns maps
# (N,K,...).
Join = Callable[[Tensor, Tensor], Tensor]


def add_up(activations: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the channels."""
    if weights.ndim == 3:
        return torch.bmm(weights, activations.flatten(2)).reshape(*weights.shape[:2], *activations.shape[2:])
    return (activations[:, None] * weights).sum(2)


def hirescam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute HiResCAM: the sum over channels of activation times gradient, sum(g A).

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...) before the ReLU. Draelos and Carin,
    arXiv:2011.08891, section 3. If each channel's gradient is constant over the grid, the result equals Grad-CAM.
    """
    return join(activations, gradients)


def elementwise_gradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute Element-wise Grad-CAM: the sum over channels of the positive products of activation and gradient.

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...). The method is from pytorch-grad-cam;
    there is no paper.
    """
    return join(activations, torch.where(activations[:, None] * gradients > 0, gradients, 0))


def layercam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute LayerCAM: the sum over channels of activation times positive gradient, sum(relu(g) A).

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...) before the ReLU. Jiang et al., IEEE
    TIP 2021, section III.
    """
    return join(activations, gradients.relu())


def gradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute Grad-CAM: the sum of the channels, each weighted by the mean of its gradient over the grid.

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...) before the ReLU. Selvaraju et al.,
    ICCV 2017, equations 1 and 2. Finer-CAM uses the gradient of another score: the class's logit minus a share of the
    logits of similar classes (Zhang et al., CVPR 2025, section 3).
    """
    return join(activations, gradients.mean(tuple(range(3, gradients.ndim))))


def gradcam_pp(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute Grad-CAM++: weight each channel by a weighted sum of its positive gradients.

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...). Chattopadhyay et al., WACV 2018,
    equations 7 and 19, with Y = exp(score). The n-th derivative of Y is then exp(score) g^n, where g is the score's
    gradient. In the coefficients g^2 / (2 g^2 + sum(A) g^3), the factor exp(score) cancels. Y's gradient has this factor
    once more. It would only scale each map, so it is omitted. If a denominator is zero, the coefficient is zero.
    """
    g = gradients.flatten(3)
    total = activations.flatten(2).sum(2)[:, None, :, None]
    denominators = 2 + total * g  # The numerator and the denominator are divided by g^2.
    coefficients = (1 / denominators).masked_fill(denominators == 0, 0)
    return join(activations, (coefficients * g.relu()).sum(3))


def xgradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute XGrad-CAM: channels weighted by their activation-weighted mean gradient, sum(A g) / sum(A).

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...) before the ReLU. Fu et al., BMVC 2020,
    section 3. If a channel's sum is zero or only rounding error, as after an instance norm, the channel's weight is
    zero.
    """
    a = activations.flatten(2)[:, None]
    total = a.sum(3)
    products = (a * gradients.flatten(3)).sum(3)
    is_rounding = total.abs() <= ROUNDING * torch.finfo(a.dtype).eps * a.abs().sum(3)
    return join(activations, (products / total).masked_fill(is_rounding, 0))


def shapleycam(activations: Tensor, gradients: Tensor, curvatures: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute Shapley-CAM: weight each channel by the mean of g - H A / 2, from gradients g and curvatures H A.

    Takes activations (N,C,...), gradients (N,K,C,...) and curvatures (N,K,C,...), the Hessian times the activations.
    Returns maps (N,K,...) before the ReLU. Cai, arXiv:2501.06261: the weights are a second-order expansion of the
    Shapley value. If the network after the layer is linear, curvatures are zero and the result equals Grad-CAM.
    """
    return join(activations, (gradients - curvatures / 2).flatten(3).mean(3))


def fem(activations: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute FEM: at each cell, add up the means of those channels whose value is far above the channel's mean.

    The maps are class-agnostic. Takes activations (N,C,...); returns maps (N,...) before the ReLU. Fuad et al., IPTA
    2020, section III: "far" means two standard deviations or more. If a channel is constant up to rounding, it is not
    added at any cell.
    """
    a = activations.flatten(2)
    mean = a.mean(2, keepdim=True)
    deviation = (a - mean).square().mean(2, keepdim=True).sqrt()
    varies = deviation > ROUNDING * torch.finfo(a.dtype).eps * mean.abs()
    strong = (a >= mean + SIGMAS * deviation) & varies
    return join(strong.to(a.dtype).view_as(activations), mean[:, None, :, 0])[:, 0]
