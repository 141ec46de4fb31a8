"""What `gradcam recommend` says at its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gradcam.cli.progress import count
from gradcam.cli.settings import ModelChoice, to_word
from gradcam.cli.terminal import to_command
from gradcam.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.intervals import Interval
    from gradcam.evaluation.recommendation.outcome import Recommendation, Row

TITLES = ("method", "score", "layer", "mass ↑", "maximum ↑", "ROAD ↑", "mass, to the most")
MOST_ROWS = 16


@dataclass(frozen=True)
class Outcome:
    """What was found, of which model, and in how many of the pictures."""

    found: Recommendation
    choice: ModelChoice
    reshape: str | tuple[int, ...] | None
    device: str
    given: int
    taken: int
    failed: int
    seconds: float

    def to_json(self) -> str:
        """One line of JSON."""
        numbers = {"given": self.given, "taken": self.taken, "failed": self.failed}
        command = self._command()
        return json.dumps({"schema": SCHEMA, **self.found.to_dict(), **numbers, "command": command})

    def format(self, *, show_all: bool) -> str:
        """Several lines: what was measured, the table, which combination is the best, and what to type."""
        found = self.found
        height, width = found.size
        title = [
            f"{click.style(found.model, bold=True)} on {self.device}",
            self._pictures(),
            f"{count(found.mosaics, 'mosaic')} of {width} x {height}",
            f"seed {found.seed}",
            f"{self.seconds:.1f} s",
        ]
        rows = found.rows if show_all else self._first_rows()
        lines = ["   ".join(title), "", *_table(rows, found), ""]
        if len(rows) < len(found.rows):
            lines.append(f"{len(rows)} of {len(found.rows)} combinations; --all shows the others.")
        lines += [f"{it} has no map: {reason}" for it, reason in found.left_out.items()]
        return "\n".join([*lines, self._sentence(), "", f"  {self._command()}"])

    def _pictures(self) -> str:
        """How many took part, and what became of the others."""
        taken = len(self.found.pictures)
        left = {
            "not drawn": self.given - self.taken,
            click.style("failed", fg="red"): self.failed,
            "not in a mosaic": self.taken - self.failed - taken,
        }
        return ", ".join(
            [f"{taken} of {count(self.given, 'picture')}", *(f"{it} {why}" for why, it in left.items() if it)]
        )

    def _first_rows(self) -> list[Row]:
        """The first ones, and the default in any case."""
        rows = self.found.rows
        return [row for place, row in enumerate(rows) if place < MOST_ROWS or row is self.found.default]

    def _sentence(self) -> str:
        """The best one, and whether it is better than what is taken anyway."""
        from gradcam.evaluation.intervals import count_needed

        found = self.found
        if not found.best.mass.is_known:
            return (
                f"{len(found.pictures)} pictures are too few to recommend anything but the default: that takes "
                f"{count_needed()}. {found.best.combination} has the best ROAD of these."
            )
        best = f"{found.best.combination} is the best here"
        if found.is_default:
            return f"{best}: it is what is taken where nothing is said."
        if found.default is None or found.gain is None or found.road_gain is None:
            return f"{best}."
        return (
            f"{best}: against the default, {found.default.combination}, its mass is {_compare(found.gain)}, and its ROAD "
            f"{_compare(found.road_gain)}."
        )

    def _command(self) -> str:
        """The line that explains a picture with the best combination; of too few pictures, with the default."""
        best = self.found.best
        combination = (best if best.mass.is_known else self.found.default or best).combination
        words = ["gradcam", "run", "photo.jpg", *self.choice.to_words()]
        if self.reshape is not None:
            words += ["--reshape", to_word(self.reshape)]
        words += ["--method", combination.method]
        if combination.score not in (None, "logit"):
            words += ["--score", str(combination.score)]
        return to_command([*words, "--layer", combination.layer])


def _table(rows: list[Row] | tuple[Row, ...], found: Recommendation) -> list[str]:
    cells = [TITLES, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in cells]
    return [f"  {lines[0]}", *(_mark(row, line, found) for row, line in zip(rows, lines[1:]))]


def _mark(row: Row, line: str, found: Recommendation) -> str:
    if row is found.best:
        return click.style(f"→ {line}", fg="green", bold=True)
    return f"* {line}" if row is found.default else f"  {line}"


def _cells(row: Row) -> tuple[str, ...]:
    combination = row.combination
    road = "-" if row.road is None else _write(row.road)
    behind = "the most" if row.behind.mean == 0 else _write(row.behind)
    clear = " clear" if row.is_clearly_less else ""
    score = combination.score or "-"
    return (
        *(combination.method, score, combination.layer),
        *(_write(row.mass), f"{row.maximum.mean:.2f}", road, f"{behind}{clear}"),
    )


def _write(interval: Interval) -> str:
    return _number(interval.mean) + (
        f" [{_number(interval.low)}, {_number(interval.high)}]" if interval.is_known else ""
    )


def _number(value: float) -> str:
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def _compare(difference: Interval) -> str:
    if not difference.excludes(0):
        return f"not clearly another ({difference.mean:+.3f}, between {difference.low:+.3f} and {difference.high:+.3f})"
    word = "higher" if difference.mean > 0 else "lower"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{word} by {abs(difference.mean):.3f} (between {low:.3f} and {high:.3f})"
