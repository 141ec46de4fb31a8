"""Following layers through passes that a user makes: what each run gives, and the gradient that comes back to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError
from gradcam.hooks import GradientHook, Hooks
from gradcam.nested import first_floating, replace_tensor
from gradcam.target_layer import refuse_vmap

Look = Callable[[str, Tensor], GradientHook | None]
Pass = Callable[[Tensor, GradientHook], Tensor]


def follow_layers(hooks: Hooks, layers: Mapping[str, nn.Module], look: Look, *, pass_on: Pass | None = None) -> None:
    """Call `look(name, activations)` at each run of these layers, and what that returns with the run's gradient.

    `activations`: the layer's output, detached, the first floating tensor of several; it may be changed in place as soon as
    `look` has returned. The gradient is the one with respect to exactly that output: see `Hooks.pass_gradient`. Nothing else
    changes for the model. A run that a checkpoint repeats in the backward pass is not looked at again.
    `pass_on`: what sends the output on, if it is not `hooks.pass_gradient`.

    The hooks raise `LayerError` where a layer gives no floating tensor.
    """
    unrecorded: dict[
        str, GradientHook
    ] = {}  # of runs inside a reentrant checkpoint, which repeats them for the gradient

    def follow(name: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            tensor = first_floating(output)
            if tensor is None:
                raise LayerError(
                    f"Layer '{name}' gave no floating-point tensor: choose a layer whose output is one, or holds one."
                )
            refuse_vmap(tensor)
            if _is_backward_running():
                function = unrecorded.pop(name, None)
            else:
                function = look(name, tensor.detach())
                if function is not None and not tensor.requires_grad:
                    unrecorded[name] = function
            if function is None or not tensor.requires_grad:
                return None
            return replace_tensor(output, tensor, (pass_on or hooks.pass_gradient)(tensor, function))

        return after

    for name, module in layers.items():
        hooks.after_forward(module, follow(name))


def _is_backward_running() -> bool:
    """In this thread: PyTorch itself tells checkpoints and hooks so."""
    return torch._C._current_graph_task_id() != -1
