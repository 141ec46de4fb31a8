"""Stores that let somebody wait: what is waited for is said once for each outage, through the logger `gradcam`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

LOG = logging.getLogger("gradcam")
NOTICE = 5.0  # seconds after which somebody is told what is waited for
STEP = 0.5  # seconds between two looks at what is open


@dataclass(eq=False)
class Request:
    """What is asked of a store. `reason`: why the last try failed; None as long as none did."""

    where: str
    bucket: str
    start: float = field(default_factory=time.monotonic)
    reason: str | None = None


class Watch:
    """Looks at the requests that are open, from a thread that is there as long as there are any.

    A client may try again by itself for minutes before it says that a store is not there, and a store that is only silent
    raises nothing at all: so it is the time that counts. Of a bucket that was told of nothing more is said before a
    request that began after that came to its end in good time.
    """

    def __init__(self) -> None:
        self._open: set[Request] = set()
        self._told: dict[str, float] = {}  # when that was, by bucket
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, where: str, bucket: str) -> Iterator[Request]:
        """While it is asked for."""
        request = Request(where, bucket)
        with self._lock:
            self._open.add(request)
            if self._thread is None or not self._thread.is_alive():  # a process that was forked has none of its own
                self._thread = threading.Thread(target=self._look, name="gradcam-stores", daemon=True)
                self._thread.start()
        try:
            yield request
        except BaseException:
            self._take_away(request)
            raise
        self._take_away(request, has_answer=True)

    def _take_away(self, request: Request, *, has_answer: bool = False) -> None:
        with self._lock:
            self._open.discard(request)
            if not has_answer or time.monotonic() - request.start >= NOTICE:
                return
            if request.start > self._told.get(request.bucket, request.start):
                del self._told[request.bucket]

    def _look(self) -> None:
        while True:
            threading.Event().wait(STEP)
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
                late = self._find_late(time.monotonic())
            for request in late:
                LOG.warning("%s", describe_wait(request))

    def _find_late(self, now: float) -> list[Request]:
        """The first request of each bucket that has taken long, and of which nobody was told."""
        late: dict[str, Request] = {}
        for request in self._open:
            if now - request.start >= NOTICE and request.bucket not in self._told:
                late.setdefault(request.bucket, request)
        self._told |= dict.fromkeys(late, now)
        return list(late.values())


def describe_wait(request: Request) -> str:
    """What is waited for, in one line."""
    if request.reason is None:
        return f"{request.where}: no full answer from the store for {NOTICE:.0f} s; waiting for it"
    return f"{request.where}: the store does not answer as it should ({request.reason}); waiting for it"


WATCH = Watch()
