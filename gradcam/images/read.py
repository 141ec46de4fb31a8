"""Pictures from files, bytes, arrays and tensors to RGB arrays: the only place where pixels are read."""

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
    """A file that is open for bytes: what `open(path, "rb")`, `io.BytesIO` and an answer of the web have in common."""

    def read(self) -> bytes:
        """All that is left of it."""


Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]  # top, left, height, width
Given = bytes | Image.Image  # what is not read from a path: a file's bytes, or a picture of PIL's
PictureLike = Union[
    str, "os.PathLike[str]", bytes, bytearray, memoryview, OpenFile, Image.Image, NDArray[Any], "Tensor"
]
FORMS = "a path, the bytes of a file, an open file, a PIL image, an array (H,W,3) or a tensor (C,H,W)"

# Formats that people keep pictures in. Left out are those that would start other programs (EPS) or draw from a text.
READ_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "MPO", "JPEG2000", "AVIF", "PPM", "TGA", "ICO")
ORIENTATION = 0x0112  # of EXIF
BUDGET = 2**30  # bytes that reading one picture may take: 150 million pixels of 8 bits in RGB, 60 million of 16
DEEP, GREY = 13, 7  # bytes of each pixel in our arrays, where there are 16 bits a channel; and of deep grey values
DECODERS = {"WEBP": 12, "JPEG2000": 16, "AVIF": 12, "TIFF": 4}  # bytes of each pixel that they hold beside Pillow's own
DICOM_SUFFIXES = (".dcm", ".dicom")
DICOM_MAGIC = b"DICM"  # after a preamble of 128 bytes, which may hold anything
FULL = {"uint8": 255, "uint16": 65535}  # integers with a scale of their own; 32 bits and signed ones have none
STRIP = 2**18  # pixels that are worked on at once, so that what is computed of them takes no memory to speak of


@accept_old_parameters
def read_image(image: PictureLike) -> Pixels:
    """Read an image as RGB, uint8 (H,W,3), as an image viewer shows it.

    The EXIF orientation is applied, and transparent pixels are drawn on white. Only the first frame of an animation is
    read. Values deeper than 8 bits are scaled to 8 bits.

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
        return to_8_bits(read_values(*to_content(image)))
    if values.ndim not in (2, 3) or values.size == 0 or values.shape[2:] not in ((), (1,), (3,), (4,)):
        expected = "an array (H,W), (H,W,3) or (H,W,4), or a tensor (C,H,W)"
        raise ImageError(f"The image is {describe_array(values)}, expected {expected}.")
    values = lay_on_white(check_range(values))
    return to_8_bits(values[..., 0] if values.shape[2:] == (1,) else values)


def is_one_picture(given: Any) -> bool:
    """Whether it is to be one picture, in whatever form, and not several."""
    is_whole = isinstance(given, (str, os.PathLike, bytes, bytearray, memoryview, Image.Image))
    return is_whole or hasattr(given, "read") or hasattr(given, "read_bytes") or getattr(given, "ndim", 0) in (2, 3)


def to_array(picture: Any) -> NDArray[Any] | None:
    """The values of an array as they are, and of a tensor (H,W) or (C,H,W) as (H,W) or (H,W,C); None for another form."""
    if isinstance(picture, np.ndarray):
        return picture
    if not (hasattr(picture, "detach") and hasattr(picture, "ndim")):
        return None
    values = to_numpy(picture)
    start = f"The image is a tensor {describe_array(values)}, expected"
    if values.ndim not in (2, 3) or values.size == 0:
        raise ImageError(f"{start} one image: (C,H,W) or (H,W).")
    if values.ndim == 3 and values.shape[0] > 4 >= values.shape[2]:
        raise ImageError(f"{start} channels first, (C,H,W): use .permute(2, 0, 1).")
    return check_range(values if values.ndim == 2 else np.ascontiguousarray(np.moveaxis(values, 0, 2)))


def to_numpy(values: Any) -> NDArray[Any]:
    """An array of an array, or of a tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # NumPy has no bfloat16
    return np.asarray(values)


