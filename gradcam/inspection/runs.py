"""Following layers through passes that a user makes: what each run gives, and the gradient that comes back to it."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from gradcam.errors import LayerError
from gradcam.hooks import ForwardHook, Hooks
from gradcam.nested import first_floating, replace_tensor
from gradcam.passages import GradientHook
from gradcam.target_layer import refuse_vmap

Look = Callable[[str, Tensor], GradientHook | None]
Pass = Callable[[Tensor, GradientHook], Tensor]


def follow_layers(hooks: Hooks, layers: Mapping[str, nn.Module], look: Look, *, pass_on: Pass | None = None) -> None:
    """Call `look(name, activations)` at each run of these layers, and what that returns with the run's gradient.

    `activations`: the layer's output, detached, the first floating tensor of several; it may be changed in place as soon as
    `look` has returned. The gradient is that of this tensor: see `Hooks.pass_gradient`. Nothing else changes for
    the model. A run that a checkpoint repeats in the backward pass is not looked at again.
    `pass_on`: what sends the output on, if it is not `hooks.pass_gradient`.

    The hooks raise `LayerError` where a layer gives no floating tensor.
    """
    unrecorded = _Unrecorded()

    def follow(name: str) -> tuple[ForwardHook, ForwardHook]:
        def hand_on(output: Any, tensor: Tensor, function: GradientHook | None) -> Any:
            if not tensor.requires_grad:
                unrecorded.add(name, function)
            elif function is not None:
                passed_on = (pass_on or hooks.pass_gradient)(tensor, function)
                return None if passed_on is tensor else replace_tensor(output, tensor, passed_on)
            return None

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            tensor = first_floating(output)
            if tensor is None:
                raise LayerError(
                    f"Layer '{name}' gave no floating-point tensor: choose a layer whose output is one, or holds one."
                )
            refuse_vmap(tensor)
            return hand_on(output, tensor, look(name, tensor.detach()))

        def after_repetition(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            function, tensor = unrecorded.find(name), first_floating(output)
            return None if function is None or tensor is None else hand_on(output, tensor, function)

        return after, after_repetition

    for name, module in layers.items():
        after, after_repetition = follow(name)
        hooks.after_forward(module, after, repeated=after_repetition)


class _Unrecorded:
    """What is to be called with the gradients of runs inside reentrant checkpoints.

    Those run without recording at first, and again, with recording, in the backward pass: as the node that they are then.
    Under such a node the runs of a layer come in the same order again, in each backward pass that there is.
    """

    def __init__(self) -> None:
        self._functions: weakref.WeakKeyDictionary[Any, dict[str, deque[GradientHook | None]]]
        self._functions = weakref.WeakKeyDictionary()  # by node, so that what has no backward pass goes with its graph

    def add(self, name: str, function: GradientHook | None) -> None:
        node = _find_checkpoint()
        if node is not None:
            self._functions.setdefault(node, {}).setdefault(name, deque()).append(function)

    def find(self, name: str) -> GradientHook | None:
        node = torch._C._current_autograd_node()
        is_checkpoint = isinstance(node, BackwardCFunction)  # PyTorch's other nodes cannot even be looked up
        functions = self._functions.get(node, {}).get(name) if is_checkpoint else None
        if not functions:
            return None
        functions.rotate(-1)
        return functions[-1]


def _find_checkpoint() -> Any:
    """The node of the outermost reentrant checkpoint that runs its function here for the first time, None outside such."""
    node = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            node = frame.f_locals["ctx"]
        frame = frame.f_back
    return node
