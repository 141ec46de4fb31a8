"""Open and write files, and choose the names of results."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

MAX_TEXT_BYTES = 2**32  # A larger file would fill the memory. Lists and annotation files are far smaller.
BLOCK_BYTES = 2**20
FILE_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
TEMPORARY_NAME = ".gradcam-{}.tmp"  # Other programs do not take a hidden .tmp file for an image.
WRITE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
READ_SUFFIXES = WRITE_SUFFIXES | {".jpe", ".jfif", ".dib", ".gif", ".mpo", ".jp2", ".avif"}
READ_SUFFIXES |= {".ppm", ".pgm", ".pbm", ".tga", ".ico", ".dcm", ".dicom"}
MAX_NAME_BYTES = 240  # File systems allow 255 bytes. The other 15 bytes are for a number.
MAX_NAME_PART_BYTES = 80  # for a label or a layer's name in a file name
MAX_CHARACTER_BYTES = 4  # in UTF-8
# Matches URLs. A protocol has at least two letters, because a single letter is a Windows drive. fsspec chains
# protocols, as in "simplecache::s3://". A text without "://" is a path, because a file name may contain "::".
URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::.*)?://", re.DOTALL)
LOCAL_URL_PATTERN = re.compile(r"(?:file|local)://", re.IGNORECASE)


class NotAFileError(OSError):
    """The error for a pipe, a socket or a device that is given instead of a file."""


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file given by the user. Raises `OSError` for a folder, and for a pipe or device, which may never end."""
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if kind != stat.S_IFREG:
        reason = f"it is {FILE_KINDS.get(kind, 'something else')}, not a file"
        raise NotAFileError(errno.EINVAL, reason, os.fspath(path))
    return open(path, "rb", opener=open_nonblocking)


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking, if the system supports this. A blocking open of a pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_text_file(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a text file given by the user.

    Raises `OSError` like `open_file`, and for files of more than MAX_TEXT_BYTES bytes.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES} bytes", os.fspath(path))
        return file.read()


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, beside: Path | None = None) -> None:
    """Write a file completely or not at all, and wait until the data is on the disk. Raises `OSError`."""
    with open_replacement(path, beside=beside) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def open_replacement(path: Path, *, beside: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` at the end, or is deleted if an exception is raised.

    The temporary file is created in the folder `beside`, or in the folder of `path` if `beside` is None.
    """
    temporary = (beside or path.parent) / TEMPORARY_NAME.format(secrets.token_hex(8))
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:  # also after a KeyboardInterrupt
        temporary.unlink(missing_ok=True)
        raise


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal digits. Raises `OSError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with open_file(file) as content:
        while count := content.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def join_name(stem: str, ending: str) -> str:
    """Join a stem and an ending. If the file name would exceed MAX_NAME_BYTES bytes, cut the stem."""
    return truncate_bytes(stem, MAX_NAME_BYTES - len(os.fsencode(ending))) + ending


def to_safe_name(text: str) -> str:
    """Convert a text to a short part of a file name, with only letters, digits, dots and underscores."""
    return truncate_bytes(re.sub(r"[^\w.]+", "_", text).strip("_."), MAX_NAME_PART_BYTES) or "_"


def truncate_bytes(text: str, max_bytes: int) -> str:
    """Cut a text to at most `max_bytes` bytes, without splitting a character."""
    encoded = os.fsencode(text)
    return text if len(encoded) <= max_bytes else encoded[:max_bytes].decode(errors="ignore")


class OutputNames:
    """The output paths of a command. The paths differ from each other and from all inputs."""

    def __init__(self, folder: Path, inputs: Iterable[Path]) -> None:
        self._folder = folder
        self._used_keys = {key for path in inputs for key in _to_keys(path)}

    def claim(self, names: Sequence[str]) -> list[Path]:
        """Return an unused path for each result of an image.

        If any of the paths is in use, a number is added to all names. It is the first number from 2 upwards for which
        all paths are unused. If two results have the same name, the second result gets the next free number.
        """
        first = next(number for number in count(1) if all(self._is_free(name, number) for name in names))
        paths = []
        for name in names:
            number = next(number for number in count(first) if self._is_free(name, number))
            paths.append(self._number_path(name, number))
            self._used_keys |= _to_keys(paths[-1])
        return paths

    def _is_free(self, name: str, number: int) -> bool:
        return _to_keys(self._number_path(name, number)).isdisjoint(self._used_keys)

    def _number_path(self, name: str, number: int) -> Path:
        path = self._folder / name
        return path if number == 1 else self._folder / f"{path.stem}-{number}{path.suffix}"


def _to_keys(path: Path) -> set[str]:
    """Return keys to compare paths. Two paths share a key if links lead to one file, or if only the case differs."""
    return {os.path.abspath(path).casefold(), os.path.realpath(path).casefold()}


def may_have_stem(name: str, stem: str) -> bool:
    """Return whether a result with this stem can have this file name; True for long names, which may have been cut."""
    may_be_cut = len(os.fsencode(name.rpartition("/")[2])) > MAX_NAME_BYTES - MAX_CHARACTER_BYTES
    return may_be_cut or name.startswith(f"{stem}-")


def is_url(text: str) -> bool:
    """Return True for `s3://bucket/photos` and other locations outside this machine; False for paths and `file://`."""
    return URL_PATTERN.match(text) is not None and LOCAL_URL_PATTERN.match(text) is None


def to_path(text: str) -> str:
    """Return the path of a `file://` URL, and any other text unchanged."""
    match = LOCAL_URL_PATTERN.match(text)
    if match is None:
        return text
    remaining = text[match.end() :]
    host, slash, path = remaining.partition("/")
    # Accept `file:///folder`, `file://localhost/folder`, and also `file://folder`, which is invalid but common.
    rooted = slash + path if host in ("", "localhost") else remaining
    return unquote(rooted) if "%" in rooted else rooted
