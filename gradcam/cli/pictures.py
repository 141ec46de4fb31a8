"""Which pictures were named: files, and the ones in folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from gradcam.attributions import ATTRIBUTIONS
from gradcam.batch.output.result_names import COMPARISON
from gradcam.cli.terminal import to_command
from gradcam.evaluation.study.plan import CONTROL_NAMES
from gradcam.methods import METHODS
from gradcam.stores import is_url, to_path

MANY = 100  # pictures of a folder; of more, it is said what is made for them
# What follows a picture's name in those of the results that we write of it.
RESULTS = (*METHODS, *ATTRIBUTIONS, COMPARISON, "activations", "gradients", *(f"{it}-check" for it in CONTROL_NAMES))


def find_pictures(context: click.Context, parameter: click.Parameter, named: Sequence[str]) -> tuple[Path, ...]:
    """The files, and the pictures in the folders. Raises `click.UsageError` for a URL, `GradcamError` for no picture."""
    found: list[Path] = []
    for text in map(os.fsdecode, named):
        if is_url(text):
            line = to_command(["gradcam", "batch", text, "-o", "explained/"])
            raise click.UsageError(
                f"{text} is a URL, and {context.command_path} reads files. Download it, or type: {line}"
            )
        path = Path(to_path(text))
        found += _list_folder(path, context) if os.path.isdir(path) else [path]
    return tuple(found)


def _list_folder(folder: Path, context: click.Context) -> list[Path]:
    from gradcam.batch.inputs.sources import list_inputs

    pictures = [folder / item.name for item in list_inputs([folder]).items]
    stems = {path.stem for path in pictures}
    pictures = [path for path in pictures if path.suffix != ".png" or not _is_result(path.stem, stems)]
    if len(pictures) > MANY and not context.params.get("quiet"):
        line = to_command(["gradcam", "batch", str(folder), "-o", "explained/"])
        click.echo(f"Note: there are {len(pictures)} pictures in {folder}; for so many there is: {line}", err=True)
    return pictures


def _is_result(stem: str, stems: set[str]) -> bool:
    """Whether a file is called like what we wrote of another picture there: a second run would explain explanations."""
    parts = stem.split("-")
    ends = (("-".join(parts[:count]), "-".join(parts[count:])) for count in range(1, len(parts)))
    return any(start in stems and any(end == it or end.startswith(f"{it}-") for it in RESULTS) for start, end in ends)
