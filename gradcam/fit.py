"""The part of an image that is explained: the centre crop, the whole image, or tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradcam.errors import GradcamError, join_names, shorten
from gradcam.options import FIT_KINDS, MAX_MAGNITUDE


@dataclass(frozen=True)
class Fit:
    """One of `FIT_KINDS`. `side`: the side of a tile in image pixels; None for the size of the network's input."""

    kind: str
    side: int | None = None

    def __str__(self) -> str:
        return self.kind if self.side is None else f"{self.kind}:{self.side}"


def parse_fit(value: Any) -> Fit:
    """Parse "crop", "whole", "tiles" or "tiles:512". Raises `GradcamError` for anything else."""
    kind, _, side = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in FIT_KINDS or (
        side and (kind != "tiles" or not side.isdecimal() or not 1 <= int(side) <= MAX_MAGNITUDE)
    ):
        raise GradcamError(
            f"fit is {shorten(value)}, expected {join_names(FIT_KINDS)}, or 'tiles:512' for tiles of 512 image pixels."
        )
    return Fit(kind, int(side) if side else None)


def to_fit_word(text: str) -> str:
    """Return the text of a fit in its normal form. Raises `GradcamError` if the text is not a fit."""
    return str(parse_fit(text))
