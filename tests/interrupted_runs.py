"""Commands that take long, interrupted at random moments: each has to end at once, with its status and no traceback.

python -m tests.interrupted_runs --count 50 --seed 0
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.processes import ASSETS, Started, make_pictures

SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
METHODS = ("rise", "scorecam", "ablationcam")  # These run the model many times, which allocates and frees many tensors.
ENDED, DONE = "ended", "was done before"
LATEST = 3.0  # seconds after the signal


def make_command(chooser: random.Random, processes: int | None) -> list[str]:
    if processes is not None:
        return ["batch", "photos", "-o", "out", "--overwrite", "--device", "cpu", "--processes", str(processes)]
    return ["run", "photo.jpg", "-q", "-o", "out.png", "--device", "cpu", "--method", chooser.choice(METHODS)]


def interrupt(folder: Path, chooser: random.Random, longest: float, processes: int | None) -> str:
    """Return how a command took a signal: "ended", or what is wrong."""
    command, number = make_command(chooser, processes), chooser.choice(SIGNALS)
    started, delay = Started(command, folder), chooser.uniform(0, longest)
    ended = started.wait(delay)
    if ended is not None:
        return DONE
    begin = time.monotonic()
    started.send(number)
    ended = started.wait(LATEST)
    description = f"{' '.join(command)}, {number.name} after {delay:.3f} s"
    if ended is None:
        started.send(signal.SIGKILL)
        started.wait(60)
        return f"{description}: still there after {time.monotonic() - begin:.1f} s"
    if ended.status == 0:
        return DONE
    if ended.status != 128 + number or "Traceback" in ended.err or "ignored" in ended.err:
        return f"{description}: status {ended.status}\n{ended.err[-2000:]}"
    return ENDED


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds before a signal, at most")
    parser.add_argument("--processes", type=int, help="interrupt `gradcam batch` with so many")
    options = parser.parse_args()
    chooser, actual = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        folder.mkdir()
        shutil.copy(ASSETS / "cat_and_espresso.jpg", folder / "photo.jpg")
        make_pictures(folder / "photos", 200)
        for _ in range(options.count):
            outcome = interrupt(folder, chooser, options.longest, options.processes)
            actual[outcome if outcome in (ENDED, DONE) else "wrong"] += 1
            if outcome not in (ENDED, DONE):
                print(outcome, flush=True)
    print(dict(actual))
    return int(actual["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
