"""The maps of all classes at once, by derivatives in forward direction.

A backward pass serves one class, and a thousand classes take a thousand of them. But maps of Grad-CAM and HiResCAM
are linear in the gradient: each cell of all classes' maps is the derivative of all logits in one direction of the
activations, which one pass of the tail forwards gives. For Grad-CAM that direction is, for a cell, what lies in that cell,
laid over the whole grid and divided by the number of cells; or else, for a channel, one everywhere, which gives the
channel's weights for all classes. So there are as many directions as cells or as channels, whichever are fewer: 49 at a
grid of 7 x 7. The numbers are those of the backward pass, but for rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError
from gradcam.hooks.hooks import Hooks, recording_off
from gradcam.hooks.preserve import plain_attention, preserve_state
from gradcam.layers.find import unwrap
from gradcam.targets.classes import ClassTarget

MOST_DIRECTIONS = 200  # cells or channels; each costs about two passes of the tail, for one picture
MOST_BYTES = 2**25  # of directions that go through the tail together
CLOSE = 1e-3  # by the largest value: the share by which a map may differ from the one of a backward pass


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
) -> Products | Values | None:
    """The signed maps of all logits of one image, by a method's name, at a layer that gives a tensor (1,C,h,w).

    None where that has no short way: another method, a grid with too many cells and channels, a model that cannot be
    differentiated forwards, and whatever gives another map than the backward pass did. `activations`: what the layer gave
    for the image. `known`: maps (k,h,w) of these
    `classes` (k,), to compare with."""
    if method.name not in DIRECTIONS or method.options or method.join is not None:
        return None
    try:
        with preserve_state(unwrap(model)), recording_off(), plain_attention(), _without_warnings():
            found = _differentiate(unwrap(model), images, layer, activations, method.name)
    except (GradcamError, RuntimeError, TypeError, ValueError, IndexError):  # whatever has no such derivative
        return None
    if found is None or not all(bool(each.isfinite().all()) for each in vars(found).values()):
        return None
    own = found.at(classes.to(next(iter(vars(found).values())).device)).to(known)
    is_same = own.shape == known.shape and bool((own - known).abs().max() <= CLOSE * known.abs().max())
    return found if is_same else None


def _differentiate(
    model: nn.Module, images: Any, layer: nn.Module, activations: Tensor, method: str
) -> Products | Values | None:
    if activations.ndim != 4 or len(activations) != 1 or activations.dtype != torch.float32:
        return None
    channels, cells = activations.shape[1], activations[0, 0].numel()
    by_channel = method == "gradcam" and channels <= cells
    if min(channels, cells) > MOST_DIRECTIONS or (not by_channel and cells > MOST_DIRECTIONS):
        return None

    def run(tensor: Tensor) -> Tensor:
        with Hooks() as hooks:
            hooks.after_forward(layer, lambda *_: tensor.clone())  # which what follows may change in place
            return ClassTarget().find_logits(model(images.clone()), 1)[0]

    def push(direction: Tensor) -> Tensor:
        return torch.func.jvp(run, (activations,), (direction,))[1]

    make = _channel if by_channel else DIRECTIONS[method]
    count = channels if by_channel else cells
    each = max(1, MOST_BYTES // (activations.numel() * activations.element_size()))
    parts = []
    for start in range(0, count, each):
        directions = torch.stack([make(activations, i) for i in range(start, min(start + each, count))])
        parts.append(torch.func.vmap(push)(directions))
    slopes = torch.cat(parts).T.contiguous()  # (K, cells or channels)
    if by_channel:
        return Products(slopes, activations[0])
    return Values(slopes.unflatten(1, activations.shape[2:]))


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


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Of operations that are taken one by one, and of how PyTorch loads its own derivatives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
