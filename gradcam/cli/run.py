"""`gradcam run` and `gradcam compare`: explain one picture, or a few; methods, layers and classes side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.table import find_method
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import prepare, work
from gradcam.cli._settings import Output, to_settings

# Which methods are compared, where nobody says
METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
SIGNED = ("gradcam", "xgradcam", "hirescam", "finercam")


@click.command("run", cls=Command)
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


@click.command("compare", cls=Command)
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
        found = [find_method(name) for name in names]
        is_of_logits = chosen["score"] == "logit" and chosen["target"] is None
        chosen["methods"] = tuple(each for each in found if is_of_logits or each.score is None)
    unfit = [each.name for each in chosen["methods"] if isinstance(each, AttributionMethod) or not each.has_layer]
    if unfit:
        raise click.UsageError(
            f"{unfit[0]} makes no map at a layer, of which a panel is made: use `gradcam run` for it."
        )
    output = Output(as_json, quiet)
    job = prepare(to_settings(chosen | {"saved": ("panel",)}), images, output)
    return work(replace(job, panel="overlay"), images, output)
