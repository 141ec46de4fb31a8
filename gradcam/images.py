"""Pictures from files to RGB arrays and back: the only place where pixels are read or written."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin, UnidentifiedImageError

from gradcam.depth import to_8_bits
from gradcam.errors import ImageError, shorten
from gradcam.files import write_whole
from gradcam.naming import WRITE_SUFFIXES

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]  # top, left, height, width

# Formats that people keep pictures in. Left out are those that would start other programs (EPS) or draw from a text.
READ_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "MPO", "JPEG2000", "AVIF", "PPM", "TGA", "ICO")
ORIENTATION = 0x0112  # of EXIF


def read_image(path: str | os.PathLike[str]) -> Pixels:
    """A picture as RGB, uint8 (H,W,3), the way a viewer shows it.

    The orientation in its EXIF data is applied, transparency lies on white, of an animation it is the first frame, and
    deeper values than 8 bits are scaled to 8. Raises `ImageError`, naming the file, for whatever is not a whole picture.
    """
    return to_8_bits(read_values(path))


def read_values(path: str | os.PathLike[str], data: bytes | None = None) -> NDArray[Any]:
    """A picture's values as deep as its file has them, otherwise as `read_image` gives them.

    `data`: what the file holds, where that was read already; the path then only says whose it is.
    Of 8 bits or less: RGB, uint8 (H,W,3), grey ones too. Deeper grey: (H,W), uint16 of 16 bits, float32, or int32 or
    uint32 of integers that are signed or longer. Deeper RGB, in PNG and TIFF files: uint16 (H,W,3).
    Raises `ImageError` as `read_image` does.
    """
    # Pillow, not OpenCV: OpenCV gives a picture that was cut off as if it were whole, and loses transparency.
    path = to_path(path)
    # As a file, not a path, of which Pillow maps some TIFFs into memory, and scrambles those that are to be turned.
    with blaming(path), open_content(path, data) as file, Image.open(file, formats=_formats()) as image:
        deep = _find_deep_colours(image)
        turn = 1 if image.format == "TIFF" or not deep else image.getexif().get(ORIENTATION, 1)
        image.load()
        return _decode_deep(file, deep, turn) if deep else _to_values(_upright(image), image)


def read_numbers(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """A picture of numbers (H,W), such as a mask of labels: the indices of a palette, or grey values as the file has them.

    Upright, as `read_image` gives pictures. Raises `ImageError`, naming the file, as that does, and for colours, fractions,
    and JPEG, which changes numbers.
    """
    path = to_path(path)
    with blaming(path), open_content(path, None) as file, Image.open(file, formats=_formats()) as image:
        if image.format in ("JPEG", "MPO"):
            raise ImageError("is JPEG, which does not keep numbers as they were: save labels as PNG")
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise ImageError(
                f"holds {'fractions' if image.mode == 'F' else f'colours ({image.mode})'}, expected labels: a palette, or "
                "grey values that are integers"
            )
        stretched = {"L;2": 85, "L;4": 17}.get(str(image.tile[0][3]), 1) if image.tile else 1  # by Pillow, to 8 bits
        image.load()
        return np.array(_upright(image)).astype(np.int64) // stretched


def to_path(path: Any) -> Path:
    """The path of a picture. Raises `ImageError` for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise ImageError(f"The picture's path is {shorten(path)}, expected a string or a pathlib.Path.")
    return Path(path)


def open_content(path: Path, data: bytes | None) -> BinaryIO:
    """A file, or what was read of it, from its start. Raises `ImageError` where there is none, or nothing in it."""
    if data is None:
        if not path.is_file():  # a pipe would be waited for
            raise ImageError("is not a file" if path.exists() else "does not exist")
        if path.stat().st_size == 0:
            raise ImageError("is empty")
        return open(path, "rb")
    if not data:
        raise ImageError("is empty")
    return io.BytesIO(data)


@contextlib.contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a picture becomes one `ImageError` of one line that names the file."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None
    except UnidentifiedImageError:
        raise ImageError(f"{path}: is not a picture in a format that can be read") from None
    except Image.DecompressionBombError:
        raise ImageError(
            f"{path}: claims more pixels than can be held ({2 * (Image.MAX_IMAGE_PIXELS or 0)} at most)"
        ) from None
    except MemoryError:
        raise ImageError(f"{path}: does not fit into memory") from None
    except OSError as error:
        if error.errno is None:  # from a decoder
            raise ImageError(f"{path}: is damaged or cut off ({' '.join(str(error).split())})") from error
        raise ImageError(f"{path}: cannot be opened ({error.strerror})") from None
    except Exception as error:
        # Decoders raise SyntaxError, ValueError, EOFError, struct.error and more on broken files.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{path}: is damaged or cut off ({reason})") from error


def _formats() -> list[str]:
    Image.init()
    return [name for name in READ_FORMATS if name in Image.OPEN]


