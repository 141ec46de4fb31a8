"""From a picture to what a network takes, and which of its pixels the network sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gradcam.errors import ImageError, shorten
from gradcam.images.read import FULL, Region

Box = tuple[float, float, float, float]  # left, top, right, bottom: Pillow's order

LUMINANCE = (19595, 38470, 7471)  # ITU-R 601 in 65536ths, as Pillow has it: grey keeps its values exactly


class Preprocess(Protocol):
    """From a picture's values to one tensor (C,H,W), and which pixels of a picture that is. `channels`, where it has
    that: how many it takes; 3 where it does not say."""

    def __call__(self, image: NDArray[Any]) -> Tensor: ...

    def region(self, height: int, width: int) -> Region: ...


@dataclass(frozen=True)
class Preprocessing:
    """Resize, take the centre, normalise; with antialiasing. `size`: (height, width) of what the network takes.
    `resize`: what the shorter side is resized to before the centre is taken, or (height, width) whatever the picture's
    aspect is. `mean` and `std` are of values in [0,1], one for each channel. `interpolation`: "nearest", "bilinear",
    "bicubic", "lanczos", "box" or "hamming"."""

    size: tuple[int, int]
    resize: int | tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """A picture as float32 (C,*size), of as many channels as there are means. `image`: RGB, uint8 (H,W,3); or (H,W)
        or (H,W,C) of any integers or floats. Those of uint8 and uint16 are scaled to [0,1] by their full range; floats
        and other integers are taken as they are: `mean` and `std` are in their units. One channel is repeated for
        three, and RGB of 8 or 16 bits becomes its luminance for one. Raises `ImageError` for anything else, and for
        another number of channels."""
        (height, width), fixed = check_form(image).shape[:2], self.resize
        if isinstance(fixed, int):  # rounded as torchvision and timm do
            fixed = (max(fixed, int(fixed * height / width)), max(fixed, int(fixed * width / height)))
        top, left = (round((side - length) / 2) for side, length in zip(fixed, self.size))
        down, across = height / fixed[0], width / fixed[1]
        return self.show(image, (top * down, left * across, self.size[0] * down, self.size[1] * across))

    def show(self, image: NDArray[Any], part: tuple[float, float, float, float]) -> Tensor:
        """A part of a picture, (top, left, height, width) in fractions of its pixels, as the network takes it: (C,*size)."""
        values = fit_channels(check_form(image), len(self.mean))
        top, left, height, width = part
        # Pillow resizes from within a box of fractions of pixels: the same as resizing all and cropping then, up to
        # rounding to 8 bits, but a picture of 2000 x 3 is not blown up to millions of pixels first.
        box = (left, top, left + width, top + height)
        if values.dtype == np.uint8:  # rounded to 8 bits, as torchvision and timm do
            parts: Iterable[NDArray[Any]] = [values] if values.ndim == 2 or values.shape[2] == 3 else _split(values)
            planes = [np.atleast_3d(np.array(self._resize(Image.fromarray(part), self.size, box))) for part in parts]
            resized = torch.from_numpy(np.concatenate(planes, axis=2)).permute(2, 0, 1).float().div_(255)
        else:
            resized = self._resize_deep(values, box)
        mean, std = (torch.tensor(it, dtype=torch.float32, device="cpu")[:, None, None] for it in (self.mean, self.std))
        return resized.sub(mean).div_(std)

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
        Resizing rounds to whole pixels too, and may shift what is seen by up to one of *its* pixels against this
        part."""
        if min(height, width) < 1:
            raise ImageError(f"The picture is {width} x {height}, expected at least one pixel.")
        if isinstance(self.resize, int):
            scales = (min(height, width) / self.resize,) * 2
        else:
            scales = (height / self.resize[0], width / self.resize[1])
        shown = (max(1, round(length * scale)) for length, scale in zip(self.size, scales))
        rows, columns = map(min, (height, width), shown)
        return (height - rows) // 2, (width - columns) // 2, rows, columns


def check_values(values: Any) -> NDArray[Any]:
    """Values (H,W) or (H,W,C), in this machine's order of bytes: integers or floats, not none, and finite in float32."""
    values = check_form(values)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            odd = values.size - np.count_nonzero(np.isfinite(values.astype(np.float32)))
        if odd:
            what = f"{_describe(values)}, of which {odd} value(s) are NaN or infinite"
            raise ImageError(f"The picture is {what}: expected finite ones.")
    return values


def check_form(values: Any) -> NDArray[Any]:
    """The same, without a look at the values themselves."""
    is_picture = isinstance(values, np.ndarray) and values.ndim in (2, 3) and values.size > 0
    if not is_picture or values.dtype.kind not in "uif":
        raise ImageError(
            f"The picture is {_describe(values)}, expected an RGB array: uint8 (H,W,3) with values from 0 to 255; or "
            "integers or floats (H,W) or (H,W,C)."
        )
    return np.asarray(values, values.dtype.newbyteorder("="))


def fit_channels(values: NDArray[Any], channels: int) -> NDArray[Any]:
    """Values for a network of so many channels: (H,W) to be given to each of them, or (H,W,channels)."""
    found = 1 if values.ndim == 2 else values.shape[2]
    if found == 1 and channels in (1, 3):
        return values.reshape(values.shape[:2])
    if found == channels:
        return values
    if (found, channels) == (3, 1) and values.dtype.name in FULL:
        luminance = (values.astype(np.int64) @ np.array(LUMINANCE) + 32768) >> 16
        return luminance.astype(values.dtype)
    takes = "one channel" if channels == 1 else f"{channels} channels"
    forms = {1: "an RGB array of 8 or 16 bits, or one channel (H,W)", 3: "an RGB array, one channel (H,W), or (H,W,3)"}
    raise ImageError(
        f"The picture is {_describe(values)}, with {found} channel(s), and the network takes {takes}: "
        f"expected {forms.get(channels, f'an array (H,W,{channels})')}."
    )


def scale(values: NDArray[Any]) -> NDArray[np.float32]:
    """Values as float32: those of uint8 and uint16 as shares of their full range, in [0,1], others as they are."""
    floats = values.astype(np.float32)
    floats /= np.float32(FULL.get(values.dtype.name, 1))
    return floats


def _describe(values: Any) -> str:
    return f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else shorten(values)


def _split(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return map(np.ascontiguousarray, np.moveaxis(np.atleast_3d(values), 2, 0))


# Of a model of which nobody says how its pictures are prepared: what most were trained with on ImageNet.
ASSUMED = Preprocessing(
    size=(224, 224), resize=256, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bilinear"
)
ASSUMED_GREY = replace(ASSUMED, mean=(0.449,), std=(0.226,))  # the means of those three
