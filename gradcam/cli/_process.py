"""How the command's own process keeps memory, waits and ends; never that of a program that imports the package."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gradcam.options import count_cores
from gradcam.plugins import has_loaded

# From the GNU C library's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MEGABYTE = 2**20
# Left alone, that library gives a layer's memory back when the next layer begins, and takes it again, page by page:
# thirty thousand times in a pass of ResNet-50. More than this many bytes are not kept, and larger blocks never are.
MOST_KEPT, LARGEST_KEPT = 1024 * MEGABYTE, 256 * MEGABYTE
OLDER_LARGEST = 32 * MEGABYTE  # which is all that versions before 2.35 take
# PyTorch's threads wait for one another many times in each layer, and spin meanwhile: GNU OpenMP for milliseconds where
# nobody says how long. On a machine that is busy, or has pictures to read, that takes the core from whoever is waited for.
# These turns last some fifty microseconds, in which most waits end where all cores are free.
SPINS = "5000"
# `gradcam batch` decodes and draws in other threads meanwhile, and a thread that spins takes a core from them. With 0 a
# batch of 16 large images took 12 % longer, with 5000 a folder of 632 photographs 3 % longer.
SPINS_BESIDE_THREADS = "2000"
COMPILER = "torch._dynamo.utils"


def settle_process() -> None:
    """Keep freed memory, spin for a moment at most, and have no more threads than a quota allows; what the environment
    says of these stands. And leave PyTorch's compiler for later: torchvision asks whether it may be used, and it takes as
    long to import as torch itself."""
    if not any(name.startswith("MALLOC_") for name in os.environ) and "GLIBC_TUNABLES" not in os.environ:
        keep_freed_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS_BESIDE_THREADS if sys.argv[1:2] == ["batch"] else SPINS)
    cores = count_cores()
    if cores < len(getattr(os, "sched_getaffinity", lambda _: ())(0)):  # more threads would use the quota up, and wait
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    if "torch" not in sys.modules:
        sys.modules[COMPILER] = _Later(COMPILER, "is_compile_supported")


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, within bounds, for what is asked for next; nothing where it is not GNU's."""
    if set_allocator({TRIM_THRESHOLD: MOST_KEPT}) and not set_allocator({MMAP_THRESHOLD: LARGEST_KEPT}):
        set_allocator({MMAP_THRESHOLD: OLDER_LARGEST})


def set_allocator(parameters: dict[int, int]) -> bool:
    """Whether the C library is GNU's, and took these parameters of `mallopt`."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(parameter, value) == 1 for parameter, value in parameters.items())


class _Later(ModuleType):
    """A module that is imported when it is used: when its function `answer` is called, or anything else is asked for."""

    def __init__(self, name: str, answer: str) -> None:
        super().__init__(name)
        self._answer, self._lock = answer, threading.Lock()

    def _load(self) -> ModuleType:
        with self._lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which Python asks of all modules
            raise AttributeError(name)
        return self._ask if name == self._answer else getattr(self._load(), name)

    def _ask(self, *args: Any) -> Any:
        return getattr(self._load(), self._answer)(*args)


def end_with(command: Callable[[], object]) -> None:
    """Run it, and end the process with the status that it exits with, once all is done that was left for the end. Taking
    every object of PyTorch apart after that, as Python does, takes a tenth of the time that a picture takes, and its
    libraries read a hundred megabytes that nothing had needed."""
    try:
        command()
    except SystemExit as end:
        if not isinstance(end.code, int) or not _may_end_at_once():
            raise
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's own `multiprocessing` ends a process
        atexit._run_exitfuncs()
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except (OSError, ValueError):  # of which Python tells in its own way
            raise end from None
        os._exit(end.code)


def _may_end_at_once() -> bool:
    """Not where code of a user's own ran, which may have left files open, nor where somebody watches who has yet to tell."""
    monitoring = getattr(sys, "monitoring", None)
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    is_watched = sys.gettrace() is not None or sys.getprofile() is not None or any(tools)
    return not (has_loaded() or is_watched or sys.flags.interactive or sys.flags.inspect)
