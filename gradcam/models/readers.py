"""From a picture's file to the values that the model gets and the picture that is drawn on, which need not be the same."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradcam.errors import GradcamError, ImageError, ModelError, shorten, show_fields
from gradcam.images import read
from gradcam.images.dicom import is_dicom, read_dicom
from gradcam.images.read import FULL, Given, PictureLike, Pixels, show
from gradcam.images.write import check_pixels
from gradcam.models.preprocess import check_values

Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Reading:
    """One picture: `values` for the model's preprocessing, (H,W) or (H,W,C), and `picture` to draw on, RGB uint8 (H,W,3)."""

    values: NDArray[Any]
    picture: Pixels
    note: str | None = None  # what a person should know of how it is shown

    __repr__ = show_fields


Reader = Callable[[Path], Reading]


def read_picture(path: Path, data: Given | None = None) -> Reading:
    """A picture with the depth of its file for the model, and as `gradcam.images.read.show` has it for drawing. `data`:
    what the file holds, where that was read already, or a picture of PIL's; the path then only says whose it is. DICOM
    files come through their window, float32 in [0,1] or RGB. Values without a full range of their own, floats and long
    or signed integers, go to the model as they are; those that are NaN or infinite become the least or the largest of
    the others. Raises `ImageError` as `gradcam.read_image` does."""
    if not isinstance(data, Image.Image) and is_dicom(path, data):
        values, note = read_dicom(path, data)
        return Reading(values, read.to_8_bits(values), note)
    values = read.read_values(path, data)
    picture, shown = show(values)
    if values.dtype.name in FULL:
        return Reading(values, picture, shown)
    is_finite, notes = np.isfinite(values), [shown] if shown else []
    if not is_finite.any():
        raise ImageError(f"{path}: has no finite value: expected a picture")
    low, high = values[is_finite].min(), values[is_finite].max()
    if not is_finite.all():
        notes.append(f"{is_finite.size - np.count_nonzero(is_finite)} value(s) NaN or infinite")
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    if low < 0 or high > 1:
        notes.append(f"values from {low.item():.6g} to {high.item():.6g} go to the model as they are")
    return Reading(values, picture, "; ".join(notes) or None)


def to_reader(function: Callable[[Path], Any]) -> Reader:
    """A reader from a function of a path, which gives an array, or (array, picture), or a `Reading`. The array is what
    the model's preprocessing gets: (H,W) or (H,W,C), integers or floats, finite. The picture to draw on is RGB, uint8
    (H,W,3), of the same height and width; without one it is made from the array, as `show` does it. The reader raises
    `ImageError`, naming the file and the function, for anything else, and for whatever the function raises but a
    `GradcamError`."""
    if not callable(function):
        raise ModelError(f"The reader is {shorten(function)}, expected a function from a picture's path to an array.")
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
        raise ImageError(f"It is {shorten(found)}, expected an array, (array, picture), or a Reading.")
    except ImageError as error:
        raise ImageError(f"{path}: what the reader {name} gave cannot be used. {error}") from None


def _complete(values: Any, picture: Any = None, note: Any = None) -> Reading:
    values = check_values(values)
    if picture is None:
        picture, note = show(values)
    sizes = [f"{array.shape[1]} x {array.shape[0]}" for array in (values, check_pixels(picture))]
    if sizes[0] != sizes[1]:
        raise ImageError(f"The picture to draw on is {sizes[1]}, and the values are {sizes[0]}: expected one size.")
    if not isinstance(note, (str, type(None))):
        raise ImageError(f"The note is {shorten(note)}, expected a text, or None.")
    return Reading(values, picture, note)
