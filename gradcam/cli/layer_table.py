"""A model's layers as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from gradcam.cli.terminal import to_command
from gradcam.errors import printable
from gradcam.methods import METHODS

if TYPE_CHECKING:
    from gradcam.classifiers.skeletons import Survey
    from gradcam.listing import LayerRow

TITLES = ("layer", "type", "output", "stride", "parameters", "map")
BOTH_SIGNS = "±"
WIDTH = 80
LONGEST_TYPE = 22  # characters; names of layers are never shortened, for they are there to be copied


def format_layers(survey: Survey, rows: Sequence[LayerRow], words: Sequence[str]) -> str:
    """Several lines: what the model is, its layers, how many more there are, and what to do with the suggestion.

    `words`: what was typed of the model, as options.
    """
    skeleton = survey.skeleton
    size = " x ".join(map(str, (skeleton.channels, *skeleton.size)))
    count = sum(parameter.numel() for parameter in skeleton.model.parameters())
    lines = ["   ".join([click.style(printable(skeleton.name), bold=True), size, f"{count:,} parameters"])]
    if survey.note:
        lines.append(click.style(survey.note, fg="yellow"))
    lines += ["", *_table(rows), ""]
    if any(row.both_signs for row in rows):
        lines += _explain_signs(survey)
    if len(rows) < len(survey.rows):
        lines.append(f"{len(rows)} of {len(survey.rows)} layers; more with --depth N, --all or a PATTERN.")
    if skeleton.channels not in (1, 3):
        lines.append(
            f"Pictures of {skeleton.channels} channels need a --reader, and --mean and --std with a value for each channel."
        )
    return "\n".join([*lines, _use(survey, words)])


def _table(rows: Sequence[LayerRow]) -> list[str]:
    cells = [TITLES, *map(_cells, rows)]
    name, kind, output, stride, parameters, _ = (max(map(len, column)) for column in zip(*cells))
    lines = [
        f"{it[0]:<{name}}  {it[1]:<{kind}}  {it[2]:<{output}}  {it[3]:>{stride}}  {it[4]:>{parameters}}  {it[5]}"
        for it in cells
    ]
    return [f"  {lines[0]}", *(_mark(row, line) for row, line in zip(rows, lines[1:]))]


def _cells(row: LayerRow) -> tuple[str, ...]:
    kind = row.type if len(row.type) <= LONGEST_TYPE else row.type[: LONGEST_TYPE - 1] + "…"
    place = "suggested" if row.is_suggested else "yes" if row.cam else str(row.reason)
    if row.is_out_of_place:
        place = f"{place}, but its cells lie elsewhere"
    place += f" {BOTH_SIGNS}" if row.both_signs else ""
    return (
        printable(row.name),
        printable(kind),
        _output(row),
        _stride(row),
        f"{row.parameters:,}" if row.parameters else "-",
        place,
    )


def _output(row: LayerRow) -> str:
    """For one picture: without the first axis where that is the picture's."""
    if row.shape is None:
        return "-"
    return " x ".join(map(str, row.shape[1:] if row.shape[:1] == (1,) else row.shape)) or "1"


def _stride(row: LayerRow) -> str:
    if row.stride is None:
        return "-"
    sides = [f"{side:.1f}".removesuffix(".0") for side in row.stride]
    return sides[0] if len(set(sides)) == 1 else " x ".join(sides)


def _mark(row: LayerRow, line: str) -> str:
    if row.is_suggested:
        return click.style(f"→ {line}", fg="green", bold=True)
    return f"  {line}" if row.cam and not row.is_out_of_place else click.style(f"  {line}", dim=True)


def _explain_signs(survey: Survey) -> list[str]:
    """What the sign means, and for which methods."""
    methods = ", ".join(method.name for method in METHODS.values() if method.assumes_positive)
    own = next((f", which take {row.name}" for row in survey.rows if row.suggested_for_positive), "")
    return textwrap.wrap(f"{BOTH_SIGNS} negative values too: not for {methods}{own}.", WIDTH)


def _use(survey: Survey, words: Sequence[str]) -> str:
    """The command that explains a picture at the suggested layer."""
    suggested = next((row for row in survey.rows if row.is_suggested), None)
    if suggested is None:
        return "There is no layer at which a map can be taken."
    if len(survey.skeleton.size) == 3:
        return f"A picture is no volume: explain one in Python, gradcam.explain(model, volume, '{suggested.name}')."
    return to_command(["gradcam", "run", "photo.jpg", *words, "--layer", suggested.name])
