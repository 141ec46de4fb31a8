"""Layers and parameters of a model by name, by pattern, or as they are."""

from __future__ import annotations

import fnmatch
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from gradcam.errors import GradientError, LayerError, ModelError, join_names, nearest, shorten
from gradcam.hooks.autograd import GradientHook, no_floating_tensor_error
from gradcam.hooks.hooks import Hooks, in_own_pass, refuse_vmap
from gradcam.hooks.nested import first_floating, replace_tensor
from gradcam.hooks.pytorch import find_running_node, is_compiled
from gradcam.layers.find import find_layer, unwrap

Layers = str | nn.Module | Sequence[str | nn.Module]
Value = TypeVar("Value")


def select_layers(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The layers by their dotted names: in the order that was asked for, each once, those of one pattern as in the
    model. `layers`: a dotted name, a pattern in which `*` is anything, dots too, `?` one character and `[12]` one of
    these (`layer*.conv1`), a module of the model, or a sequence of such. Raises `LayerError` for none, for one that
    does not exist, and for a pattern that fits no layer."""
    wanted, model = list_wanted(layers), unwrap(model)
    found: dict[str, nn.Module] = {}
    for layer in wanted:
        if isinstance(layer, str) and is_pattern(layer):
            found |= _fitting(layer, {name: module for name, module in model.named_modules() if name}, "layer")
        else:
            outlet = find_layer(model, layer)
            if outlet.keys or outlet.run is not None:
                raise LayerError(
                    f"{shorten(layer)} names one tensor or run: pass the layer's name alone, to cover all runs."
                )
            found[outlet.name] = outlet.module
    scripted = [name for name, module in found.items() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise LayerError(
            f"Layer {join_names(scripted)} is a TorchScript module, which hooks cannot follow: use the original Python "
            "model."
        )
    return found


def list_wanted(layers: Layers) -> list[str | nn.Module]:
    """The names, patterns and modules one by one. Raises `LayerError` for none."""
    wanted = [layers] if isinstance(layers, (str, nn.Module)) else layers
    if not isinstance(wanted, Iterable) or not (wanted := list(wanted)):
        raise LayerError(
            f"The layers are {shorten(layers)}, expected a dotted name, a pattern such as 'layer*.conv1', or several."
        )
    return wanted


def select_parameters(model: nn.Module, parameters: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters that require gradients by their dotted names, given by such names or patterns (`fc*.bias`). Raises
    `GradientError` for none, for one that does not exist or requires no gradient, and for a pattern that fits none."""
    wanted = [parameters] if isinstance(parameters, str) else parameters
    if not isinstance(wanted, Iterable) or not (wanted := list(wanted)):
        raise GradientError(
            f"The parameters are {shorten(parameters)}, expected a name such as 'fc.bias', a pattern, or several."
        )
    known = dict(unwrap(model).named_parameters())
    found: dict[str, nn.Parameter] = {}
    for name in wanted:
        if not isinstance(name, str):
            raise GradientError(f"The parameter is {shorten(name)}, expected a name such as 'fc.bias', or a pattern.")
        chosen = _fitting(name, known, "parameter")
        if not any(parameter.requires_grad for parameter in chosen.values()):
            raise GradientError(
                f"No gradient reaches {join_names(list(chosen)[:3])}: call requires_grad_() on it, or choose another."
            )
        found |= {key: parameter for key, parameter in chosen.items() if parameter.requires_grad}
    return found


def is_pattern(name: str) -> bool:
    """Whether it may fit several names."""
    return any(sign in name for sign in "*?[")


def _fitting(pattern: str, known: Mapping[str, Value], what: str) -> dict[str, Value]:
    """Those whose names fit. Raises the error of that kind, with the nearest, where none does."""
    found = {name: value for name, value in known.items() if fnmatch.fnmatchcase(name, pattern)}
    if not found:
        offers = nearest(pattern.translate(str.maketrans("", "", "*?[]")), known)
        hint = f" Nearest: {join_names(offers)}." if offers else ""
        kind = LayerError if what == "layer" else GradientError
        raise kind(f"No {what} matches {shorten(pattern)}.{hint}")
    return found


def refuse_compiled(model: nn.Module) -> None:
    """Raises `ModelError` where the model, or a part of it, runs as compiled code, which ignores hooks that come later."""
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        which = f"Its {join_names(compiled[:3])} is" if compiled[0] else "The model is"
        raise ModelError(
            f"{which} compiled, and compiled code ignores hooks: to inspect it, run the uncompiled model (model._orig_mod, "
            "or one without model.compile())."
        )


class RunCheck:
    """Which layers ran, and which could ever get a gradient, by what was asked for: of a pattern's layers one is enough."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        wanted = layers if layers == () else list_wanted(layers)
        self.differentiable: set[str] = set()  # gave something that requires a gradient
        self._wanted = [(layer, set(select_layers(model, [layer]))) for layer in wanted]
        self._has_model_run = False
        self._ran: set[str] = set()
        self._recorded: set[str] = set()  # ran while PyTorch recorded

    def note_run(self, name: str) -> None:
        self._ran.add(name)
        if torch.is_grad_enabled():
            self._recorded.add(name)

    def note_model(self, *_: object) -> None:
        """The whole model ran, as a hook on it says; what gradcam runs itself is none of the user's passes."""
        self._has_model_run |= not in_own_pass()

    def require_runs(self) -> None:
        for layer, names in self._wanted:
            if self._has_model_run and not names & self._ran:
                which = _describe(layer, names, "never ran", "ever ran")
                raise LayerError(
                    f"{which}, although the model did: choose a layer that its forward calls as a module, layer(x), in the "
                    "same thread. Using only the layer's submodules or parameters does not run it."
                )

    def require_gradients(self) -> None:
        for layer, names in self._wanted:
            if names & self._recorded and not names & self.differentiable:
                which = _describe(layer, names, "returned nothing", "returned anything")
                raise GradientError(
                    f"{which} that requires a gradient, so there was no gradient to edit: call requires_grad_() on the "
                    "input, or on parameters up to this layer."
                )


def _describe(layer: str | nn.Module, names: set[str], one: str, several: str) -> str:
    return (
        f"Layer {join_names(names)} {one}"
        if len(names) == 1
        else f"None of the {len(names)} layers of '{layer}' {several}"
    )


Look = Callable[[str, Tensor], GradientHook | None]
Pass = Callable[[Tensor, GradientHook], Tensor]


def follow_layers(hooks: Hooks, layers: Mapping[str, nn.Module], look: Look, *, pass_on: Pass | None = None) -> None:
    """Call `look(name, activations)` at each run of these layers, and what that returns with the run's gradient.
    `activations`: the layer's output, detached, the first floating tensor of several; it may be changed in place as
    soon as `look` has returned. The gradient is that of this tensor: see `Hooks.observe_gradient`. Nothing else changes
    for the model. A run that a checkpoint repeats in the backward pass is not looked at again. `pass_on`: what sends
    the output on, if it is not `hooks.observe_gradient`. The hooks raise `LayerError` where a layer gives no floating
    tensor."""
    unrecorded = _Unrecorded()

    def hand_on(name: str, output: Any, tensor: Tensor, function: GradientHook | None) -> Any:
        if not tensor.requires_grad:
            unrecorded.add(name, function)
        elif function is not None:
            passed_on = (pass_on or hooks.observe_gradient)(tensor, function)
            return None if passed_on is tensor else replace_tensor(output, tensor, passed_on)
        return None

    def after(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if (tensor := first_floating(output)) is None:
            raise no_floating_tensor_error([name])
        refuse_vmap(tensor)
        return hand_on(name, output, tensor, look(name, tensor.detach()))

    def repeat(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        function, tensor = unrecorded.find(name), first_floating(output)
        return None if function is None or tensor is None else hand_on(name, output, tensor, function)

    for name, module in layers.items():
        hooks.after_forward(module, partial(after, name), repeated=partial(repeat, name))


class _Unrecorded:
    """What to call with the gradients of runs inside reentrant checkpoints. Those run without recording at first, and
    again, with it, in the backward pass: as the node that they are then. Under such a node the runs of a layer come in
    the same order again, in each backward pass that there is."""

    def __init__(self) -> None:  # by node, so that what has no backward pass goes with its graph
        self._functions: WeakKeyDictionary[Any, dict[str, deque[GradientHook | None]]] = WeakKeyDictionary()

    def add(self, name: str, function: GradientHook | None) -> None:
        """To the outermost reentrant checkpoint that runs its function here for the first time, if there is one."""
        node, frame = None, sys._getframe().f_back
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                node = frame.f_locals["ctx"]
            frame = frame.f_back
        if node is not None:
            self._functions.setdefault(node, defaultdict(deque))[name].append(function)

    def find(self, name: str) -> GradientHook | None:
        node = find_running_node()
        is_checkpoint = isinstance(node, BackwardCFunction)  # PyTorch's other nodes cannot even be looked up
        functions = self._functions.get(node, {}).get(name) if is_checkpoint else None
        if functions:
            functions.rotate(-1)
        return functions[-1] if functions else None
