"""A cache of loaded models that drops models if the system has little free memory."""

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

MAX_CACHED_MODELS = 3  # Two models to compare, and the model used before.
LOW_MEMORY_BYTES = 2**30  # With less free memory, only the requested model is cached.

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelRequest:
    """The model that the page requests.

    If `model` is None, the request is for the default model, with which `gradcam ui` was started. `texts` are the
    sentences for a CLIP-like model, or the prompts for a text-prompted detector.
    """

    model: str | None = None
    weights: str | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, and how a user would load it.

    `words` are the command-line options that select the model. `code` is the line of Python that loads the model.
    `reshape` is the layout of tokens at the explained layer, as in `gradcam.explain`.
    """

    classifier: Classifier
    words: tuple[str, ...]
    code: str
    reshape: Any = None


class ModelCache:
    """Caches the most recently used models. `load` is the function that loads a model."""

    def __init__(self, load: Callable[[ModelRequest], LoadedModel]) -> None:
        self._load = load
        self._cached: OrderedDict[ModelRequest, LoadedModel] = OrderedDict()
        self.is_loading = False  # The page reports this, because loading may include a download.

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, request: ModelRequest) -> LoadedModel:
        """Return the requested model from the cache, or load it. Raise `GradcamError` if the model cannot be loaded."""
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
        """Return the result of `work`. If memory runs out, drop all models except the last used one, and retry."""
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
