"""What the command settles for its own process: freed memory that is kept, and threads that spin for a moment only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmark.measuring import Settings, report_progress
from benchmark.pictures import make_pictures
from benchmark.tables import Table, format_spread

PICTURES, FEW = 16, 2  # that are timed, and that warm up
SIZE = (1024, 768)
# As it was: any variable of the allocator's has the command leave it alone, and so many turns are GNU OpenMP's own.
LEFT_ALONE = {"MALLOC_PERTURB_": "0", "GOMP_SPINCOUNT": "300000"}
NETWORK = """
import torch, torchvision

def network():
    torch.manual_seed(0)
    return torchvision.models.resnet50(weights=None).eval()
"""
# A command on a few pictures, then on all: seconds, seconds of the processor, page faults, and the peak of the process.
CHILD = """
import json, os, resource, sys, time
from gradcam.cli import main

def run():
    sys.argv = ["gradcam", *json.loads(sys.stdin.readline()), "-q"]
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = [sum(getattr(it, name) for name in ("ru_utime", "ru_stime")) for it in (before, after)]
    return [time.perf_counter() - start, spent[1] - spent[0], after.ru_minflt - before.ru_minflt]

run()
found = run()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps([*found, int(peak.split()[1]) * 1024]))
"""
BUSY = "while True: sum(range(100000))"
MODELS = {"ResNet-50": ["--model", "network.py:network", "--layer", "layer4"], "the one that comes along": []}


def compare_process(settings: Settings) -> Iterator[Table]:
    """`gradcam batch` and `gradcam run`, alone and beside a busy process: as they are over what they were."""
    rounds, rows, raw = max(settings.rounds.values()), [], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "network.py").write_text(NETWORK)
        for name, count in (("pictures", PICTURES), ("few", FEW)):
            make_pictures(folder / name, count, SIZE)
        for command, model, is_busy in itertools.product(("batch", "run"), MODELS, (False, True)):
            report_progress("process", command, model, "busy" if is_busy else "alone")
            pairs = []
            with busy_process() if is_busy else contextlib.nullcontext():
                for number in range(rounds):
                    order = (LEFT_ALONE, {}) if number % 2 else ({}, LEFT_ALONE)  # each first in every other pair
                    found = {len(each): measure(folder, command, model, each) for each in order}
                    pairs.append((found[0], found[len(LEFT_ALONE)]))
            own, other = (np.array(each) for each in zip(*pairs))
            ratios = own / np.maximum(other, 1)
            cells = [format_spread(other[:, 0] / own[:, 0]), *(format_spread(ratios[:, i]) for i in (1, 3))]
            faults = [f"{np.median(each[:, 2]) / PICTURES:.0f}" for each in (other, own)]
            rows.append(
                [f"`gradcam {command}`", model, "a busy process" if is_busy else "", *cells, " to ".join(faults)]
            )
            raw.append({"command": command, "model": model, "busy": is_busy, "pairs": pairs})
    notes = [
        f"{PICTURES} JPEG files of {SIZE[0]} x {SIZE[1]} from files to overlays, in a process that has run the command "
        f"before, on {FEW}. Medians (with quartiles) of {rounds} pairs; what it was is the same command with the "
        f"allocator's and OpenMP's own settings. Load of the machine at the end: {os.getloadavg()[1]:.1f}.",
    ]
    header = ["command", "model", "beside", "times as fast", "processor time", "peak memory", "page faults a picture"]
    yield Table("process", "Memory and waiting (cpu)", header, rows, notes, raw)


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, command: str, model: str, more: dict[str, str]) -> list[float]:
    """What one process took, with these variables in its environment."""
    own = ("MALLOC_", "GLIBC_TUNABLES", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    with tempfile.TemporaryDirectory(dir=folder) as output:
        lines = [
            [command, name, *MODELS[model], "--device", "cpu", "-o", f"{output}/{name}/"]
            for name in ("few", "pictures")
        ]
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            cwd=folder,
            env=environment | more,
            input="".join(f"{json.dumps(line)}\n" for line in lines),
            capture_output=True,
            text=True,
            check=True,
        )
    return list(json.loads(done.stdout))
