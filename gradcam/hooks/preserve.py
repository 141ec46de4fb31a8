"""Contexts that preserve a model's training flags, buffers, compiler mode and random state, even with several threads.

All threads share this state. If every explanation saved and restored the state itself, an explanation that starts
during another one would save the changed state. Overlapping explanations therefore share one saved state, under a lock.
The first explanation saves the state, and the last explanation restores it. The random state is an exception: each
explanation saves and restores it separately. If another thread samples from PyTorch's global generator in the meantime,
random numbers may repeat.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradcam.hooks import pytorch
from gradcam.hooks.containers import list_modules
from gradcam.hooks.hooks import thread_state


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Prepare a model for an explanation (evaluation mode, eager, differentiable), and yield its modules, each once."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), preserve_state(model) as modules:
            yield modules
        return
    modules, grad_mode = list_modules(model), torch.is_grad_enabled()
    # Store the set of this thread in a variable. If the context is abandoned, the garbage collector may close it in
    # another thread, in which `thread_state` has another set.
    running, number = thread_state.running, thread_state.passes + 1
    try:
        thread_state.passes = number
        running.add(number)
        pytorch.set_grad_mode(True)
        contexts, restore_random_states = _choose_contexts(modules), _save_random_states(modules)
        try:
            with _enter_all(contexts, modules) if contexts else contextlib.nullcontext():
                yield modules
        finally:
            restore_random_states()
    finally:
        pytorch.set_grad_mode(grad_mode)
        running.discard(number)


Context = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]


def _choose_contexts(modules: Sequence[nn.Module]) -> list[Context]:
    """Return the contexts that have something to change. Each context takes as long as a layer of a small network."""
    contexts: list[Context] = []
    candidates = pytorch.select_unusual(modules)
    if _flags or any(module.training for module in candidates):
        contexts.append(evaluation_mode)
    if any(module._buffers and not isinstance(module, _NormBase) for module in candidates):
        contexts.append(unchanged_buffers)
    if pytorch.find_unhooked(candidates if pytorch.VERSION >= (2, 5) else modules):
        contexts.append(eager_mode)
    # If PyTorch's module for dynamic quantisation was not imported, no layer is dynamically quantised.
    quantised = sys.modules.get("torch.ao.nn.quantized.dynamic")
    if quantised is not None and any(issubclass(kind, quantised.Linear) for kind in set(map(type, modules))):
        from gradcam.hooks.straight_through import straight_through

        contexts.append(straight_through)
    return contexts


@contextlib.contextmanager
def _enter_all(contexts: Sequence[Context], modules: Sequence[nn.Module]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context(modules))
        yield


MT19937_WORD_BYTES = 4 * 624  # The state has 624 words, and the position of the next word.
WORD_BYTES = 4 * 8  # The size of the first words that are compared.

# The lock is reentrant, because the garbage collector may end an abandoned context in the thread that holds the lock.
_lock = threading.RLock()


class PassToken:
    """An object that stands for a running pass. Sets refer to it weakly, so that it disappears with the pass."""


# Maps each module or mode to its saved value and to the passes that need the change. The last pass to end restores the
# value.
_Register = weakref.WeakKeyDictionary[Any, tuple[Any, weakref.WeakSet[PassToken]]]
_flags, _buffers, _modes, _calls = _Register(), _Register(), _Register(), _Register()


@contextlib.contextmanager
def _change_while_used(
    register: _Register,
    modules: Iterable[Any],
    save: Callable[[Any], Any],
    restore: Callable[[Any, Any], None],  # `restore` must not raise.
    *,
    change: Callable[[nn.Module], None] = lambda _: None,
    is_affected: Callable[[nn.Module], bool] = lambda _: True,
) -> Iterator[None]:
    """Change the affected modules in the context. The first pass saves a module's value, and the last restores it."""
    token = PassToken()  # Tokens are used instead of a counter, because an interrupt could leave a counter wrong.
    try:
        with _lock:
            for module in modules if register else filter(is_affected, modules):
                if module not in register and is_affected(module):
                    register[module] = save(module), weakref.WeakSet()
                if module in register:
                    register[module][1].add(token)
                    change(module)  # If an interrupt occurs here, the next context that ends restores the saved value.
        yield
    finally:
        with _lock:
            for module, (value, tokens) in list(register.items()) if register else ():
                tokens.discard(token)
                if not tokens:
                    restore(module, value)
                    del register[module]


