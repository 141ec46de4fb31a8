"""What keeps a model as it was: its training flags, the compiler's mode and the random state, also with several threads.

Each of these is shared by all threads. Were two overlapping explanations to save, change and restore one by
themselves, the second would save what the first had set, and restore that. So flags and mode are held under a lock and
by holders: the first one in saves, the last one out restores. The random state has no such cure: numbers that another
thread draws from PyTorch's global generator while a model draws in an explanation may be drawn again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradcam.quantised import straight_through

_lock = threading.Lock()
_held_flags: weakref.WeakKeyDictionary[nn.Module, _HeldFlag] = weakref.WeakKeyDictionary()
_held_stance: list[Any] = []


class _HeldFlag:
    """A module's own training flag, and those who hold the module in evaluation mode."""

    def __init__(self, training: bool) -> None:
        self.training = training
        self.holders: weakref.WeakSet[_Holder] = weakref.WeakSet()


class _Holder:
    """One explanation. Weakly held: where an interruption keeps it from letting go, its end does."""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """`model` in evaluation mode, run eagerly, outside inference mode, differentiable; all as it was afterwards.

    Gives its modules, each once.
    """
    modules = _walk(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(evaluation_mode(modules))
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
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Every one of the modules in evaluation mode; afterwards each has its own flag again."""
    holder = _Holder()  # rather than a count, which an interruption between any two lines would leave wrong for good
    try:
        with _lock:
            held_already = set(_held_flags)
            for module in modules:
                if module.training or module in held_already:
                    _held_flags.setdefault(module, _HeldFlag(module.training)).holders.add(holder)
                    module.training = False
        yield
    finally:
        with _lock:
            for module, held in list(_held_flags.items()):
                held.holders.discard(holder)
                if not held.holders:
                    module.training = held.training
                    del _held_flags[module]


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
