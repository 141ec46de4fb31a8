"""The maps of all classes at once, by derivatives of all logits in a few directions.

A backward pass serves one class, and a thousand classes take a thousand of them. But maps of Grad-CAM and HiResCAM
are linear in the gradient: each cell of all classes' maps is the derivative of all logits in one direction of the
activations. A backward pass is linear in the share that each logit has in it, so that its own derivative, by a pass back
through that pass, is the one of all logits in a direction. (PyTorch has derivatives in forward direction as well, which
take as long, but load its compiler: 190 MB and seconds.) For Grad-CAM that direction is, for a cell, what lies in that cell,
laid over the whole grid and divided by the number of cells; or else, for a channel, one everywhere, which gives the
channel's weights for all classes. So there are as many directions as cells or as channels, whichever are fewer: 49 at a
grid of 7 x 7. The numbers are those of the backward pass, but for rounding.
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
from torch.nn import grad as turned
from torch.overrides import TorchFunctionMode

from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError
from gradcam.hooks.hooks import Hooks, recording_off
from gradcam.hooks.preserve import plain_attention, preserve_state
from gradcam.layers.find import unwrap
from gradcam.targets.classes import ClassTarget

MOST_DIRECTIONS = 200  # cells or channels; each costs about a pass of the tail, for one picture
# The largest accepted difference from the map of a backward pass, relative to its maximum: half a step of the 8-bit values
# on a page. The two passes round differently, and where that moves an activation past the corner of a ReLU6, the maps
# differ by 1e-3.
CLOSE = 1 / 254


@dataclass(frozen=True)
class Products:
    """Signed maps as sums of channels: the weights (K,C) of each class, and the channels (C,h,w)."""

    weights: Tensor
    channels: Tensor

    def at(self, classes: Tensor) -> Tensor:
        """The maps (k,h,w) of these classes."""
        return torch.einsum("kc,chw->khw", self.weights[classes], self.channels)


@dataclass(frozen=True)
class Values:
    """Signed maps (K,h,w)."""

    maps: Tensor

    def at(self, classes: Tensor) -> Tensor:
        """The maps (k,h,w) of these classes."""
        return self.maps[classes]


@contextmanager
def recording(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor | None]]]:
    """What layers give, by name, while it lasts: a tensor for each run, None for what is no tensor."""
    found: dict[str, list[Tensor | None]] = {name: [] for name in layers}

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # What follows may change it in place.
        found[name].append(output.detach().clone() if isinstance(output, Tensor) else None)

    with Hooks() as hooks:
        for name, layer in layers.items():
            hooks.after_forward(layer, partial(keep, name))
        yield found


def explain_every_class(
    model: nn.Module,
    images: Any,
    layer: nn.Module,
    method: Method,
    *,
    activations: Tensor,
    known: Tensor,
    classes: Tensor,
    told: Callable[[], None] | None = None,
) -> Products | Values | None:
    """The signed maps of all logits of one image, by a method's name, at a layer that gives a tensor (1,C,h,w).

    None where that has no short way: another method, a grid with too many cells and channels, a model that cannot be
    differentiated twice, and whatever gives another map than the backward pass did. `activations`: what the layer gave
    for the image. `known`: maps (k,h,w) of these
    `classes` (k,), to compare with. `told`: called after each of the directions."""
    if method.name not in DIRECTIONS or method.options or method.join is not None:
        return None
    try:
        with preserve_state(unwrap(model)), recording_off(), plain_attention():
            found = _differentiate(unwrap(model), images, layer, activations, method=method.name, told=told)
    except (GradcamError, RuntimeError, TypeError, ValueError, IndexError):  # whatever has no such derivative
        return None
    if found is None or not all(bool(each.isfinite().all()) for each in vars(found).values()):
        return None
    own = found.at(classes.to(next(iter(vars(found).values())).device)).to(known)
    is_same = own.shape == known.shape and bool((own - known).abs().max() <= CLOSE * known.abs().max())
    return found if is_same else None


def count_directions(activations: Tensor, method: str) -> int | None:
    """How many derivatives a method's maps take at a layer that gives these; None where that cannot be, or is too many."""
    if method not in DIRECTIONS or activations.ndim != 4 or len(activations) != 1 or activations.dtype != torch.float32:
        return None
    count = activations.shape[1] if _is_by_channel(activations, method) else activations[0, 0].numel()
    return count if count <= MOST_DIRECTIONS else None


