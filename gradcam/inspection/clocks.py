"""How long something takes on a device that works on after it was told what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Clock:
    """`read` takes the time; `wait`, called once at the end, makes times ready for `between`, which gives seconds."""

    read: Callable[[], Any]
    wait: Callable[[], None]
    between: Callable[[Any, Any], float]


def find_clock(devices: Collection[torch.device]) -> Clock:
    """The clock for what runs on these devices.

    On one CUDA device times are events in its stream, for which nothing waits. Several devices, and those of other kinds,
    are waited for at each reading.
    """
    others = [device for device in devices if device.type not in ("cpu", "meta")]

    def wait() -> None:
        for device in others:
            torch.accelerator.synchronize(device)

    if len(others) == 1 and others[0].type == "cuda":
        return Clock(lambda: _mark(others[0]), wait, lambda begun, ended: begun.elapsed_time(ended) / 1000)

    def read() -> float:
        wait()
        return time.perf_counter()

    return Clock(read if others else time.perf_counter, wait, lambda begun, ended: ended - begun)


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
