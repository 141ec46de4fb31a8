"""Read images and archives from an object store."""

from __future__ import annotations

import contextlib
import io
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, cast

from gradcam.errors import ImageError, InputError
from gradcam.storage.retry import describe_refusal
from gradcam.storage.store import Store

# After a seek, the first read fetches MIN_FETCH_BYTES. Each sequential read fetches more, up to MAX_FETCH_BYTES.
MIN_FETCH_BYTES, MAX_FETCH_BYTES = 2**16, 2**23
# If the last check of an archive is at least this old, opening the archive checks it for changes again.
RECHECK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StoreImage:
    """An image that is stored as a separate object."""

    url: str
    path = None

    def read(self) -> bytes:
        with translate_image_store_errors():
            data = Store(self.url).read()
        if not data:
            raise ImageError("is empty")
        return data


class StoreArchive:
    """An archive in a store. The object can be sent to other processes.

    `open` raises `ImageError` if the archive changed after it was listed.
    """

    def __init__(self, url: str, stamp: tuple[int, str] | None = None) -> None:
        self.name = url
        self._stamp = Store(url).stamp() if stamp is None else stamp
        self._checked_at = time.monotonic() if stamp is None else -math.inf
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reuse_archive, (self.name, self._stamp)

    @property
    def where(self) -> tuple[str, object]:
        return self.name, self._stamp

    def read_on(self) -> BinaryIO:
        """Open the archive for sequential reading. Raises the errors of `Store`."""
        return cast(BinaryIO, RangeFile(Store(self.name), self._stamp[0]))

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        with translate_image_store_errors("is in an archive that "):
            with self._lock:
                if time.monotonic() - self._checked_at >= RECHECK_SECONDS:
                    if Store(self.name).stamp() != self._stamp:
                        raise ImageError("is in an archive that changed after it was listed")
                    self._checked_at = time.monotonic()
            yield cast(BinaryIO, RangeFile(Store(self.name), self._stamp[0], start, size))


@lru_cache(maxsize=64)
def _reuse_archive(url: str, stamp: tuple[int, str]) -> StoreArchive:
    return StoreArchive(url, stamp)


class RangeFile(io.RawIOBase):
    """A seekable file that reads an object in a store.

    During sequential reads, the number of bytes per request grows. The caller begins to read at `start`, and expects to
    read `expected` bytes.
    """

    def __init__(self, store: Store, size: int, start: int = 0, expected: int = MIN_FETCH_BYTES) -> None:
        self._store, self._size, self._position, self._fetch_size = store, size, start, expected
        # The bytes of the last request, and their position in the object.
        self._data, self._data_start = b"", start

    def readable(self) -> bool:
        return True

    seekable = readable

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes, fewer only at the end of the object. Raises the errors of `Store.read_range`."""
        remaining = max(0, self._size - self._position)
        missing = remaining if size is None or size < 0 else min(size, remaining)
        pieces = []
        while missing:
            offset = self._position - self._data_start  # The position within `self._data`.
            if not 0 <= offset < len(self._data):
                if self._data:
                    is_near = len(self._data) <= offset <= 2 * len(self._data)
                    self._fetch_size = min(2 * self._fetch_size, MAX_FETCH_BYTES) if is_near else MIN_FETCH_BYTES
                count = min(max(missing, self._fetch_size), self._size - self._position)
                self._data = self._store.read_range("", self._position, count)
                self._data_start, offset = self._position, 0
            piece = self._data[offset : offset + missing]
            if not piece:
                break  # The object has become shorter since it was listed.
            pieces.append(piece)
            self._position += len(piece)
            missing -= len(piece)
        return b"".join(pieces)


@contextlib.contextmanager
def translate_image_store_errors(prefix: str = "") -> Iterator[None]:
    """Turn a store's error into an `ImageError` that does not name the object. Put `prefix` before the reason."""
    try:
        yield
    except FileNotFoundError:
        raise ImageError(f"{prefix}does not exist") from None
    except IsADirectoryError:
        raise ImageError(f"{prefix}is not a file") from None
    except PermissionError as error:
        raise ImageError(f"{prefix}cannot be read: the store denies access ({describe_refusal(error)})") from None
    except OSError as error:
        if error.errno is None and prefix:  # An OSError without errno comes from a decompressor, not from the store.
            raise
        raise ImageError(f"{prefix}cannot be opened ({describe_refusal(error)})") from None


@contextlib.contextmanager
def translate_input_store_errors(url: str) -> Iterator[None]:
    """Turn a store's error into an `InputError` with a one-line message that names the input."""
    try:
        yield
    except PermissionError as error:
        advice = "use credentials that allow listing and reading it"
        raise InputError(f"{url}: the store denies access ({describe_refusal(error)}); {advice}") from error
    except FileNotFoundError as error:
        raise InputError(f"{url}: does not exist ({describe_refusal(error)})") from error
    except OSError as error:
        if error.errno is None:  # An OSError without errno comes from a decompressor, not from the store.
            raise
        raise InputError(f"{url}: cannot be opened ({describe_refusal(error)})") from error
