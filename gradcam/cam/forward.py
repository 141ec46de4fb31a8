"""One forward pass of a model with target layers attached."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from gradcam.cam.readings import Readings
from gradcam.errors import ImageError, LayerError, ModelError, warn
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import (
    BEHIND_A_LAYER,
    Edge,
    Tail,
    edge_of,
    known_failures,
    no_gradient,
    read_tail,
    recording_is_off,
    start_of,
)
from gradcam.hooks.facts import Facts
from gradcam.hooks.hooks import Hooks, TargetLayer, recording_off
from gradcam.hooks.nested import IN_FLOATS, Batch, caller_keeps, floating_by_keys, is_in_8_bits, tensors, version_of
from gradcam.hooks.preserve import plain_attention, preserve_state
from gradcam.layers.find import Outlet, find_layer, layers_with_grid
from gradcam.layers.frames import TRANSFORM, Frame, find_frame, watch_frames
from gradcam.layers.layout import Axes, IndexLayout, Layout, find_patches, one_image
from gradcam.targets.base import Scored
from gradcam.targets.classes import compute_scores

DEPENDENT = (
    "The images of this batch depend on one another in the model (for example, by batch norm without running statistics): "
    "each heatmap depends on the other images. To avoid this, explain the images one by one."
)


def warn_of_shared_statistics(modules: Iterable[nn.Module], images: int) -> None:
    """Warn where a batch norm has no running statistics, and so takes those of all images together."""
    if images > 1 and _share_statistics(modules):
        warn(DEPENDENT)


def _share_statistics(modules: Iterable[nn.Module]) -> bool:
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in modules)


def warn_of_dependence(modules: Iterable[nn.Module]) -> None:
    """Warn that images depend on one another, unless shared statistics were warned of already."""
    if not _share_statistics(modules):
        warn(DEPENDENT)


@dataclass(frozen=True)
class Recorded:
    """What one forward pass left, and what maps are computed with. `activations`, `outlets`: what was recorded, by
    name, and of what. `parts`: by layer, the names of those that it gave, of which there are several where its output
    holds several tensors. `scored`: what is there to be differentiated. `modules`: all of the model's. `autocast`: the
    caller's, None without. `frame`: what the model made of the pictures' sizes, if anything; the size of `batch` then is
    that of the canvas, on which layers lie. `layouts`: how the activations lie on the picture, by name, of those where it
    was asked for. `readings`: what of all this is still to be checked. `facts`: what is remembered about the model.
    `image_edge`: where in the graph the images come from, if they were recorded. `images_changed`: by the model."""

    activations: dict[str, Tensor]
    outlets: dict[str, Outlet]
    parts: dict[str, list[str]]
    output: Any
    scored: Scored
    model: nn.Module
    modules: list[nn.Module]
    batch: Batch
    autocast: torch.dtype | None
    frame: Frame | None = None
    layouts: dict[str, Layout | IndexLayout] = field(default_factory=dict)
    readings: Readings = field(default_factory=Readings)
    facts: Facts = field(kw_only=True)
    image_edge: Edge | None = None
    images_changed: bool = False

    @cached_property
    def tail(self) -> Tail:
        """The graph between the recorded activations and the scores."""
        return read_tail([edge_of(self.scored.values)], map(start_of, self.activations.values()), self.image_edge)

    @cached_property
    def has_float16(self) -> bool:
        """Whether gradients may pass through float16 on their way to the layers."""
        if torch.float16 in (self.autocast, *self._kinds):
            return True
        # Between float32 ends none of the parameters is float16 without a cast.
        return _has_float16_weights(self.modules) and pytorch.may_cast(self.tail.nodes)

    @property
    def slack(self) -> float:
        """How far, by the largest value, what a model computes may be from the same in another order of operations."""
        epsilon = self._epsilon
        if self.batch.device.type == "cuda" and epsilon < 1e-5:
            epsilon = 2.0**-10  # TF32
        return epsilon * (256 if epsilon < 1e-5 else 4)

    @property
    def score_slack(self) -> float:
        """How far scores of variants may be from one another for rounding: less, since most of it is the same in all."""
        return self._epsilon * (32 if self._epsilon < 1e-5 else 0.5)

    @property
    def _epsilon(self) -> float:
        kinds = {self.batch.pictures.dtype, self.autocast or torch.float64, *self._kinds}
        return max(torch.finfo(kind).eps for kind in kinds)

    @cached_property
    def _kinds(self) -> set[torch.dtype]:
        return {it.dtype for it in tensors((self.activations, self.output)) if it.is_floating_point()}


def has_float16(values: Any, modules: Sequence[nn.Module]) -> bool:
    """Whether there is float16 among these values or in the modules' parameters."""
    return any(tensor.dtype == torch.float16 for tensor in tensors(values)) or _has_float16_weights(modules)


