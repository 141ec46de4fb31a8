"""Values of any depth as pictures to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

FULL = {"uint8": 255, "uint16": 65535}  # integers with a scale of their own; 32 bits and signed ones have none


STRIP = 2**18  # pixels that are worked on at once, so that what is computed of them takes no memory to speak of


def in_strips(height: int, width: int) -> Iterator[slice]:
    """The rows of a picture, a strip after another."""
    rows = max(1, STRIP // width)
    return (slice(top, top + rows) for top in range(0, height, rows))


def to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Values (H,W), or of three channels, as RGB uint8 (H,W,3): by the range of their kind, not of the picture.

    Of floats that is the least of 0 to 1, 255 and 65535 that holds them. What is NaN, or below zero, is black.
    """
    if values.dtype != np.uint8:
        values = _stretch(values, 0, _find_full(values), _find_largest(values))
    return np.repeat(values[..., None], 3, axis=2) if values.ndim == 2 else values


def show(values: NDArray[Any]) -> tuple[NDArray[np.uint8], str | None]:
    """Values (H,W) or (H,W,C) as a picture, RGB uint8 (H,W,3), and a note where it is not shown as `to_8_bits` does.

    Where they use less than half of their kind's range, or less than zero, they are shown from the least to the largest.
    """
    # Not from one percentile to another, as many viewers do: the few brightest pixels may be what the model looked at.
    seen, note = _choose_channels(values)
    if seen.dtype == np.uint8:
        return to_8_bits(seen), note
    is_finite = _is_finite(seen)
    if not np.any(is_finite):
        return to_8_bits(seen), note
    low, high = (seen.min(where=is_finite, initial=_end(seen, 1)), seen.max(where=is_finite, initial=_end(seen, -1)))
    low, high, full = low.item(), high.item(), _find_full(seen)
    if low == high or (low >= 0 and high - low >= full / 2):
        return to_8_bits(seen), note
    of = f" of {full}" if seen.dtype.name in FULL else ""
    notes = [*([note] if note else []), f"shown from {low:.6g} to {high:.6g}{of}"]
    return to_8_bits(_stretch(seen, low, high, high)), "; ".join(notes)


def _is_finite(values: NDArray[Any]) -> Any:
    """True where they are; of integers, once for all."""
    return np.isfinite(values) if values.dtype.kind == "f" else np.True_


def _end(values: NDArray[Any], sign: int) -> float | int:
    """The end of their kind's range."""
    if values.dtype.kind == "f":
        return sign * math.inf
    return int(np.iinfo(values.dtype).max if sign > 0 else np.iinfo(values.dtype).min)


def _find_largest(values: NDArray[Any]) -> float:
    """The largest of the values that are finite, zero at least."""
    return float(values.max(where=_is_finite(values), initial=0))


def _find_full(values: NDArray[Any]) -> float:
    """What is white."""
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


def _choose_channels(values: NDArray[Any]) -> tuple[NDArray[Any], str | None]:
    """One channel or three of them, and a note where there are more."""
    channels = 1 if values.ndim == 2 else values.shape[2]
    if values.ndim == 2 or channels == 3:
        return values, None
    if channels < 3:
        return values[..., 0], None if channels == 1 else "shown is channel 1 of 2"
    return values[..., :3], f"shown are channels 1 to 3 of {channels}"
