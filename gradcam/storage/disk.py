"""Read, append to, lock and remove the files of an output folder. `gradcam.images.files` writes complete files."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from filelock import FileLock

from gradcam.errors import OutputError
from gradcam.images.files import open_file, open_nonblocking

BLOCK_BYTES = 2**16
MAX_LINE_BYTES = 2**24
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# Errors that an unsuitable file name can cause. After such an error, files with other names can still be written.
FILE_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
# Errors of file systems that have no locks.
UNSUPPORTED_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
INTERRUPT_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def translate_disk_errors(folder: Path) -> Iterator[None]:
    """Turn each `OSError` into an `OutputError` with advice."""
    try:
        yield
    except OSError as error:
        step = "free some space" if error.errno in DISK_FULL_ERRNOS else "check the disk"
        is_unwritable = error.errno in UNWRITABLE_ERRNOS
        advice = "choose another --output" if is_unwritable else f"{step}, then continue with --resume"
        raise OutputError(f"{format_folder(folder)}: {describe_os_error(error)}; {advice}") from error


def format_folder(folder: Path) -> str:
    """Return the folder's name for a message, with a separator at the end."""
    return os.path.join(folder, "")


def describe_os_error(error: OSError) -> str:
    """Return the reason for an error as a phrase for a message, without the file name."""
    reason = " ".join((error.strerror or str(error)).split())
    return reason[:1].lower() + reason[1:]


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Delay interrupting signals until the block ends, so that a record is written completely or not at all."""
    pending: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    # Python runs signal handlers in the main thread only.
    signals = INTERRUPT_SIGNALS if threading.current_thread() is threading.main_thread() else []
    saved_handlers = {number: handler for number in signals if callable(handler := signal.getsignal(number))}
    try:
        for number in saved_handlers:
            signal.signal(number, defer)
        yield
    finally:
        for number, handler in saved_handlers.items():
            signal.signal(number, handler)
        for number in pending:
            signal.raise_signal(number)


@contextlib.contextmanager
def open_thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool whose threads have all ended when the block ends.

    If a signal raises an exception while a thread starts, the pool does not know the thread, and does not wait for it. All
    threads therefore start before the block, when there are no tasks that such a thread could run.
    """
    with ThreadPoolExecutor(threads) as pool:
        have_started = threading.Event()
        try:
            for _ in range(threads):
                pool.submit(have_started.wait)  # No thread is idle before the event, so each call starts a thread.
        finally:
            have_started.set()
        yield pool


def check_regular_file(path: Path) -> None:
    """Raise `OutputError` if the path exists, but is not a regular file. Reading from a FIFO may block."""
    if os.path.lexists(path) and not path.is_file():
        raise OutputError(f"{path}: is not a file, but a run needs a file there; move it, or choose another --output")


def open_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, with their line ends. Raises `OSError`, and `OutputError` for an overlong line."""
    with open_file(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                problem = f"has a line of over {MAX_LINE_BYTES} bytes, so it was not written by a run"
                raise OutputError(f"{path}: {problem}; start again with --overwrite")
            yield line


class LineFile:
    """A file to which complete lines are appended. An incomplete last line is removed when the file is opened."""

    def __init__(self, path: Path) -> None:
        check_regular_file(path)
        self._path = path
        self._file = open(path, "ab", buffering=0, opener=open_nonblocking)  # noqa: SIM115  (the owner calls `close`)
        self._end = find_line_end(path)
        self._file.truncate(self._end)

    def append(self, line: bytes) -> None:
        """Append a line, which must include its line end. If this raises `OSError`, the file is unchanged."""
        try:
            remaining = memoryview(line)
            while remaining:  # If the disk is nearly full, a write may store only part of the line.
                remaining = remaining[self._file.write(remaining) or 0 :]
            self._end += len(line)
        except BaseException:  # KeyboardInterrupt must not leave part of a line either.
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise

    def check(self) -> None:
        """Raise `OutputError` if another program has removed, replaced or changed the file."""
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            if os.path.samestat(status, os.fstat(self._file.fileno())) and status.st_size == self._end:
                return
        problem = "another program removed or changed this file"
        raise OutputError(f"{self._path}: {problem}; check it, then continue with --resume")

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some file systems cannot sync a file.
                raise

    def close(self) -> None:
        self._file.close()


def find_line_end(path: Path) -> int:
    """Return the position after the last line end. If the last line is complete, the position is the file's size."""
    with open_file(path) as file:
        position = file.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - BLOCK_BYTES)
            file.seek(start)
            end = file.read(position - start).rfind(b"\n")
            if end >= 0:
                return start + end + 1
            position = start
    return 0


def has_nonempty_file(folder: Path, name: str) -> bool:
    """Return whether the named file lies in the folder and is not empty."""
    path = join_inside(folder, name)
    try:
        return path is not None and path.stat().st_size > 0 and path.is_file()
    except OSError:
        return False


def join_inside(folder: Path, name: str) -> Path | None:
    """Return the path of the named file in the folder, or None if the name leads out of the folder."""
    path = Path(name)
    is_relative = not path.is_absolute() and ".." not in path.parts and path.parts and "\0" not in name
    return folder / path if is_relative else None


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether a file lies in the folder. Links in the path of the file's parent folder are resolved first."""
    root = os.path.join(os.path.realpath(folder), "")
    return os.path.join(os.path.realpath(path.parent), "").startswith(root)


def remove(path: Path) -> None:
    """Remove a file if it exists. Folders are not removed. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def acquire_lock(path: Path, *, seconds: float) -> Callable[[], None]:
    """Wait until the file can be locked, and return a function that releases the lock.

    `seconds` is the maximum wait. A value of -1 means no limit. Raises `filelock.Timeout` and `OSError`.
    """
    lock = FileLock(path, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in UNSUPPORTED_LOCK_ERRNOS:
            raise
        return lambda: None  # This file system has no locks. Users must make sure that only one run writes to a folder.
    return lock.release
