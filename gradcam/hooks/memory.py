"""Measure and limit the memory that model runs take, and run in smaller parts when memory runs out."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradcam.errors import GradcamError
from gradcam.hooks import pytorch
from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.hooks import Hooks
from gradcam.options import Progress

Result = TypeVar("Result")

DEFAULT_BUDGET = 2**28  # In bytes.
MAX_BATCH_ROWS = 1024  # The maximum number of rows of a batch. Larger batches are not faster.


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the machine or a device ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and pytorch.message_contains(error, pytorch.NO_MEMORY)


class HalvingRunner:
    """Runs work in parts that fit into memory. When a part does not fit, later parts have half its size.

    `largest` is the present limit for the number of items per part.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest

    def run(self, work: Callable[[Any], Result], items: Sequence[Any] | Tensor) -> Iterator[Result]:
        """Yield the result of `work` for each part. If a single item does not fit, the memory error is raised."""
        start = 0
        while start < len(items):
            part = items[start : start + self.largest]
            try:
                result = work(part)
            except Exception as error:
                if len(part) == 1 or not is_out_of_memory(error):
                    raise
            else:
                yield result
                start += len(part)
                continue
            # Collect after the handler, because inside the handler, the error's traceback keeps tensors alive.
            gc.collect()
            torch.cuda.empty_cache()  # Does nothing without CUDA.
            self.largest = len(part) // 2


class _MemorySpan:
    """The bytes of all storages that were created since a mark and are still alive: the current sum, and its peak."""

    current = peak = 0

    def add(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)


class _TrackedStorage(weakref.ref[Any]):
    """A weak reference to a storage, with the `_MemorySpan` objects that count the storage."""

    key: int
    size: int
    spans: list[_MemorySpan]


class Meter(TorchDispatchMode):
    """Counts the memory of the tensors that operations create after each `mark`, as long as these tensors are alive.

    Temporary memory inside kernels is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[object, _MemorySpan] = {}
        self._alive: dict[int, _TrackedStorage] = {}
        # When a storage is freed, its weak reference calls `append` of this deque. A callback in Python is not used,
        # because an interrupt during the callback would be lost.
        self._released: deque[_TrackedStorage] = deque()

    def mark(self, name: object) -> None:
        self._spans[name] = _MemorySpan()

    def peak(self, name: object) -> int:
        """Return the peak memory, in bytes, of tensors created since the mark; 0 without a mark."""
        return self._spans[name].peak if name in self._spans else 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._spans:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # Some kinds of tensors have no storage.
                input_storages = {tensor.untyped_storage()._cdata for tensor in list_tensors((args, kwargs))}
                for tensor in list_tensors(result):
                    self._count(tensor, input_storages)
        return result

    def _count(self, tensor: Tensor, input_storages: set[int]) -> None:
        while self._released:
            released = self._released.popleft()
            del self._alive[released.key]
            for span in released.spans:
                span.add(-released.size)
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # The tensor is a view, or the output of an in-place operation, so its storage is already counted.
        if key in input_storages or key in self._alive:
            return
        tracked = _TrackedStorage(storage, self._released.append)
        tracked.key, tracked.size, tracked.spans = key, size, list(self._spans.values())
        for span in tracked.spans:
            span.add(size)
        self._alive[key] = tracked


@dataclass(frozen=True)
class RerunBudget:
    """The memory budget for reruns of a batch, and the measured memory of the parts of a pass.

    `batch` has the model's original arguments; callers pass copies to the model. `budget` is in bytes. If it is None,
    `DEFAULT_BUDGET` applies, but a single variant of the batch may exceed it.
    """

    batch: Batch
    budget: int | None = None
    progress: Progress | None = None

    @functools.cached_property
    def meter(self) -> Meter:
        return Meter()

    @contextlib.contextmanager
    def measured(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Measure the memory that the model takes after each of the layers, during one run of the model."""
        with Hooks() as hooks:
            for layer in layers:
                hooks.after_forward(layer, lambda module, *_: self.meter.mark(module))
            with self.meter:
                yield

    def fitting(self, bytes_each: int) -> int:
        """Return how many variants of the batch fit, given the bytes per variant. The result may be 0."""
        return min((self.budget or DEFAULT_BUDGET) // max(bytes_each, 1), MAX_BATCH_ROWS // self.batch.images)

    def require_one(self, bytes_each: int) -> None:
        """Raise `GradcamError` if the user's budget is too small for one variant of the batch."""
        if self.budget is not None and bytes_each > self.budget:
            reason = f"one perturbed copy of the {self.batch.images} image(s) takes {bytes_each} bytes"
            advice = "increase memory_budget, or explain fewer images per call."
            raise GradcamError(f"memory_budget is {self.budget} bytes, but {reason}: {advice}")

    def report(self, completed: int, total: int) -> None:
        if self.progress is not None:
            self.progress(completed, total)
