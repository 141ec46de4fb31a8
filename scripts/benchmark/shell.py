"""Compare the time of commands with the start of Python."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmark.cases import PICTURE, ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table


def compare_shell(settings: Settings) -> Iterator[Table]:
    """Compare the commands with the time that Python needs to start and to import the same libraries."""
    command = Path(sysconfig.get_path("scripts"), "gradcam")
    title, rounds = "The command line", max(settings.rounds.values())
    rows, notes, raw = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for command_line, arguments, statement in (
            ("gradcam --help", ["--help"], "pass"),
            (f"gradcam run {PICTURE}", ["run", str(PICTURE), "-o", folder], "import torch, cv2"),
            ("gradcam layers resnet50", ["layers", "resnet50"], "import torch, torchvision"),
        ):
            report_progress(title, command_line)
            commands = [str(command), *arguments], [sys.executable, "-c", statement]
            obstacle = find_obstacle(command, commands)
            if obstacle:
                notes.append(f"`{command_line}` skipped: {obstacle}")
                continue
            seconds = time_pairs(*commands, rounds)
            rows.append([f"`{command_line}`", f'`python -c "{statement}"`', *format_difference(*seconds)])
            raw.append({"command": command_line, "statement": statement, "seconds": seconds})
    notes.append(
        f"Seconds, over {rounds} alternating pairs: medians, their difference, and quartiles of the difference in each pair."
    )
    header = ["command", "baseline", "command, s", "baseline, s", "difference, s", "quartiles, s"]
    yield Table("shell", title, header, rows, notes, raw)


def find_obstacle(command: Path, commands: Sequence[list[str]]) -> str | None:
    """Run both commands once as a warm-up. If a command cannot be timed, return the reason, otherwise None."""
    if not command.exists():
        return "the command is not installed with this Python."
    if str(PICTURE) in commands[0] and not (ROOT / PICTURE).exists():
        return "the image is missing."
    for arguments in commands:
        result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            return f"exit status {result.returncode}, {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None


def time_pairs(command: list[str], base: list[str], rounds: int) -> tuple[list[float], list[float]]:
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(rounds):
        order = ((0, command), (1, base))
        for index, arguments in order if number % 2 else reversed(order):  # Alternate the order.
            start = time.perf_counter()
            subprocess.run(arguments, cwd=ROOT, capture_output=True, check=True)
            seconds[index].append(time.perf_counter() - start)
    return seconds


def format_difference(command: list[float], base: list[float]) -> list[str]:
    """Return both medians, the difference of the medians, and the quartiles of the differences of the pairs."""
    command_median, base_median = float(np.median(command)), float(np.median(base))
    low, high = np.percentile(np.subtract(command, base), (25, 75))
    return [
        f"{command_median:.3f}",
        f"{base_median:.3f}",
        f"{command_median - base_median:.3f}",
        f"{low:.3f} to {high:.3f}",
    ]
