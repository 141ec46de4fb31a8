"""`gradcam layers`: what a model is made of, and where a map can be taken."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from gradcam.cli.layer_table import format_layers
from gradcam.cli.preparation import check_model_name, code_of_the_user
from gradcam.errors import LayerError, join_names, nearest, shorten
from gradcam.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.listing import LayerRow

MOST_ROWS = 32  # of a table where nobody has said how deep it should go


def _to_size(context: click.Context, parameter: click.Parameter, typed: str | None) -> tuple[int, ...] | None:
    """A picture's size as (height, width), or a volume's as (depth, height, width)."""
    if typed is None:
        return None
    sides = re.fullmatch(r"[1-9]\d{0,4}(?:[x×][1-9]\d{0,4}){0,2}", typed, re.ASCII | re.IGNORECASE)
    if sides is None:
        raise click.BadParameter(
            f"{typed!r} is no size: expected a side, 224, or height x width, 320x240.", context, parameter
        )
    size = tuple(map(int, re.findall(r"\d+", typed, re.ASCII)))
    return size if len(size) > 1 else size * 2


@click.command("layers", short_help="List a model's layers, and where a map can be taken.")
@click.argument("names", nargs=-1, metavar="[MODEL] [PATTERN]")
@click.option("-m", "--model", metavar="NAME", help="The model, in place of the argument.")
@click.option(
    "--size", callback=_to_size, metavar="N|HxW|DxHxW", help="Size of its pictures, or volumes, if not the usual."
)
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Only names of so many parts, or fewer.")
@click.option("--all", "show_all", is_flag=True, help="All layers, however many.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one record per layer, a line of JSON each, and nothing else."
)
def layers_command(
    names: tuple[str, ...],
    *,
    model: str | None,
    size: tuple[int, ...] | None,
    depth: int | None,
    show_all: bool,
    as_json: bool,
) -> int:
    """List the layers of MODEL: name, type, output, stride, parameters, and whether a map can be taken there.

    An arrow marks the layer that is explained where none is named. No weights are needed. PATTERN chooses names that hold
    it, or that fit it: layer4, 'layer?.0', '*.conv1'. Without it, --depth and --all, the table goes as deep as fits on a
    screen.
    """
    if show_all and depth is not None:
        raise click.UsageError("--all and --depth both say how much to list: give one of them.")
    chosen, pattern = _tell_apart(names, model)

    check_model_name(chosen)

    from gradcam.classifiers.skeletons import survey

    with code_of_the_user(chosen):
        found = survey(size=size) if chosen is None else survey(chosen, size=size)
    rows = _choose(found.rows, pattern, depth, show_all=show_all or as_json)
    if as_json:
        for row in rows:
            fields = {key.removeprefix("is_"): value for key, value in asdict(row).items()}
            click.echo(json.dumps({"schema": SCHEMA, "model": found.skeleton.name, **fields}))
    else:
        click.echo(format_layers(found, rows))
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
