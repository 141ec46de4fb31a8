"""Compute the maps of all classes at once, from derivatives of all logits in a few directions.

A backward pass serves one class, so a thousand classes need a thousand passes. But the maps of Grad-CAM and HiResCAM
are linear in the gradient. Therefore, the derivatives of all logits in one direction of the activations give the value
of one cell in the maps of all classes.

PyTorch computes such a derivative with two backward passes. The first pass is linear in the weight of each logit, so
differentiating it with respect to these weights gives the derivative of every logit in the direction. (PyTorch's
forward-mode derivatives take as long, but load the compiler, which costs 190 MB and seconds.)

For HiResCAM, the direction for a cell equals the activations in that cell, and is zero elsewhere. For Grad-CAM, the
direction repeats the activations of that cell over the whole grid, divided by the number of cells. Alternatively,
Grad-CAM takes one direction per channel: a constant in this channel, which gives the channel's weights for all classes.
Grad-CAM uses cells or channels, whichever are fewer: 49 directions for a grid of 7 x 7. The results equal those of the
backward pass up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad as conv_gradients
from torch.overrides import TorchFunctionMode

from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError
from gradcam.hooks.hooks import Hooks, grad_mode_off
from gradcam.hooks.preserve import plain_attention, preserve_state
from gradcam.layers.find import unwrap
from gradcam.targets.classes import ClassTarget

# The largest number of cells or channels. Each direction costs about as much as one image's pass through the layers
# after the target layer.
MAX_DIRECTIONS = 200
# The largest accepted difference from the map of a backward pass, relative to that map's maximum. It is half a step of
# the 8-bit values on an HTML page. The two passes round differently. Where rounding moves an activation across the
# corner of a ReLU6, the maps differ by 1e-3.
MAX_MAP_DIFFERENCE = 1 / 254


@dataclass(frozen=True)
class ClassMaps:
    """Signed maps of all classes: the maps (K,h,w), or the classes' weights (K,C) of the channels (C,h,w)."""

    values: Tensor
    channels: Tensor | None = None

    def at(self, classes: Tensor) -> Tensor:
        """Return the maps (k,h,w) of these classes."""
        values = self.values[classes]
        return values if self.channels is None else torch.einsum("kc,chw->khw", values, self.channels)


@contextmanager
def record_layer_outputs(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor | None]]]:
    """Record the outputs of layers by name, one per run: a tensor, or None for any other output."""
    outputs: dict[str, list[Tensor | None]] = {name: [] for name in layers}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Later layers may change the tensor in place.
        outputs[name].append(output.detach().clone() if isinstance(output, Tensor) else None)

    with Hooks() as hooks:
        for name, layer in layers.items():
            hooks.after_forward(layer, partial(record, name))
        yield outputs


def explain_all_classes(
    model: nn.Module,
    images: Any,
    layer: nn.Module,
    method: Method,
    *,
    activations: Tensor,
    known: Tensor,
    classes: Tensor,
    report: Callable[[], None] | None = None,
) -> ClassMaps | None:
    """Return the signed maps of all logits of one image, at a layer that returns a tensor (1,C,h,w).

    Return None if this shortcut does not apply: for other methods, for a grid with too many cells and channels, for a
    model that cannot be differentiated twice, and if a map differs from the map of the backward pass. `activations` is
    the layer's output for the image. `known` holds the maps (k,h,w) of `classes` (k,) from the backward pass, for this
    comparison. `report` is called after each direction.
    """
    if count_directions(activations, method.name) is None or method.options or method.join is not None:
        return None
    report = report or (lambda: None)
    try:
        with preserve_state(unwrap(model)), grad_mode_off(), plain_attention():
            class_maps = _differentiate(unwrap(model), images, layer, activations, method=method.name, report=report)
    except (GradcamError, RuntimeError, TypeError, ValueError, IndexError):  # Some operation has no second derivative.
        return None
    maps = class_maps.at(classes.to(class_maps.values.device)).to(known)
    agrees = maps.shape == known.shape and bool((maps - known).abs().max() <= MAX_MAP_DIFFERENCE * known.abs().max())
    return class_maps if agrees and bool(class_maps.values.isfinite().all()) else None


def count_directions(activations: Tensor, method: str) -> int | None:
    """Return the number of directions that a method needs at these activations; None if unsupported or too many."""
    if method not in DIRECTIONS or activations.ndim != 4 or len(activations) != 1 or activations.dtype != torch.float32:
        return None
    count = activations.shape[1] if _is_by_channel(activations, method) else activations[0, 0].numel()
    return count if count <= MAX_DIRECTIONS else None


def _is_by_channel(activations: Tensor, method: str) -> bool:
    return method == "gradcam" and activations.shape[1] <= activations[0, 0].numel()


