"""From a picture's file to the values that the model gets and the picture that is drawn on, which need not be the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.images import Pixels, check_pixels, read_image

Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Reading:
    """One picture: `values` for the model's preprocessing, (H,W) or (H,W,C), and `picture` to draw on, RGB uint8 (H,W,3).

    `note`: what a person should know of how it is shown.
    """

    values: NDArray[Any]
    picture: Pixels
    note: str | None = None


Reader = Callable[[Path], Reading]


def read_picture(path: Path) -> Reading:
    """What `read_image` gives, for the model as for drawing. Raises `ImageError` as that does."""
    picture = read_image(path)
    return Reading(picture, picture)


def to_reading(picture: Path | NDArray[Any], reader: Reader) -> Reading:
    """A picture from a file, or from an RGB array uint8 (H,W,3). Raises `ImageError` for anything else."""
    if not isinstance(picture, np.ndarray):
        return reader(picture)
    return Reading(check_pixels(picture), picture)
