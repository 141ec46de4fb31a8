"""Locks between processes, also of several machines on one disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # file systems that have none


def take_lock(path: Path, *, seconds: float) -> Callable[[], None]:
    """Wait so long, or with -1 as long as it takes, until nobody has this file locked; gives what lets go of it.

    Raises `filelock.Timeout`, and `OSError`.
    """
    lock = FileLock(path, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        return lambda: None  # without locks two at once are the user's own affair
    return lock.release
