"""Define the parts of an image that can be explained: the centre crop, the whole image, or tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradcam.errors import join_names
from gradcam.options import FIT_KINDS, MAX_MAGNITUDE, argument_error


@dataclass(frozen=True)
class Fit:
    """The part of an image to explain. `kind` is one of `FIT_KINDS`.

    For tiles, `side` is the side of a tile in image pixels. If `side` is None, a tile has the size of the network's
    input.
    """

    kind: str
    side: int | None = None

    def __str__(self) -> str:
        return self.kind if self.side is None else f"{self.kind}:{self.side}"


def parse_fit(value: Any) -> Fit:
    """Parse "crop", "whole", "tiles" or "tiles:512". Raises `GradcamError` for anything else."""
    kind, _, side = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_valid_side = not side or (kind == "tiles" and side.isdecimal() and 1 <= int(side) <= MAX_MAGNITUDE)
    if kind not in FIT_KINDS or not is_valid_side:
        raise argument_error(value, "fit", f"{join_names(FIT_KINDS)}, or 'tiles:512' for tiles of 512 image pixels.")
    return Fit(kind, int(side) if side else None)
