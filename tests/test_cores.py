import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradcam.options import count_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(root: Path, limits: dict[str, str], group: str = "/") -> Path:
    """Write the files of cgroup version 2: groups with their limits."""
    files = {f"sys/fs/cgroup/{name}/cpu.max": text for name, text in limits.items()}
    return put(root, {"proc/self/cgroup": f"0::{group}\n", **files})


def test_without_control_groups_it_is_the_affinity(tmp_path: Path) -> None:
    assert count_cores(tmp_path) == 8


def test_without_affinity_it_is_the_machines_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert count_cores(tmp_path) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),  # part of a core counts as one core
        ("10000 100000\n", 1),
        ("60000 20000\n", 3),
        ("max 100000\n", 8),
        ("3200000 100000\n", 8),  # more than the CPU affinity allows
        ("", 8),
        ("nonsense", 8),
        ("200000 0\n", 8),
    ],
)
def test_a_quota_of_version_2(tmp_path: Path, limit: str, cores: int) -> None:
    assert count_cores(v2(tmp_path, {"": limit})) == cores


STEPS = {"jobs/7/step": "max 100000", "jobs/7": "400000 100000", "jobs": "300000 100000"}


@pytest.mark.parametrize(
    ("limits", "group", "cores"),
    [
        (STEPS, "/jobs/7/step", 3),
        (STEPS | {"jobs/7": "200000 100000"}, "/jobs/7/step", 2),
        ({"jobs/8": "100000 100000", "jobs/7": "500000 100000"}, "/jobs/7", 5),  # a group beside this one
        ({"": "300000 100000"}, "/docker/0123", 3),  # in a container, the mount is the container's own group
        ({"": "300000 100000"}, "/../../other", 3),
        ({"": "max 100000", "../cgroup-of-others": "100000 100000"}, "/../cgroup-of-others", 8),  # outside of the mount
    ],
)
def test_the_limit_of_this_group_or_its_parents(tmp_path: Path, limits: dict[str, str], group: str, cores: int) -> None:
    assert count_cores(v2(tmp_path, limits, group)) == cores


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cores"), [("150000", 2), ("-1", 8)])
def test_a_quota_of_version_1(tmp_path: Path, mount: str, quota: str, cores: int) -> None:
    folder = f"sys/fs/cgroup/{mount}/job"
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    groups = "12:cpuset:/other\n4:cpu,cpuacct:/job\n1:name=systemd:/\n0::/user.slice\n"
    assert count_cores(put(tmp_path, {"proc/self/cgroup": groups, **files})) == cores


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/\n0::/job\n", "sys/fs/cgroup/unified/job/cpu.max": "200000 100000"}
    assert count_cores(put(tmp_path, files)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an affinity")
def test_a_process_that_is_held_to_one_core() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from gradcam.options import count_cores; print(count_cores())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
