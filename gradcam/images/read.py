"""Read images from files, bytes, arrays and tensors as RGB arrays."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Union

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from gradcam.errors import ImageError, shorten
from gradcam.images.files import is_url, open_file
from gradcam.options import MAX_PIXELS, accept_old_parameters

if TYPE_CHECKING:
    from torch import Tensor


class OpenFile(Protocol):
    """A file open in binary mode, such as `open(path, "rb")`, `io.BytesIO` or an HTTP response."""

    def read(self) -> bytes:
        """Return all remaining bytes."""


Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]  # (top, left, height, width)
Spacing = tuple[float, float]  # the height and width of a pixel, in mm
FileContent = bytes | Image.Image  # content of an image that is not a path
ImageLike = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, OpenFile, Image.Image, NDArray[Any], "Tensor"]
IMAGE_FORMS = "a path, the bytes of a file, an open file, a PIL image, an array (H,W,3) or a tensor (C,H,W)"

# Common image formats. Formats for which Pillow starts another program (EPS), or renders text, are left out.
READ_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "MPO", "JPEG2000", "AVIF", "PPM", "TGA", "ICO")
ORIENTATION_TAG = 0x0112  # in EXIF
MEMORY_BUDGET_BYTES = 2**30  # per image: enough for 150 million RGB pixels of 8 bits, or 60 million of 16 bits
# The bytes per pixel of this module's arrays, for 16-bit colours and for grey values of more than 8 bits.
DEEP_COLOUR_BYTES, DEEP_GREY_BYTES = 13, 7
# The bytes per pixel that each decoder needs in addition to Pillow's image.
DECODER_BYTES = {"WEBP": 12, "JPEG2000": 16, "AVIF": 12, "TIFF": 4}
DICOM_SUFFIXES = (".dcm", ".dicom")
DICOM_MAGIC = b"DICM"  # These bytes follow a preamble of 128 arbitrary bytes.
# The value of white in each dtype. Other integers are not listed, because their white depends on the file.
WHITE_VALUES = {"uint8": 255, "uint16": 65535}
# The number of pixels to compute at a time, so that intermediate results take little memory.
PIXELS_PER_STRIP = 2**18
# The reason to report for each type of exception; "" stands for the exception's own message.
READ_FAILURES: dict[type[Exception], str] = {
    ImageError: "",
    UnidentifiedImageError: "is not an image in a supported format",
    MemoryError: "does not fit into memory",
    FileNotFoundError: "does not exist",
}


@accept_old_parameters
def read_image(image: ImageLike) -> Pixels:
    """Read an image as RGB, uint8 (H,W,3), with the pixels that an image viewer would display.

    The EXIF orientation is applied, and transparent pixels are drawn on white. Only the first frame of an animation is
    read. Values of more than 8 bits are scaled to 8 bits.

    Parameters
    ----------
    image : path, bytes, file, PIL.Image, array or Tensor
        The path or the bytes of a file, a file open in binary mode, a PIL image, an array, or a tensor on any device.
        An open file is read from its start, and keeps its position. Arrays are (H,W), (H,W,1), (H,W,3) or (H,W,4),
        tensors (H,W) or (C,H,W). Arrays and tensors must be uint8, uint16, or floats from 0 to 1.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the image cannot be read, or if it would need more than 1 GiB of memory. The size is checked before decoding,
        and the message names the file. The environment variable GRADCAM_MAX_PIXELS replaces the limit of 1 GiB with a
        number of pixels.

    Examples
    --------
    >>> import gradcam
    >>> image = gradcam.read_image("photo.jpg")
    >>> image.shape, image.dtype
    ((640, 800, 3), dtype('uint8'))
    """
    values = to_array(image)
    if values is None:
        return to_8_bits(read_values(*load_content(image)))
    if values.ndim not in (2, 3) or values.size == 0 or values.shape[2:] not in ((), (1,), (3,), (4,)):
        expected = "an array (H,W), (H,W,3) or (H,W,4), or a tensor (C,H,W)"
        raise ImageError(f"The image is {describe_array(values)}, expected {expected}.")
    values = blend_with_white(check_range(values))
    return to_8_bits(values[..., 0] if values.shape[2:] == (1,) else values)


def is_one_image(value: Any) -> bool:
    """Return whether the value is probably a single image, in any supported form, and not a list of images."""
    has_image_type = isinstance(value, (str, os.PathLike, bytes, bytearray, memoryview, Image.Image))
    is_readable = hasattr(value, "read") or hasattr(value, "read_bytes")
    return has_image_type or is_readable or getattr(value, "ndim", 0) in (2, 3)


def to_array(image: Any) -> NDArray[Any] | None:
    """Convert a tensor to an array (H,W) or (H,W,C). Return arrays unchanged, and None for images in other forms."""
    if isinstance(image, np.ndarray):
        return image
    if not (hasattr(image, "detach") and hasattr(image, "ndim")):
        return None
    values = to_numpy(image)
    start = f"The image is a tensor {describe_array(values)}, expected"
    if values.ndim not in (2, 3) or values.size == 0:
        raise ImageError(f"{start} one image: (C,H,W) or (H,W).")
    if values.ndim == 3 and values.shape[0] > 4 >= values.shape[2]:
        raise ImageError(f"{start} channels first, (C,H,W): use .permute(2, 0, 1).")
    return check_range(values if values.ndim == 2 else np.ascontiguousarray(np.moveaxis(values, 0, 2)))


def to_numpy(values: Any) -> NDArray[Any]:
    """Convert an array, or a tensor on any device, to an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # NumPy has no bfloat16.
    return np.asarray(values)


