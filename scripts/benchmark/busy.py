"""Measure how much slower calls and commands are while other processes keep every core busy."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmark.measuring import Settings, report_progress
from benchmark.pictures import make_image_files
from benchmark.process import ROOT, run_busy_process
from benchmark.tables import Table, format_spread

PICTURES, SIZE = 32, (1024, 768)
THREAD_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
# A user's program that prints pairs: the seconds of a bare forward pass, and the seconds of a call.
CALL = """
import json, time
import gradcam, torch, torchvision
model, images = torchvision.models.resnet18(weights=None).eval(), torch.rand(1, 3, 224, 224)

def pass_bare():
    with torch.inference_mode():
        model(images)

def time_call(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

calls = (pass_bare, lambda: gradcam.explain(model, images, "layer4"))
pairs = [[time_call(call) for call in calls] for _ in range(14)]
print(json.dumps(pairs[4:]))
"""
# A user's program that prints the time to make one page of all classes, in seconds.
PAGE = """
import time
import gradcam
classifier, start = gradcam.load_classifier(), time.perf_counter()
gradcam.page("photos/00000.jpg", classifier)
print(time.perf_counter() - start)
"""
PAGE_SETTINGS = {
    "": {},
    "`GOMP_SPINCOUNT=5000`": {"GOMP_SPINCOUNT": "5000"},
    "`OMP_NUM_THREADS=1`": {"OMP_NUM_THREADS": "1"},
}
# The mount points of CPU control groups, versions 1 and 2, and the files that set a quota of one core.
CONTROL_GROUPS = {
    Path("/sys/fs/cgroup/cpu"): {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"},
    Path("/sys/fs/cgroup"): {"cpu.max": "100000 100000"},
}
JOIN_GROUP = ("sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"')
ONE_CORE = ("taskset", "-c", "0")
COMMANDS = {
    "`gradcam page`": ["page", "photos/00000.jpg", "-o", "page.html"],
    "`gradcam batch`": ["batch", "photos", "--overwrite", "-o", "results"],
}


def compare_busy(settings: Settings) -> Iterator[Table]:
    """Compare calls and commands on an idle machine, on a busy machine, and with a quota of one core."""
    rounds, rows, raw = max(settings.rounds.values()), [], []
    cores = len(os.sched_getaffinity(0))
    for name, count in (("idle", 0), ("busy", cores)):
        report_progress("busy", "explain", name)
        with keep_busy(count):
            pairs = np.concatenate([json.loads(run_python(["-c", CALL], ROOT)) for _ in range(rounds)])
        rows.append(
            [
                "`explain`, ResNet-18",
                name,
                "forward pass alone, on the same machine",
                format_spread(pairs[:, 1] / pairs[:, 0]),
            ]
        )
        raw.append({"call": "explain", "cores": count, "pairs": pairs.tolist()})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_image_files(folder / "photos", PICTURES, SIZE)
        for command, arguments in COMMANDS.items():
            seconds: dict[int, list[float]] = {0: [], cores: []}
            time_command(arguments, folder)  # Fill the file cache.
            for _ in range(rounds):
                for count, times in seconds.items():
                    report_progress("busy", command, f"{count} busy processes")
                    with keep_busy(count):
                        times.append(time_command(arguments, folder))
            ratios = np.array(seconds[cores]) / np.array(seconds[0])
            rows.append([command, "busy", "the same command on an idle machine", format_spread(ratios)])
            raw.append({"command": command, "seconds": list(seconds.values())})
        with limit_to_one_core() as group:
            for command, arguments in COMMANDS.items() if group else ():
                prefixes = ([*JOIN_GROUP, str(group)], ONE_CORE)
                times = []
                for number in range(rounds + 1):  # Round 0 fills the file cache, and is not counted.
                    report_progress("busy", command, "a quota of one core")
                    order = prefixes[:: -1 if number % 2 else 1]  # Alternate which command runs first.
                    seconds_by_prefix = {prefix[0]: time_command(arguments, folder, prefix) for prefix in order}
                    times.append([seconds_by_prefix[prefix[0]] for prefix in prefixes])
                quota_seconds, core_seconds = np.array(times[1:]).T
                row = [
                    command,
                    "idle, a quota of one core",
                    "the same command on one core",
                    format_spread(quota_seconds / core_seconds),
                ]
                rows.append(row)
                raw.append({"command": command, "quota": times[1:]})
        idle = np.median([float(run_python(["-c", PAGE], folder)) for _ in range(rounds)])
        for name, variables in PAGE_SETTINGS.items():
            report_progress("busy", "gradcam.page", name)
            with keep_busy(cores):  # Run once, because spinning threads need minutes.
                seconds_busy = float(run_python(["-c", PAGE], folder, variables))
            call = " with ".join(filter(None, ("`gradcam.page` in Python", name)))
            rows.append(
                [call, "busy", f"{idle:.1f} s on an idle machine, default settings", f"{seconds_busy / idle:.1f}"]
            )
            raw.append({"call": call, "idle": float(idle), "busy": seconds_busy})
    notes = [
        f"One busy process for each of {cores} cores; medians (with quartiles) of {rounds} rounds. The batch has {PICTURES} "
        f"JPEG files of {SIZE[0]} x {SIZE[1]}, and uses the embedded model."
    ]
    yield Table("busy", "On a busy machine (cpu)", ["call", "machine", "baseline", "time / baseline"], rows, notes, raw)


@contextlib.contextmanager
def keep_busy(count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(run_busy_process())
        yield


@contextlib.contextmanager
def limit_to_one_core() -> Iterator[Path | None]:
    """Create a control group with a CPU quota of one core. If this process lacks the permission, yield None."""
    for mount, settings in CONTROL_GROUPS.items():
        group = mount / "gradcam-bench"
        try:
            group.mkdir(exist_ok=True)
            for name, value in settings.items():
                (group / name).write_text(value)
        except OSError:
            continue
        yield group
        group.rmdir()
        return
    yield None


def time_command(arguments: list[str], folder: Path, prefix: Sequence[str] = ()) -> float:
    start = perf_counter()
    run_python(["-m", "gradcam", *arguments, "--device", "cpu", "-q"], folder, prefix=prefix)
    return perf_counter() - start


def run_python(
    arguments: list[str], folder: Path, variables: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    command, environment = (
        [*prefix, sys.executable, *arguments],
        inherited | {"PYTHONPATH": str(ROOT)} | dict(variables or {}),
    )
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
