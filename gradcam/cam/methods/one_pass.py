"""Methods of one pass: pure functions from activations and gradients on a grid to maps.

Most weight the channels and add them up. Those at the end show the first principal component of the activations instead,
whose sign is not determined. The rules here: of activations alone, its value furthest from zero is positive; of activations
times gradients, which have a sign of their own, it agrees with their sum over the channels, that is with HiResCAM: the
inner product of both is positive. Where nothing but rounding is left of that product, the first rule holds. For
activations behind a ReLU, without centring, all of Eigen-CAM is then positive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradcam.errors import LayerError

ROUNDING = 64.0  # a sum of no more than so many units in the last place of its terms is nothing but rounding

SIGMAS = 2.0  # above a channel's mean, where FEM takes it for strong
MOST_CELLS = 1024  # of a grid whose places are compared with one another: a matrix of this squared, decomposed

# From activations (N,C,...) and weights, (N,K,C) for the channels or (N,K,C,...) for their places, to maps (N,K,...).
Join = Callable[[Tensor, Tensor], Tensor]


def add_up(activations: Tensor, weights: Tensor) -> Tensor:
    """The weighted channels' sum."""
    if weights.ndim == 3:
        return (weights @ activations.flatten(2)).unflatten(2, activations.shape[2:])
    return (activations[:, None] * weights).sum(2)


def hirescam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """HiResCAM: the sum over channels of activation times gradient. Activations (N,C,...) and gradients (N,K,C,...) to
    maps (N,K,...), before the ReLU. Draelos and Carin, arXiv:2011.08891, section 3: sum(g A). Where a channel's
    gradient is the same everywhere it is Grad-CAM."""
    return join(activations, gradients)


def elementwise_gradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Element-wise Grad-CAM: the sum over channels of the positive products of activation and gradient. Activations
    (N,C,...) and gradients (N,K,C,...) to maps (N,K,...). From pytorch-grad-cam, which has no paper for it."""
    return join(activations, torch.where(activations[:, None] * gradients > 0, gradients, 0))


def layercam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """LayerCAM: the sum over channels of activation times positive gradient. Activations (N,C,...) and gradients
    (N,K,C,...) to maps (N,K,...), before the ReLU. Jiang et al., IEEE TIP 2021, section III: sum(relu(g) A)."""
    return join(activations, gradients.relu())


def gradcam(activations: Tensor, gradients: Tensor, *, join: Join = add_up) -> Tensor:
    """Grad-CAM: the sum of the channels, each weighted by the mean of its gradient over the grid. Activations (N,C,...)
    and gradients (N,K,C,...) to maps (N,K,...), before the ReLU. Selvaraju et al., ICCV 2017, equations 1 and 2.
    Finer-CAM is the same with the gradient of another score: of the class's logit minus a share of its rivals' (Zhang
    et al., CVPR 2025, section 3)."""
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
    Activations (N,C,...) and gradients (N,K,C,...) to maps (N,K,...), before the ReLU. Fu et al., BMVC 2020, section 3:
    the weight is sum(A g) / sum(A). A channel whose sum is zero has weight zero, and one of whose sum nothing but
    rounding is left, as behind an instance norm."""
    a = activations.flatten(2)[:, None]
    total = a.sum(3)
    products = (a * gradients.flatten(3)).sum(3)
    is_nothing = total.abs() <= ROUNDING * torch.finfo(a.dtype).eps * a.abs().sum(3)
    return join(activations, (products / total).masked_fill(is_nothing, 0))


def shapleycam(activations: Tensor, gradients: Tensor, curvatures: Tensor, *, join: Join = add_up) -> Tensor:
    """Shapley-CAM: weighted by the mean of the gradient minus half of the Hessian times the activations. Activations
    (N,C,...), gradients and curvatures (N,K,C,...), the latter being H A, to maps (N,K,...), before the ReLU. Cai,
    arXiv:2501.06261, the second-order expansion of the Shapley value. Behind the layer, a network that is linear in it
    has no curvature, and this is Grad-CAM."""
    return join(activations, (gradients - curvatures / 2).flatten(3).mean(3))


def fem(activations: Tensor, *, join: Join = add_up) -> Tensor:
    """FEM: the places where a channel is two standard deviations above its mean, summed with that mean; of no class.
    Activations (N,C,...) to maps (N,...), before the ReLU. Fuad et al., IPTA 2020, section III; a channel that is the
    same everywhere, up to rounding, has no such place."""
    a = activations.flatten(2)
    mean = a.mean(2, keepdim=True)
    deviation = (a - mean).square().mean(2, keepdim=True).sqrt()
    varies = deviation > ROUNDING * torch.finfo(a.dtype).eps * mean.abs()
    strong = (a >= mean + SIGMAS * deviation) & varies
    return join(strong.to(a.dtype).view_as(activations), mean[:, None, :, 0])[:, 0]


