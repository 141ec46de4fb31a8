"""Pictures in stores: objects of their own, and parts of archives there, of which no more is fetched than is needed."""

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
from gradcam.storage.retry import refusal_of
from gradcam.storage.store import Store

FIRST, LARGEST = 2**16, 2**23  # bytes that are fetched at once: after a jump, and at most, where one reads on and on
TRUSTED = 10.0  # seconds for which an archive counts as the one that was listed, before it is looked at again


@dataclass(frozen=True, slots=True)
class StoreContent:
    """A picture that is an object of its own."""

    url: str
    path = None

    def read(self) -> bytes:
        with wording_store_errors():
            data = Store(self.url).read()
        if not data:
            raise ImageError("is empty")
        return data


class StoreArchive:
    """An archive in a store, as it was when it was listed. It can be sent to other processes."""

    def __init__(self, url: str, stamp: tuple[int, str] | None = None) -> None:
        self.name = url
        self._stamp = Store(url).stamp() if stamp is None else stamp
        self._looked_at = time.monotonic() if stamp is None else -math.inf
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_received, (self.name, self._stamp)

    @property
    def where(self) -> tuple[str, object]:
        return self.name, self._stamp

    def read_on(self) -> BinaryIO:
        """Its bytes, to be gone through. Raises what `Store` does."""
        return cast(BinaryIO, RangeFile(Store(self.name), self._stamp[0]))

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        with wording_store_errors("is in an archive that "):
            with self._lock:
                if time.monotonic() - self._looked_at >= TRUSTED:
                    if Store(self.name).stamp() != self._stamp:
                        raise ImageError("is in an archive that changed after it was listed")
                    self._looked_at = time.monotonic()
            yield cast(BinaryIO, RangeFile(Store(self.name), self._stamp[0], start, size))


@lru_cache(maxsize=64)
def _find_received(url: str, stamp: tuple[int, str]) -> StoreArchive:
    return StoreArchive(url, stamp)


class RangeFile(io.RawIOBase):
    """An object as a file to read and to seek in. What is fetched at once grows while it is read on and on. `start`,
    `expected`: where reading begins, and how much will be read."""

    def __init__(self, store: Store, size: int, start: int = 0, expected: int = FIRST) -> None:
        self._store, self._size, self._position, self._step = store, size, start, expected
        self._data, self._begin = b"", start  # what was fetched last, and where that lies

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, fewer at the end alone. Raises what `Store.read_range` does."""
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        pieces = []
        while wanted:
            at = self._position - self._begin  # in what was fetched last
            if not 0 <= at < len(self._data):
                if self._data:
                    is_near = len(self._data) <= at <= 2 * len(self._data)
                    self._step = min(2 * self._step, LARGEST) if is_near else FIRST
                most = min(max(wanted, self._step), self._size - self._position)
                self._data = self._store.read_range("", self._position, most)
                self._begin, at = self._position, 0
            piece = self._data[at : at + wanted]
            if not piece:
                break  # shorter than it was
            pieces.append(piece)
            self._position += len(piece)
            wanted -= len(piece)
        return b"".join(pieces)


@contextlib.contextmanager
def wording_store_errors(what: str = "") -> Iterator[None]:
    """What a store says of an object becomes one `ImageError` without its name. `what`: the words before the reason."""
    try:
        yield
    except FileNotFoundError:
        raise ImageError(f"{what}does not exist") from None
    except IsADirectoryError:
        raise ImageError(f"{what}is not a file") from None
    except PermissionError as error:
        raise ImageError(f"{what}cannot be read: the store denies access ({refusal_of(error)})") from None
    except OSError as error:
        if error.errno is None and what:  # of the archive's contents, from a decompressor
            raise
        raise ImageError(f"{what}cannot be opened ({refusal_of(error)})") from None


@contextlib.contextmanager
def blaming_store(url: str) -> Iterator[None]:
    """What a store says of an input becomes one `InputError` of one line that names it."""
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"{url}: the store denies access ({refusal_of(error)}); use credentials that allow listing and reading it"
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"{url}: does not exist ({refusal_of(error)})") from error
    except OSError as error:
        if error.errno is None:  # of the archive's contents, from a decompressor
            raise
        raise InputError(f"{url}: cannot be opened ({refusal_of(error)})") from error