def check_range(values: NDArray[Any]) -> NDArray[Any]:
    """Values that have a white of their own: uint8, uint16, or floats from 0 to 1. Raises `ImageError` for others."""
    if values.dtype.name in FULL:
        return values
    if values.dtype.kind == "f" and values.size and values.min() >= -1e-4 and values.max() <= 1 + 1e-4:  # NaN is not
        return np.clip(values, 0, 1)
    reach = (
        f" with values from {values.min():.4g} to {values.max():.4g}"
        if values.size and values.dtype.kind in "iuf"
        else ""
    )
    hint = " For normalised input, use gradcam.explain(model, images)." if values.dtype.kind == "f" else ""
    raise ImageError(
        f"The image is {describe_array(values)}{reach}, expected uint8, uint16, or floats from 0 to 1.{hint}"
    )


def describe_array(values: NDArray[Any]) -> str:
    """Its kind and shape, for a message."""
    return f"{values.dtype} {values.shape}"


def lay_on_white(values: NDArray[Any]) -> NDArray[Any]:
    """Colours with opacity (H,W,4), as `check_range` has them, on white (H,W,3), as of files; anything else as it is."""
    if values.shape[2:] != (4,):
        return values
    values = check_range(values)
    if values.dtype == np.uint8:
        return np.array(_to_opaque(Image.fromarray(np.ascontiguousarray(values))))
    full, result = FULL.get(values.dtype.name, 1), np.empty((*values.shape[:2], 3), values.dtype)
    for rows in in_strips(*values.shape[:2]):
        opacity = values[rows, :, 3:] / full
        on_white = values[rows, :, :3] * opacity + full * (1 - opacity)
        result[rows] = np.rint(on_white) if values.dtype.kind == "u" else on_white
    return result


def to_content(picture: Any) -> tuple[Path, Given | None]:
    """What a picture that is no array is called, and what it holds: bytes, or a picture of PIL's; None for a path.
    Raises `ImageError` for what is no picture, for a URL, and for a file that cannot be read."""
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return Path("the given bytes"), bytes(picture)
    if isinstance(picture, Image.Image):
        return Path(os.fsdecode(getattr(picture, "filename", "") or "the given image")), picture
    if hasattr(picture, "read"):
        names = (getattr(picture, name, None) for name in ("name", "filename"))
        path = Path(next((name for name in names if name and isinstance(name, str)), "the given file"))
        with blaming(path):
            return path, _read_open(picture)
    if hasattr(picture, "read_bytes") and not isinstance(picture, Path):  # in an archive, or in a store
        with blaming(str(picture)):
            return Path(str(picture)), picture.read_bytes()
    if not isinstance(picture, (str, os.PathLike)):
        raise ImageError(f"The image is {shorten(picture)}, expected {FORMS}.")
    if "://" in (text := os.fsdecode(picture)) and is_url(text):
        raise ImageError(f"{text}: is a URL. Give a file or its bytes, or use gradcam.explain_files, which reads URLs")
    return to_path(picture), None


def _read_open(file: Any) -> bytes:
    if getattr(file, "closed", False):
        raise ImageError("is closed: pass it while it is open")
    position = None
    with contextlib.suppress(AttributeError, OSError):  # a stream
        place = file.tell()
        file.seek(0)
        position = place
    try:
        data = file.read()
    except (UnicodeDecodeError, io.UnsupportedOperation):
        data = None
    finally:
        if position is not None:
            file.seek(position)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if hasattr(data, "close"):
        data.close()  # of a coroutine that nobody waits for
        raise ImageError("has an asynchronous read(): pass the underlying file, such as upload.file, or its bytes")
    raise ImageError('is not open in binary mode: open it with "rb"')


