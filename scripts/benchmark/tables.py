"""Tables of figures, as Markdown."""

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
    """A Markdown table with its notes, and `raw`, the numbers that it was made from; `key`: its mark in the pages."""

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
    """Median and quartiles."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def format_ratios(seconds: dict[str, list[float]], among: Sequence[str] = tuple(CONTENDERS)) -> list[str]:
    """A cell for each of these contenders: milliseconds of the bare pass, multiples of it for the others, round by round."""
    cells = [f"{1000 * float(np.median(seconds[BARE])):.0f} ms"]
    for name in among[1:]:
        ratios = [own / bare for own, bare in zip(seconds.get(name, []), seconds[BARE])]
        cells.append(format_spread(ratios) if ratios else "not measured")
    return cells


def describe_contenders(settings: Settings) -> list[str]:
    return [f"{name} gives {CONTENDERS[name].gives}." for name in settings.present]


def correlate(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten().float(), other.flatten().float()]))[0, 1])
