"""What the values of a picture may be, and how its channels fit those that a network takes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.depth import FULL
from gradcam.errors import ImageError, shorten

LUMINANCE = (19595, 38470, 7471)  # ITU-R 601 in 65536ths, as Pillow has it: grey keeps its values exactly


def check_values(values: Any) -> NDArray[Any]:
    """Values (H,W) or (H,W,C), in this machine's order of bytes.

    Raises `ImageError` unless they are integers or floats, at least one pixel, and finite in float32.
    """
    values = check_form(values)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            odd = values.size - np.count_nonzero(np.isfinite(values.astype(np.float32)))
        if odd:
            raise ImageError(
                f"The picture is {_describe(values)}, of which {odd} value(s) are NaN or infinite: expected finite ones."
            )
    return values


def check_form(values: Any) -> NDArray[Any]:
    """The same, without a look at the values themselves."""
    if (
        not isinstance(values, np.ndarray)
        or values.ndim not in (2, 3)
        or values.size == 0
        or values.dtype.kind not in "uif"
    ):
        raise ImageError(
            f"The picture is {_describe(values)}, expected an RGB array: uint8 (H,W,3) with values from 0 to 255; or "
            "integers or floats (H,W) or (H,W,C)."
        )
    return np.asarray(values, values.dtype.newbyteorder("="))


def fit_channels(values: NDArray[Any], channels: int) -> NDArray[Any]:
    """Values for a network of so many channels: (H,W) to be given to each of them, or (H,W,channels).

    One channel is repeated for a network of three, and RGB of 8 or 16 bits becomes its luminance for a network of one.
    Raises `ImageError` for any other number of channels than the network's.
    """
    found = 1 if values.ndim == 2 else values.shape[2]
    if found == 1 and channels in (1, 3):
        return values.reshape(values.shape[:2])
    if found == channels:
        return values
    if (found, channels) == (3, 1) and values.dtype.name in FULL:
        luminance = (values.astype(np.int64) @ np.array(LUMINANCE) + 32768) >> 16
        return luminance.astype(values.dtype)
    takes = "one channel" if channels == 1 else f"{channels} channels"
    forms = {1: "an RGB array of 8 or 16 bits, or one channel (H,W)", 3: "an RGB array, one channel (H,W), or (H,W,3)"}
    raise ImageError(
        f"The picture is {_describe(values)}, with {found} channel(s), and the network takes {takes}: "
        f"expected {forms.get(channels, f'an array (H,W,{channels})')}."
    )


def scale(values: NDArray[Any]) -> NDArray[np.float32]:
    """Values as float32: those of uint8 and uint16 as shares of their full range, in [0,1], others as they are."""
    floats = values.astype(np.float32)
    floats /= np.float32(FULL.get(values.dtype.name, 1))
    return floats


def _describe(values: Any) -> str:
    return f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else shorten(values)
