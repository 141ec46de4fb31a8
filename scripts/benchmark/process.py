"""Compare the processes of the commands with an earlier checkout, or with the default settings of malloc and OpenMP."""

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
import torch
from PIL import Image
from torchvision.models import resnet50

from benchmark.measuring import Settings, report_progress
from benchmark.pictures import make_image_files
from benchmark.tables import Table, format_spread

PICTURES, WARM_UPS = 16, 2  # The numbers of timed images and of warm-up images.
SIZE = (1024, 768)
ROOT = Path(__file__).parents[2]
# If an allocator variable is set, gradcam does not change the allocator. The spin count is GNU OpenMP's default.
DEFAULT_VARIABLES = {"MALLOC_PERTURB_": "0", "GOMP_SPINCOUNT": "300000"}
# Runs a batch of a few images, then a batch of all images. Only the second batch is measured, because the start and the
# end are a small part of a long batch.
BATCH = """
import json, resource, sys, time
from gradcam.cli import main

def run():
    sys.argv = ["gradcam", *json.loads(sys.stdin.readline())]
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = [sum(getattr(it, name) for name in ("ru_utime", "ru_stime")) for it in (before, after)]
    faults = after.ru_minflt - before.ru_minflt
    return [time.perf_counter() - start, seconds[1] - seconds[0], after.ru_maxrss * 1024, faults]

run()
print(json.dumps(run()))
"""
# Runs the command in a new process, and measures the time and memory of this process.
RUN = """
import json, os, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run([sys.executable, "-m", "gradcam", *json.loads(sys.stdin.readline())], stdout=subprocess.DEVNULL)
assert not done.returncode, done.returncode
spent = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = spent.ru_utime + spent.ru_stime
print(json.dumps([time.perf_counter() - start, seconds, spent.ru_maxrss * 1024, spent.ru_minflt]))
"""
# Draws overlays in one thread, and prints the median time in seconds.
DRAW = """
import statistics, time
import gradcam, numpy as np
random, seconds = np.random.default_rng(0), []
picture = random.integers(0, 256, (768, 1024, 3), dtype=np.uint8)
heatmap = random.random((224, 224), dtype=np.float32)
for _ in range(60):
    start = time.perf_counter()
    gradcam.overlay(picture, heatmap)
    seconds.append(time.perf_counter() - start)
print(statistics.median(seconds[10:]))
"""
BUSY = "while True: sum(range(100000))"
# The name of a case, and the number and the maximum side of its photographs. No other process is busy in this case.
FOLDER, PHOTOGRAPHS, PHOTOGRAPH_PIXELS = "photographs", 632, 640
MODELS = {
    "ResNet-50": ["--model", "resnet50", "--weights", "weights.pt", "--layer", "layer4"],
    "embedded": [],
}