def read_values(path: str | os.PathLike[str], data: Given | None = None) -> NDArray[Any]:
    """A picture's values as deep as its file has them, otherwise as `read_image` gives them. `data`: what the file
    holds, where that was read already, or a picture of PIL's; the path then only says whose it is. Of 8 bits or less:
    RGB, uint8 (H,W,3), grey ones too. Deeper grey: (H,W), uint16 of 16 bits, float32, or int32 or uint32 of integers
    that are signed or longer. Deeper RGB, in PNG and TIFF files: uint16 (H,W,3). Raises `ImageError` as `read_image`
    does."""
    # Pillow, not OpenCV: OpenCV gives a picture that was cut off as if it were whole, and loses transparency.
    path = to_path(path)
    if isinstance(data, Image.Image):
        with blaming(path):
            check_memory(*data.size, 8)
            try:
                data.load()
            except (AssertionError, AttributeError, ValueError):
                if getattr(data, "fp", None) is None:
                    raise ImageError("is closed: pass it while it is open") from None
                raise
            return _to_values(data)
    # As a file, not a path, of which Pillow maps some TIFFs into memory, and scrambles those that are to be turned.
    with blaming(path), open_content(path, data) as file, _open_picture(file) as image:
        deep = _find_deep_colours(image)
        _check_memory(image, file, DEEP if deep else GREY if image.mode[0] in "FI" else 3)
        image.load()
        return _decode_deep(image, file, deep) if deep else _to_values(image)


def read_numbers(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """A picture of numbers (H,W), such as a mask of labels: the indices of a palette, or grey values as the file has
    them. Upright, as `read_image` gives pictures. Raises `ImageError`, naming the file, as that does, and for colours,
    fractions, and JPEG, which changes numbers."""
    path = to_path(path)
    with blaming(path), open_content(path, None) as file, _open_picture(file) as image:
        if image.format in ("JPEG", "MPO"):
            raise ImageError("is JPEG, whose lossy compression changes labels: save labels as PNG")
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            held = "fractions" if image.mode == "F" else f"colours ({image.mode})"
            raise ImageError(f"contains {held}, expected labels: a palette, or integer grey values")
        stretched = {"L;2": 85, "L;4": 17}.get(str(image.tile[0][3]), 1) if image.tile else 1  # by Pillow, to 8 bits
        _check_memory(image, file, 12)
        image.load()
        numbers = _to_array(image).astype(np.int64)
        numbers //= stretched
        return numbers


def to_path(path: Any) -> Path:
    """The path of a picture. Raises `ImageError` for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise ImageError(f"The image's path is {shorten(path)}, expected a string or a pathlib.Path.")
    return Path(os.fsdecode(path))


def is_dicom(path: str | os.PathLike[str], data: bytes | None = None) -> bool:
    """Return True if the file, or its content `data`, is DICOM: by its suffix, or by its first bytes."""
    path = to_path(path)
    if path.suffix.lower() in DICOM_SUFFIXES:
        return True
    try:
        with open_content(path, data) as file:
            return file.read(132)[128:] == DICOM_MAGIC
    except (OSError, ImageError):  # The function that reads the file reports the reason.
        return False


def open_content(path: Path, data: bytes | None) -> BinaryIO:
    """A file, or what was read of it, from its start. Raises `ImageError` where there is none, or nothing in it."""
    if data is None:
        if not path.is_file():  # a pipe would be waited for
            raise ImageError("is not a file" if path.exists() else "does not exist")
        if path.stat().st_size == 0:
            raise ImageError("is empty")
        return open_file(path)
    if not data:
        raise ImageError("is empty")
    return io.BytesIO(data)


@contextlib.contextmanager
def blaming(path: Path | str) -> Iterator[None]:
    """Whatever goes wrong with a picture becomes one `ImageError` of one line that names the file."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None
    except UnidentifiedImageError:
        raise ImageError(f"{path}: is not an image in a supported format") from None
    except MemoryError:
        raise ImageError(f"{path}: does not fit into memory") from None
    except FileNotFoundError:
        raise ImageError(f"{path}: does not exist") from None
    except OSError as error:
        if error.errno is None:  # from a decoder
            raise ImageError(f"{path}: is damaged or cut off ({' '.join(str(error).split())})") from error
        raise ImageError(f"{path}: cannot be opened ({error.strerror})") from None
    except Exception as error:
        # Decoders raise SyntaxError, ValueError, EOFError, struct.error and more on broken files.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{path}: is damaged or cut off ({reason})") from error


def check_memory(width: int, height: int, each: float, more: int = 0) -> None:
    """Raises `ImageError` for a picture that takes too much: so many bytes for each pixel, and some more."""
    pixels, needed = width * height, int(width * height * each) + more
    given = os.environ.get(MAX_PIXELS) or None
    size = f"has {width} x {height} pixels and" if pixels else "is so large that it"
    if given is None and needed > BUDGET:
        much = f"{size} needs {needed / 2**30:.3g} GiB to read, but the limit is {BUDGET / 2**30:.3g} GiB"
        raise ImageError(f"{much}: raise it with --max-pixels {pixels or 'N'}, or set {MAX_PIXELS} in the environment")
    if given is not None and not given.isdecimal():
        raise ImageError(f"cannot be read, because {MAX_PIXELS} is {shorten(given)}, expected a number of pixels")
    if given is not None and pixels > int(given):
        allowed = f"but --max-pixels or {MAX_PIXELS} allows {given}"
        raise ImageError(f"has {width} x {height} = {pixels} pixels, {allowed}")


_opening = threading.Lock()


def _open_picture(file: BinaryIO) -> ImageFile.ImageFile:
    """A picture of which the header is read; how large it may be is ours to say."""
    _check_icon(file)
    Image.init()
    formats = [name for name in READ_FORMATS if name in Image.OPEN]
    with _opening:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file, formats=formats)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_icon(file: BinaryIO) -> None:
    """Raises `ImageError` for an icon with a picture that takes too much: Pillow decodes it on being opened."""
    kind, count = struct.unpack("<IH", file.read(6).ljust(6))
    for entry in range(count if kind == 0x10000 else 0):
        file.seek(6 + 16 * entry + 12)
        file.seek(int.from_bytes(file.read(4), "little"))
        head = file.read(24)
        if len(head) < 24:
            raise ImageError("is damaged or cut off (an icon without its image)")
        width, height = struct.unpack(*((">II", head[16:]) if head.startswith(b"\x89PNG") else ("<ii", head[4:12])))
        check_memory(abs(width), abs(height), 8)
    file.seek(0)


