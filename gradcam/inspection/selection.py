"""Select layers and parameters of a model by name, by pattern, or as modules."""

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

from gradcam.errors import GradientError, LayerError, ModelError, find_similar_names, join_names, shorten
from gradcam.hooks.autograd import GradientHook, no_floating_tensor_error
from gradcam.hooks.containers import find_floating_tensor, replace_tensor
from gradcam.hooks.hooks import Hooks, in_own_pass, refuse_vmap
from gradcam.hooks.pytorch import find_running_node, is_compiled
from gradcam.layers.find import find_layer, unwrap

Layers = str | nn.Module | Sequence[str | nn.Module]
Value = TypeVar("Value")
ERRORS = {"layer": LayerError, "parameter": GradientError}


def select_layers(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """Return the requested layers by dotted name, without duplicates, in the requested order.

    `layers` is a dotted name, a pattern (`layer*.conv1`), a module of the model, or a sequence of names, patterns and
    modules. In a pattern, `*` matches any text including dots, `?` any character, and `[12]` a 1 or a 2. The layers
    that match a pattern are in the model's order. Raises `LayerError` if `layers` is empty, if a layer does not exist,
    or if a pattern matches no layer.
    """
    requested, model = to_layer_list(layers), unwrap(model)
    modules: dict[str, nn.Module] = {}
    for layer in requested:
        if isinstance(layer, str) and is_pattern(layer):
            modules |= _match_pattern(layer, {name: module for name, module in model.named_modules() if name}, "layer")
        else:
            ref = find_layer(model, layer)
            if ref.keys or ref.run is not None:
                problem = f"{shorten(layer)} names one tensor or one run of a layer"
                raise LayerError(f"{problem}: pass the layer's name alone, which covers all tensors and runs.")
            modules[ref.name] = ref.module
    scripted = [name for name, module in modules.items() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        problem = f"Layer {join_names(scripted)} is a TorchScript module, which hooks cannot follow"
        raise LayerError(f"{problem}: use the original Python model.")
    return modules


def to_layer_list(layers: Layers) -> list[str | nn.Module]:
    """Return names, patterns and modules as a list. Raise `LayerError` if the list is empty."""
    return _to_list(layers, "layer", "a dotted name, a pattern such as 'layer*.conv1', or several")


def _to_list(value: Any, kind: str, expected: str) -> list[Any]:
    values = [value] if isinstance(value, (str, nn.Module)) else value
    if not isinstance(values, Iterable) or not (values := list(values)):
        raise ERRORS[kind](f"The {kind}s are {shorten(value)}, expected {expected}.")
    return values


def select_parameters(model: nn.Module, parameters: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that match names or patterns (`fc*.bias`) and require gradients, by dotted name.

    Raises `GradientError` if `parameters` is empty, if a parameter does not exist or requires no gradient, or if a
    pattern matches no parameter that requires gradients.
    """
    all_parameters = dict(unwrap(model).named_parameters())
    parameters_by_name: dict[str, nn.Parameter] = {}
    for name in _to_list(parameters, "parameter", "a name such as 'fc.bias', a pattern, or several"):
        if not isinstance(name, str):
            raise GradientError(f"The parameter is {shorten(name)}, expected a name such as 'fc.bias', or a pattern.")
        matches = _match_pattern(name, all_parameters, "parameter")
        if not any(parameter.requires_grad for parameter in matches.values()):
            problem = f"No gradient reaches {join_names(list(matches)[:3])}"
            raise GradientError(f"{problem}: call requires_grad_() on this parameter, or choose another one.")
        parameters_by_name |= {key: parameter for key, parameter in matches.items() if parameter.requires_grad}
    return parameters_by_name


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern with wildcards."""
    return any(character in name for character in "*?[")


def _match_pattern(pattern: str, entries: Mapping[str, Value], kind: str) -> dict[str, Value]:
    """Return the entries whose name matches a pattern.

    Raises an error that suggests similar names if no name matches: `LayerError` for layers, `GradientError` for
    parameters.
    """
    matches = {name: value for name, value in entries.items() if fnmatch.fnmatchcase(name, pattern)}
    if not matches:
        offers = find_similar_names(pattern.translate(str.maketrans("", "", "*?[]")), entries)
        hint = f" Nearest: {join_names(offers)}." if offers else ""
        raise ERRORS[kind](f"No {kind} matches {shorten(pattern)}.{hint}")
    return matches


def refuse_compiled(model: nn.Module) -> None:
    """Raise `ModelError` if the model, or a part of it, is compiled. Compiled code ignores hooks registered later."""
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        part = f"The model's {join_names(compiled[:3])} is" if compiled[0] else "The model is"
        problem = f"{part} compiled, and compiled code ignores hooks"
        raise ModelError(f"{problem}: run the uncompiled model (model._orig_mod), or leave out model.compile().")


class RunCheck:
    """Checks that requested layers ran, and that their outputs required gradients.

    A pattern passes a check if one of its layers does.
    """

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        requested = layers if layers == () else to_layer_list(layers)
        self.differentiable: set[str] = set()  # Layers whose output required a gradient.
        self._requested = [(layer, set(select_layers(model, [layer]))) for layer in requested]
        self._has_model_run = False
        self._ran: set[str] = set()
        self._ran_with_grad: set[str] = set()  # Layers that ran with grad mode on.

    def note_run(self, name: str) -> None:
        self._ran.add(name)
        if torch.is_grad_enabled():
            self._ran_with_grad.add(name)

    def note_model(self, *_: object) -> None:
        """Record that the whole model ran, except in gradcam's own passes. This method is a forward hook."""
        self._has_model_run |= not in_own_pass()

    def require_runs(self) -> None:
        for layer, names in self._requested:
            if self._has_model_run and not names & self._ran:
                fact = _describe(layer, names, "never ran", "ever ran")
                raise LayerError(
                    f"{fact}, although the model ran: choose a layer that the model's forward calls as a module, layer(x), "
                    "in the same thread. If the model uses only a layer's submodules or parameters, the layer does not "
                    "run."
                )

    def require_gradients(self) -> None:
        for layer, names in self._requested:
            if names & self._ran_with_grad and not names & self.differentiable:
                fact = _describe(layer, names, "returned nothing", "returned anything")
                raise GradientError(
                    f"{fact} that requires a gradient, so there was no gradient to edit. Call requires_grad_() on the "
                    "input, or on a parameter of this layer or of an earlier layer."
                )


def _describe(layer: str | nn.Module, names: set[str], predicate: str, group_predicate: str) -> str:
    if len(names) == 1:
        return f"Layer {join_names(names)} {predicate}"
    return f"None of the {len(names)} layers of '{layer}' {group_predicate}"


ActivationHook = Callable[[str, Tensor], GradientHook | None]
Attacher = Callable[[str, Tensor, GradientHook], Tensor]


def follow_layers(
    hooks: Hooks, layers: Mapping[str, nn.Module], on_activations: ActivationHook, *, attach: Attacher | None = None
) -> None:
    """Call `on_activations(name, activations)` at each run of a layer, and attach the gradient hook that is returned.

    `activations` is the first floating-point tensor of the layer's output, detached. The model may change this tensor
    in place after the call. If `on_activations` returns a hook, the hook gets the gradient with respect to this tensor,
    by `Hooks.observe_gradient`. The computation of the model does not change. A run that a checkpoint repeats in the
    backward pass is not reported again.

    If `attach` is given, `attach(name, tensor, hook)` replaces `Hooks.observe_gradient`. The forward hooks raise
    `LayerError` if a layer returns no floating-point tensor.
    """
    checkpoint_hooks = _CheckpointHooks()

    def attach_to(name: str, output: Any, tensor: Tensor, function: GradientHook | None) -> Any:
        if not tensor.requires_grad:
            checkpoint_hooks.add(name, function)
        elif function is not None:
            passed_on = attach(name, tensor, function) if attach else hooks.observe_gradient(tensor, function)
            return None if passed_on is tensor else replace_tensor(output, tensor, passed_on)
        return None

    def after_run(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if (tensor := find_floating_tensor(output)) is None:
            raise no_floating_tensor_error([name])
        refuse_vmap(tensor)
        return attach_to(name, output, tensor, on_activations(name, tensor.detach()))

    def after_repeated_run(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        function, tensor = checkpoint_hooks.find(name), find_floating_tensor(output)
        return None if function is None or tensor is None else attach_to(name, output, tensor, function)

    for name, module in layers.items():
        hooks.after_forward(module, partial(after_run, name), repeated=partial(after_repeated_run, name))


class _CheckpointHooks:
    """Stores the gradient hooks of layers inside reentrant checkpoints until the backward pass.

    A reentrant checkpoint first runs its layers with grad mode off. In the backward pass, the checkpoint's autograd
    node runs the layers again with grad mode on. In every backward pass, the runs of a layer in such a node come in the
    same order, so the stored hooks can be matched by order.
    """

    def __init__(self) -> None:
        # The keys (autograd nodes) are weak references, so that the stored hooks are deleted with the graph.
        self._functions: WeakKeyDictionary[Any, dict[str, deque[GradientHook | None]]] = WeakKeyDictionary()

    def add(self, name: str, function: GradientHook | None) -> None:
        """Store a hook for the outermost reentrant checkpoint that is running; do nothing outside a checkpoint."""
        node, frame = None, sys._getframe().f_back
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                node = frame.f_locals["ctx"]
            frame = frame.f_back
        if node is not None:
            self._functions.setdefault(node, defaultdict(deque))[name].append(function)

    def find(self, name: str) -> GradientHook | None:
        node = find_running_node()
        is_checkpoint = isinstance(node, BackwardCFunction)  # Nodes of other classes do not support weak references.
        functions = self._functions.get(node, {}).get(name) if is_checkpoint else None
        if functions:
            functions.rotate(-1)
        return functions[-1] if functions else None
