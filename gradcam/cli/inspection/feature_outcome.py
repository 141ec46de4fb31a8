"""What `gradcam inspect features` says at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from gradcam.cli.progress import count
from gradcam.errors import printable
from gradcam.records import SCHEMA


@dataclass(frozen=True)
class Outcome:
    """What became of the pictures; the file is not there where all of them failed.

    `layers`: shape, the pictures' axis first, and dtype by name. `left_out`: files that are no pictures.
    """

    path: Path
    model: str
    device: str
    layers: Mapping[str, tuple[tuple[int, ...], str]]
    pictures: int
    failed: int
    left_out: int
    seconds: float

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "file": str(self.path) if self.pictures else None,
                "model": self.model,
                "pictures": self.pictures,
                "failed": self.failed,
                "layers": {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in self.layers.items()},
            }
        )

    def format(self) -> str:
        """Several lines: how many there were, each layer's shape, and the file."""
        parts = [count(self.pictures, "picture")]
        if self.failed:
            parts.append(click.style(f"{self.failed} failed", fg="red"))
        if self.left_out:
            parts.append(f"{count(self.left_out, 'other file')} left out")
        title = [f"{click.style(self.model, bold=True)} on {self.device}", ", ".join(parts), f"{self.seconds:.1f} s"]
        if not self.pictures:
            return "\n".join(["   ".join(title), "Nothing was written."])
        file = f"  →  {click.style(printable(str(self.path)), fg='green')}"
        return "\n".join(["   ".join(title), "", *self._rows(), file])

    def _rows(self) -> list[str]:
        shapes = {name: " x ".join(map(str, shape)) for name, (shape, _) in self.layers.items()}
        first, second = max(map(len, shapes)), max(map(len, shapes.values()))
        return [f"  {name:<{first}}   {shapes[name]:<{second}}   {dtype}" for name, (_, dtype) in self.layers.items()]
