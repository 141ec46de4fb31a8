"""What is remembered about a model, and the guard that forgets all of it when the model changes.

Finding a default layer, or measuring where its cells lie, costs forward passes, so the answers are remembered. They hold
for one state of the model: its modules, settings and hooks, and the identity, memory, version and sampled values of its
tensors. Versions alone are not enough: writes through `.data` or NumPy do not count them up. What the input decides is
not remembered: whoever uses an answer compares it with the graph of its own pass.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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


@dataclass
class Facts:
    """What is remembered about a model in its present state, which is read at the first question."""

    model: nn.Module
    is_new: bool = False  # nothing was remembered of this state

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

    def read(self) -> None:
        """Read the state of the model now, before a pass changes it."""
        _ = self._answers

    def take_over(self) -> None:
        """Remember the answers for what the explanation itself made of the model: a counter, an output that it stores."""
        state, answers = _remembered.get(self.model, (None, {}))
        if state is None or answers is not self._answers or not (self.is_new or self.model in changing_models):
            return
        with contextlib.suppress(Exception):  # whatever attributes, or tensors of other kinds, raise
            if not state.holds(self.model):
                changing_models.add(self.model)
                _remembered[self.model] = ModelState(self.model), answers

    @functools.cached_property
    def _answers(self) -> dict[Hashable, Any]:
        state, answers = _remembered.get(self.model, (None, {}))
        with contextlib.suppress(Exception):
            if state is not None and state.holds(self.model):
                return answers
        _remembered.pop(self.model, None)
        answers, self.is_new = {}, True
        with contextlib.suppress(Exception):
            _remembered[self.model] = ModelState(self.model), answers
        return answers


class ModuleState(NamedTuple):
    """One module: itself, its class, the number of its attributes, its settings, and hooks that are not of this package."""

    module: weakref.ref[nn.Module]
    kind: Any
    size: int
    values: tuple[Any, ...] | None  # the settings, if all of them are plain
    described: list[Any] | None
    hooks: list[int]


class ModelState:
    """All of a model that decides what it computes, to be compared later. It keeps no part of the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[Tensor | None] = []
        self._objects: dict[int, Any] = {}  # configurations, which many modules share
        self._hooks = _list_global_hooks()
        self._modules = [self._read_module(module) for module in list_modules(model)]
        self._forwards = {state.kind: _refer(state.kind.forward) for state in self._modules}
        self._memory = [_describe_memory(tensor) for tensor in self._tensors]
        self._samples = [_choose_sample(tensor) for tensor in self._tensors]
        self._values = self._sample_values()
        self._forget()

    def holds(self, model: nn.Module) -> bool:
        """Return whether the model is still in this state."""
        modules = list_modules(model)
        try:
            return (
                len(modules) == len(self._modules)
                and all(map(self._is_same, modules, self._modules))
                and self._hooks == _list_global_hooks()
                and all(_refer(kind.forward) == forward for kind, forward in self._forwards.items())
                and [_describe_memory(tensor) for tensor in self._tensors] == self._memory
                and all(torch.equal(values, self._values[kind]) for kind, values in self._sample_values().items())
            )
        finally:
            self._forget()

    def _forget(self) -> None:
        self._tensors, self._objects = [], {}

    def _is_same(self, module: nn.Module, state: ModuleState) -> bool:
        attributes = module.__dict__
        if state.module() is not module or type(module) is not state.kind or len(attributes) != state.size:
            return False
        self._tensors += module._parameters.values()
        self._tensors += module._buffers.values()
        if (module._forward_hooks or module._forward_pre_hooks or state.hooks) and _list_hooks(module) != state.hooks:
            return False
        values = _list_settings(attributes)
        return values == state.values if state.values is not None else self._describe_all(values) == state.described

    def _read_module(self, module: nn.Module) -> ModuleState:
        self._tensors += module._parameters.values()
        self._tensors += module._buffers.values()
        values = _list_settings(module.__dict__)
        is_plain = all(_is_plain(value) for value in values)
        described = None if is_plain else self._describe_all(values)
        count, hooks = len(module.__dict__), _list_hooks(module)
        return ModuleState(weakref.ref(module), type(module), count, values if is_plain else None, described, hooks)

    def _describe_all(self, values: tuple[Any, ...]) -> list[Any]:
        return [self._describe(value) for value in values]

    @torch.no_grad()
    def _sample_values(self) -> dict[Any, Tensor]:
        """Return some values of all tensors, as bytes so that NaN equals NaN, by device and dtype."""
        groups: dict[Any, list[Tensor]] = {}
        for tensor, sample in zip(self._tensors, self._samples):
            if tensor is not None and sample is not None:
                groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.as_strided(*sample))
        return {kind: torch.cat(values).view(torch.uint8) for kind, values in groups.items()}

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


def _describe_memory(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Raise `TypeError` for tensors that do not count their writes or have no memory of their own."""
    if tensor is None:
        return None
    if tensor.is_inference() or type(tensor) not in (Tensor, nn.Parameter):
        raise TypeError
    return id(tensor), tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype


def _choose_sample(tensor: Tensor | None) -> tuple[tuple[int], tuple[int]] | None:
    """Return the size and the stride of the values to compare, by place in memory, so that every layout is read alike."""
    if tensor is None or tensor.is_meta or not tensor.numel():
        return None
    extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    return (min(extent, MAX_VALUES),), (max(1, extent // MAX_VALUES),)


def _list_global_hooks() -> list[tuple[int, ...]]:
    return [tuple(torch_module._global_forward_hooks), tuple(torch_module._global_forward_pre_hooks)]


def _list_hooks(module: nn.Module) -> list[int]:
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return [key for key, hook in hooks if getattr(hook, "__module__", "") != OWN_HOOKS]


def _list_settings(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of all attributes but those that every module has, which come first as a rule."""
    if tuple(attributes)[: len(OWN_ATTRIBUTES)] == OWN_ATTRIBUTES:
        return tuple(attributes.values())[len(OWN_ATTRIBUTES) :]
    return tuple(value for name, value in attributes.items() if name not in OWN_ATTRIBUTES)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))


# The answers for the last state of each model.
_remembered: weakref.WeakKeyDictionary[nn.Module, tuple[ModelState, dict[Hashable, Any]]] = weakref.WeakKeyDictionary()
# Models that each pass changes: their state is read before it.
changing_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