def _has_float16_weights(modules: Sequence[nn.Module]) -> bool:
    # Module by module: model.parameters() takes several times as long, which a small network's pass would show.
    parameters = (it for module in modules for it in module._parameters.values() if it is not None)
    return any(tensor.dtype == torch.float16 for tensor in parameters)


def caller_autocast(device: str) -> torch.dtype | None:
    """Return the dtype of the autocast that is on for this type of device; None without."""
    return torch.get_autocast_dtype(device) if pytorch.is_autocast_enabled(device) else None


@contextlib.contextmanager
def recorded_pass(
    model: nn.Module,
    batch: Batch,
    chosen: Sequence[Outlet],
    target: Any,
    *,
    differentiable: int = 1,
    around: Sequence[AbstractContextManager[object]] = (),
    facts: Facts | None = None,
    from_images: bool = False,
) -> Iterator[Recorded]:
    """One forward pass, recorded behind the chosen layers; the model is held as it is until the context ends.
    `differentiable`: how many times, 0 for activations alone; fused attention is so only once, and is left out for
    more. `around`: contexts for the model's run and nothing else. `from_images`: the graph is recorded from the images
    on, which shows what passes the layers by; before the layers nothing is saved for it."""
    with preserve_state(model) as modules, known_failures(BEHIND_A_LAYER), contextlib.ExitStack() as stack:
        _refuse_frames(batch, modules)
        warn_of_shared_statistics(modules, batch.images)
        if differentiable > 1:
            stack.enter_context(plain_attention())
        resizing = getattr(sys.modules.get(TRANSFORM), "GeneralizedRCNNTransform", ())
        has_frames = any(isinstance(module, resizing) for module in modules)
        with contextlib.ExitStack() as hooks:
            recorders = {
                it.name: hooks.enter_context(
                    TargetLayer(it.module, name=it.name, keys=it.keys, run=it.run, has_backward_hook=False)
                )
                for it in chosen
            }
            own, image_edge = batch.copy(caller_keeps), None
            if from_images:
                until = {it.module for it in chosen} if differentiable else set()
                own, image_edge = hooks.enter_context(_recorded_from_images(own, until))
            elif differentiable == 0:
                hooks.enter_context(_switched_off_again({it.module: recorders[it.name] for it in chosen}))
            version = version_of(batch.pictures)
            frames = watch_frames(modules, hooks.enter_context(Hooks())) if has_frames else []
            with contextlib.ExitStack() as watching:
                for each in around:
                    watching.enter_context(each)
                output = own.run(model)
                images_changed = version_of(batch.pictures) != version
            activations, outlets, parts = _divide(chosen, recorders)
            if (
                differentiable and len(recorders) > 1
            ):  # the first finds it off; another one, if the model switches it off
                off = [name for name, recorder in recorders.items() if recorder.ran_unrecorded]
                if len(off) > 1:
                    raise recording_is_off(off)
            scored = compute_scores(target, output, batch.images)
            if differentiable and not scored.values.requires_grad:
                raise no_gradient(list(recorders))
            for recorder in recorders.values():
                recorder.require_single_path(scored.values)
        for recorder in recorders.values():
            stack.callback(recorder.release)
        device = scored.values.device.type
        autocast = caller_autocast(device)  # without which maps are computed: it would make products half as precise
        with torch.no_grad(), pytorch.without_autocast(device):
            is_whole = not frames and batch.windows is None and batch.listed is None
            frame = None if is_whole else find_frame(batch, frames)
            batch = batch if frame is None else replace(batch, size=frame.canvas)
            yield Recorded(
                activations, outlets, parts, output, scored, model, modules, batch, autocast, frame,
                facts=facts or Facts(model), image_edge=image_edge, images_changed=images_changed,
            )  # fmt: skip


def _divide(
    chosen: Sequence[Outlet], recorders: Mapping[str, TargetLayer]
) -> tuple[dict[str, Tensor], dict[str, Outlet], dict[str, list[str]]]:
    activations: dict[str, Tensor] = {}
    outlets: dict[str, Outlet] = {}
    parts: dict[str, list[str]] = {}
    for outlet in chosen:
        recorded = recorders[outlet.name].recorded
        for keys, tensor in recorded.items():
            name = outlet.name if len(recorded) == 1 else ":".join((outlet.name, *keys[len(outlet.keys) :]))
            activations[name], outlets[name] = tensor, outlet._replace(name=name, keys=keys)
            parts.setdefault(outlet.name, []).append(name)
    return activations, outlets, parts