def check_range(values: NDArray[Any]) -> NDArray[Any]:
    """Return uint8 and uint16 values unchanged, and floats clipped to [0,1]. Raises `ImageError` for other values."""
    if values.dtype.name in WHITE_VALUES:
        return values
    # NaN fails the comparisons.
    if values.dtype.kind == "f" and values.size and values.min() >= -1e-4 and values.max() <= 1 + 1e-4:
        return np.clip(values, 0, 1)
    description = describe_array(values)
    if values.size and values.dtype.kind in "iuf":
        description += f" with values from {values.min():.4g} to {values.max():.4g}"
    hint = " For normalised input, use gradcam.explain(model, images)." if values.dtype.kind == "f" else ""
    raise ImageError(f"The image is {description}, expected uint8, uint16, or floats from 0 to 1.{hint}")


def is_spacing(value: Any) -> bool:
    """Return whether the value is the height and width of a pixel: two finite numbers above 0."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(isinstance(side, (int, float)) and 0 < side < math.inf for side in value)


def describe_array(values: NDArray[Any]) -> str:
    """Return the type and shape of an array, for a message."""
    return f"{values.dtype} {values.shape}"


def blend_with_white(values: NDArray[Any]) -> NDArray[Any]:
    """Blend RGBA values (H,W,4) with white, and return (H,W,3). Return values of other shapes unchanged."""
    if values.shape[2:] != (4,):
        return values
    values = check_range(values)
    if values.dtype == np.uint8:
        return np.array(_to_opaque(Image.fromarray(np.ascontiguousarray(values))))
    white, result = WHITE_VALUES.get(values.dtype.name, 1), np.empty((*values.shape[:2], 3), values.dtype)
    for rows in in_strips(*values.shape[:2]):
        opacity = values[rows, :, 3:] / white
        on_white = values[rows, :, :3] * opacity + white * (1 - opacity)
        result[rows] = np.rint(on_white) if values.dtype.kind == "u" else on_white
    return result


def load_content(image: Any) -> tuple[Path, FileContent | None]:
    """Return the name of an image that is not an array, and its content: bytes, a PIL image, or None for a path.

    Raises `ImageError` if the value is not an image, if it is a URL, or if its file cannot be read.
    """
    if isinstance(image, (bytes, bytearray, memoryview)):
        return Path("the given bytes"), bytes(image)
    if isinstance(image, Image.Image):
        return Path(os.fsdecode(getattr(image, "filename", "") or "the given image")), image
    if hasattr(image, "read"):
        names = (getattr(image, name, None) for name in ("name", "filename"))
        path = Path(next((name for name in names if name and isinstance(name, str)), "the given file"))
        with translate_read_errors(path):
            return path, _read_open(image)
    if hasattr(image, "read_bytes") and not isinstance(image, Path):  # for example, a path in an archive
        with translate_read_errors(str(image)):
            return Path(str(image)), image.read_bytes()
    if not isinstance(image, (str, os.PathLike)):
        raise ImageError(f"The image is {shorten(image)}, expected {IMAGE_FORMS}.")
    if "://" in (text := os.fsdecode(image)) and is_url(text):
        raise ImageError(f"{text}: is a URL. Give a file or its bytes, or use gradcam.explain_files, which reads URLs")
    return to_path(image), None


def _read_open(file: Any) -> bytes:
    if getattr(file, "closed", False):
        raise ImageError("is closed: pass an open file")
    data: Any = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AttributeError, OSError):  # Streams have no position.
            position = file.tell()
            file.seek(0)
            stack.callback(file.seek, position)
        with contextlib.suppress(UnicodeDecodeError, io.UnsupportedOperation):
            data = file.read()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if hasattr(data, "close"):
        data.close()  # An unawaited coroutine would cause a warning.
        raise ImageError("has an asynchronous read(): pass the underlying file, such as upload.file, or its bytes")
    raise ImageError('is not open in binary mode: open it with "rb"')


def read_values(path: str | os.PathLike[str], data: FileContent | None = None) -> NDArray[Any]:
    """Return the values of an image with the bit depth of its file.

    `data` is a PIL image, or the content of the file if the caller has already read the file. Messages name the image
    by `path`. Colour and grey images of 8 bits or less become RGB, uint8 (H,W,3). Deeper grey images are
    (H,W): uint16 for unsigned values of 16 bits, float32 for floats, and int32 or uint32 for other integers. RGB images
    with 16 bits per channel, in PNG and TIFF files, become uint16 (H,W,3). Orientation, transparency and animations are
    handled as in `read_image`. Raises `ImageError` like `read_image`.
    """
    # Do not read images with OpenCV: it reports no error for truncated images, and ignores transparency.
    path = to_path(path)
    if isinstance(data, Image.Image):
        with translate_read_errors(path):
            check_memory(*data.size, 8)
            try:
                data.load()
            except (AssertionError, AttributeError, ValueError):
                if getattr(data, "fp", None) is None:
                    raise ImageError("is closed: pass an open image") from None
                raise
            return _to_values(data)
    # Pass an open file to Pillow. If Pillow gets a path, it maps some TIFF files into memory. If such a file has an
    # orientation, Pillow would then return the pixels in a wrong order.
    with translate_read_errors(path), open_content(path, data) as file, _open_image(file) as image:
        deep_mode = _find_deep_mode(image)
        _check_memory(image, file, DEEP_COLOUR_BYTES if deep_mode else DEEP_GREY_BYTES if image.mode[0] in "FI" else 3)
        image.load()
        return _decode_deep(image, file, deep_mode) if deep_mode else _to_values(image)


def read_label_mask(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """Return the labels (H,W) that an image file stores: the indices of its palette, or its grey values.

    The orientation is applied, as in `read_image`. Raises `ImageError` like `read_image`. Colours, fractional
    values and JPEG also raise `ImageError`. JPEG compression would change labels.
    """
    path = to_path(path)
    with translate_read_errors(path), open_content(path, None) as file, _open_image(file) as image:
        if image.format in ("JPEG", "MPO"):
            raise ImageError("is JPEG, whose lossy compression changes labels: save labels as PNG")
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            contents = "fractions" if image.mode == "F" else f"colours ({image.mode})"
            raise ImageError(f"contains {contents}, expected labels: a palette, or integer grey values")
        # To fill 8 bits, Pillow multiplies grey values of 2 bits by 85, and of 4 bits by 17. Undo the multiplication.
        scale = {"L;2": 85, "L;4": 17}.get(str(image.tile[0][3]), 1) if image.tile else 1
        _check_memory(image, file, 12)
        image.load()
        return np.floor_divide(_to_array(image), scale, dtype=np.int64)


def to_path(path: Any) -> Path:
    """Convert a value to the path of an image. Raises `ImageError` if the value is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise ImageError(f"The image's path is {shorten(path)}, expected a string or a pathlib.Path.")
    return Path(os.fsdecode(path))


