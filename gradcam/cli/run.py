"""`gradcam run`: explain one picture, or a few."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import options
from gradcam.cli.job import Job, work
from gradcam.cli.preparation import prepare
from gradcam.cli.settings import Output, has_layer, to_settings
from gradcam.naming import overlay_name

if TYPE_CHECKING:
    from gradcam.batch.findings import Drawing, Finding


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
        classes = len({drawing.index for drawing in drawings})
        paths = job.names.claim([_name(job, image, drawing, several_classes=classes > 1) for drawing in drawings])
    for drawing, path in zip(drawings, paths):
        write_image(path, drawing.draw(alpha=chosen.alpha, colormap=chosen.colormap))
    return paths


def _name(job: Job, image: Path, drawing: Drawing, *, several_classes: bool) -> str:
    """The overlay's name; the class and the layer are in it where there are several."""
    at_layer = len(job.question.layers) > 1 and has_layer(drawing.method)
    is_map = drawing.method in job.question.methods
    return overlay_name(
        image.stem,
        drawing.method,
        index=drawing.index if several_classes else None,
        label=job.classifier.label(drawing.index) if several_classes else None,
        layer=drawing.layer if at_layer else None,
        evidence=drawing.evidence if is_map and drawing.evidence != "positive" else None,
    )
