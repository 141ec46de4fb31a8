"""The layer that is explained where none is named: chosen, verified, remembered, and compared with each later pass."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradcam.cam.forward import Recorded, caller_autocast, recorded_pass
from gradcam.cam.grid import ORDERED, find_grid, find_placed_layer
from gradcam.cam.places import MisplacedError
from gradcam.cam.suggest import OUTPUT, find_suggestion
from gradcam.errors import BlindLayerError, LayerError, warn
from gradcam.hooks.autograd import jacobian
from gradcam.hooks.facts import PLAIN, Facts
from gradcam.hooks.nested import Batch
from gradcam.layers.find import find_layers
from gradcam.layers.layout import Reshape
from gradcam.targets.base import Bound, Reader, Target
from gradcam.targets.classes import is_function

Result = TypeVar("Result")

BLIND = (
    "The gradient is exactly zero at every layer that has a grid, so no layer can change the score. Possible causes: a "
    "head with zero weights, or a probability of exactly 0 or 1. Choose another score or class."
)
MAX_CANDIDATES = 24  # layers of which it is measured whether they respond in place, after the first did not


class OtherRouteError(Exception):
    """The images of this pass take another route to the score than those that the layer was chosen for."""


@dataclass
class DefaultLayer:
    """A layer that was chosen for a question. `note`: what to say of it. `route`, `is_bypassed`: what leads from it to
    the score, and whether the images reach the score past it; None until a pass has shown that. `is_joined`: what is not
    recorded may join after the layer, so that a pass is recorded from the images on. `is_recorded`: it can be.
    `is_misplaced`: no layout fits, nor any other layer, which is said each time."""

    layer: str
    note: str | None = None
    route: Hashable | None = None
    is_bypassed: bool | None = None
    is_joined: bool = True
    is_recorded: bool = True
    is_misplaced: bool = False

    def compare(self, recorded: Recorded) -> None:
        """Note the route of a pass. Raises `OtherRouteError` where it is another one than before."""
        tail = recorded.tail
        is_seen = recorded.image_edge is not None  # else nothing may join that is not recorded
        if is_seen and self.is_bypassed not in (None, tail.is_bypassed):
            raise OtherRouteError
        if self.route is not None and (self.route, self.is_joined) != (tail.route, tail.is_joined):
            raise OtherRouteError
        self.route, self.is_joined = tail.route, tail.is_joined
        self.is_bypassed = tail.is_bypassed if is_seen else self.is_bypassed


def name_question(batch: Batch, target: Any, *settings: Any) -> Hashable | None:
    """Return what a default layer depends on beside the model; None if the target is code, or the inputs have no key."""
    if is_function(target) or isinstance(target, (Reader, Target)):
        return None
    how = {name: value for name, value in vars(target).items() if name != "classes"} if is_dataclass(target) else None
    try:
        return ("default layer", settings, batch.size, batch.listed, _to_key((batch.args, batch.kwargs, how)))
    except TypeError:
        return None


def _to_key(value: Any) -> Hashable:
    """Return a key that is equal for inputs of the same form. Raises `TypeError` for objects of unknown kinds."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, Mapping):
        return tuple((key, _to_key(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_to_key, value))
    raise TypeError


def list_others(names: list[str], layer: str) -> list[str]:
    """Return the layers to try after one, other runs of the same module first."""
    module = layer.rpartition("#")[0]
    same = [name for name in names if module and name.rpartition("#")[0] == module]
    return list(dict.fromkeys(name for name in (*same, *names) if name != layer))


@dataclass(frozen=True)
class DefaultLayerSearch:
    """A search for the layer to explain a bound target at. `is_positive`: all methods want values that are not negative."""

    model: nn.Module
    bound: Bound
    facts: Facts
    reshape: Any  # no function, which takes the tensor of one layer
    is_positive: bool

    def explain(self, explain_at: Callable[[Bound, str, dict[str, Any]], Result]) -> Result:
        """Explain at the remembered layer, or at the one that is found. `explain_at` takes how its pass is recorded."""

        def try_layer(default: DefaultLayer) -> Result:
            verify = "all" if default.is_misplaced else "strictly" if self.reshape is None else "guesses"
            how: dict[str, Any] = {"verify": verify}
            if default.is_recorded:
                how |= {"look": default.compare, "from_images": default.is_joined}
            explained = explain_at(_copy(self.bound), default.layer, how)
            if default.note is not None:
                warn(default.note)
            return explained

        question = None
        if self.bound.model is self.model:
            question = name_question(self.bound.batch, self.bound.target, self.is_positive, self.reshape)
        default = None if question is None else self.facts.get(question)
        if default is not None:
            try:
                return try_layer(default)
            except (OtherRouteError, MisplacedError, LayerError):  # or it does not run any more, say
                self.facts.set(question, None)
        try:
            default, explained = self._search(try_layer)
        except OtherRouteError:  # the image that was looked at takes another route than the whole batch
            default, explained = self._search(try_layer, whole_batch=True)
        except BlindLayerError:
            with contextlib.suppress(BlindLayerError):  # PyTorch may say more where less is recorded
                explain_at(_copy(self.bound), self._list_layers(whole_batch=False)[0].layer, {})
            raise LayerError(BLIND) from None
        if question is not None and default.is_recorded:
            self.facts.set(question, default)
        return explained

    def _list_layers(self, *, whole_batch: bool) -> tuple[DefaultLayer, list[str], dict[str, str]]:
        """Return the best layer, all in their order, by their names in the model, and what to say of some of them."""
        copied = _copy(self.bound)
        facts = self.facts if self.facts.get(ORDERED) else None
        suggestion = find_suggestion(
            copied.model, copied.batch, copied.target, self.reshape, whole_batch=whole_batch, facts=facts
        )
        best = suggestion.behind_activation if self.is_positive else suggestion.layers[0]
        names = [name_in_model(self.model, self.bound.model, name) for name in (best, *suggestion.layers)]
        names = list(dict.fromkeys(filter(None, names)))  # the model itself has no name
        if not names:
            raise LayerError(
                f"No default layer with a spatial grid was found in {type(self.model).__name__}. Name the layer to explain."
            )
        note = suggestion.note if best == suggestion.layers[0] else None
        is_bypassed = None if whole_batch else suggestion.bypassed.get(best)
        default = DefaultLayer(names[0], note, is_bypassed=is_bypassed, is_recorded=suggestion.is_recorded)
        return default, names, {name: OUTPUT.format(name) for name in suggestion.outputs}

    def _search(
        self, try_layer: Callable[[DefaultLayer], Result], *, whole_batch: bool = False
    ) -> tuple[DefaultLayer, Result]:
        """Choose the first layer on all of the images' way to the score that responds in place and has a gradient.

        Raises `BlindLayerError` if none has a gradient.
        """
        was_ordered, batch = self.facts.get(ORDERED), self.bound.batch
        default, names, notes = self._list_layers(whole_batch=whole_batch)
        problems: dict[str, str] = {}
        for _ in range(MAX_CANDIDATES):
            try:
                return default, try_layer(default)
            except MisplacedError as error:
                problems[default.layer] = str(error)
                names = list_others(names, default.layer)
                autocast, tried = caller_autocast(batch.device.type), names[:MAX_CANDIDATES]
                layer = find_placed_layer(self.bound.model, batch, tried, self.facts, autocast) if tried else None
            except BlindLayerError:  # a dead end, such as the last block of a network that reads its class token only
                if self.facts.get(ORDERED) and not was_ordered:  # now it is known which tokens the score reads
                    return self._search(try_layer, whole_batch=whole_batch)
                names = list_others(names, default.layer)
                bound = _copy(self.bound)
                layer = find_last_with_gradient(self.model, bound, names, self.facts, self.reshape) if names else None
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
            raise LayerError(f"{problems[misplaced]} No other layer that was tested responds in the right place.")
        default = DefaultLayer(misplaced, is_recorded=default.is_recorded, is_misplaced=True)
        return default, try_layer(default)


def name_in_model(model: nn.Module, run: nn.Module, name: str) -> str:
    """Return a layer's name in the model, of what is run in its place."""
    if run is model:
        return name
    plain, run_number = re.fullmatch(r"(.*?)(#\d+)?", name, re.DOTALL).groups("")  # type: ignore[union-attr]  # it always fits
    module = run.get_submodule(plain)
    return next((own for own, part in model.named_modules() if part is module), plain) + run_number


def _copy(bound: Bound) -> Bound:
    """Copy the inputs for one of several passes: a model may change them in place."""
    return replace(bound, batch=bound.batch.copy())


def find_last_with_gradient(
    model: nn.Module, bound: Bound, names: Sequence[str], facts: Facts, reshape: Reshape = None
) -> str | None:
    """Return the first of these layers whose cells have a gradient; None if there is none."""
    with recorded_pass(bound.model, bound.batch, find_layers(model, names), bound.target, facts=facts) as recorded:
        with torch.enable_grad():
            total = recorded.scored.values.sum(1, keepdim=True)
        (gradients,) = jacobian(total, list(recorded.activations.values()), scaled=recorded.has_float16)
        by_part = dict(zip(recorded.activations, gradients))
        for name in names:
            for part in recorded.parts[name]:
                gradient = by_part[part]
                if gradient is not None:
                    with contextlib.suppress(LayerError):  # of several tensors of a layer not all have a grid
                        layout = find_grid(part, gradient[0], recorded, reshape)
                        if layout.to_grid(gradient[0]).any():
                            return name
    return None