def eigencam(activations: Tensor) -> Tensor:
    """Eigen-CAM: the activations projected on their first right singular vector, without centring; of no class.
    Activations (N,C,...) to maps (N,...), before the ReLU. Muhammad and Yeasin, IJCNN 2020, section III."""
    return _with_peak(_first_component(activations))


def eigengradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Eigen-CAM of activations times gradients, which makes it the class's. Activations (N,C,...) and gradients
    (N,K,C,...) to maps (N,K,...), before the ReLU. From pytorch-grad-cam, which has no paper for it; not centred here,
    as in Eigen-CAM's paper."""
    return weighted_component(activations, gradients)


def weighted_component(activations: Tensor, weights: Tensor) -> Tensor:
    """Eigen-smoothing: the first component of the weighted channels, in place of their sum, with whose sign it agrees.
    Activations (N,C,...) and weights (N,K,C) or (N,K,C,...) to maps (N,K,...). As in `eigencam` nothing is taken away
    first: the idea is pytorch-grad-cam's, whose `eigen_smooth` takes each channel's mean away, and has either sign."""
    places = weights.reshape(weights.shape + (1,) * (activations.ndim - 2)) if weights.ndim == 3 else weights
    products = activations[:, None] * places
    components = _first_component(products.flatten(0, 1)).unflatten(0, products.shape[:2])
    agreement = (components * products.sum(2)).flatten(2).sum(2)
    terms = (components * products.abs().sum(2)).flatten(2).abs().sum(2)
    is_certain = agreement.abs() > ROUNDING * torch.finfo(terms.dtype).eps * terms
    agreement = torch.where(is_certain, agreement, _peaks(components.flatten(0, 1)).view_as(agreement))
    return torch.where(_like(agreement, components) < 0, -components, components)


def kpcacam(activations: Tensor) -> Tensor:
    """KPCA-CAM: the first component of kernel PCA over the places of the grid; of no class. Activations (N,C,...) to
    maps (N,...), before the ReLU. Karmani et al., IEEE MMSP 2024, with the sigmoid kernel tanh(x y / C + 1) on
    activations whose mean over the grid is taken away; the kernel matrix is centred. Raises `LayerError` for grids of
    more than 1024 cells."""
    cells = activations[0, 0].numel()
    if cells > MOST_CELLS:
        raise LayerError(
            f"The grid of this layer has {cells} cells, and KPCA-CAM takes at most {MOST_CELLS}: choose a deeper layer."
        )
    components = torch.stack([_kernel_component(points) for points in _precise(activations.flatten(2))])
    return _with_peak(components.to(activations).unflatten(1, activations.shape[2:]))


def _kernel_component(points: Tensor) -> Tensor:
    points = points - points.mean(1, keepdim=True)
    kernel = torch.tanh(points.mT @ points / len(points) + 1)
    rounding = kernel.shape[0] * torch.finfo(kernel.dtype).eps * kernel.abs().amax()
    kernel = kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
    values, vectors = torch.linalg.eigh(kernel)
    # Points that are all alike leave nothing but rounding, of which a heatmap would make a picture.
    return vectors[:, -1] * torch.where(values[-1] > rounding, values[-1], 0).sqrt()


def _precise(tensor: Tensor) -> Tensor:
    """In float64, on the processor where the device has none: products of matrices have the square of their condition."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _first_component(tensor: Tensor) -> Tensor:
    """The first left singular vector over the grid, times its singular value: (N,C,...) to (N,...), of either sign.
    From whichever Gram matrix is the smaller."""
    matrix = _precise(tensor.flatten(2))  # (N,C,P)
    channels, cells = matrix.shape[1:]
    if cells <= channels:
        values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
        component = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
    else:
        _, vectors = torch.linalg.eigh(matrix @ matrix.mT)
        component = (vectors[:, None, :, -1] @ matrix)[:, 0]
    return component.to(tensor).unflatten(1, tensor.shape[2:])


def _with_peak(components: Tensor) -> Tensor:
    """Components (N,...), each turned so that its value furthest from zero is positive."""
    return torch.where(_like(_peaks(components), components) < 0, -components, components)


def _peaks(components: Tensor) -> Tensor:
    flat = components.flatten(1)
    return flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]


def _like(values: Tensor, components: Tensor) -> Tensor:
    return values.reshape(values.shape + (1,) * (components.ndim - values.ndim))
