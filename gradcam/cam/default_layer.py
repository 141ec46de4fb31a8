"""Choose a default target layer, verify it, cache the choice, and check that the choice fits each later pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradcam.cam.forward import RecordedPass, caller_autocast, recorded_pass
from gradcam.cam.grid import ZERO_CAUSES, find_grid
from gradcam.cam.measure_layout import MisplacedError
from gradcam.cam.suggest import OUTPUT_NOTE, find_suggestion
from gradcam.cam.verify_layout import ORDER_MEASURED, find_placed_layer
from gradcam.errors import BlindLayerError, LayerError, ModelError, warn
from gradcam.hooks.autograd import jacobian
from gradcam.hooks.containers import Batch
from gradcam.hooks.model_facts import ModelFacts
from gradcam.hooks.model_state import SIMPLE_TYPES
from gradcam.layers.find import find_layers
from gradcam.layers.layout import ReshapeSpec
from gradcam.targets.base import BoundTarget, ScoreExtractor, Target
from gradcam.targets.classes import is_function

Result = TypeVar("Result")

BLIND = f"The gradient is exactly zero at every layer that has a grid, so no layer can change the score. {ZERO_CAUSES}"
# The maximum number of layers to try. The search ends when a layer's cells respond where the image changes.
MAX_CANDIDATES = 24


class RouteChangedError(Exception):
    """The data flow from the layer to the score has changed since an earlier pass."""


@dataclass
class DefaultLayer:
    """A layer that was chosen for a target.

    `note` is a warning for the user. `route` is the data flow from the layer to the score, as in `ScoreGraph.route`.
    `is_bypassed` is True if a path from the images to the score leads around the layer. `route` and `is_bypassed` are
    None until a pass has recorded the graph. `is_joined` is True if an operation after the layer may have an unrecorded
    input. Later passes then record a graph that starts at the images, if `is_recorded` is True. `is_misplaced` is True
    if no layer's cells respond where the image changes. Every explanation then warns.
    """

    layer: str
    note: str | None = None
    route: Hashable | None = None
    is_bypassed: bool | None = None
    is_joined: bool = True
    is_recorded: bool = True
    is_misplaced: bool = False

    def check_route(self, recorded: RecordedPass) -> None:
        """Store the data flow of a pass; raise `RouteChangedError` if an earlier pass had a different data flow."""
        tail = recorded.tail
        # If the graph starts at the layers, `tail.is_bypassed` is always False.
        starts_at_images = recorded.image_edge is not None
        if starts_at_images and self.is_bypassed not in (None, tail.is_bypassed):
            raise RouteChangedError
        if self.route is not None and (self.route, self.is_joined) != (tail.route, tail.is_joined):
            raise RouteChangedError
        self.route, self.is_joined = tail.route, tail.is_joined
        self.is_bypassed = tail.is_bypassed if starts_at_images else self.is_bypassed


def make_cache_key(batch: Batch, target: Any, *settings: Any) -> Hashable | None:
    """Return the cache key of a default layer; None if the target runs custom code, or if the inputs have no key."""
    if is_function(target) or isinstance(target, (ScoreExtractor, Target)):
        return None
    target_fields = {**vars(target), "classes": None} if is_dataclass(target) else None
    try:
        return ("default layer", settings, batch.size, batch.listed, _to_key((batch.args, batch.kwargs, target_fields)))
    except TypeError:
        return None


def _to_key(value: Any) -> Hashable:
    """Return a key from tensors' shapes, dtypes and devices, and from simple values; raise `TypeError` for others."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if type(value) in SIMPLE_TYPES:
        return type(value), value
    if isinstance(value, Mapping):
        return tuple((key, _to_key(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_to_key, value))
    raise TypeError


def list_next_candidates(names: list[str], layer: str) -> list[str]:
    """Return the layers to try after `layer`: first the other calls of the same module, then all other layers."""
    module = layer.rpartition("#")[0]
    runs = [name for name in names if module and name.rpartition("#")[0] == module]
    return list(dict.fromkeys(name for name in (*runs, *names) if name != layer))


@dataclass(frozen=True)
class DefaultLayerSearch:
    """A search for the layer at which to explain a target.

    `bound` is the target with the module and the inputs to run. `is_positive` is True if all methods assume
    non-negative activations.
    """

    model: nn.Module
    bound: BoundTarget
    facts: ModelFacts
    reshape: Any  # A tuple, a string or None. A function would fit only one layer's tensor, so the caller rejects it.
    is_positive: bool

    def explain(self, explain_at: Callable[..., Result]) -> Result:
        """Explain at the cached default layer; if no cached layer fits, search for a layer, and cache this layer.

        `explain_at` computes the result from a target and a list of layers. Its keyword arguments are those of
        `explain._explain_at`.
        """

        def try_layer(default: DefaultLayer) -> Result:
            verify = "all" if default.is_misplaced else "strictly" if self.reshape is None else "guesses"
            recording: dict[str, Any] = {"verify": verify}
            if default.is_recorded:
                recording |= {"on_recorded": default.check_route, "from_images": default.is_joined}
            result = explain_at(_copy(self.bound), [default.layer], **recording)
            if default.note is not None:
                warn(default.note)
            return result

        key = None
        if self.bound.model is self.model:
            key = make_cache_key(self.bound.batch, self.bound.target, self.is_positive, self.reshape)
        default = None if key is None else self.facts.get(key)
        if default is not None:
            try:
                return try_layer(default)
            # LayerError is raised, for example, if this pass does not call the cached layer.
            except (RouteChangedError, MisplacedError, LayerError):
                self.facts.set(key, None)
        try:
            default, result = self._search(try_layer)
        except RouteChangedError:  # The search ran a single image, and the data flow of the entire batch differs.
            default, result = self._search(try_layer, whole_batch=True)
        except BlindLayerError:
            with contextlib.suppress(BlindLayerError):  # Errors of other types are more specific, so they are raised.
                explain_at(_copy(self.bound), [self._list_layers(whole_batch=False)[0].layer])
            raise LayerError(BLIND) from None
        if key is not None and default.is_recorded:
            self.facts.set(key, default)
        return result

    def _list_layers(self, *, whole_batch: bool) -> tuple[DefaultLayer, list[str], dict[str, str]]:
        """Return the best layer, all candidates' names in order of preference, and warnings for some candidates."""
        bound = _copy(self.bound)
        settings: Any = {"whole_batch": whole_batch, "facts": self.facts if self.facts.get(ORDER_MEASURED) else None}
        suggestion = find_suggestion(bound.model, bound.batch, bound.target, self.reshape, **settings)
        best = suggestion.behind_activation if self.is_positive else suggestion.layers[0]
        names = [find_name_in_model(self.model, self.bound.model, name) for name in (best, *suggestion.layers)]
        names = list(dict.fromkeys(filter(None, names)))  # An empty name stands for the model itself.
        if not names:
            problem = f"No default layer with a spatial grid was found in {type(self.model).__name__}"
            raise LayerError(f"{problem}. Name the layer to explain.")
        note = suggestion.note if best == suggestion.layers[0] else None
        is_bypassed = None if whole_batch else suggestion.bypassed.get(best)
        # The search has recorded a graph that starts at the images. For a single image, the first explanation need not
        # record it again, so that its operations, and their rounding, are those of all later explanations.
        is_known = is_bypassed is False and bound.batch.images == 1
        default = DefaultLayer(
            names[0], note, is_bypassed=is_bypassed, is_joined=not is_known, is_recorded=suggestion.is_recorded
        )
        return default, names, {name: OUTPUT_NOTE.format(name) for name in suggestion.outputs}

    def _search(
        self, try_layer: Callable[[DefaultLayer], Result], *, whole_batch: bool = False
    ) -> tuple[DefaultLayer, Result]:
        """Find a layer with a gradient whose cells respond where the image changes; return the layer and the result.

        The candidates are tried in order of preference. If no candidate's cells respond where the image changes, use
        the first measured candidate, and warn. Raises `BlindLayerError` if no layer has a gradient.
        """
        was_ordered, batch = self.facts.get(ORDER_MEASURED), self.bound.batch
        default, names, notes = self._list_layers(whole_batch=whole_batch)
        problems: dict[str, str] = {}
        for _ in range(MAX_CANDIDATES):
            try:
                try:
                    return default, try_layer(default)
                except ModelError:  # A layer that runs without gradients has no graph unless it starts at the images.
                    if default.is_joined:
                        raise
                    default.is_joined = True
                    return default, try_layer(default)
            except MisplacedError as error:
                problems[default.layer] = str(error)
                names = list_next_candidates(names, default.layer)
                autocast = caller_autocast(batch.device.type)
                layer = find_placed_layer(self.bound.model, batch, names[:MAX_CANDIDATES], self.facts, autocast)
            # The gradient is zero, for example if the head reads only the class token of the last block.
            except BlindLayerError:
                # If `try_layer` has measured the order of the tokens, search again with this order.
                if self.facts.get(ORDER_MEASURED) and not was_ordered:
                    return self._search(try_layer, whole_batch=whole_batch)
                names = list_next_candidates(names, default.layer)
                bound = _copy(self.bound)
                layer = find_layer_with_gradient(self.model, bound, names, self.facts, self.reshape) if names else None
                if layer is None:
                    raise
            if layer is None:
                break
            names = names[names.index(layer) :]
            default = DefaultLayer(layer, notes.get(layer), is_recorded=default.is_recorded)
        if not problems:
            raise BlindLayerError(BLIND)
        misplaced = next(iter(problems))
        if all("does not depend" in problem for problem in problems.values()):
            raise LayerError(
                f"{problems[misplaced]} No other tested layer changed at the place where the image was changed."
            )
        default = DefaultLayer(misplaced, is_recorded=default.is_recorded, is_misplaced=True)
        return default, try_layer(default)


def find_name_in_model(model: nn.Module, run: nn.Module, name: str) -> str:
    """Return the name in `model` of a layer that is called `name` in `run`.

    `run` is the module that a target runs instead of `model`, such as an image encoder.
    """
    if run is model:
        return name
    module_name, mark, run_number = name.partition("#")
    module = run.get_submodule(module_name)
    full_names = (full_name for full_name, submodule in model.named_modules() if submodule is module)
    return next(full_names, module_name) + mark + run_number


def _copy(bound: BoundTarget) -> BoundTarget:
    """Return the target with copied inputs, because a pass may change its inputs in place."""
    return replace(bound, batch=bound.batch.copy())


def find_layer_with_gradient(
    model: nn.Module, bound: BoundTarget, names: Sequence[str], facts: ModelFacts, reshape: ReshapeSpec = None
) -> str | None:
    """Return the first of these layers with a nonzero gradient on its grid; None if no layer has such a gradient."""
    with recorded_pass(bound.model, bound.batch, find_layers(model, names), bound.target, facts=facts) as recorded:
        with torch.enable_grad():
            total = recorded.scored.values.sum(1, keepdim=True)
        (gradients,) = jacobian(total, list(recorded.activations.values()), scaled=recorded.has_float16)
        gradient_by_name = dict(zip(recorded.activations, gradients))
        for name in names:
            for tensor_name in recorded.names_by_layer[name]:
                gradient = gradient_by_name[tensor_name]
                if gradient is not None:
                    with contextlib.suppress(LayerError):  # Skip tensors without a grid.
                        layout = find_grid(tensor_name, gradient[0], recorded, reshape)
                        if layout.to_grid(gradient[0]).any():
                            return name
    return None
