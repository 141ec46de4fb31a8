"""Models of the user's own: what a function gives, of a file, a module, or an installed package's entry point."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gradcam import plugins
from gradcam.errors import ModelError, shorten
from gradcam.layers.find import refuse_other_kinds
from gradcam.models.checkpoints.fit import load_weights
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.preprocess import ASSUMED
from gradcam.models.providers.base import Blueprint, Parts


def load(name: str, weights: Path | None) -> Parts:
    """The model that `file.py:function`, `package.module:function` or an entry point gives, called without arguments. A
    module that is there already, in place of a function, is taken as it is. `weights`: loaded into it."""
    return to_parts(plan(name).build(), weights)


def plan(name: str) -> Blueprint:
    """The model that the function gives. Raises `ModelError` where there is no such function."""
    found = plugins.load("models", name) if name in plugins.installed("models") else plugins.find_function(name)
    return Blueprint(partial(_make, found, name))


def to_parts(model: nn.Module, weights: Path | None) -> Parts:
    """A model of which nothing is known; a checkpoint is loaded into it if there is one."""
    notes = () if weights is None else load_weights(model, read_checkpoint(weights))
    return Parts(model, ASSUMED, is_assumed=True, notes=notes)


def _make(found: Any, name: str) -> nn.Module:
    refuse_other_kinds(found)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ModelError(f"{name} is {shorten(found)}, expected a function that gives a torch.nn.Module.")
    with contextlib.suppress(TypeError, ValueError):  # some callables of C have no signature
        signature = inspect.signature(found)
        try:
            signature.bind()
        except TypeError as error:
            short = name.rpartition(":")[2]
            raise ModelError(
                f"{name} takes arguments, {short}{signature}, and is called without: write a function that gives them, such "
                f"as `def make(): return {short}(...)`."
            ) from error
    model = plugins.call(found, name)
    refuse_other_kinds(model)
    if not isinstance(model, nn.Module):
        hint = " A checkpoint goes to --weights." if isinstance(model, dict) else ""
        raise ModelError(f"{name} gave {shorten(model)}, {type(model).__name__}, expected a torch.nn.Module.{hint}")
    return model