def _check_memory(image: ImageFile.ImageFile, file: BinaryIO, ours: int) -> None:
    own = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    decoder = DECODERS.get(str(image.format), 0)
    if image.format in ("JPEG", "MPO") and "progression" in image.info:
        decoder = 6  # the coefficients of all three colours
    tile = 0
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # of which a tile may be larger than the picture
        sides = (image.tag_v2.get(side, 0) for side in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH))
        tile = 4 * math.prod(map(int, sides))
    is_held = ours == DEEP or image.format in ("WEBP", "AVIF", "JPEG2000")
    check_memory(*image.size, own + max(decoder, ours), tile + (find_size(file) if is_held else 0))


def find_size(file: BinaryIO) -> int:
    """The bytes of a file, of which the position stays."""
    place, size = file.tell(), file.seek(0, io.SEEK_END)
    file.seek(place)
    return size


def _find_deep_colours(image: ImageFile.ImageFile) -> str:
    """Before it is loaded: "RGB", "RGBA" or "LA" of 16 bits a channel, which Pillow would cut to 8; "" of any other."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        depths = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
        if len(depths) > 1 and max(depths) > 8 and image.tag_v2.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2:
            raise ImageError(
                "stores its 16-bit channels in separate planes, which is not supported: save them interleaved"
            )
    if image.format not in ("PNG", "TIFF") or not image.tile:
        return ""
    how = image.tile[0][3]
    colours, deep, _ = str(how[0] if isinstance(how, tuple) else how).partition(";16")
    return colours if deep and colours in ("RGB", "RGBA", "LA") else ""


def _decode_deep(image: ImageFile.ImageFile, file: BinaryIO, colours: str) -> NDArray[np.uint16]:
    """Channels of 16 bits, on white: RGB (H,W,3), or grey (H,W). OpenCV turns a TIFF upright, but not a PNG."""
    from gradcam.images.opencv import cv2

    turn = 1 if image.format == "TIFF" else find_turn(image)
    file.seek(0)
    content = np.frombuffer(file.read(), np.uint8)
    image.close()  # it was whole, and its memory is needed
    values = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if values is None or values.dtype != np.uint16 or values.ndim != 3:
        raise ImageError("has 16-bit channels that cannot be decoded: save it as PNG, or as TIFF without compression")
    values = lay_on_white(np.asarray(values))
    if turn != 1:
        upright = np.empty((values.shape[1], values.shape[0], 3) if turn >= 5 else values.shape, np.uint16)
        _lay_down(upright, turn)[:] = values
        values = upright
    if colours == "LA":
        return np.ascontiguousarray(values[..., 0])
    return np.asarray(cv2.cvtColor(values, cv2.COLOR_BGR2RGB, dst=values))


def _to_values(image: Image.Image) -> NDArray[Any]:
    if image.mode == "F" or image.mode.startswith("I"):
        values = _to_native(_to_array(image), image)
        if "transparency" in image.info:
            values[values == image.info["transparency"]] = 65535  # the one value that a PNG may declare transparent
        return values
    if image.mode == "RGB" and not image.has_transparency_data:
        return _to_array(image)
    return _to_array(image, _to_opaque if image.has_transparency_data else lambda part: part.convert("RGB"))


def _to_opaque(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _to_array(image: Image.Image, change: Callable[[Image.Image], Image.Image] = lambda part: part) -> NDArray[Any]:
    """What Pillow holds, changed, as an array, upright: strip by strip, since Pillow and NumPy make a copy at each step."""
    turn, (width, height) = find_turn(image), image.size
    sample = np.asarray(change(image.crop((0, 0, 1, 1))))
    values = np.empty(((width, height) if turn >= 5 else (height, width)) + sample.shape[2:], sample.dtype)
    lying = _lay_down(values, turn)
    for rows in in_strips(height, width):
        is_all = rows.start == 0 and rows.stop >= height
        part = image if is_all else image.crop((0, rows.start, width, min(rows.stop, height)))
        lying[rows] = np.asarray(change(part))
    return values


def _to_native(values: NDArray[Any], source: Image.Image) -> NDArray[Any]:
    """Single-channel values in the kind that the file has them in, where Pillow has none for it."""
    if not isinstance(source, TiffImagePlugin.TiffImageFile):
        # Of a file, Pillow may keep 16 bits in 32.
        is_16_bits = values.dtype.itemsize == 2 or (values.dtype.kind in "iu" and source.format is not None)
        return values.astype(np.uint16, copy=False) if is_16_bits else values
    if values.dtype.itemsize == 2:
        values = values.astype(np.uint16, copy=False)  # in this machine's order of bytes
        is_inverted = source.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        return np.subtract(65535, values, out=values) if is_inverted else values
    is_unsigned = source.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 1
    return values.view(np.uint32) if values.dtype.kind == "i" and is_unsigned else values


def find_turn(image: Image.Image) -> int:
    """The orientation in its EXIF data, from 1 to 8; 1 is upright."""
    try:
        turn = image.getexif().get(ORIENTATION, 1)
    except Exception:  # whatever broken EXIF data raises: the pixels are whole, and viewers show them as they lie
        return 1
    return turn if turn in range(1, 9) else 1


def _lay_down(upright: NDArray[Any], turn: int) -> NDArray[Any]:
    turned = upright[:: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1]
    return turned.swapaxes(0, 1) if turn >= 5 else turned


def in_strips(height: int, width: int) -> Iterator[slice]:
    """The rows of a picture, a strip after another."""
    rows = max(1, STRIP // width)
    return (slice(top, top + rows) for top in range(0, height, rows))


def to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Values (H,W), or of three channels, as RGB uint8 (H,W,3): by the range of their kind, not of the picture. Of
    floats that is the least of 0 to 1, 255 and 65535 that holds them. What is NaN, or below zero, is black."""
    if values.dtype != np.uint8:
        values = _stretch(values, 0, _find_full(values), _find_largest(values))
    return np.repeat(values[..., None], 3, axis=2) if values.ndim == 2 else values


