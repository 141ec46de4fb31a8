"""From a picture's file to what a network takes, what is drawn on, and which of its pixels the network sees."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gradcam.errors import GradcamError, ImageError, ModelError, shorten, show_fields
from gradcam.hooks.nested import Window
from gradcam.images import read
from gradcam.images.edit import Edit, edit_image
from gradcam.images.read import FULL, Given, PictureLike, Pixels, Region, show
from gradcam.images.write import check_pixels

Box = tuple[float, float, float, float]  # left, top, right, bottom: Pillow's order
Part = tuple[float, float, float, float]  # top, left, height, width, in fractions of a picture's pixels

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
        return self.show(image, self.find_part(*check_form(image).shape[:2]))

    def find_part(self, height: int, width: int) -> Part:
        """The part of a picture of that size that the network takes, for `show`."""
        fixed = self.resize
        if isinstance(fixed, int):  # rounded as torchvision and timm do
            fixed = (max(fixed, int(fixed * height / width)), max(fixed, int(fixed * width / height)))
        top, left = (round((side - length) / 2) for side, length in zip(fixed, self.size))
        down, across = height / fixed[0], width / fixed[1]
        return top * down, left * across, self.size[0] * down, self.size[1] * across

    def show(self, image: NDArray[Any], part: Part) -> Tensor:
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
            raise ImageError(f"The image is {width} x {height}, expected at least one pixel.")
        if isinstance(self.resize, int):
            scales = (min(height, width) / self.resize,) * 2
        else:
            scales = (height / self.resize[0], width / self.resize[1])
        shown = (max(1, round(length * scale)) for length, scale in zip(self.size, scales))
        rows, columns = map(min, (height, width), shown)
        return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class WholePicture:
    """All of a picture in its own aspect, and normalised: `side` is what its shorter side is resized to, None for as it
    is, and `longest` what its longer side may have at most. Both sides become multiples of `multiple` pixels. Other
    settings are those of `Preprocessing`."""

    side: int | None = None
    longest: int | None = None
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    interpolation: str = "bilinear"
    multiple: int = 1

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """A picture as float32 (C,H,W). Raises `ImageError` as `Preprocessing` does."""
        height, width = check_form(image).shape[:2]
        scale = 1.0 if self.side is None else self.side / min(height, width)
        if self.longest is not None:
            scale = min(scale, self.longest / max(height, width))
        step = self.multiple
        lengths = (
            int(side * scale + 1e-9) if step == 1 else round(side * scale / step) * step for side in (height, width)
        )
        size_found = [max(step, length) for length in lengths]
        size = (size_found[0], size_found[1])
        return Preprocessing(size, size, self.mean, self.std, self.interpolation)(image)

    def region(self, height: int, width: int) -> Region:
        """All of a picture of that size."""
        return 0, 0, height, width


def check_values(values: Any) -> NDArray[Any]:
    """Values (H,W) or (H,W,C), in this machine's order of bytes: integers or floats, not none, and finite in float32."""
    values = check_form(values)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            odd = values.size - np.count_nonzero(np.isfinite(values.astype(np.float32)))
        if odd:
            what = f"{_describe(values)}, and {odd} value(s) are NaN or infinite"
            raise ImageError(f"The image is {what}: expected finite values.")
    return values


