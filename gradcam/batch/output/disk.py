"""What is done to files of the output folder: all of it is here, and in `gradcam.files`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from gradcam.errors import OutputError

BLOCK = 2**16  # bytes
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# What a name alone can cause; other names are written all the same.
OF_THE_NAME = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


@contextlib.contextmanager
def blaming_disk(folder: Path) -> Iterator[None]:
    """Whatever the disk refuses is an `OutputError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{show(folder)}: {describe(error)}; {_advise(error)}") from error


def show(folder: Path) -> str:
    """A folder's name, for a sentence: it ends as a folder's."""
    return os.path.join(folder, "")


def describe(error: OSError) -> str:
    """The reason alone, for the middle of a sentence."""
    reason = " ".join((error.strerror or str(error)).split())
    return reason[:1].lower() + reason[1:]


def _advise(error: OSError) -> str:
    if error.errno in FULL:
        return "free some, then go on with --resume"
    if error.errno in CLOSED:
        return "choose another --output"
    return "look after that disk, then go on with --resume"


class LineFile:
    """A file that grows by whole lines. What an earlier writer did not finish, or the disk did not take, is cut off."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (it stays open: `close` is for the owner)
        self._end = find_end(path)
        self._file.truncate(self._end)

    def append(self, line: bytes) -> None:
        """Add a line, with its end. Raises `OSError`; the file then is as it was before."""
        try:
            rest = memoryview(line)
            while rest:  # once, but on a disk that is nearly full
                rest = rest[self._file.write(rest) or 0 :]
        except BaseException:  # interruptions too
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._end += len(line)

    def sync(self) -> None:
        """Wait until it is on the disk. Raises `OSError`."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has nothing to wait for
                raise

    def close(self) -> None:
        """Close it; more than once does no harm."""
        self._file.close()


def find_end(path: Path) -> int:
    """Where the last whole line of a file ends: its size, unless a writer was stopped in a line."""
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - BLOCK)
            file.seek(start)
            end = file.read(position - start).rfind(b"\n")
            if end >= 0:
                return start + end + 1
            position = start
    return 0


def is_there(path: Path) -> bool:
    """Whether there is such a file, with something in it."""
    try:
        return path.stat().st_size > 0 and path.is_file()
    except OSError:
        return False


def find_inside(folder: Path, name: str) -> Path | None:
    """The path of what is called so in the folder; None for a name that leads out of it."""
    path = Path(name)
    is_inside = not path.is_absolute() and ".." not in path.parts and path.parts and "\0" not in name
    return folder / path if is_inside else None


def is_inside(folder: Path, path: Path) -> bool:
    """Whether the place of a file is in the folder, links followed."""
    root = os.path.join(os.path.realpath(folder), "")
    return os.path.join(os.path.realpath(path.parent), "").startswith(root)


def remove(path: Path) -> None:
    """Remove a file, if it is there; folders stay. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()


def remove_empty(folder: Path) -> None:
    """Remove a folder, if there is nothing in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()
