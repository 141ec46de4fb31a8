"""A cache of loaded models, which drops models when memory is short."""

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

MAX_CACHED_MODELS = 3  # two models that are compared, and the model used before
LOW_MEMORY_BYTES = 2**30  # with less free memory, only the requested model is cached

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelRequest:
    """The model that the page asks for.

    `model` is None for the model that `gradcam ui` was started with. `texts` are the sentences for a CLIP-like model,
    or the text prompts of a text-prompted detector.
    """

    model: str | None = None
    weights: str | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model.

    `words` are the command-line options that select the model. `code` is the line of Python that loads the model.
    `reshape` is the layout of its layer's output.
    """

    classifier: Classifier
    words: tuple[str, ...]
    code: str
    reshape: Any = None


class ModelCache:
    """The most recently used models. `load` is the function that loads a model."""

    def __init__(self, load: Callable[[ModelRequest], LoadedModel]) -> None:
        self._load = load
        self._cached: OrderedDict[ModelRequest, LoadedModel] = OrderedDict()
        self.is_loading = False  # whether a model is being loaded, which may include a download

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, request: ModelRequest) -> LoadedModel:
        """Return the model; load it if it is not cached. Raise `GradcamError` if it cannot be loaded."""
        if request not in self._cached:
            free = find_free_memory()
            self.evict(0 if free is not None and free < LOW_MEMORY_BYTES else MAX_CACHED_MODELS - 1)
            self.is_loading = True
            try:
                self._cached[request] = self.retry_out_of_memory(lambda: self._load(request))
            finally:
                self.is_loading = False
        self._cached.move_to_end(request)
        return self._cached[request]

    def retry_out_of_memory(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`. If memory runs out, drop all models but the most recent one and retry."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._cached:
                raise
        self.evict(1)
        return work()

    def evict(self, count: int) -> None:
        """Drop the least recently used models until `count` are left."""
        while len(self._cached) > count:
            self._cached.popitem(last=False)
        gc.collect()


def find_free_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
