"""Compute the maps of all classes at once, from directional derivatives of all logits.

A backward pass gives the gradient of one logit, so a thousand classes need a thousand passes. But every cell of a
Grad-CAM or HiResCAM map is linear in the gradient: its value is the logit's derivative in one direction of the
activations. If all logits are differentiated in this direction, the results are the cell's values for all classes.

Two backward passes compute these derivatives. The first pass differentiates a weighted sum of the logits, and its
gradient is linear in the weights. The second pass differentiates the product of gradient and direction with respect to
the weights. Its result is the derivative of every logit in the direction. (Forward-mode derivatives take as long, but
PyTorch then loads its compiler, which costs 190 MB and several seconds.)

For HiResCAM, the direction of a cell is the activations at this cell, and zero elsewhere. For Grad-CAM, the direction
of a cell is the cell's activations at every cell, divided by the number of cells. Grad-CAM can also use one direction
per channel: a constant in this channel. The derivatives are then the channel's weights for all classes. Grad-CAM uses
cells or channels, whichever are fewer: a grid of 7 x 7 needs 49 directions. Up to rounding, the maps equal the maps of
separate backward passes.
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

# The largest number of directions. A direction costs about as much as a pass of one image through the layers after the
# target layer.
MAX_DIRECTIONS = 200
# The maps may differ from the maps of backward passes by this share of the maximum. The share is half a step of the
# 8-bit values on an HTML page. The two computations round differently: if rounding moves an activation across the
# corner of a ReLU6, the maps differ by 1e-3.
MAX_MAP_DIFFERENCE = 1 / 254


@dataclass(frozen=True)
class ClassMaps:
    """Signed maps of all K classes.

    Without `channels`, `values` are the maps (K,h,w). Otherwise, `values` are weights (K,C), and each map is the
    weighted sum of `channels` (C,h,w).
    """

    values: Tensor
    channels: Tensor | None = None

    def at(self, classes: Tensor) -> Tensor:
        """Return the maps (k,h,w) of the k classes with these indices."""
        values = self.values[classes]
        return values if self.channels is None else torch.einsum("kc,chw->khw", values, self.channels)


@contextmanager
def record_layer_outputs(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor | None]]]:
    """Record the outputs of layers while the context is open, and yield them as lists by layer name.

    A list has one entry for each call of the layer: the output tensor, or None if the output is not a tensor.
    """
    outputs: dict[str, list[Tensor | None]] = {name: [] for name in layers}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Clone, because later layers may change the tensor in place.
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
    """Return the signed maps of all classes for one image; None if they cannot be computed from directions.

    Only Grad-CAM and HiResCAM without options are supported. `activations` is the layer's output (1,C,h,w) for the
    image. `known` holds the maps (k,h,w) of `classes` (k,) from backward passes, to test the result. The result is None
    if the layer needs too many directions, if the model cannot be differentiated twice, or if a map differs from
    `known`. `report` is called after each direction.
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
    """Return how many directions a method needs for these activations; None if unsupported or too many."""
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
        logit_weights = torch.zeros_like(logits, requires_grad=True)  # The gradient below is linear in `logit_weights`.
        (gradient,) = torch.autograd.grad((logits * logit_weights).sum(), start, create_graph=True)
        columns: list[Tensor] = []
        for i in range(count_directions(activations, method) or 0):
            slope = (gradient * make_direction(activations, i)).sum()
            columns += torch.autograd.grad(slope, logit_weights, retain_graph=True)
            report()
    slopes = torch.stack(columns, 1)  # (K, cells or channels)
    return ClassMaps(slopes, activations[0]) if by_channel else ClassMaps(slopes.unflatten(1, activations.shape[2:]))


class _FrozenParameters(TorchFunctionMode):
    """A mode that detaches parameters, and gives convolutions and batch norms cheap second derivatives.

    PyTorch's second derivative of a convolution includes the derivative with respect to the weights, group by group.
    This derivative is not needed, and would make the pass 20 times slower.
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
    """A linear function whose backward pass applies the function's adjoint.

    The adjoint is linear as well, and its backward pass applies the function.
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
    """Apply batch norm in evaluation mode, as one multiplication and one addition."""
    tensor, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    scale = (arguments["variance"] + arguments["eps"]).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - arguments["mean"] * scale
    shape = (-1, *[1] * (tensor.ndim - 2))
    return torch.addcmul(shift.view(shape), tensor, scale.view(shape))


def _channel_direction(activations: Tensor, i: int) -> Tensor:
    """Return the direction for channel i: 1 / (number of cells) in this channel, and zero elsewhere.

    The derivative in this direction is the channel's mean gradient.
    """
    direction = torch.zeros_like(activations)
    direction[:, i] = 1 / activations[0, 0].numel()
    return direction


def _cell_direction(activations: Tensor, i: int) -> Tensor:
    """Return Grad-CAM's direction for cell i: the cell's activations at every cell, divided by the number of cells.

    The derivative in this direction is sum_c A_c(i) mean(g_c), the value of Grad-CAM at cell i.
    """
    cell = activations.flatten(2)[:, :, i] / activations[0, 0].numel()
    return cell[:, :, None, None].expand_as(activations)


def _single_cell_direction(activations: Tensor, i: int) -> Tensor:
    """Return HiResCAM's direction for cell i: the activations at this cell, and zero elsewhere.

    The derivative in this direction is sum_c A_c(i) g_c(i), the value of HiResCAM at cell i.
    """
    direction = torch.zeros_like(activations)
    direction.flatten(2)[:, :, i] = activations.flatten(2)[:, :, i]
    return direction


DIRECTIONS = {"gradcam": _cell_direction, "hirescam": _single_cell_direction}
