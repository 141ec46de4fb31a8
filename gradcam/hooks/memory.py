"""The memory that a model's run takes: how much it is, and smaller parts where it is not there."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradcam.hooks.nested import tensors

Result = TypeVar("Result")

# How PyTorch and its libraries say it in a RuntimeError.
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, of the machine or of a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part.lower() in str(error).lower() for part in NO_MEMORY)


class Halving:
    """Work in parts that fit into memory: once one did not, the parts are half as large from then on.

    `largest`: how many items a part has at most. `tell(count, largest)` is called where so many did not fit, with the
    new one.
    """

    def __init__(self, largest: int, tell: Callable[[int, int], None] = lambda count, largest: None) -> None:
        self.largest = largest
        self._tell = tell

    def run(self, work: Callable[[Any], Result], whole: Sequence[Any] | Tensor) -> Iterator[Result]:
        """What `work` gives for one part after another; its errors come through, also of a single item without room."""
        start = 0
        while start < len(whole):
            part = whole[start : start + self.largest]
            try:
                result = work(part)
            except Exception as error:
                if len(part) == 1 or not is_out_of_memory(error):
                    raise
            else:
                yield result
                start += len(part)
                continue
            free_memory()  # outside of the handler: the error's traceback keeps tensors alive
            self.largest = len(part) // 2
            self._tell(len(part), self.largest)


def free_memory() -> None:
    """Give back to the device what nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no CUDA


class _Span:
    """What has been made since a mark, and is alive; and the most that was at any time."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class Meter(TorchDispatchMode):
    """A context that counts the tensors which operations make, from each `mark` on, while they are alive.

    What kernels use inside themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[object, _Span] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def mark(self, name: object) -> None:
        """Begin to count under this name."""
        self._spans[name] = _Span()

    def peak(self, name: object) -> int:
        """The most bytes of tensors, made since the mark, that were alive at once; 0 where there was no mark."""
        return self._spans[name].peak if name in self._spans else 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._spans:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # kinds of tensors that have no storage
                given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
                for tensor in tensors(result):
                    self._count(tensor, given)
        return result

    def _count(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._alive:  # a view, or what an operation in place gives back
            return
        spans = list(self._spans.values())
        for span in spans:
            span.add(size)
        self._alive[key] = weakref.ref(storage, lambda _: self._release(key, size, spans))

    def _release(self, key: int, size: int, spans: list[_Span]) -> None:
        del self._alive[key]
        for span in spans:
            span.add(-size)
