"""Models by name without their weights: modules and shapes alone, which take neither time nor memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gradcam.cam.listing import LayerRow, list_layers
from gradcam.errors import GradcamError, ModelError, shorten
from gradcam.families import find_main
from gradcam.layers.layout import USUAL_DEPTH, takes_volumes
from gradcam.models.device import find_input_dtype, first_channels
from gradcam.models.providers import DEFAULT, find_blueprint, pytorch_defaults
from gradcam.models.providers.base import Blueprint, empty_parameters

OF_VOLUMES = (
    ". Give --size DxHxW, or a module whose forward(clip) returns model([clip[:, :, ::4], clip]) (SlowFast), "
    "or model(clip.transpose(1, 2)) (frames before channels)."
)
MOST_SAID = 60  # characters of a model's own error, before a hint
MOST_PARAMETERS = 60_000_000  # of a model that is built with random weights to see where its cells lie


@dataclass(frozen=True)
class Skeleton:
    """A model without the weights of its name, and what it takes: pictures of `size` (height, width) with so many channels,
    or volumes and clips of `size` (depth, height, width). `layer`, `layer_for_positive`: as those of a `Blueprint`.
    """

    name: str
    model: nn.Module
    size: tuple[int, ...]
    channels: int
    layer: str | None = None
    layer_for_positive: str | None = None


@dataclass(frozen=True)
class Survey:
    """A skeleton's layers. `note`: what a person should know of how they were found. `is_of_task`: whether the model does
    more than classify, and the marked ones are those that are explained where none is named."""

    skeleton: Skeleton
    rows: tuple[LayerRow, ...]
    note: str | None = None
    is_of_task: bool = False


def build_with_random_weights(name: str = DEFAULT, *, size: tuple[int, ...] | None = None) -> Skeleton:
    """The model of that name with weights that are drawn at random, so that it computes; none are read or downloaded.
    `size`: of its pictures, (height, width), or of its volumes, (depth, height, width); None for what its weights were
    trained with, and a depth of 16. What a function of the user's own gives is taken as it is. The random state of the
    caller stays as it was."""
    with torch.random.fork_rng(devices=()):
        return _to_skeleton(name, find_blueprint(name), size, _build)


def survey(name: str = DEFAULT, *, size: tuple[int, ...] | None = None) -> Survey:
    """The layers of the model of that name, as `gradcam.list_layers` gives them, with the model's own suggestion. It is
    built on the meta device, where no weight has a value; `size` is as in `build_with_random_weights`. A model that
    asks for values on its way does not run there: it is run with random weights. One that does not take the usual
    channels gets as many as its first convolution takes."""
    blueprint = find_blueprint(name)
    skeleton = _to_skeleton(name, blueprint, size, _build_empty)
    try:
        return _survey(blueprint, skeleton)
    except ModelError:
        channels = first_channels(skeleton.model)
        if channels in (0, skeleton.channels):
            raise
        return _survey(blueprint, replace(skeleton, channels=channels))


def _survey(blueprint: Blueprint, skeleton: Skeleton) -> Survey:
    note = None
    try:
        rows = _try_places(blueprint, skeleton, _list_layers(skeleton, skeleton.model, "meta"))
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:  # whatever a model raises
        if "meta" not in str(error).lower():
            raise does_not_run(skeleton.name, (skeleton.channels, *skeleton.size), error) from error
        rows, note = (
            _list_for_real(blueprint, skeleton),
            "The forward pass needs real values: the model was run with random weights.",
        )
    family = find_main(skeleton.model)
    own = () if family is None else [layer.partition(":")[0] for layer in family.layers]
    own, positive = ([skeleton.layer], skeleton.layer_for_positive) if skeleton.layer is not None else (own, None)
    if own:
        rows = tuple(
            replace(it, is_suggested=it.name in own, suggested_for_positive=it.name == positive) for it in rows
        )
    return Survey(skeleton, rows, note, is_of_task=family is not None)


def _try_places(blueprint: Blueprint, skeleton: Skeleton, rows: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    """With what random weights show of places that are guesses; as they are without one, or where it would take long."""
    count = sum(parameter.numel() for parameter in skeleton.model.parameters())
    is_volume = len(skeleton.size) > 2  # of which several passes take minutes
    if is_volume or count > MOST_PARAMETERS or not any(row.cam and row.guessed for row in rows):
        return rows
    with (
        contextlib.suppress(Exception),
        torch.random.fork_rng(devices=()),
    ):  # it was listed once, whatever it raises now
        torch.manual_seed(0)  # the same list each time
        places = {row.name: row.places for row in _list_for_real(blueprint, skeleton)}
        return tuple(replace(row, places=places.get(row.name)) for row in rows)
    return rows


def _list_layers(skeleton: Skeleton, model: nn.Module, device: str) -> tuple[LayerRow, ...]:
    dtype = find_input_dtype(model)
    return list_layers(model, torch.zeros(1, skeleton.channels, *skeleton.size, device=device, dtype=dtype))


def _list_for_real(blueprint: Blueprint, skeleton: Skeleton) -> tuple[LayerRow, ...]:
    model = _build(skeleton.name, blueprint)
    try:
        return _list_layers(skeleton, model, "cpu")
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:
        raise does_not_run(skeleton.name, (skeleton.channels, *skeleton.size), error) from error


def does_not_run(name: str, shape: Sequence[int], error: BaseException) -> ModelError:
    """The error for a model that fails on a picture, or a volume, of this shape (C,H,W) or (C,D,H,W)."""
    kind, hint = ("a volume", OF_VOLUMES) if len(shape) > 3 else ("an image", "")
    reason = " ".join(" ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())]).split())
    if isinstance(error, SystemExit):
        reason = f"SystemExit: {reason}"  # a bare number would say nothing
    elif hint:
        reason = reason[:MOST_SAID].rstrip(".")
    elif isinstance(error, (RuntimeError, AssertionError)) and not hasattr(error, "__notes__"):
        reason, hint = reason.rstrip("."), "; give another --size."
    return ModelError(f"{name} does not run with {kind} of {' x '.join(map(str, shape))}: {reason}{hint}")


def _to_skeleton(
    name: str, blueprint: Blueprint, size: tuple[int, ...] | None, build: Callable[[str, Blueprint], nn.Module]
) -> Skeleton:
    model, size = build(name, blueprint), size or blueprint.size
    if len(size) == 2 and takes_volumes(model):
        size = (USUAL_DEPTH, *size)
    return Skeleton(name, model, size, blueprint.channels, blueprint.layer, blueprint.layer_for_positive)


def _build_empty(name: str, blueprint: Blueprint) -> nn.Module:
    # Where that fails, it looks at its own weights while it is built, or cannot be built at all.
    with contextlib.suppress(ModelError), empty_parameters(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are read into nothing
        return _build(name, blueprint).to("meta")
    return _build(name, blueprint).to("meta")


def _build(name: str, blueprint: Blueprint) -> nn.Module:
    """The model, with random weights. Raises `ModelError` where that fails, or gives something else."""
    try:
        with pytorch_defaults():
            model = blueprint.build()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code of somebody's model raises
        reason = " ".join(str(error).split())
        raise ModelError(f"{name}: cannot be built ({type(error).__name__}: {reason})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}: returned {shorten(model)}, expected a torch.nn.Module.")
    return model
