"""Find the part of the network's input that each image covers, if images are padded inside the model or before it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradcam.hooks.containers import Batch, Window
from gradcam.hooks.hooks import Hooks
from gradcam.layers.model_names import DETECTION_TRANSFORM_MODULE


@dataclass(frozen=True)
class Frame:
    """The size of the network's input (`canvas`), and the window of each image in it (top, left, height, width)."""

    canvas: tuple[int, ...]
    windows: tuple[Window, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether each image covers all of the canvas."""
        return all(window == (0, 0, *self.canvas) for window in self.windows)

    def repeat(self, times: int) -> Frame:
        """Return the frame for a batch that repeats the images `times` times."""
        return Frame(self.canvas, self.windows * times)


def watch_frames(modules: Iterable[nn.Module], hooks: Hooks) -> list[Frame]:
    """Return a list. When a module of the model resizes and pads images, the frame is appended to the list."""
    frames: list[Frame] = []
    transform_class = getattr(sys.modules.get(DETECTION_TRANSFORM_MODULE), "GeneralizedRCNNTransform", None)

    def record_frame(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        images = output[0]
        windows = tuple((0, 0, int(height), int(width)) for height, width in images.image_sizes)
        frames.append(Frame(tuple(images.tensors.shape[2:]), windows))

    for module in modules:
        if transform_class is not None and isinstance(module, transform_class):
            hooks.after_forward(module, record_frame)
    return frames


def find_frame(batch: Batch, frames: list[Frame]) -> Frame | None:
    """Return the frame of a batch: the one that the model reported, or the batch's own; None if no image is padded."""
    if frames and len(frames[-1].windows) == batch.images:
        return frames[-1]
    if batch.windows is not None:
        return Frame(batch.size, batch.windows)
    if batch.listed is None:
        return None
    return Frame(batch.size, tuple((0, 0, height, width) for height, width in batch.listed))
