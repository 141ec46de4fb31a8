"""Compute the maps of one-pass methods, by pure functions of activations and gradients on a grid.

Most methods weight the channels and add them. The methods at the end of this module use the first principal component
instead. The sign of a principal component is arbitrary, so these rules choose it:

For activations alone, the value furthest from zero is positive. Activations are not centred, so after a ReLU, Eigen-CAM
is positive everywhere.

For activations times gradients, the sign agrees with the sum over the channels, which is HiResCAM: the inner product of
the component and this sum is positive. If the inner product is only rounding error, the value furthest from zero is
positive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradcam.errors import LayerError

ROUNDING = 64.0  # A sum of up to this many units in the last place of its terms counts as rounding error.

SIGMAS = 2.0  # FEM counts an activation as strong if it is this many standard deviations above its channel's mean.
MAX_CELLS = 1024  # Kernel PCA decomposes a matrix of cells x cells.

# Takes activations (N,C,...) and weights, (N,K,C) per channel or (N,K,C,...) per cell; returns maps (N,K,...).
Join = Callable[[Tensor, Tensor], Tensor]


def add_up(activations: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the channels."""
    if weights.ndim == 3:
        return (weights @ activations.flatten(2)).unflatten(2, activations.shape[2:])
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
    ICCV 2017, equations 1 and 2. Finer-CAM uses the gradient of a different score: the class's logit minus a share of
    its rivals' logits (Zhang et al., CVPR 2025, section 3).
    """
    return join(activations, gradients.flatten(3).mean(3))


def gradcam_pp(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute Grad-CAM++: channels weighted by the sum of their positive gradients, each with its own coefficient.

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...). Chattopadhyay et al., WACV 2018,
    equations 7 and 19, with Y = exp(score). The derivatives of Y are then powers of the score's gradient g, times
    exp(score). This factor cancels in the coefficients g^2 / (2 g^2 + sum(A) g^3). It also scales the entire map, where
    it is omitted because it is positive. A coefficient whose denominator is zero is zero.
    """
    g = gradients.flatten(3)
    total = activations.flatten(2).sum(2)[:, None, :, None]
    denominators = 2 + total * g  # The factor g^2 cancels as well.
    coefficients = (1 / denominators).masked_fill(denominators == 0, 0)
    return join(activations, (coefficients * g.relu()).sum(3))


def xgradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute XGrad-CAM: channels weighted by their activation-weighted mean gradient, sum(A g) / sum(A).

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...) before the ReLU. Fu et al., BMVC 2020,
    section 3. A channel has weight zero if its sum is zero or only rounding error, as after an instance norm.
    """
    a = activations.flatten(2)[:, None]
    total = a.sum(3)
    products = (a * gradients.flatten(3)).sum(3)
    is_rounding = total.abs() <= ROUNDING * torch.finfo(a.dtype).eps * a.abs().sum(3)
    return join(activations, (products / total).masked_fill(is_rounding, 0))


def shapleycam(activations: Tensor, gradients: Tensor, curvatures: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute Shapley-CAM: channels weighted by the mean of the gradient minus half of H A (Hessian times activations).

    Takes activations (N,C,...), gradients (N,K,C,...) and curvatures H A (N,K,C,...); returns maps (N,K,...) before the
    ReLU. Cai, arXiv:2501.06261: the weights are a second-order expansion of the Shapley value. If the network after the
    layer is linear, the curvature is zero and this is Grad-CAM.
    """
    return join(activations, (gradients - curvatures / 2).flatten(3).mean(3))


def fem(activations: Tensor, *, join: Join = add_up) -> Tensor:
    """Compute FEM: the cells where a channel is far above its mean, weighted by that mean; class-agnostic.

    Takes activations (N,C,...); returns maps (N,...) before the ReLU. Fuad et al., IPTA 2020, section III: "far" means
    two standard deviations or more. A channel that is constant up to rounding has no such cell.
    """
    a = activations.flatten(2)
    mean = a.mean(2, keepdim=True)
    deviation = (a - mean).square().mean(2, keepdim=True).sqrt()
    varies = deviation > ROUNDING * torch.finfo(a.dtype).eps * mean.abs()
    strong = (a >= mean + SIGMAS * deviation) & varies
    return join(strong.to(a.dtype).view_as(activations), mean[:, None, :, 0])[:, 0]


