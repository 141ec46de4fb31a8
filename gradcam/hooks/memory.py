"""The memory that a model's run takes: how much it is, how much it may be, and smaller parts where it is not there."""

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
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, tensors
from gradcam.options import Progress

Result = TypeVar("Result")

DEFAULT_BUDGET = 2**28  # bytes
MOST_ROWS = 1024  # of a batch; larger ones are not faster


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, of the machine or of a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and pytorch.says(error, pytorch.NO_MEMORY)


class Halving:
    """Work in parts that fit into memory: once one did not, the parts are half as large from then on. `largest`: of how
    many items. `tell(count, largest)` is called where so many did not fit, with the new one."""

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
            gc.collect()  # outside of the handler: the error's traceback keeps tensors alive
            torch.cuda.empty_cache()  # does nothing where there is no CUDA
            self.largest = len(part) // 2
            self._tell(len(part), self.largest)


class _Span:
    """What has been made since a mark, and is alive; and the most that was at any time."""

    now = peak = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class _Counted(weakref.ref[Any]):
    """A storage that is alive, with what it is counted in."""

    __slots__ = ("key", "size", "spans")
    key: int
    size: int
    spans: list[_Span]


class Meter(TorchDispatchMode):
    """Counts the tensors that operations make from each `mark` on, while they are alive; not what kernels use inside."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[object, _Span] = {}
        self._alive: dict[int, _Counted] = {}
        # Filled by a method that runs no Python code: an interrupt would be lost in a weak reference's callback.
        self._released: deque[_Counted] = deque()

    def mark(self, name: object) -> None:
        self._spans[name] = _Span()

    def peak(self, name: object) -> int:
        """The most bytes of tensors, made since the mark, that were alive at once; 0 where there was no mark."""
        return self._spans[name].peak if name in self._spans else 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._spans:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # kinds of tensors that have no storage
                given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
                for tensor in tensors(result):
                    self._count(tensor, given)
        return result

    def _count(self, tensor: Tensor, given: set[int]) -> None:
        while self._released:
            old = self._released.popleft()
            del self._alive[old.key]
            for span in old.spans:
                span.add(-old.size)
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._alive:  # a view, or what an operation in place gives back
            return
        counted = _Counted(storage, self._released.append)
        counted.key, counted.size, counted.spans = key, size, list(self._spans.values())
        for span in counted.spans:
            span.add(size)
        self._alive[key] = counted


@dataclass(frozen=True)
class RerunBudget:
    """A memory budget, somebody to tell, and what parts of one pass of the batch take. `batch`: the model's arguments,
    as they came; whoever runs the model gives it copies. `budget`: bytes, None for the default, which is exceeded where
    not even one variant of the batch fits."""

    batch: Batch
    budget: int | None = None
    progress: Progress | None = None

    @functools.cached_property
    def meter(self) -> Meter:
        return Meter()

    @contextlib.contextmanager
    def measured(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Around one run of the model: what the tail behind each layer takes."""
        with Hooks() as hooks:
            for layer in layers:
                hooks.after_forward(layer, lambda module, *_: self.meter.mark(module))
            with self.meter:
                yield

    def fitting(self, bytes_each: int) -> int:
        """How many variants of the batch fit, each of so many bytes; it may be none."""
        return min((self.budget or DEFAULT_BUDGET) // max(bytes_each, 1), MOST_ROWS // self.batch.images)

    def require_one(self, bytes_each: int) -> None:
        """Raises `GradcamError` where a budget was given into which not even one variant of the batch fits."""
        if self.budget is not None and bytes_each > self.budget:
            raise GradcamError(
                f"memory_budget is {self.budget} bytes, but one perturbed copy of the {self.batch.images} image(s) "
                f"takes {bytes_each}: increase memory_budget, or explain fewer images per call."
            )

    def report(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)
