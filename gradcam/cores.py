"""Count the processor cores that this process may use.

These functions read the limits of the control groups that the process is in, such as a Slurm step or a systemd slice,
and of their parent groups. joblib and loky read only the quota at the mount point, and psutil reads no quota.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, by its CPU affinity and the quotas of its control groups, at least 1.

    A fraction of a core counts as one core. `root` is the folder that contains `proc` and `sys`.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _list_quotas(root))]))


def _list_quotas(root: Path) -> Iterator[float]:
    """Yield the limits of the control groups that this process is in, as numbers of cores."""
    mounts = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, remaining = line.partition(":")
        controllers, _, path = remaining.partition(":")
        if not controllers:  # control groups of version 2; a machine may use both versions
            mount_points, files = (mounts, mounts / "unified"), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mount_points, files = (mounts / controllers, mounts / "cpu"), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # A group is also limited by its parent groups. In a container, the path may be that of the host: then only the
        # mount point exists.
        group_path = PurePosixPath(path.lstrip("/"))
        names = [] if ".." in group_path.parts else [group_path, *group_path.parents]
        for folder in (mount / name for mount in mount_points for name in dict.fromkeys([*names, PurePosixPath()])):
            with contextlib.suppress(ValueError, ZeroDivisionError):  # The quota is "max", or the file is missing.
                quota, period = map(int, " ".join(_read_text(folder / file) for file in files).split())
                if quota > 0:  # -1 means no limit.
                    yield quota / period


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
