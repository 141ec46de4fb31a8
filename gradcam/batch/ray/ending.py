"""The end of actors: nobody may write results any more once a run has let go of them, on whichever machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has the other alone, and ends a process with it
SECONDS = 10  # for a process to end that was killed
ASKED = 30  # for the other machines to say that theirs have ended
DONE = b"done"
PAUSE = 0.5  # seconds between two looks at the head
SECONDS_TO_ANSWER = 3  # to wait for its answer


def sign_in(run: str) -> FileLock:
    """Leave word on this machine that this process works for the run of that name, until what this gives is gone."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / str(os.getpid()))
    lock.acquire(timeout=SECONDS)
    return lock


def end_here(run: str) -> None:
    """End all who signed in on this machine, and wait until they have."""
    folder = _folder(run)
    with contextlib.suppress(OSError):
        for entry in list(folder.iterdir()):
            _end(FileLock(entry), int(entry.name))
        shutil.rmtree(folder)


def end_everywhere(ray: Any, run: str) -> None:
    """`end_here`, on all machines of the cluster that can be reached."""
    end_here(run)
    with contextlib.suppress(ray.exceptions.RayError):
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        if others:
            on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            end = ray.remote(num_cpus=0, max_retries=0)(end_here)
            calls = [end.options(scheduling_strategy=on(other, soft=False)).remote(run) for other in others]
            ray.wait(calls, num_returns=len(calls), timeout=ASKED)  # one that is gone has nobody at work


def _folder(run: str) -> Path:
    """The same for all processes of a machine: TMPDIR may be another where Ray was started, or of each job."""
    shared = Path("/tmp")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"gradcam-run-{run}"


def _end(lock: FileLock, process: int) -> None:
    """End the process that holds it. One that holds it no more has ended, and its number may be another's."""
    with contextlib.suppress(Timeout, ProcessLookupError):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            os.kill(process, KILL)
            lock.acquire(timeout=SECONDS)
        lock.release()


# Ray ends this process from C++ once its head is gone: no handler, `finally` or `atexit` runs then, so that another process
# has to say how to go on. It runs this file as a script (`python -I`), which is why nothing of gradcam is imported here.
@contextlib.contextmanager
def last_words(address: str, text: str, *, is_own: bool) -> Iterator[None]:
    """Meanwhile, should Ray end this process, another one says `text` on standard error; not where somebody kills this
    one. `address`: HOST:PORT of the head. `is_own`: whether that ends with this process, however it does."""
    command = [sys.executable, "-I", __file__, address, "own" if is_own else "joined", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as witness:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if witness.stdin is not None:
                    witness.stdin.write(DONE)


def _watch(address: str, kind: str, text: str) -> None:
    is_told, is_lost = threading.Event(), threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that is watched can heed that
    for name in ("SIGTERM", "SIGHUP"):  # to all of its group: Ray may be faster than it
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), lambda *_: is_told.set())

    def look() -> None:
        while True:
            (is_lost.clear if _answers(address) else is_lost.set)()
            time.sleep(PAUSE)

    threading.Thread(target=look, daemon=True).start()
    if sys.stdin.buffer.read() == DONE:
        return
    if is_told.is_set() or is_lost.is_set() or (kind == "joined" and not _answers(address)):
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + text + "\n")  # a bar has not ended its line


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _watch(*sys.argv[1:])
