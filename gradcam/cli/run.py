"""`gradcam run` and `gradcam compare`: explain images; draw methods, layers and classes side by side."""

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
from gradcam.cli._job import explain_images, prepare_job
from gradcam.cli._settings import OutputMode, Settings, to_settings

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier

# Without --method, METHODS are compared for positive evidence, and SIGNED for negative or signed evidence.
METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
SIGNED = ("gradcam", "xgradcam", "hirescam", "finercam")


@click.command("run", cls=Command)
@options.images
@options.explain_options()
@options.output
@options.save
@options.figure("--save or --output")
@options.edits
@options.appearance
@options.printing
def run_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Explain images: write an overlay that shows where the model looked.

    IMAGE is an image file, or a folder of images. The task is detected from the model. The default target is the
    top class (classifiers), the highest-scoring box (detectors), the largest class (segmenters), or every word of the
    caption (captioners). Predictions are printed with their numbers, so that you can choose a different target.

    Overlays are called <image>-<method>.png. If you choose a class, box, sentence or word, or if several of them are
    explained, the name also contains the class, box, sentence or word. If several layers are explained, the name
    contains the layer. The name also contains the kind of evidence, the model and the weights if these differ from the
    defaults.

    --figure draws all images in one figure, with a row per image and a column per class. With several methods or
    layers, the figure has a row per image and class, and a column per method and layer.
    """
    output = OutputMode(as_json, quiet)
    return explain_images(prepare_job(to_settings(params), images, output), images, output)


@click.command("compare", cls=Command)
@options.images
@options.explain_options(default="  [default: six common methods]")
@options.output
@options.figure("--output")
@options.appearance
@options.printing
def compare_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Compare methods: draw a panel with a column per method, and a row per layer and class.

    Methods that need only one forward pass share this pass. Without --method, common methods are compared. Panels are called
    <image>-compare.png. With --evidence negative or signed, the name also contains "negative" or "signed". Without
    --layer, methods that assume non-negative activations may use a different layer than other methods. Each heading
    shows the layer of its column.
    """
    for method in params["methods"]:
        if isinstance(method, AttributionMethod) or not method.has_layer:
            problem = f"{method.name} makes no heatmap at a layer, so it cannot be in a panel"
            raise click.UsageError(f"{problem}. Use: gradcam run --method {method.name}")
    output, settings = OutputMode(as_json, quiet), to_settings(params | {"saved": ("panel",)})
    job = prepare_job(settings, images, output, partial(_choose_methods, settings))
    return explain_images(replace(job, panel="overlay"), images, output)


def _choose_methods(settings: Settings, model: Classifier) -> Sequence[Method]:
    """Return the default methods. Leave out methods with their own score, unless the logit of a class is explained."""
    methods = [find_method(name) for name in (METHODS if settings.options["evidence"] == "positive" else SIGNED)]
    explains_logits = settings.score == "logit" and settings.target is None and model.task == "classification"
    return [method for method in methods if explains_logits or method.score is None]
