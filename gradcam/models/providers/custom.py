"""Load user-defined models, from a function in a file or a module, or from an installed package's entry point."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gradcam import plugins
from gradcam.errors import ModelError, shorten
from gradcam.layers.find import refuse_foreign_models, unwrap
from gradcam.models.checkpoints.fit import load_weights
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.device import first_channels
from gradcam.models.preprocess import assume_preprocessing
from gradcam.models.providers.base import Blueprint, Parts, import_extra


def load(name: str, weights: Path | None) -> Parts:
    """Load the model that `file.py:function`, `package.module:function` or an entry point returns.

    The function is called without arguments. The name may also refer to a torch.nn.Module instead of a function. If
    `weights` is not None, the checkpoint `weights` is loaded into the model.
    """
    return to_parts(plan(name).build(), weights)


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model that the function returns; raise `ModelError` if there is no such function."""
    is_entry_point = name in plugins.list_entry_points("models")
    function = plugins.load_plugin("models", name) if is_entry_point else plugins.import_object(name)
    return Blueprint(partial(_call_factory, function, name))


def to_parts(model: nn.Module, weights: Path | None) -> Parts:
    """Load the checkpoint into the model, and return the model with the preprocessing of `_find_preprocessing`."""
    notes = () if weights is None else load_weights(model, read_checkpoint(weights))
    return replace(parts := _find_preprocessing(unwrap(model)), model=model, notes=[*notes, *parts.notes])


def _find_preprocessing(model: nn.Module) -> Parts:
    """Return the preprocessing that a library stored in the model or a submodule, or else the usual preprocessing."""
    notes: list[str] = []
    try:
        for name, module in model.named_modules():
            if (parts := _read_settings(module)) is not None:
                owner, task = (f"the submodule {name!r}", None) if name else ("the model", parts.task)
                notes = [*parts.notes, f"Using the preprocessing in the settings of {owner}."]
                return replace(parts, task=task, is_of_part=bool(name), notes=notes)
    except ModelError as error:  # The settings are not supported, for example padding.
        notes.append(str(error))
    side = getattr(getattr(model, "config", model), "image_size", None)  # in transformers, and in torchvision's ViT
    return Parts(model, assume_preprocessing(side), is_assumed=True, notes=notes)


def _read_settings(module: Any) -> Parts | None:
    """Return the preprocessing in a module's settings, or None; raise `ModelError` for unsupported settings."""
    from gradcam.models.providers import huggingface, open_clip, smp, timm

    if type(module).__module__.startswith("segmentation_models_pytorch.") and hasattr(module, "encoder"):
        return smp.to_parts(module)
    if isinstance(getattr(module, "name_or_path", None), str) and hasattr(module, "config"):
        with contextlib.suppress(ModelError):  # The image processor may not be on this computer.
            transformers = import_extra("transformers", "hf")
            parts = huggingface.find_preprocess(transformers, module.name_or_path, True, module.config)
            return None if parts.is_assumed else parts
    if isinstance(settings := getattr(module, "preprocess_cfg", None), dict):
        return Parts(module, open_clip.to_preprocessing(settings))
    config: Any = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    is_known = isinstance(config, dict) and config.get("mean") and config.get("input_size")
    # For a model with `in_chans=1`, timm's settings have the wrong number of channels. Do not use them.
    is_known = is_known and first_channels(module) in (0, len(config["mean"]))
    return Parts(module, timm.read_settings(module, config)) if is_known else None


def _call_factory(function: Any, name: str) -> nn.Module:
    refuse_foreign_models(function)
    if isinstance(function, nn.Module):
        return function
    if not callable(function):
        raise ModelError(f"{name} is {shorten(function)}, expected a function that returns a torch.nn.Module.")
    with contextlib.suppress(TypeError, ValueError):  # Some callables written in C have no signature.
        signature = inspect.signature(function)
        try:
            signature.bind()
        except TypeError as error:
            short = name.rpartition(":")[2]
            advice = f"write a function that passes the arguments, such as `def make(): return {short}(...)`."
            problem = f"{name} needs arguments, {short}{signature}, but is called without any"
            raise ModelError(f"{problem}: {advice}") from error
    model = plugins.call_user_function(function, name)
    refuse_foreign_models(model)
    if not isinstance(model, nn.Module):
        hint = " Give a checkpoint with --weights." if isinstance(model, dict) else ""
        raise ModelError(f"{name} returned {shorten(model)}, {type(model).__name__}, expected a torch.nn.Module.{hint}")
    return model
