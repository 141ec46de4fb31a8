"""What is done to files of the output folder: all of it is here, and in `gradcam.files`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from filelock import FileLock

from gradcam.errors import OutputError
from gradcam.images.files import open_at_once, open_file

BLOCK = 2**16  # bytes
LONGEST_LINE = 2**24  # bytes
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# What a name alone can cause; other names are written all the same.
OF_THE_NAME = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # file systems that have none
INTERRUPTING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def blaming_disk(folder: Path) -> Iterator[None]:
    """Whatever the disk refuses is an `OutputError` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = "check the disk, then continue with --resume"
        if error.errno in FULL:
            advice = "free some space, then continue with --resume"
        elif error.errno in CLOSED:
            advice = "choose another --output"
        raise OutputError(f"{show(folder)}: {describe_os_error(error)}; {advice}") from error


def show(folder: Path) -> str:
    """A folder's name, for a sentence: it ends as a folder's."""
    return os.path.join(folder, "")


def describe_os_error(error: OSError) -> str:
    """The reason alone, for the middle of a sentence."""
    reason = " ".join((error.strerror or str(error)).split())
    return reason[:1].lower() + reason[1:]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that would raise an exception come at the end of this alone, so that a record is written or not begun."""
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    is_heeded = threading.current_thread() is threading.main_thread()  # no other thread is interrupted
    handlers = {number: signal.getsignal(number) for number in INTERRUPTING} if is_heeded else {}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, remember)
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def check_file(path: Path) -> None:
    """Raises `OutputError` for what is there and no file: to read a FIFO or a device might never end."""
    if os.path.lexists(path) and not path.is_file():
        raise OutputError(f"{path}: is not a file, but a run needs a file there; move it, or choose another --output")


def open_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends. Raises `OSError`, and `OutputError` for one that does not end."""
    with open_file(path) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise OutputError(
                    f"{path}: has a line of over {LONGEST_LINE} bytes, longer than any line of a run; start again with "
                    "--overwrite"
                )
            yield line


class LineFile:
    """A file that grows by whole lines. What an earlier writer did not finish, or the disk did not take, is cut off."""

    def __init__(self, path: Path) -> None:
        check_file(path)
        self._path = path
        self._file = open(path, "ab", buffering=0, opener=open_at_once)  # noqa: SIM115  (`close` is for the owner)
        self._end = find_end(path)
        self._file.truncate(self._end)

    def append(self, line: bytes) -> None:
        """Add a line, with its end. Raises `OSError`; the file then is as it was before."""
        try:
            rest = memoryview(line)
            while rest:  # once, but on a disk that is nearly full
                rest = rest[self._file.write(rest) or 0 :]
            self._end += len(line)
        except BaseException:  # interruptions too
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise

    def check(self) -> None:
        """Raises `OutputError` where somebody removed, replaced or changed the file: what is added would not be read."""
        with contextlib.suppress(FileNotFoundError):
            there = self._path.stat()
            if os.path.samestat(there, os.fstat(self._file.fileno())) and there.st_size == self._end:
                return
        raise OutputError(
            f"{self._path}: another program removed or changed this file; check it, then continue with --resume"
        )

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has nothing to wait for
                raise

    def close(self) -> None:
        self._file.close()


def find_end(path: Path) -> int:
    """Where the last whole line of a file ends: its size, unless a writer was stopped in a line."""
    with open_file(path) as file:
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


def take_lock(path: Path, *, seconds: float) -> Callable[[], None]:
    """Wait so long, or with -1 as long as it takes, until nobody has this file locked; gives what lets go of it. Raises
    `filelock.Timeout`, and `OSError`."""
    lock = FileLock(path, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        return lambda: None  # without locks two at once are the user's own affair
    return lock.release
