"""`gradcam inspect activations`: what the channels of layers give for a picture, side by side."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_colormaps
from gradcam.cli._job import load_model, make_folder, say, tell_each
from gradcam.cli._settings import Destination, Output, find_destination, to_model_choice
from gradcam.cli._terminal import import_torch
from gradcam.errors import printable
from gradcam.images.files import LONGEST_PART, OutputNames, cut, join_name
from gradcam.options import CHANNEL_ORDERS, CHANNEL_SCALES
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from gradcam.images.read import Pixels
    from gradcam.models.classifier import Classifier


NAMED = 5  # channels of each layer


@dataclass(frozen=True)
class Row:
    """One layer: how many channels on which grid, how many of them are zero everywhere, and those that are drawn.

    `shown`: number and strength of each, in the order in which they are drawn.
    """

    layer: str
    channels: int
    grid: tuple[int, int]
    dead: int
    shown: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Outcome:
    """What became of one picture: a file with these layers, or an error. `size`: the picture's (height, width)."""

    image: str
    model: str
    device: str = ""
    size: tuple[int, int] = (0, 0)
    file: str | None = None
    rows: Sequence[Row] = ()
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON; a strength that is no finite number is null."""
        record = {
            "schema": SCHEMA,
            "image": self.image,
            "status": "ok" if self.error is None else "failed",
            "error": self.error,
            "model": self.model,
            "file": self.file,
            "layers": [_to_entry(row) for row in self.rows],
        }
        return json.dumps(record, allow_nan=False)

    def format(self) -> str:
        """Several lines: what it is, what each layer gives, and the file."""
        height, width = self.size
        name = click.style(printable(self.image.replace("\\", "/").rpartition("/")[2]), bold=True)
        title = [name, f"{width} x {height}", f"{self.model} on {self.device}", f"{self.seconds:.1f} s"]
        cells = [_to_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  " + "   ".join(f"{it:<{width}}" for it, width in zip(each, widths)).rstrip() for each in cells]
        file = f"  →  {click.style(printable(self.file or ''), fg='green')}"
        return "\n".join(["   ".join(title), "", *lines, file, ""])


def _to_entry(row: Row) -> dict[str, Any]:
    shown = [{"channel": it, "strength": value if math.isfinite(value) else None} for it, value in row.shown]
    return {"layer": row.layer, "channels": row.channels, "grid": row.grid, "dead": row.dead, "shown": shown}


def _to_cells(row: Row) -> tuple[str, str, str]:
    height, width = row.grid
    shape = f"{row.channels} channel{'' if row.channels == 1 else 's'} of {height} x {width}"
    dead = f", {row.dead} dead" if row.dead else ""
    first = ", ".join(str(channel) for channel, _ in row.shown[:NAMED])
    return (
        printable(row.layer),
        shape + dead,
        f"{len(row.shown)} drawn: {first}{', ...' if len(row.shown) > NAMED else ''}",
    )


@dataclass(frozen=True)
class _Look:
    """How the maps are drawn, as typed."""

    channels: int
    columns: int
    order: str
    scale: str
    cell: int
    colormap: str


@dataclass(frozen=True)
class _Job:
    """What is done with each picture."""

    classifier: Classifier
    layers: Sequence[str]
    reshape: str | tuple[int, ...] | None
    look: _Look
    destination: Destination
    names: OutputNames
    ending: str


@click.command("activations", cls=Command, short_help="Draw what the channels of layers give for pictures.")
@options.pictures
@options.layers("Layers to look at", default="the one that is explained")
@click.option(
    "--channels",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Channels of each layer, at most.",
)
@click.option(
    "--columns", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Cells in a row."
)
@click.option(
    "--order",
    type=click.Choice(list(CHANNEL_ORDERS)),
    default="strongest",
    show_default=True,
    help="The strongest first, or as they are in the layer.",
)
@click.option(
    "--scale",
    type=click.Choice(list(CHANNEL_SCALES)),
    default="channel",
    show_default=True,
    help="Whose largest value the colours end at: each channel's own, or the layer's.",
)
@click.option(
    "--cell", type=click.IntRange(min=1), default=112, show_default=True, metavar="N", help="A cell's pixels."
)
@click.option(
    "--colormap",
    default="inferno",
    show_default=True,
    metavar="NAME",
    help="A colour map of OpenCV, for layers without negative values.",
    shell_complete=complete(list_colormaps),
)
@options.model
@options.output
@options.printing
def activations_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Draw activation maps: a cell for each channel of each layer, with its number and its strength.

    Early layers look like the picture, deep ones are abstract. Where a layer has negative values, zero is black, warm
    colours are above it and cold ones below. Pictures are called <picture>-activations.png.
    """
    output = Output(as_json, quiet)
    job = _prepare(images, output, chosen)
    name = job.classifier.name
    return tell_each(images, partial(_look, job), lambda image, error: Outcome(image, name, error=error), output)


