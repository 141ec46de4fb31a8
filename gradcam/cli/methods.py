"""`gradcam methods`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Iterator

import click

from gradcam.attributions.table import ATTRIBUTIONS, AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete
from gradcam.cli._options import find_any
from gradcam.errors import GradcamError
from gradcam.plugins import installed


@click.command("methods", cls=Command)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete(lambda _: [*METHODS, *ATTRIBUTIONS]))
@click.option("--bibtex", is_flag=True, help="Print the papers' BibTeX entries.")
def methods_command(names: tuple[str, ...], bibtex: bool) -> int:
    """List the methods: what each does, what it costs in forward passes of the network, and where it is from."""
    chosen = [find_any(name) for name in names] or [*METHODS.values(), *_find_installed(), *ATTRIBUTIONS.values()]
    if bibtex:
        sources = dict.fromkeys(method.source for method in chosen if method.source is not None)
        click.echo("\n\n".join(source.to_bibtex() for source in sources))
        return 0
    width = max(len(method.name) for method in chosen)
    indent = " " * (width + 2)
    for method in chosen:
        click.echo(f"{click.style(f'{method.name:<{width}}', bold=True)}  {method.summary}")
        click.echo(f"{indent}forward passes: {method.cost}")
        if method.paper:
            click.echo(f"{indent}{click.style(method.paper, dim=True)}")
    return 0


def _find_installed() -> Iterator[Method | AttributionMethod]:
    for name in installed("methods"):
        try:
            yield find_any(name)
        except GradcamError as error:  # noqa: PERF203  (of this one)
            click.echo(f"Note: {error}", err=True)
