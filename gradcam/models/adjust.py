"""What a person says of a model's preprocessing, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradcam.errors import ModelError, shorten
from gradcam.models.preprocess import Preprocess, Preprocessing
from gradcam.models.providers.base import Parts

LARGEST = 8192  # pixels of a side: what networks take is far smaller, and memory for more may not be there


@dataclass(frozen=True)
class Adjustment:
    """What a person said of the preprocessing, None for what was not said. `mean`, `std`: one for each channel, of
    values in [0,1] for pictures of 8 and 16 bits. `size`: of the shorter side, of which the centre is taken, or
    (height, width) to which the whole picture is resized. `crop`: the share of the resized sides that is kept."""

    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    size: int | tuple[int, int] | None
    crop: float | None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


UNADJUSTED = Adjustment(None, None, None, None)


def to_adjustment(mean: Any, std: Any, size: Any, crop: Any) -> Adjustment:
    """The same, checked. Raises `ModelError` for what is not a number, or not one that there can be."""
    if crop is not None and not (_is_number(crop) and 0 < crop <= 1):
        what = "the fraction of the resized image to keep, above 0 and up to 1"
        raise ModelError(f"crop is {shorten(crop)}, expected {what}.")
    means, stds = _to_values("mean", mean), _to_values("std", std)
    if stds is not None and min(stds) <= 0:
        raise ModelError(f"std is {shorten(std)}, expected values above 0.")
    return Adjustment(means, stds, _to_size(size), None if crop is None else float(crop))


def adjust(parts: Parts, wish: Adjustment) -> tuple[Preprocess, Sequence[str]]:
    """The preprocessing as it is wished, and a note on what is assumed."""
    plain = getattr(parts.preprocess, "plain", None) or parts.preprocess
    notes = _say_what_is_assumed(plain, wish) if parts.is_assumed and isinstance(plain, Preprocessing) else []
    # Means of another scale than pictures of 8 and 16 bits have are right for other files, DICOM's say.
    large = " and ".join(name for name in ("mean", "std") if max(getattr(wish, name) or (0,)) > 1)
    if large:
        notes.append(
            f"Values above 1 in {large}: 8-bit and 16-bit images are scaled to [0,1]. For them, divide {large} by 255."
        )
    if not wish:
        return parts.preprocess, notes
    if not isinstance(plain, Preprocessing):
        raise ModelError("This model has custom preprocessing. Leave out size, crop, mean and std.")
    mean, std = wish.mean or plain.mean, wish.std or plain.std
    if len(mean) != len(std):
        counts = f"mean has {len(mean)} value(s) and std has {len(std)}"
        raise ModelError(f"{counts}: give both, with one value per channel.")
    size, resize = _find_sizes(plain, wish)
    return replace(plain, mean=mean, std=std, size=size, resize=resize), notes


def _find_sizes(plain: Preprocessing, wish: Adjustment) -> tuple[tuple[int, int], int | tuple[int, int]]:
    """What the network takes, and what pictures are resized to before; sides are rounded as timm does."""
    if wish.size is None and wish.crop is None:
        return plain.size, plain.resize
    is_squeezed = isinstance(wish.size, tuple) or isinstance(plain.resize, tuple)
    before = plain.resize if isinstance(plain.resize, tuple) else (plain.resize, plain.resize)
    size = plain.size if wish.size is None else wish.size if isinstance(wish.size, tuple) else (wish.size, wish.size)
    if wish.crop is not None:
        shares = [1 / wish.crop] * 2
    else:
        shares = [1.0, 1.0] if isinstance(wish.size, tuple) else [big / side for big, side in zip(before, plain.size)]
    height, width = (max(1, math.floor(side * share + 1e-9)) for side, share in zip(size, shares))
    return size, (height, width) if is_squeezed else min(height, width)


def _say_what_is_assumed(plain: Preprocessing, wish: Adjustment) -> list[str]:
    statistics = " and ".join(name for name in ("mean", "std") if getattr(wish, name) is None)
    possible = {
        "greyscale images": len(plain.mean) == 1,
        f"a size of {plain.size[0]}": wish.size is None,
        "a crop of 0.875": wish.crop is None and not isinstance(wish.size, tuple),
        f"ImageNet's {statistics}": bool(statistics),
    }
    assumed = ", ".join(what for what, is_assumed in possible.items() if is_assumed)
    hint = "Override with --size, --crop, --mean, --std (size=, ... in Python)."
    return [f"Assumed {assumed}. {hint}"] if assumed else []


def _to_values(name: str, given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        values = np.atleast_1d(np.asarray(given, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ModelError(f"{name} is {shorten(given)}, expected one number per channel.")
    return tuple(values.tolist())


def _to_size(given: Any) -> int | tuple[int, int] | None:
    if given is None:
        return None
    sides = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(sides) not in (1, 2) or not all(_is_number(side) and side == int(side) >= 1 for side in sides):
        raise ModelError(f"size is {shorten(given)}, expected a number of pixels, or (height, width).")
    if max(sides) > LARGEST:
        raise ModelError(f"size is {shorten(given)}, expected at most {LARGEST} pixels.")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
