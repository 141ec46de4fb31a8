"""`gradcam methods`: list the CAM and attribution methods."""

from __future__ import annotations

from collections.abc import Iterator

import click

from gradcam.attributions.table import ATTRIBUTIONS, AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete
from gradcam.cli._options import find_any_method
from gradcam.errors import GradcamError
from gradcam.plugins import list_entry_points

TITLES = ("method", "forward passes", "summary")


@click.command("methods", cls=Command)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete(lambda _: [*METHODS, *ATTRIBUTIONS]))
@click.option("--verbose", is_flag=True, help="Also show the papers.")
@click.option("--bibtex", is_flag=True, help="Print the BibTeX entries of the papers, and nothing else.")
def methods_command(names: tuple[str, ...], verbose: bool, bibtex: bool) -> int:
    """List the methods: name, cost and summary.

    The cost is the number of forward passes of the model: 1 for single-pass methods. The "tail" in some
    costs is the part of the model after the target layer.
    """
    methods = [find_any_method(name) for name in names]
    methods = methods or [*METHODS.values(), *_find_installed(), *ATTRIBUTIONS.values()]
    if bibtex:
        sources = dict.fromkeys(method.source for method in methods if method.source is not None)
        click.echo("\n\n".join(source.entry for source in sources))
        return 0
    rows = [TITLES, *((method.name, method.cost, method.summary) for method in methods)]
    name_width, cost_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    papers = ["", *(method.paper or "" for method in methods)]
    for (name, cost, summary), paper in zip(rows, papers):
        click.echo(f"{click.style(f'{name:<{name_width}}', bold=True)}  {cost:<{cost_width}}  {summary}")
        if verbose and paper:
            click.echo(f"{' ' * (name_width + 2)}{click.style(paper, dim=True)}")
    return 0


def _find_installed() -> Iterator[Method | AttributionMethod]:
    for name in list_entry_points("methods"):
        try:
            yield find_any_method(name)
        except GradcamError as error:  # noqa: PERF203  (a broken plug-in must not hide the others)
            click.echo(f"Note: {error}", err=True)
