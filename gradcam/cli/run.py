"""`gradcam run`: explain one picture, or a few."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.batch.names import list_endings, panel_ending
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import Job, prepare, work
from gradcam.cli._settings import Output, to_settings
from gradcam.errors import OutputError
from gradcam.images.files import join_name, write_whole

if TYPE_CHECKING:
    from gradcam.batch.findings import Finding
    from gradcam.batch.names import Saving
    from gradcam.images.read import Pixels


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
    output, settings = Output(as_json, quiet), to_settings(chosen)
    job = prepare(settings, images, output, one_picture_each=False)
    return work(job, images, partial(_write, _to_saving(job)), output)


def _to_saving(job: Job) -> Saving:
    """What is written. Raises `GradcamError` for a panel of what makes no maps."""
    from gradcam.batch.names import Saving, check_panel

    chosen = job.settings
    saving = Saving(chosen.saved, "png", alpha=chosen.alpha, colormap=chosen.colormap)
    check_panel(saving, job.question)
    return saving


def _write(saving: Saving, job: Job, image: Path, found: Finding) -> list[dict[str, Path]]:
    """Write each kind of file that is asked for, and give their paths for each drawing."""
    from gradcam.batch.save import draw_kinds, name_kinds
    from gradcam.models.results import panel

    drawings, ending, alpha, colormap = found.drawings, job.settings.model.ending, saving.alpha, saving.colormap
    endings = list_endings(job.question, drawings, job.classifier.labels, suffix=ending)
    named = [name_kinds(join_name(image.stem, it), saving) for it in endings]
    names = [name for kinds in named for name in kinds.values()]
    if "panel" in saving.kinds:
        names.append(join_name(image.stem, panel_ending(job.settings.evidence, suffix=ending)))
    paths = iter([job.destination.file] if job.destination.file is not None else job.names.claim(names))
    written = []
    for drawing, kinds in zip(drawings, named):
        overlay = drawing.draw(alpha=alpha, colormap=colormap) if "overlay" in kinds else None
        written.append({kind: _write_one(next(paths), made) for kind, made in draw_kinds(drawing, overlay, saving)})
    if "panel" in saving.kinds:
        path = _write_one(next(paths), panel(found.maps, alpha=alpha, colormap=colormap))
        written = [{**kinds, "panel": path} for kinds in written]
    return written


def _write_one(path: Path, content: Pixels | bytes) -> Path:
    from gradcam.images.read import write_image

    if not isinstance(content, bytes):
        write_image(path, content)
        return path
    try:
        write_whole(path, content)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    return path