def check_form(values: Any) -> NDArray[Any]:
    """The same, without a look at the values themselves."""
    is_picture = isinstance(values, np.ndarray) and values.ndim in (2, 3) and values.size > 0
    if not is_picture or values.dtype.kind not in "uif":
        raise ImageError(
            f"The image is {_describe(values)}, expected an RGB array, uint8 (H,W,3), or an array (H,W) or "
            "(H,W,C) of integers or floats."
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
        f"The image is {_describe(values)}, with {found} channel(s), but the model takes {takes}: "
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


Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Reading:
    """One picture: `values` for the model's preprocessing, (H,W) or (H,W,C), and `picture` to draw on, RGB uint8 (H,W,3)."""

    values: NDArray[Any]
    picture: Pixels
    note: str | None = None  # what a person should know of how it is shown

    __repr__ = show_fields


@dataclass(frozen=True, eq=False)
class Prepared:
    """A picture that was read, and as the tensor (C,H,W) that the model takes."""

    reading: Reading
    image: Tensor

    __repr__ = show_fields


def find_windows(preprocess: Preprocess, prepared: Sequence[Prepared]) -> tuple[Window, ...] | None:
    """Return where each image lies in the tensor that the model takes; None if all of them cover it."""
    find_window: Callable[[int, int], Window | None] | None = getattr(preprocess, "window", None)
    if find_window is None:
        return None
    sizes = [(0, 0, *each.image.shape[1:]) for each in prepared]
    windows = [find_window(*each.reading.picture.shape[:2]) or size for each, size in zip(prepared, sizes)]
    return None if windows == sizes else tuple(windows)


def find_canvas(preprocess: Preprocess, prepared: Prepared) -> Region:
    """Return the part of an image that the model's whole input shows. It exceeds the image where the input is padded."""
    region, windows = preprocess.region(*prepared.reading.picture.shape[:2]), find_windows(preprocess, [prepared])
    if windows is None:
        return region
    top, left, *lengths = windows[0]
    down, across = (outer / inner for outer, inner in zip(region[2:], lengths))
    height, width = prepared.image.shape[1:]
    start = (round(region[0] - top * down), round(region[1] - left * across))
    return *start, round(height * down), round(width * across)


def edit_reading(reading: Reading, edits: Sequence[str | Edit]) -> Reading:
    """What was read, with parts of it taken away. Raises `ImageError` where it is no RGB picture of 8 bits."""
    edited = edit_image(reading.values, edits)
    return Reading(edited, edited, reading.note)


def check_same_sizes(sizes: Sequence[tuple[int, ...]], how: str) -> None:
    """Raises `ImageError` where there are several."""
    different = [f"{height} x {width}" for height, width in sorted(set(sizes))]
    if len(different) > 1:
        what = f"{' and '.join(different[:2])} {how}"
        raise ImageError(f"The images are {what}, which do not fit into one batch: explain them one by one.")


Reader = Callable[[Path], Reading]


def read_picture(path: Path, data: Given | None = None) -> Reading:
    """Read an image: its values at the file's bit depth for the model, and an 8-bit image for drawing.

    `data` is a PIL image, or the file's content if it has already been read. The path then only names the image. Grey
    values of DICOM files are mapped through the file's window to float32 in [0,1]; colours are read as RGB. Floats,
    signed integers and 32-bit integers are passed to the model unscaled. NaN and negative infinity are replaced by the
    smallest finite value, positive infinity by the largest. Raises `ImageError` as in `gradcam.read_image`.
    """
    try:
        if read.to_path(path).suffix.lower() in read.DICOM_SUFFIXES and not isinstance(data, Image.Image):
            return _read_dicom(path, data)
        values = read.read_values(path, data)
    except ImageError:
        if isinstance(data, Image.Image) or not read.is_dicom(path, data):
            raise
        return _read_dicom(path, data)
    picture, shown = show(values)
    if values.dtype.name in FULL:
        return Reading(values, picture, shown)
    is_finite, notes = np.isfinite(values), [shown] if shown else []
    if not is_finite.any():
        raise ImageError(f"{path}: contains only NaN or infinite values")
    low, high = values[is_finite].min(), values[is_finite].max()
    if not is_finite.all():
        notes.append(f"{is_finite.size - np.count_nonzero(is_finite)} value(s) are NaN or infinite")
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    if low < 0 or high > 1:
        notes.append(f"values from {low.item():.6g} to {high.item():.6g} go to the model unscaled")
    return Reading(values, picture, "; ".join(notes) or None)


def _read_dicom(path: Path, data: Any) -> Reading:
    from gradcam.images.dicom import read_dicom

    values, note = read_dicom(path, data)
    return Reading(values, read.to_8_bits(values), note)


def describe_preprocess(preprocess: Any) -> Any:
    """Return a JSON value that is the same for equal preprocessing; for a user's own code, its name."""
    if hasattr(preprocess, "describe"):
        return preprocess.describe()
    is_ours = is_dataclass(preprocess) and not isinstance(preprocess, type)
    # A repr may have an address in it.
    return asdict(preprocess) if is_ours else type(preprocess).__qualname__


def to_reader(function: Callable[[Path], Any]) -> Reader:
    """A reader from a function of a path, which gives an array, or (array, picture), or a `Reading`. The array is what
    the model's preprocessing gets: (H,W) or (H,W,C), integers or floats, finite. The picture to draw on is RGB, uint8
    (H,W,3), of the same height and width; without one it is made from the array, as `show` does it. The reader raises
    `ImageError`, naming the file and the function, for anything else, and for whatever the function raises but a
    `GradcamError`."""
    if not callable(function):
        raise ModelError(f"The reader is {shorten(function)}, expected a function from an image's path to an array.")
    return partial(_read_with, function)


def to_reading(picture: PictureLike | Reading, reader: Reader, channels: int = 3) -> Reading:
    """A picture in any form that `gradcam.read_image` takes, or an array (H,W) or (H,W,C) of any integers or floats.
    `reader`: for files, and for their bytes, which it gets as a file. `channels`: how many the network takes; unless
    these are four, an array of four is RGB and its opacity. Raises `ImageError` for anything else."""
    if isinstance(picture, Reading):
        return picture
    values = read.to_array(picture)
    if values is not None:
        return _complete(values if channels == 4 else read.lay_on_white(check_values(values)))
    path, data = read.to_content(picture)
    if data is None:
        return reader(picture)  # type: ignore[arg-type]  # as it was given
    return read_picture(path, data) if isinstance(data, Image.Image) else read_bytes(path, data, reader)


def read_bytes(path: Path, data: bytes, reader: Reader) -> Reading:
    """What a reader makes of the bytes of a file; the path only says whose they are."""
    if reader is read_picture:
        return read_picture(path, data)
    with tempfile.TemporaryDirectory(prefix="gradcam-") as folder:
        written = pathlib.Path(folder) / f"picture{pathlib.PurePath(path).suffix}"
        written.write_bytes(data)
        try:
            return reader(written)
        except GradcamError as error:
            raise ImageError(str(error).replace(str(written), str(path))) from error


def _read_with(function: Callable[[Path], Any], path: Path) -> Reading:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        found = function(path)
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise ImageError(f"{path}: the reader {name} failed ({reason})") from error
    try:
        if isinstance(found, Reading):
            return _complete(found.values, found.picture, found.note)
        if isinstance(found, tuple) and len(found) == 2:
            return _complete(*found)
        if isinstance(found, np.ndarray):
            return _complete(found)
        raise ImageError(f"It is {shorten(found)}, expected an array, (array, image), or a Reading.")
    except ImageError as error:
        raise ImageError(f"{path}: the result of the reader {name} cannot be used. {error}") from None


def _complete(values: Any, picture: Any = None, note: Any = None) -> Reading:
    values = check_values(values)
    if picture is None:
        picture, note = show(values)
    sizes = [f"{array.shape[1]} x {array.shape[0]}" for array in (values, check_pixels(picture))]
    if sizes[0] != sizes[1]:
        raise ImageError(f"The image to draw on is {sizes[1]}, but the values are {sizes[0]}: expected the same size.")
    if not isinstance(note, (str, type(None))):
        raise ImageError(f"The note is {shorten(note)}, expected a string or None.")
    return Reading(values, picture, note)
