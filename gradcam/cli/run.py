"""`gradcam run` and `gradcam compare`: explain one picture, or a few; methods, layers and classes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import prepare, work
from gradcam.cli._settings import Output, Settings, to_settings

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier

# Which methods are compared, where nobody says
METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
SIGNED = ("gradcam", "xgradcam", "hirescam", "finercam")


@click.command("run", cls=Command)
@options.pictures
@options.choices()
@options.output
@options.save
@options.edits
@options.appearance
@options.printing
def run_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain pictures, and those in folders: write an overlay that shows where the model looked in each.

    The task is read off the model: a detector's surest box is explained, the largest class of a segmenter, each word of a
    caption; and what is found is printed with numbers to choose from. Overlays are called <picture>-<method>.png, with the
    class (or box, sentence, word) in the name if you name one or there are several, the layer if there are several, and
    the kind of evidence, the model and its weights if they are not the defaults.
    """
    output = Output(as_json, quiet)
    return work(prepare(to_settings(chosen), images, output), images, output)


@click.command("compare", cls=Command)
@options.pictures
@options.choices(default="a choice of them")
@options.output
@options.appearance
@options.printing
def compare_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Compare methods: draw a panel with methods across, and layers and classes down.

    Methods of one pass share it. Without --method, a choice of those is shown. Panels are called <picture>-compare.png,
    with the kind of evidence in the name where it is not positive. Without --layer, methods that assume activations that
    are not negative are drawn at a layer of their own, which their columns name.
    """
    unfit = [each.name for each in chosen["methods"] if isinstance(each, AttributionMethod) or not each.has_layer]
    if unfit:
        raise click.UsageError(
            f"{unfit[0]} makes no map at a layer, of which a panel is made: use `gradcam run` for it."
        )
    output, settings = Output(as_json, quiet), to_settings(chosen | {"saved": ("panel",)})
    job = prepare(settings, images, output, partial(_choose_methods, settings))
    return work(replace(job, panel="overlay"), images, output)


def _choose_methods(settings: Settings, model: Classifier) -> Sequence[Method]:
    """Those that are compared where nobody says which; some need the classes' own logits."""
    found = [find_method(name) for name in (METHODS if settings.options["evidence"] == "positive" else SIGNED)]
    is_of_logits = settings.score == "logit" and settings.target is None and model.task == "classification"
    return [each for each in found if is_of_logits or each.score is None]
