"""Threads for pixels: they leave the cores to the model where both want them, and do first what is waited for most."""

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
from gradcam.sources.contents import Item

ON_CPU = 8  # pictures: larger batches are hardly faster there, and hold more decoded pictures in memory
ON_DEVICE = 32  # fills a GPU with the usual networks; halved where it does not fit


@dataclass(frozen=True)
class Cut:
    """One batch: its items, and for each whether its result is wanted. `start`: the first one's place among all."""

    start: int
    items: list[Item]
    needed: list[bool]


def cut(items: Iterable[Item], size: int, is_needed: Callable[[Item], bool]) -> Iterator[Cut]:
    """Batches of so many items, those without any needed one left out: what a batch holds does not depend on the
    others. Numbers change a little with the batch. So a picture is always explained among the same others."""
    remaining = iter(items)
    for start in itertools.count(0, size):
        taken = list(itertools.islice(remaining, size))
        if not taken:
            return
        needed = [bool(is_needed(item)) for item in taken]
        if any(needed):
            yield Cut(start, taken, needed)


def choose_batch_size(classifier: Classifier, device: str | None = None) -> int:
    """How many pictures to explain at once where nobody says. `device`: None for where the classifier is."""
    return ON_CPU if (device or classifier.device.type) == "cpu" else ON_DEVICE


T = TypeVar("T")

URGENT, LATER = 0, 1
# The model has a thread on each core beside these, and its threads wait for one another at each layer: these are to be the
# ones that are held up.
NICENESS = 10

_Task = tuple[int, int, Future[Any], Callable[[], Any]]


class Pool:
    """So many threads, as a context: at its end what has not begun is given up, what has is waited for, and they end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="gradcam-pixels")
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._numbers = itertools.count()  # of one urgency, the first comes first

    def submit(self, urgency: int, task: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """What will have the task's result: a new one, or that which is given."""
        future = future or Future()
        self._tasks.put((urgency, next(self._numbers), future, task))
        self._executor.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        _, _, future, task = self._tasks.get_nowait()  # there is one for each call
        try:
            future.set_result(task())
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    def __enter__(self) -> Pool:
        before = torch.get_num_threads()
        barrier = threading.Barrier(self._workers + 1)
        try:
            for _ in range(self._workers):
                self._executor.submit(_begin, barrier)
            barrier.wait()
        except BaseException:
            barrier.abort()
            self._executor.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)  # what a thread sets is the default of those that follow
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)


def _begin(barrier: threading.Barrier) -> None:
    torch.get_num_threads()  # the first call in a thread takes over the process's number
    torch.set_num_threads(1)  # a team of OpenMP's for each of these threads would only be in the model's way
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()


class _OpenCV:
    """How many hold it to one thread, and how many threads it had before."""

    lock, holders, before = threading.Lock(), 0, 0


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """OpenCV computes in the threads that call it alone; the last of overlapping contexts puts back what was."""
    from gradcam.images.opencv import cv2

    with _OpenCV.lock:
        if _OpenCV.holders == 0:
            _OpenCV.before = cv2.getNumThreads()
            cv2.setNumThreads(1)
        _OpenCV.holders += 1
    try:
        yield
    finally:
        with _OpenCV.lock:
            _OpenCV.holders -= 1
            if _OpenCV.holders == 0:
                cv2.setNumThreads(_OpenCV.before)
