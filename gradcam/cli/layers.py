"""`gradcam layers`: list the layers of a model, and which of them can be target layers."""

from __future__ import annotations

import fnmatch
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_models
from gradcam.cli._job import check_model_name
from gradcam.cli._settings import to_model_choice, to_word
from gradcam.errors import LayerError, escape_controls, find_similar_names, join_names, shorten
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.cam.listing import LayerRow
    from gradcam.models.skeletons import Survey

TITLES = ("layer", "type", "output", "stride", "parameters", "map")
BOTH_SIGNS = "±"
WIDTH = 80
MAX_TYPE = 22  # characters of a type; layer names are never shortened, because users copy them


def format_layers(survey: Survey, rows: Sequence[LayerRow], words: Sequence[str]) -> str:
    """Format the title, the table of layers, notes, and a command for the suggested layer.

    `words` are the model options of the suggested command.
    """
    skeleton = survey.skeleton
    size = " x ".join(map(str, (skeleton.channels, *skeleton.size)))
    count = sum(parameter.numel() for parameter in skeleton.model.parameters())
    lines = ["   ".join([click.style(escape_controls(skeleton.name), bold=True), size, f"{count:,} parameters"])]
    if survey.note:
        lines.append(click.style(survey.note, fg="yellow"))
    methods = ", ".join(method.name for method in METHODS.values() if method.assumes_positive)
    defaults = [row.name for row in survey.rows if row.suggested_for_positive][:1]
    text = f"{BOTH_SIGNS} marks layers with negative values. Do not use these layers for {methods}."
    text += "".join(f" The default layer of these methods is {name}." for name in defaults)
    titles, *cells = terminal.align([TITLES, *map(_cells, rows)], "  ", right=(3, 4))
    lines += ["", f"  {titles}", *map(_mark, rows, cells), ""]
    lines += textwrap.wrap(text, WIDTH) if any(row.both_signs for row in rows) else []
    if len(rows) < len(survey.rows):
        lines.append(
            f"{len(rows)} of {len(survey.rows)} layers are listed. For more, use --depth N, --all or a PATTERN."
        )
    if skeleton.channels not in (1, 3):
        reader = f"Images with {skeleton.channels} channels need --reader"
        lines.append(f"{reader}. Such images also need --mean and --std, with one value per channel.")
    return "\n".join([*lines, _suggest_command(survey, words)])


def _cells(row: LayerRow) -> tuple[str, ...]:
    place = "suggested" if row.is_suggested else "yes" if row.cam else str(row.reason)
    if row.is_out_of_place:
        place = f"{place}, but its cells are not aligned with the image"
    place += f" {BOTH_SIGNS}" if row.both_signs else ""
    parameters = f"{row.parameters:,}" if row.parameters else "-"
    output = "-" if row.shape is None else terminal.format_shape(row.shape)
    kind = escape_controls(terminal.shorten_name(row.type, MAX_TYPE))
    return escape_controls(row.name), kind, output, _stride(row), parameters, place


def _stride(row: LayerRow) -> str:
    if row.stride is None:
        return "-"
    sides = [f"{side:.1f}".removesuffix(".0") for side in row.stride]
    return sides[0] if len(set(sides)) == 1 else " x ".join(sides)


def _mark(row: LayerRow, line: str) -> str:
    if row.is_suggested:
        return click.style(f"→ {line}", fg="green", bold=True)
    return f"  {line}" if row.cam and not row.is_out_of_place else click.style(f"  {line}", dim=True)


def _suggest_command(survey: Survey, words: Sequence[str]) -> str:
    suggested = next((row for row in survey.rows if row.is_suggested), None)
    if suggested is None:
        return "No layer of this model can be used as target layer."
    if len(survey.skeleton.size) == 3:
        return (
            f"This model takes volumes. Explain a volume in Python: gradcam.explain(model, volume, '{suggested.name}')."
        )
    layer_options = [] if survey.is_of_task else ["--layer", suggested.name]
    return terminal.quote_command(["gradcam", "run", "photo.jpg", *words, *layer_options])


@click.command("layers", cls=Command)
@click.argument("names", nargs=-1, metavar="[MODEL] [PATTERN]", shell_complete=complete(list_models))
@options.model
@options.number("--depth", "Maximum depth: list only names with at most N parts. layer4.0 has two parts.")
@click.option("--all", "show_all", is_flag=True, help="List all layers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record per layer, and nothing else.")
def layers_command(names: tuple[str, ...], depth: int | None, show_all: bool, as_json: bool, **model: Any) -> int:
    """List the layers of a model, and mark possible target layers.

    The table shows the name, type, output shape, stride and parameters of each layer, and whether it can be used as
    target layer. An arrow marks the default. PATTERN selects the names that contain or match the pattern, such as
    layer4, 'layer?.0' or '*.conv1'. By default, the table shows only as many levels of submodules as fit on a screen.
    To see other levels, give PATTERN, --depth or --all.

    No weights are needed. The last line suggests a command for the default layer. Model options such as --weights are
    copied into the suggested command. Of the model options, only --model and --size change the table.
    """
    if show_all and depth is not None:
        raise click.UsageError("--all and --depth contradict each other: give only one of them.")
    choice = to_model_choice(model)
    name, pattern = _split_arguments(names, choice.model)
    check_model_name(name)
    terminal.import_torch()

    from gradcam.models.providers import DEFAULT_MODEL
    from gradcam.models.skeletons import survey

    size = (choice.size, choice.size) if isinstance(choice.size, int) else choice.size
    with terminal.custom_code_context(name):
        model_survey = survey(name or DEFAULT_MODEL, size=size)
    rows = _select_rows(model_survey.rows, pattern, depth, show_all=show_all or as_json)
    if as_json:
        for row in rows:
            fields = {key.removeprefix("is_"): value for key, value in asdict(row).items()}
            click.echo(json.dumps({"schema": SCHEMA, "model": model_survey.skeleton.name, **fields}))
    else:
        words = replace(choice, model=None if name == DEFAULT_MODEL else name).to_words()
        words += [] if model["reshape"] is None else ["--reshape", to_word(model["reshape"])]
        click.echo(format_layers(model_survey, rows, words))
    return 0


def _split_arguments(names: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    arguments = [*names] if model is None else [model, *names]
    if len(arguments) > 2:
        raise click.UsageError(f"{len(arguments)} names were given: expected at most a model and a pattern.")
    model_name, pattern, *_ = [*arguments, None, None]
    return model_name, pattern


def _select_rows(
    rows: Sequence[LayerRow], pattern: str | None, depth: int | None, *, show_all: bool
) -> Sequence[LayerRow]:
    if pattern is not None:
        rows = _find_matching(rows, pattern)
    elif depth is None and not show_all:
        depth = terminal.find_fitting_depth([_depth(row) for row in rows])
    return [row for row in rows if depth is None or _depth(row) <= depth or (row.is_suggested and pattern is None)]


def _find_matching(rows: Sequence[LayerRow], pattern: str) -> Sequence[LayerRow]:
    glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    matching = [row for row in rows if fnmatch.fnmatchcase(row.name, glob)]
    if not matching:
        offers = find_similar_names(pattern, [row.name for row in rows])
        hint = f" Nearest: {join_names(offers)}." if offers else ""
        raise LayerError(f"No layer name matches {shorten(pattern)}.{hint}")
    return matching


def _depth(row: LayerRow) -> int:
    return row.name.count(".") + 1
