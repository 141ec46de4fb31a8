"""From a picture to what a network takes, and which of its pixels the network sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.images import Pixels, Region, check_pixels


@dataclass(frozen=True)
class CentreCrop:
    """Resize the shorter side so that `crop` of it becomes `size` pixels, take the central square, normalise.

    Bicubic with antialiasing. `mean` and `std` are of RGB values in [0,1].
    """

    size: int
    crop: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, image: Pixels) -> Tensor:
        """An RGB picture, uint8 (H,W,3), as float32 (3,size,size)."""
        height, width = check_pixels(image).shape[:2]
        top, left, box_height, box_width = self._box(height, width)
        # Pillow resizes from within a box of fractions of pixels: the same as resizing all and cropping then, up to
        # rounding to 8 bits, but a picture of 2000 x 3 is not blown up to millions of pixels first.
        box = (left, top, left + box_width, top + box_height)
        resized = Image.fromarray(image).resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        values = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float().div_(255)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return values.sub_(mean).div_(std)

    def region(self, height: int, width: int) -> Region:
        """The central square of a picture that the network sees: (top, left, height, width), in whole pixels.

        Resizing rounds to whole pixels too, and may shift what is seen by up to one of *its* pixels against this square.
        """
        if min(height, width) < 1:
            raise ImageError(f"The picture is {width} x {height}, expected at least one pixel.")
        side = max(1, round(min(height, width) * self.size / self._shorter))
        return (height - side) // 2, (width - side) // 2, side, side

    @property
    def _shorter(self) -> int:
        """What the shorter side is resized to."""
        return int(self.size / self.crop)

    def _box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Top, left, height and width in fractions of pixels, rounded as torchvision and timm do."""
        resized_height = max(self._shorter, int(self._shorter * height / width))
        resized_width = max(self._shorter, int(self._shorter * width / height))
        top, left = round((resized_height - self.size) / 2), round((resized_width - self.size) / 2)
        down, across = height / resized_height, width / resized_width
        return top * down, left * across, self.size * down, self.size * across
