"""What `gradcam inspect activations` says of a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from gradcam.errors import printable
from gradcam.records import SCHEMA

NAMED = 5  # channels of each layer


@dataclass(frozen=True)
class Row:
    """One layer: how many channels on which grid, how many of them are zero everywhere, and those that are drawn.

    `shown`: number and strength of each, in the order in which they are drawn.
    """

    layer: str
    channels: int
    grid: tuple[int, int]
    dead: int
    shown: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Outcome:
    """What became of one picture: a file with these layers, or an error. `size`: the picture's (height, width)."""

    image: str
    model: str
    device: str = ""
    size: tuple[int, int] = (0, 0)
    file: str | None = None
    rows: Sequence[Row] = ()
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON; a strength that is no finite number is null."""
        record = {
            "schema": SCHEMA,
            "image": self.image,
            "status": "ok" if self.error is None else "failed",
            "error": self.error,
            "model": self.model,
            "file": self.file,
            "layers": [_to_entry(row) for row in self.rows],
        }
        return json.dumps(record, allow_nan=False)

    def format(self) -> str:
        """Several lines: what it is, what each layer gives, and the file."""
        height, width = self.size
        name = click.style(printable(self.image.replace("\\", "/").rpartition("/")[2]), bold=True)
        title = [name, f"{width} x {height}", f"{self.model} on {self.device}", f"{self.seconds:.1f} s"]
        cells = [_to_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  " + "   ".join(f"{it:<{width}}" for it, width in zip(each, widths)).rstrip() for each in cells]
        file = f"  →  {click.style(printable(self.file or ''), fg='green')}"
        return "\n".join(["   ".join(title), "", *lines, file, ""])


def _to_entry(row: Row) -> dict[str, Any]:
    shown = [{"channel": it, "strength": value if math.isfinite(value) else None} for it, value in row.shown]
    return {"layer": row.layer, "channels": row.channels, "grid": row.grid, "dead": row.dead, "shown": shown}


def _to_cells(row: Row) -> tuple[str, str, str]:
    height, width = row.grid
    shape = f"{row.channels} channel{'' if row.channels == 1 else 's'} of {height} x {width}"
    dead = f", {row.dead} dead" if row.dead else ""
    first = ", ".join(str(channel) for channel, _ in row.shown[:NAMED])
    return (
        printable(row.layer),
        shape + dead,
        f"{len(row.shown)} drawn: {first}{', ...' if len(row.shown) > NAMED else ''}",
    )
