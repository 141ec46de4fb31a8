"""What goes wrong with stores: what passes is waited for, and what stays is said in one line."""

# tenacity would take as many lines: the time that is left cuts the last wait short, a store that was given up is not
# waited for again at once, and who waits is told so from a thread, since a client may be silent for minutes.

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from gradcam.errors import StoreError

LOG = logging.getLogger("gradcam")
NOTICE = 5.0  # seconds after which somebody is told what is waited for
STEP = 0.5  # seconds between two looks at what is open
PATIENCE = 60.0  # seconds that a store may fail before it counts as down
HURRY = 5.0  # the same for readers that have other things to do
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between two tries
# Waiting does not mend these.
LASTING = (
    FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError,
)  # fmt: skip
LASTING_NUMBERS = (errno.ENAMETOOLONG, errno.EINVAL, errno.EROFS)
# The clients of stores have errors of their own, by whose packages they are known: none is installed with this one.
CLIENTS = ("botocore", "aiobotocore", "aiohttp", "urllib3", "requests", "httpx", "azure", "google", "gcsfs", "adlfs")
CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError", "TokenRetrievalError",
    "DefaultCredentialsError", "ClientAuthenticationError", "NoAuthTokenError",
)  # fmt: skip
MISTAKES = ("ParamValidationError", "InvalidRegionError", "NoRegionError", "InvalidURL")
REFUSED, PASSING = (401, 403), (408, 425, 429)  # what HTTP answers

T = TypeVar("T")


@dataclass
class Outage:
    """A time in which every request to a bucket failed. `start`, `last`: when the first of them began, and the last
    failed. `is_silent`: requests end at the client's time limit, so that each costs that long."""

    start: float
    last: float
    reason: str
    is_silent: bool

    def error(self, where: str, now: float) -> StoreError:
        return StoreError(
            f"{where}: the store has not answered correctly for {now - self.start:.0f} s ({self.reason}); try again later"
        )


# By the bucket's URL: threads and `close` do not wait one after another.
_outages: dict[str, Outage] = {}
_thread = threading.local()


@contextlib.contextmanager
def hurrying() -> Iterator[None]:
    """Wait no longer than `HURRY` for a store in this thread."""
    _thread.patience = HURRY
    try:
        yield
    finally:
        del _thread.patience


@dataclass(eq=False)
class StoreRequest:
    """What is asked of a store. `reason`: why the last try failed; None as long as none did."""

    where: str
    bucket: str
    start: float = field(default_factory=time.monotonic)
    reason: str | None = None


class StoreWatch:
    """Looks at the requests that are open, from a thread: a store that is only silent raises nothing at all. Of a
    bucket that was told of nothing more is said before a request that began after that came to a timely end."""

    def __init__(self) -> None:
        self._open: set[StoreRequest] = set()
        self._told: dict[str, float] = {}  # when that was, by bucket
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, where: str, bucket: str) -> Iterator[StoreRequest]:
        """While it is asked for."""
        request = StoreRequest(where, bucket)
        with self._lock:
            self._open.add(request)
            if self._thread is None or not self._thread.is_alive():  # a process that was forked has none of its own
                self._thread = threading.Thread(target=self._look, name="gradcam-stores", daemon=True)
                self._thread.start()
        try:
            yield request
        except BaseException:
            with self._lock:
                self._open.discard(request)
            raise
        with self._lock:
            self._open.discard(request)
            is_soon = time.monotonic() - request.start < NOTICE
            if is_soon and request.start > self._told.get(bucket, request.start):
                del self._told[bucket]

    def _look(self) -> None:
        while True:
            threading.Event().wait(STEP)
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
                now = time.monotonic()
                late: dict[str, StoreRequest] = {}  # the first of each bucket that nobody was told of
                for request in self._open:
                    if now - request.start >= NOTICE and request.bucket not in self._told:
                        late.setdefault(request.bucket, request)
                self._told |= dict.fromkeys(late, now)
            for request in late.values():
                found = f"no complete answer from the store for {NOTICE:.0f} s"
                if request.reason is not None:
                    found = f"the store does not answer correctly ({request.reason})"
                LOG.warning("%s: %s; still waiting", request.where, found)


WATCH = StoreWatch()


def patiently(call: Callable[[], T], where: str) -> T:
    """Return what the call gives, and try again, with growing waits, while the store fails in a way that may pass.

    `where`: what the error is said of. Raises what the store says of the object itself, an `OSError` of `LASTING`; and
    `StoreError` for credentials, for an unknown address, and for a store that has failed for `PATIENCE`. Until such a
    store answers, one try is all; none if it was silent.
    """
    wait, start, bucket = FIRST_WAIT, time.monotonic(), "/".join(where.split("/")[:3])
    patience = min(PATIENCE, getattr(_thread, "patience", PATIENCE))
    outage = _outages.get(bucket)
    if outage is not None and start - outage.last >= PATIENCE:
        outage = _outages.pop(bucket, None)
    elif outage is not None and outage.is_silent and outage.last - outage.start >= patience:
        raise outage.error(where, start)
    with WATCH.over(where, bucket) as request:
        while True:
            try:
                with _translated(where):
                    found = call()
                _outages.pop(bucket, None)
                return found
            except Exception as error:
                if not is_passing(error):
                    raise
                request.reason, now = refusal_of(error), time.monotonic()
                outage = _outages.setdefault(bucket, Outage(start, now, request.reason, is_silent=False))
                outage.last, outage.reason, outage.is_silent = now, request.reason, _is_timeout(error)
                left = patience - (now - min(start, outage.start))
                if left <= 0:
                    raise outage.error(where, now) from error
            time.sleep(min(wait, left))
            wait = min(2 * wait, LONGEST_WAIT)


def _is_timeout(error: BaseException) -> bool:
    """Return whether a request ended at a time limit, the client's or the system's."""
    return isinstance(error, TimeoutError) or "Timeout" in type(error).__name__


def is_passing(error: BaseException) -> bool:
    """Whether the same may succeed a little later."""
    if isinstance(error, LASTING):
        return False
    if isinstance(error, OSError):
        return error.errno not in LASTING_NUMBERS
    import asyncio

    is_of_a_client = any(kind.__module__.partition(".")[0] in CLIENTS for kind in type(error).__mro__)
    return isinstance(error, asyncio.TimeoutError) or is_of_a_client


def refusal_of(error: BaseException) -> str:
    """The reason alone, in one line, for the middle of a sentence."""
    unnamed = "the time limit was reached" if _is_timeout(error) else type(error).__name__
    reason = getattr(error, "strerror", None) or str(error) or unnamed
    line = " ".join(str(reason).split()).rstrip(".")
    return line if len(line) <= 200 else line[:197] + "..."


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """What a client raises that no waiting mends becomes a `StoreError`, or an `OSError` of the object."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        if name in CREDENTIALS:
            raise StoreError(
                f"{where}: there are no valid credentials ({refusal_of(error)}); set them in the environment, such as "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        if name in MISTAKES:
            raise StoreError(f"{where}: the store cannot be used ({refusal_of(error)})") from error
        status = getattr(error, "status", None)  # of HTTP, as aiohttp has it
        if isinstance(status, int) and 400 <= status < 500 and status not in PASSING:
            kind = PermissionError if status in REFUSED else OSError
            raise kind(errno.EACCES if status in REFUSED else errno.EINVAL, refusal_of(error)) from error
        raise
