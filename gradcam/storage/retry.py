"""Retry requests to stores after transient errors, and describe permanent errors in one line."""

# The package tenacity would not make this module shorter, because it lacks three features: the last wait ends at the
# time limit; while a store is down, requests fail without retries; and a thread warns about slow requests, for which a
# client may log nothing for minutes.

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
NOTICE_SECONDS = 5.0  # If a request takes longer, a warning is logged.
POLL_SECONDS = 0.5  # The interval between two checks of the open requests.
RETRY_SECONDS = 60.0  # A store that fails for this long counts as down.
SHORT_RETRY_SECONDS = 5.0  # Within `limit_retries`, this value replaces RETRY_SECONDS.
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 8.0  # The limits of the wait between two tries.
# After these errors, a retry cannot succeed.
PERMANENT_ERRORS = (
    FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError,
)  # fmt: skip
PERMANENT_ERRNOS = (errno.ENAMETOOLONG, errno.EINVAL, errno.EROFS)
# The client libraries of stores are optional dependencies, so their errors are recognised by the package name.
CLIENT_PACKAGES = (
    "botocore", "aiobotocore", "aiohttp", "urllib3", "requests", "httpx", "azure", "google", "gcsfs", "adlfs",
)  # fmt: skip
CREDENTIAL_ERRORS = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError", "TokenRetrievalError",
    "DefaultCredentialsError", "ClientAuthenticationError", "NoAuthTokenError",
)  # fmt: skip
CONFIGURATION_ERRORS = ("ParamValidationError", "InvalidRegionError", "NoRegionError", "InvalidURL")
DENIED_STATUSES, TRANSIENT_STATUSES = (401, 403), (408, 425, 429)  # HTTP status codes

T = TypeVar("T")


@dataclass
class Outage:
    """A period in which every request to a bucket failed.

    `start` is the time at which the first failed request began. `last` is the time of the latest failure. If
    `is_silent` is True, the store does not respond at all, so each request lasts until the client's time limit.
    """

    start: float
    last: float
    reason: str
    is_silent: bool

    def error(self, url: str, now: float) -> StoreError:
        problem = f"the store has not answered correctly for {now - self.start:.0f} s ({self.reason})"
        return StoreError(f"{url}: {problem}; try again later")


# The current outages, by bucket URL. Threads share the outages, so that not every thread waits for the same store.
_outages: dict[str, Outage] = {}
_thread_state = threading.local()


@contextlib.contextmanager
def limit_retries() -> Iterator[None]:
    """Limit retries in this thread to `SHORT_RETRY_SECONDS`."""
    _thread_state.patience = SHORT_RETRY_SECONDS
    try:
        yield
    finally:
        del _thread_state.patience


@dataclass(eq=False)
class StoreRequest:
    """An open request to a store. `reason` is the cause of the last failed try, or None if no try has failed."""

    url: str
    bucket: str
    start: float = field(default_factory=time.monotonic)
    reason: str | None = None


class StoreWatch:
    """Warns about slow requests in a background thread, because a store that does not respond raises no error.

    There is one warning per bucket. When a later request to the bucket has ended in time, the bucket may get a new
    warning.
    """

    def __init__(self) -> None:
        self._open: set[StoreRequest] = set()
        self._warned_at: dict[str, float] = {}  # The time of the last warning, by bucket.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def track(self, url: str, bucket: str) -> Iterator[StoreRequest]:
        """Watch a request while the block runs."""
        request = StoreRequest(url, bucket)
        with self._lock:
            self._open.add(request)
            if self._thread is None or not self._thread.is_alive():  # A forked process does not inherit the thread.
                self._thread = threading.Thread(None, self._warn_about_late_requests, "gradcam-stores", daemon=True)
                self._thread.start()
        try:
            yield request
            with self._lock:
                is_timely = time.monotonic() - request.start < NOTICE_SECONDS
                if is_timely and request.start > self._warned_at.get(bucket, request.start):
                    del self._warned_at[bucket]
        finally:
            with self._lock:
                self._open.discard(request)

    def _warn_about_late_requests(self) -> None:
        while True:
            threading.Event().wait(POLL_SECONDS)
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
                now = time.monotonic()
                requests = [request for request in self._open if now - request.start >= NOTICE_SECONDS]
                # Select one late request for each bucket that has no warning yet.
                late = {request.bucket: request for request in requests if request.bucket not in self._warned_at}
                self._warned_at |= dict.fromkeys(late, now)
            for request in late.values():
                problem = f"no complete answer from the store for {NOTICE_SECONDS:.0f} s"
                if request.reason is not None:
                    problem = f"the store does not answer correctly ({request.reason})"
                LOG.warning("%s: %s; still waiting", request.url, problem)


