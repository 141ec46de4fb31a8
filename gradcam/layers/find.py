"""Find a layer of a model by its dotted name, or by the module itself."""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gradcam.errors import LayerError, ModelError, find_similar_names, join_names, shorten

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
WRAPPER_NAMES = ("module", "_orig_mod")  # Attributes under which wrappers and compiled modules store the model.
# Descriptions of models that are not PyTorch modules. The keys are patterns for the full name of the model's class.
OTHER_KINDS = {
    r"torch\.export\.exported_program\.":
        "an exported program, whose graph has no layers: explain torch.export.unflatten(program)",
    r"ultralytics\.(?!nn\.)": "an ultralytics wrapper around a model: explain its .model",
    r"onnx": "an ONNX model, which has no gradients: explain the PyTorch model that it was exported from",
    r"(tensorflow|keras|tf_keras|flax|coremltools|tensorrt|openvino)\.":
        "a model of another framework: explain a PyTorch model with the same weights",
}  # fmt: skip


class LayerRef(NamedTuple):
    """A module output to record: the module, one of its output tensors, and one of its runs.

    `keys` are the keys and indices that lead to the tensor. `run` is counted from 0; None if the module runs once.
    """

    name: str
    module: nn.Module
    keys: tuple[str, ...] = ()
    run: int | None = None


def unwrap(model: Any) -> nn.Module:
    """Return the user's module without `DataParallel`, `DistributedDataParallel` and `torch.compile`.

    Raises `ModelError` if the model is not a module with Python code.
    """
    # `hasattr` of a module without the attribute is slow.
    while isinstance(model, WRAPPERS) or "_orig_mod" in getattr(model, "_modules", ()):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    refuse_foreign_models(model)
    if isinstance(model, torch.jit.ScriptModule):
        advice = "explain the original Python model."
        raise ModelError(f"The model is a TorchScript module, whose layer outputs hooks cannot replace: {advice}")
    if not isinstance(model, nn.Module):
        advice = "pass the module inside it, or write a module whose forward method calls this object"
        if inspect.isroutine(model):
            advice = "write a module whose forward method calls this function, without torch.vmap"
        raise ModelError(f"The model is {type(model).__name__}, expected a torch.nn.Module: {advice}.")
    return model


def refuse_foreign_models(model: object) -> None:
    """Raise `ModelError`, with advice, for known objects that are not plain PyTorch modules."""
    kind, is_module = type(model), isinstance(model, nn.Module)
    if is_module and not kind.__module__.startswith("ultralytics."):
        return
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    patterns = (pattern for pattern in OTHER_KINDS if any(re.match(pattern, name) for name in names))
    advice = OTHER_KINDS.get(next(patterns, ""))
    for path in (".model", ".model.model") if advice is None and not is_module else ():
        with contextlib.suppress(AttributeError):
            if isinstance(operator.attrgetter(path[1:])(model), nn.Module):
                advice = f"not a torch.nn.Module, but contains one: explain its {path}"
    if advice is not None:
        raise ModelError(f"The model, {kind.__name__}, is {advice}.")


def find_layers(model: nn.Module, layers: Sequence[str | nn.Module]) -> list[LayerRef]:
    """Find several layers, without duplicates. Raises the errors of `check_layers` and `find_layer`."""
    refs = [find_layer(model, layer) for layer in check_layers(layers)]
    return list({ref.name: ref for ref in refs}.values())


def check_layers(layers: Sequence[str | nn.Module]) -> Sequence[str | nn.Module]:
    """Return the layers. Raises `LayerError` if they are not a list of at least one layer."""
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise LayerError(f"layers is {shorten(layers)}, expected a list of at least one layer, by name or as modules.")
    return layers


def find_layer(model: nn.Module, layer: str | nn.Module) -> LayerRef:
    """Find a layer of an unwrapped model, by its name or by the module itself.

    A name may contain the parts that wrappers add (`module.`, `_orig_mod.`). If the module returns several tensors, the
    name may end with a key or an index, as in "backbone:out". If the module runs several times, the name may end with
    the number of a run, as in "encoder.layer4#1". If the layer is unknown, raises `LayerError` with the nearest names.
    """
    if isinstance(layer, nn.Module):
        layer = _uncompiled(layer)
        for name, module in model.named_modules():
            if module is layer and name:
                return LayerRef(name, layer)
        relation = "the model itself" if layer is model else "not part of the model"
        child = next((name for name, _ in model.named_children()), "layer4")
        kind = type(layer).__name__
        raise LayerError(f"The layer, {kind}, is {relation}: choose a module inside the model, such as model.{child}.")
    if not isinstance(layer, str):
        raise LayerError(
            f"The layer is {shorten(layer)}, expected a dotted name such as 'layer4', or a module of the model."
        )
    has_run = "#" in layer and re.search(r"#\d+$", layer, re.ASCII)
    base_name, _, run = layer.rpartition("#") if has_run else (layer, "", "")
    for name, *keys in ([layer], base_name.split(":")):  # A module's name may itself contain ":" or "#".
        if (match := _find_name(model, name)) is not None:
            full_name = match[0] + layer[len(name) :]
            return LayerRef(full_name, match[1], tuple(keys), int(run) if run and name != layer else None)
    modules = {name: module for name, module in model.named_modules() if name}
    offers = find_similar_names(base_name.partition(":")[0], modules) or list(dict(model.named_children()))
    hint = f"Nearest: {join_names(offers)}." if offers else "The model has no submodules."
    raise LayerError(f"There is no layer {shorten(layer)} in {type(model).__name__}. {hint}")


def _find_name(model: nn.Module, layer: str) -> tuple[str, nn.Module] | None:
    module: nn.Module | None = model
    for part in layer.split("."):  # `get_submodule` takes several times as long.
        module = None if module is None else module._modules.get(part)
    if module is not None:
        return layer, _uncompiled(module)
    for name in filter(None, (layer, without_wrappers(layer))):
        with contextlib.suppress(AttributeError):
            return name, _uncompiled(model.get_submodule(name))
    named_modules = model.named_modules()
    by_plain_name = {without_wrappers(name): (name, _uncompiled(module)) for name, module in named_modules if name}
    return by_plain_name.get(layer)


def _uncompiled(module: nn.Module) -> nn.Module:
    return module._modules.get("_orig_mod") or module


def without_wrappers(name: str) -> str:
    """Return a layer's name without the parts that wrappers add, such as `module.`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)