def is_dicom(path: str | os.PathLike[str], data: bytes | None = None) -> bool:
    """Return True if the suffix of the file, or the start of its content, shows that the file is DICOM."""
    path = to_path(path)
    if path.suffix.lower() in DICOM_SUFFIXES:
        return True
    with contextlib.suppress(OSError, ImageError), open_content(path, data) as file:
        return file.read(132)[128:] == DICOM_MAGIC
    return False  # Ignore the error here: the function that reads the file will report the error.


def open_content(path: Path, data: bytes | None) -> BinaryIO:
    """Open `data` or, if it is None, the file. Raises `ImageError` if the file is missing or empty."""
    if data is None and not path.is_file():  # Opening a pipe would wait for a writer.
        raise ImageError("is not a file" if path.exists() else "does not exist")
    if (path.stat().st_size if data is None else len(data)) == 0:
        raise ImageError("is empty")
    return open_file(path) if data is None else io.BytesIO(data)


@contextlib.contextmanager
def translate_read_errors(path: Path | str) -> Iterator[None]:
    """Convert all errors of the block to an `ImageError`, with a message of one line that names the file."""
    try:
        yield
    except tuple(READ_FAILURES) as error:
        reason = next(reason for kind, reason in READ_FAILURES.items() if isinstance(error, kind)) or error
        raise ImageError(f"{path}: {reason}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # An OSError of the system, not of a decoder.
            raise ImageError(f"{path}: cannot be opened ({error.strerror})") from None
        # On broken files, decoders raise SyntaxError, ValueError, EOFError, struct.error and other types.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{path}: is damaged or cut off ({reason})") from error


def check_memory(width: int, height: int, bytes_per_pixel: float, extra_bytes: int = 0) -> None:
    """Raise `ImageError` if the pixels of an image, together with `extra_bytes`, need too much memory."""
    pixels, needed = width * height, int(width * height * bytes_per_pixel) + extra_bytes
    limit = os.environ.get(MAX_PIXELS)
    if not limit and needed > MEMORY_BUDGET_BYTES:
        size = f"has {width} x {height} pixels and" if pixels else "is so large that it"
        raise ImageError(
            f"{size} needs {needed / 2**30:.3g} GiB to read, but the limit is {MEMORY_BUDGET_BYTES / 2**30:.3g} GiB: raise "
            f"the limit with --max-pixels {pixels or 'N'} or the environment variable {MAX_PIXELS}"
        )
    if limit and not limit.isdecimal():
        raise ImageError(f"cannot be read, because {MAX_PIXELS} is {shorten(limit)}, expected a number of pixels")
    if limit and pixels > int(limit):
        raise ImageError(f"has {width} x {height} = {pixels} pixels, but --max-pixels or {MAX_PIXELS} allows {limit}")


_pillow_lock = threading.Lock()


def _open_image(file: BinaryIO) -> ImageFile.ImageFile:
    """Open an image and read its header. Pillow's limit on pixels is disabled: `check_memory` has its own limit."""
    _check_icon(file)
    Image.init()
    with _pillow_lock:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file, formats=[name for name in READ_FORMATS if name in Image.OPEN])
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_icon(file: BinaryIO) -> None:
    """Raise `ImageError` if an icon needs too much memory. Pillow decodes icons as soon as the file is opened."""
    kind, count = struct.unpack("<IH", file.read(6).ljust(6))
    for entry in range(count if kind == 0x10000 else 0):
        file.seek(6 + 16 * entry + 12)
        file.seek(int.from_bytes(file.read(4), "little"))
        head = file.read(24).ljust(24, b"\0")
        width, height = struct.unpack(*((">II", head[16:]) if head.startswith(b"\x89PNG") else ("<ii", head[4:12])))
        check_memory(abs(width), abs(height), 8)
    file.seek(0)


