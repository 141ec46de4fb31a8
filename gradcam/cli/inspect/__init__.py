"""`gradcam inspect`: looking inside a network, one file for each command; and what their reports have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from gradcam.cli._commands import Group
from gradcam.errors import printable

LEAST_ONE = click.IntRange(min=1)
MOST_ROWS = 32  # of a table where nobody has said how deep it should go


@click.group(
    "inspect",
    cls=Group,
    short_help="Look inside a network: its calls, features, activations, gradients.",
    places={
        name: f"gradcam.cli.inspect.{name}:{name}_command" for name in ("trace", "features", "activations", "gradients")
    },
)
def inspect_group() -> None:
    """Look inside a network: what its layers give, and what comes back to them."""


@dataclass(frozen=True)
class PictureOutcome:
    """What became of one picture, or an error. `size`: the picture's (height, width). `seconds`: all that it took."""

    image: str
    model: str
    device: str = ""
    size: tuple[int, ...] = (0, 0)
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON, of the same keys whatever became of it; numbers that are NaN or infinite are null."""
        from gradcam.storage.records import SCHEMA

        status = "ok" if self.error is None else "failed"
        start = {"schema": SCHEMA, "image": self.image, "status": status, "error": self.error, "model": self.model}
        return json.dumps(_without_infinities(start | self.to_fields()), allow_nan=False)

    def to_fields(self) -> dict[str, Any]:
        """What the command says of it in JSON."""
        raise NotImplementedError

    def to_title(self) -> str:
        """One line: the picture, its size, and what it was computed on."""
        height, width = self.size
        name = click.style(printable(self.image.replace("\\", "/").rpartition("/")[2]), bold=True)
        return "   ".join([name, f"{width} x {height}", f"{self.model} on {self.device}", f"{self.seconds:.1f} s"])


def cut_type(name: str, longest: int) -> str:
    """A class's name of so many characters at most; names of layers are never cut, for they are there to be copied."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def show_shape(shape: Sequence[int]) -> str:
    """A tensor's sides; for one picture, without the first, which is the picture's."""
    return " x ".join(map(str, shape[1:] if tuple(shape[:1]) == (1,) else shape)) or "1"


def fitting_depth(depths: Sequence[int]) -> int:
    """The greatest depth of which all rows fit on a screen, by how deep each row lies."""
    return max((it for it in set(depths) if sum(depth <= it for depth in depths) <= MOST_ROWS), default=1)


def to_arrow(file: str) -> str:
    """A line that says where a file is."""
    return f"  →  {click.style(printable(file), fg='green')}"


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
