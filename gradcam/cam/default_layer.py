"""The remembered default layer: under which question it is remembered, and when a pass shows that it does not hold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor

from gradcam.cam.forward import Recorded
from gradcam.hooks.facts import PLAIN
from gradcam.hooks.nested import Batch
from gradcam.targets.base import Reader, Target
from gradcam.targets.classes import is_function

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
