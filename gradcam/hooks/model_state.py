"""Record the state of a model, to detect changes that make cached facts invalid."""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gradcam.hooks.containers import list_modules

MAX_DEPTH, MAX_ITEMS = 3, 64  # Limits for the depth and the length of nested settings.
MAX_VALUES = 64  # The number of values compared per tensor. In a larger tensor, these values are evenly spaced.
INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # By item size in bytes.
SIMPLE_TYPES = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
MODULE_ATTRIBUTES = tuple(vars(nn.Module()))  # The attributes of every module.
# Hooks registered by this package are ignored, because they may belong to an explanation in another thread.
HOOKS_MODULE = "gradcam.hooks.hooks"


# The state of one module: (weak reference to the module, class, number of attributes, function that reads the settings
# from the attributes, settings, is_plain, hooks). If is_plain is True, settings are compared directly. Hooks of this
# package are left out.
ModuleState = tuple[Any, ...]


class ModelState:
    """A record of everything in a model that affects its computations, for a later comparison.

    The record keeps no part of the model alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[Tensor | None] = []
        self._objects: dict[int, int] = {}  # Maps the id of each described object to a number.
        self._hooks = list_global_hooks()
        modules = list_modules(model)
        self._modules = [self._read_module(module) for module in modules]
        kinds: set[Any] = set(map(type, modules))
        self._forwards = {kind: _refer(kind.forward) for kind in kinds}
        tensors = self._take_tensors()
        if any(tensor.is_inference() or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
            raise TypeError  # Some such tensors do not count writes, and some have no memory.
        # While the storages are referenced, no other thread can free the memory that is read below.
        _storages = [tensor.untyped_storage() for tensor in tensors]
        self._memory = _describe_memory(tensors)
        self._samples = Samples(tensors)
        self._values = self._samples.read(tensors)

    def holds(self, model: nn.Module) -> bool:
        """Return whether the model is still in this state."""
        modules = list_modules(model)
        self._take_tensors()  # An interrupted call may have left tensors behind. Drop these tensors.
        is_same = len(modules) == len(self._modules) and all(map(self._is_same, modules, self._modules))
        tensors = self._take_tensors()
        # While the storages are referenced, no other thread can free the memory that is read below.
        _storages = [tensor.untyped_storage() for tensor in tensors]
        return (
            is_same
            and self._hooks == list_global_hooks()
            and all(_refer(kind.forward) == forward for kind, forward in self._forwards.items())
            and _describe_memory(tensors) == self._memory
            and self._samples.read(tensors) == self._values
        )

    def _take_tensors(self) -> list[Tensor]:
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        self._tensors, self._objects = [], {}
        return tensors

    def _is_same(self, module: nn.Module, state: ModuleState) -> bool:
        reference, kind, size, get_settings, expected, is_plain, hooks = state
        attributes = module.__dict__
        if reference() is not module or type(module) is not kind or len(attributes) != size:
            return False
        self._tensors += attributes["_parameters"].values()
        self._tensors += attributes["_buffers"].values()
        has_hooks = attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or hooks
        if has_hooks and list_hooks(module) != hooks:
            return False
        settings = get_settings(attributes)
        return bool(settings == expected if is_plain else self._describe_all(settings) == expected)

    def _read_module(self, module: nn.Module) -> ModuleState:
        self._tensors += module._parameters.values()
        self._tensors += module._buffers.values()
        attributes = module.__dict__
        names = [name for name in attributes if name not in MODULE_ATTRIBUTES]
        # Repeat the first name, because with a single name, `itemgetter` would not return a tuple.
        get_settings = operator.itemgetter(*names, *names[:1]) if names else lambda _: ()
        settings = get_settings(attributes)
        is_plain = all(map(_is_plain, settings))
        # Settings are copied, because a setting may be a list that is changed in place.
        described = copy.deepcopy(settings) if is_plain else self._describe_all(settings)
        hooks = list_hooks(module)
        return weakref.ref(module), type(module), len(attributes), get_settings, described, is_plain, hooks

    def _describe_all(self, settings: tuple[Any, ...]) -> list[Any]:
        return [self._describe(value) for value in settings]

    def _describe(self, value: Any, depth: int = 0) -> Any:  # noqa: PLR0911 # one for each kind of value
        """Return a description that changes if the value changes. It keeps no part of the value alive."""
        kind = type(value)
        if kind in SIMPLE_TYPES:
            return value
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return Tensor
        if isinstance(value, (types.FunctionType, types.MethodType, type, nn.Module)):
            return _refer(value)
        if kind in (tuple, list, set, frozenset):
            if SIMPLE_TYPES.issuperset(map(type, value)):
                return kind, tuple(value)
            return kind, len(value), [self._describe(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
        if isinstance(value, np.ndarray):
            return id(value), value.shape, value.flat[:: max(1, value.size // MAX_VALUES)].tobytes()
        if depth == MAX_DEPTH:
            return kind
        if isinstance(value, functools.partial):
            return kind, self._describe((value.func, value.args, value.keywords), depth)
        # An object may occur several times, such as a shared configuration. Later occurrences are described by a
        # number, because repeated descriptions could take exponential time.
        if id(value) in self._objects:
            return kind, self._objects[id(value)]
        self._objects[id(value)] = len(self._objects)
        items = value.items() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).items()
        pairs = [(self._describe(key, MAX_DEPTH), self._describe(item, depth + 1)) for key, item in items]
        return kind, pairs[:MAX_ITEMS], len(pairs)


def _refer(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return _refer(value.__func__), _refer(value.__self__)
    try:
        return weakref.ref(value)
    except TypeError:
        return type(value)


def _describe_memory(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(id(x), x.data_ptr(), x._version, x.shape, x.stride(), x.dtype) for x in tensors]


class Samples:
    """Sampled values of each tensor, as bytes, so that NaN equals NaN.

    The values are read by their position in memory, so that the memory format does not matter.

    On the CPU, NumPy reads the values in a tenth of the time that PyTorch operations would take.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        # Views of the model's tensors at the sampled positions. They do not keep the tensors' memory alive. NumPy views
        # (CPU) are grouped by item size, and GPU views by device and item size.
        self._arrays: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._on_gpus: dict[tuple[torch.device, int], list[Tensor]] = {}
        # Each entry is (index of the tensor, size, stride).
        self._on_other_devices: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        for index, tensor in enumerate(tensors):
            if tensor.is_meta or not tensor.numel():
                continue
            extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
            count, stride, size = min(extent, MAX_VALUES), max(1, extent // MAX_VALUES), tensor.element_size()
            if (tensor.storage_offset() + extent) * size > tensor.untyped_storage().nbytes():
                # The tensor has no memory: sharded training temporarily frees the memory of parameters.
                raise TypeError
            layout = {"shape": (count,), "strides": (stride * size,), "version": 3}
            if tensor.device.type == "cpu":
                memory = {**layout, "data": (tensor.data_ptr(), True), "typestr": f"|V{size}"}
                self._arrays.setdefault(size, []).append(np.asarray(types.SimpleNamespace(__array_interface__=memory)))
            elif tensor.device.type == "cuda" and size in INTEGER_DTYPES:
                memory = {**layout, "data": (tensor.data_ptr(), False), "typestr": f"<i{size}"}
                interface = types.SimpleNamespace(__cuda_array_interface__=memory)
                view = torch.as_tensor(interface, dtype=INTEGER_DTYPES[size], device=tensor.device)
                self._on_gpus.setdefault((tensor.device, size), []).append(view)
            else:
                self._on_other_devices.append((index, (count,), (stride,)))

    def read(self, tensors: list[Tensor]) -> list[bytes]:
        """Return the values that the tensors have now. Addresses, shapes and strides must not have changed."""
        values = [np.concatenate(arrays).tobytes() for arrays in self._arrays.values()]
        groups: dict[Any, list[Tensor]] = {}
        for index, size, stride in self._on_other_devices:
            tensor = tensors[index].detach()
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.as_strided(size, stride))
        joined = [torch.cat(group) for group in (*self._on_gpus.values(), *groups.values())]
        return values + [group.view(torch.uint8).cpu().numpy().tobytes() for group in joined]


def list_global_hooks() -> list[tuple[int, ...]]:
    """Return the keys of the forward hooks and forward pre-hooks of all modules."""
    return [tuple(torch_module._global_forward_hooks), tuple(torch_module._global_forward_pre_hooks)]


def list_hooks(module: nn.Module) -> list[int]:
    """Return the keys of a module's forward hooks and forward pre-hooks, without the hooks of this package."""
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return [key for key, hook in hooks if getattr(hook, "__module__", "") != HOOKS_MODULE]


def _is_plain(value: Any) -> bool:
    return type(value) in SIMPLE_TYPES or (type(value) in (tuple, list) and SIMPLE_TYPES.issuperset(map(type, value)))
