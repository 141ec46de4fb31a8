"""`gradcam inspect activations`: draw the feature maps of a layer, channel by channel."""

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
from gradcam.cli._settings import OutputLocation, OutputMode, find_destination, to_model_choice
from gradcam.cli._terminal import format_written_path, import_torch
from gradcam.cli.inspect import InspectOutcome
from gradcam.errors import escape_controls
from gradcam.images.files import MAX_NAME_PART_BYTES, OutputNames, join_name, truncate_bytes
from gradcam.options import CHANNEL_ORDERS, CHANNEL_SCALES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from gradcam.models.classifier import Classifier

MAX_LISTED_CHANNELS = 5  # per layer


@dataclass(frozen=True)
class LayerDrawing:
    """The drawn channels of a layer.

    `dead`: the number of channels that are zero everywhere. `shown`: the numbers and strengths of the drawn channels,
    in the order of drawing.
    """

    layer: str
    channels: int
    grid: tuple[int, int]
    dead: int
    shown: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class ActivationsOutcome(InspectOutcome):
    """The result for one image: a file with the drawings of some layers, or an error."""

    file: str | None = None
    rows: Sequence[LayerDrawing] = ()

    def to_fields(self) -> dict[str, Any]:
        drawn = ([{"channel": i, "strength": value} for i, value in row.shown] for row in self.rows)
        return {
            "file": self.file,
            "layers": [asdict(row) | {"shown": channels} for row, channels in zip(self.rows, drawn)],
        }

    def format(self) -> str:
        cells = [_to_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  " + "   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([self.to_title(), "", *lines, format_written_path(self.file or ""), ""])


def _to_cells(row: LayerDrawing) -> tuple[str, str, str]:
    height, width = row.grid
    shape = f"{row.channels} channel{'' if row.channels == 1 else 's'} of {height} x {width}"
    dead = f", {row.dead} dead" if row.dead else ""
    listed = ", ".join(str(channel) for channel, _ in row.shown[:MAX_LISTED_CHANNELS])
    more = ", ..." if len(row.shown) > MAX_LISTED_CHANNELS else ""
    return escape_controls(row.layer), shape + dead, f"{len(row.shown)} drawn: {listed}{more}"


@dataclass(frozen=True)
class _DrawJob:
    classifier: Classifier
    layers: Sequence[str]
    reshape: str | tuple[int, ...] | None
    draw_options: dict[str, Any]  # keyword arguments of `draw_activations`
    destination: OutputLocation
    names: OutputNames
    suffix: str


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
def activations_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Draw the feature maps of a layer, channel by channel.

    Each cell shows the feature map of one channel, with the channel's number and mean absolute activation. In layers with
    negative values, zero is black, positive values have warm colours, and negative values have cold colours. The drawing of
    each image is written to <image>-activations.png.
    """
    output = OutputMode(as_json, quiet)
    job = _prepare(images, output, params)
    name = job.classifier.name
    return process_images(
        images, partial(_draw, job), lambda image, error: ActivationsOutcome(image, name, error=error), output
    )


def _prepare(images: Sequence[Path], output: OutputMode, params: dict[str, Any]) -> _DrawJob:
    import_torch()
    from gradcam.images.draw import find_colormap
    from gradcam.inspection.selection import is_pattern, select_layers

    draw_options = {name: params[name] for name in ("channels", "columns", "order", "scale", "colormap")}
    draw_options["size"] = params["cell"]
    find_colormap(draw_options["colormap"])
    destination = find_destination(params["output"], images, len(images))
    layer_name = next((name for name in params["layers"] if not is_pattern(name)), None)
    choice = to_model_choice(params)
    classifier = load_model(choice, layer=layer_name)
    layers = params["layers"] or (classifier.layer,)
    select_layers(classifier.model, layers)
    print_notes(classifier.notes, output)
    names = OutputNames(destination.folder, images)
    return _DrawJob(classifier, layers, params["reshape"], draw_options, destination, names, choice.suffix)


def _draw(job: _DrawJob, image: Path) -> ActivationsOutcome:
    from gradcam.images.read import crop
    from gradcam.images.write import write_image
    from gradcam.inspection.channels import activations
    from gradcam.inspection.sheets import draw_activations
    from gradcam.models.preprocess import find_canvas

    start, classifier = time.perf_counter(), job.classifier
    prepared = classifier.prepare(image)
    reading = prepared.reading
    size: tuple[int, ...] = reading.picture.shape[:2]
    feature_maps = activations(classifier.model, classifier.batch([reading.values]), job.layers, reshape=job.reshape)
    title = f"{truncate_bytes(escape_controls(image.name), MAX_NAME_PART_BYTES)}, as seen by {classifier.name}"
    image_pixels = crop(reading.picture, find_canvas(classifier.preprocess, prepared))
    sheet = draw_activations(feature_maps, input_image=image_pixels, title=title, **job.draw_options)
    make_folder(job.destination.folder)
    path = job.destination.file or job.names.claim([join_name(image.stem, f"-activations{job.suffix}")])[0]
    write_image(path, sheet)
    rows = [_to_row(name, grid, job.draw_options) for name, grid in feature_maps.items()]
    seconds = time.perf_counter() - start
    return ActivationsOutcome(
        str(image), classifier.name, str(classifier.device), size, seconds, file=str(path), rows=rows
    )


def _to_row(name: str, feature_maps: Tensor, draw_options: dict[str, Any]) -> LayerDrawing:
    from gradcam.inspection.channels import measure_strengths, order_channels, take_maps

    channel_maps = take_maps(feature_maps, 0, name)
    strengths: np.ndarray[Any, Any] = measure_strengths(channel_maps)
    drawn = order_channels(strengths, draw_options["order"])[: draw_options["channels"]]
    count, height, width = channel_maps.shape
    dead = int((~channel_maps.any(axis=(1, 2))).sum())
    return LayerDrawing(name, count, (height, width), dead, [(channel, float(strengths[channel])) for channel in drawn])