def _check_memory(image: ImageFile.ImageFile, file: BinaryIO, array_bytes: int) -> None:
    pillow_bytes = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    decoder_bytes = DECODER_BYTES.get(str(image.format), 0)
    if image.format in ("JPEG", "MPO") and "progression" in image.info:
        decoder_bytes = 6  # For progressive files, the decoder stores all coefficients of three channels.
    is_file_in_memory = array_bytes == DEEP_COLOUR_BYTES or image.format in ("WEBP", "AVIF", "JPEG2000")
    extra_bytes = find_size(file) if is_file_in_memory else 0
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # Tiles may be larger than the image.
        sides = (image.tag_v2.get(side, 0) for side in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH))
        extra_bytes += 4 * math.prod(map(int, sides))
    check_memory(*image.size, pillow_bytes + max(decoder_bytes, array_bytes), extra_bytes)


def find_size(file: BinaryIO) -> int:
    """Return the size of a file in bytes, without moving the file position."""
    position, size = file.tell(), file.seek(0, io.SEEK_END)
    file.seek(position)
    return size


def _find_deep_mode(image: ImageFile.ImageFile) -> str:
    """Return the mode (RGB, RGBA or LA) of a file whose 16-bit channels Pillow would reduce to 8 bits; otherwise ""."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        depths = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
        if len(depths) > 1 and max(depths) > 8 and image.tag_v2.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2:
            problem = "stores its 16-bit channels in separate planes, which is not supported"
            raise ImageError(f"{problem}: save interleaved channels")
    if image.format not in ("PNG", "TIFF") or not image.tile:
        return ""
    arguments = image.tile[0][3]
    mode, suffix, _ = str(arguments[0] if isinstance(arguments, tuple) else arguments).partition(";16")
    return mode if suffix and mode in ("RGB", "RGBA", "LA") else ""


def _decode_deep(image: ImageFile.ImageFile, file: BinaryIO, mode: str) -> NDArray[np.uint16]:
    """Decode an image of 16 bits per channel with OpenCV, blend it with white, and return RGB (H,W,3) or grey (H,W).

    OpenCV applies the orientation of TIFF files only. For PNG files, this function applies the orientation.
    """
    from gradcam.images.opencv import cv2

    orientation = 1 if image.format == "TIFF" else find_orientation(image)
    file.seek(0)
    content = np.frombuffer(file.read(), np.uint8)
    image.close()  # Pillow's copy was needed only to check that the image is complete. Free the memory of the copy.
    values = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if values is None or values.dtype != np.uint16 or values.ndim != 3:
        raise ImageError("has 16-bit channels that cannot be decoded: save it as PNG, or as TIFF without compression")
    values = blend_with_white(np.asarray(values))
    if orientation != 1:
        upright = np.empty((values.shape[1], values.shape[0], 3) if orientation >= 5 else values.shape, np.uint16)
        _to_stored_orientation(upright, orientation)[:] = values
        values = upright
    if mode == "LA":
        return np.ascontiguousarray(values[..., 0])
    return np.asarray(cv2.cvtColor(values, cv2.COLOR_BGR2RGB, dst=values))


def _to_values(image: Image.Image) -> NDArray[Any]:
    if image.mode == "F" or image.mode.startswith("I"):
        values = _to_native(_to_array(image), image)
        if "transparency" in image.info:
            values[values == image.info["transparency"]] = 65535  # In PNG files, one value may be declared transparent.
        return values
    if image.mode == "RGB" and not image.has_transparency_data:
        return _to_array(image)
    return _to_array(image, _to_opaque if image.has_transparency_data else lambda part: part.convert("RGB"))


def _to_opaque(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _to_array(image: Image.Image, change: Callable[[Image.Image], Image.Image] = lambda strip: strip) -> NDArray[Any]:
    """Apply `change` to a PIL image, and return the result as an upright array.

    Each step in Pillow or NumPy copies the data. To save memory, the image is converted in strips.
    """
    orientation, (width, height) = find_orientation(image), image.size
    sample = np.asarray(change(image.crop((0, 0, 1, 1))))
    values = np.empty(((width, height) if orientation >= 5 else (height, width)) + sample.shape[2:], sample.dtype)
    stored = _to_stored_orientation(values, orientation)
    for rows in in_strips(height, width):
        is_all = rows.start == 0 and rows.stop >= height
        strip = image if is_all else image.crop((0, rows.start, width, min(rows.stop, height)))
        stored[rows] = np.asarray(change(strip))
    return values


def _to_native(values: NDArray[Any], source: Image.Image) -> NDArray[Any]:
    """Convert single-channel values from Pillow's dtype to the dtype of the values in the file."""
    if not isinstance(source, TiffImagePlugin.TiffImageFile):
        # In files other than TIFF, integers have at most 16 bits, but Pillow may return 32-bit integers.
        is_16_bits = values.dtype.itemsize == 2 or (values.dtype.kind in "iu" and source.format is not None)
        return values.astype(np.uint16, copy=False) if is_16_bits else values
    if values.dtype.itemsize == 2:
        values = values.astype(np.uint16, copy=False)  # This also converts the byte order.
        is_inverted = source.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        return np.subtract(65535, values, out=values) if is_inverted else values
    is_unsigned = source.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 1
    return values.view(np.uint32) if values.dtype.kind == "i" and is_unsigned else values


