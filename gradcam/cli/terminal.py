"""What the terminal says of a picture."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import click

from gradcam.errors import CONTROLS, printable
from gradcam.records import Explained, Prediction, Record

BAR = 24  # characters for 100 %
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Result:
    """A record, and what else is worth saying: the maps' sizes, and the time in seconds."""

    record: Record
    grids: Sequence[tuple[int, ...]] = ()
    device: str = ""
    seconds: float = 0.0

    @property
    def error(self) -> str | None:
        """The record's."""
        return self.record.error

    def to_json(self) -> str:
        """The record's."""
        return self.record.to_json()

    def format(self) -> str:
        """Several lines, as `format_result` has them."""
        return format_result(self)


def format_result(result: Result) -> str:
    """Several lines: what it is, what the model saw in it, what was explained, how much of it was seen, and its note."""
    record = result.record
    height, width = record.size or (0, 0)
    title = click.style(printable(record.image.replace("\\", "/").rpartition("/")[2]), bold=True)
    parts = [title, f"{width} x {height}", f"{printable(record.model)} on {result.device}", f"{result.seconds:.1f} s"]
    lines = ["   ".join(parts), "", *_predictions(record.predictions), "", *_explained(result), "", _seen(record)]
    if record.note is not None:
        lines.append(f"  {printable(record.note[:1].upper() + record.note[1:])}.")
    lines.append("")
    return "\n".join(lines)


def _predictions(predictions: Sequence[Prediction]) -> list[str]:
    width = max(len(_name(prediction)) for prediction in predictions)
    digits = max(len(str(prediction.index)) for prediction in predictions)
    if not all(0 <= prediction.probability <= 1 for prediction in predictions):
        return _plain_numbers(predictions, width, digits)
    return [
        f"  {_name(prediction):<{width}}   {prediction.index:>{digits}}   {_percent(prediction.probability):>5}   "
        + click.style(_bar(prediction.probability), fg="cyan")
        for prediction in predictions
    ]


def _plain_numbers(predictions: Sequence[Prediction], width: int, digits: int) -> list[str]:
    """Outputs that are no probabilities, such as logits: neither a percentage nor a bar would be true."""
    values = [f"{prediction.probability:.4g}" for prediction in predictions]
    longest = max(5, *map(len, values))
    return [
        f"  {_name(prediction):<{width}}   {prediction.index:>{digits}}   {value:>{longest}}"
        for prediction, value in zip(predictions, values)
    ]


def _explained(result: Result) -> list[str]:
    explained = result.record.explained
    if len(explained) > 1 and len({_file(entry) for entry in explained}) == 1:
        return _together(result)
    width = max(len(_name(entry)) for entry in explained)
    several_methods = len({entry.method for entry in explained}) > 1
    places = [
        f"{f'{entry.method} at ' if several_methods else 'at '}{printable(entry.layer)} ({' x '.join(map(str, grid))})"
        for entry, grid in zip(explained, result.grids)
    ]
    longest = max(map(len, places))
    return [
        _explained_line(entry, f"  {_name(entry):<{width}} {place:<{longest}}")
        for entry, place in zip(explained, places)
    ]


def _together(result: Result) -> list[str]:
    """What is all on one picture."""
    explained = result.record.explained
    places = dict.fromkeys(
        f"{printable(entry.layer)} ({' x '.join(map(str, grid))})" for entry, grid in zip(explained, result.grids)
    )
    names = dict.fromkeys(_name(entry) for entry in explained)
    methods = dict.fromkeys(entry.method for entry in explained)
    blank = [entry for entry in explained if entry.blank]
    lines = [f"  {', '.join(names)} at {', '.join(places)}", f"  by {', '.join(methods)}"]
    if blank:
        lines.append(
            click.style(f"  no {_kind(blank[0])} evidence in {len(blank)} of {len(explained)} maps", fg="yellow")
        )
    return [*lines, f"  →  {click.style(_file(explained[0]), fg='green')}"]


def _explained_line(entry: Explained, start: str) -> str:
    if entry.blank:
        return f"{start}  {click.style(f'no {_kind(entry)} evidence', fg='yellow')}  →  {_file(entry)}"
    return f"{start}  →  {click.style(_file(entry), fg='green')}"


def _kind(entry: Explained) -> str:
    return "positive or negative" if entry.evidence == "signed" else entry.evidence


def _name(entry: Prediction | Explained) -> str:
    return f"class {entry.index}" if entry.label is None else printable(entry.label)


def _file(entry: Explained) -> str:
    files = (entry.overlay, entry.heatmap, entry.map, entry.panel)
    return ", ".join(printable(file) for file in files if file is not None)


def to_command(words: Sequence[str]) -> str:
    """The line that a shell takes for these words."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    escaped = printable(word.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{escaped}'"  # as shells but the plainest know it


# Of what is printed, these are ours: ends of lines, colours, and what a bar moves in its own line with.
OURS = r"\n|\r|\t|\x1b\[(?:[0-9;]*m|[AK]|\?25[lh])"
FOREIGN = re.compile(f"({OURS})|({CONTROLS.pattern})")


class SafeStream:
    """A text stream that escapes control characters which nobody here has any use for, whatever they come from."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does."""
        return self._stream.write(FOREIGN.sub(lambda found: found[1] or printable(found[2]), text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "< 1 %"
    return f"{min(share, 0.99 if share < 1 else 1) * 100:.0f} %"


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def _seen(record: Record) -> str:
    height, width = record.size or (0, 0)
    _, _, rows, columns = record.region or (0, 0, height, width)
    share = rows * columns / (height * width)
    if record.fit is not None:
        kind, _, side = record.fit.partition(":")
        how = f" in windows of {side} x {side} pixels" if kind == "tiles" else ""
        return f"  The map is of the whole picture{how}."
    if share == 1:
        return "  The network saw the whole picture."
    seen = f"the central {_percent(share)} of the picture, {columns} x {rows} pixels"
    return f"  The network saw {seen}; for all of it, --fit whole."
