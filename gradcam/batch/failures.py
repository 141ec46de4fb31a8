"""How many pictures may fail before a run stops."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gradcam.errors import GradcamError


class TooManyFailuresError(GradcamError):
    """More pictures failed than was allowed."""


@dataclass(frozen=True)
class FailureLimit:
    """At most `most` pictures may fail; with `is_share`, at most so many in a hundred of all that the run is about."""

    most: float
    is_share: bool = False

    def count(self, pictures: int) -> int:
        """How many of so many pictures may fail."""
        return math.floor(self.most * pictures / 100) if self.is_share else int(self.most)

    def __str__(self) -> str:
        return f"{self.most:g}%" if self.is_share else f"{self.most:g}"


def parse_limit(text: str) -> FailureLimit:
    """A limit from "10", so many pictures, or "2.5%" of them. Raises `GradcamError` for anything else."""
    found = re.fullmatch(r"(\d{1,12})|(\d{1,3}(?:\.\d+)?)\s*%", text.strip(), re.ASCII)
    if found is None or (found[2] is not None and float(found[2]) > 100):
        raise GradcamError(f"{text!r} is neither a number of pictures, such as 10, nor a share of them, such as 5%.")
    return FailureLimit(float(found[1])) if found[1] else FailureLimit(float(found[2]), is_share=True)