def eigencam(activations: Tensor) -> Tensor:
    """Compute Eigen-CAM: the activations projected on their first right singular vector, not centred; class-agnostic.

    Takes activations (N,C,...); returns maps (N,...) before the ReLU. Muhammad and Yeasin, IJCNN 2020, section III.
    """
    return _make_peak_positive(_first_component(activations))


def eigengradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Compute Eigen-CAM of activations times gradients, which depends on the class.

    Takes activations (N,C,...) and gradients (N,K,C,...); returns maps (N,K,...) before the ReLU. The method is from
    pytorch-grad-cam; there is no paper. As in the paper of Eigen-CAM, nothing is centred.
    """
    return weighted_component(activations, gradients)


def weighted_component(activations: Tensor, weights: Tensor) -> Tensor:
    """Return the first principal component of the weighted channels, with the sign of their sum (eigen-smoothing).

    Takes activations (N,C,...) and weights (N,K,C) or (N,K,C,...); returns maps (N,K,...). As in `eigencam`, the
    channels are not centred. Eigen-smoothing comes from pytorch-grad-cam, whose `eigen_smooth` centres each channel and
    leaves the sign undetermined.
    """
    expanded = weights.reshape(weights.shape + (1,) * (activations.ndim - 2)) if weights.ndim == 3 else weights
    products = activations[:, None] * expanded
    components = _first_component(products.flatten(0, 1)).unflatten(0, products.shape[:2])
    agreement = (components * products.sum(2)).flatten(2).sum(2)
    terms = (components * products.abs().sum(2)).flatten(2).abs().sum(2)
    is_certain = agreement.abs() > ROUNDING * torch.finfo(terms.dtype).eps * terms
    agreement = torch.where(is_certain, agreement, _peaks(components.flatten(0, 1)).view_as(agreement))
    return torch.where(_add_axes(agreement, components) < 0, -components, components)


def kpcacam(activations: Tensor) -> Tensor:
    """Compute KPCA-CAM: the first component of kernel PCA over the cells of the grid; class-agnostic.

    Takes activations (N,C,...); returns maps (N,...) before the ReLU. Karmani et al., IEEE MMSP 2024, with the sigmoid
    kernel tanh(x y / C + 1) on activations centred over the grid; the kernel matrix is centred too. Raises `LayerError`
    for grids of more than 1024 cells.
    """
    cells = activations[0, 0].numel()
    if cells > MAX_CELLS:
        raise LayerError(
            f"The grid of this layer has {cells} cells, and KPCA-CAM takes at most {MAX_CELLS}: choose a deeper layer."
        )
    components = torch.stack([_kernel_component(points) for points in _to_float64(activations.flatten(2))])
    return _make_peak_positive(components.to(activations).unflatten(1, activations.shape[2:]))


def _kernel_component(points: Tensor) -> Tensor:
    points = points - points.mean(1, keepdim=True)
    kernel = torch.tanh(points.mT @ points / len(points) + 1)
    rounding = kernel.shape[0] * torch.finfo(kernel.dtype).eps * kernel.abs().amax()
    kernel = kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
    values, vectors = torch.linalg.eigh(kernel)
    # Identical points leave only rounding error, which a heatmap would show at full strength.
    return vectors[:, -1] * torch.where(values[-1] > rounding, values[-1], 0).sqrt()


def _to_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64 (on the CPU for MPS), because a Gram matrix squares the condition number."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _first_component(tensor: Tensor) -> Tensor:
    """Return the first left singular vector over the grid, times its singular value.

    Takes (N,C,...) and returns (N,...), of either sign. The vector is computed from the smaller of the two Gram
    matrices.
    """
    matrix = _to_float64(tensor.flatten(2))  # (N,C,P)
    channels, cells = matrix.shape[1:]
    if cells <= channels:
        values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
        component = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
    else:
        _, vectors = torch.linalg.eigh(matrix @ matrix.mT)
        component = (vectors[:, None, :, -1] @ matrix)[:, 0]
    return component.to(tensor).unflatten(1, tensor.shape[2:])


def _make_peak_positive(components: Tensor) -> Tensor:
    """Return components (N,...), with the sign for which the value furthest from zero is positive."""
    return torch.where(_add_axes(_peaks(components), components) < 0, -components, components)


def _peaks(components: Tensor) -> Tensor:
    flat = components.flatten(1)
    return flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]


def _add_axes(values: Tensor, components: Tensor) -> Tensor:
    return values.reshape(values.shape + (1,) * (components.ndim - values.ndim))