def _find_deep_colours(image: ImageFile.ImageFile) -> str:
    """ "RGB", "RGBA" or "LA" of a file with 16 bits a channel, which Pillow would cut to 8; "" of any other.

    To be asked before the picture is loaded. Raises `ImageError` for a file that neither Pillow nor OpenCV reads right.
    """
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        depths = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
        if len(depths) > 1 and max(depths) > 8 and image.tag_v2.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2:
            raise ImageError(
                "has channels of 16 bits in planes of their own, which cannot be read: save them interleaved"
            )
    if image.format not in ("PNG", "TIFF") or not image.tile:
        return ""
    how = image.tile[0][3]
    colours, deep, _ = str(how[0] if isinstance(how, tuple) else how).partition(";16")
    return colours if deep and colours in ("RGB", "RGBA", "LA") else ""


def _decode_deep(file: BinaryIO, colours: str, turn: int) -> NDArray[np.uint16]:
    """Channels of 16 bits, on white: RGB (H,W,3), or grey (H,W). OpenCV turns a TIFF upright, but not a PNG."""
    from gradcam.opencv import cv2

    file.seek(0)
    values = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    if values is None or values.dtype != np.uint16 or values.ndim != 3:
        raise ImageError(
            "has channels of 16 bits that cannot be decoded: save it as PNG, or as TIFF without compression"
        )
    opacity = values[..., 3:] / 65535 if values.shape[2] == 4 else 1.0
    on_white = np.rint(values[..., :3] * opacity + 65535 * (1 - opacity)).astype(np.uint16)
    turned = on_white.transpose(1, 0, 2) if turn in (5, 6, 7, 8) else on_white
    turned = turned[:: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1]
    return np.ascontiguousarray(turned[..., 0]) if colours == "LA" else flip_colours(turned)


def _to_values(image: Image.Image, source: Image.Image) -> NDArray[Any]:
    """The values of an upright picture; `source` is what was opened."""
    if image.mode == "F" or image.mode.startswith("I"):
        values = _to_native(np.array(image), source)
        # The one value that a PNG may declare transparent.
        values[values == image.info.get("transparency")] = 65535
        return values
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _to_native(values: NDArray[Any], source: Image.Image) -> NDArray[Any]:
    """Single-channel values in the kind that the file has them in, where Pillow has none for it."""
    if not isinstance(source, TiffImagePlugin.TiffImageFile):
        return values.astype(np.uint16) if values.dtype.kind in "iu" else values  # Pillow may keep 16 bits in 32
    if values.dtype.itemsize == 2:
        values = values.astype(np.uint16)  # in this machine's order of bytes
        is_inverted = source.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        return 65535 - values if is_inverted else values
    is_unsigned = source.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 1
    return values.view(np.uint32) if values.dtype.kind == "i" and is_unsigned else values


def _upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ORIENTATION, 1) == 1:
            return image  # Pillow would give a copy
        return ImageOps.exif_transpose(image)
    except Exception:  # whatever broken EXIF data raises: the pixels are whole, and viewers show them as they lie
        return image


def write_image(path: str | os.PathLike[str], image: Pixels) -> None:
    """Write an RGB picture, uint8 (H,W,3), in the format of the path's suffix; JPEG and WebP at quality 95.

    It is written under another name in the same folder and renamed, so that what has this name is always whole.
    Raises `ImageError`, naming the file, where it cannot be written.
    """
    path = to_path(path)
    image = check_pixels(image)
    suffix = path.suffix.lower()
    if suffix not in WRITE_SUFFIXES:
        raise ImageError(
            f"{path}: pictures are written as {', '.join(sorted(WRITE_SUFFIXES))}; choose one of these suffixes"
        )
    try:
        write_whole(path, encode_image(image, suffix))
    except (OSError, ImageError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ImageError(f"{path}: cannot be written ({reason})") from error


def encode_png(image: Pixels) -> bytes:
    """An RGB picture as the bytes of a PNG file."""
    return encode_image(check_pixels(image), ".png")


def encode_image(image: Pixels, suffix: str, quality: int = 95) -> bytes:
    """An RGB picture, uint8 (H,W,3), as the bytes of a file with this suffix; `quality`, 1 to 100, is of JPEG and WebP.

    Raises `ImageError` where it does not fit into the format.
    """
    from gradcam.opencv import cv2

    flags = {".webp": cv2.IMWRITE_WEBP_QUALITY, ".jpg": cv2.IMWRITE_JPEG_QUALITY, ".jpeg": cv2.IMWRITE_JPEG_QUALITY}
    options = [flags[suffix], quality] if suffix in flags else []
    with contextlib.suppress(cv2.error):
        encoded, data = cv2.imencode(suffix, flip_colours(image), options)
        if encoded:
            return data.tobytes()
    # The sides of a WebP end at 16383 pixels, those of a JPEG at 65500.
    raise ImageError(f"{image.shape[1]} x {image.shape[0]} pixels do not fit into this format: choose .png")


def check_pixels(image: Any) -> Pixels:
    """`image`, if it is RGB, uint8 (H,W,3), with at least one pixel; otherwise raises `ImageError`."""
    if (
        not isinstance(image, np.ndarray)
        or image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or image.size == 0
    ):
        what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ImageError(f"The picture is {what}, expected an RGB array: uint8 (H,W,3) with values from 0 to 255.")
    return image


def flip_colours(image: NDArray[Any]) -> NDArray[Any]:
    """RGB (H,W,3), of 8 or 16 bits, to the BGR order that OpenCV thinks in, or back."""
    from gradcam.opencv import cv2

    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))  # many times faster than NumPy's [..., ::-1]
