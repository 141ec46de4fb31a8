"""Layers and parameters of a model by name, by pattern, or as they are."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from gradcam.errors import GradientError, LayerError, ModelError, join_names, nearest, shorten
from gradcam.layers import find_layer, unwrap

Layers = str | nn.Module | Sequence[str | nn.Module]
Value = TypeVar("Value")


def select_layers(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The layers by their dotted names: in the order that was asked for, each once, those of one pattern as in the model.

    `layers`: a dotted name, a pattern in which `*` is anything, dots too, `?` one character and `[12]` one of
    these (`layer*.conv1`), a module of the model, or a sequence of such.
    Raises `LayerError` for none, for one that does not exist, and for a pattern that fits no layer.
    """
    wanted = [layers] if isinstance(layers, (str, nn.Module)) else layers
    if not isinstance(wanted, Iterable) or not (wanted := list(wanted)):
        raise LayerError(
            f"The layers are {shorten(layers)}, expected a dotted name, a pattern such as 'layer*.conv1', or several."
        )
    model = unwrap(model)
    found: dict[str, nn.Module] = {}
    for layer in wanted:
        if isinstance(layer, str) and is_pattern(layer):
            found |= _fitting(layer, {name: module for name, module in model.named_modules() if name}, "layer")
        else:
            outlet = find_layer(model, layer)
            if outlet.keys or outlet.run is not None:
                raise LayerError(
                    f"{shorten(layer)} names one tensor or run: name the layer alone, all runs are followed."
                )
            found[outlet.name] = outlet.module
    scripted = [name for name, module in found.items() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise LayerError(
            f"Layer {join_names(scripted)} is a TorchScript module, which hooks cannot follow: "
            "use the Python model that it was made from."
        )
    return found


def select_parameters(model: nn.Module, parameters: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters that require gradients by their dotted names, given by such names or patterns (`fc*.bias`).

    Raises `GradientError` for none, for one that does not exist or requires no gradient, and for a pattern that fits none.
    """
    wanted = [parameters] if isinstance(parameters, str) else parameters
    if not isinstance(wanted, Iterable) or not (wanted := list(wanted)):
        raise GradientError(
            f"The parameters are {shorten(parameters)}, expected a name such as 'fc.bias', a pattern, or several."
        )
    known = dict(unwrap(model).named_parameters())
    found: dict[str, nn.Parameter] = {}
    for name in wanted:
        if not isinstance(name, str):
            raise GradientError(f"{shorten(name)} is no parameter's name, such as 'fc.bias', nor a pattern.")
        chosen = _fitting(name, known, "parameter")
        trained = {key: value for key, value in chosen.items() if value.requires_grad}
        if not trained:
            raise GradientError(
                f"No gradient comes to {join_names(list(chosen)[:3])}: call requires_grad_() on it, or choose others."
            )
        found |= trained
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
        raise kind(f"No {what} fits {shorten(pattern)}.{hint}")
    return found


def refuse_compiled(model: nn.Module) -> None:
    """Raises `ModelError` where the model, or a part of it, runs as compiled code, which ignores hooks that come later."""
    compiled = [
        name for name, it in model.named_modules() if it._compiled_call_impl is not None or hasattr(it, "_orig_mod")
    ]
    if compiled:
        which = f"Its {join_names(compiled[:3])} is" if compiled[0] else "The model is"
        raise ModelError(
            f"{which} compiled, and compiled code ignores hooks: run the model that was compiled (model._orig_mod, or one "
            "without model.compile()) while you look inside it."
        )
