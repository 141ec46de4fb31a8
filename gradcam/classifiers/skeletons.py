"""Models by name without their weights: modules and shapes alone, which take neither time nor memory."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradcam.classifiers import DEFAULT
from gradcam.classifiers.providers import find_blueprint
from gradcam.classifiers.providers.blueprint import Blueprint
from gradcam.errors import GradcamError, ModelError, shorten
from gradcam.listing import LayerRow, list_layers


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and what it takes: pictures of `size` (height, width) with so many channels.

    `layer`: what is explained where nothing else is said, None for the last layer that has a grid.
    """

    name: str
    model: nn.Module
    size: tuple[int, int]
    channels: int
    layer: str | None = None


@dataclass(frozen=True)
class Survey:
    """A skeleton's layers. `note`: what a person should know of how they were found."""

    skeleton: Skeleton
    rows: tuple[LayerRow, ...]
    note: str | None = None


def build_skeleton(name: str = DEFAULT, *, size: tuple[int, int] | None = None) -> Skeleton:
    """The model of that name on the meta device, where no weight has a value; no weights are read or downloaded.

    `size`: of its pictures, (height, width); None for what its weights were trained with.
    Raises `ModelError` for an unknown name, and for a model that cannot be built.
    """
    return _to_skeleton(name, find_blueprint(name), size)


def survey(name: str = DEFAULT, *, size: tuple[int, int] | None = None) -> Survey:
    """The layers of the model of that name, as `gradcam.list_layers` gives them, with the model's own suggestion.

    A model that asks for values on its way does not run on the meta device: it is run with random weights.
    Raises as `build_skeleton`, and `ModelError` for a model that does not take pictures of this size.
    """
    blueprint = find_blueprint(name)
    skeleton, note = _to_skeleton(name, blueprint, size), None
    images = torch.empty(1, skeleton.channels, *skeleton.size, device="meta")
    try:
        rows = list_layers(skeleton.model, images)
    except GradcamError:
        raise
    except Exception as error:  # whatever a model raises
        if "meta" not in str(error).lower():
            raise _does_not_run(skeleton, error) from error
        rows, note = _list_for_real(blueprint, skeleton), "it asks for values on its way: run with random weights"
    return Survey(skeleton, _suggest(rows, skeleton.layer), note)


def _list_for_real(blueprint: Blueprint, skeleton: Skeleton) -> tuple[LayerRow, ...]:
    model = _build(skeleton.name, blueprint)
    try:
        return list_layers(model, torch.zeros(1, skeleton.channels, *skeleton.size))
    except GradcamError:
        raise
    except Exception as error:
        raise _does_not_run(skeleton, error) from error


def _does_not_run(skeleton: Skeleton, error: Exception) -> ModelError:
    channels, (height, width) = skeleton.channels, skeleton.size
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelError(f"{skeleton.name} does not run with a picture of {channels} x {height} x {width}: {reason}")


def _suggest(rows: tuple[LayerRow, ...], layer: str | None) -> tuple[LayerRow, ...]:
    """With the model's own layer for the suggestion, if it has one."""
    return rows if layer is None else tuple(replace(row, is_suggested=row.name == layer) for row in rows)


def _to_skeleton(name: str, blueprint: Blueprint, size: tuple[int, int] | None) -> Skeleton:
    model = _build_empty(name, blueprint)
    return Skeleton(name, model, size or blueprint.size, blueprint.channels, blueprint.layer)


def _build_empty(name: str, blueprint: Blueprint) -> nn.Module:
    """Numbers that a model computes while it is built, such as widths, are real: `torch.device("meta")` has none."""
    try:
        with _empty_parameters(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about weights that are read into nothing
            model = _build(name, blueprint)
    except ModelError:  # it looks at its own weights while it is built, or cannot be built at all
        model = _build(name, blueprint)
    return model.to("meta")


def _build(name: str, blueprint: Blueprint) -> nn.Module:
    """The model, with random weights. Raises `ModelError` where that fails, or gives something else."""
    try:
        model = blueprint.build()
    except ModelError:
        raise
    except Exception as error:  # whatever the code of somebody's model raises
        reason = " ".join(str(error).split())
        raise ModelError(f"{name}: cannot be built ({type(error).__name__}: {reason})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}: gave {shorten(model)}, expected a torch.nn.Module.")
    return model


@contextlib.contextmanager
def _empty_parameters() -> Iterator[None]:
    """Parameters that modules get in this thread have a shape and no values: nothing is drawn at random for them."""
    thread = threading.get_ident()

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter.is_meta or type(parameter) is not nn.Parameter:
            return None  # one that is shared stays shared
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast("Callable[..., None]", empty))  # what its type leaves out
    try:
        yield
    finally:
        handle.remove()
