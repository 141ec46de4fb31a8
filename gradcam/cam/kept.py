"""Which layer was found where none was named, kept for the next pictures: to search takes a pass of the model.

It is kept as long as the model is alive, and taken again for pictures of the same form, while nothing of the model has
changed that decides the way through it: its modules, their classes, hooks and settings, the shapes of their parameters.
What has changed elsewhere is seen by the graph of the pass that it is taken for, from the layer to the score."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from gradcam.cam.forward import Recorded
from gradcam.hooks.autograd import graph_of
from gradcam.hooks.nested import Batch
from gradcam.targets.base import Reader, Target
from gradcam.targets.classes import is_function

MOST = 8  # forms of pictures and questions, for each model
DEEPEST, LONGEST = 3, 64  # of settings that hold others: how deep and how many are compared
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
OWN = frozenset(vars(nn.Module()))  # what every module has


class ChangedError(Exception):
    """The way from the layer to the score is another one than it was."""


@dataclass
class Kept:
    """`mark`: of the model and the question, equal where both are as they were. `layer`, `note`: what was found. `tail`:
    the operations from the layer to the score; None until a pass has been looked at."""

    mark: Any
    layer: str
    note: str | None
    tail: list[str] | None = None

    def look(self, recorded: Recorded) -> None:
        """Note the way from the layer to the score. Raises `ChangedError` where it is another one than before."""
        tail = [node.name() for node in graph_of(recorded.scored.values)]
        if self.tail not in (None, tail):
            raise ChangedError
        self.tail = tail


_kept: weakref.WeakKeyDictionary[nn.Module, list[Kept]] = weakref.WeakKeyDictionary()


def describe(model: nn.Module, batch: Batch, target: Any, *asked: Any) -> Any:
    """A mark of the model and of what it is asked; None where that cannot be told, as of targets that are code."""
    if is_function(target) or isinstance(target, (Reader, Target)):
        return None
    how = {name: it for name, it in vars(target).items() if name != "classes"} if is_dataclass(target) else None
    everywhere = [tuple(each) for each in (module._global_forward_hooks, module._global_forward_pre_hooks)]
    seen: dict[int, Any] = {}
    try:
        modules = [_describe_module(each, seen) for each in model.modules()]
        given = _describe((batch.args, batch.kwargs, how), {})
    except Exception:  # whatever the model's own attributes raise
        return None
    return [asked, batch.size, batch.listed, given, everywhere, modules]


def recall(model: nn.Module, mark: Any) -> Kept | None:
    """What is kept under this mark."""
    for each in _kept.get(model, ()) if mark is not None else ():
        if _is_equal(each.mark, mark):
            return each
    return None


def keep(model: nn.Module, kept: Kept) -> None:
    """Keep it in place of the oldest."""
    if kept.mark is not None:
        _kept.setdefault(model, []).append(kept)
        del _kept[model][:-MOST]


def forget(model: nn.Module, kept: Kept) -> None:
    """Do not keep it any more."""
    _kept[model] = [each for each in _kept.get(model, ()) if each is not kept]


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # of settings that cannot be compared
        return False


def _describe_module(each: nn.Module, seen: dict[int, Any]) -> Any:
    hooks = (tuple(each._forward_hooks), tuple(each._forward_pre_hooks))
    shapes = [(name, None if it is None else it.shape) for name, it in each._parameters.items()]
    settings = [(name, _describe(value, seen)) for name, value in vars(each).items() if name not in OWN]
    return _refer(each), type(each), _refer(type(each).forward), tuple(each._modules), hooks, shapes, settings


def _describe(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    """What can be compared later, and holds nothing alive."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, (types.FunctionType, types.MethodType, type, nn.Module)):
        return _refer(value)
    if depth == DEEPEST:
        return type(value)
    if isinstance(value, (tuple, list)):
        return len(value), [_describe(it, seen, depth + 1) for it in value[:LONGEST]]
    if id(value) not in seen:  # configurations, which many modules share
        holds = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        items = list(holds.items())[:LONGEST]
        seen[id(value)] = (
            type(value),
            [(_describe(key, {}, DEEPEST), _describe(it, seen, depth + 1)) for key, it in items],
        )
    return seen[id(value)]


def _refer(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return _refer(value.__func__), _refer(value.__self__)
    try:
        return weakref.ref(value)
    except TypeError:
        return type(value)
