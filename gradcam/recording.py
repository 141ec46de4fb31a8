"""One forward pass of a model with target layers attached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradcam.axes import Axes, one_image
from gradcam.errors import ImageError, LayerError
from gradcam.failures import BEHIND_A_LAYER, known_failures
from gradcam.grad_mode import recording_off
from gradcam.gradients import may_cast, recording_is_off, require_recording
from gradcam.hooks import Hooks
from gradcam.inputs import Arguments
from gradcam.isolation import plain_attention, undisturbed
from gradcam.layers import layers_with_grid
from gradcam.nested import map_tensors, tensors
from gradcam.patches import find_patches
from gradcam.target_layer import TargetLayer
from gradcam.targets import Scored, compute_scores


@dataclass(frozen=True)
class Batch:
    """The model's arguments, the pictures among them, how many those are, and of which size: (H,W) or (D,H,W)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pictures: Tensor
    images: int
    size: tuple[int, ...]
    device: torch.device

    def copy(self, change: Callable[[Tensor], Tensor] = torch.Tensor.clone, pictures: Tensor | None = None) -> Batch:
        """The arguments for another run, since a model may change its own in place: copies, or what `change` gives.

        `pictures` take the place of the pictures.
        """
        changed = change(self.pictures) if pictures is None else pictures

        def new(tensor: Tensor) -> Tensor:
            return changed if tensor is self.pictures else change(tensor)

        args, kwargs = map_tensors((self.args, self.kwargs), new)
        return replace(self, args=args, kwargs=kwargs, pictures=changed)


def to_arguments(images: Any) -> Arguments:
    """What the caller gave, as arguments: a tuple's are positional, a mapping's have names, anything else is the only one.

    Raises `ImageError` for a mapping from anything but names.
    """
    # A mapping, not only a dict: Hugging Face's processors give one of their own.
    kwargs = dict(images) if isinstance(images, Mapping) else {}
    args = images if isinstance(images, tuple) else () if isinstance(images, Mapping) else (images,)
    if not all(isinstance(key, str) for key in kwargs):
        raise ImageError(f"The images are a mapping from {list(kwargs)}, expected the names of the model's arguments.")
    return args, kwargs


def to_inputs(images: Any) -> Arguments:
    """What the caller gave, pictures or not, as arguments. Raises `ImageError` where there is no tensor in it."""
    args, kwargs = to_arguments(images)
    if not any(True for _ in tensors((args, kwargs))):
        raise ImageError(f"The images are {type(images).__name__}, expected a tensor, or a tuple or dict with tensors.")
    return args, kwargs


def to_batch(images: Any) -> Batch:
    """What the caller gave, as arguments. Raises `ImageError` where there is no floating (N,C,H,W) or (N,C,D,H,W) in it."""
    args, kwargs = to_arguments(images)
    given = list(tensors((args, kwargs)))
    if any(tensor.is_nested for tensor in given):
        raise ImageError("The images are a nested tensor, expected pictures of one size in a batch (N,C,H,W).")
    first = next((tensor for tensor in given if tensor.is_floating_point() and tensor.ndim in (4, 5)), None)
    if first is None:
        what = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in given) or type(images).__name__
        raise ImageError(
            f"The images are {what}, expected a floating tensor (N,C,H,W) or (N,C,D,H,W), alone or in a tuple or dict: "
            "preprocess the pictures, and give a single one its batch dimension with image[None]."
        )
    if 0 in first.shape:
        raise ImageError(f"The images are {tuple(first.shape)}: there is nothing to explain in an empty tensor.")
    return Batch(args, kwargs, first, len(first), tuple(first.shape[2:]), first.device)


@dataclass(frozen=True)
class Recorded:
    """What one forward pass left, and what maps are computed with.

    `layers`, `activations`: by name. `scored`: what is there to be differentiated. `modules`: all of the model's.
    `autocast`: the caller's, None without.
    """

    layers: dict[str, nn.Module]
    activations: dict[str, Tensor]
    output: Any
    scored: Scored
    model: nn.Module
    modules: list[nn.Module]
    batch: Batch
    autocast: torch.dtype | None

    @property
    def has_float16(self) -> bool:
        """Whether gradients may pass through float16 on their way to the layers."""
        if self.autocast == torch.float16:
            return True
        # Parameters are many, and the tail is short: between float32 ends none of them is float16 without a cast.
        modules = self.modules if may_cast(self.scored.values) else []
        return has_float16((self.activations, self.output), modules)


def has_float16(values: Any, modules: Sequence[nn.Module]) -> bool:
    """Whether there is float16 among these values or in the modules' parameters."""
    if any(tensor.dtype == torch.float16 for tensor in tensors(values)):
        return True
    # Module by module: model.parameters() takes several times as long, which a small network's pass would show.
    dtypes = {it.dtype for module in modules for it in module._parameters.values() if it is not None}
    return torch.float16 in dtypes


