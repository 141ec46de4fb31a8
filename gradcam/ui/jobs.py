"""One computation at a time; of those that a tab asks for, the newest wins; whoever goes away is not computed for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from gradcam.options import Progress

Result = TypeVar("Result")


class Stopped(Exception):
    """A newer question took the place of this one, or nobody waits for it any more."""


@dataclass
class Job:
    """One question of a tab, and how far it is."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False

    def tell(self, done: int, total: int) -> None:
        """Hear of passes done. Raises `Stopped` where nobody waits for more."""
        self.done, self.total = done, total
        if self.is_stopped:
            raise Stopped


class Jobs:
    """The questions of all tabs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gradcam-ui")  # of models and pictures, one thing at a time
        self._newest: dict[str, Job] = {}
        self._jobs: dict[Future[Any], Job] = {}  # those that are not over
        self._is_ending = False

    async def run(self, tab: str, work: Callable[[Progress], Result], is_gone: Callable[[], Any]) -> Result:
        """What the work gives. Raises `Stopped`, and whatever the work does."""
        if tab in self._newest:
            self._newest[tab].is_stopped = True
        job = self._newest[tab] = Job()

        def start() -> Result:
            job.tell(0, 0)
            return work(job.tell)

        if self._is_ending:
            raise Stopped
        future = self._thread.submit(start)
        self._jobs[future] = job
        future.add_done_callback(lambda it: self._jobs.pop(it, None))
        computing = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([computing], timeout=0.3))[0]:
                if self._is_ending:  # which waits for no pass that takes long
                    raise Stopped
                if not job.is_stopped and await is_gone():
                    job.is_stopped = True
            return computing.result()
        finally:
            if self._newest.get(tab) is job:
                del self._newest[tab]

    def progress(self, tab: str) -> tuple[int, int]:
        """How much of a tab's question is done, of how much; of none, 0 of 0."""
        job = self._newest.get(tab, Job())
        return job.done, job.total

    def stop(self) -> None:
        """Compute no more; whoever waits is told at once. A handler of signals may call it."""
        self._is_ending = True
        for job in list(self._jobs.values()):
            job.is_stopped = True

    def close(self, seconds: float = 1) -> bool:
        """Compute no more. Whether all is over, after so many seconds at most."""
        self.stop()
        is_over = not wait(list(self._jobs), seconds).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        return is_over
