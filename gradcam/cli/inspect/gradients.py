"""`gradcam inspect gradients`: how a class's gradient flows back through a network, as a table, a record and a plot."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, make_folder, print_notes, process_images
from gradcam.cli._settings import OutputMode, OutputLocation, find_destination, to_model_choice
from gradcam.cli._terminal import draw_bar, import_torch, format_written_path
from gradcam.cli.inspect import PictureOutcome
from gradcam.errors import GradcamError, printable, to_pip_command
from gradcam.images.files import OutputNames, join_name
from gradcam.models.labels import name_class

if TYPE_CHECKING:
    from gradcam.inspection.flow import GradientFlow, LayerGradients
    from gradcam.models.classifier import Classifier

MOST_ROWS = 40  # of a table where nobody has said which layers
BAR = 12  # characters
LEAST_DECADES = 4  # of a bar on either side of the reference: what differs little looks alike
LONGEST_NAME = 26  # characters, with which a line has 80; of longer ones the end is shown
COLOURS = {"vanishing": "blue", "exploding": "yellow", "no gradient": "magenta", "NaN": "red", "infinite": "red"}
TITLES = ("layer", "output", "", "params", "zeros", "")


@dataclass(frozen=True)
class Measured(PictureOutcome):
    """What became of one picture: the class, by its index and its label, and the flow of its gradient; or an error.
    `plot`: the file that was drawn, None without. `show_all`: whether people see every layer, or as many as fit on a
    screen."""

    index: int = 0
    label: str | None = None
    flow: GradientFlow | None = None
    plot: str | None = None
    show_all: bool = False

    def to_fields(self) -> dict[str, Any]:
        flow = self.flow
        if flow is None:
            return {
                "index": None,
                "label": self.label,
                "score": None,
                "plot": self.plot,
                "reference": None,
                "layers": [],
            }
        start = {"index": self.index, "label": self.label, "score": flow.scores.item(), "plot": self.plot}
        layers = [
            asdict(layer) | {"parameters": [asdict(it) | {"ratio": it.ratio} for it in layer.parameters]}
            for layer in flow.layers
        ]
        return start | {"reference": flow.reference, "layers": layers}

    def format(self) -> str:
        """Several lines: what it is, the table, what is conspicuous, and where the plot is."""
        if self.flow is None:
            return ""
        flow = self.flow
        name = printable(name_class(self.index, self.label))
        rows = flow.layers if self.show_all else _choose(flow.layers)
        lines = [self.to_title(), f"norms of the gradient of {name} ({self.index}), score {flow.scores.item():.4g}"]
        lines += ["", *_table(rows, flow), ""]
        if len(rows) < len(flow.layers):
            lines.append(
                f"  {len(rows)} of {len(flow.layers)} layers are listed. Use --all or --layer PATTERN for more."
            )
        found = {verdict: [it.name or it.type for it in flow.layers if it.verdict == verdict] for verdict in COLOURS}
        said = [click.style(f"  {verdict}: {_list(it)}", fg=COLOURS[verdict]) for verdict, it in found.items() if it]
        lines += said or ["  No gradient vanishes or explodes."]
        if self.plot is not None:
            lines.append(format_written_path(self.plot))
        return "\n".join([*lines, ""])


def _choose(layers: Sequence[LayerGradients]) -> Sequence[LayerGradients]:
    if len(layers) <= MOST_ROWS:
        return layers
    last = len(layers) - 1
    changes = [place for place in range(last) if layers[place].verdict != layers[place + 1].verdict]
    kept = {0, last, *(place for change in changes for place in (change, change + 1))}
    kept = set(sorted(kept)[-MOST_ROWS:])
    even = range(MOST_ROWS - len(kept))
    kept |= {round((step + 1) * last / (len(even) + 1)) for step in even}
    return [layers[place] for place in sorted(kept)]


def _table(rows: Sequence[LayerGradients], flow: GradientFlow) -> list[str]:
    scale = _scale(flow)
    cells = [TITLES, *(_cells(row, flow.reference, scale) for row in rows)]
    name = max(len(cell[0]) for cell in cells)
    lines = [f"  {it[0]:<{name}}  {it[1]:>7}  {it[2]:<{BAR}}  {it[3]:>7}  {it[4]:>5}  {it[5]}".rstrip() for it in cells]
    coloured = (click.style(line, fg=COLOURS.get(row.verdict or "")) for row, line in zip(rows, lines[1:]))
    return [click.style(lines[0], dim=True), *coloured]


def _cells(row: LayerGradients, reference: float, scale: tuple[float, float]) -> tuple[str, ...]:
    name = printable(row.name or f"({row.type})")
    output = row.activations
    return (
        name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :],
        "-" if output is None else f"{output.norm:.1e}",
        "" if output is None or not reference else _bar(output.norm / reference, scale),
        f"{row.parameters_norm:.1e}" if any(it.gradient for it in row.parameters) else "-",
        "-" if output is None else f"{math.floor(output.zeros * 100)} %",
        row.verdict or "",
    )


def _scale(flow: GradientFlow) -> tuple[float, float]:
    norms = [it.activations.norm for it in flow.layers if it.activations is not None]
    shares = [norm / flow.reference for norm in norms if flow.reference and 0 < norm < math.inf]
    logs = [math.log10(share) for share in shares if share > 0]
    return min([-LEAST_DECADES, *logs]), max([LEAST_DECADES, *logs])


def _bar(share: float, scale: tuple[float, float]) -> str:
    low, high = scale
    if math.isnan(share):
        return ""
    reach = 0.0 if share <= 0 else min(1.0, max(0.0, (math.log10(share) - low) / (high - low)))
    return draw_bar(reach, BAR)


def _list(names: Sequence[str]) -> str:
    several = f"{len(names)} layers; first {names[0]}, last {names[-1]}"
    return several if len(names) > 1 else f"only {names[0]}"


@dataclass(frozen=True)
class _Job:
    classifier: Classifier
    index: int | None
    layers: tuple[str, ...]
    destination: OutputLocation | None
    names: OutputNames
    ending: str
    show_all: bool

    def look(self, image: Path) -> Measured:
        """The gradients of one picture; they are drawn as well."""
        from gradcam.inspection.flow import gradients
        from gradcam.models.device import find_input_dtype
        from gradcam.targets.classes import ClassTarget

        start, classifier = time.perf_counter(), self.classifier
        prepared = classifier.prepare(image)
        images = prepared.image[None].to(classifier.device, find_input_dtype(classifier.model))
        target = ClassTarget(self.index, activation=classifier.activation)
        flow = gradients(classifier.model, images, target=target, layers=self.layers or None)
        index = 0 if flow.classes is None else int(flow.classes)
        label = classifier.label(index)
        plot = None if self.destination is None else self._draw(image, self.destination, flow, name_class(index, label))
        size, seconds = prepared.reading.picture.shape[:2], time.perf_counter() - start
        about = str(image), classifier.name, str(classifier.device), size, seconds
        return Measured(*about, index=index, label=label, flow=flow, plot=plot, show_all=self.show_all)

    def _draw(self, image: Path, destination: OutputLocation, flow: GradientFlow, name: str) -> str:
        from gradcam.images.write import write_image
        from gradcam.inspection.plot import draw_gradients

        path = destination.file or self.names.claim([join_name(image.stem, f"-gradients{self.ending}")])[0]
        title = f"{image.name}: gradient of {name}, score {flow.scores.item():.4g}, in {self.classifier.name}"
        make_folder(path.parent)
        write_image(path, draw_gradients(flow, title=printable(title)))
        return str(path)


@click.command("gradients", cls=Command)
@options.images
@options.class_("wanted", "Class name or index.  [default: top class of each image]")
@options.layers("Layers to list", default="all")
@options.model
@options.output_option("Output folder or file for the plot.  [default: the current folder]")
@click.option("--all", "show_all", is_flag=True, help="Print all layers.")
@options.printing
def gradients_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Show vanishing and exploding gradients, layer by layer.

    The command prints the norm of the class score's gradient at each layer, and draws a plot. A gradient vanishes if its
    norm is below 1/10,000 of the norm at the model's output. It explodes if its norm is above 10,000 times the norm at the
    output. Plots need matplotlib and are written to <image>-gradients.png.
    """
    if chosen["reshape"] is not None:
        raise click.UsageError("gradcam inspect gradients does not use --reshape: remove it.")
    told = OutputMode(as_json, quiet)
    job = _prepare(images, _find_destination(chosen["output"], images, told), chosen)
    print_notes(job.classifier.notes, told)
    name = job.classifier.name
    return process_images(images, job.look, lambda image, error: Measured(image, name, error=error), told)


def _find_destination(output: str | None, images: tuple[Path, ...], told: OutputMode) -> OutputLocation | None:
    """Where plots go; None where nothing draws them, which is an error if they were asked for."""
    if importlib.util.find_spec("matplotlib") is None:
        if output is not None:
            raise GradcamError(f"--output writes plots, which need matplotlib: {to_pip_command('plots')}")
        print_notes([f"plots need matplotlib: {to_pip_command('plots')}"], told)
        return None
    return find_destination(output or ".", images, len(images))


def _prepare(images: tuple[Path, ...], destination: OutputLocation | None, chosen: dict[str, Any]) -> _Job:
    import_torch()
    from gradcam.inspection.selection import select_layers

    choice, layers, wanted = to_model_choice(chosen), chosen["layers"], chosen["wanted"]
    classifier = load_model(choice)
    if layers:
        select_layers(classifier.model, layers)
    index = None if wanted is None else classifier.find_class(wanted)
    names = OutputNames(Path() if destination is None else destination.folder, images)
    return _Job(classifier, index, layers, destination, names, choice.suffix, chosen["show_all"] or bool(layers))
