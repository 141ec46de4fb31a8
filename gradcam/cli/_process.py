"""Configure the memory, threads and exit of the command's process.

Programs that import the package are not affected.
"""

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
from gradcam.plugins import has_loaded_custom_code

# The function `mallopt` takes these parameters. The GNU C library defines them in malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MEGABYTE = 2**20
# By default, the C library returns freed memory to the system after each layer, and requests new memory for the next
# layer. In a pass of ResNet-50, this causes 30,000 page faults. Below these limits, the library keeps freed memory.
MAX_CACHED_BYTES, MAX_CACHED_BLOCK_BYTES = 1024 * MEGABYTE, 256 * MEGABYTE
OLD_MAX_CACHED_BLOCK_BYTES = 32 * MEGABYTE  # Versions of the C library before 2.35 refuse larger values.
# PyTorch's threads wait for each other many times in each layer, and spin while they wait. By default, GNU OpenMP spins
# for milliseconds. If the machine is busy, a spinning thread takes the core from the thread that it waits for. 5000
# spins last about 50 microseconds. If all cores are free, most waits are shorter than 50 microseconds.
SPINS = "5000"
# `gradcam batch` also decodes and draws images in threads. Spinning threads of PyTorch take cores from these threads.
# Compared with 2000 spins, 0 spins slowed a batch of 16 large images by 12 %. 5000 spins slowed a folder of 632
# photographs by 3 %.
BATCH_SPINS = "2000"
COMPILER_MODULE = "torch._dynamo.utils"


def configure_process() -> None:
    """Cache freed memory, limit spinning and the number of threads, and delay the import of PyTorch's compiler.

    Environment variables of the user for memory and threads take precedence. Importing the compiler takes as long as
    importing torch. torchvision imports the compiler only to check whether the compiler is supported.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ) and "GLIBC_TUNABLES" not in os.environ:
        cache_freed_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", BATCH_SPINS if sys.argv[1:2] == ["batch"] else SPINS)
    cores = count_cores()
    if cores < len(getattr(os, "sched_getaffinity", lambda _: ())(0)):  # A CPU quota would throttle additional threads.
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    if "torch" not in sys.modules:
        sys.modules[COMPILER_MODULE] = _LazyModule(COMPILER_MODULE, "is_compile_supported")


def cache_freed_memory() -> None:
    """Let the GNU C library cache freed memory, up to the limits. Other C libraries are not changed."""
    if set_allocator({TRIM_THRESHOLD: MAX_CACHED_BYTES}) and not set_allocator(
        {MMAP_THRESHOLD: MAX_CACHED_BLOCK_BYTES}
    ):
        set_allocator({MMAP_THRESHOLD: OLD_MAX_CACHED_BLOCK_BYTES})


def set_allocator(parameters: dict[int, int]) -> bool:
    """Set parameters of `mallopt`. Return True if the C library is the GNU library and accepts all parameters."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(parameter, value) == 1 for parameter, value in parameters.items())


class _LazyModule(ModuleType):
    """A module that is imported when `function` is called, or when another attribute is read."""

    def __init__(self, name: str, function: str) -> None:
        super().__init__(name)
        self._function, self._lock = function, threading.Lock()

    def _load(self) -> ModuleType:
        with self._lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python reads these attributes of every module.
            raise AttributeError(name)
        return self._call if name == self._function else getattr(self._load(), name)

    def _call(self, *args: Any) -> Any:
        return getattr(self._load(), self._function)(*args)


def run_and_exit(command: Callable[[], object]) -> None:
    """Run the command, run the exit handlers, and end the process without the usual cleanup.

    The usual cleanup would delete all PyTorch objects and read 100 MB of libraries. The cleanup would take a tenth of
    the time of an explanation.
    """
    try:
        command()
    except SystemExit as exit_request:
        if not isinstance(exit_request.code, int) or not _can_skip_cleanup():
            raise
        threading._shutdown()  # type: ignore[attr-defined]  # as `multiprocessing` does
        atexit._run_exitfuncs()
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except (OSError, ValueError):  # Exit as usual, so that Python reports the error.
            raise exit_request from None
        os._exit(exit_request.code)


def _can_skip_cleanup() -> bool:
    """Return False after custom code has run, which may have open files, or if a debugger or profiler is active."""
    monitoring = getattr(sys, "monitoring", None)
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    is_monitored = sys.gettrace() is not None or sys.getprofile() is not None or any(tools)
    return not (has_loaded_custom_code() or is_monitored or sys.flags.interactive or sys.flags.inspect)
