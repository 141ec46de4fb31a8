"""The methods written a second time, in NumPy and float64, one number at a time as in their papers, for one image and class.

Activations and gradients are (C,*grid); maps are (*grid), before the ReLU.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cells(array: Array) -> Iterator[tuple[int, ...]]:
    return np.ndindex(*array.shape[1:])


def weighted_sum(activations: Array, weights: list[float]) -> Array:
    result = np.zeros(activations.shape[1:])
    for channel, weight in enumerate(weights):
        for cell in cells(activations):
            result[cell] += weight * activations[(channel, *cell)]
    return result


def gradcam(activations: Array, gradients: Array) -> Array:
    count = len(list(cells(activations)))
    weights = [sum(gradients[(c, *cell)] for cell in cells(gradients)) / count for c in range(len(gradients))]
    return weighted_sum(activations, weights)


def gradcam_pp(activations: Array, gradients: Array) -> Array:
    """Return Grad-CAM++ by equations 7 and 19."""
    weights = []
    for c in range(len(activations)):
        total = sum(activations[(c, *cell)] for cell in cells(activations))
        weight = 0.0
        for cell in cells(activations):
            g = gradients[(c, *cell)]
            denominator = 2 * g**2 + total * g**3
            alpha = g**2 / denominator if denominator != 0 else 0.0
            weight += alpha * max(g, 0.0)
        weights.append(weight)
    return weighted_sum(activations, weights)


def xgradcam(activations: Array, gradients: Array) -> Array:
    weights = []
    for c in range(len(activations)):
        total = sum(activations[(c, *cell)] for cell in cells(activations))
        weight = 0.0
        for cell in cells(activations):
            weight += activations[(c, *cell)] / total * gradients[(c, *cell)] if total != 0 else 0.0
        weights.append(weight)
    return weighted_sum(activations, weights)


def _cell_by_cell(activations: Array, gradients: Array, term: Callable[[float, float], float]) -> Array:
    result = np.zeros(activations.shape[1:])
    for c in range(len(activations)):
        for cell in cells(activations):
            result[cell] += term(activations[(c, *cell)], gradients[(c, *cell)])
    return result


def hirescam(activations: Array, gradients: Array) -> Array:
    return _cell_by_cell(activations, gradients, lambda a, g: a * g)


def elementwise_gradcam(activations: Array, gradients: Array) -> Array:
    return _cell_by_cell(activations, gradients, lambda a, g: max(a * g, 0.0))


def layercam(activations: Array, gradients: Array) -> Array:
    return _cell_by_cell(activations, gradients, lambda a, g: a * max(g, 0.0))


def eigencam(activations: Array) -> Array:
    """Return Eigen-CAM by the singular value decomposition of the full (places, channels) matrix."""
    matrix = np.stack([[activations[(c, *cell)] for c in range(len(activations))] for cell in cells(activations)])
    _, _, right = np.linalg.svd(matrix, full_matrices=False)
    return _with_peak(matrix @ right[0]).reshape(activations.shape[1:])


def eigengradcam(activations: Array, gradients: Array) -> Array:
    component = eigencam(activations * gradients)
    return -component if (component * hirescam(activations, gradients)).sum() < 0 else component


def kpcacam(activations: Array) -> Array:
    """Return KPCA-CAM by textbook kernel PCA: the kernel one pair at a time, centred by the matrix I - 1/P."""
    points = [np.array([activations[(c, *cell)] for c in range(len(activations))]) for cell in cells(activations)]
    mean = sum(points) / len(points)
    points = [point - mean for point in points]
    kernel = np.array([[np.tanh(row_point @ point / len(row_point) + 1) for point in points] for row_point in points])
    centring = np.eye(len(points)) - np.full((len(points), len(points)), 1 / len(points))
    values, vectors = np.linalg.eig(centring @ kernel @ centring)
    best = int(np.argmax(values.real))
    component = np.sqrt(max(values[best].real, 0)) * vectors[:, best].real
    return _with_peak(component).reshape(activations.shape[1:])


def _with_peak(component: Array) -> Array:
    return -component if max(component, key=abs) < 0 else component


def fem(activations: Array) -> Array:
    result = np.zeros(activations.shape[1:])
    for channel in activations:
        mean, deviation = np.mean(channel), np.sqrt(np.mean((channel - np.mean(channel)) ** 2))
        for cell in np.ndindex(*channel.shape):
            if channel[cell] >= mean + 2 * deviation and deviation > 0:
                result[cell] += mean
    return result
