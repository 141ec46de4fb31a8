"""What is remembered about a model, and the guard that forgets all of it when the model changes.

Finding a default layer, or measuring where its cells lie, costs forward passes, so the answers are remembered. They hold
for one state of the model: its modules, settings and hooks, and the identity, memory, version and sampled values of its
tensors. Versions alone are not enough: writes through `.data` or NumPy do not count them up. What the input decides is
not remembered: whoever uses an answer compares it with the graph of its own pass.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gradcam.hooks.nested import list_modules

Answer = TypeVar("Answer")

MAX_ANSWERS = 1024  # per model; the oldest go first
MAX_DEPTH, MAX_ITEMS = 3, 64  # of settings that hold others
MAX_VALUES = 64  # compared per tensor: all values of a smaller one, as many evenly spaced ones of a larger one
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
OWN_ATTRIBUTES = tuple(vars(nn.Module()))  # what every module has
OWN_HOOKS = "gradcam.hooks.hooks"  # the module whose hooks another thread may have put on the model


class Facts:
    """What is remembered about a model in its present state, which is read at the first question."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def remember(self, question: Hashable, find_answer: Callable[[], Answer]) -> Answer:
        """Return the remembered answer, or find it and remember it."""
        if question not in self._answers:
            self.set(question, find_answer())
        answer: Answer = self._answers[question]
        return answer

    def get(self, question: Hashable) -> Any:
        """Return the remembered answer; None if there is none."""
        return self._answers.get(question)

    def set(self, question: Hashable, answer: Any) -> None:
        """Remember an answer in place of an earlier one; None forgets it."""
        self._answers.pop(question, None)
        self._answers.update({} if answer is None else {question: answer})
        while len(self._answers) > MAX_ANSWERS:
            self._answers.pop(next(iter(self._answers)), None)

    @functools.cached_property
    def _answers(self) -> dict[Hashable, Any]:
        try:
            state = ModelState(self._model)
        except Exception:  # whatever attributes, or tensors of other kinds, raise: nothing is remembered then
            return {}
        known, answers = _remembered.get(self._model, (None, {}))
        if known != state:
            known, answers = _remembered[self._model] = state, {}
        return answers


class ModelState:
    """All of a model that decides what it computes, compared by value. It keeps no part of the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[Tensor] = []
        self._objects: dict[int, Any] = {}  # configurations, which many modules share
        self._forwards: dict[type, Any] = {}
        settings: list[Any] = [tuple(torch_module._global_forward_hooks), tuple(torch_module._global_forward_pre_hooks)]
        for module in list_modules(model):
            self._read_module(module, settings)
        self._settings = [*settings, *self._forwards.values()]
        self._memory = [_describe_memory(tensor) for tensor in self._tensors]
        self._values = _sample_values(self._tensors)
        self._tensors, self._objects, self._forwards = [], {}, {}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ModelState)
            and self._memory == other._memory
            and self._settings == other._settings
            and self._values.keys() == other._values.keys()
            and all(torch.equal(values, other._values[kind]) for kind, values in self._values.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def _read_module(self, module: nn.Module, settings: list[Any]) -> None:
        attributes, kind = module.__dict__, type(module)
        names, count = tuple(attributes), len(OWN_ATTRIBUTES)
        settings += (weakref.ref(module), kind, names, tuple(module._modules))
        if kind not in self._forwards:
            self._forwards[kind] = _refer(kind.forward)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                own = [key for key, hook in hooks.items() if getattr(hook, "__module__", "") != OWN_HOOKS]
                settings.append(own)
        for tensors in (module._parameters, module._buffers):
            if tensors:
                settings.append([(name, tensor is None) for name, tensor in tensors.items()])
                self._tensors += [tensor for tensor in tensors.values() if tensor is not None]
        # Modules set their own attributes first: as a rule, the rest are settings.
        is_usual = names[:count] == OWN_ATTRIBUTES
        values = list(attributes.values())[count:] if is_usual else [
            value for name, value in attributes.items() if name not in OWN_ATTRIBUTES
        ]  # fmt: skip
        for value in values:
            value_kind = type(value)
            is_plain = value_kind in PLAIN or (value_kind is tuple and PLAIN.issuperset(map(type, value)))
            settings.append(value if is_plain else self._describe(value))

    def _describe(self, value: Any, depth: int = 0) -> Any:  # noqa: PLR0911  # one for each kind of value
        """Return something that compares equal while the value does, and holds none of it alive."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return Tensor
        if isinstance(value, (types.FunctionType, types.MethodType, type, nn.Module)):
            return _refer(value)
        if kind in (tuple, list, set, frozenset):
            if PLAIN.issuperset(map(type, value)):
                return kind, tuple(value)
            return kind, len(value), [self._describe(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
        if isinstance(value, np.ndarray):
            self._tensors.append(torch.from_numpy(value))
            return id(value)
        if depth == MAX_DEPTH:
            return kind
        if isinstance(value, functools.partial):
            return kind, self._describe((value.func, value.args, value.keywords), depth)
        if id(value) not in self._objects:
            self._objects[id(value)] = None  # for objects that hold themselves
            items = value.items() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).items()
            pairs = [(self._describe(key, MAX_DEPTH), self._describe(item, depth + 1)) for key, item in items]
            self._objects[id(value)] = (kind, pairs[:MAX_ITEMS], len(pairs))
        return self._objects[id(value)]


def _refer(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return _refer(value.__func__), _refer(value.__self__)
    try:
        return weakref.ref(value)
    except TypeError:
        return type(value)


def _describe_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Raise `TypeError` for tensors that do not count their writes or have no memory of their own."""
    if tensor.is_inference() or type(tensor) not in (Tensor, nn.Parameter):
        raise TypeError
    return id(tensor), tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype


@torch.no_grad()
def _sample_values(tensors: list[Tensor]) -> dict[Any, Tensor]:
    """Return some values of all tensors, as bytes so that NaN equals NaN, by device and dtype."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        extent = tensor.numel()
        if not tensor.is_contiguous() and extent:  # by place in memory, so that every layout is read alike
            extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
        values = tensor.as_strided((min(extent, MAX_VALUES),), (max(1, extent // MAX_VALUES),))
        if not tensor.is_meta:
            groups.setdefault((tensor.device, tensor.dtype), []).append(values)
    return {kind: torch.cat(values).view(torch.uint8) for kind, values in groups.items()}


# The answers for the last state of each model.
_remembered: weakref.WeakKeyDictionary[nn.Module, tuple[ModelState, dict[Hashable, Any]]] = weakref.WeakKeyDictionary()
