"""The cores that this process may use, which may be fewer than the machine has."""

# No torch is imported here: a report is made without it.
# joblib and loky look at the mount's own quota alone, and psutil at none: the limit of a Slurm step, a systemd slice or a
# group around either lies in the process's own groups, which nothing but these lines follows.

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, by its CPU affinity and its control groups' quotas (part of a core counts as
    one); at least 1. `root`: where `proc` and `sys` are."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _list_quotas(root))]))


def _list_quotas(root: Path) -> Iterator[float]:
    """How many cores each control group that this process is in may use, where it has a limit."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2, at times beside version 1
            places, files = (mounts, mounts / "unified"), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            places, files = (mounts / controllers, mounts / "cpu"), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # A group may be limited by any that it is in. In a container the path may be the host's, of which only the mount
        # itself is there.
        inside = PurePosixPath(path.lstrip("/"))
        names = [] if ".." in inside.parts else [inside, *inside.parents]
        for folder in (mount / name for mount in places for name in dict.fromkeys([*names, PurePosixPath()])):
            with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", and what is not there
                quota, period = map(int, " ".join(_read(folder / file) for file in files).split())
                if quota > 0:  # -1 is no limit
                    yield quota / period


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
