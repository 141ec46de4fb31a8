"""`gradcam compare`: methods, layers and classes side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.attributions.table import ATTRIBUTIONS
from gradcam.batch.names import panel_ending
from gradcam.cam.methods.table import METHODS as TABLE
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import Job, prepare, work
from gradcam.cli._settings import Output, to_settings
from gradcam.images.files import join_name

if TYPE_CHECKING:
    from gradcam.batch.findings import Finding

METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
SIGNED = ("gradcam", "xgradcam", "hirescam", "finercam")


@click.command("compare", cls=Command, short_help="Draw methods, layers and classes side by side.")
@options.pictures
@options.choices(methods=())
@options.output
@options.appearance
@options.printing
def compare_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Compare methods: draw a panel with methods across, and layers and classes down.

    Methods of one pass share it. Without --method, a choice of those is shown. Panels are called <picture>-compare.png,
    with the kind of evidence in the name where it is not positive. Without --layer, methods that assume activations that
    are not negative are drawn at a layer of their own, which their columns name.
    """
    if not chosen["methods"]:
        names = METHODS if chosen["evidence"] == "positive" else SIGNED
        chosen["methods"] = tuple(name for name in names if chosen["score"] == "logit" or TABLE[name].score is None)
    unfit = [name for name in chosen["methods"] if name in ATTRIBUTIONS or TABLE[name].place != "layer"]
    if unfit:
        raise click.UsageError(
            f"{unfit[0]} makes no map at a layer, of which a panel is made: use `gradcam run` for it."
        )
    output = Output(as_json, quiet)
    job = prepare(to_settings(chosen), images, output, one_picture_each=True)
    return work(job, images, _write_panel, output)


def _write_panel(job: Job, image: Path, found: Finding) -> list[dict[str, Path]]:
    from gradcam.images.read import write_image
    from gradcam.models.results import panel

    name = join_name(image.stem, panel_ending(job.settings.evidence, suffix=job.settings.model.ending))
    path = job.destination.file or job.names.claim([name])[0]
    write_image(path, panel(found.maps, alpha=job.settings.alpha, colormap=job.settings.colormap))
    return [{"overlay": path}] * len(found.drawings)