def show(values: NDArray[Any]) -> tuple[NDArray[np.uint8], str | None]:
    """Values (H,W) or (H,W,C) as a picture, RGB uint8 (H,W,3), and a note where it is not shown as `to_8_bits` does.
    Where they use less than half of their kind's range, or less than zero, they are shown from the least to the
    largest."""
    # Not from one percentile to another, as many viewers do: the few brightest pixels may be what the model looked at.
    seen, note = values, None
    if values.ndim == 3 and values.shape[2] != 3:
        channels = values.shape[2]
        several = f"showing channels 1 to 3 of {channels}" if channels > 3 else "showing channel 1 of 2"
        seen, note = (values[..., :3] if channels > 3 else values[..., 0]), None if channels == 1 else several
    if seen.dtype == np.uint8:
        return to_8_bits(seen), note
    is_finite, kind = _is_finite(seen), np.finfo if seen.dtype.kind == "f" else np.iinfo
    if not np.any(is_finite):
        return to_8_bits(seen), note
    ends: Any = kind(seen.dtype)
    low, high = seen.min(where=is_finite, initial=ends.max).item(), seen.max(where=is_finite, initial=ends.min).item()
    full = _find_full(seen)
    if low == high or (low >= 0 and high - low >= full / 2):
        return to_8_bits(seen), note
    of = f" of {full}" if seen.dtype.name in FULL else ""
    notes = filter(None, (note, f"showing values from {low:.6g} to {high:.6g}{of}"))
    return to_8_bits(_stretch(seen, low, high, high)), "; ".join(notes)