def _is_by_channel(activations: Tensor, method: str) -> bool:
    return method == "gradcam" and activations.shape[1] <= activations[0, 0].numel()


def _differentiate(
    model: nn.Module,
    images: Any,
    layer: nn.Module,
    activations: Tensor,
    *,
    method: str,
    told: Callable[[], None] | None,
) -> Products | Values | None:
    count = count_directions(activations, method)
    if count is None:
        return None
    by_channel = _is_by_channel(activations, method)
    make = _channel if by_channel else DIRECTIONS[method]
    with _Fixed(), torch.enable_grad():
        start = activations.detach().clone().requires_grad_()
        with Hooks() as hooks:
            hooks.after_forward(layer, lambda *_: start.clone())  # which what follows may change in place
            logits = ClassTarget().find_logits(model(images.clone()), 1)[0]
        share = torch.zeros_like(logits, requires_grad=True)  # of each logit; the gradient is linear in these
        (gradient,) = torch.autograd.grad((logits * share).sum(), start, create_graph=True)
        slopes = torch.empty(count, len(logits), dtype=logits.dtype, device=logits.device)
        for i in range(count):
            (slopes[i],) = torch.autograd.grad((gradient * make(activations, i)).sum(), share, retain_graph=True)
            if told is not None:
                told()
    slopes = slopes.T.contiguous()  # (K, cells or channels)
    if by_channel:
        return Products(slopes, activations[0])
    return Values(slopes.unflatten(1, activations.shape[2:]))


class _Fixed(TorchFunctionMode):
    """Parameters take no part in what is differentiated, and layers that are linear then have derivatives that are as cheap
    as they are: PyTorch's second derivative of a convolution is that of the weights too, group by group, 20 times slower."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = [_fix(it) for it in args], {name: _fix(it) for name, it in (kwargs or {}).items()}
        if func in TURNED and len(args) == 7 and args[0].ndim == args[1].ndim and not isinstance(args[4], str):
            return _convolve(func, *args)
        if func is F.batch_norm and len(args) + len(kwargs) == 8:
            given = (
                dict(zip(("input", "mean", "variance", "weight", "bias", "training", "momentum", "eps"), args)) | kwargs
            )
            if not given["training"]:
                return _scale(given)
        return func(*args, **kwargs)


def _fix(value: Any) -> Any:
    return value.detach() if isinstance(value, nn.Parameter) else value


class _Linear(torch.autograd.Function):
    """A linear function, and the one that its gradient goes back by, which is linear as well and goes back by the first."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.turned = back, there
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Linear.apply(gradients[0], *ctx.turned), None, None


TURNED = {torch.conv1d: turned.conv1d_input, torch.conv2d: turned.conv2d_input, torch.conv3d: turned.conv3d_input}


def _convolve(function: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    shape = tensor.shape

    def back(gradient: Tensor) -> Tensor:
        return TURNED[function](shape, weight, gradient, *how)

    found: Tensor = _Linear.apply(tensor, lambda it: function(it, weight, None, *how), back)
    return found if bias is None else found + bias.view(-1, *[1] * (tensor.ndim - 2))


def _scale(given: dict[str, Any]) -> Tensor:
    """What batch normalisation in evaluation mode is."""
    tensor, weight, bias = given["input"], given["weight"], given["bias"]
    scale = (given["variance"] + given["eps"]).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - given["mean"] * scale
    shape = (-1, *[1] * (tensor.ndim - 2))
    return torch.addcmul(shift.view(shape), tensor, scale.view(shape))


def _channel(activations: Tensor, i: int) -> Tensor:
    """One everywhere in channel i, divided by the cells: the derivative is the mean of the gradient there."""
    direction = torch.zeros_like(activations)
    direction[:, i] = 1 / activations[0, 0].numel()
    return direction


def _cell(activations: Tensor, i: int) -> Tensor:
    """What lies in cell i, everywhere, divided by the cells: sum_c A_c(i) mean(g_c), which is Grad-CAM there."""
    own = activations.flatten(2)[:, :, i] / activations[0, 0].numel()
    return own[:, :, None, None].expand_as(activations)


def _own_cell(activations: Tensor, i: int) -> Tensor:
    """What lies in cell i, there alone: sum_c A_c(i) g_c(i), which is HiResCAM there."""
    direction = torch.zeros_like(activations)
    direction.flatten(2)[:, :, i] = activations.flatten(2)[:, :, i]
    return direction


DIRECTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"gradcam": _cell, "hirescam": _own_cell}
