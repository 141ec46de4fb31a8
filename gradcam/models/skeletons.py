"""Build models by name without their weights. On the meta device, a model takes almost no time or memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gradcam.adapters import find_main_family
from gradcam.cam.listing import LayerRow, list_layers
from gradcam.errors import GradcamError, ModelError, shorten
from gradcam.layers.token_layout import USUAL_DEPTH, takes_volumes
from gradcam.models.device import find_input_dtype, first_channels
from gradcam.models.providers import DEFAULT_MODEL, find_blueprint, pytorch_defaults
from gradcam.models.providers.base import Blueprint, empty_parameters

VOLUME_HINT = (
    ". Give --size DxHxW, or wrap the model in a module that takes volumes (N,C,D,H,W). For SlowFast, the module's "
    "forward(clip) returns model([clip[:, :, ::4], clip]). If the model takes frames before channels, the module's "
    "forward(clip) returns model(clip.transpose(1, 2))."
)
MAX_MESSAGE_CHARACTERS = 60  # The model's error message is cut to this length if `VOLUME_HINT` follows it.
MAX_PARAMETERS_TO_RUN = 60_000_000  # Larger models are not run to check the layout of their layers.


@dataclass(frozen=True)
class Skeleton:
    """A model without trained weights, and the shape of its input.

    `size` is (height, width) for images, and (depth, height, width) for volumes and clips.
    """

    name: str
    model: nn.Module
    size: tuple[int, ...]
    channels: int
    blueprint: Blueprint


@dataclass(frozen=True)
class Survey:
    """The layers of a skeleton.

    Each of the `rows` describes one layer. If the model had to be run with random weights, `note` reports the reason.
    `is_of_task` is True if the model has an adapter for another task than classification. The suggested rows are then
    the layers that are explained by default.
    """

    skeleton: Skeleton
    rows: tuple[LayerRow, ...]
    note: str | None = None
    is_of_task: bool = False


def build_with_random_weights(name: str = DEFAULT_MODEL, *, size: tuple[int, ...] | None = None) -> Skeleton:
    """Build the named model with random weights; no weights are read or downloaded.

    `size` is the (height, width) of images, or the (depth, height, width) of volumes. None uses the size for which
    the weights were trained, and a depth of 16. If a user-defined function builds the model, the function's weights
    are used. The caller's random state is preserved.
    """
    with torch.random.fork_rng(devices=()):
        return _to_skeleton(name, find_blueprint(name), size, _build)


def survey(name: str = DEFAULT_MODEL, *, size: tuple[int, ...] | None = None) -> Survey:
    """Return the layers of the model with this name, as in `gradcam.list_layers`, with its default layer marked.

    The model is built on the meta device, where weights have no values. If the forward pass needs values, the model is
    built again with random weights. If the model fails with the usual number of channels, the input gets as many
    channels as the first convolution takes. `size` is as in `build_with_random_weights`.
    """
    skeleton = _to_skeleton(name, find_blueprint(name), size, _build_empty)
    try:
        return _survey(skeleton)
    except ModelError:
        channels = first_channels(skeleton.model)
        if channels in (0, skeleton.channels):
            raise
        return _survey(replace(skeleton, channels=channels))


def _survey(skeleton: Skeleton) -> Survey:
    note, blueprint = None, skeleton.blueprint
    try:
        rows = _try_places(skeleton, _list_layers(skeleton, skeleton.model, "meta"))
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:  # Models raise errors of any type.
        if "meta" not in str(error).lower():
            raise to_run_error(skeleton.name, (skeleton.channels, *skeleton.size), error) from error
        rows = _list_with_random_weights(skeleton)
        note = "The layers cannot be listed without weight values, so the model was run with random weights."
    family = find_main_family(skeleton.model)
    names = [] if family is None else [layer.partition(":")[0] for layer in family.layers]
    names, positive = (names, None) if blueprint.layer is None else ([blueprint.layer], blueprint.layer_for_positive)
    if names:
        rows = tuple(replace(row, is_suggested=row.name in names) for row in rows)
        rows = tuple(replace(row, suggested_for_positive=row.name == positive) for row in rows)
    return Survey(skeleton, rows, note, is_of_task=family is not None)


def _try_places(skeleton: Skeleton, rows: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    """Return rows with measured `places` (see `LayerRow`), for small models whose layouts are partly guessed."""
    count = sum(parameter.numel() for parameter in skeleton.model.parameters())
    is_volume = len(skeleton.size) > 2  # For volumes, the measurement takes minutes.
    if is_volume or count > MAX_PARAMETERS_TO_RUN or not any(row.cam and row.guessed for row in rows):
        return rows
    # Ignore errors, because the rows are usable without `places`.
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # for a reproducible list
        places = {row.name: row.places for row in _list_with_random_weights(skeleton)}
        return tuple(replace(row, places=places.get(row.name)) for row in rows)
    return rows


def _list_layers(skeleton: Skeleton, model: nn.Module, device: str) -> tuple[LayerRow, ...]:
    shape = (1, skeleton.channels, *skeleton.size)
    return list_layers(model, torch.zeros(shape, device=device, dtype=find_input_dtype(model)))


def _list_with_random_weights(skeleton: Skeleton) -> tuple[LayerRow, ...]:
    model = _build(skeleton.name, skeleton.blueprint)
    try:
        return _list_layers(skeleton, model, "cpu")
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:
        raise to_run_error(skeleton.name, (skeleton.channels, *skeleton.size), error) from error


def to_run_error(name: str, shape: Sequence[int], error: BaseException) -> ModelError:
    """Return the error for a model that fails on an image (C,H,W) or a volume (C,D,H,W) of this shape."""
    kind, hint = ("a volume", VOLUME_HINT) if len(shape) > 3 else ("an image", "")
    reason = " ".join(" ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())]).split())
    if isinstance(error, SystemExit):
        reason = f"SystemExit: {reason}"  # The message of SystemExit is only an exit code.
    elif hint:
        reason = reason[:MAX_MESSAGE_CHARACTERS].rstrip(".")
    elif isinstance(error, (RuntimeError, AssertionError)) and not hasattr(error, "__notes__"):
        reason, hint = reason.rstrip("."), "; give another --size."
    return ModelError(f"{name} does not run with {kind} of {' x '.join(map(str, shape))}: {reason}{hint}")


def _to_skeleton(name: str, blueprint: Blueprint, size: tuple[int, ...] | None, build: Callable[..., Any]) -> Skeleton:
    model, size = build(name, blueprint), size or blueprint.size
    if len(size) == 2 and takes_volumes(model):
        size = (USUAL_DEPTH, *size)
    return Skeleton(name, model, size, blueprint.channels, blueprint)


def _build_empty(name: str, blueprint: Blueprint) -> nn.Module:
    # First create all parameters as meta tensors. A constructor that reads parameter values then fails. In this case,
    # the last line builds the model again, with real parameters.
    with contextlib.suppress(ModelError), empty_parameters(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Loading weights into meta tensors causes warnings.
        return _build(name, blueprint).to("meta")
    return _build(name, blueprint).to("meta")


def _build(name: str, blueprint: Blueprint) -> nn.Module:
    """Build the model with random weights; raise `ModelError` if this fails, or the result is not a module."""
    try:
        with pytorch_defaults():
            model = blueprint.build()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # The user's code may raise errors of any type.
        raise ModelError(f"{name}: cannot be built ({type(error).__name__}: {' '.join(str(error).split())})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}: returned {shorten(model)}, expected a torch.nn.Module.")
    return model
