"""Cache of computed facts about a model, and the guard that clears it when the model changes.

The search for a default layer, and the measurement of a layout, need forward passes, so the results are cached. Cached
results are valid for one state of the model: its modules, settings and hooks, and the identity, memory, version and
sampled values of its tensors. Versions alone are not enough: writes through `.data` or NumPy do not increase a tensor's
version. Facts that depend on the input are not cached. Code that uses a cached fact compares the fact with the graph of
its own pass.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from gradcam.hooks.model_state import ModelState

Answer = TypeVar("Answer")

MAX_CACHED_VALUES = 1024  # The limit per model. The oldest values are dropped first.


@dataclass
class ModelFacts:
    """Cached facts about a model in its present state. The state is read at the first access."""

    model: nn.Module
    is_new: bool = False  # True if nothing was cached for this state.

    def remember(self, key: Hashable, compute: Callable[[], Answer]) -> Answer:
        """Return the cached value, or compute and cache it."""
        if key not in self._cache:
            self.set(key, compute())
        return self._cache[key]

    def get(self, key: Hashable) -> Any:
        """Return the cached value; None if no value is cached."""
        return self._cache.get(key)

    def set(self, key: Hashable, value: Any) -> None:
        """Cache a value, and replace an earlier value. None deletes the entry."""
        self._cache.pop(key, None)
        self._cache.update({} if value is None else {key: value})
        while len(self._cache) > MAX_CACHED_VALUES:
            self._cache.pop(next(iter(self._cache)), None)

    def read(self) -> None:
        """Read the state of the model now, before a pass changes it."""
        _ = self._cache

    def take_over(self) -> None:
        """Keep the cached values if only the explanation itself has changed the model.

        Some models change in every pass, because they count their passes or store an output. The new state replaces the
        recorded state, so that the cache stays valid.
        """
        state, cache = _cached_states.get(self.model, (None, {}))
        if state is None or cache is not self._cache or not (self.is_new or self.model in self_changing_models):
            return
        from gradcam.hooks.model_state import ModelState

        # Reading the attributes of arbitrary classes, or unusual tensors, may raise any exception.
        with contextlib.suppress(Exception), _lock:
            if not state.holds(self.model):
                self_changing_models.add(self.model)
                _cached_states[self.model] = ModelState(self.model), cache

    @functools.cached_property
    def _cache(self) -> dict[Hashable, Any]:
        from gradcam.hooks.model_state import ModelState

        state, cache = _cached_states.get(self.model, (None, {}))
        with contextlib.suppress(Exception), _lock:
            if state is not None and state.holds(self.model):
                return cache
        _cached_states.pop(self.model, None)
        cache, self.is_new = {}, True
        with contextlib.suppress(Exception):
            _cached_states[self.model] = ModelState(self.model), cache
        return cache


_lock = threading.RLock()  # Threads that explain the same model must not read its state at the same time.
# Maps each model to its last state and the values cached for this state.
_cached_states = weakref.WeakKeyDictionary[nn.Module, tuple["ModelState", dict[Hashable, Any]]]()
# Models that change in every pass. The state of such a model is read before the pass.
self_changing_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
