"""Validate the user's changes to a model's preprocessing, and apply them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradcam.errors import ModelError, shorten
from gradcam.models.preprocess import Preprocess, Preprocessing
from gradcam.models.providers.base import Parts
from gradcam.options import argument_error

MAX_SIDE_PIXELS = 8192  # networks take far smaller images; larger images may not fit in memory


@dataclass(frozen=True)
class Adjustment:
    """The user's changes to a model's preprocessing; None means no change.

    `mean` and `std` have one value per channel. Before normalisation, 8-bit and 16-bit images are scaled to [0,1].
    `size` is the side of the centre crop, or the (height, width) to which the full image is resized. `crop` is the side
    of the centre crop divided by the side of the resized image.
    """

    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    size: int | tuple[int, int] | None
    crop: float | None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


UNADJUSTED = Adjustment(None, None, None, None)


def to_adjustment(mean: Any, std: Any, size: Any, crop: Any) -> Adjustment:
    """Validate the user's changes, and return an `Adjustment`; raise `ModelError` for an invalid value."""
    if crop is not None and not (_is_number(crop) and 0 < crop <= 1):
        expected = "the share of the resized image's shorter side to keep, above 0 and up to 1."
        raise argument_error(crop, "crop", expected, ModelError)
    means, stds = _to_values("mean", mean), _to_values("std", std)
    if stds is not None and min(stds) <= 0:
        raise argument_error(std, "std", "values above 0.", ModelError)
    return Adjustment(means, stds, _to_size(size), None if crop is None else float(crop))


def adjust(parts: Parts, adjustment: Adjustment) -> tuple[Preprocess, Sequence[str]]:
    """Apply the user's changes; return the preprocessing, and notes on assumptions and suspicious values."""
    preprocess = getattr(parts.preprocess, "plain", None) or parts.preprocess
    is_assumed = parts.is_assumed and isinstance(preprocess, Preprocessing)
    notes = _describe_assumptions(preprocess, adjustment) if is_assumed else []
    # 8-bit and 16-bit images are scaled to [0,1], so a mean or std above 1 is probably wrong. Floats are not scaled.
    large_values = " and ".join(name for name in ("mean", "std") if max(getattr(adjustment, name) or (0,)) > 1)
    if large_values:
        problem = f"There are values above 1 in {large_values}, but 8-bit and 16-bit images are scaled to [0,1]"
        notes.append(f"{problem}. For such images, divide {large_values} by 255.")
    if not adjustment:
        return parts.preprocess, notes
    if not isinstance(preprocess, Preprocessing):
        raise ModelError("This model has custom preprocessing. Leave out size, crop, mean and std.")
    mean, std = adjustment.mean or preprocess.mean, adjustment.std or preprocess.std
    if len(mean) != len(std):
        counts = f"mean has {len(mean)} value(s) and std has {len(std)}"
        raise ModelError(f"{counts}: give both, with one value per channel.")
    size, resize = _find_sizes(preprocess, adjustment)
    return replace(preprocess, mean=mean, std=std, size=size, resize=resize), notes


def _find_sizes(preprocess: Preprocessing, adjustment: Adjustment) -> tuple[tuple[int, int], int | tuple[int, int]]:
    """Return the network's input size, and the resized image's size before the crop, rounded down as in timm."""
    if adjustment.size is None and adjustment.crop is None:
        return preprocess.size, preprocess.resize
    is_squeezed = isinstance(adjustment.size, tuple) or isinstance(preprocess.resize, tuple)
    size = preprocess.size if adjustment.size is None else _to_pair(adjustment.size)
    if adjustment.crop is not None:
        factors = [1 / adjustment.crop] * 2
    elif isinstance(adjustment.size, tuple):
        factors = [1.0, 1.0]
    else:
        factors = [resized / side for resized, side in zip(_to_pair(preprocess.resize), preprocess.size)]
    height, width = (max(1, math.floor(side * factor + 1e-9)) for side, factor in zip(size, factors))
    return size, (height, width) if is_squeezed else min(height, width)


def _to_pair(sides: int | tuple[int, int]) -> tuple[int, int]:
    return sides if isinstance(sides, tuple) else (sides, sides)


def _describe_assumptions(preprocess: Any, adjustment: Adjustment) -> list[str]:
    statistics = " and ".join(name for name in ("mean", "std") if getattr(adjustment, name) is None)
    assumptions = {
        "greyscale images": len(preprocess.mean) == 1,
        f"a size of {preprocess.size[0]}": adjustment.size is None,
        "a crop of 0.875": adjustment.crop is None and not isinstance(adjustment.size, tuple),
        f"ImageNet's {statistics}": bool(statistics),
    }
    assumed = ", ".join(assumption for assumption, is_assumed in assumptions.items() if is_assumed)
    hint = "Override with --size, --crop, --mean, --std (size=, ... in Python)."
    return [f"Assumed {assumed}. {hint}"] if assumed else []


def _to_values(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        values = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ModelError(f"{name} is {shorten(value)}, expected one number per channel.")
    return tuple(values.tolist())


def _to_size(size: Any) -> int | tuple[int, int] | None:
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if len(sides) not in (1, 2) or not all(_is_number(side) and side == int(side) >= 1 for side in sides):
        raise ModelError(f"size is {shorten(size)}, expected a number of pixels, or (height, width).")
    if max(sides) > MAX_SIDE_PIXELS:
        raise ModelError(f"size is {shorten(size)}, expected at most {MAX_SIDE_PIXELS} pixels.")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
