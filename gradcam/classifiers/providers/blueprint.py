"""How to build a model, and what it takes, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

USUAL_SIZE = (224, 224)


@dataclass(frozen=True)
class Blueprint:
    """A model to be built: `build` makes it with random weights, for pictures of `size` with so many channels.

    `layer`: what is explained where nothing else is said, None for the one that `gradcam.explain` takes;
    `layer_for_positive`: the same for methods that assume activations that are not negative.
    """

    build: Callable[[], Any]
    size: tuple[int, int] = USUAL_SIZE
    channels: int = 3
    layer: str | None = None
    layer_for_positive: str | None = None
