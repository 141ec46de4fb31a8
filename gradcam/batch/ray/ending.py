"""The end of actors: nobody may write results any more once a run has let go of them, on whichever machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has the other alone, and ends a process with it
SECONDS = 10  # for a process to end that was killed
ASKED = 30  # for the other machines to say that theirs have ended


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