WATCH = StoreWatch()


def call_with_retries(call: Callable[[], T], url: str) -> T:
    """Return the result of `call`. After a transient error, wait and try again.

    The wait grows with each try. Raises `OSError` if the store reports a permanent error for the object itself. Raises
    `StoreError`, which names the URL, if credentials are missing, if the configuration is invalid, or if the store has
    failed for `RETRY_SECONDS`. Such a store counts as down. While a store is down, each call tries only once. If the
    store does not respond at all, calls raise the error without a try.
    """
    wait, start, bucket = MIN_WAIT_SECONDS, time.monotonic(), "/".join(url.split("/")[:3])
    patience = min(RETRY_SECONDS, getattr(_thread_state, "patience", RETRY_SECONDS))
    outage = _outages.get(bucket)
    if outage is not None and start - outage.last >= RETRY_SECONDS:
        outage = _outages.pop(bucket, None)
    elif outage is not None and outage.is_silent and outage.last - outage.start >= patience:
        raise outage.error(url, start)
    with WATCH.track(url, bucket) as request:
        while True:
            try:
                with _translate_errors(url):
                    result = call()
                _outages.pop(bucket, None)
                return result
            except Exception as error:
                if not is_transient(error):
                    raise
                request.reason, now = describe_refusal(error), time.monotonic()
                outage = _outages.setdefault(bucket, Outage(start, now, request.reason, is_silent=False))
                outage.last, outage.reason, outage.is_silent = now, request.reason, _is_timeout(error)
                remaining = patience - (now - min(start, outage.start))
                if remaining <= 0:
                    raise outage.error(url, now) from error
            time.sleep(min(wait, remaining))
            wait = min(2 * wait, MAX_WAIT_SECONDS)


def _is_timeout(error: BaseException) -> bool:
    """Return whether a request ended at a time limit of the client or of the system."""
    return isinstance(error, TimeoutError) or "Timeout" in type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    if isinstance(error, PERMANENT_ERRORS):
        return False
    if isinstance(error, OSError):
        return error.errno not in PERMANENT_ERRNOS
    import asyncio

    is_client_error = any(kind.__module__.partition(".")[0] in CLIENT_PACKAGES for kind in type(error).__mro__)
    return isinstance(error, asyncio.TimeoutError) or is_client_error


def describe_refusal(error: BaseException) -> str:
    """Return the reason for an error as a one-line phrase for a message."""
    fallback = "the time limit was reached" if _is_timeout(error) else type(error).__name__
    reason = getattr(error, "strerror", None) or str(error) or fallback
    line = " ".join(str(reason).split()).rstrip(".")
    return line if len(line) <= 200 else line[:197] + "..."


@contextlib.contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn a client's permanent error into a `StoreError` or, if only the object is affected, an `OSError`."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        if name in CREDENTIAL_ERRORS:
            advice = "set them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise StoreError(f"{url}: there are no valid credentials ({describe_refusal(error)}); {advice}") from error
        if name in CONFIGURATION_ERRORS:
            raise StoreError(f"{url}: the store cannot be used ({describe_refusal(error)})") from error
        status = getattr(error, "status", None)  # The errors of aiohttp have the HTTP status code in this attribute.
        if isinstance(status, int) and 400 <= status < 500 and status not in TRANSIENT_STATUSES:
            kind = PermissionError if status in DENIED_STATUSES else OSError
            raise kind(errno.EACCES if status in DENIED_STATUSES else errno.EINVAL, describe_refusal(error)) from error
        raise
