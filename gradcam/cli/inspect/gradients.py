"""`gradcam inspect gradients`: show the gradient of a class score at every layer, as a table and a plot."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import (
    ImageResult,
    OutputLocation,
    find_destination,
    find_suffix,
    load_model,
    print_notes,
    process_images,
    write_file,
)
from gradcam.cli._settings import OutputMode, to_model_choice
from gradcam.cli._terminal import draw_bar, format_title, format_written_path, import_torch
from gradcam.errors import GradcamError, escape_controls, to_pip_command
from gradcam.models.labels import name_class

if TYPE_CHECKING:
    from gradcam.inspection.flow import GradientFlow, LayerGradients

MAX_ROWS = 40  # number of layers in the table without --layer and --all
BAR_LENGTH = 12  # characters
MIN_DECADES = 4  # The bars cover at least 10**-4 to 10**4 times the reference, so that small differences look small.
MAX_NAME = 26  # in characters, so that a line has at most 80; longer names are cut at the start
COLOURS = {"vanishing": "blue", "exploding": "yellow", "no gradient": "magenta", "NaN": "red", "infinite": "red"}
TITLES = ("layer", "output", "", "params", "zeros", "")


def _to_fields(flow: GradientFlow) -> dict[str, Any]:
    layers = [asdict(layer) for layer in flow.layers]
    for layer, record in zip(flow.layers, layers):
        record["parameters"] = [asdict(parameter) | {"ratio": parameter.ratio} for parameter in layer.parameters]
    return {"reference": flow.reference, "layers": layers}


def _format(title: str, flow: GradientFlow, plot: str | None, *, show_all: bool) -> str:
    """Format the title, the table of layers, a line for each verdict, and the path of the plot."""
    rows = flow.layers if show_all else _select_layers(flow.layers)
    lines = [title, "", *_table(rows, flow), ""]
    if len(rows) < len(flow.layers):
        lines.append(f"  {len(rows)} of {len(flow.layers)} layers are listed. Use --all or --layer PATTERN for more.")
    names: dict[str, list[str]] = {verdict: [] for verdict in COLOURS}
    for layer in flow.layers:
        if layer.verdict is not None:
            names[layer.verdict].append(layer.name or layer.type)
    summaries = {verdict: _summarise_names(layers) for verdict, layers in names.items() if layers}
    lines += [click.style(f"  {verdict}: {text}", fg=COLOURS[verdict]) for verdict, text in summaries.items()]
    lines += [] if summaries else ["  No gradient vanishes or explodes."]
    return "\n".join([*lines, *([] if plot is None else [format_written_path(plot)]), ""])


def _select_layers(layers: Sequence[LayerGradients]) -> Sequence[LayerGradients]:
    if len(layers) <= MAX_ROWS:
        return layers
    last_index = len(layers) - 1
    changes = [i for i in range(last_index) if layers[i].verdict != layers[i + 1].verdict]
    selected = {0, last_index, *(i for change in changes for i in (change, change + 1))}
    selected = set(sorted(selected)[-MAX_ROWS:])
    free_rows = range(MAX_ROWS - len(selected))
    selected |= {round((step + 1) * last_index / (len(free_rows) + 1)) for step in free_rows}
    return [layers[i] for i in sorted(selected)]


def _table(rows: Sequence[LayerGradients], flow: GradientFlow) -> list[str]:
    scale = _scale(flow)
    cells = [TITLES, *(_cells(row, flow.reference, scale) for row in rows)]
    name = max(len(cell[0]) for cell in cells)
    lines = [
        f"  {cell[0]:<{name}}  {cell[1]:>7}  {cell[2]:<{BAR_LENGTH}}  {cell[3]:>7}  {cell[4]:>5}  {cell[5]}".rstrip()
        for cell in cells
    ]
    coloured = (click.style(line, fg=COLOURS.get(row.verdict or "")) for row, line in zip(rows, lines[1:]))
    return [click.style(lines[0], dim=True), *coloured]


def _cells(row: LayerGradients, reference: float, scale: tuple[float, float]) -> tuple[str, ...]:
    name = escape_controls(row.name or f"({row.type})")
    output = row.activations
    return (
        name if len(name) <= MAX_NAME else "…" + name[1 - MAX_NAME :],
        "-" if output is None else f"{output.norm:.1e}",
        "" if output is None or not reference else _draw_log_bar(output.norm / reference, scale),
        f"{row.parameters_norm:.1e}" if any(parameter.gradient for parameter in row.parameters) else "-",
        "-" if output is None else f"{math.floor(output.zeros * 100)} %",
        row.verdict or "",
    )


def _scale(flow: GradientFlow) -> tuple[float, float]:
    norms = [layer.activations.norm for layer in flow.layers if layer.activations is not None]
    shares = [norm / flow.reference for norm in norms if flow.reference and 0 < norm < math.inf]
    logs = [math.log10(share) for share in shares if share > 0]
    return min([-MIN_DECADES, *logs]), max([MIN_DECADES, *logs])


def _draw_log_bar(share: float, scale: tuple[float, float]) -> str:
    low, high = scale
    if math.isnan(share):
        return ""
    reach = 0.0 if share <= 0 else min(1.0, max(0.0, (math.log10(share) - low) / (high - low)))
    return draw_bar(reach, BAR_LENGTH)


def _summarise_names(names: Sequence[str]) -> str:
    summary = f"{len(names)} layers; first {names[0]}, last {names[-1]}"
    return summary if len(names) > 1 else f"only {names[0]}"


@click.command("gradients", cls=Command)
@options.images
@options.class_("wanted", "Class name or index.  [default: top class of each image]")
@options.layers("Layers to list", default="all")
@options.model
@options.output_option("Output folder or file for the plot.  [default: the current folder]")
@click.option("--all", "show_all", is_flag=True, help="Print all layers. Without --all, a long table is shortened.")
@options.printing
def gradients_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Show vanishing and exploding gradients, layer by layer.

    The command prints the norm of the class score's gradient at each layer, and draws a plot. A gradient vanishes if
    its norm is below 1/10,000 of the norm at the model's output. A gradient explodes if its norm is above 10,000 times
    the norm at the output. Plots need matplotlib and are written to <image>-gradients.png.
    """
    if params["reshape"] is not None:
        raise click.UsageError("gradcam inspect gradients does not use --reshape: remove --reshape.")
    output_mode = OutputMode(as_json, quiet)
    destination = _find_destination(params["output"], images, output_mode)
    import_torch()
    from gradcam.inspection.flow import gradients
    from gradcam.inspection.plot import draw_gradients
    from gradcam.inspection.selection import select_layers
    from gradcam.models.device import find_input_dtype
    from gradcam.targets.classes import ClassTarget

    choice, layers, class_name = to_model_choice(params), params["layers"], params["wanted"]
    classifier = load_model(choice)
    if layers:
        select_layers(classifier.model, layers)
    target_index = None if class_name is None else classifier.find_class(class_name)
    print_notes(classifier.notes, output_mode)

    def process(image: Path) -> ImageResult:
        start, prepared = time.perf_counter(), classifier.prepare(image)
        values = prepared.image[None].to(classifier.device, find_input_dtype(classifier.model))
        target = ClassTarget(target_index, activation=classifier.activation)
        flow = gradients(classifier.model, values, target=target, layers=layers or None)
        index = 0 if flow.classes is None else int(flow.classes)
        label, score = classifier.label(index), flow.scores.item()
        name, plot = name_class(index, label), None
        if destination is not None:
            title = f"{image.name}: gradient of {name}, score {score:.4g}, in {classifier.name}"
            drawing = draw_gradients(flow, title=escape_controls(title))
            plot = write_file(destination.claim(image, f"-gradients{find_suffix(choice)}"), drawing)
        size, seconds = prepared.reading.picture.shape, time.perf_counter() - start
        title = format_title(str(image), size, classifier.name, classifier.device, seconds)
        title += f"\nnorms of the gradient of {escape_controls(name)} ({index}), score {score:.4g}"
        fields = {"index": index, "label": label, "score": score, "plot": plot, **_to_fields(flow)}
        return fields, partial(_format, title, flow, plot, show_all=params["show_all"] or bool(layers))

    empty = dict.fromkeys(("index", "label", "score", "plot", "reference")) | {"layers": []}
    return process_images(images, process, output_mode, classifier.name, empty)


def _find_destination(output: str | None, images: tuple[Path, ...], output_mode: OutputMode) -> OutputLocation | None:
    """Return the location of plots. Without matplotlib, return None, or raise `GradcamError` if --output is given."""
    if importlib.util.find_spec("matplotlib") is None:
        if output is not None:
            raise GradcamError(f"--output writes plots, which need matplotlib: {to_pip_command('plots')}")
        print_notes([f"plots need matplotlib: {to_pip_command('plots')}"], output_mode)
        return None
    return find_destination(output or ".", images, len(images))