def _is_finite(values: NDArray[Any]) -> Any:
    """True where they are; of integers, once for all."""
    return np.isfinite(values) if values.dtype.kind == "f" else np.True_


def _find_largest(values: NDArray[Any]) -> float:
    return float(values.max(where=_is_finite(values), initial=0))  # zero at least


def _find_full(values: NDArray[Any]) -> float:
    largest = _find_largest(values)
    ranges = (1, 255, 65535) if values.dtype.kind == "f" else (65535,)
    return next((full for full in ranges if largest <= full), largest)


def _stretch(values: NDArray[Any], low: float, high: float, largest: float) -> NDArray[np.uint8]:
    """From `low` to `high` as from 0 to 255. NaN is as low, and what is infinite as low or as large as the others."""
    result = np.empty(values.shape, np.uint8)
    for rows in in_strips(*values.shape[:2]):
        part = np.nan_to_num(values[rows].astype(np.float64), nan=low, posinf=largest, neginf=low)
        result[rows] = np.round(255 * np.clip((part - low) / (high - low), 0, 1))
    return result


def crop(picture: NDArray[Any], region: Region) -> NDArray[Any]:
    """Return a view of the pixels (H,W,...) in a region, or a copy with zeros where the region exceeds the image."""
    top, left, height, width = region
    part = picture[max(top, 0) : top + height, max(left, 0) : left + width]
    if part.shape[:2] == (height, width):
        return part
    before = (max(-top, 0), max(-left, 0))
    missing = [(start, full - length - start) for start, full, length in zip(before, region[2:], part.shape)]
    return np.pad(part, [*missing, *[(0, 0)] * (picture.ndim - 2)])