def _refuse_frames(batch: Batch, modules: Sequence[nn.Module]) -> None:
    """Raises `ImageError` where frames come before channels, which would be taken for the depth of a volume."""
    convolutions = [module for module in modules if isinstance(module, _ConvNd)] if len(batch.size) == 3 else []
    channels = batch.pictures.shape[1]
    takes_them = any(isinstance(it, nn.Conv3d) and it.in_channels == channels for it in convolutions)
    if convolutions and convolutions[0].in_channels == batch.size[0] != channels and not takes_them:
        if {"input_ids", "pixel_attention_mask"} & batch.kwargs.keys():
            raise ImageError(
                f"pixel_values are {tuple(batch.pictures.shape)}: several images or tiles per sample. "
                "Turn off splitting in the processor (do_image_splitting=False), pass pixel_values[:, 0], and wrap the "
                "model in a module whose forward passes pixel_values[:, None] to the model."
            )
        raise ImageError(
            f"The images are {tuple(batch.pictures.shape)}, with frames before channels: pass frames.transpose(1, 2), and "
            "wrap the model in a module whose forward(clips) returns model(clips.transpose(1, 2))."
        )


@contextlib.contextmanager
def _recorded_from_images(batch: Batch, until: Collection[nn.Module]) -> Iterator[tuple[Batch, Edge | None]]:
    """Record from the images on; give the batch to run, and where its images come from.

    Values are saved for the graph once one of the modules `until` has run. Without any, only the graph itself is kept.
    """
    saves = False

    def pack(tensor: Tensor) -> tuple[Tensor, int] | None:
        if saves and tensor.is_inference():
            raise RuntimeError("Inference tensors cannot be saved for backward.")  # as PyTorch says without hooks
        return (tensor, version_of(tensor)) if saves else None

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if version_of(tensor) != version:  # which PyTorch itself finds only where there are no hooks
            raise RuntimeError("a saved tensor has been modified by an inplace operation")
        return tensor

    def begin_to_save(*_: object) -> None:
        nonlocal saves
        saves = True

    with Hooks() as hooks, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for module in until:
            hooks.after_forward(module, begin_to_save)
        torch.set_grad_enabled(True)  # until the target layers' contexts end
        images = batch.pictures.requires_grad_().clone()  # which the model may change in place
        yield batch.copy(lambda tensor: tensor, pictures=images), edge_of(images)


@contextlib.contextmanager
def _switched_off_again(recorders: Mapping[nn.Module, TargetLayer]) -> Iterator[None]:
    """No recording behind the layers either, each of which has switched it on by then. But behind one that gave several
    tensors, of which the graph tells those that the score depends on."""

    def switch_off(module: nn.Module, *_: object) -> None:
        if not recorders[module].has_several_outputs:
            torch.set_grad_enabled(False)

    with recording_off(), Hooks() as hooks:
        for layer in recorders:
            hooks.after_forward(layer, switch_off)
        yield


def find_layers_with_grid(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """The names of the layers that ran once and gave a grid, the last to finish first."""
    names: list[str] = []
    if batch.images > 1:
        # Whatever a model raises, the pass of the whole batch raises again if it is not the batch's size.
        with contextlib.suppress(Exception):
            names = look_for_layers(model, one_image(batch), reshape)
    names = names or look_for_layers(model, batch, reshape)
    if not names:
        if is_in_8_bits(model):
            raise ModelError(f"{type(model).__name__} computes with {IN_FLOATS}")
        is_graph = isinstance(model, torch.fx.GraphModule)
        of_exported = " For an exported program, explain torch.export.unflatten(program)." if is_graph else ""
        raise LayerError(
            f"No default layer with a spatial grid{'' if reshape is None else f' that fits reshape={reshape!r}'} was found "
            f"in {type(model).__name__}. Name the layer to explain, with reshape= if its output is not (N,C,h,w)."
            f"{of_exported}"
        )
    return names


def look_for_layers(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """As `find_layers_with_grid`, from one pass of this batch, and another of other texts; none where there is none."""
    with preserve_state(model) as modules:
        _refuse_frames(batch, modules)
        names = layers_with_grid(model, batch.copy(caller_keeps), reshape)
    axes = Axes(model, batch, find_patches(model.modules()))
    if reshape is not None or not axes.text_lengths:
        return names
    shapes, layers = axes.plain, {name: find_layer(model, name).module for name in names}
    return [name for name in names if not axes.holds_text(shapes.get(layers[name], [()])[0], layers[name])]


def record_outlets(model: nn.Module, batch: Batch, outlets: Sequence[Outlet]) -> dict[str, Tensor]:
    """Return what these layers give for a batch, by name; of several tensors the first floating one."""
    outputs: dict[str, Tensor] = {}
    runs: Counter[nn.Module] = Counter()

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for outlet in outlets:
            if outlet.module is module and outlet.run in (None, runs[module]):
                given = floating_by_keys(output)
                keys = next((keys for keys in given if keys[: len(outlet.keys)] == outlet.keys), None)
                if keys is not None:
                    outputs[outlet.name] = given[keys].clone()  # which the next layer may change in place
        runs[module] += 1

    with preserve_state(model), recording_off(), Hooks() as hooks:
        for module in {outlet.module for outlet in outlets}:
            hooks.after_forward(module, keep)
        batch.copy(caller_keeps).run(model)
    return outputs
