"""Format tables of measurements as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmark.contenders import BARE, CONTENDERS
from benchmark.measuring import Settings


@dataclass(frozen=True)
class Table:
    """A Markdown table with notes. `raw` contains the measurements. `key` is the table's mark in the pages."""

    key: str
    title: str
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)

    def to_markdown(self) -> str:
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(part for part in (f"### {self.title}", self.lines(), notes) if part) + "\n"

    def lines(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows] if self.rows else []
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the quartiles as text."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def format_ratios(seconds: dict[str, list[float]], contenders: Sequence[str] = tuple(CONTENDERS)) -> list[str]:
    """Return the bare pass in milliseconds, then the time of each other contender as a multiple of the bare pass."""
    cells = [f"{1000 * float(np.median(seconds[BARE])):.0f} ms"]
    for name in contenders[1:]:
        ratios = [
            contender_seconds / bare_seconds
            for contender_seconds, bare_seconds in zip(seconds.get(name, []), seconds[BARE])
        ]
        cells.append(format_spread(ratios) if ratios else "not measured")
    return cells


def describe_contenders(settings: Settings) -> list[str]:
    return [f"{name} gives {CONTENDERS[name].output_description}." for name in settings.present]


def correlate(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten().float(), second.flatten().float()]))[0, 1])
