"""`gradcam inspect activations`: draw the feature maps of a layer, channel by channel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import (
    ImageResult,
    find_destination,
    find_suffix,
    load_model,
    print_notes,
    process_images,
    write_file,
)
from gradcam.cli._settings import OutputMode, to_model_choice
from gradcam.cli._terminal import align, format_title, format_written_path, import_torch, plural
from gradcam.errors import escape_controls
from gradcam.images.files import MAX_NAME_PART_BYTES, truncate_bytes
from gradcam.options import CHANNEL_ORDERS, CHANNEL_SCALES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


MAX_LISTED_CHANNELS = 5  # number of printed channels per layer


@click.command("activations", cls=Command)
@options.images
@options.layers("Layers to draw", default="the model's default layer")
@options.number("--channels", "Largest number of channels per layer.", 64)
@options.number("--columns", "Number of cells per row.", 8, maximum=1000)
@options.choice(
    "--order",
    CHANNEL_ORDERS,
    "Order of the channels. strongest: highest mean absolute activation first; index: by number.",
)
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
    import_torch()
    from gradcam.images.draw import find_colormap
    from gradcam.images.read import crop
    from gradcam.inspection.channels import activations
    from gradcam.inspection.selection import is_pattern, select_layers
    from gradcam.inspection.sheets import draw_activations
    from gradcam.models.preprocess import find_canvas

    output, choice, layers = OutputMode(as_json, quiet), to_model_choice(params), params["layers"]
    find_colormap(params["colormap"])
    destination = find_destination(params["output"], images, len(images))
    classifier = load_model(choice, layer=next((name for name in layers if not is_pattern(name)), None))
    layers = layers or (classifier.layer,)
    select_layers(classifier.model, layers)
    print_notes(classifier.notes, output)
    options = {name: params[name] for name in ("channels", "columns", "order", "scale", "colormap")}
    options["size"] = params["cell"]

    def process(image: Path) -> ImageResult:
        start, prepared = time.perf_counter(), classifier.prepare(image)
        reading = prepared.reading
        maps = activations(classifier.model, classifier.batch([reading.values]), layers, reshape=params["reshape"])
        title = f"{truncate_bytes(escape_controls(image.name), MAX_NAME_PART_BYTES)}, as seen by {classifier.name}"
        image_pixels = crop(reading.picture, find_canvas(classifier.preprocess, prepared))
        sheet = draw_activations(maps, input_image=image_pixels, title=title, **options)
        path = write_file(destination.claim(image, f"-activations{find_suffix(choice)}"), sheet)
        rows = [_to_row(name, layer_maps, params) for name, layer_maps in maps.items()]
        size, seconds = reading.picture.shape, time.perf_counter() - start
        title = format_title(str(image), size, classifier.name, classifier.device, seconds)
        return {"file": path, "layers": rows}, partial(_format, title, rows, path)

    return process_images(images, process, output, classifier.name, {"file": None, "layers": []})


def _to_row(name: str, feature_maps: Tensor, params: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's record: the number of channels, the number of dead (all-zero) channels, the drawn channels."""
    from gradcam.inspection.channels import measure_strengths, order_channels, take_maps

    channel_maps = take_maps(feature_maps, 0, name)
    strengths: np.ndarray[Any, Any] = measure_strengths(channel_maps)
    drawn = order_channels(strengths, params["order"])[: params["channels"]]
    channels, *grid = channel_maps.shape
    dead = int((~channel_maps.any(axis=(1, 2))).sum())
    shown = [{"channel": channel, "strength": float(strengths[channel])} for channel in drawn]
    return {"layer": name, "channels": channels, "grid": grid, "dead": dead, "shown": shown}


def _format(title: str, rows: Sequence[dict[str, Any]], file: str) -> str:
    lines = [f"  {line}" for line in align([_to_cells(row) for row in rows])]
    return "\n".join([title, "", *lines, format_written_path(file), ""])


def _to_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    height, width = row["grid"]
    dead = f", {row['dead']} dead" if row["dead"] else ""
    drawn = [str(channel["channel"]) for channel in row["shown"]]
    listed = ", ".join([*drawn[:MAX_LISTED_CHANNELS], *(["..."] if len(drawn) > MAX_LISTED_CHANNELS else [])])
    shape = f"{plural(row['channels'], 'channel')} of {height} x {width}{dead}"
    return escape_controls(row["layer"]), shape, f"{len(drawn)} drawn: {listed}"
