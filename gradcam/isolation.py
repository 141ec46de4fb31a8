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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from gradcam.buffers import Values, keep_buffers, restore_buffers
from gradcam.quantised import straight_through

_lock = threading.RLock()  # an abandoned context may be collected, and end, while the same thread holds it


class _Holder:
    """One explanation. It is held weakly: one that was interrupted before it could let go is forgotten with its frame."""


class _Kept:
    """What a module had, and the explanations that will have it put back."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.holders: weakref.WeakSet[_Holder] = weakref.WeakSet()


class _Here(threading.local):
    """What this thread holds undisturbed."""

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[_Holder] = weakref.WeakSet()


_here = _Here()

_Register = weakref.WeakKeyDictionary[nn.Module, _Kept]
_flags: _Register = weakref.WeakKeyDictionary()
_buffers: _Register = weakref.WeakKeyDictionary()


class _Mode:
    """A mode of the whole process that explanations share: entered by the first, left by the last, in whichever thread."""

    def __init__(self, enter: Callable[[], Callable[[], None]]) -> None:
        self._enter = enter  # gives what leaves it again
        self._leave: list[Callable[[], None]] = []  # one at most
        self._holders: weakref.WeakSet[_Holder] = weakref.WeakSet()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        holder = _Holder()
        try:
            with _lock:
                self._holders.add(holder)
                if not self._leave:
                    self._leave.append(self._enter())
            yield
        finally:
            with _lock:
                self._holders.discard(holder)
                if self._leave and not self._holders:
                    self._leave.pop()()


def _run_eagerly() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _without_fused_attention() -> Callable[[], None]:
    kinds = torch.backends.cuda  # of the processor's kernels too, in spite of the name
    enabled = (kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.cudnn_sdp_enabled())
    plain = kinds.math_sdp_enabled()

    def switch(flash: bool, memory_efficient: bool, cudnn: bool, plain: bool) -> None:
        kinds.enable_flash_sdp(flash)
        kinds.enable_mem_efficient_sdp(memory_efficient)
        kinds.enable_cudnn_sdp(cudnn)
        kinds.enable_math_sdp(plain)

    switch(False, False, False, True)
    return lambda: switch(*enabled, plain)


_eager = _Mode(_run_eagerly)
_plain_attention = _Mode(_without_fused_attention)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """`model` in evaluation mode, run eagerly, outside inference mode, differentiable; all as it was afterwards.

    Gives its modules, each once.
    """
    modules = _walk(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_known_here())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(evaluation_mode(modules))
        stack.enter_context(unchanged_buffers(modules))
        stack.enter_context(eager_mode(modules))
        stack.enter_context(_random_state(modules))
        stack.enter_context(straight_through(modules))
        yield modules


def is_undisturbed() -> bool:
    """Whether what runs in this thread is an explanation, or another look at a model, rather than the user's own pass."""
    return bool(_here.holders)


def is_inner_look() -> Callable[[], bool]:
    """Whether, whenever it is asked in this thread, what runs there is a look at a model that began later than this call."""
    outer = weakref.WeakSet(_here.holders)
    return lambda: any(holder not in outer for holder in _here.holders)


@contextlib.contextmanager
def _known_here() -> Iterator[None]:
    holder, holders = _Holder(), _here.holders  # of this thread, whichever one collects an abandoned context
    holders.add(holder)
    try:
        yield
    finally:
        holders.discard(holder)


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


@dataclass(frozen=True)
class _Care:
    """What is kept of a module, how it is changed meanwhile, and how it is put back; `restore` must not fail."""

    register: _Register
    is_wanted: Callable[[nn.Module], bool]
    keep: Callable[[nn.Module], Any]
    change: Callable[[nn.Module], None]
    restore: Callable[[nn.Module, Any], None]


@contextlib.contextmanager
def _keep_while_held(care: _Care, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Every module that is wanted as it should be; its last holder puts back what its first one found."""
    holder = _Holder()  # rather than a count, which an interruption between any two lines would leave wrong for good
    register = care.register
    try:
        with _lock:
            for module in modules if register else filter(care.is_wanted, modules):
                if module not in register and care.is_wanted(module):
                    register[module] = _Kept(care.keep(module))
                if module in register:
                    register[module].holders.add(holder)
                    care.change(module)  # only now: an interruption leaves an entry from which the next one mends it
        yield
    finally:
        with _lock:
            for module, kept in list(register.items()):
                kept.holders.discard(holder)
                if not kept.holders:
                    care.restore(module, kept.value)
                    del register[module]


@contextlib.contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Every one of the modules in evaluation mode; afterwards each has its own flag again."""

    def change(module: nn.Module) -> None:
        module.training = False

    def restore(module: nn.Module, training: bool) -> None:
        module.training = training

    with _keep_while_held(_Care(_flags, lambda it: it.training, lambda it: it.training, change, restore), modules):
        yield


@contextlib.contextmanager
def unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers that a model changes in place in evaluation mode, counters and observers, are as they were afterwards.

    Running statistics are left out: in evaluation mode nothing changes them, and a thread that trains may be doing so.
    Where parameters have changed meanwhile, another thread is loading or training, and the buffers are left to it.
    """
    owners = [module for module in modules if module._buffers and not isinstance(module, _NormBase)]
    if not owners:
        yield
        return
    before = _count_writes(modules)

    def restore(module: nn.Module, buffers: Values) -> None:
        if _count_writes(modules) == before:
            restore_buffers(buffers)

    with _keep_while_held(_Care(_buffers, lambda _: True, keep_buffers, lambda _: None, restore), owners):
        yield


def _count_writes(modules: Iterable[nn.Module]) -> int:
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return sum(it._version for it in parameters if it is not None and not it.is_inference())


@contextlib.contextmanager
def eager_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Compiled modules among these run uncompiled, since compiled code ignores hooks that come later."""
    if "torch._dynamo" not in sys.modules or not _compiled_among(modules):
        yield  # no stance without need: it holds in all threads, and would slow them down
        return
    with _eager.held():
        yield


def plain_attention() -> AbstractContextManager[None]:
    """Attention from plain products and a softmax, which can be differentiated more than once, as the fused kinds cannot."""
    return _plain_attention.held()


def _compiled_among(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [it for it in modules if it._compiled_call_impl is not None or "_orig_mod" in it._modules]


@contextlib.contextmanager
def _random_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The random states that the modules can draw from, put back only if they changed: other threads draw from them too."""
    generators = _generators(modules)
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)


def _generators(modules: Sequence[nn.Module]) -> list[torch.Generator]:
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    # Module by module: model.parameters() takes as long as a dozen layers' launches, which a GPU would wait for.
    parameters = (it for module in modules for it in module._parameters.values() if it is not None)
    indices = {parameter.device.index for parameter in parameters if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
