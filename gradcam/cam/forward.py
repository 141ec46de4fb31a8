"""Run one forward pass of a model, with target layers attached."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradcam.cam.deferred_checks import DeferredChecks
from gradcam.hooks import autograd, pytorch
from gradcam.hooks.containers import Batch, detach_input, list_tensors, version_of
from gradcam.hooks.hooks import Hooks, TargetLayer
from gradcam.hooks.model_facts import ModelFacts
from gradcam.hooks.preserve import plain_attention, preserve_state
from gradcam.layers.find import LayerRef
from gradcam.layers.layout import Layout
from gradcam.layers.model_names import DETECTION_TRANSFORM_MODULE
from gradcam.targets.base import TargetScores
from gradcam.targets.classes import compute_scores

if TYPE_CHECKING:
    from gradcam.layers.frames import Frame
    from gradcam.layers.reshape import IndexLayout


@dataclass(frozen=True)
class RecordedPass:
    """The result of one forward pass, from which maps are computed.

    `activations` are the recorded tensors by name, and `outlets` has the layer and the key of each tensor.
    `names_by_layer` lists, for each layer, the names of the recorded tensors in the layer's output. `scored` has the
    scores to differentiate. `modules` are all modules of the model. `autocast` is the caller's autocast dtype, or None.
    `frame` describes how the model resized and padded the images, or is None. If there is a frame, `batch.size` is the
    size of the padded images. `layouts` are the layouts of the activations on the image, by name; a layout is added at
    its first use. `checks` are pending checks of the recorded values. `facts` are cached facts about the model.
    `certain_layouts` has the names of the layouts that the shape and the module determine without doubt. `image_edge` is
    the graph edge at which the images enter, or None if the graph starts at the layers.
    `images_changed` is True if the model changed its images in place.
    """

    activations: dict[str, Tensor]
    outlets: dict[str, LayerRef]
    names_by_layer: dict[str, list[str]]
    output: Any
    scored: TargetScores
    model: nn.Module
    modules: list[nn.Module]
    batch: Batch
    autocast: torch.dtype | None
    frame: Frame | None = None
    layouts: dict[str, Layout | IndexLayout] = field(default_factory=dict)
    certain_layouts: set[str] = field(default_factory=set)
    checks: DeferredChecks = field(default_factory=DeferredChecks)
    facts: ModelFacts = field(kw_only=True)
    image_edge: autograd.Edge | None = None
    images_changed: bool = False

    @cached_property
    def tail(self) -> autograd.ScoreGraph:
        """Return the graph between the recorded activations and the scores."""
        start_edges = map(autograd.get_start_edge, self.activations.values())
        return autograd.trace_score_graph([autograd.get_edge(self.scored.values)], start_edges, self.image_edge)

    @cached_property
    def has_float16(self) -> bool:
        """Return whether gradients of the activations may be computed in float16."""
        if torch.float16 in (self.autocast, *self.dtypes):
            return True
        # The activations and the output are not float16. If float16 parameters are in use, the graph therefore contains
        # a cast. The copy that passes a recorded tensor on is not a cast.
        starts = set(map(id, self.activations.values()))
        has_start_leaves = all(tensor.is_leaf for tensor in self.activations.values())
        nodes = autograd.list_graph_nodes(self.scored.values) if has_start_leaves else self.tail.nodes
        casts = [node for node in nodes if pytorch.may_cast(node) and not pytorch.copies_leaf(node, starts)]
        return bool(casts) and _has_float16_weights(self.modules)

    @property
    def tolerance(self) -> float:
        """Return the relative tolerance for floating-point operations in a different order."""
        epsilon = self._epsilon
        if epsilon < 1e-5 and self.batch.pictures.is_cuda:
            epsilon = 2.0**-10  # GPUs may compute float32 products in TensorFloat-32, with 10 bits of mantissa.
        return epsilon * (256 if epsilon < 1e-5 else 4)

    @property
    def score_tolerance(self) -> float:
        """Return the relative tolerance between scores of perturbed passes, in which most operations are the same."""
        return self._epsilon * (32 if self._epsilon < 1e-5 else 0.5)

    @property
    def _epsilon(self) -> float:
        dtypes = {self.batch.pictures.dtype, self.autocast or torch.float64, *self.dtypes}
        return max(map(_find_epsilon, dtypes))

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Return the floating-point dtypes of the activations and of the output."""
        tensors = [*self.activations.values(), *list_tensors(self.output)]
        return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


@lru_cache(maxsize=8)
def _find_epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def has_float16(values: Any, modules: Sequence[nn.Module]) -> bool:
    """Return whether any of these values, or any parameter of the modules, is float16."""
    return any(tensor.dtype == torch.float16 for tensor in list_tensors(values)) or _has_float16_weights(modules)


def _has_float16_weights(modules: Sequence[nn.Module]) -> bool:
    # Iterate module by module: `model.parameters()` takes several times as long, which matters for a small network.
    dtypes = {x.dtype for module in modules if module._parameters for x in module._parameters.values() if x is not None}
    return torch.float16 in dtypes


def caller_autocast(device: str) -> torch.dtype | None:
    """Return the autocast dtype that is active for this type of device; None without autocast."""
    return torch.get_autocast_dtype(device) if pytorch.is_autocast_enabled(device) else None


_translated_errors = autograd.TranslatedErrors(autograd.ADVICE_AFTER_LAYER)


