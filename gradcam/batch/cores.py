"""How many cores this process may use: fewer than the machine has, in a container or a job of a cluster."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, by its CPU affinity and its control groups' quotas; at least 1.

    A quota of part of a core counts as one. `root`: where `proc` and `sys` are.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """How many cores each control group that this process is in may use, where it has a limit."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2, at times beside version 1
            for folder in _groups([mounts, mounts / "unified"], path):
                yield from _to_cores(_read(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for folder in _groups([mounts / controllers, mounts / "cpu"], path):
                yield from _to_cores(_read(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))


def _groups(mounts: list[Path], path: str) -> Iterator[Path]:
    """A group's folder and those of all that it is in: any of them may have a limit.

    In a container the path may be the host's, of which only the mount itself is there.
    """
    inside = PurePosixPath(path.lstrip("/"))
    names = [] if ".." in inside.parts else [inside, *inside.parents]
    for mount in mounts:
        yield from (mount / name for name in dict.fromkeys([*names, PurePosixPath()]))


def _to_cores(limit: Iterator[str] | list[str]) -> Iterator[float]:
    """The quota over its period, both in microseconds; nothing for "max", -1, and what is not there."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        quota, period = map(int, limit)
        if quota > 0:
            yield quota / period


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
