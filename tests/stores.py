"""Object stores for tests: a file system that refuses what object stores cannot do, and fails on request."""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from gradcam.storage import retry as failures

FSSPEC_VERSION = tuple(int(part) for part in fsspec.__version__.split(".")[:2])


class ObjectStore(MemoryFileSystem):
    """The file system of `objects://`, which behaves like an object store.

    Nothing can be appended or renamed, and no object is visible before it is complete. `failures` are the errors that
    the next requests raise, in order. `requests` has (operation, path) of each.
    """

    protocol = ("objects",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[BaseException]] = []
    requests: ClassVar[list[tuple[str, str]]] = []
    written: ClassVar[list[str]] = []
    _guard: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = str(path)
        return "/" + text.removeprefix("objects://").strip("/") if text.strip("/") else ""

    def _request(self, request: str, path: str) -> None:
        with self._guard:
            self.requests.append((request, str(path)))
            error = self.failures.pop(0) if self.failures else None
        if error is not None:
            raise error

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._request("list", path)
        return super().find(path, *args, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._request("read", path)
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        self._request("write", path)
        self.written.append(self._strip_protocol(path))
        super().pipe_file(path, value)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._request("look", path)
        return super().info(path, **kwargs)

    def rm_file(self, path: str) -> None:
        self._request("remove", path)
        super().rm_file(path)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "a" in mode or "+" in mode:
            raise NotImplementedError("nothing can be added to an object")
        return super()._open(path, mode, *args, **kwargs)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")

    def cp_file(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("objects are not copied here")


fsspec.register_implementation("objects", ObjectStore, clobber=True)


def down() -> OSError:
    return ConnectionError(errno.ECONNREFUSED, "Connection refused")


@contextmanager
def objects() -> Iterator[type[ObjectStore]]:
    """Provide an empty store under `objects://`."""
    for state in (ObjectStore.store, ObjectStore.failures, ObjectStore.requests, ObjectStore.written):
        state.clear()
    ObjectStore.pseudo_dirs[:] = [""]
    yield ObjectStore
    ObjectStore.store.clear()
    ObjectStore.failures.clear()
    failures._outages.clear()
