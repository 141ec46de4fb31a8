"""`gradcam layers`: what a model is made of, and where a map can be taken."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import options
from gradcam.cli.commands import Command
from gradcam.cli.completion import complete, list_models
from gradcam.cli.layer_table import format_layers
from gradcam.cli.preparation import check_model_name, code_of_the_user
from gradcam.cli.settings import to_model_choice, to_word
from gradcam.cli.waiting import import_torch
from gradcam.errors import LayerError, join_names, nearest, shorten
from gradcam.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.listing import LayerRow

MOST_ROWS = 32  # of a table where nobody has said how deep it should go


@click.command("layers", cls=Command, short_help="List a model's layers, and where a map can be taken.")
@click.argument("names", nargs=-1, metavar="[MODEL] [PATTERN]", shell_complete=complete(list_models))
@options.model
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Only names of so many parts, or fewer.")
@click.option("--all", "show_all", is_flag=True, help="All layers, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each layer, and nothing else.")
def layers_command(
    names: tuple[str, ...],
    *,
    depth: int | None,
    show_all: bool,
    as_json: bool,
    reshape: str | tuple[int, ...] | None,
    **model: Any,
) -> int:
    """List the layers of MODEL: name, type, output, stride, parameters, and whether a map can be taken there.

    An arrow marks the layer that is explained where none is named. No weights are needed: what is said of the model but
    its --size is for the last line, the command to go on with. PATTERN chooses names that hold
    it, or that fit it: layer4, 'layer?.0', '*.conv1'. Without it, --depth and --all, the table goes as deep as fits on a
    screen.
    """
    if show_all and depth is not None:
        raise click.UsageError("--all and --depth both say how much to list: give one of them.")
    chosen = to_model_choice(model)
    name, pattern = _tell_apart(names, chosen.model)
    check_model_name(name)
    import_torch()

    from gradcam.classifiers import DEFAULT
    from gradcam.classifiers.skeletons import survey

    size = (chosen.size, chosen.size) if isinstance(chosen.size, int) else chosen.size
    with code_of_the_user(name):
        found = survey(name or DEFAULT, size=size)
    rows = _choose(found.rows, pattern, depth, show_all=show_all or as_json)
    if as_json:
        for row in rows:
            fields = {key.removeprefix("is_"): value for key, value in asdict(row).items()}
            click.echo(json.dumps({"schema": SCHEMA, "model": found.skeleton.name, **fields}))
    else:
        words = replace(chosen, model=None if name == DEFAULT else name).to_words()
        click.echo(format_layers(found, rows, [*words, *([] if reshape is None else ["--reshape", to_word(reshape)])]))
    return 0


def _tell_apart(names: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    """The model's name and the pattern, None for what was not given."""
    given = [*names] if model is None else [model, *names]
    if len(given) > 2:
        raise click.UsageError(f"{len(given)} names were given, expected a model and a pattern at most.")
    chosen, pattern, *_ = [*given, None, None]
    return chosen, pattern


def _choose(rows: Sequence[LayerRow], pattern: str | None, depth: int | None, *, show_all: bool) -> Sequence[LayerRow]:
    """The rows to be shown; the suggestion is among them, unless a pattern leaves it out."""
    if pattern is not None:
        rows = _fitting(rows, pattern)
    elif depth is None and not show_all:
        depth = _fitting_depth(rows)
    return [row for row in rows if depth is None or _depth(row) <= depth or (row.is_suggested and pattern is None)]


def _fitting(rows: Sequence[LayerRow], pattern: str) -> Sequence[LayerRow]:
    glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    found = [row for row in rows if fnmatch.fnmatchcase(row.name, glob)]
    if not found:
        offers = nearest(pattern, [row.name for row in rows])
        hint = f" Nearest: {join_names(offers)}." if offers else ""
        raise LayerError(f"No layer's name fits {shorten(pattern)}.{hint}")
    return found


def _fitting_depth(rows: Sequence[LayerRow]) -> int:
    """The greatest depth of which all rows fit on a screen."""
    depths = [_depth(row) for row in rows]
    return max((it for it in set(depths) if sum(depth <= it for depth in depths) <= MOST_ROWS), default=1)


def _depth(row: LayerRow) -> int:
    return row.name.count(".") + 1
