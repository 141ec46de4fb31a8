"""Compute the maps of methods that use the first principal component of the channels.

The sign of a principal component is arbitrary. Two rules choose the sign:

If the component is computed from activations alone, the value furthest from zero becomes positive. Activations are not
centred. After a ReLU, Eigen-CAM is therefore positive everywhere.

If the component is computed from activations times gradients, its inner product with the sum over the channels
(HiResCAM) becomes positive. If the inner product is only rounding error, the first rule applies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcam.cam.methods.one_pass import ROUNDING
from gradcam.errors import LayerError

MAX_CELLS = 1024  # The limit for kernel PCA, which decomposes a matrix of cells x cells.


def eigencam(activations: Tensor) -> Tensor:
    """Compute Eigen-CAM: project the uncentred activations on their first right singular vector.

    The maps are class-agnostic. Takes activations (N,C,...); returns maps (N,...) before the ReLU. Muhammad and Yeasin,
    IJCNN 2020, section III.
    """
    return _make_peak_positive(_first_component(activations))


def weighted_component(activations: Tensor, weights: Tensor) -> Tensor:
    """Return the first principal component of the weighted channels, with the sign of their sum.

    Takes activations (N,C,...) and weights (N,K,C) or (N,K,C,...); returns maps (N,K,...) before the ReLU. As in
    `eigencam`, the channels are not centred. If the weights are gradients, the result is Eigen-Grad-CAM. If the weights
    come from another method, the result is eigen-smoothing. Both methods are from the package pytorch-grad-cam; there
    is no paper. The function `eigen_smooth` of pytorch-grad-cam differs: it centres each channel and leaves the sign
    undetermined.
    """
    expanded_activations = activations[:, None]
    products = expanded_activations * _add_axes(weights, expanded_activations)
    components = _first_component(products.flatten(0, 1)).unflatten(0, products.shape[:2])
    agreement = (components * products.sum(2)).flatten(2).sum(2)
    terms = (components * products.abs().sum(2)).flatten(2).abs().sum(2)
    is_certain = agreement.abs() > ROUNDING * torch.finfo(terms.dtype).eps * terms
    agreement = torch.where(is_certain, agreement, _peaks(components.flatten(0, 1)).view_as(agreement))
    return torch.where(_add_axes(agreement, components) < 0, -components, components)


def kpcacam(activations: Tensor) -> Tensor:
    """Compute KPCA-CAM: the first component of kernel PCA over the cells of the grid.

    The maps are class-agnostic. Takes activations (N,C,...); returns maps (N,...) before the ReLU. Karmani et al., IEEE
    MMSP 2024. The kernel is the sigmoid kernel tanh(x y / C + 1). Activations are centred over the grid, and the kernel
    matrix is centred too. Raises `LayerError` if the grid has more than 1024 cells.
    """
    cells = activations[0, 0].numel()
    if cells > MAX_CELLS:
        problem = f"The grid of this layer has {cells} cells, and KPCA-CAM takes at most {MAX_CELLS}"
        raise LayerError(f"{problem}: choose a deeper layer.")
    components = torch.stack([_kernel_component(points) for points in _to_float64(activations.flatten(2))])
    return _make_peak_positive(components.to(activations).unflatten(1, activations.shape[2:]))


def _kernel_component(points: Tensor) -> Tensor:
    points = points - points.mean(1, keepdim=True)
    kernel = torch.tanh(points.mT @ points / len(points) + 1)
    rounding = kernel.shape[0] * torch.finfo(kernel.dtype).eps * kernel.abs().amax()
    kernel = kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
    values, vectors = torch.linalg.eigh(kernel)
    # If all cells have equal activations, the largest eigenvalue is only rounding error. Replace it by 0, because a
    # normalised heatmap would amplify the error.
    return vectors[:, -1] * torch.where(values[-1] > rounding, values[-1], 0).sqrt()


def _to_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64 (for MPS, on the CPU), because a Gram matrix squares the condition number."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _first_component(tensor: Tensor) -> Tensor:
    """Return the first left singular vector over the grid, times its singular value.

    Takes (N,C,...) and returns (N,...). The sign is arbitrary. The vector is computed from the smaller of the two Gram
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
    """Return components (N,...), negated where the value furthest from zero is negative."""
    return torch.where(_add_axes(_peaks(components), components) < 0, -components, components)


def _peaks(components: Tensor) -> Tensor:
    flat = components.flatten(1)
    return flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]


def _add_axes(values: Tensor, components: Tensor) -> Tensor:
    return values.reshape(values.shape + (1,) * (components.ndim - values.ndim))