def caller_autocast(device: str) -> torch.dtype | None:
    """The dtype of the autocast that is on for this type of device, None without."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextlib.contextmanager
def recorded_pass(
    model: nn.Module,
    batch: Batch,
    chosen: dict[str, nn.Module],
    target: Any,
    *,
    differentiable: int = 1,
    around: AbstractContextManager[object] | None = None,
) -> Iterator[Recorded]:
    """One forward pass, recorded behind the chosen layers; the model is held as it is until the context ends.

    `differentiable`: how many times, 0 for activations alone; fused attention is so only once, and is left out for more.
    `around`: a context for the model's run and nothing else.
    """
    with undisturbed(model) as modules, known_failures(BEHIND_A_LAYER), contextlib.ExitStack() as stack:
        _refuse_frames(batch, modules)
        if differentiable > 1:
            stack.enter_context(plain_attention())
        with contextlib.ExitStack() as hooks:
            recorders = {name: hooks.enter_context(TargetLayer(module, name=name)) for name, module in chosen.items()}
            if differentiable == 0:
                hooks.enter_context(_switched_off_again(list(chosen.values())))
            args, kwargs = map_tensors((batch.args, batch.kwargs), caller_keeps)
            with around or contextlib.nullcontext():
                output = model(*args, **kwargs)
            activations = {name: recorder.activations for name, recorder in recorders.items()}
            off = [name for name, recorder in recorders.items() if recorder.ran_unrecorded]
            if differentiable and len(off) > 1:  # the first finds it off; another one, if the model switches it off
                raise recording_is_off(off)
            scored = compute_scores(target, output, batch.images)
            if differentiable:
                require_recording(scored.values, list(chosen))
        # Computed without the caller's autocast, which would make products of maps half as precise.
        device = scored.values.device.type
        autocast = caller_autocast(device)
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield Recorded(chosen, activations, output, scored, model, modules, batch, autocast)


def _refuse_frames(batch: Batch, modules: Sequence[nn.Module]) -> None:
    """Raises `ImageError` where frames come before channels, which would be taken for the depth of a volume."""
    if len(batch.size) != 3:
        return
    first = next((module for module in modules if isinstance(module, _ConvNd)), None)
    if first is not None and first.in_channels == batch.size[0] != batch.pictures.shape[1]:
        raise ImageError(
            f"The images are {tuple(batch.pictures.shape)}, and the model's first convolution takes {first.in_channels} "
            "channels: these are frames (N,T,C,H,W), and volumes (N,C,D,H,W) can be explained."
        )


@contextlib.contextmanager
def _switched_off_again(layers: Sequence[nn.Module]) -> Iterator[None]:
    """No recording behind the layers either, each of which has switched it on by then."""

    def switch_off(*_: object) -> None:
        torch.set_grad_enabled(False)

    with recording_off(), Hooks() as hooks:
        for layer in layers:
            hooks.after_forward(layer, switch_off)
        yield


def caller_keeps(tensor: Tensor) -> Tensor:
    """What the model gets of a tensor of the caller's: outside inference mode, and nothing that is recorded sticks to it."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def find_layers_with_grid(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """The names of the layers that ran once and gave a grid, the last to finish first."""
    names = _find_with_one_image(model, batch, reshape) or _find_with(model, batch, reshape)
    if reshape is None:
        names = _without_text(names, model, batch)
    if not names:
        raise LayerError(
            f"No layer of {type(model).__name__} that runs just once has a spatial grid"
            f"{'' if reshape is None else f' that reshape={reshape!r} fits'}: name the layer to explain."
        )
    return names


def _find_with_one_image(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None) -> list[str]:
    """Looked for with the first image alone, which is enough; none if the model takes only its own batch size."""
    if batch.images == 1:
        return []
    try:
        return _find_with(model, one_image(batch), reshape)
    except Exception:  # whatever a model raises, the pass of the whole batch raises again if it is not the batch's size
        return []


def _without_text(names: list[str], model: nn.Module, batch: Batch) -> list[str]:
    axes = Axes(model, batch, find_patches(model.modules()))
    if not axes.text_lengths:
        return names
    shapes, modules = axes.plain, dict(model.named_modules())
    return [name for name in names if not axes.holds_text(shapes.get(modules[name], ()), modules[name])]


def _find_with(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None) -> list[str]:
    with undisturbed(model) as modules:
        _refuse_frames(batch, modules)
        args, kwargs = map_tensors((batch.args, batch.kwargs), caller_keeps)
        return layers_with_grid(model, args, kwargs, batch.images, batch.size, reshape=reshape)
