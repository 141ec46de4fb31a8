"""Pictures to files: the only place where pixels are written; and results as NumPy keeps them, in ``.npz`` and ``.npy``."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.errors import ImageError
from gradcam.images.files import WRITE_SUFFIXES, write_whole
from gradcam.images.read import Pixels, describe_array, to_numpy, to_path

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".npz", ".npy")


def write_image(path: str | os.PathLike[str], image: Pixels) -> None:
    """Write an RGB image in the format of the path's suffix. JPEG and WebP have quality 95.

    The file is written under a temporary name in the same folder and then renamed, so it is never incomplete.

    Parameters
    ----------
    path : str or path
        The file, ending in ``.png``, ``.jpg``, ``.jpeg``, ``.webp``, ``.bmp``, ``.tif`` or ``.tiff``. Its folder must
        exist.
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
        known = ", ".join(sorted(WRITE_SUFFIXES))
        raise ImageError(f"{path}: the suffix is not supported; choose one of {known}")
    with blaming_writer(path):
        write_whole(path, encode_image(image, suffix))


@contextlib.contextmanager
def blaming_writer(path: Path) -> Iterator[None]:
    """Whatever goes wrong with writing a file becomes an `ImageError` that names it."""
    try:
        yield
    except (OSError, ImageError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ImageError(f"{path}: cannot be written ({reason})") from error


def encode_png(image: Pixels) -> bytes:
    """An RGB picture as the bytes of a PNG file."""
    return encode_image(check_pixels(image), ".png")


def encode_image(image: Pixels, suffix: str, quality: int = 95) -> bytes:
    """An RGB picture, uint8 (H,W,3), as the bytes of a file with this suffix; `quality`, 1 to 100, is of JPEG and WebP.
    Raises `ImageError` where it does not fit into the format."""
    from gradcam.images.opencv import cv2

    flags = {".webp": cv2.IMWRITE_WEBP_QUALITY, ".jpg": cv2.IMWRITE_JPEG_QUALITY, ".jpeg": cv2.IMWRITE_JPEG_QUALITY}
    options = [flags[suffix], quality] if suffix in flags else []
    with contextlib.suppress(cv2.error):
        encoded, data = cv2.imencode(suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
        if encoded:
            return data.tobytes()
    # The sides of a WebP end at 16383 pixels, those of a JPEG at 65500.
    raise ImageError(f"{image.shape[1]} x {image.shape[0]} pixels are too large for this format: choose .png")


def fit_view(picture: Pixels, longest: int) -> Pixels:
    """The picture with so many pixels on its longest side, or as it is where it has fewer."""
    from gradcam.images.opencv import cv2

    height, width = picture.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return picture
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)


def check_pixels(image: Any) -> Pixels:
    """`image`, if it is RGB, uint8 (H,W,3), with at least one pixel; otherwise raises `ImageError`."""
    is_array = isinstance(image, np.ndarray)
    if not is_array or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        what = describe_array(image) if is_array else type(image).__name__
        raise ImageError(f"The image is {what}, expected an RGB array: uint8 (H,W,3) with values from 0 to 255.")
    return image


def choose(i: int | None, k: int | None, shape: tuple[int, ...], what: str = "map") -> tuple[list[int], list[int]]:
    """The places of image i and of its k-th map among (N,K,...), or of all where one is None. Raises `ImageError`, with
    the word for a map, where there is no such."""
    images, maps = shape[:2]
    if not (-images <= (i or 0) < images and -maps <= (k or 0) < maps):
        place = ", ".join(":" if it is None else str(it) for it in (i, k))
        raise ImageError(f"There is no {what} [{place}]: there are {images} image(s), with {maps} {what}(s) each.")
    return list(range(images)) if i is None else [i], list(range(maps)) if k is None else [k]


def write_arrays(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor | None], words: Mapping[str, str | None], i: Any, k: Any
) -> None:
    """Write tensors (N,K,...) and words, each under its name, to ``.npz``; to ``.npy`` one map of the first tensor. Image i
    and its k-th map alone, where these are given. Raises `ImageError` for several maps in ``.npy``, where there is no
    such map, and where the file cannot be written."""
    path = to_path(path)
    arrays = {name: to_numpy(tensor) for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(arrays.values()))
    rows, columns = choose(i, k, first.shape)
    file = io.BytesIO()
    if path.suffix.lower() == ".npz":
        found: dict[str, Any] = {name: array[rows][:, columns] for name, array in arrays.items()}
        found |= {name: np.array(word) for name, word in words.items() if word is not None}
        np.savez(file, **found)
    elif len(rows) == len(columns) == 1:
        np.save(file, np.ascontiguousarray(first[rows[0], columns[0]]))
    else:
        count = len(rows) * len(columns)
        raise ImageError(
            f"{path}: .npy stores one map, but there are {count}: give i and k, or save all of them as .npz"
        )
    with blaming_writer(path):
        write_whole(path, file.getvalue())


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The suffix of a path that a result is saved to. Raises `ImageError` for one that is not written."""
    suffix = to_path(path).suffix.lower()
    if suffix not in (*SUFFIXES, *WRITE_SUFFIXES):
        expected = f"an image suffix ({', '.join(sorted(WRITE_SUFFIXES))}), or .npz or .npy for the values"
        raise ImageError(f"{to_path(path)}: expected {expected}")
    return suffix