def _check_batch(batch: Batch, modules: Sequence[nn.Module]) -> None:
    if len(batch.size) == 3:
        from gradcam.layers.axes import reject_frames_first

        reject_frames_first(batch, modules)
    if batch.images > 1:
        from gradcam.cam.dependence_warnings import warn_of_shared_statistics

        warn_of_shared_statistics(modules)


@contextlib.contextmanager
def recorded_pass(
    model: nn.Module,
    batch: Batch,
    outlets: Sequence[LayerRef],
    target: Any,
    *,
    grad_order: int = 1,
    contexts: Sequence[AbstractContextManager[object]] = (),
    facts: ModelFacts | None = None,
    from_images: bool = False,
) -> Iterator[RecordedPass]:
    """Run one forward pass and record the chosen layers; the model's state is preserved until the context ends.

    `grad_order` is the order of the derivatives; 0 means that only activations are needed. Fused attention supports
    only first derivatives, so higher orders use plain attention. The `contexts` are entered only while the model runs.
    With `from_images`, the graph starts at the images, so that the graph includes paths around the layers. To save
    memory, no tensors are saved for backward before the first of the layers has run.
    """
    attention = plain_attention() if grad_order > 1 else contextlib.nullcontext()
    with preserve_state(model) as modules, _translated_errors, attention:
        _check_batch(batch, modules)
        resizing = getattr(sys.modules.get(DETECTION_TRANSFORM_MODULE), "GeneralizedRCNNTransform", ())
        has_frames = bool(resizing) and any(issubclass(kind, resizing) for kind in set(map(type, modules)))
        with contextlib.ExitStack() as hooks:
            recorders: dict[str, TargetLayer] = {}
            for name, module, keys, run in outlets:
                recorder = TargetLayer(module, name=name, keys=keys, run=run, has_backward_hook=False)
                recorders[name] = hooks.enter_context(recorder)
            inputs, image_edge = batch.copy(detach_input), None
            if from_images:
                layers = {outlet.module for outlet in outlets} if grad_order else set()
                from gradcam.cam.graph_recording import record_from_images

                inputs, image_edge = hooks.enter_context(record_from_images(inputs, layers))
            elif grad_order == 0:
                from gradcam.cam.graph_recording import turn_off_after_layers

                recorders_by_module = {outlet.module: recorders[outlet.name] for outlet in outlets}
                hooks.enter_context(turn_off_after_layers(recorders_by_module))
            version = version_of(batch.pictures)
            frames: list[Frame] = []
            if has_frames:
                from gradcam.layers.frames import watch_frames

                frames = watch_frames(modules, hooks.enter_context(Hooks()))
            output = _run_in(contexts, model, inputs) if contexts else inputs.run(model)
            images_changed = version_of(batch.pictures) != version
            activations, outlet_by_name, names_by_layer = _collect_tensors(outlets, recorders)
            # The first layer to run turns grad mode on. If grad mode is off when a second layer runs, the model has
            # turned grad mode off.
            if grad_order and len(recorders) > 1:
                unrecorded = [name for name, recorder in recorders.items() if recorder.ran_unrecorded]
                if len(unrecorded) > 1:
                    raise autograd.grad_mode_off_error(unrecorded)
            scored = compute_scores(target, output, batch.images)
            if grad_order and not scored.values.requires_grad:
                raise autograd.no_gradient_error(list(recorders))
            for recorder in recorders.values():
                recorder.require_single_path(scored.values)
        try:
            device = scored.values.device.type
            autocast = caller_autocast(device) if pytorch.is_any_autocast_enabled() else None
            pytorch.set_grad_mode(False)  # `preserve_state` restores the caller's mode.
            frame = None
            if frames or batch.windows is not None or batch.listed is not None:
                from gradcam.layers.frames import find_frame

                frame = find_frame(batch, frames)
                batch = batch if frame is None else replace(batch, size=frame.canvas)
            # Maps are computed without autocast, because autocast would compute products in half precision.
            with contextlib.nullcontext() if autocast is None else pytorch.without_autocast(device):
                yield RecordedPass(
                    activations, outlet_by_name, names_by_layer, output, scored, model, modules, batch, autocast, frame,
                    facts=facts or ModelFacts(model), image_edge=image_edge, images_changed=images_changed,
                )  # fmt: skip
        finally:
            for recorder in recorders.values():
                recorder.release()


def _run_in(contexts: Sequence[AbstractContextManager[object]], model: nn.Module, inputs: Batch) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return inputs.run(model)


def _collect_tensors(
    outlets: Sequence[LayerRef], recorders: Mapping[str, TargetLayer]
) -> tuple[dict[str, Tensor], dict[str, LayerRef], dict[str, list[str]]]:
    activations: dict[str, Tensor] = {}
    outlet_by_name: dict[str, LayerRef] = {}
    names_by_layer: dict[str, list[str]] = {}
    for outlet in outlets:
        recorded = recorders[outlet.name].recorded
        for keys, tensor in recorded.items():
            name = outlet.name if len(recorded) == 1 else ":".join((outlet.name, *keys[len(outlet.keys) :]))
            activations[name] = tensor
            is_same = (name, keys) == (outlet.name, outlet.keys)
            outlet_by_name[name] = outlet if is_same else outlet._replace(name=name, keys=keys)
            names_by_layer.setdefault(outlet.name, []).append(name)
    return activations, outlet_by_name, names_by_layer
