"""Pictures from files to RGB arrays and back: the only place where pixels are read or written."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from gradcam.errors import ImageError, shorten
from gradcam.naming import WRITE_SUFFIXES

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]  # top, left, height, width

# Formats that people keep pictures in. Left out are those that would start other programs (EPS) or draw from a text.
READ_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "MPO", "JPEG2000", "AVIF", "PPM", "TGA", "ICO")


def read_image(path: str | os.PathLike[str]) -> Pixels:
    """A picture as RGB, uint8 (H,W,3), the way a viewer shows it.

    The orientation in its EXIF data is applied, transparency lies on white, of an animation it is the first frame, and
    deeper values than 8 bits are scaled to 8. Raises `ImageError`, naming the file, for whatever is not a whole picture.
    """
    # Pillow, not OpenCV: OpenCV gives a picture that was cut off as if it were whole, and loses transparency.
    path = _to_path(path)
    with _naming(path):
        if not path.is_file():
            raise ImageError("is not a file" if path.exists() else "does not exist")
        if path.stat().st_size == 0:
            raise ImageError("is empty")
        with Image.open(path, formats=_formats()) as image:
            image.load()
            return _to_rgb(_upright(image))


def _to_path(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ImageError(f"The picture's path is {shorten(path)}, expected a string or a pathlib.Path.")
    return Path(path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
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


def _to_rgb(image: Image.Image) -> Pixels:
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        pixels = _to_8_bits(values)
        pixels[values == image.info.get("transparency")] = 255  # the one value that a PNG may declare transparent
        return np.repeat(pixels[..., None], 3, axis=2)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # whatever broken EXIF data raises: the pixels are whole, and viewers show them as they lie
        return image


def _to_8_bits(values: NDArray[Any]) -> Pixels:
    """Single-channel values of 16 or 32 bits, or floats, as 8 bits: by the range of their kind, not of the picture."""
    largest = float(values.max(where=np.isfinite(values), initial=0))
    values = np.nan_to_num(values, posinf=largest, neginf=0)
    ranges = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0,)
    full = next((full for full in ranges if largest <= full), largest)
    return np.clip(np.round(values * (255 / full)), 0, 255).astype(np.uint8)


def write_image(path: str | os.PathLike[str], image: Pixels) -> None:
    """Write an RGB picture, uint8 (H,W,3), in the format of the path's suffix; JPEG and WebP at quality 95.

    It is written under another name in the same folder and renamed, so that what has this name is always whole.
    Raises `ImageError`, naming the file, where it cannot be written.
    """
    from gradcam.opencv import cv2

    path = _to_path(path)
    image = check_pixels(image)
    suffix = path.suffix.lower()
    if suffix not in WRITE_SUFFIXES:
        raise ImageError(
            f"{path}: pictures are written as {', '.join(sorted(WRITE_SUFFIXES))}; choose one of these suffixes"
        )
    quality = {".webp": [cv2.IMWRITE_WEBP_QUALITY, 95], ".jpg": [cv2.IMWRITE_JPEG_QUALITY, 95]}
    quality[".jpeg"] = quality[".jpg"]
    try:
        _write_whole(path, _encode(image, suffix, quality.get(suffix, [])))
    except (OSError, ImageError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ImageError(f"{path}: cannot be written ({reason})") from error


def encode_png(image: Pixels) -> bytes:
    """An RGB picture as the bytes of a PNG file."""
    return _encode(check_pixels(image), ".png", [])


def _encode(image: Pixels, suffix: str, options: Sequence[int]) -> bytes:
    from gradcam.opencv import cv2

    with contextlib.suppress(cv2.error):
        encoded, data = cv2.imencode(suffix, flip_colours(image), options)
        if encoded:
            return data.tobytes()
    # The sides of a WebP end at 16383 pixels, those of a JPEG at 65500.
    raise ImageError(f"{image.shape[1]} x {image.shape[0]} pixels do not fit into this format: choose .png")


def _write_whole(path: Path, data: bytes) -> None:
    # A dot, and no suffix of a picture: nobody takes it for one.
    temporary = path.with_name(f".gradcam-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # interruptions too
        temporary.unlink(missing_ok=True)
        raise


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


def flip_colours(image: NDArray[Any]) -> Pixels:
    """RGB to the BGR order that OpenCV thinks in, or back."""
    return np.ascontiguousarray(image[..., ::-1], dtype=np.uint8)
