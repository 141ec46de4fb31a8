"""What keeps a model as it was: training flags, buffers, the compiler's mode, the random state, also with several threads.

All threads share these. Were two overlapping explanations to save, change and restore one by themselves, the second would
save what the first had set. So all but the last are held under a lock: the first one in saves, the last one out restores.
The random state has no such cure: numbers that another thread draws from PyTorch's global generator while a model draws
in an explanation may be drawn again.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from gradcam.hooks import pytorch
from gradcam.hooks.hooks import Holder, Hooks, here
from gradcam.hooks.nested import list_modules


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[list[nn.Module]]:
    """`model` in evaluation mode, run eagerly, outside inference mode, differentiable; gives its modules, each once."""
    modules = list_modules(model)
    holder, holders = Holder(), here.holders  # of this thread, whichever one collects an abandoned context
    with contextlib.ExitStack() as stack:
        stack.callback(holders.discard, holder)
        holders.add(holder)
        stack.enter_context(torch.inference_mode(False))
        for context in (evaluation_mode, unchanged_buffers, eager_mode, _random_state, straight_through):
            stack.enter_context(context(modules))
        yield modules


MT19937_BYTES = 4 * 625  # 624 words, and the position among them

_lock = threading.RLock()  # an abandoned context may be collected, and end, while the same thread holds it


# What a module had, and the explanations that will have it put back.
_Register = weakref.WeakKeyDictionary[nn.Module, tuple[Any, weakref.WeakSet[Holder]]]
_flags: _Register = weakref.WeakKeyDictionary()
_buffers: _Register = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _keep_while_held(
    register: _Register,
    modules: Iterable[nn.Module],
    keep: Callable[[nn.Module], Any],
    restore: Callable[[nn.Module, Any], None],  # which must not fail
    *,
    change: Callable[[nn.Module], None] = lambda _: None,
    is_wanted: Callable[[nn.Module], bool] = lambda _: True,
) -> Iterator[None]:
    """Every module that is wanted changed meanwhile; its last holder puts back what its first one kept."""
    holder = Holder()  # rather than a count, which an interruption between any two lines would leave wrong for good
    try:
        with _lock:
            for module in modules if register else filter(is_wanted, modules):
                if module not in register and is_wanted(module):
                    register[module] = keep(module), weakref.WeakSet()
                if module in register:
                    register[module][1].add(holder)
                    change(module)  # only now: an interruption leaves an entry from which the next one mends it
        yield
    finally:
        with _lock:
            for module, (value, holders) in list(register.items()):
                holders.discard(holder)
                if not holders:
                    restore(module, value)
                    del register[module]


def evaluation_mode(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Every one of the modules in evaluation mode; afterwards each has its own flag again.

    What modules in training mode cache in dictionaries meanwhile is taken out: LeViT's attention biases, for example,
    are cached in evaluation mode only, and would be out of date after the next training step.
    """

    def set_flag(module: nn.Module) -> None:
        module.training = False

    def copy_caches(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        public = (value for name, value in vars(module).items() if not name.startswith("_"))
        return [(value, value.copy()) for value in public if type(value) is dict]

    def restore(module: nn.Module, caches: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
        module.training = True
        for cache, content in caches:
            for key in cache.keys() - content.keys():
                cache.pop(key, None)

    is_training = operator.attrgetter("training")
    return _keep_while_held(_flags, modules, copy_caches, restore, change=set_flag, is_wanted=is_training)


@contextlib.contextmanager
def unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers that a model changes in place in evaluation mode, counters and observers, are as they were afterwards.
    Running statistics are left out: in evaluation mode nothing changes them, and a thread that trains may be doing so.
    Where parameters have changed meanwhile, another thread is loading or training, and the buffers are left to it."""
    owners = [module for module in modules if module._buffers and not isinstance(module, _NormBase)]
    if not owners:
        yield
        return
    before = _count_writes(modules)

    def keep(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        dense = (it for it in module._buffers.values() if it is not None and it.layout == torch.strided)
        return [(it, it.detach().clone()) for it in dense if not it.is_meta and not it.is_nested]

    def restore(module: nn.Module, buffers: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, copy in buffers if _count_writes(modules) == before else ():
            # Out of the graph of what was written to it. A tensor that took another's place is left: it is a cache as a
            # rule, and its module remembers elsewhere what it is for.
            if buffer.grad_fn is not None and not pytorch.is_view(buffer):
                buffer.detach_()
            is_same_kind = (buffer.dtype, buffer.shape) == (copy.dtype, copy.shape)
            if is_same_kind and not _is_equal(buffer, copy):
                # An expanded one shares its memory with itself.
                with contextlib.suppress(RuntimeError), torch.no_grad():
                    buffer.copy_(copy)

    with _keep_while_held(_buffers, owners, keep, restore):
        yield


def _count_writes(modules: Iterable[nn.Module]) -> int:
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return sum(it._version for it in parameters if it is not None and not it.is_inference())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """By value, since the kernels of observers do not count up a tensor's version; NaN equals NaN."""
    try:
        return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    except (RuntimeError, NotImplementedError):  # kinds of numbers that PyTorch stores and cannot compare
        return True


class _Mode:
    """A mode of the whole process that explanations share: entered by the first, left by the last, in whichever thread."""

    def __init__(self, enter: Callable[[], Callable[[], None]]) -> None:
        self._enter = enter  # gives what leaves it again
        self._leave: list[Callable[[], None]] = []  # one at most
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        holder = Holder()
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


def _without_fused_attention() -> Callable[[], None]:
    kinds = torch.backends.cuda  # of the processor's kernels too, in spite of the name
    switches = (kinds.enable_flash_sdp, kinds.enable_mem_efficient_sdp, kinds.enable_cudnn_sdp, kinds.enable_math_sdp)
    enabled = (
        kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.cudnn_sdp_enabled(), kinds.math_sdp_enabled(),
    )  # fmt: skip

    def switch(*values: bool) -> None:
        for function, value in zip(switches, values):
            function(value)

    switch(False, False, False, True)
    return lambda: switch(*enabled)


_eager, _plain_attention = _Mode(pytorch.run_eagerly), _Mode(_without_fused_attention)
_calls: _Register = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def eager_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run uncompiled, and without PyTorch's fast path, what would ignore hooks that come later."""
    unhooked = pytorch.find_unhooked(modules)
    with contextlib.ExitStack() as stack:
        if unhooked:  # Not without need: it holds in all threads, and would slow them down.
            stack.enter_context(_eager.held())
        if unhooked and not pytorch.HAS_STANCE:
            calls = pytorch.read_calls, pytorch.restore_calls
            compiled = [module for module in unhooked if pytorch.is_compiled(module)]
            stack.enter_context(_keep_while_held(_calls, compiled, *calls, change=pytorch.call_eagerly))
        yield


def plain_attention() -> AbstractContextManager[None]:
    """Attention from plain products and a softmax, which can be differentiated more than once, as the fused kinds cannot."""
    return _plain_attention.held()


@contextlib.contextmanager
def _random_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back the random states of PyTorch, NumPy and Python, each only if it changed: other threads draw from them."""
    # Module by module: model.parameters() takes as long as a dozen layers' launches, which a GPU would wait for.
    owners = modules if torch.cuda.is_initialized() else ()
    parameters = [it for module in owners for it in module._parameters.values() if it is not None]
    indices = {parameter.device.index for parameter in parameters if parameter.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
    before = [generator.get_state() for generator in generators]
    others = [_OtherGenerator(*other) for other in OTHER_GENERATORS]
    try:
        yield
    finally:
        for generator, state in zip(generators, before):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
        for other in others:
            other.restore()


def _read_python_words() -> tuple[Any, ...]:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    return _read_memory(generator, random.Random.__mro__[1]), generator.gauss_next


def _read_numpy_words() -> tuple[Any, ...] | None:
    """Return the words of NumPy's global generator, and the normal number that it keeps; None if it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy exports it to people alone
    if not isinstance(generator, np.random.MT19937):
        return None
    owner: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES), _read_memory(owner, type(owner))


def _read_memory(value: object, kind: type) -> bytes:
    """Return the bytes of an object behind the head that every object has."""
    head = object.__basicsize__
    return ctypes.string_at(id(value) + head, kind.__basicsize__ - head)


OTHER_GENERATORS = (
    (_read_python_words, random.getstate, random.setstate),
    (_read_numpy_words, np.random.get_state, np.random.set_state),
)


class _OtherGenerator:
    """The state of a generator that is not PyTorch's. Reading it takes as long as a layer of a small network, so the last
    state is taken while the words are the same."""

    last: ClassVar[dict[Any, tuple[Any, Any]]] = {}

    def __init__(self, read_words: Callable[[], Any], get: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        self._read_words, self._restore, self._words = read_words, restore, read_words()
        words, self._state = self.last.get(get, (None, None))
        if self._words is None or words != self._words:
            self._state = get()
            self.last[get] = self._words, self._state

    def restore(self) -> None:
        """Restore the state if it changed."""
        if self._words is None or self._read_words() != self._words:
            self._restore(self._state)


@contextlib.contextmanager
def straight_through(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Dynamically quantised linear layers among these keep their values, and get the gradient of the layer they round.
    Rounding has a derivative of zero wherever it has one, and PyTorch's quantised kernels give none; the
    straight-through estimate (Bengio et al., 2013, arXiv 1308.3432) takes the unrounded layer's instead."""
    quantised = sys.modules.get("torch.ao.nn.quantized.dynamic")  # not imported: then nothing is made of it either
    kinds = {kind for kind in set(map(type, modules)) if issubclass(kind, quantised.Linear)} if quantised else set()
    if not kinds:
        yield
        return

    def attach(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        (inputs,) = (*args, *kwargs.values())
        if not (torch.is_grad_enabled() and inputs.requires_grad):
            return None
        # Here `weight` is a method; in every other linear layer it is a tensor, and so the type checker takes it.
        unrounded = F.linear(inputs, module.weight().dequantize().to(inputs.dtype))  # type: ignore[operator]
        return output.detach() + (unrounded - unrounded.detach())

    with contextlib.ExitStack() as stack:
        for module in modules:
            if type(module) in kinds:
                stack.enter_context(Hooks()).after_forward(module, attach)
        yield
