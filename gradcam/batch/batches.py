"""Cutting what is to be explained into batches, always at the same places."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gradcam.batch.items import Item
from gradcam.classifiers import Classifier

ON_CPU = 8  # pictures: larger batches are hardly faster there, and hold more decoded pictures in memory
ON_DEVICE = 32  # fills a GPU with the usual networks; halved where it does not fit


@dataclass(frozen=True)
class Cut:
    """One batch: its items, and for each whether its result is wanted. `start`: the first one's place among all."""

    start: int
    items: list[Item]
    needed: list[bool]


def cut(items: Iterable[Item], size: int, is_needed: Callable[[Item], bool]) -> Iterator[Cut]:
    """Batches of so many items, those without any needed one left out: what a batch holds does not depend on the others.

    Numbers change a little with the batch. So a picture is always explained among the same others.
    """
    remaining = iter(items)
    for start in itertools.count(0, size):
        taken = list(itertools.islice(remaining, size))
        if not taken:
            return
        needed = [bool(is_needed(item)) for item in taken]
        if any(needed):
            yield Cut(start, taken, needed)


def choose_batch_size(classifier: Classifier, device: str | None = None) -> int:
    """How many pictures to explain at once where nobody says. `device`: None for where the classifier is."""
    return ON_CPU if (device or classifier.device.type) == "cpu" else ON_DEVICE
