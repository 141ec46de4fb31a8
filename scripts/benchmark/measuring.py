"""How it is measured: rounds in turn, without the garbage of others; peaks in processes of their own."""

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
from benchmark.contenders import CONTENDERS, Call
from gradcam.cli._process import MMAP_THRESHOLD, TRIM_THRESHOLD, set_allocator

STATUS = Path("/proc/self/status")
# The GNU C library decides from what happened before whether it gives freed memory back to the system, and taking it
# again may cost a quarter of a forward pass. Left alone, a contender's time depends on which others are installed, and
# the peak of a bare forward pass varies by 80 MB from process to process. The numbers are from its malloc.h.
MMAP_MAX = -4


@dataclass(frozen=True)
class Settings:
    """What the options chose. `rounds`: by batch size. `missing`: the contenders whose package is not there.
    `pictures`: of a folder for a GPU, None for the usual number. `against`: an earlier checkout, for the process."""

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
    """Seconds of one call; the contender's hooks and the `.grad` that it left are gone afterwards, off the clock."""
    device = case.images.device.type
    with CONTENDERS[contender].attach(case) as call:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        seconds = time.perf_counter() - start
    case.model.zero_grad(set_to_none=True)
    return seconds


def time_rounds(contenders: Sequence[str], case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds by contender, one for each round."""
    for name in contenders:
        time_once(name, warm_up(case))
    return take_turns({name: partial(time_once, name, case) for name in contenders}, rounds)


def take_turns(timed: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds by name, one for each round.

    All take their turn within a round, in an order that changes, so that a slow moment of the machine meets all alike.
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
    """The same with two classes of each image at most: contenders that loop have loaded all their kernels by then."""
    return replace(case, classes=[classes[:2] for classes in case.classes])


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects before, not within, so that none pays for another's garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_peak(contender: str, network: str, batch: int, device: str, threads: int) -> int:
    """Bytes over the base at the peak of one call; to be run in a process of its own."""
    torch.set_num_threads(threads)
    return_freed_memory()
    model = build_model(network, device)
    layer = NETWORKS[network].layer
    case = make_case(model, layer, batch, 1, device)
    time_once(contender, make_case(model, layer, 1, 1, device))  # a tiny warm-up: libraries load, pools fill
    gc.collect()
    with CONTENDERS[contender].attach(case) as call:
        base = read_memory("VmRSS") if device == "cpu" else torch.cuda.memory_allocated()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        call()
        synchronise(device)
        return (read_memory("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()) - base


def read_memory(name: str) -> int:
    """Bytes, from the kernel: VmRSS is resident now, VmHWM the most so far.

    Not getrusage's ru_maxrss, which a child process inherits from its parent.
    """
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def call_in_fresh_process(function: Callable[..., int], *args: Any) -> int:
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def keep_freed_memory() -> None:
    """For time: after the warm-up none pays for taking memory from the system, not even those who use the most."""
    set_allocator({TRIM_THRESHOLD: -1, MMAP_MAX: 0})  # the command's own bounds are for those who share a machine


def return_freed_memory() -> None:
    """For memory: what is resident is what is in use, but for small blocks."""
    set_allocator({MMAP_THRESHOLD: 2**20})


def report_progress(*parts: object) -> None:
    click.echo("... " + ", ".join(map(str, parts)), err=True)


def time_call(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
