"""Results as NumPy keeps them: all of one in an `.npz` file, a single map of it in an `.npy` file."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.errors import ImageError
from gradcam.images.files import WRITE_SUFFIXES, write_whole
from gradcam.images.read import blaming_writer, to_numpy, to_path

if TYPE_CHECKING:
    from torch import Tensor


SUFFIXES = (".npz", ".npy")


def choose(i: int | None, k: int | None, shape: tuple[int, ...], what: str = "map") -> tuple[list[int], list[int]]:
    """The places of image i and of its k-th map among (N,K,...), or of all where one is None.

    Raises `ImageError`, with the word for a map, where there is no such.
    """
    images, maps = shape[:2]
    if not (-images <= (i or 0) < images and -maps <= (k or 0) < maps):
        place = ", ".join(":" if it is None else str(it) for it in (i, k))
        raise ImageError(f"There is no {what} [{place}]: there are {images} picture(s), with {maps} {what}(s) each.")
    return list(range(images)) if i is None else [i], list(range(maps)) if k is None else [k]


def write_arrays(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor | None], words: Mapping[str, str | None], i: Any, k: Any
) -> None:
    """Write tensors (N,K,...) and words, each under its name, to `.npz`; to `.npy` one map of the first tensor.

    Image i and its k-th map alone, where these are given. Raises `ImageError` for several maps in `.npy`, where there is no
    such map, and where the file cannot be written.
    """
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
        raise ImageError(f"{path}: takes one map, and there are {count}: give i and k, or save all of them as .npz")
    with blaming_writer(path):
        write_whole(path, file.getvalue())


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The suffix of a path that a result is saved to. Raises `ImageError` for one that is not written."""
    suffix = to_path(path).suffix.lower()
    if suffix not in (*SUFFIXES, *WRITE_SUFFIXES):
        pictures = ", ".join(sorted(WRITE_SUFFIXES))
        raise ImageError(
            f"{to_path(path)}: expected the suffix of a picture ({pictures}), or .npz or .npy for the values"
        )
    return suffix
