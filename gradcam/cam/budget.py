"""What methods that run the model again may take, and whom they tell how far they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from gradcam.errors import GradcamError, shorten
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.memory import Meter
from gradcam.hooks.nested import Batch
from gradcam.options import check_count

DEFAULT_BUDGET = 2**28  # bytes
MOST_ROWS = 1024  # of a batch; larger ones are not faster

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RerunBudget:
    """A memory budget, somebody to tell, and what parts of one pass of the batch take. `batch`: the model's arguments,
    as they came; whoever runs the model gives it copies. `budget`: bytes, None for the default, which is exceeded where
    not even one variant of the batch fits."""

    batch: Batch
    budget: int | None = None
    progress: Progress | None = None

    @functools.cached_property
    def meter(self) -> Meter:
        return Meter()

    @contextlib.contextmanager
    def measured(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Around one run of the model: what the tail behind each layer takes."""
        with Hooks() as hooks:
            for layer in layers:
                hooks.after_forward(layer, lambda module, *_: self.meter.mark(module))
            with self.meter:
                yield

    def fitting(self, bytes_each: int) -> int:
        """How many variants of the batch fit, each of so many bytes; it may be none."""
        return min((self.budget or DEFAULT_BUDGET) // max(bytes_each, 1), MOST_ROWS // self.batch.images)

    def require_one(self, bytes_each: int) -> None:
        """Raises `GradcamError` where a budget was given into which not even one variant of the batch fits."""
        if self.budget is not None and bytes_each > self.budget:
            raise GradcamError(
                f"memory_budget is {self.budget} bytes, and one variant of the {self.batch.images} image(s) takes "
                f"{bytes_each}: allow that much, or explain fewer images at once."
            )

    def report(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)


def check_budget(budget: int | None, progress: Progress | None) -> None:
    """Raises `GradcamError` for a budget that is no number of bytes, and for somebody who cannot be told."""
    if budget is not None:
        check_count(budget, "memory_budget", "a number of bytes, 1 or more.")
    if progress is not None and not callable(progress):
        raise GradcamError(f"progress is {shorten(progress)}, expected a function of the passes done and of all.")
