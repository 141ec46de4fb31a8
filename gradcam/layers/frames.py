"""Where pictures lie on what a model's layers see: on a part of it, where they were padded inside the model or before."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, Window

# The module whose kinds resize and pad a list of pictures inside the model, if anybody has imported it.
TRANSFORM = "torchvision.models.detection.transform"


@dataclass(frozen=True)
class Frame:
    """The (height, width) of what layers see, and of each picture its window there: top, left, height, width."""

    canvas: tuple[int, ...]
    windows: tuple[Window, ...]

    @property
    def is_whole(self) -> bool:
        """Whether each picture lies on all of it."""
        return all(window == (0, 0, *self.canvas) for window in self.windows)

    def repeat(self, times: int) -> Frame:
        """The same of so many blocks of pictures."""
        return Frame(self.canvas, self.windows * times)


def watch_frames(modules: Iterable[nn.Module], hooks: Hooks) -> list[Frame]:
    """A list that gets the frame whenever one of a model's modules resizes its pictures."""
    found: list[Frame] = []
    kind = getattr(sys.modules.get(TRANSFORM), "GeneralizedRCNNTransform", None)

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        images = output[0]
        windows = tuple((0, 0, int(height), int(width)) for height, width in images.image_sizes)
        found.append(Frame(tuple(images.tensors.shape[2:]), windows))

    for module in modules:
        if kind is not None and isinstance(module, kind):
            hooks.after_forward(module, keep)
    return found


def find_frame(batch: Batch, frames: list[Frame]) -> Frame | None:
    """The frame of a batch: the one that its model made, or the one that it came with; None where pictures are whole."""
    if frames and len(frames[-1].windows) == batch.images:
        return frames[-1]
    if batch.windows is not None:
        return Frame(batch.size, batch.windows)
    if batch.listed is None:
        return None
    return Frame(batch.size, tuple((0, 0, height, width) for height, width in batch.listed))
