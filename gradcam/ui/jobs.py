"""Run the computations of all browser tabs one after another, and stop computations that are no longer needed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.nn.modules.module import register_module_forward_pre_hook

from gradcam.options import Progress

Result = TypeVar("Result")
_running = threading.local()  # `_running.job` is the job of this thread.


class JobStopped(Exception):
    """Raised in a job to stop it, because its tab sent a newer question or was closed, or because the server ends."""


@dataclass
class Job:
    """The progress of the computation for one question, and whether the computation has been stopped."""

    completed: int = 0
    total: int = 0
    is_stopped: bool = False

    def report(self, completed: int, total: int) -> None:
        """Store the progress. Raise `JobStopped` if the job has been stopped."""
        self.completed, self.total = completed, total
        self.check()

    def check(self) -> None:
        """Raise `JobStopped` if the job has been stopped."""
        if self.is_stopped:
            raise JobStopped


@contextlib.contextmanager
def stop_between_modules() -> Iterator[None]:
    """Make stopped jobs end before the model's next module, because a whole forward pass may take long."""
    # The hook stays registered between jobs, because adding or removing a hook clears cached facts about models.
    handle = register_module_forward_pre_hook(
        lambda *_: job.check() if (job := getattr(_running, "job", None)) else None
    )
    try:
        yield
    finally:
        handle.remove()


class JobQueue:
    """A queue of the jobs of all tabs, which run one after another in a single thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gradcam-ui")  # The caches are not thread-safe.
        self._newest: dict[str, Job] = {}
        self._jobs: dict[Future[Any], Job] = {}  # unfinished jobs
        self._is_ending = False

    async def run(self, tab: str, work: Callable[[Progress], Result], is_disconnected: Callable[[], Any]) -> Result:
        """Run `work` in the thread and return its result. Raise `JobStopped` if the job is stopped."""
        if tab in self._newest:
            self._newest[tab].is_stopped = True
        job = self._newest[tab] = Job()

        def start() -> Result:
            _running.job = job
            try:
                job.check()
                return work(job.report)
            finally:
                _running.job = None
                job.check()  # If the stop caused an error, replace the error by `JobStopped`.

        if self._is_ending:
            raise JobStopped
        future = self._thread.submit(start)
        self._jobs[future] = job
        future.add_done_callback(lambda finished: self._jobs.pop(finished, None))
        computation = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([computation], timeout=0.3))[0]:
                if self._is_ending:  # Do not wait for the end of the computation.
                    raise JobStopped
                if not job.is_stopped and await is_disconnected():
                    job.is_stopped = True
            return computation.result()
        finally:
            if self._newest.get(tab) is job:
                del self._newest[tab]

    def progress(self, tab: str) -> tuple[int, int]:
        """Return the number of completed passes and of all passes of a tab's job; (0, 0) if the tab has no job."""
        job = self._newest.get(tab, Job())
        return job.completed, job.total

    def stop(self) -> None:
        """Stop all jobs without waiting for them. Signal handlers may call this method."""
        self._is_ending = True
        for job in list(self._jobs.values()):
            job.is_stopped = True

    def close(self, seconds: float = 1) -> bool:
        """Stop all jobs, and return whether they have ended within `seconds`."""
        self.stop()
        is_over = not wait(list(self._jobs), seconds).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        return is_over
