"""`gradcam inspect activations`: what the channels of layers give for a picture, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, make_folder, print_notes, process_images
from gradcam.cli._settings import OutputMode, OutputLocation, find_destination, to_model_choice
from gradcam.cli._terminal import import_torch, format_written_path
from gradcam.cli.inspect import PictureOutcome
from gradcam.errors import printable
from gradcam.images.files import LONGEST_PART, OutputNames, cut, join_name
from gradcam.options import CHANNEL_ORDERS, CHANNEL_SCALES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from gradcam.models.classifier import Classifier

NAMED = 5  # channels of each layer


@dataclass(frozen=True)
class Shown:
    """One layer: how many channels on which grid, how many of them are zero everywhere, and those that are drawn.
    `shown`: number and strength of each, in the order in which they are drawn."""

    layer: str
    channels: int
    grid: tuple[int, int]
    dead: int
    shown: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Drawn(PictureOutcome):
    """What became of one picture: a file with these layers, or an error."""

    file: str | None = None
    rows: Sequence[Shown] = ()

    def to_fields(self) -> dict[str, Any]:
        shown = ([{"channel": it, "strength": value} for it, value in row.shown] for row in self.rows)
        return {"file": self.file, "layers": [asdict(row) | {"shown": those} for row, those in zip(self.rows, shown)]}

    def format(self) -> str:
        cells = [_to_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  " + "   ".join(f"{it:<{width}}" for it, width in zip(each, widths)).rstrip() for each in cells]
        return "\n".join([self.to_title(), "", *lines, format_written_path(self.file or ""), ""])


def _to_cells(row: Shown) -> tuple[str, str, str]:
    height, width = row.grid
    shape = f"{row.channels} channel{'' if row.channels == 1 else 's'} of {height} x {width}"
    dead = f", {row.dead} dead" if row.dead else ""
    first = ", ".join(str(channel) for channel, _ in row.shown[:NAMED])
    more = ", ..." if len(row.shown) > NAMED else ""
    return printable(row.layer), shape + dead, f"{len(row.shown)} drawn: {first}{more}"


@dataclass(frozen=True)
class _Job:
    classifier: Classifier
    layers: Sequence[str]
    reshape: str | tuple[int, ...] | None
    look: dict[str, Any]  # how the maps are drawn, as `draw_activations` has it
    destination: OutputLocation
    names: OutputNames
    ending: str


@click.command("activations", cls=Command)
@options.images
@options.layers("Layers to draw", default="the model's default layer")
@options.number("--channels", "Largest number of channels per layer.", 64)
@options.number("--columns", "Number of cells per row.", 8, maximum=1000)
@options.choice("--order", CHANNEL_ORDERS, "Order of the channels: strongest first, or by index.")
@options.choice("--scale", CHANNEL_SCALES, "Scaling of the colours: for each channel, or for the whole layer.")
@options.number("--cell", "Size of a cell in pixels.", 112, maximum=1024)
@options.colormap("inferno", "OpenCV colour map for layers without negative values.")
@options.model
@options.output
@options.printing
def activations_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Draw the feature maps of a layer, channel by channel.

    Each cell shows the feature map of one channel, with the channel's number and mean absolute activation. In layers with
    negative values, zero is black, positive values have warm colours, and negative values have cold colours. The drawing of
    each image is written to <image>-activations.png.
    """
    output = OutputMode(as_json, quiet)
    job = _prepare(images, output, chosen)
    name = job.classifier.name
    return process_images(images, partial(_look, job), lambda image, error: Drawn(image, name, error=error), output)


def _prepare(images: Sequence[Path], output: OutputMode, chosen: dict[str, Any]) -> _Job:
    import_torch()
    from gradcam.images.draw import find_colormap
    from gradcam.inspection.selection import is_pattern, select_layers

    look = {name: chosen[name] for name in ("channels", "columns", "order", "scale", "colormap")}
    look["size"] = chosen["cell"]
    find_colormap(look["colormap"])
    destination = find_destination(chosen["output"], images, len(images))
    named = next((name for name in chosen["layers"] if not is_pattern(name)), None)
    choice = to_model_choice(chosen)
    classifier = load_model(choice, layer=named)
    layers = chosen["layers"] or (classifier.layer,)
    select_layers(classifier.model, layers)
    print_notes(classifier.notes, output)
    names = OutputNames(destination.folder, images)
    return _Job(classifier, layers, chosen["reshape"], look, destination, names, choice.suffix)


def _look(job: _Job, image: Path) -> Drawn:
    from gradcam.images.read import crop
    from gradcam.images.write import write_image
    from gradcam.inspection.channels import activations
    from gradcam.inspection.sheets import draw_activations
    from gradcam.models.preprocess import find_canvas

    start, classifier = time.perf_counter(), job.classifier
    prepared = classifier.prepare(image)
    reading = prepared.reading
    size: tuple[int, ...] = reading.picture.shape[:2]
    maps = activations(classifier.model, classifier.batch([reading.values]), job.layers, reshape=job.reshape)
    title = f"{cut(printable(image.name), LONGEST_PART)}, as seen by {classifier.name}"
    picture = crop(reading.picture, find_canvas(classifier.preprocess, prepared))
    sheet = draw_activations(maps, input_image=picture, title=title, **job.look)
    make_folder(job.destination.folder)
    path = job.destination.file or job.names.claim([join_name(image.stem, f"-activations{job.ending}")])[0]
    write_image(path, sheet)
    rows = [_to_row(name, grid, job.look) for name, grid in maps.items()]
    seconds = time.perf_counter() - start
    return Drawn(str(image), classifier.name, str(classifier.device), size, seconds, file=str(path), rows=rows)


def _to_row(name: str, grid: Tensor, look: dict[str, Any]) -> Shown:
    from gradcam.inspection.channels import measure_strengths, order_channels, take_maps

    maps = take_maps(grid, 0, name)
    strengths: np.ndarray[Any, Any] = measure_strengths(maps)
    shown = order_channels(strengths, look["order"])[: look["channels"]]
    count, height, width = maps.shape
    dead = int((~maps.any(axis=(1, 2))).sum())
    return Shown(name, count, (height, width), dead, [(channel, float(strengths[channel])) for channel in shown])
