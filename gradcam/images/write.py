"""Write images to files, and results as NumPy arrays to ``.npz`` and ``.npy`` files."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.errors import ImageError
from gradcam.images.files import WRITE_SUFFIXES, write_atomically
from gradcam.images.read import Pixels, describe_array, to_numpy, to_path

if TYPE_CHECKING:
    from torch import Tensor

ARRAY_SUFFIXES = (".npz", ".npy")


def write_image(path: str | os.PathLike[str], image: Pixels) -> None:
    """Write an RGB image in the format of the path's suffix. JPEG and WebP have quality 95.

    The file is written under a temporary name in the same folder, and then renamed. The file is never incomplete.

    Parameters
    ----------
    path : str or path
        The file, ending in ``.png``, ``.jpg``, ``.jpeg``, ``.webp``, ``.bmp``, ``.tif`` or ``.tiff``. The folder of the
        file must exist.
    image : array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the suffix is not supported, the array is invalid, or the file cannot be written. The message names the file.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.write_image("small.webp", gradcam.read_image("photo.jpg")[::4, ::4])
    >>> gradcam.read_image("small.webp").shape
    (160, 200, 3)
    """
    path = to_path(path)
    image = check_pixels(image)
    suffix = path.suffix.lower()
    if suffix not in WRITE_SUFFIXES:
        raise ImageError(f"{path}: the suffix is not supported; choose one of {', '.join(sorted(WRITE_SUFFIXES))}")
    with translate_write_errors(path):
        write_atomically(path, encode_image(image, suffix))


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Convert an error of the block to an `ImageError` that names the file."""
    try:
        yield
    except (OSError, ImageError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ImageError(f"{path}: cannot be written ({reason})") from error


def encode_png(image: Pixels) -> bytes:
    """Return an RGB image as the bytes of a PNG file."""
    return encode_image(check_pixels(image), ".png")


def encode_image(image: Pixels, suffix: str, quality: int = 95) -> bytes:
    """Encode an image, uint8 RGB (H,W,3) or RGBA (H,W,4), in the format of this suffix; return the file's bytes.

    `quality`, 1 to 100, applies to JPEG and WebP. Raises `ImageError` if the image is too large for the format.
    """
    from gradcam.images.opencv import cv2

    flags = {".webp": cv2.IMWRITE_WEBP_QUALITY, ".jpg": cv2.IMWRITE_JPEG_QUALITY, ".jpeg": cv2.IMWRITE_JPEG_QUALITY}
    options = [flags[suffix], quality] if suffix in flags else []
    with contextlib.suppress(cv2.error):
        order = cv2.COLOR_RGBA2BGRA if image.shape[2] == 4 else cv2.COLOR_RGB2BGR
        encoded, data = cv2.imencode(suffix, cv2.cvtColor(image, order), options)
        if encoded:
            return data.tobytes()
    # WebP allows 16383 pixels per side, JPEG 65500.
    raise ImageError(f"{image.shape[1]} x {image.shape[0]} pixels are too large for this format: choose .png")


def shrink_to_fit(image: Pixels, max_side: int) -> Pixels:
    """Shrink an image to at most `max_side` pixels on its longer side."""
    from gradcam.images.opencv import cv2

    height, width = image.shape[:2]
    scale = max_side / max(height, width)
    if scale >= 1:
        return image
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def check_pixels(image: Any) -> Pixels:
    """Return `image` if it is RGB, uint8 (H,W,3), with at least one pixel; otherwise raise `ImageError`."""
    is_array = isinstance(image, np.ndarray)
    if not is_array or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        description = describe_array(image) if is_array else type(image).__name__
        raise ImageError(f"The image is {description}, expected an RGB array: uint8 (H,W,3) with values from 0 to 255.")
    return image


def select_maps(i: int | None, k: int | None, shape: tuple[int, ...], noun: str = "map") -> tuple[list[int], list[int]]:
    """Return the image indices that `i` selects and the map indices that `k` selects. None selects all.

    `shape` is (N,K,...). Raises `ImageError` if there is no such image or map. In the message, maps are called `noun`.
    """
    images, maps = shape[:2]
    if not (-images <= (i or 0) < images and -maps <= (k or 0) < maps):
        indices = ", ".join(":" if index is None else str(index) for index in (i, k))
        counts = f"{images} image(s), with {maps} {noun}(s) each"
        raise ImageError(f"There is no {noun} [{indices}]: there are {counts}.")
    return list(range(images)) if i is None else [i], list(range(maps)) if k is None else [k]


def write_arrays(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor | None], words: Mapping[str, str | None], i: Any, k: Any
) -> None:
    """Write all tensors (N,K,...) and strings to an ``.npz`` file, or one map of the first tensor to an ``.npy`` file.

    `i` selects the image, and `k` selects its map; None selects all. Raises `ImageError` if several maps are selected
    for ``.npy``, if there is no such map, or if the file cannot be written.
    """
    path = to_path(path)
    arrays = {name: to_numpy(tensor) for name, tensor in tensors.items() if tensor is not None}
    first_array = next(iter(arrays.values()))
    rows, columns = select_maps(i, k, first_array.shape)
    file = io.BytesIO()
    if path.suffix.lower() == ".npz":
        contents: dict[str, Any] = {name: array[rows][:, columns] for name, array in arrays.items()}
        contents |= {name: np.array(word) for name, word in words.items() if word is not None}
        np.savez(file, **contents)
    elif len(rows) == len(columns) == 1:
        np.save(file, np.ascontiguousarray(first_array[rows[0], columns[0]]))
    else:
        advice = f"there are {len(rows) * len(columns)}: choose one with i and k, or save all maps as .npz"
        raise ImageError(f"{path}: .npy stores one map, but {advice}")
    with translate_write_errors(path):
        write_atomically(path, file.getvalue())


def check_suffix(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a result's path. Raises `ImageError` if no image or array format has this suffix."""
    suffix = to_path(path).suffix.lower()
    if suffix not in (*ARRAY_SUFFIXES, *WRITE_SUFFIXES):
        expected = f"an image suffix ({', '.join(sorted(WRITE_SUFFIXES))}), or .npz or .npy for the values"
        raise ImageError(f"{to_path(path)}: expected {expected}")
    return suffix


def to_html_figure(pixels: Pixels, max_height: int, caption: str) -> str:
    """Return an HTML figure with a JPEG of the image, scaled down to a maximum height."""
    from gradcam.images.draw import scale_to_height

    pixels = scale_to_height(pixels, max_height) if pixels.shape[0] > max_height else pixels
    data, text = base64.b64encode(encode_image(pixels, ".jpg", 90)).decode(), html.escape(caption)
    image = f'<img src="data:image/jpeg;base64,{data}" alt="{text}" style="max-width: 100%">'
    style = f"margin: 0; max-width: {pixels.shape[1]}px"
    return f'<figure style="{style}">{image}<figcaption>{text}</figcaption></figure>'
