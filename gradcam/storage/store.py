"""A folder in a store: listed, read and written through fsspec, by names relative to it."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradcam.errors import StoreError, to_pip_command
from gradcam.images.files import is_url, to_path
from gradcam.storage.retry import patiently, refusal_of

SILENCE = 20.0  # seconds without a byte after which a request has failed
REMOVERS = 16  # requests at once: each takes a while, and costs next to nothing here
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
# What stores call the state of an object; the best that one has comes first.
MARKS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")


@dataclass(frozen=True)
class Store:
    """What lies below a URL, such as `s3://bucket/photos`; several threads may use it at once. It knows objects alone:
    a folder is there as long as something is in it. All methods raise `StoreError` where the store cannot be asked, and
    `FileNotFoundError` and `PermissionError` for what it says of one object, or of the bucket."""

    url: str
    _fs = property(lambda self: self._place[0])
    _root = property(lambda self: self._place[1])

    def __post_init__(self) -> None:
        protocol, mark, path = self.url.rstrip("/").partition(":")
        object.__setattr__(self, "url", f"{protocol.lower()}{mark}{path or '//'}")

    def __str__(self) -> str:
        return f"{self.url}/" if not self.url.endswith("://") else self.url

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}  # each process has a client of its own

    @property
    def parent(self) -> Store:
        return Store(self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def below(self, name: str) -> Store:
        return Store(self._show(name))

    def check(self) -> None:
        """Raises `StoreError` for a URL that cannot be followed; the store itself is not asked."""
        _ = self._place

    def find(self, prefix: str = "") -> dict[str, int]:
        """The names of all objects in it, or below the folder `prefix`, in the order of their code points, and their
        sizes in bytes. Empty where there is none; a bucket that does not exist is an error."""
        found: dict[str, dict[str, Any]] = self._ask(lambda: self._list(self._to_path(prefix)), prefix)
        start = len(self._root) + 1
        sizes = {
            path[start:] if self._root else path.lstrip("/"): int(entry.get("size") or 0)
            for path, entry in found.items()
            if entry.get("type") == "file"
        }
        return {name: sizes[name] for name in sorted(sizes) if name and not name.endswith("/")}

    def list_names(self, folder: str = "") -> list[str]:
        """What is directly in a folder, in the order of code points: objects, and folders, whose names end with "/";
        relative to the store. Empty where there is nothing; a bucket that does not exist is an error."""
        path, names = self._to_path(folder), []
        for entry in self._ask(lambda: self._look_into(path), folder):
            name = str(entry["name"]).removeprefix(self._root).strip("/")
            if str(entry["name"]).strip("/") != path.strip("/"):  # that marks the folder, or stands in its place
                names.append(name if entry.get("type") == "file" else f"{name}/")
        return sorted(names)

    def is_file(self, name: str = "") -> bool:
        try:
            return self._info(name).get("type") == "file"
        except FileNotFoundError:
            return False

    def stamp(self, name: str = "") -> tuple[int, str]:
        """The size of an object, and what tells two states of it apart. Raises `FileNotFoundError`."""
        info = self._info(name)
        mark = next((info[key] for key in MARKS if key in info), "")
        return int(info.get("size") or 0), str(mark)

    def read(self, name: str = "") -> bytes:
        return bytes(self._ask(lambda: self._fs.cat_file(self._to_path(name)), name))

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """So many bytes of an object from there on; fewer where it ends before."""
        if not size:
            return b""
        return bytes(self._ask(lambda: self._fs.cat_file(self._to_path(name), start=start, end=start + size), name))

    def write(self, name: str, data: bytes) -> None:
        """Make an object of that name, in place of one that there is: whole, or not at all."""

        def put() -> None:
            path = self._to_path(name)
            parent = posixpath.dirname(path)
            if parent and self._needs_folders:
                self._fs.makedirs(parent, exist_ok=True)
            self._fs.pipe_file(path, data)

        self._ask(put, name)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        paths = {self._to_path(name): data for name, data in files.items()}
        if paths and not self._needs_folders:
            self._ask(lambda: self._fs.pipe(paths), next(iter(files)))
        else:
            for name, data in files.items():
                self.write(name, data)

    def upload(self, name: str, file: str) -> None:
        self._ask(lambda: self._fs.put_file(file, self._to_path(name)), name)

    def remove(self, names: Iterable[str]) -> None:

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._ask(lambda: self._fs.rm_file(self._to_path(name)), name)

        with ThreadPoolExecutor(REMOVERS) as pool:
            deque(pool.map(remove, names), 0)  # raises what one of them raised

    def _list(self, path: str) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return dict(self._fs.find(path, detail=True))
        except NotADirectoryError:
            return {}
        finally:
            self._fs.invalidate_cache()  # of a million objects it is a gigabyte

    def _look_into(self, path: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(path, detail=True))
        except NotADirectoryError:
            return []
        except FileNotFoundError:
            self._list(path)  # raises the same where it is the bucket that is not there
            return []

    def _info(self, name: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        return dict(self._ask(lambda: self._fs.info(self._to_path(name)), name))

    def _ask(self, call: Any, name: str) -> Any:
        return patiently(call, self._show(name))

    def _show(self, name: str) -> str:
        if not name:
            return self.url
        return f"{self.url}{name}" if self.url.endswith("://") else f"{self.url}/{name}"

    def _to_path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root and name else self._root or name

    @property
    def _needs_folders(self) -> bool:
        return "memory" in str(self._fs.protocol) or "ftp" in str(self._fs.protocol)

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system of fsspec's, and the path in it. Raises `StoreError` for a URL that it cannot follow."""
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        protocol, options = self.url.partition(":")[0].lower(), {}
        limits: dict[str, Any] = {"connect_timeout": SILENCE, "read_timeout": SILENCE}
        if protocol in ("s3", "s3a"):
            if "AWS_MAX_ATTEMPTS" not in os.environ:
                # Its client would try again for minutes, in silence, what `patiently` tries again anyway. Once it may: of
                # a long listing it has to ask for one page again, and we for all of it.
                limits["retries"] = {"max_attempts": 1}
            options = {"config_kwargs": limits | conf.get(protocol, {}).get("config_kwargs", {})}
        elif protocol in ("http", "https"):
            with contextlib.suppress(ImportError):  # said below
                import aiohttp

                limits = {"timeout": aiohttp.ClientTimeout(total=None, connect=SILENCE, sock_read=SILENCE)}
                options = {"client_kwargs": limits | conf.get(protocol, {}).get("client_kwargs", {})}
        try:
            fs, path = url_to_fs(self.url, **options)
        except ImportError as error:
            remedy = to_pip_command(EXTRAS[protocol]) if protocol in EXTRAS else "see the documentation of fsspec"
            raise StoreError(
                f"{self.url}: {protocol}:// needs an additional package: {remedy} ({refusal_of(error)})"
            ) from error
        except ValueError as error:
            raise StoreError(
                f"{self.url}: is not a supported URL ({refusal_of(error)}); use s3://, gs://, az:// or another protocol of "
                "fsspec"
            ) from error
        return fs, str(path).rstrip("/")


def to_place(text: str) -> Path | Store:
    """What somebody means by that: a URL is a store, and anything else, `file://` too, a path."""
    return Store(text) if is_url(text) else Path(to_path(text))


__all__ = ["Store", "is_url", "to_path", "to_place"]
