"""A trace as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gradcam.errors import printable

if TYPE_CHECKING:
    from gradcam.inspection.tracing import Call, Trace

LONGEST_TYPE = 20  # characters; names of layers are never shortened, for they are there to be copied
MOST_SHARED = 5  # lines about modules and parameters that have several names
LEFT = ("layer", "type", "input", "output", "dtype")  # the rest are numbers, which end in one column
TO_SPARE = ("input", "share", "memory", "type", "parameters")  # what a narrow terminal goes without, first to last
UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True)
class Heading:
    """The model's name, and what it ran on, in words."""

    name: str
    what: str


def format_trace(trace: Trace, calls: Sequence[Call], heading: Heading, width: int) -> str:
    """Several lines, at most `width` characters each if that can be had: the totals, the calls, what they share."""
    whole = trace.calls[0]
    name = click.style(printable(heading.name), bold=True)
    shape = " x ".join(map(str, whole.inputs[0]))
    times = [] if trace.seconds is None else [f"{1000 * trace.seconds:.1f} ms"]
    cost = "unknown" if trace.multiply_adds is None else human(trace.multiply_adds).rstrip()
    totals = [f"{trace.parameters:,} parameters", f"{cost} multiply-adds"]
    totals += [f"{human(trace.activation_bytes)}B of activations", *times]
    rows = [call for call in calls if call.depth] or list(calls)
    table, spared = _table(trace, rows, width)
    lines = [
        "   ".join([f"{name} on {trace.device}", shape, printable(heading.what)]),
        "   ".join(totals),
        "",
        *table,
        "",
    ]
    lines += _shared(rows)
    inner = len(trace.calls) - 1
    if len(rows) < inner:
        lines.append(f"{len(rows)} of {inner} calls; more with --depth N, --all or --layer PATTERN.")
    if spared:
        lines.append(f"Too narrow for {', '.join(spared)}: widen the terminal, or see --json.")
    return "\n".join(lines).rstrip("\n")


def human(number: int) -> str:
    """Three digits and a unit: 118 M; what follows may be "B"."""
    for size, unit in UNITS:
        if number >= size * 0.9995:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{number} "


def _table(trace: Trace, calls: Sequence[Call], width: int) -> tuple[list[str], list[str]]:
    """The lines, and the columns that there was no room for."""
    columns = _columns(trace, calls)
    spared = []
    for title in TO_SPARE:
        if sum(_width(title, cells) + 2 for title, cells in columns.items()) <= width:
            break
        if columns.pop(title, None) is not None:
            spared.append(title)
    aligned = [_align(title, cells) for title, cells in columns.items()]
    lines = ["  ".join(["", *cells]).rstrip() for cells in zip(*aligned)]
    return lines, spared


def _columns(trace: Trace, calls: Sequence[Call]) -> dict[str, list[str]]:
    """The cells by title, without columns that would say the same, or nothing, in each line."""
    usual = Counter(dtype for call in trace.calls for dtype in call.dtypes).most_common(1)
    columns = {
        "layer": [printable(call.name) or "(the model)" for call in calls],
        "run": [f"{call.run} of {call.runs}" if call.runs > 1 else "" for call in calls],
        "type": [
            call.type if len(call.type) <= LONGEST_TYPE else call.type[: LONGEST_TYPE - 1] + "…" for call in calls
        ],
        "input": [_shapes(call.inputs) for call in calls],
        "output": [_shapes(call.outputs) for call in calls],
        "dtype": [_unusual(call, usual[0][0] if usual else "") for call in calls],
        "parameters": [_number(call.parameters) for call in calls],
        "mult-adds": [_number(call.multiply_adds) for call in calls],
        "memory": [_number(call.activation_bytes, "B") for call in calls],
        "ms": [_milliseconds(call.seconds) for call in calls],
        "share": [_share(call.seconds, trace.seconds) for call in calls],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    """The first tensor's, for one picture without its axis, and how many more there are."""
    if not shapes:
        return "-"
    first = shapes[0][1:] if tuple(shapes[0][:1]) == (1,) else shapes[0]
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return (" x ".join(map(str, first)) or "1") + more


def _unusual(call: Call, usual: str) -> str:
    return ", ".join(dict.fromkeys(dtype for dtype in call.dtypes if dtype != usual))


def _number(number: int | None, unit: str = "") -> str:
    if number is None:
        return "?"
    return f"{human(number)}{unit}".rstrip() if number else "-"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 1 else 0}f}"


def _share(seconds: float | None, whole: float | None) -> str:
    return f"{100 * seconds / whole:.0f} %" if seconds is not None and whole else ""


def _width(title: str, cells: Sequence[str]) -> int:
    return max(len(title), *map(len, cells))


def _align(title: str, cells: Sequence[str]) -> list[str]:
    width = _width(title, cells)
    return [f"{cell:<{width}}" if title in LEFT else f"{cell:>{width}}" for cell in (title, *cells)]


def _shared(calls: Sequence[Call]) -> list[str]:
    """What has several names."""
    first_runs = [call for call in calls if call.run == 1]
    lines = [f"{call.name} is the same module as {', '.join(call.also)}." for call in first_runs if call.also]
    lines += [f"{call.name} has a parameter in common: {', '.join(call.tied)}." for call in first_runs if call.tied]
    more = [f"{len(lines) - MOST_SHARED} more are shared; see --json."] if len(lines) > MOST_SHARED else []
    return [*lines[:MOST_SHARED], *more]
