"""End the processes of a run on this machine, so that no process writes results after the run has ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

KILL_SIGNAL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL, and its SIGTERM kills the process.
EXIT_TIMEOUT_SECONDS = 10  # The maximum wait for a killed process to exit.


def register_process(run: str) -> FileLock:
    """Register this process as a process of the run. The registration ends when the returned lock is released."""
    folder = _find_registry_folder(run)
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / str(os.getpid()))
    lock.acquire(timeout=EXIT_TIMEOUT_SECONDS)
    return lock


def end_local_processes(run: str) -> None:
    """Kill all registered processes of the run on this machine, and wait for the end of these processes."""
    folder = _find_registry_folder(run)
    with contextlib.suppress(OSError):
        for entry in list(folder.iterdir()):
            _end_process(FileLock(entry), int(entry.name))
        shutil.rmtree(folder)


def _find_registry_folder(run: str) -> Path:
    """Return the folder in which all processes of the run on this machine register.

    If `/tmp` exists, the folder is in `/tmp`, because TMPDIR may differ between Ray and its jobs.
    """
    shared_tmp = Path("/tmp")
    return (shared_tmp if shared_tmp.is_dir() else Path(tempfile.gettempdir())) / f"gradcam-run-{run}"


def _end_process(lock: FileLock, process: int) -> None:
    """Kill the process with this ID if it holds the lock, and wait for its end.

    If the lock is free, the process has already ended. Its ID may now belong to an unrelated process.
    """
    with contextlib.suppress(Timeout, ProcessLookupError):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            os.kill(process, KILL_SIGNAL)
            lock.acquire(timeout=EXIT_TIMEOUT_SECONDS)
        lock.release()
