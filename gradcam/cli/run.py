"""`gradcam run`: explain one picture, or a few."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.batch.output.result_names import list_endings
from gradcam.cli import options
from gradcam.cli.job import Job, work
from gradcam.cli.preparation import prepare
from gradcam.cli.settings import Output, to_settings
from gradcam.naming import join_name

if TYPE_CHECKING:
    from gradcam.batch.findings import Finding


@click.command("run", short_help="Explain pictures: write an overlay for each.")
@options.pictures
@options.choices(methods=("gradcam",))
@options.output
@options.appearance
@options.printing
def run_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain pictures: write an overlay that shows where the model looked, or a picture of what each pixel matters.

    Overlays are called <picture>-<method>.png, with the class and the layer in the name where there are several, and
    the kind of evidence where it is not positive.
    """
    output = Output(as_json, quiet)
    job = prepare(to_settings(chosen), images, output, one_picture_each=False)
    return work(job, images, _write_overlays, output)


def _write_overlays(job: Job, image: Path, found: Finding) -> list[Path]:
    from gradcam.images import write_image

    drawings, chosen = found.drawings, job.settings
    if job.destination.file is not None:
        paths = [job.destination.file]
    else:
        endings = list_endings(job.question, drawings, job.classifier.labels)
        paths = job.names.claim([join_name(image.stem, ending) for ending in endings])
    for drawing, path in zip(drawings, paths):
        write_image(path, drawing.draw(alpha=chosen.alpha, colormap=chosen.colormap))
    return paths
