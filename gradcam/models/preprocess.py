"""Read images, preprocess them for a model, and find the region of an image that the model sees."""

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

from gradcam.errors import GradcamError, ImageError, ModelError, format_fields, shorten
from gradcam.hooks.containers import Window
from gradcam.images import read
from gradcam.images.edit import Edit, edit_image
from gradcam.images.read import WHITE_VALUES, FileContent, ImageLike, Pixels, Region, scale_for_display
from gradcam.images.write import check_pixels

Box = tuple[float, float, float, float]  # left, top, right, bottom, as in Pillow
Part = tuple[float, float, float, float]  # top, left, height, width, in fractional pixels of the image

# ITU-R 601 weights for RGB, in units of 1/65536 as in Pillow. The sum is 65536, so grey pixels keep their values.
LUMINANCE = (19595, 38470, 7471)


class Preprocess(Protocol):
    """A function that converts an image to a tensor (C,H,W), with a method that returns the image region in the tensor.

    The optional attribute `channels` is the number of channels that the model takes. The default is 3.
    """

    def __call__(self, image: NDArray[Any]) -> Tensor: ...

    def region(self, height: int, width: int) -> Region: ...


@dataclass(frozen=True)
class Preprocessing:
    """Resize with antialiasing, crop the centre and normalise.

    `size` is the (height, width) of the network's input. `resize` is the size before the crop: the length of the
    shorter side, or a fixed (height, width). `mean` and `std` have one value per channel, for values in [0,1].
    `interpolation` is "nearest", "bilinear", "bicubic", "lanczos", "box" or "hamming".
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """Return an image as float32 (C,*size), with one channel per mean.

        `image` is an RGB array, uint8 (H,W,3), or an array (H,W) or (H,W,C) of any integers or floats. uint8 and uint16
        are scaled to [0,1] by their full range. Floats and other integers are not scaled. For unscaled images, `mean`
        and `std` must be in the units of the image. If the network takes three channels, a single channel is repeated.
        If the network takes one channel, 8-bit or 16-bit RGB is converted to luminance. Raises `ImageError` for any
        other array or number of channels.
        """
        return self.transform_part(image, self.find_part(*check_form(image).shape[:2]))

    def find_part(self, height: int, width: int) -> Part:
        """Return the part of an image (height, width) that the network sees."""
        resized = self.resize
        if isinstance(resized, int):  # Round as torchvision and timm do.
            resized = (max(resized, int(resized * height / width)), max(resized, int(resized * width / height)))
        top, left = (round((side - length) / 2) for side, length in zip(resized, self.size))
        down, across = height / resized[0], width / resized[1]
        return top * down, left * across, self.size[0] * down, self.size[1] * across

    def transform_part(self, image: NDArray[Any], part: Part) -> Tensor:
        """Return a part of an image as the network's input (C,*size)."""
        values = fit_channels(check_form(image), len(self.mean))
        top, left, height, width = part
        # Let Pillow resize only the box. Resizing the full image before a crop would give the same result, except for
        # rounding. But an image of 2000 x 3 pixels would then be enlarged to millions of pixels.
        box = (left, top, left + width, top + height)
        if values.dtype == np.uint8:  # Round to 8 bits, as torchvision and timm do.
            parts: Iterable[NDArray[Any]] = [values] if values.ndim == 2 or values.shape[2] == 3 else _split(values)
            planes = [np.atleast_3d(np.array(self._resize(Image.fromarray(part), self.size, box))) for part in parts]
            resized = torch.from_numpy(np.concatenate(planes, axis=2)).permute(2, 0, 1).float().div_(255)
        else:
            resized = self._resize_deep(values, box)
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float32, device="cpu")[:, :, None, None]
        return resized.sub(mean).div_(std)

    def _resize_deep(self, values: NDArray[Any], box: Box) -> Tensor:
        """Resize to float32 (C,*size). If all values are in [0,1], clip to [0,1] after each axis, as in Pillow."""
        is_unit_range = values.dtype.name in WHITE_VALUES or (values.min() >= 0 and np.float32(values.max()) <= 1)
        low, high = (0, 1) if is_unit_range else (-np.inf, np.inf)
        (left, top, right, bottom), width = box, self.size[1]
        planes = []
        for plane in map(scale, _split(values)):  # one channel at a time, to limit memory
            rows = plane.shape[0]
            across = self._resize(Image.fromarray(plane), (rows, width), (left, 0, right, rows))
            across = Image.fromarray(np.clip(np.asarray(across), low, high))
            planes.append(np.clip(np.asarray(self._resize(across, self.size, (0, top, width, bottom))), low, high))
        return torch.from_numpy(np.stack(planes))

    def _resize(self, image: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
        return image.resize(size[::-1], Image.Resampling[self.interpolation.upper()], box=box)

    def region(self, height: int, width: int) -> Region:
        """Return the region that the network sees: (top, left, height, width), in whole pixels, at the centre.

        Resizing also rounds the image's sides to whole pixels. The true region may therefore differ by up to one pixel
        of the resized image.
        """
        if min(height, width) < 1:
            raise ImageError(f"The image is {width} x {height}, expected at least one pixel.")
        if isinstance(self.resize, int):
            scales = (min(height, width) / self.resize,) * 2
        else:
            scales = (height / self.resize[0], width / self.resize[1])
        lengths = (max(1, round(length * scale)) for length, scale in zip(self.size, scales))
        rows, columns = map(min, (height, width), lengths)
        return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class WholeImage:
    """Preprocessing that keeps the whole image and its aspect ratio, and normalises it.

    `side` is the length of the shorter side after resizing; None keeps the original length. `longest` is the maximum
    length of the longer side. Both sides become multiples of `multiple` pixels. The other fields are as in
    `Preprocessing`.
    """

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
        """Return an image as float32 (C,H,W); raise `ImageError` as `Preprocessing` does."""
        height, width = check_form(image).shape[:2]
        scale = 1.0 if self.side is None else self.side / min(height, width)
        if self.longest is not None:
            scale = min(scale, self.longest / max(height, width))
        step, sides = self.multiple, (height * scale, width * scale)
        rows, columns = (int(side + 1e-9) if step == 1 else round(side / step) * step for side in sides)
        size = max(step, rows), max(step, columns)
        return Preprocessing(size, size, self.mean, self.std, self.interpolation)(image)

    def region(self, height: int, width: int) -> Region:
        """Return the region of the whole image."""
        return 0, 0, height, width


def check_values(values: Any) -> NDArray[Any]:
    """Return values (H,W) or (H,W,C) in native byte order; raise `ImageError` if a value is not finite in float32."""
    values = check_form(values)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            non_finite = values.size - np.count_nonzero(np.isfinite(values.astype(np.float32)))
        if non_finite:
            problem = f"{_describe(values)}, and {non_finite} value(s) are NaN or infinite"
            raise ImageError(f"The image is {problem}: expected finite values.")
    return values


def check_form(values: Any) -> NDArray[Any]:
    """Return values (H,W) or (H,W,C) in native byte order; raise `ImageError` for a wrong shape or dtype."""
    is_image = isinstance(values, np.ndarray) and values.ndim in (2, 3) and values.size > 0
    if not is_image or values.dtype.kind not in "uif":
        expected = "an RGB array, uint8 (H,W,3), or an array (H,W) or (H,W,C) of integers or floats."
        raise ImageError(f"The image is {_describe(values)}, expected {expected}")
    return np.asarray(values, values.dtype.newbyteorder("="))


def fit_channels(values: NDArray[Any], channels: int) -> NDArray[Any]:
    """Convert values to the number of channels: (H,W,channels), or (H,W) if all channels would be equal."""
    count = 1 if values.ndim == 2 else values.shape[2]
    if count == 1 and channels in (1, 3):
        return values.reshape(values.shape[:2])
    if count == channels:
        return values
    if (count, channels) == (3, 1) and values.dtype.name in WHITE_VALUES:
        return ((values.astype(np.int64) @ np.array(LUMINANCE) + 32768) >> 16).astype(values.dtype)
    takes = "one channel" if channels == 1 else f"{channels} channels"
    forms = {1: "an RGB array of 8 or 16 bits, or one channel (H,W)", 3: "an RGB array, one channel (H,W), or (H,W,3)"}
    problem = f"{_describe(values)}, with {count} channel(s), but the model takes {takes}"
    raise ImageError(f"The image is {problem}: expected {forms.get(channels, f'an array (H,W,{channels})')}.")


def scale(values: NDArray[Any]) -> NDArray[np.float32]:
    """Convert values to float32. Scale uint8 and uint16 to [0,1] by their full range, and no other dtype."""
    floats = values.astype(np.float32)
    floats /= np.float32(WHITE_VALUES.get(values.dtype.name, 1))
    return floats


def _describe(values: Any) -> str:
    return f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else shorten(values)


def _split(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return map(np.ascontiguousarray, np.moveaxis(np.atleast_3d(values), 2, 0))


# The usual preprocessing of ImageNet models, for models whose preprocessing is unknown.
ASSUMED = Preprocessing((224, 224), 256, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
# For one channel, the mean and the standard deviation are the averages of the three channels' values.
ASSUMED_GREY = replace(ASSUMED, mean=(0.449,), std=(0.226,))


def assume_preprocessing(side: Any) -> Preprocessing:
    """Return the usual ImageNet preprocessing. If `side` is an integer, the input size is `side` x `side`."""
    return replace(ASSUMED, size=(side, side), resize=round(side / 0.875)) if isinstance(side, int) else ASSUMED


Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Reading:
    """An image from a file: `values` (H,W) or (H,W,C) for the model, and RGB uint8 `picture` (H,W,3) to draw on.

    `note` is a remark on how the image is displayed. `spacing` is the height and width of a pixel in mm, if known.
    """

    values: NDArray[Any]
    picture: Pixels
    note: str | None = None
    spacing: read.Spacing | None = None

    __repr__ = format_fields


@dataclass(frozen=True, eq=False)
class Prepared:
    """A preprocessed image: its `reading`, and the tensor `image` (C,H,W) that the model takes.

    `further_images` are the other images in the same prompt of a vision-language model.
    """

    reading: Reading
    image: Tensor
    further_images: Sequence[Prepared] = ()

    __repr__ = format_fields


def find_windows(preprocess: Preprocess, prepared: Sequence[Prepared]) -> tuple[Window, ...] | None:
    """Return each image's position in its input tensor; None if every image fills its tensor."""
    find_window: Callable[[int, int], Window | None] | None = getattr(preprocess, "window", None)
    if find_window is None:
        return None
    sizes = [(0, 0, *item.image.shape[1:]) for item in prepared]
    windows = [find_window(*item.reading.picture.shape[:2]) or size for item, size in zip(prepared, sizes)]
    return None if windows == sizes else tuple(windows)


def find_canvas(preprocess: Preprocess, prepared: Prepared) -> Region:
    """Return the input tensor's region in image pixels. If the tensor has padding, the region exceeds the image."""
    region, windows = preprocess.region(*prepared.reading.picture.shape[:2]), find_windows(preprocess, [prepared])
    if windows is None:
        return region
    top, left, *lengths = windows[0]
    down, across = (outer / inner for outer, inner in zip(region[2:], lengths))
    height, width = prepared.image.shape[1:]
    start = (round(region[0] - top * down), round(region[1] - left * across))
    return *start, round(height * down), round(width * across)


def edit_reading(reading: Reading, edits: Sequence[str | Edit]) -> Reading:
    """Apply edits to a reading's image, and return the result; raise `ImageError` if the image is not 8-bit RGB."""
    edited = edit_image(reading.values, edits)
    return replace(reading, values=edited, picture=edited)


def check_same_sizes(sizes: Sequence[tuple[int, ...]], stage: str) -> None:
    """Raise `ImageError` if the sizes differ."""
    different = [f"{height} x {width}" for height, width in sorted(set(sizes))]
    if len(different) > 1:
        problem = f"{' and '.join(different[:2])} {stage}"
        raise ImageError(f"The images are {problem}. A batch needs images of one size: explain the images one by one.")


Reader = Callable[[Path], Reading]


def read_image_file(path: Path, data: FileContent | None = None) -> Reading:
    """Read an image: its values at the file's bit depth for the model, and an 8-bit image to draw on.

    If `data` is a PIL image or the file's content, no file is read. The path is then only the name of the image. Grey
    DICOM values are mapped by the DICOM window to float32 in [0,1]. DICOM colours are read as RGB. Floats, signed
    integers and 32-bit integers are not scaled for the model. NaN and negative infinity become the smallest finite
    value. Positive infinity becomes the largest finite value. Raises `ImageError` as in `gradcam.read_image`.
    """
    try:
        if read.to_path(path).suffix.lower() in read.DICOM_SUFFIXES and not isinstance(data, Image.Image):
            return _read_dicom(path, data)
        values = read.read_values(path, data)
    except ImageError:
        if isinstance(data, Image.Image) or not read.is_dicom(path, data):
            raise
        return _read_dicom(path, data)
    picture, note = scale_for_display(values)
    if values.dtype.name in WHITE_VALUES:
        return Reading(values, picture, note)
    is_finite, notes = np.isfinite(values), [note] if note else []
    if not is_finite.any():
        raise ImageError(f"{path}: contains only NaN or infinite values")
    low, high = values[is_finite].min(), values[is_finite].max()
    if not is_finite.all():
        notes.append(f"{is_finite.size - np.count_nonzero(is_finite)} value(s) are NaN or infinite")
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    if low < 0 or high > 1:
        notes.append(f"values from {low.item():.6g} to {high.item():.6g} are passed to the model unscaled")
    return Reading(values, picture, "; ".join(notes) or None)


def _read_dicom(path: Path, data: Any) -> Reading:
    from gradcam.images.dicom import read_dicom

    values, note, spacing = read_dicom(path, data)
    return Reading(values, read.to_8_bits(values), note, spacing)


def describe_preprocess(preprocess: Any) -> Any:
    """Return a JSON value that describes preprocessing: its settings, or the name of a user-defined class."""
    if hasattr(preprocess, "describe"):
        return preprocess.describe()
    is_ours = is_dataclass(preprocess) and not isinstance(preprocess, type)
    # A repr may contain a memory address, which differs in each run. Use the class name instead.
    return asdict(preprocess) if is_ours else type(preprocess).__qualname__


def to_reader(function: Callable[[Path], Any]) -> Reader:
    """Return a reader that calls a function of a path, and checks its result.

    The function returns an array, or (array, image), or a `Reading`. The array is the input of the model's
    preprocessing: (H,W) or (H,W,C), integers or floats, finite. The image to draw on is RGB, uint8 (H,W,3), of the same
    height and width. If the function returns no image, `scale_for_display` converts the array. If the result has
    another form, or if the function raises an exception other than `GradcamError`, the reader raises `ImageError` with
    the names of the file and the function.
    """
    if not callable(function):
        raise ModelError(f"The reader is {shorten(function)}, expected a function from an image's path to an array.")
    return partial(_read_with, function)


def to_reading(picture: ImageLike | Reading, reader: Reader, channels: int = 3) -> Reading:
    """Read an image in any form that `gradcam.read_image` takes, or an array (H,W) or (H,W,C) of numbers.

    `reader` reads files. For a custom reader, an image given as bytes is first written to a temporary file. `channels`
    is the number of channels that the network takes. Unless `channels` is 4, an array with four channels is read as RGB
    with opacity. Raises `ImageError` for an image in any other form.
    """
    if isinstance(picture, Reading):
        return picture
    values = read.to_array(picture)
    if values is not None:
        return _complete(values if channels == 4 else read.blend_with_white(check_values(values)))
    path, data = read.load_content(picture)
    if data is None:
        return reader(picture)  # type: ignore[arg-type]  # a path
    return read_image_file(path, data) if isinstance(data, Image.Image) else read_bytes(path, data, reader)


def read_bytes(path: Path, data: bytes, reader: Reader) -> Reading:
    """Read an image from the bytes of a file; `path` is used only as the name of the image."""
    if reader is read_image_file:
        return read_image_file(path, data)
    with tempfile.TemporaryDirectory(prefix="gradcam-") as folder:
        temporary = pathlib.Path(folder) / f"picture{pathlib.PurePath(path).suffix}"
        temporary.write_bytes(data)
        try:
            return reader(temporary)
        except GradcamError as error:
            raise ImageError(str(error).replace(str(temporary), str(path))) from error


def _read_with(function: Callable[[Path], Any], path: Path) -> Reading:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        result = function(path)
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise ImageError(f"{path}: the reader {name} failed ({reason})") from error
    try:
        if isinstance(result, Reading):
            return _complete(result.values, result.picture, result.note, result.spacing)
        if isinstance(result, tuple) and len(result) == 2:
            return _complete(*result)
        if isinstance(result, np.ndarray):
            return _complete(result)
        raise ImageError(f"The result is {shorten(result)}, expected an array, (array, image), or a Reading.")
    except ImageError as error:
        raise ImageError(f"{path}: the result of the reader {name} cannot be used. {error}") from None


def _complete(values: Any, picture: Any = None, note: Any = None, spacing: Any = None) -> Reading:
    values = check_values(values)
    if picture is None:
        picture, note = scale_for_display(values)
    sizes = [f"{array.shape[1]} x {array.shape[0]}" for array in (values, check_pixels(picture))]
    if sizes[0] != sizes[1]:
        raise ImageError(f"The image to draw on is {sizes[1]}, but the array is {sizes[0]}: expected the same size.")
    if not isinstance(note, (str, type(None))):
        raise ImageError(f"The note is {shorten(note)}, expected a string or None.")
    if spacing is not None and not read.is_spacing(spacing):
        raise ImageError(f"The spacing is {shorten(spacing)}, expected the height and width of a pixel in mm, or None.")
    return Reading(values, picture, note, spacing)
