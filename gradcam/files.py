"""Files of the user's that are opened, and files of ours that are whole, or not there."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

LARGEST = 2**32  # bytes of a text, such as a list or annotations; more would only fill the memory
KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
UNFINISHED = ".gradcam-{}.tmp"  # a dot, and no suffix of a picture: nobody takes it for one


class NotAFileError(OSError):
    """A pipe, a socket or a device was named where a file should be."""


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file that somebody named, for reading.

    A pipe or a socket may be waited for without an end, and a device may have none: of those, and of folders, it raises
    `OSError` with the reason.
    """
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
    """Write a file as `replacing` does, and wait until it is on the disk.

    `data`: all of it, or its parts one after another. Raises `OSError`.
    """
    with replacing(path, beside=beside) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, *, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A file under another name, in the same folder or in `beside`, that gets this one at the end: whole, or not there.

    Raises `OSError`.
    """
    temporary = (beside or path.parent) / UNFINISHED.format(secrets.token_hex(8))
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:  # interruptions too
        temporary.unlink(missing_ok=True)
        raise
