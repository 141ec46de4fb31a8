"""`gradcam run`: explain one picture, or a few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import prepare, work
from gradcam.cli._settings import Output, to_settings


@click.command("run", cls=Command, short_help="Explain pictures: write an overlay for each.")
@options.pictures
@options.choices(methods=("gradcam",))
@options.output
@options.save
@options.appearance
@options.printing
def run_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain pictures, and those in folders: write an overlay that shows where the model looked in each.

    Overlays are called <picture>-<method>.png, with the class and the layer in the name where there are several, and the
    kind of evidence, the model and its weights where they are not the usual ones.
    """
    output = Output(as_json, quiet)
    return work(prepare(to_settings(chosen), images, output), images, output)
