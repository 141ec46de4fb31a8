"""Values of any depth as pictures to look at."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FULL = {"uint8": 255, "uint16": 65535}  # integers with a scale of their own; 32 bits and signed ones have none


def to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Values (H,W), or of three channels, as RGB uint8 (H,W,3): by the range of their kind, not of the picture.

    Of floats that is the least of 0 to 1, 255 and 65535 that holds them. What is NaN, or below zero, is black.
    """
    if values.dtype != np.uint8:
        largest = _find_largest(values)
        values = _stretch(np.nan_to_num(values, posinf=largest, neginf=0), 0, _find_full(values))
    return np.repeat(values[..., None], 3, axis=2) if values.ndim == 2 else values


def show(values: NDArray[Any]) -> tuple[NDArray[np.uint8], str | None]:
    """Values (H,W) or (H,W,C) as a picture, RGB uint8 (H,W,3), and a note where it is not shown as `to_8_bits` does.

    Where they use less than half of their kind's range, or less than zero, they are shown from the least to the largest.
    """
    # Not from one percentile to another, as many viewers do: the few brightest pixels may be what the model looked at.
    seen, note = _choose_channels(values)
    if seen.dtype == np.uint8:
        return to_8_bits(seen), note
    finite = seen[np.isfinite(seen)]
    if finite.size == 0:
        return to_8_bits(seen), note
    low, high, full = finite.min().item(), finite.max().item(), _find_full(seen)
    if low == high or (low >= 0 and high - low >= full / 2):
        return to_8_bits(seen), note
    of = f" of {full}" if seen.dtype.name in FULL else ""
    notes = [*([note] if note else []), f"shown from {low:.6g} to {high:.6g}{of}"]
    return to_8_bits(_stretch(np.nan_to_num(seen, nan=low, posinf=high, neginf=low), low, high)), "; ".join(notes)


def _find_largest(values: NDArray[Any]) -> float:
    """The largest of the values that are finite, zero at least."""
    return float(values.max(where=np.isfinite(values), initial=0))


def _find_full(values: NDArray[Any]) -> float:
    """What is white."""
    largest = _find_largest(values)
    ranges = (1, 255, 65535) if values.dtype.kind == "f" else (65535,)
    return next((full for full in ranges if largest <= full), largest)


def _stretch(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    """From `low` to `high` as from 0 to 255."""
    shares = (values.astype(np.float64) - low) / (high - low)
    return np.round(255 * np.clip(shares, 0, 1)).astype(np.uint8)


def _choose_channels(values: NDArray[Any]) -> tuple[NDArray[Any], str | None]:
    """One channel or three of them, and a note where there are more."""
    channels = 1 if values.ndim == 2 else values.shape[2]
    if values.ndim == 2 or channels == 3:
        return values, None
    if channels < 3:
        return values[..., 0], None if channels == 1 else "shown is channel 1 of 2"
    return values[..., :3], f"shown are channels 1 to 3 of {channels}"
