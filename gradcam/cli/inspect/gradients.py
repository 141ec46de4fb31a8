"""The gradients at a network's layers as a table for the terminal, and as a record."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_classes
from gradcam.cli._job import load_model, make_folder, say, tell_each
from gradcam.cli._settings import Destination, ModelChoice, Output, find_destination, to_model_choice
from gradcam.cli._terminal import EIGHTHS, import_torch
from gradcam.errors import GradcamError, printable
from gradcam.images.files import OutputNames, join_name
from gradcam.storage.records import SCHEMA

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
class Outcome:
    """What became of one picture: the class, by its index and its label, and the flow of its gradient; or an error.

    `size`: the picture's (height, width). `plot`: the file that was drawn, None without. `seconds`: all that it took.
    `show_all`: whether people see every layer, or as many as fit on a screen.
    """

    image: str
    model: str
    device: str = ""
    size: tuple[int, ...] = (0, 0)
    index: int = 0
    label: str | None = None
    flow: GradientFlow | None = None
    plot: str | None = None
    seconds: float = 0.0
    show_all: bool = False
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON, of the same keys whatever became of it; numbers that are NaN or infinite are null."""
        flow = self.flow
        record = {
            "schema": SCHEMA,
            "image": self.image,
            "status": "ok" if self.error is None else "failed",
            "error": self.error,
            "model": self.model,
            "index": None if flow is None else self.index,
            "label": self.label,
            "score": None if flow is None else flow.scores.item(),
            "plot": self.plot,
            "reference": None if flow is None else flow.reference,
            "layers": [] if flow is None else [_to_fields(layer) for layer in flow.layers],
        }
        return json.dumps(_without_infinities(record), allow_nan=False)

    def format(self) -> str:
        """Several lines: what it is, the table, what is conspicuous, and where the plot is."""
        if self.flow is None:
            return ""
        flow, (height, width) = self.flow, self.size
        title = click.style(printable(PurePath(self.image).name), bold=True)
        name = f"class {self.index}" if self.label is None else printable(self.label)
        rows = flow.layers if self.show_all else _choose(flow.layers)
        lines = ["   ".join([title, f"{width} x {height}", f"{self.model} on {self.device}", f"{self.seconds:.1f} s"])]
        lines += [
            f"norms of the gradient of {name} ({self.index}), {flow.scores.item():.4g}",
            "",
            *_table(rows, flow),
            "",
        ]
        if len(rows) < len(flow.layers):
            lines.append(f"  {len(rows)} of {len(flow.layers)} layers; more with --all or --layer PATTERN.")
        lines += _summary(flow)
        if self.plot is not None:
            lines.append(f"  →  {click.style(printable(self.plot), fg='green')}")
        return "\n".join([*lines, ""])


def _to_fields(layer: LayerGradients) -> dict[str, Any]:
    found = asdict(layer)
    found["parameters"] = [asdict(it) | {"ratio": it.ratio} for it in layer.parameters]
    return found


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _choose(layers: Sequence[LayerGradients]) -> Sequence[LayerGradients]:
    """As many as fit: both ends, both sides of each change of the verdict, and others at even distances."""
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
    norms = [it.gradient.norm for it in row.parameters if it.gradient is not None]
    output = row.activations
    return (
        name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :],
        "-" if output is None else f"{output.norm:.1e}",
        "" if output is None or not reference else _bar(output.norm / reference, scale),
        f"{math.hypot(*norms):.1e}" if norms else "-",
        "-" if output is None else f"{math.floor(output.zeros * 100)} %",
        row.verdict or "",
    )


def _scale(flow: GradientFlow) -> tuple[float, float]:
    """The least and the greatest power of ten of a bar, in relation to the reference."""
    norms = [it.activations.norm for it in flow.layers if it.activations is not None]
    shares = [norm / flow.reference for norm in norms if flow.reference and 0 < norm < math.inf]
    logs = [math.log10(share) for share in shares if share > 0]
    return min([-LEAST_DECADES, *logs]), max([LEAST_DECADES, *logs])


def _bar(share: float, scale: tuple[float, float]) -> str:
    low, high = scale
    if math.isnan(share):
        return ""
    reach = 0.0 if share <= 0 else min(1.0, max(0.0, (math.log10(share) - low) / (high - low)))
    whole, eighths = divmod(round(reach * BAR * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def _summary(flow: GradientFlow) -> list[str]:
    """A line for each kind of what is conspicuous: how many layers, and which of them is the nearest to the score."""
    lines = [
        click.style(
            f"  {verdict}: {_list(it.name or it.type for it in flow.layers if it.verdict == verdict)}", fg=colour
        )
        for verdict, colour in COLOURS.items()
        if any(it.verdict == verdict for it in flow.layers)
    ]
    return lines or ["  Nothing vanishes or explodes."]


def _list(names: Iterable[str]) -> str:
    *others, nearest = names
    if not others:
        return f"{nearest} alone"
    return f"{len(others) + 1} layers; nearest to the score {nearest}, furthest {others[0]}"


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
            from gradcam.images.read import write_image
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
        from gradcam.inspection.flow import gradients
        from gradcam.models.device import find_input_dtype
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
