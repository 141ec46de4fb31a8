"""From a picture to what a network takes, and which of its pixels the network sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gradcam.classifiers.values import check_form, fit_channels, scale
from gradcam.depth import FULL
from gradcam.errors import ImageError
from gradcam.images import Region

Box = tuple[float, float, float, float]  # left, top, right, bottom: Pillow's order


class Preprocess(Protocol):
    """From a picture's values to one tensor (C,H,W), and which pixels of a picture that is.

    `channels`, where it has that: how many it takes; 3 where it does not say.
    """

    def __call__(self, image: NDArray[Any]) -> Tensor: ...

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

    @property
    def channels(self) -> int:
        """How many the network takes."""
        return len(self.mean)

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """A picture as float32 (C,*size), of as many channels as there are means.

        `image`: RGB, uint8 (H,W,3); or (H,W) or (H,W,C) of any integers or floats. Those of uint8 and uint16 are scaled to
        [0,1] by their full range; floats and other integers are taken as they are: `mean` and `std` are in their units.
        One channel is repeated for three, and RGB of 8 or 16 bits becomes its luminance for one.
        Raises `ImageError` for anything else, and for another number of channels.
        """
        return self.show(image, self._box(*check_form(image).shape[:2]))

    def show(self, image: NDArray[Any], part: tuple[float, float, float, float]) -> Tensor:
        """A part of a picture, (top, left, height, width) in fractions of its pixels, as the network takes it: (C,*size).

        Raises as calling it does.
        """
        values = fit_channels(check_form(image), len(self.mean))
        top, left, height, width = part
        # Pillow resizes from within a box of fractions of pixels: the same as resizing all and cropping then, up to
        # rounding to 8 bits, but a picture of 2000 x 3 is not blown up to millions of pixels first.
        box = (left, top, left + width, top + height)
        resized = self._resize_bytes(values, box) if values.dtype == np.uint8 else self._resize_deep(values, box)
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device="cpu")[:, None, None] for values in (self.mean, self.std)
        )
        return resized.sub(mean).div_(std)

    def _resize_bytes(self, values: NDArray[np.uint8], box: Box) -> Tensor:
        """Rounded to 8 bits, as torchvision and timm do: float32 (C,*size) in [0,1]."""
        parts: Iterable[NDArray[Any]] = [values] if values.ndim == 2 or values.shape[2] == 3 else _split(values)
        resized = [np.atleast_3d(np.array(self._resize(Image.fromarray(part), self.size, box))) for part in parts]
        return torch.from_numpy(np.concatenate(resized, axis=2)).permute(2, 0, 1).float().div_(255)

    def _resize_deep(self, values: NDArray[Any], box: Box) -> Tensor:
        """In float32: (C,*size). What is in [0,1] stays there after each axis, as with 8 bits."""
        is_share = values.dtype.name in FULL or (values.min() >= 0 and np.float32(values.max()) <= 1)
        low, high = (0, 1) if is_share else (-np.inf, np.inf)
        (left, top, right, bottom), width = box, self.size[1]
        planes = []
        for part in map(scale, _split(values)):  # a channel at a time, as all of them take much memory
            rows = part.shape[0]
            across = self._resize(Image.fromarray(part), (rows, width), (left, 0, right, rows))
            across = Image.fromarray(np.clip(np.asarray(across), low, high))
            planes.append(np.clip(np.asarray(self._resize(across, self.size, (0, top, width, bottom))), low, high))
        return torch.from_numpy(np.stack(planes))

    def _resize(self, picture: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
        return picture.resize(size[::-1], Image.Resampling[self.interpolation.upper()], box=box)

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


def _split(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The channels, each (H,W), as Pillow takes them."""
    return map(np.ascontiguousarray, np.moveaxis(np.atleast_3d(values), 2, 0))
