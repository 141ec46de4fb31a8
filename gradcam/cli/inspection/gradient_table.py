"""The gradients at a network's layers as a table for the terminal, and as a record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli.terminal import EIGHTHS
from gradcam.errors import printable
from gradcam.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.inspection.flow import GradientFlow
    from gradcam.inspection.verdicts import LayerGradients

MOST_ROWS = 40  # of a table where nobody has said which layers
BAR = 12  # characters
LEAST_DECADES = 4  # of a bar on either side of the reference: what differs little looks alike
LONGEST_NAME = 26  # characters, with which a line has 80; of longer ones the end is shown
COLOURS = {"vanishing": "blue", "exploding": "yellow", "no gradient": "magenta", "NaN": "red", "infinite": "red"}
TITLES = ("layer", "output", "", "params", "zeros", "")


@dataclass(frozen=True)
class Outcome:
    """What became of one picture: the class, by its index and its label, and the flow of its gradient; or an error.

    `size`: the picture's (height, width). `plot`: the file that was drawn, None without. `seconds`: all that it took.
    `show_all`: whether people see every layer, or as many as fit on a screen.
    """

    image: str
    model: str
    device: str = ""
    size: tuple[int, ...] = (0, 0)
    index: int = 0
    label: str | None = None
    flow: GradientFlow | None = None
    plot: str | None = None
    seconds: float = 0.0
    show_all: bool = False
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON, of the same keys whatever became of it; numbers that are NaN or infinite are null."""
        flow = self.flow
        record = {
            "schema": SCHEMA,
            "image": self.image,
            "status": "ok" if self.error is None else "failed",
            "error": self.error,
            "model": self.model,
            "index": None if flow is None else self.index,
            "label": self.label,
            "score": None if flow is None else flow.scores.item(),
            "plot": self.plot,
            "reference": None if flow is None else flow.reference,
            "layers": [] if flow is None else [_to_fields(layer) for layer in flow.layers],
        }
        return json.dumps(_without_infinities(record), allow_nan=False)

    def format(self) -> str:
        """Several lines: what it is, the table, what is conspicuous, and where the plot is."""
        if self.flow is None:
            return ""
        flow, (height, width) = self.flow, self.size
        title = click.style(printable(PurePath(self.image).name), bold=True)
        name = f"class {self.index}" if self.label is None else printable(self.label)
        rows = flow.layers if self.show_all else _choose(flow.layers)
        lines = ["   ".join([title, f"{width} x {height}", f"{self.model} on {self.device}", f"{self.seconds:.1f} s"])]
        lines += [
            f"norms of the gradient of {name} ({self.index}), {flow.scores.item():.4g}",
            "",
            *_table(rows, flow),
            "",
        ]
        if len(rows) < len(flow.layers):
            lines.append(f"  {len(rows)} of {len(flow.layers)} layers; more with --all or --layer PATTERN.")
        lines += _summary(flow)
        if self.plot is not None:
            lines.append(f"  →  {click.style(printable(self.plot), fg='green')}")
        return "\n".join([*lines, ""])


def _to_fields(layer: LayerGradients) -> dict[str, Any]:
    found = asdict(layer)
    found["parameters"] = [asdict(it) | {"ratio": it.ratio} for it in layer.parameters]
    return found


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _choose(layers: Sequence[LayerGradients]) -> Sequence[LayerGradients]:
    """As many as fit: both ends, both sides of each change of the verdict, and others at even distances."""
    if len(layers) <= MOST_ROWS:
        return layers
    last = len(layers) - 1
    changes = [place for place in range(last) if layers[place].verdict != layers[place + 1].verdict]
    kept = {0, last, *(place for change in changes for place in (change, change + 1))}
    kept = set(sorted(kept)[-MOST_ROWS:])
    even = range(MOST_ROWS - len(kept))
    kept |= {round((step + 1) * last / (len(even) + 1)) for step in even}
    return [layers[place] for place in sorted(kept)]


def _table(rows: Sequence[LayerGradients], flow: GradientFlow) -> list[str]:
    scale = _scale(flow)
    cells = [TITLES, *(_cells(row, flow.reference, scale) for row in rows)]
    name = max(len(cell[0]) for cell in cells)
    lines = [f"  {it[0]:<{name}}  {it[1]:>7}  {it[2]:<{BAR}}  {it[3]:>7}  {it[4]:>5}  {it[5]}".rstrip() for it in cells]
    coloured = (click.style(line, fg=COLOURS.get(row.verdict or "")) for row, line in zip(rows, lines[1:]))
    return [click.style(lines[0], dim=True), *coloured]


def _cells(row: LayerGradients, reference: float, scale: tuple[float, float]) -> tuple[str, ...]:
    name = printable(row.name or f"({row.type})")
    norms = [it.gradient.norm for it in row.parameters if it.gradient is not None]
    output = row.activations
    return (
        name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :],
        "-" if output is None else f"{output.norm:.1e}",
        "" if output is None or not reference else _bar(output.norm / reference, scale),
        f"{math.hypot(*norms):.1e}" if norms else "-",
        "-" if output is None else f"{math.floor(output.zeros * 100)} %",
        row.verdict or "",
    )


def _scale(flow: GradientFlow) -> tuple[float, float]:
    """The least and the greatest power of ten of a bar, in relation to the reference."""
    norms = [it.activations.norm for it in flow.layers if it.activations is not None]
    shares = [norm / flow.reference for norm in norms if flow.reference and 0 < norm < math.inf]
    logs = [math.log10(share) for share in shares if share > 0]
    return min([-LEAST_DECADES, *logs]), max([LEAST_DECADES, *logs])


def _bar(share: float, scale: tuple[float, float]) -> str:
    low, high = scale
    if math.isnan(share):
        return ""
    reach = 0.0 if share <= 0 else min(1.0, max(0.0, (math.log10(share) - low) / (high - low)))
    whole, eighths = divmod(round(reach * BAR * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def _summary(flow: GradientFlow) -> list[str]:
    """A line for each kind of what is conspicuous: how many layers, and which of them is the nearest to the score."""
    lines = [
        click.style(
            f"  {verdict}: {_list(it.name or it.type for it in flow.layers if it.verdict == verdict)}", fg=colour
        )
        for verdict, colour in COLOURS.items()
        if any(it.verdict == verdict for it in flow.layers)
    ]
    return lines or ["  Nothing vanishes or explodes."]


def _list(names: Iterable[str]) -> str:
    *others, nearest = names
    if not others:
        return f"{nearest} alone"
    return f"{len(others) + 1} layers; nearest to the score {nearest}, furthest {others[0]}"