def evaluation_mode(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Set the modules to evaluation mode, and restore each module's training flag at the end.

    If a module was in training mode, entries that it added to its dictionaries in evaluation mode are deleted. For
    example, LeViT caches attention biases in evaluation mode. The cached biases would be outdated after the next
    training step.
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
    return _change_while_used(_flags, modules, copy_caches, restore, change=set_flag, is_affected=is_training)


@contextlib.contextmanager
def unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the buffers that a model changes in place in evaluation mode, such as counters and observers.

    The running statistics of batch norms are not restored. Evaluation mode does not change these statistics, but
    another thread may be training the model. If a parameter has changed, another thread is training or loading weights,
    and no buffer is restored.
    """
    owners = [module for module in modules if module._buffers and not isinstance(module, _NormBase)]
    if not owners:
        yield
        return
    before = _count_writes(modules)

    def save(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        dense = (buffer for buffer in module._buffers.values() if buffer is not None and buffer.layout == torch.strided)
        return [(buffer, buffer.detach().clone()) for buffer in dense if not buffer.is_meta and not buffer.is_nested]

    def restore(module: nn.Module, buffers: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, copy in buffers if _count_writes(modules) == before else ():
            # A write by the model may have attached a graph to the buffer. Only the values of `buffer` are restored. If
            # the model has replaced `buffer` by another tensor, the other tensor stays in the module. Such a tensor is
            # usually a cache, and an older cache could contradict other attributes of the module.
            if buffer.grad_fn is not None and not pytorch.is_view(buffer):
                buffer.detach_()
            is_same_kind = (buffer.dtype, buffer.shape) == (copy.dtype, copy.shape)
            if is_same_kind and not _is_equal(buffer, copy):
                # PyTorch refuses to write to an expanded tensor, whose elements share memory.
                with contextlib.suppress(RuntimeError), torch.no_grad():
                    buffer.copy_(copy)

    with _change_while_used(_buffers, owners, save, restore):
        yield


def _count_writes(modules: Iterable[nn.Module]) -> int:
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return sum(parameter._version for parameter in parameters if parameter is not None and not parameter.is_inference())


def _is_equal(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether all values are equal, where NaN equals NaN.

    Tensor versions are not sufficient: the kernels of quantisation observers do not increase a tensor's version.
    """
    try:
        return torch.equal(tensor, expected) or bool(tensor.isclose(expected, rtol=0, atol=0, equal_nan=True).all())
    except (RuntimeError, NotImplementedError):  # PyTorch cannot compare some dtypes.
        return True


def _shared_mode(enter: Callable[[], Callable[[], None]]) -> AbstractContextManager[None]:
    """Share a process-wide mode between passes: the first pass turns the mode on, and the last pass turns it off.

    The passes may run in different threads. `enter` turns the mode on, and returns the function that turns it off.
    """
    return _change_while_used(_modes, [enter], lambda _: enter(), lambda _, leave: leave())


def _without_fused_attention() -> Callable[[], None]:
    with contextlib.ExitStack() as stack:
        for kernel in ("flash", "mem_efficient", "cudnn", "math"):
            # The switches in `torch.backends.cuda` also affect the CPU kernels.
            switch = getattr(torch.backends.cuda, f"enable_{kernel}_sdp")
            stack.callback(switch, getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")())
            switch(kernel == "math")
        return stack.pop_all().close


@contextlib.contextmanager
def eager_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disable compiled code and PyTorch's fast path, because both ignore hooks that are registered later."""
    unhooked = pytorch.find_unhooked(modules)
    with contextlib.ExitStack() as stack:
        if unhooked:  # Without such modules, eager mode would slow down all threads for nothing.
            stack.enter_context(_shared_mode(pytorch.run_eagerly))
        if unhooked and not pytorch.HAS_STANCE:
            calls = pytorch.read_calls, pytorch.restore_calls
            compiled = [module for module in unhooked if pytorch.is_compiled(module)]
            stack.enter_context(_change_while_used(_calls, compiled, *calls, change=pytorch.call_eagerly))
        yield


def plain_attention() -> AbstractContextManager[None]:
    """Compute attention by matrix products and a softmax, because fused attention cannot be differentiated twice."""
    return _shared_mode(_without_fused_attention)


def _save_random_states(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Read the random states of PyTorch, NumPy and Python. Return a function that restores them.

    Threads share the states, so only changed states are set.
    """
    # Parameters are listed module by module, because `model.parameters()` takes as long as a dozen kernel launches.
    owners = modules if torch.cuda.is_initialized() else ()
    parameters = [parameter for module in owners for parameter in module._parameters.values() if parameter is not None]
    indices = {parameter.device.index for parameter in parameters if parameter.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
    states = [generator.get_state() for generator in generators]
    words, (last_words, *other_states) = _read_words(), _last_states[0]
    if words != last_words:
        other_states = [random.getstate(), np.random.get_state(legacy=False)]
        _last_states[0] = (words, *other_states)

    def restore() -> None:
        for generator, state in zip(generators, states):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
        words_now = _read_words()
        if words_now[0] != words[0]:
            random.setstate(other_states[0])
        if words_now[1] != words[1]:
            np.random.set_state(other_states[1])

    return restore


# The positions and first words of Python's and NumPy's generators, and the states that belong to them. Reading the states
# takes as long as several layers of a small network. If position and words did not change, the last states are therefore
# reused.
_last_states: list[tuple[Any, ...]] = [(None,)]


def _read_words() -> tuple[Any, Any]:
    """Return the position and the first words of Python's and of NumPy's global generator, and cached normal samples.

    Each sample moves the position, and after the last position, all words change. Another bit generator than MT19937 has
    no known memory. Its state counts as changed.
    """
    python: Any = random.getstate.__self__  # type: ignore[attr-defined]
    numpy: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    python_view, *numpy_views = _view_memory(python, numpy, numpy._bit_generator)
    numpy_words = [view.tobytes() for view in numpy_views] or object()
    return (python_view.tobytes(), python.gauss_next), numpy_words


@functools.lru_cache(maxsize=1)
def _view_memory(python: Any, numpy: Any, bits: Any) -> list[memoryview]:
    """Return views of the position and first words of Python's generator and, if it is an MT19937, of NumPy's."""
    head = object.__basicsize__
    places = [(id(python) + head, 4 + WORD_BYTES)]  # Python stores the position before the words.
    if isinstance(bits, np.random.MT19937):  # The last object holds the cached normal sample.
        words = bits.ctypes.state_address
        places += [(words, WORD_BYTES), (words + MT19937_WORD_BYTES, 4)]
        places += [(id(numpy) + head, type(numpy).__basicsize__ - head)]
    return [memoryview((ctypes.c_char * size).from_address(address)) for address, size in places]
