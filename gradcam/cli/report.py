"""`gradcam report`: the gallery of a batch, made again."""

from __future__ import annotations

from pathlib import Path

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._options import FOLDER
from gradcam.cli._settings import Output
from gradcam.cli._terminal import telling_waits
from gradcam.errors import printable
from gradcam.storage.store import Store


@click.command("report", cls=Command, short_help="Make the gallery of a batch again.")
@click.argument("folder", metavar="DIR", type=FOLDER)
@options.max_pixels
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def report_command(folder: Path | Store, quiet: bool) -> int:
    """Write DIR/index.html, a gallery to look through, from what `gradcam batch` left in DIR, or in a store by its URL."""
    from gradcam.report.pages import write_report

    with telling_waits(Output(as_json=False, quiet=quiet)):
        page = write_report(folder)
    if not quiet:
        click.echo(f"  →  {click.style(printable(str(page)), fg='green')}")
    return 0
