"""From a picture to what a network takes, and which of its pixels the network sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.images import Pixels, Region, check_pixels


class Preprocess(Protocol):
    """From a picture's values to one tensor (C,H,W), and which pixels of a picture that is."""

    def __call__(self, image: Pixels) -> Tensor: ...

    def region(self, height: int, width: int) -> Region: ...


@dataclass(frozen=True)
class Preprocessing:
    """Resize, take the centre, normalise; with antialiasing.

    `size`: (height, width) of what the network takes. `resize`: what the shorter side is resized to before the centre is
    taken, or (height, width) whatever the picture's aspect is. `mean` and `std` are of values in [0,1], one for each
    channel. `interpolation`: "nearest", "bilinear", "bicubic", "lanczos", "box" or "hamming".
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"

    def __call__(self, image: Pixels) -> Tensor:
        """An RGB picture, uint8 (H,W,3), as float32 (3,*size)."""
        height, width = check_pixels(image).shape[:2]
        top, left, box_height, box_width = self._box(height, width)
        # Pillow resizes from within a box of fractions of pixels: the same as resizing all and cropping then, up to
        # rounding to 8 bits, but a picture of 2000 x 3 is not blown up to millions of pixels first.
        box = (left, top, left + box_width, top + box_height)
        method = Image.Resampling[self.interpolation.upper()]
        resized = Image.fromarray(image).resize(self.size[::-1], method, box=box)
        values = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float().div_(255)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return values.sub_(mean).div_(std)

    def region(self, height: int, width: int) -> Region:
        """The part of a picture that the network sees: (top, left, height, width), in whole pixels, around the centre.

        Resizing rounds to whole pixels too, and may shift what is seen by up to one of *its* pixels against this part.
        """
        if min(height, width) < 1:
            raise ImageError(f"The picture is {width} x {height}, expected at least one pixel.")
        if isinstance(self.resize, int):
            scales = (min(height, width) / self.resize,) * 2
        else:
            scales = (height / self.resize[0], width / self.resize[1])
        sides = (height, width)
        rows, columns = (min(side, max(1, round(it * scale))) for side, it, scale in zip(sides, self.size, scales))
        return (height - rows) // 2, (width - columns) // 2, rows, columns

    def _box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Top, left, height and width in fractions of pixels, rounded as torchvision and timm do."""
        if isinstance(self.resize, int):
            resized_height = max(self.resize, int(self.resize * height / width))
            resized_width = max(self.resize, int(self.resize * width / height))
        else:
            resized_height, resized_width = self.resize
        top, left = round((resized_height - self.size[0]) / 2), round((resized_width - self.size[1]) / 2)
        down, across = height / resized_height, width / resized_width
        return top * down, left * across, self.size[0] * down, self.size[1] * across
