"""Run `gradcam` in processes that can be disturbed: each is forked from one that imported gradcam, which saves time.

For scripts that import this module first: PyTorch must not have started threads before a process is forked.
"""

import importlib
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "GRADCAM_TRACEBACK": ""}

import torch
import torchvision  # noqa: F401  (what a run imports late)
from PIL import Image

import gradcam
from gradcam.cli import main

torch.set_num_threads(1)
for module in pkgutil.walk_packages(gradcam.__path__, "gradcam."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

ASSETS = Path(__file__).parents[1] / "assets"
UNFINISHED = (".gradcam-*.tmp", ".gradcam-partial*")
TIMES = ("log", ".gradcam")  # prefixes of the files that differ between runs


@dataclass(frozen=True)
class Ended:
    """The result of a process: `status` as in a shell (128 plus the number of a signal), `memory` its peak in bytes."""

    status: int
    out: str
    err: str
    seconds: float
    memory: int


class Started:
    """A running `gradcam` process in a folder."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._files = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
        self._begin = time.monotonic()
        sys.stdout.flush()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become_gradcam(arguments, folder, self._files, writer)
        os.close(writer)
        os.read(reader, 1)  # Wait until the process has its output files: an earlier signal would not reach `gradcam`.
        os.close(reader)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> Ended | None:
        """Wait for the end of the process, and return None if it is still running after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(status)
        out, err = (path.read_text(errors="surrogateescape") for path in self._files)
        return Ended(128 - code if code < 0 else code, out, err, time.monotonic() - self._begin, usage.ru_maxrss * 1024)


def run(arguments: Sequence[str], folder: Path, *, seconds: float = 600) -> Ended | None:
    """Run `gradcam ...` to its end; kill it and return None if it takes too long."""
    process = Started(arguments, folder)
    ended = process.wait(seconds)
    if ended is None:
        process.send(signal.SIGKILL)
        process.wait(60)
    return ended


def _become_gradcam(arguments: Sequence[str], folder: Path, files: Iterable[Path], ready: int) -> None:
    status = 70
    try:
        os.chdir(folder)
        for stream, path in enumerate([Path(os.devnull), *files]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["gradcam", *arguments]
        os.write(ready, b"1")
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def make_pictures(folder: Path, count: int) -> None:
    """Write small images to two folders, one of them damaged."""
    (folder / "more").mkdir(parents=True)
    photographs = sorted(ASSETS.glob("*.jpg")) + sorted(ASSETS.glob("*.webp"))
    for number in range(count):
        with Image.open(photographs[number % len(photographs)]) as picture:
            picture.draft("RGB", (160, 160))
            small = picture.convert("RGB").resize((96, 80)).rotate(number)
        small.save(folder / ("more" if number % 2 else "") / f"{number:02}.jpg")
    (folder / "03 broken.jpg").write_bytes((folder / "00.jpg").read_bytes()[:700])


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files that must be the same however often a run was stopped."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(TIMES)
    }


def find_unfinished(folder: Path) -> list[str]:
    """List the unfinished files of a stopped run."""
    return [str(path.relative_to(folder)) for pattern in UNFINISHED for path in folder.rglob(pattern)]