def find_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, from 1 to 8; 1 is upright."""
    # Broken EXIF data raises errors of many types. Ignore the errors, and return 1, as image viewers do.
    with contextlib.suppress(Exception):
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
        return orientation if orientation in range(1, 9) else 1
    return 1


def _to_stored_orientation(upright: NDArray[Any], orientation: int) -> NDArray[Any]:
    flipped = upright[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]
    return flipped.swapaxes(0, 1) if orientation >= 5 else flipped


def in_strips(height: int, width: int) -> Iterator[slice]:
    """Yield slices of rows that divide an image into strips."""
    rows = max(1, PIXELS_PER_STRIP // width)
    return (slice(start, start + rows) for start in range(0, height, rows))


def to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert values (H,W) or (H,W,3) to RGB, uint8 (H,W,3). The contrast is not stretched.

    For floats, white is the smallest of 1, 255 and 65535 that no value exceeds. For integers of more than 8 bits, white
    is 65535. If a value exceeds 65535, white is the maximum. NaN and negative values become black.
    """
    if values.dtype != np.uint8:
        values = _stretch(values, 0, *_find_white(values))
    return np.repeat(values[..., None], 3, axis=2) if values.ndim == 2 else values


def scale_for_display(values: NDArray[Any]) -> tuple[NDArray[np.uint8], str | None]:
    """Return values (H,W) or (H,W,C) as RGB uint8 (H,W,3) for display, with a note on changes, or None.

    If channels are left out or values are stretched, the note reports the displayed channels and values. Values are
    stretched to the full contrast if some values are negative, or if they use less than half of their type's range.
    """
    # Many viewers clip the values at percentiles. Do not clip: the model's evidence may be the few brightest pixels.
    selected, note = values, None
    channels = values.shape[2] if values.ndim == 3 else 3
    if channels > 3:
        selected, note = values[..., :3], f"showing channels 1 to 3 of {channels}"
    elif channels < 3:
        selected, note = values[..., 0], "showing channel 1 of 2" if channels == 2 else None
    finite = _is_finite(selected)
    if selected.dtype == np.uint8 or not np.any(finite):
        return to_8_bits(selected), note
    first = selected.flat[np.argmax(finite)]  # the first finite value
    low, high = (limit(where=finite, initial=first).item() for limit in (selected.min, selected.max))
    white, _ = _find_white(selected)
    if low == high or (low >= 0 and high - low >= white / 2):
        return to_8_bits(selected), note
    suffix = f" of {white}" if selected.dtype.name in WHITE_VALUES else ""
    notes = filter(None, (note, f"showing values from {low:.6g} to {high:.6g}{suffix}"))
    return to_8_bits(_stretch(selected, low, high, high)), "; ".join(notes)


