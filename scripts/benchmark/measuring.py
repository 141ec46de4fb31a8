"""Measure time in alternating rounds without garbage collection, and peak memory in separate processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmark.cases import NETWORKS, SEED, Case, build_model, make_case
from benchmark.contenders import CONTENDERS, Call, attach
from gradcam.cli._process import MMAP_THRESHOLD, TRIM_THRESHOLD, set_allocator

STATUS = Path("/proc/self/status")
# A parameter of glibc's malloc, from malloc.h. By default, earlier allocations decide whether malloc returns freed
# memory to the system. Allocating the memory again can take a quarter of the time of a forward pass. The times of a
# contender would therefore depend on the other installed libraries, and the peak of a forward pass would vary by 80 MB.
MMAP_MAX = -4


@dataclass(frozen=True)
class Settings:
    """The options of a benchmark run.

    `rounds` maps each batch size to a number of rounds. `missing` contains the contenders whose package is not
    installed. `pictures` is the number of images in the section gpu. None means the section's default. `against` is the
    earlier checkout to compare with in the sections process and drawing.
    """

    rounds: dict[int, int]
    devices: tuple[str, ...]
    threads: int
    missing: frozenset[str]
    pictures: int | None = None
    against: Path | None = None

    @property
    def present(self) -> list[str]:
        return [name for name in CONTENDERS if name not in self.missing]


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_once(contender: str, case: Case) -> float:
    """Return the seconds of one call. Removing hooks and clearing `.grad` after the call is not timed."""
    device = case.images.device.type
    with attach(contender, case) as call:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        seconds = time.perf_counter() - start
    case.model.zero_grad(set_to_none=True)
    return seconds


def time_rounds(contenders: Sequence[str], case: Case, rounds: int) -> dict[str, list[float]]:
    """Return a dict from each contender to its seconds, with one value per round."""
    for name in contenders:
        time_once(name, warm_up(case))
    return take_turns({name: partial(time_once, name, case) for name in contenders}, rounds)


def take_turns(timed: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return a dict from each name to seconds, with one value per round.

    Each round runs every function once, in random order, so that no function is always measured at a slow moment.
    """
    shuffled, order = random.Random(SEED), list(timed)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        shuffled.shuffle(order)
        with no_garbage_collection():
            for name in order:
                seconds[name].append(timed[name]())
    return seconds


def warm_up(case: Case) -> Case:
    """Return the case with at most two classes per image. Two classes load all kernels of contenders that loop."""
    return replace(case, classes=[classes[:2] for classes in case.classes])


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage, then disable collection, so that no contender has to collect another contender's garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_peak(contender: str, network: str, batch: int, device: str, threads: int) -> int:
    """Return the peak memory of one call, in bytes above the memory in use before. Call this in a new process."""
    torch.set_num_threads(threads)
    return_freed_memory()
    model = build_model(network, device)
    layer = NETWORKS[network].layer
    case = make_case(model, layer, batch, 1, device)
    # A small call loads libraries and fills memory pools.
    time_once(contender, make_case(model, layer, 1, 1, device))
    gc.collect()
    with CONTENDERS[contender].attach(case) as call:
        base = read_memory("VmRSS") if device == "cpu" else torch.cuda.memory_allocated()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        call()
        synchronise(device)
        return (read_memory("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()) - base


def read_memory(name: str) -> int:
    """Return a value in bytes from /proc/self/status. VmRSS is the resident memory, and VmHWM is its peak.

    Do not use `ru_maxrss` of getrusage, because a child process inherits this value from its parent.
    """
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def call_in_fresh_process(function: Callable[..., int], *args: Any) -> int:
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, so that timed calls need no new memory from the system after the warm-up."""
    set_allocator({TRIM_THRESHOLD: -1, MMAP_MAX: 0})  # The limits of `gradcam` suit shared machines.


def return_freed_memory() -> None:
    """Make malloc return large freed blocks immediately, so that the resident memory is the memory in use."""
    set_allocator({MMAP_THRESHOLD: 2**20})


def report_progress(*parts: object) -> None:
    click.echo("... " + ", ".join(map(str, parts)), err=True)


def time_call(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
