"""Threads for pixels: they leave the cores to the model where both want them, and do first what is waited for most."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

URGENT, LATER = 0, 1
NICENESS = 10  # of these threads, against the model's

_Task = tuple[int, int, Future[Any], Callable[[], Any]]


class Pool:
    """So many threads, as a context: at its end what has not begun is given up, what has is waited for, and they end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="gradcam-pixels")
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._numbers = itertools.count()  # of one urgency, the first comes first

    def submit(self, urgency: int, task: Callable[[], T]) -> Future[T]:
        """Have it done, before all that are less urgent."""
        future: Future[T] = Future()
        self._tasks.put((urgency, next(self._numbers), future, task))
        self._executor.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        _, _, future, task = self._tasks.get_nowait()  # there is one for each call
        try:
            result = task()
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)
        else:
            future.set_result(result)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)


def _begin(barrier: threading.Barrier) -> None:
    """Settle a new thread, and wait until all are."""
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

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.before = 0


_opencv = _OpenCV()


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """OpenCV computes in the threads that call it alone; the last of overlapping contexts puts back what was."""
    from gradcam.opencv import cv2

    with _opencv.lock:
        if _opencv.holders == 0:
            _opencv.before = cv2.getNumThreads()
            cv2.setNumThreads(1)
        _opencv.holders += 1
    try:
        yield
    finally:
        with _opencv.lock:
            _opencv.holders -= 1
            if _opencv.holders == 0:
                cv2.setNumThreads(_opencv.before)
