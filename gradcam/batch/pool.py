"""Process images in a pool of threads. The threads have a lower priority than the model, and run urgent tasks first."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gradcam.models.classifier import Classifier
from gradcam.sources.contents import InputImage

# Larger batches are hardly faster on a CPU, and keep more decoded images in memory.
CPU_BATCH_SIZE = 8
# This size keeps a GPU busy with common networks. The batch size is halved if the device runs out of memory.
GPU_BATCH_SIZE = 32


@dataclass(frozen=True)
class ItemBatch:
    """The items of one batch.

    `needed` says for each item whether its result is needed. `start` is the position of the first item in the input.
    """

    start: int
    items: list[InputImage]
    needed: list[bool]


def cut_batches(items: Iterable[InputImage], size: int, is_needed: Callable[[InputImage], bool]) -> Iterator[ItemBatch]:
    """Cut the items into batches of this size, and leave out batches without a needed item.

    An image's results depend slightly on the other images of its batch. Batches are therefore cut at fixed positions,
    and include items that are not needed.
    """
    remaining = iter(items)
    for start in itertools.count(0, size):
        batch = list(itertools.islice(remaining, size))
        if not batch:
            return
        needed = [bool(is_needed(item)) for item in batch]
        if any(needed):
            yield ItemBatch(start, batch, needed)


def choose_batch_size(classifier: Classifier, device: str | None = None) -> int:
    """Return the default batch size for the device. If `device` is None, use the classifier's device."""
    return CPU_BATCH_SIZE if (device or classifier.device.type) == "cpu" else GPU_BATCH_SIZE


T = TypeVar("T")

URGENT, LATER = 0, 1
# The pool's threads get a lower priority than the model's threads. The model has one thread per core, and its threads
# wait for each other at each layer. A single delayed thread would therefore delay the model.
THREAD_NICENESS = 10

_Task = tuple[int, int, Future[Any], Callable[[], Any]]


class Pool:
    """A pool of threads, used as a context manager. On exit, pending tasks are dropped, and running tasks end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="gradcam-pixels")
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._numbers = itertools.count()  # The numbers make tasks of equal urgency run in the order of submission.

    def submit(self, urgency: int, task: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Queue a task, and return the future that receives its result. If `future` is given, this future is used."""
        future = future or Future()
        self._tasks.put((urgency, next(self._numbers), future, task))
        self._executor.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        _, _, future, task = self._tasks.get_nowait()  # `submit` adds one task to the queue before each call.
        try:
            future.set_result(task())
        except BaseException as error:  # `future.result()` raises the error again.
            future.set_exception(error)

    def __enter__(self) -> Pool:
        before = torch.get_num_threads()
        barrier = threading.Barrier(self._workers + 1)
        try:
            for _ in range(self._workers):
                self._executor.submit(_start_thread, barrier)
            barrier.wait()
        except BaseException:
            barrier.abort()
            self._executor.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)  # Restore the default for new threads, which the pool's threads have changed.
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)


def _start_thread(barrier: threading.Barrier) -> None:
    torch.get_num_threads()  # The first call in a thread copies the default, so call this before `set_num_threads`.
    torch.set_num_threads(1)  # If the pool's threads started OpenMP threads, the model would be slower.
    if sys.platform == "linux":  # Only Linux has a priority per thread.
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + THREAD_NICENESS)
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()


class _OpenCVThreads:
    """The state that all `one_opencv_thread` contexts share.

    `holders` is the number of open contexts. `before` is OpenCV's number of threads before the first context.
    """

    lock, holders, before = threading.Lock(), 0, 0


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """Make OpenCV compute only in the calling thread.

    If contexts overlap, the context that ends last restores OpenCV's setting.
    """
    from gradcam.images.opencv import cv2

    with _OpenCVThreads.lock:
        if _OpenCVThreads.holders == 0:
            _OpenCVThreads.before = cv2.getNumThreads()
            cv2.setNumThreads(1)
        _OpenCVThreads.holders += 1
    try:
        yield
    finally:
        with _OpenCVThreads.lock:
            _OpenCVThreads.holders -= 1
            if _OpenCVThreads.holders == 0:
                cv2.setNumThreads(_OpenCVThreads.before)