def _is_finite(values: NDArray[Any]) -> Any:
    """Return a mask of the finite values. For integers, the mask is a single True."""
    return np.isfinite(values) if values.dtype.kind == "f" else np.True_


def _find_white(values: NDArray[Any]) -> tuple[float, float]:
    """Return the value to display as white, and the largest finite value (0 if all values are negative)."""
    maximum = float(values.max(where=_is_finite(values), initial=0))
    ranges = (1, 255, 65535) if values.dtype.kind == "f" else (65535,)
    return next((white for white in ranges if maximum <= white), maximum), maximum


def _stretch(values: NDArray[Any], low: float, high: float, largest: float) -> NDArray[np.uint8]:
    """Scale values from [low, high] to [0, 255]. NaN and -inf become `low`, and inf becomes `largest`."""
    result = np.empty(values.shape, np.uint8)
    for rows in in_strips(*values.shape[:2]):
        strip = np.nan_to_num(values[rows].astype(np.float64), nan=low, posinf=largest, neginf=low)
        result[rows] = np.round(255 * np.clip((strip - low) / (high - low), 0, 1))
    return result


def crop(image: NDArray[Any], region: Region) -> NDArray[Any]:
    """Return a view of the pixels in a region. If the region exceeds the image, return a copy padded with zeros."""
    y0, x0, height, width = region
    part = image[max(y0, 0) : y0 + height, max(x0, 0) : x0 + width]
    if part.shape[:2] == (height, width):
        return part
    padded = np.zeros((height, width, *image.shape[2:]), image.dtype)
    padded[max(-y0, 0) :, max(-x0, 0) :][: part.shape[0], : part.shape[1]] = part
    return padded