def _prepare(images: Sequence[Path], output: Output, chosen: dict[str, Any]) -> _Job:
    """Load the model and check all that was typed. Raises `GradcamError` and `click.UsageError`."""
    import_torch()
    from gradcam.images.draw import find_colormap
    from gradcam.inspection.selection import is_pattern, select_layers

    look = _Look(**{each.name: chosen[each.name] for each in fields(_Look)})
    find_colormap(look.colormap)
    destination = find_destination(chosen["output"], images, len(images))
    named = next((name for name in chosen["layers"] if not is_pattern(name)), None)
    choice = to_model_choice(chosen)
    classifier = load_model(choice, layer=named)
    layers = chosen["layers"] or (classifier.layer,)
    select_layers(classifier.model, layers)
    say(classifier.notes, output)
    names = OutputNames(destination.folder, images)
    return _Job(classifier, layers, chosen["reshape"], look, destination, names, choice.ending)


def _look(job: _Job, image: Path) -> Outcome:
    """Draw one picture's maps."""
    start = time.perf_counter()
    size, path, rows = _draw(job, image)
    return Outcome(
        image=str(image),
        model=job.classifier.name,
        device=str(job.classifier.device),
        size=size,
        file=str(path),
        rows=rows,
        seconds=time.perf_counter() - start,
    )


def _draw(job: _Job, image: Path) -> tuple[tuple[int, int], Path, list[Row]]:
    """The size of the picture, the file that was written, and what is in it."""
    from gradcam.images.read import write_image
    from gradcam.inspection.channels import activations
    from gradcam.inspection.sheets import draw_activations

    classifier, look = job.classifier, job.look
    reading = classifier.prepare(image).reading
    maps = activations(classifier.model, classifier.batch([reading.values]), job.layers, reshape=job.reshape)
    height, width = reading.picture.shape[:2]
    sheet = draw_activations(
        maps,
        picture=_cut(reading.picture, classifier),
        title=f"{cut(printable(image.name), LONGEST_PART)}, as {classifier.name} saw it",
        channels=look.channels,
        columns=look.columns,
        order=look.order,
        scale=look.scale,
        size=look.cell,
        colormap=look.colormap,
    )
    make_folder(job.destination.folder)
    path = job.destination.file or job.names.claim([join_name(image.stem, f"-activations{job.ending}")])[0]
    write_image(path, sheet)
    return (height, width), path, [_to_row(name, grid, look) for name, grid in maps.items()]


def _cut(picture: Pixels, classifier: Classifier) -> Pixels:
    """What the network saw of it."""
    top, left, height, width = classifier.region(*picture.shape[:2])
    return picture[top : top + height, left : left + width]


def _to_row(name: str, grid: Tensor, look: _Look) -> Row:
    from gradcam.inspection.channels import measure_strengths, order_channels, take_maps

    maps = take_maps(grid, 0, name)
    strengths: np.ndarray[Any, Any] = measure_strengths(maps)
    shown = order_channels(strengths, look.order)[: look.channels]
    count, height, width = maps.shape
    return Row(
        layer=name,
        channels=count,
        grid=(height, width),
        dead=int((~maps.any(axis=(1, 2))).sum()),
        shown=[(channel, float(strengths[channel])) for channel in shown],
    )
