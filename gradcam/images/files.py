"""Files that people name: opened without waiting, written whole or not at all; what results are called; URLs."""

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

LARGEST = 2**32  # bytes of a text, such as a list or annotations; more would only fill the memory
BLOCK = 2**20  # bytes that are read at once
KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
UNFINISHED = ".gradcam-{}.tmp"  # a dot, and no suffix of a picture: nobody takes it for one
WRITE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
READ_SUFFIXES = WRITE_SUFFIXES | {".jpe", ".jfif", ".dib", ".gif", ".mpo", ".jp2", ".avif"}
READ_SUFFIXES |= {".ppm", ".pgm", ".pbm", ".tga", ".ico", ".dcm", ".dicom"}
LONGEST_NAME = 240  # bytes; file systems allow 255, and a copy may need a number
LONGEST_PART = 80  # bytes of a label, or of a layer, in a file name
LONGEST_CHARACTER = 4  # bytes
# Two letters at least: one is a drive. "simplecache::s3://" is a chain of fsspec's; a file may be called "a::b.jpg".
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::.*)?://", re.DOTALL)
LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)


class NotAFileError(OSError):
    """A pipe, a socket or a device was named where a file should be."""


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file that somebody named. Raises `OSError`: of a folder, and of what may have no end, as a pipe or a device."""
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if kind != stat.S_IFREG:
        raise NotAFileError(errno.EINVAL, f"it is {KINDS.get(kind, 'something else')}, not a file", os.fspath(path))
    return open(path, "rb", opener=open_at_once)


def open_at_once(path: str, flags: int) -> int:
    """Without O_NONBLOCK, which Windows does not have, a pipe that took the file's place would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_text_file(path: str | os.PathLike[str]) -> bytes:
    """All that is in a file that somebody named, if no more than a text can be. Raises `OSError` as `open_file` does."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST} bytes", os.fspath(path))
        return file.read()


def write_whole(path: Path, data: bytes | Iterable[bytes], *, beside: Path | None = None) -> None:
    """Write a file, all of it or its parts in order, as `replacing` does, and wait for the disk. Raises `OSError`."""
    with replacing(path, beside=beside) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, *, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A file under another name, in the same folder or in `beside`, that gets this one at the end: whole, or not there."""
    temporary = (beside or path.parent) / UNFINISHED.format(secrets.token_hex(8))
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:  # interruptions too
        temporary.unlink(missing_ok=True)
        raise


def hash_file(file: Path) -> str:
    """The SHA-256 of what is in it, in hexadecimal digits. Raises `OSError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open_file(file) as content:
        while count := content.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def join_name(stem: str, ending: str) -> str:
    """A name with this ending; a stem that is too long for it is cut."""
    return cut(stem, LONGEST_NAME - len(os.fsencode(ending))) + ending


def to_plain(text: str) -> str:
    """Words of letters, digits and dots, joined by underscores: a name that every shell and file system takes."""
    return cut(re.sub(r"[^\w.]+", "_", text).strip("_."), LONGEST_PART) or "_"


def cut(text: str, most: int) -> str:
    """At most so many bytes of it; a character is not cut in two."""
    encoded = os.fsencode(text)
    return text if len(encoded) <= most else encoded[:most].decode(errors="ignore")


class OutputNames:
    """Paths that nothing else in this call writes to or reads from."""

    def __init__(self, folder: Path, inputs: Iterable[Path]) -> None:
        self._folder = folder
        self._taken = {key for path in inputs for key in _keys(path)}

    def claim(self, names: Sequence[str]) -> list[Path]:
        """Paths for one picture's results; where one is taken, all get one number, from 2, and names alike those after."""
        first = next(
            number for number in count(1) if not any(_keys(self._at(name, number)) & self._taken for name in names)
        )
        paths = []
        for name in names:
            paths.append(next(it for number in count(first) if not _keys(it := self._at(name, number)) & self._taken))
            self._taken |= _keys(paths[-1])
        return paths

    def _at(self, name: str, number: int) -> Path:
        path = self._folder / name
        return path if number == 1 else self._folder / f"{path.stem}-{number}{path.suffix}"


def _keys(path: Path) -> set[str]:
    """What tells whether two paths are one file, also where case does not count and through links."""
    return {os.path.abspath(path).casefold(), os.path.realpath(path).casefold()}


def is_called_after(name: str, stem: str) -> bool:
    """Whether a result of that stem can have this name; of one that was cut that is not known."""
    return name.startswith(f"{stem}-") or len(os.fsencode(name.rpartition("/")[2])) > LONGEST_NAME - LONGEST_CHARACTER


def is_url(text: str) -> bool:
    """Whether it leads away from this machine's disks: `s3://bucket/photos` does, a path and `file://` do not."""
    return URL.match(text) is not None and LOCAL.match(text) is None


def to_path(text: str) -> str:
    """The path that a `file://` URL means; anything else as it is."""
    match = LOCAL.match(text)
    if match is None:
        return text
    rest = text[match.end() :]
    host, slash, path = rest.partition("/")
    # `file:///folder`, `file://localhost/folder`, and what people type: `file://folder`, which is relative to nothing.
    rooted = slash + path if host in ("", "localhost") else rest
    return unquote(rooted) if "%" in rooted else rooted
