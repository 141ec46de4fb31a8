"""Models, each loaded once, and let go when memory is short."""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradcam.hooks.memory import is_out_of_memory
from gradcam.models.classifier import Classifier

MOST = 3  # kept at once: two that are compared, and one before
SHORT = 2**30  # bytes of free memory below which only what is asked for is kept

Result = TypeVar("Result")


@dataclass(frozen=True)
class Wanted:
    """Which model, as the page names it: None for the one that `gradcam ui` was started with. `texts`: the sentences that
    pictures are matched with, or what a detector that is told by words looks for."""

    model: str | None = None
    weights: str | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A model; the options of the shell that choose it; the Python that loads it; how its layer's output is reshaped."""

    classifier: Classifier
    words: tuple[str, ...]
    code: str
    reshape: Any = None


class Models:
    """Those that were asked for last."""

    def __init__(self, load: Callable[[Wanted], Loaded], free: Callable[[], int | None] | None = None) -> None:
        self._load, self._free = load, free or find_free_memory
        self._kept: OrderedDict[Wanted, Loaded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, wanted: Wanted) -> Loaded:
        """The model, loaded if need be. Raises `GradcamError` as loading does."""
        if wanted not in self._kept:
            free = self._free()
            self.let_go(0 if free is not None and free < SHORT else MOST - 1)
            self._kept[wanted] = self.with_room(lambda: self._load(wanted))
        self._kept.move_to_end(wanted)
        return self._kept[wanted]

    def with_room(self, work: Callable[[], Result]) -> Result:
        """What the work gives; where memory runs out, once more without the models that are kept besides."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._kept:
                raise
        self.let_go(1)
        return work()

    def let_go(self, count: int) -> None:
        """Keep only so many, the last that were asked for."""
        while len(self._kept) > count:
            self._kept.popitem(last=False)
        gc.collect()


def find_free_memory() -> int | None:
    """Bytes that can be had, where the system says it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
