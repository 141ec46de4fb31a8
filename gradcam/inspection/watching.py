"""Watching a training loop for the first layer at which a gradient is NaN or infinite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradcam.errors import GradientError, shorten
from gradcam.hooks import Hooks, is_backward_running
from gradcam.inspection.attendance import Attendance
from gradcam.inspection.discoveries import OUTPUT, Steps, Watch
from gradcam.inspection.selection import Layers, refuse_compiled, select_layers
from gradcam.isolation import is_undisturbed
from gradcam.layers import unwrap
from gradcam.nested import tensors

REACTIONS = ("warn", "raise")


@contextlib.contextmanager
def watch_gradients(model: nn.Module, layers: Layers | None = None, *, on_found: str = "warn") -> Iterator[Watch]:
    """Watch a training loop, and warn where a gradient is NaN or infinite, with the name of the first layer.

        with gradcam.inspection.watch_gradients(model) as watch:
            for images, labels in loader:
                ...

    The first is the one nearest to the loss, in the order in which the backward pass computes. Watched are the outputs of
    all layers, and the parameters that require gradients when the watch begins. `layers`: names, patterns or modules, for
    their outputs and their parameters, parts included, alone. `on_found`: "warn" gives a `GradientWarning`, "raise" raises
    `GradientError`, both when the backward pass has ended, before an optimiser uses what came of it. After a step that was
    told of, nothing is said until gradients were finite for a step. A step is a backward pass, or several, behind whatever
    ran forward before.

    Nothing else changes: training with and without is the same, bit by bit. The thread that entered is watched. A device
    such as a GPU is waited for once, at the end of the backward pass. With float16 and a `GradScaler` an infinite gradient
    now and then is normal: it is how the scale is found, and the scaler leaves that step out. Outputs that autograd does
    not record, and parameters unfrozen later, have no gradient to watch.

    Raises `GradientError` for another `on_found`, `ModelError` for compiled models, `LayerError` as
    `inspection.select_layers` does, and at the end where a layer that was named never ran although the model did.
    """
    if on_found not in REACTIONS:
        raise GradientError(f"on_found is {shorten(on_found)}, expected one of {', '.join(REACTIONS)}.")
    refuse_compiled(model)
    model = unwrap(model)
    chosen = _all_layers(model) if layers is None else select_layers(model, layers)
    attendance = Attendance(model, () if layers is None else layers)  # nobody asked for each and every one
    steps = Steps(on_found)
    with Hooks() as hooks:
        for name, module in chosen.items():
            hooks.after_forward(module, _follow(name, steps, attendance, hooks))
        hooks.after_forward(model, lambda *_: None if is_undisturbed() else attendance.note_model())
        for layer, name, parameter in _parameters(model, chosen):
            hooks.at_gradient(parameter, steps.keep(layer, name))
        yield steps.watch
    attendance.require_runs()


def _all_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: it for name, it in model.named_modules() if not isinstance(it, torch.jit.ScriptModule)}


def _parameters(model: nn.Module, chosen: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Those of the layers and of their parts that require gradients: their layer's name, their own in it, each once."""
    watched = {part for module in chosen.values() for part in module.modules()}
    for layer, module in model.named_modules():
        if module in watched:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    yield layer, name, parameter


def _follow(name: str, steps: Steps, attendance: Attendance, hooks: Hooks) -> Callable[..., None]:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_undisturbed():  # what gradcam runs itself is none of the user's passes
            return
        repeats = is_backward_running()  # a checkpoint does
        if not repeats:
            steps.note_run()
            attendance.note_run(name)
        for tensor in tensors(output):
            if not tensor.is_floating_point() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                continue
            if steps.has_just_seen(tensor):  # a block gives what its last part gave
                continue
            if not repeats and (module.training or torch.is_grad_enabled()):
                steps.note_output(name, tensor)
            if tensor.requires_grad:
                # A hook on the tensor, which later operations in place leave with what the layer gave.
                hooks.at_gradient(tensor, steps.keep(name, OUTPUT))

    return look
