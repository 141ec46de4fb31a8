"""Methods that show the first principal component of the activations over the grid.

A component's sign is not determined. The rules here: of activations alone, its value furthest from zero is positive; of
activations times gradients, which have a sign of their own, it agrees with their sum over the channels, that is with
HiResCAM: the inner product of both is positive. Where nothing but rounding is left of that product, the first rule holds.
For activations behind a ReLU, without centring, all of Eigen-CAM is then positive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.errors import LayerError
from gradcam.methods.joining import ROUNDING

MOST_CELLS = 1024  # of a grid whose places are compared with one another: a matrix of this squared, decomposed


def eigencam(activations: Tensor) -> Tensor:
    """Eigen-CAM: the activations projected on their first right singular vector, without centring; of no class.

    Activations (N,C,...) to maps (N,...), before the ReLU. Muhammad and Yeasin, IJCNN 2020, section III.
    """
    return _with_peak(_first_component(activations))


def eigengradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Eigen-CAM of activations times gradients, which makes it the class's.

    Activations (N,C,...) and gradients (N,K,C,...) to maps (N,K,...), before the ReLU. From pytorch-grad-cam, which has no
    paper for it; not centred here, as in Eigen-CAM's paper.
    """
    return weighted_component(activations, gradients)


def weighted_component(activations: Tensor, weights: Tensor) -> Tensor:
    """Eigen-smoothing: the first component of the weighted channels, in place of their sum, with whose sign it agrees.

    Activations (N,C,...) and weights (N,K,C) or (N,K,C,...) to maps (N,K,...). As in `eigencam` nothing is taken away first:
    the idea is pytorch-grad-cam's, whose `eigen_smooth` takes each channel's mean away, and has either sign.
    """
    places = weights.reshape(weights.shape + (1,) * (activations.ndim - 2)) if weights.ndim == 3 else weights
    products = activations[:, None] * places
    components = _first_component(products.flatten(0, 1)).unflatten(0, products.shape[:2])
    agreement = (components * products.sum(2)).flatten(2).sum(2)
    terms = (components * products.abs().sum(2)).flatten(2).abs().sum(2)
    is_certain = agreement.abs() > ROUNDING * torch.finfo(terms.dtype).eps * terms
    agreement = torch.where(is_certain, agreement, _peaks(components.flatten(0, 1)).view_as(agreement))
    return torch.where(_like(agreement, components) < 0, -components, components)


def kpcacam(activations: Tensor) -> Tensor:
    """KPCA-CAM: the first component of kernel PCA over the places of the grid; of no class.

    Activations (N,C,...) to maps (N,...), before the ReLU. Karmani et al., IEEE MMSP 2024, with the sigmoid kernel
    tanh(x y / C + 1) on activations whose mean over the grid is taken away; the kernel matrix is centred.
    Raises `LayerError` for grids of more than 1024 cells.
    """
    cells = activations[0, 0].numel()
    if cells > MOST_CELLS:
        raise LayerError(
            f"KPCA-CAM compares all {cells} places of this layer's grid with one another, and takes at most {MOST_CELLS}: "
            "choose a layer further down."
        )
    components = torch.stack([_kernel_component(points) for points in _precise(activations.flatten(2))])
    return _with_peak(components.to(activations).unflatten(1, activations.shape[2:]))


def _kernel_component(points: Tensor) -> Tensor:
    """The first component (P,) of kernel PCA of one image's points (C,P)."""
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

    From whichever Gram matrix is the smaller.
    """
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
    """Of each of components (N,...), the value furthest from zero."""
    flat = components.flatten(1)
    return flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]


def _like(values: Tensor, components: Tensor) -> Tensor:
    """One value for each component, ready to be broadcast over its grid."""
    return values.reshape(values.shape + (1,) * (components.ndim - values.ndim))
