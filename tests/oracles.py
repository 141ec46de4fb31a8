"""Recompute the package's numbers slowly and simply, without sharing its code."""

import copy
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


def modules_that_run_once(model: nn.Module, images: Tensor) -> list[str]:
    """Return the dotted names of the modules that run exactly once and return one floating-point tensor."""
    runs: Counter[str] = Counter()
    gives_tensor = set()
    handles = []
    for name, module in model.named_modules():

        def look(module: nn.Module, args: object, output: object, name: str = name) -> None:
            runs[name] += 1
            if isinstance(output, Tensor) and output.is_floating_point():
                gives_tensor.add(name)

        handles.append(module.register_forward_hook(look))
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return [name for name in runs if name and runs[name] == 1 and name in gives_tensor]


def reference(
    model: nn.Module, images: Tensor, names: list[str], score: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return activations and gradients of many modules, by definition: the gradient of a zero added to the output.

    A copy of the model runs without in-place operations, with autograd through the whole network.
    """
    model = copy.deepcopy(model).requires_grad_(True)
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    activations: dict[str, Tensor] = {}
    zeros: dict[str, Tensor] = {}
    for name in names:

        def add_zero(module: nn.Module, args: object, output: Tensor, name: str = name) -> Tensor:
            activations[name] = output.detach().clone()
            zeros[name] = torch.zeros_like(output, requires_grad=True)
            return output + zeros[name]

        model.get_submodule(name).register_forward_hook(add_zero)
    with torch.enable_grad():
        gradients = torch.autograd.grad(score(model(images)), [zeros[name] for name in names], allow_unused=True)
    return {name: (activations[name], gradient) for name, gradient in zip(names, gradients) if gradient is not None}


def gradcam_map(activations: Tensor, gradients: Tensor) -> Tensor:
    """Return Grad-CAM of one image (equations 1 and 2 of the paper), one number at a time: (C,*grid) twice to (*grid)."""
    channels, grid = activations.shape[0], activations.shape[1:]
    cells = list(np.ndindex(*grid))
    weighted = torch.zeros(grid, dtype=torch.float64)
    for channel in range(channels):
        alpha = math.fsum(gradients[(channel, *cell)].item() for cell in cells) / len(cells)
        for cell in cells:
            weighted[cell] += alpha * activations[(channel, *cell)].item()
    for cell in cells:
        weighted[cell] = max(weighted[cell].item(), 0.0)
    return weighted


def cubic_kernel(distance: float, a: float = -0.75) -> float:
    """Return the weight of Keys' cubic convolution kernel."""
    d = abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    if d < 2:
        return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return 0.0


def resize_cubic(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize by cubic interpolation with half-pixel centres and repeated borders, cell by cell; clamp at zero."""
    for axis, length in enumerate(size):
        cells = values.shape[axis]
        result = np.zeros((*values.shape[:axis], length, *values.shape[axis + 1 :]))
        for out in range(length):
            centre = (out + 0.5) * cells / length - 0.5
            first = math.floor(centre)
            for cell in range(first - 1, first + 3):
                source = np.take(values, min(max(cell, 0), cells - 1), axis=axis)
                index = (slice(None),) * axis + (out,)
                result[index] += cubic_kernel(centre - cell) * source
        values = result
    return np.maximum(values, 0)