def compare_process(settings: Settings) -> Iterator[Table]:
    """Compare `gradcam batch` and `gradcam run` with a baseline, on an idle machine and beside a busy process."""
    rounds, rows, raw = max(settings.rounds.values()), [], []
    new_variables, old_variables = {"PYTHONPATH": str(ROOT)}, {"PYTHONPATH": str(settings.against or ROOT)}
    environments = (new_variables, old_variables if settings.against else old_variables | DEFAULT_VARIABLES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        torch.save(resnet50(weights=None).state_dict(), folder / "weights.pt")
        for name, count in (("pictures", PICTURES), ("few", WARM_UPS)):
            make_image_files(folder / name, count, SIZE)
        if settings.against:
            copy_photographs(folder / FOLDER, PHOTOGRAPHS)
        cases = itertools.product(("batch", "run"), MODELS, (False, True))
        for command, model, is_busy in [*([(FOLDER, "embedded", False)] if settings.against else []), *cases]:
            report_progress("process", command, model, "busy" if is_busy else "alone")
            with run_busy_process() if is_busy else contextlib.nullcontext():
                # The first run compiles imported modules and fills the file cache.
                for environment in environments:
                    measure(folder, command, model, environment)
                pairs = []
                for number in range(rounds):
                    order = (1, 0) if number % 2 else (0, 1)  # Alternate the order.
                    figures = {index: measure(folder, command, model, environments[index]) for index in order}
                    pairs.append((figures[0], figures[1]))
            new, old = (np.array(side) for side in zip(*pairs))
            ratios = new / np.maximum(old, 1e-9)
            cells = [format_spread(1 / ratios[:, 0]), *(format_spread(ratios[:, column]) for column in (1, 2))]
            faults = " to ".join(f"{np.median(side[:, 3]) / 1000:.0f}" for side in (old, new))
            title = f"`gradcam batch`, {PHOTOGRAPHS} photographs" if command == FOLDER else f"`gradcam {command}`"
            rows.append([title, model, "a busy process" if is_busy else "none", *cells, faults])
            raw.append({"command": command, "model": model, "busy": is_busy, "pairs": pairs})
    baseline = (
        "an earlier version of this package"
        if settings.against
        else "the same command with the default allocator and OpenMP settings"
    )
    notes = [
        f"JPEG files of {SIZE[0]} x {SIZE[1]}, from input files to overlays. Batch: {PICTURES} images, in a process that "
        f"has explained {WARM_UPS} before. {PHOTOGRAPHS} photographs: JPEG files of up to {PHOTOGRAPH_PIXELS} pixels a "
        "side, the whole process. Run: the whole process for one image, including the import of torch. Medians (with "
        f"quartiles) of {rounds} pairs, compared with {baseline}. Load average at the end: {os.getloadavg()[1]:.1f}."
    ]
    header = ["command", "model", "load", "speed-up", "CPU time", "peak memory", "thousand page faults"]
    yield Table("process", "Memory and threads of the command (cpu)", header, rows, notes, raw)


def compare_drawing(settings: Settings) -> Iterator[Table]:
    """Compare the time to draw an overlay with an earlier checkout. If no checkout is given, yield nothing."""
    if settings.against is None:
        return
    rounds, times = max(settings.rounds.values()), []
    for number in range(rounds + 1):  # Round 0 compiles imported modules.
        trees = (ROOT, settings.against)[:: -1 if number % 2 else 1]
        times.append({tree: draw(tree) for tree in trees})
    new, old = (np.array([seconds[tree] for seconds in times[1:]]) * 1000 for tree in (ROOT, settings.against))
    notes = [f"An image of {SIZE[0]} x {SIZE[1]}, one thread; medians (with quartiles) of {rounds} pairs of processes."]
    row = ["`gradcam.overlay`", *(format_spread(seconds) for seconds in (old, new, old / new))]
    yield Table(
        "drawing",
        "Drawing (cpu)",
        ["", "before, ms", "now, ms", "speed-up"],
        [row],
        notes,
        [list(seconds.values()) for seconds in times],
    )


def draw(tree: Path) -> float:
    """Draw overlays with the package in this folder, and return the median time of an overlay in seconds."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", DRAW], cwd=tree, env=environment, capture_output=True, check=True)
    return float(process.stdout)


def copy_photographs(folder: Path, count: int) -> None:
    """Write small copies of the photographs in assets/. Rotate the copies, so that all files differ."""
    folder.mkdir()
    files = [path for path in sorted((ROOT / "assets").iterdir()) if path.suffix in (".jpg", ".webp")]
    photographs = [Image.open(path).convert("RGB") for path in files if not path.name.startswith("readme")]
    for number in range(count):
        image = photographs[number % len(photographs)].rotate(number // len(photographs))
        image.thumbnail((PHOTOGRAPH_PIXELS, PHOTOGRAPH_PIXELS))
        image.save(folder / f"{number:04}.jpg", quality=90)


@contextlib.contextmanager
def run_busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, command: str, model: str, variables: dict[str, str]) -> list[float]:
    """Run one process, and return its seconds, CPU seconds, peak memory in bytes, and page faults."""
    cleared = ("MALLOC_", "GLIBC_TUNABLES", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(cleared)}
    with tempfile.TemporaryDirectory(dir=folder) as output:
        names = {"batch": ("few", "pictures"), FOLDER: (FOLDER,)}.get(command, (str(next((folder / "few").iterdir())),))
        options = [*MODELS[model], "--device", "cpu", "-q", "-o"]
        verb = "batch" if command == FOLDER else command
        lines = [[verb, name, *options, f"{output}/{number}/"] for number, name in enumerate(names)]
        process = subprocess.run(
            [sys.executable, "-c", BATCH if command == "batch" else RUN],
            cwd=folder,
            env=environment | variables,
            input="".join(f"{json.dumps(line)}\n" for line in lines),
            capture_output=True,
            text=True,
            check=True,
        )
    return list(json.loads(process.stdout))
