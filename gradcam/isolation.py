"""What keeps a model as it was: training flags, buffers, the compiler's mode, the random state, also with several threads.

Each of these is shared by all threads. Were two overlapping explanations to save, change and restore one by
themselves, the second would save what the first had set, and restore that. So all but the last are held under a lock and
by holders: the first one in saves, the last one out restores. The random state has no such cure: numbers that another
thread draws from PyTorch's global generator while a model draws in an explanation may be drawn again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradcam.quantised import straight_through

_lock = threading.Lock()
_held_stance: list[Any] = []


class _Holder:
    """One explanation. Weakly held: where an interruption keeps it from letting go, its end does."""


class _Held:
    """What a module had, and the explanations that it is kept for."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.holders: weakref.WeakSet[_Holder] = weakref.WeakSet()


Register = weakref.WeakKeyDictionary[nn.Module, _Held]
_held_flags: Register = weakref.WeakKeyDictionary()
_held_buffers: Register = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """`model` in evaluation mode, run eagerly, outside inference mode, differentiable; all as it was afterwards.

    Gives its modules, each once.
    """
    modules = _walk(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(evaluation_mode(modules))
        stack.enter_context(unchanged_buffers(modules))
        stack.enter_context(eager_mode(modules))
        stack.enter_context(_random_state(model))
        stack.enter_context(straight_through(modules))
        yield modules


def _walk(model: nn.Module) -> list[nn.Module]:
    """All modules, each once: as `model.modules()`, in an order of its own and a quarter of the time.

    On a small network those generators, one inside another, take as long as a layer.
    """
    found, seen = [model], {model}
    for module in found:  # which grows on the way
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


@contextlib.contextmanager
def _held(
    register: Register,
    modules: Iterable[nn.Module],
    wanted: Callable[[nn.Module], bool],
    keep: Callable[[nn.Module], Any],
    restore: Callable[[nn.Module, Any], None],
) -> Iterator[None]:
    """`keep(module)` for each that is wanted, by its first holder; `restore(module, kept)` after its last."""
    holder = _Holder()  # rather than a count, which an interruption between any two lines would leave wrong for good
    try:
        with _lock:
            for module in modules:
                if module not in register and wanted(module):
                    register[module] = _Held(keep(module))
                if module in register:
                    register[module].holders.add(holder)
        yield
    finally:
        with _lock:
            for module, held in list(register.items()):
                held.holders.discard(holder)
                if not held.holders:
                    restore(module, held.kept)
                    del register[module]


@contextlib.contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Every one of the modules in evaluation mode; afterwards each has its own flag again."""
    with _held(_held_flags, modules, lambda module: module.training, _switch_training_off, _set_training):
        yield


def _switch_training_off(module: nn.Module) -> bool:
    training, module.training = module.training, False
    return training


def _set_training(module: nn.Module, training: bool) -> None:
    module.training = training


@contextlib.contextmanager
def unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers that a model changes itself in evaluation mode, counters and observers, are as they were afterwards.

    Running statistics are left out: in evaluation mode nothing changes them, and a thread that trains may be doing so.
    """
    with _held(_held_buffers, modules, _has_own_buffers, _keep_buffers, _restore_buffers):
        yield


def _has_own_buffers(module: nn.Module) -> bool:
    return bool(module._buffers) and not isinstance(module, _NormBase)


def _keep_buffers(module: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    return [
        (name, buffer, buffer.detach().clone())
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.layout == torch.strided and not buffer.is_meta  # others cannot be compared
    ]


def _restore_buffers(module: nn.Module, kept: list[tuple[str, Tensor, Tensor]]) -> None:
    for name, buffer, copy in kept:
        if not torch.equal(buffer, copy):  # by value: the kernels of observers do not count up a tensor's version
            with torch.no_grad():
                buffer.resize_(copy.shape).copy_(copy)
        if module._buffers.get(name) is not buffer:
            module._buffers[name] = buffer


@contextlib.contextmanager
def eager_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Compiled modules among these run uncompiled, since compiled code ignores hooks that come later."""
    if "torch._dynamo" not in sys.modules or not any(map(_is_compiled, modules)):
        yield  # not for nothing: the stance holds in all threads, where it would slow others down
        return
    with _lock:
        if not _held_stance:
            stance: Any = torch.compiler.set_stance("force_eager")
            stance.__enter__()
            _held_stance.append(stance)
        _held_stance.append(None)
    try:
        yield
    finally:
        with _lock:
            _held_stance.pop()
            if len(_held_stance) == 1:
                _held_stance.pop().__exit__(None, None, None)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@contextlib.contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    """The random states that the model can draw from, put back only if they changed: other threads draw from them too."""
    generators = _generators(model)
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)


def _generators(model: nn.Module) -> list[torch.Generator]:
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    indices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