def _differentiate(
    model: nn.Module, images: Any, layer: nn.Module, activations: Tensor, *, method: str, report: Callable[[], None]
) -> ClassMaps:
    by_channel = _is_by_channel(activations, method)
    make_direction = _channel_direction if by_channel else DIRECTIONS[method]
    with _FrozenParameters(), torch.enable_grad():
        start = activations.detach().clone().requires_grad_()
        with Hooks() as hooks:
            # Clone, because later layers may change the tensor in place.
            hooks.after_forward(layer, lambda *_: start.clone())
            logits = ClassTarget().find_logits(model(images.clone()), 1)[0]
        logit_weights = torch.zeros_like(logits, requires_grad=True)  # The gradient is linear in these weights.
        (gradient,) = torch.autograd.grad((logits * logit_weights).sum(), start, create_graph=True)
        columns: list[Tensor] = []
        for i in range(count_directions(activations, method) or 0):
            slope = (gradient * make_direction(activations, i)).sum()
            columns += torch.autograd.grad(slope, logit_weights, retain_graph=True)
            report()
    slopes = torch.stack(columns, 1)  # (K, cells or channels)
    return ClassMaps(slopes, activations[0]) if by_channel else ClassMaps(slopes.unflatten(1, activations.shape[2:]))


class _FrozenParameters(TorchFunctionMode):
    """Keeps parameters out of the differentiation, and gives linear layers cheaper derivatives.

    For the second derivative of a convolution, PyTorch also computes the derivative with respect to the weights, group
    by group, which is 20 times slower.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [_detach_parameter(argument) for argument in args]
        kwargs = {name: _detach_parameter(argument) for name, argument in (kwargs or {}).items()}
        if func in INPUT_GRADIENTS and len(args) == 7 and args[0].ndim == args[1].ndim and not isinstance(args[4], str):
            return _convolve_linearly(func, *args)
        if func is F.batch_norm and len(args) + len(kwargs) == 8:
            names = ("input", "mean", "variance", "weight", "bias", "training", "momentum", "eps")
            arguments = dict(zip(names, args)) | kwargs
            if not arguments["training"]:
                return _normalise_linearly(arguments)
        return func(*args, **kwargs)


def _detach_parameter(value: Any) -> Any:
    return value.detach() if isinstance(value, nn.Parameter) else value


TensorFunction = Callable[[Tensor], Tensor]


class _LinearFunction(torch.autograd.Function):
    """A linear function and its adjoint.

    The gradient of the function is the adjoint. The adjoint is linear as well, and its gradient is the function.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: TensorFunction, adjoint: TensorFunction) -> Tensor:
        ctx.functions = adjoint, function
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _LinearFunction.apply(gradients[0], *ctx.functions), None, None


INPUT_GRADIENTS = {
    torch.conv1d: conv_gradients.conv1d_input,
    torch.conv2d: conv_gradients.conv2d_input,
    torch.conv3d: conv_gradients.conv3d_input,
}


def _convolve_linearly(function: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    shape = tensor.shape

    def adjoint(gradient: Tensor) -> Tensor:
        return INPUT_GRADIENTS[function](shape, weight, gradient, *settings)

    result: Tensor = _LinearFunction.apply(tensor, lambda inputs: function(inputs, weight, None, *settings), adjoint)
    return result if bias is None else result + bias.view(-1, *[1] * (tensor.ndim - 2))


def _normalise_linearly(arguments: dict[str, Any]) -> Tensor:
    """Apply batch normalisation in evaluation mode."""
    tensor, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    scale = (arguments["variance"] + arguments["eps"]).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - arguments["mean"] * scale
    shape = (-1, *[1] * (tensor.ndim - 2))
    return torch.addcmul(shift.view(shape), tensor, scale.view(shape))


def _channel_direction(activations: Tensor, i: int) -> Tensor:
    """Return 1 / (number of cells) in channel i, and zero elsewhere: the derivative is the channel's mean gradient."""
    direction = torch.zeros_like(activations)
    direction[:, i] = 1 / activations[0, 0].numel()
    return direction


def _cell_direction(activations: Tensor, i: int) -> Tensor:
    """Return the activations of cell i divided by the number of cells, copied to every cell.

    The derivative of the score in this direction is sum_c A_c(i) mean(g_c), the value of Grad-CAM in that cell.
    """
    cell = activations.flatten(2)[:, :, i] / activations[0, 0].numel()
    return cell[:, :, None, None].expand_as(activations)


def _single_cell_direction(activations: Tensor, i: int) -> Tensor:
    """Return the activations of cell i, and zero elsewhere.

    The derivative is sum_c A_c(i) g_c(i), the value of HiResCAM in that cell.
    """
    direction = torch.zeros_like(activations)
    direction.flatten(2)[:, :, i] = activations.flatten(2)[:, :, i]
    return direction


DIRECTIONS = {"gradcam": _cell_direction, "hirescam": _single_cell_direction}
