"""`gradcam inspect gradients`: how a class's gradient flows back through the network."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import options
from gradcam.cli.commands import Command
from gradcam.cli.completion import complete, list_classes
from gradcam.cli.inspection.gradient_table import Outcome
from gradcam.cli.job import make_folder
from gradcam.cli.outcomes import tell_each
from gradcam.cli.preparation import load_model, say
from gradcam.cli.settings import Destination, ModelChoice, Output, find_destination, to_model_choice
from gradcam.cli.waiting import import_torch
from gradcam.errors import GradcamError, printable
from gradcam.naming import OutputNames, join_name

if TYPE_CHECKING:
    from gradcam.classifiers import Classifier
    from gradcam.inspection.flow import GradientFlow

PLOTS = 'pip install "gradcam-torch[plots]"'


@dataclass(frozen=True)
class _Job:
    """What is looked at in each picture; without a destination nothing is drawn."""

    classifier: Classifier
    index: int | None
    layers: tuple[str, ...]
    destination: Destination | None
    names: OutputNames
    ending: str
    show_all: bool

    def look(self, image: Path) -> Outcome:
        """The gradients of one picture; they are drawn as well."""
        start = time.perf_counter()
        prepared = self.classifier.prepare(image)
        flow = self._compute(prepared.image)
        index = 0 if flow.classes is None else int(flow.classes)
        label = self.classifier.label(index)
        path = None if self.destination is None else self._claim(image, self.destination)
        if path is not None:
            from gradcam.images import write_image
            from gradcam.inspection.plot import draw_gradients

            name = f"class {index}" if label is None else label
            title = f"{image.name}: the gradient of {name}, {flow.scores.item():.4g}, in {self.classifier.name}"
            make_folder(path.parent)
            write_image(path, draw_gradients(flow, title=printable(title)))
        return Outcome(
            image=str(image),
            model=self.classifier.name,
            device=str(self.classifier.device),
            size=prepared.reading.picture.shape[:2],
            index=index,
            label=label,
            flow=flow,
            plot=None if path is None else str(path),
            seconds=time.perf_counter() - start,
            show_all=self.show_all,
        )

    def _compute(self, image: Any) -> GradientFlow:
        from gradcam.classifiers.preparation import find_input_dtype
        from gradcam.inspection.flow import gradients
        from gradcam.targets import ClassTarget

        model = self.classifier.model
        images = image[None].to(self.classifier.device, find_input_dtype(model))
        target = ClassTarget(self.index, activation=self.classifier.activation)
        return gradients(model, images, target=target, layers=self.layers or None)

    def _claim(self, image: Path, destination: Destination) -> Path:
        return destination.file or self.names.claim([join_name(image.stem, f"-gradients{self.ending}")])[0]


@click.command(
    "gradients", cls=Command, short_help="How a class's gradient flows back: vanishing and exploding layers."
)
@options.pictures
@click.option(
    "-c",
    "--class",
    "wanted",
    metavar="NAME|INDEX",
    help="The class.  [default: each picture's most probable]",
    shell_complete=complete(list_classes),
)
@options.layers("Layers to look at", default="all")
@options.model
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="A folder for the plots, or a file by its suffix.  [default: the current folder]",
)
@click.option("--all", "show_all", is_flag=True, help="A row for every layer, however many.")
@options.printing
def gradients_command(
    images: tuple[Path, ...],
    *,
    wanted: str | None,
    layers: tuple[str, ...],
    output: str | None,
    show_all: bool,
    as_json: bool,
    quiet: bool,
    reshape: object,
    **model: Any,
) -> int:
    """Show how a class's gradient flows back through the network, layer by layer: as a table and as a plot.

    Vanishing layers have less than 1/10,000 of the gradient at the model's output, exploding ones more than 10,000 times
    that. Plots are called <picture>-gradients.png, and need matplotlib; without it there is the table alone.
    """
    if reshape is not None:
        raise click.UsageError("--reshape is for maps at layers, of which none is made here: leave it out.")
    told = Output(as_json, quiet)
    choice = to_model_choice(model)
    destination = _find_destination(output, images, told)
    job = _prepare(choice, wanted, layers, destination, images, show_all=show_all)
    say(job.classifier.notes, told)
    name = job.classifier.name
    return tell_each(images, job.look, lambda image, error: Outcome(image, name, error=error), told)


def _find_destination(output: str | None, images: tuple[Path, ...], told: Output) -> Destination | None:
    """Where plots go; None where nothing draws them, which is an error if they were asked for."""
    if importlib.util.find_spec("matplotlib") is None:
        if output is not None:
            raise GradcamError(f"--output is for plots, and these need matplotlib: {PLOTS}")
        say([f"there is no plot without matplotlib: {PLOTS}"], told)
        return None
    return find_destination(output or ".", images, len(images))


def _prepare(
    choice: ModelChoice,
    wanted: str | None,
    layers: tuple[str, ...],
    destination: Destination | None,
    images: tuple[Path, ...],
    *,
    show_all: bool,
) -> _Job:
    """Load the model and check all that was typed before the first picture is touched. Raises `GradcamError`."""
    import_torch()
    from gradcam.inspection.selection import select_layers

    classifier = load_model(choice)
    if layers:
        select_layers(classifier.model, layers)
    index = None if wanted is None else classifier.find_class(wanted)
    folder = Path() if destination is None else destination.folder
    names = OutputNames(folder, images)
    return _Job(classifier, index, layers, destination, names, choice.ending, show_all or bool(layers))
