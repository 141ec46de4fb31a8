"""List, read and write a folder in an object store through fsspec."""

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
from gradcam.storage.retry import call_with_retries, describe_refusal

REQUEST_TIMEOUT_SECONDS = 20.0  # A request fails if no byte arrives for this time.
MAX_CONCURRENT_REMOVALS = 16  # Removals mostly wait for the store, so many can run at once.
EXTRAS_BY_PROTOCOL = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
EXTRAS_BY_PROTOCOL |= dict.fromkeys(("az", "abfs", "abfss"), "azure")
# fsspec's file systems report the version of an object under one of these keys. The most reliable key comes first.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")


@dataclass(frozen=True)
class Store:
    """A folder in an object store, given by a URL such as `s3://bucket/photos`.

    Names are relative to the URL. Several threads may use a store at once. A store has only objects: a folder exists
    while it contains an object. All methods raise `StoreError` if the store cannot be reached. If the store reports
    that an object or the bucket is missing or forbidden, methods raise `FileNotFoundError` or `PermissionError`.
    """

    url: str
    _fs = property(lambda self: self._file_system_and_root[0])
    _root = property(lambda self: self._file_system_and_root[1])

    def __post_init__(self) -> None:
        protocol, colon, path = self.url.rstrip("/").partition(":")
        object.__setattr__(self, "url", f"{protocol.lower()}{colon}{path or '//'}")

    def __str__(self) -> str:
        return f"{self.url}/" if not self.url.endswith("://") else self.url

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}  # Leave out the client, because each process needs its own.

    @property
    def parent(self) -> Store:
        return Store(self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def below(self, name: str) -> Store:
        return Store(self._join_url(name))

    def check(self) -> None:
        """Raise `StoreError` for an unusable URL, without a request to the store."""
        _ = self._file_system_and_root

    def find(self, prefix: str = "") -> dict[str, int]:
        """Return the names and sizes (in bytes) of all objects below the folder `prefix`, sorted by code points.

        If there are no objects, the result is empty. If the bucket does not exist, an error is raised.
        """
        entries: dict[str, dict[str, Any]] = self._request(lambda: self._list_objects(self._to_path(prefix)), prefix)
        start = len(self._root) + 1
        sizes = {
            path[start:] if self._root else path.lstrip("/"): int(entry.get("size") or 0)
            for path, entry in entries.items()
            if entry.get("type") == "file"
        }
        return {name: sizes[name] for name in sorted(sizes) if name and not name.endswith("/")}

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names of the objects and folders directly in a folder, sorted by code points.

        Names are relative to the store. Names of folders end with "/". If there are no objects, the result is empty. If
        the bucket does not exist, an error is raised.
        """
        path, names = self._to_path(folder), []
        for entry in self._request(lambda: self._list_folder(path), folder):
            name = str(entry["name"]).removeprefix(self._root).strip("/")
            # Some listings contain the folder itself, or an object with the folder's name. Skip such entries.
            if str(entry["name"]).strip("/") != path.strip("/"):
                names.append(name if entry.get("type") == "file" else f"{name}/")
        return sorted(names)

    def is_file(self, name: str = "") -> bool:
        try:
            return self._info(name).get("type") == "file"
        except FileNotFoundError:
            return False

    def stamp(self, name: str = "") -> tuple[int, str]:
        """Return the size of an object, and a text that changes with its contents. Raises `FileNotFoundError`."""
        info = self._info(name)
        version = next((info[key] for key in VERSION_KEYS if key in info), "")
        return int(info.get("size") or 0), str(version)

    def read(self, name: str = "") -> bytes:
        return bytes(self._request(lambda: self._fs.cat_file(self._to_path(name)), name))

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Return `size` bytes of an object from position `start`, or fewer if the object ends earlier."""
        if not size:
            return b""
        return bytes(self._request(lambda: self._fs.cat_file(self._to_path(name), start=start, end=start + size), name))

    def write(self, name: str, data: bytes) -> None:
        """Write or replace an object, completely or not at all."""

        def put() -> None:
            path = self._to_path(name)
            parent = posixpath.dirname(path)
            if parent and self._needs_folders:
                self._fs.makedirs(parent, exist_ok=True)
            self._fs.pipe_file(path, data)

        self._request(put, name)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        paths = {self._to_path(name): data for name, data in files.items()}
        if paths and not self._needs_folders:
            self._request(lambda: self._fs.pipe(paths), next(iter(files)))
        else:
            for name, data in files.items():
                self.write(name, data)

    def upload(self, name: str, file: str) -> None:
        self._request(lambda: self._fs.put_file(file, self._to_path(name)), name)

    def remove(self, names: Iterable[str]) -> None:

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._request(lambda: self._fs.rm_file(self._to_path(name)), name)

        with ThreadPoolExecutor(MAX_CONCURRENT_REMOVALS) as pool:
            # The deque consumes the results, which raises the exception of a failed removal.
            deque(pool.map(remove, names), 0)

    def _list_objects(self, path: str) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return dict(self._fs.find(path, detail=True))
        except NotADirectoryError:
            return {}
        finally:
            self._fs.invalidate_cache()  # Drop fsspec's cached listing, which takes a gigabyte for a million objects.

    def _list_folder(self, path: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(path, detail=True))
        except NotADirectoryError:
            return []
        except FileNotFoundError:
            self._list_objects(path)  # This raises FileNotFoundError again if the bucket does not exist.
            return []

    def _info(self, name: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        return dict(self._request(lambda: self._fs.info(self._to_path(name)), name))

    def _request(self, call: Any, name: str) -> Any:
        return call_with_retries(call, self._join_url(name))

    def _join_url(self, name: str) -> str:
        if not name:
            return self.url
        return f"{self.url}{name}" if self.url.endswith("://") else f"{self.url}/{name}"

    def _to_path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root and name else self._root or name

    @property
    def _needs_folders(self) -> bool:
        return "memory" in str(self._fs.protocol) or "ftp" in str(self._fs.protocol)

    @cached_property
    def _file_system_and_root(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in this file system. Raises `StoreError` for an unsupported URL."""
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        protocol, options = self.url.partition(":")[0].lower(), {}
        seconds = REQUEST_TIMEOUT_SECONDS
        limits: dict[str, Any] = {"connect_timeout": seconds, "read_timeout": seconds}
        if protocol in ("s3", "s3a"):
            if "AWS_MAX_ATTEMPTS" not in os.environ:
                # Limit botocore's retries, because it would retry silently for minutes, and `call_with_retries` already
                # retries. Keep one retry of botocore, because it repeats only one page of a long listing.
                limits["retries"] = {"max_attempts": 1}
            options = {"config_kwargs": limits | conf.get(protocol, {}).get("config_kwargs", {})}
        elif protocol in ("http", "https"):
            with contextlib.suppress(ImportError):  # The except clause below reports a missing package.
                import aiohttp

                limits = {"timeout": aiohttp.ClientTimeout(total=None, connect=seconds, sock_read=seconds)}
                options = {"client_kwargs": limits | conf.get(protocol, {}).get("client_kwargs", {})}
        try:
            fs, path = url_to_fs(self.url, **options)
        except ImportError as error:
            extra, problem = EXTRAS_BY_PROTOCOL.get(protocol), f"{protocol}:// needs an additional package"
            remedy = to_pip_command(extra) if extra else "see the documentation of fsspec"
            raise StoreError(f"{self.url}: {problem}: {remedy} ({describe_refusal(error)})") from error
        except ValueError as error:
            advice = "use s3://, gs://, az:// or another protocol of fsspec"
            raise StoreError(f"{self.url}: is not a supported URL ({describe_refusal(error)}); {advice}") from error
        return fs, str(path).rstrip("/")


def parse_location(text: str) -> Path | Store:
    """Return the store of a URL. For any other text, and for a `file://` URL, return the path."""
    return Store(text) if is_url(text) else Path(to_path(text))
