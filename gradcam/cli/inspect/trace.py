"""`gradcam inspect trace`: list every module call of one forward pass."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import check_model_name, load_model, print_notes
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.cli._terminal import (
    align,
    custom_code_context,
    find_fitting_depth,
    format_shape,
    import_torch,
    shorten_name,
)
from gradcam.errors import GradcamError, LayerError, describe_failure, escape_controls, join_names
from gradcam.renames import TRACE, add_old_keys
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradcam.inspection.tracing import Call, Trace

MAX_TYPE = 20  # characters of a type; layer names are never shortened, because users copy them
MAX_SHARED = 5  # largest number of lines about modules and parameters that have several names
LEFT_ALIGNED = ("layer", "type", "input", "output", "dtype")  # the other columns are numbers
OPTIONAL_COLUMNS = ("input", "share", "memory", "type", "parameters")  # A narrow terminal hides these.
WIDTH = 120  # characters, if the terminal's width is unknown
IMAGE_OPTIONS = ("labels", "mean", "std", "crop", "reader", "reshape")  # These options need an image.
UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def format_trace(trace: Trace, calls: Sequence[Call], name: str, source: str, width: int) -> str:
    """Format the totals, the table of calls, and the shared modules and parameters.

    `name` is the model's name. `source` describes the input. `width` is the width of the terminal in characters.
    """
    model_call = trace.calls[0]
    model = click.style(escape_controls(name), bold=True)
    shape = " x ".join(map(str, model_call.inputs[0]))
    times = [] if trace.seconds is None else [f"{1000 * trace.seconds:.1f} ms"]
    cost = "unknown" if trace.multiply_adds is None else format_number(trace.multiply_adds).rstrip()
    totals = [f"{trace.parameters:,} parameters", f"{cost} multiply-adds"]
    totals += [f"{format_number(trace.activation_bytes)}B of activations", *times]
    rows = [call for call in calls if call.depth] or list(calls)
    table, hidden = _table(trace, rows, width)
    title = [f"{model} on {trace.device}", shape, escape_controls(source)]
    lines = ["   ".join(title), "   ".join(totals), "", *table, "", *_describe_shared(rows)]
    inner_calls = len(trace.calls) - 1
    if len(rows) < inner_calls:
        lines.append(
            f"{len(rows)} of {inner_calls} calls are listed. Use --depth N, --all or --layer PATTERN for more."
        )
    if hidden:
        lines.append(f"Hidden columns: {', '.join(hidden)}. Widen the terminal, or use --json.")
    return "\n".join(lines).rstrip("\n")


def format_number(number: int) -> str:
    """Format a number with three digits and a unit prefix, such as "118 M". A unit such as "B" may follow."""
    for size, unit in UNITS:
        if number >= size * 0.9995:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{number} "


def _table(trace: Trace, calls: Sequence[Call], width: int) -> tuple[list[str], list[str]]:
    columns, hidden = _columns(trace, calls), []
    for title in OPTIONAL_COLUMNS:
        widths = {title: max(len(title), *map(len, cells)) for title, cells in columns.items()}
        if sum(widths.values()) + 2 * len(widths) <= width:
            break
        if columns.pop(title, None) is not None:
            hidden.append(title)
    right = [i for i, title in enumerate(columns) if title not in LEFT_ALIGNED]
    rows = [*zip(*([title, *cells] for title, cells in columns.items()))]
    return [f"  {line}" for line in align(rows, "  ", right)], hidden


def _columns(trace: Trace, calls: Sequence[Call]) -> dict[str, list[str]]:
    counts = Counter(dtype for call in trace.calls for dtype in call.dtypes)
    common_dtype = max(counts, key=counts.__getitem__, default="")
    times = [call.seconds for call in calls]
    columns = {
        "layer": [escape_controls(call.name) or "(the model)" for call in calls],
        "run": [f"{call.run} of {call.runs}" if call.runs > 1 else "" for call in calls],
        "type": [shorten_name(call.type, MAX_TYPE) for call in calls],
        "input": [_shapes(call.inputs) for call in calls],
        "output": [_shapes(call.outputs) for call in calls],
        "dtype": [", ".join(dict.fromkeys(dtype for dtype in call.dtypes if dtype != common_dtype)) for call in calls],
        "parameters": [_number(call.parameters) for call in calls],
        "mult-adds": [_number(call.multiply_adds) for call in calls],
        "memory": [_number(call.activation_bytes, "B") for call in calls],
        "ms": ["" if t is None else f"{1000 * t:.{2 if t < 0.01 else 1 if t < 1 else 0}f}" for t in times],
        "share": [f"{100 * t / trace.seconds:.0f} %" if t is not None and trace.seconds else "" for t in times],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return format_shape(shapes[0]) + more if shapes else "-"


def _number(number: int | None, unit: str = "") -> str:
    return "?" if number is None else f"{format_number(number)}{unit}".rstrip() if number else "-"


def _describe_shared(calls: Sequence[Call]) -> list[str]:
    first_runs = [call for call in calls if call.run == 1]
    shared = {call.name: ", ".join(call.other_names) for call in first_runs if call.other_names}
    lines = [f"{name} is the same module as {other_names}." for name, other_names in shared.items()]
    lines += [f"Parameters of {call.name} are also called {', '.join(call.tied)}." for call in first_runs if call.tied]
    more = f"{len(lines) - MAX_SHARED} more layers share a module or a parameter (use --json to list them)."
    return [*lines[:MAX_SHARED], more] if len(lines) > MAX_SHARED else lines


@dataclass(frozen=True)
class _TraceInput:
    name: str
    model: nn.Module
    images: Tensor
    source: str


@click.command("trace", cls=Command)
@click.argument("image", required=False, type=click.Path(path_type=Path), metavar="[IMAGE]")
@options.model
@options.layers("Layers to list", default="all")
@options.number("--depth", "Largest nesting depth of the listed calls.")
@click.option("--all", "show_all", is_flag=True, help="Print all calls.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record per call, and nothing else.")
def trace_command(
    image: Path | None, *, layers: tuple[str, ...], depth: int | None, show_all: bool, as_json: bool, **params: Any
) -> int:
    """List every layer call with its shapes, cost, memory and time.

    Without IMAGE, the input is noise. If --weights is also missing, the weights are random and nothing is downloaded.
    The parameters, multiply-adds, memory and time of a layer include its submodules. Memory counts only newly allocated
    outputs, so in-place operations add no memory. By default, the table shows only as many levels of submodules as fit
    on a screen. To see other levels, give --layer, --depth or --all.
    """
    if show_all and depth is not None:
        raise click.UsageError("Give either --all or --depth, not both.")
    choice = to_model_choice(params)
    check_model_name(choice.model)
    unfit = [name for name in IMAGE_OPTIONS if params[name] is not None]
    if image is None and choice.weights is None and unfit:
        raise click.UsageError(f"--{unfit[0]} needs an image: give an IMAGE, or remove --{unfit[0]}.")
    subject = _build_with_noise(choice) if image is None and choice.weights is None else _load(choice, image)
    from gradcam.inspection.selection import select_layers

    layer_names = set(select_layers(subject.model, layers)) if layers else None
    with custom_code_context(choice.model, choice.reader):
        result = _trace(subject)
    print_notes(result.notes, OutputMode(as_json, quiet=False))
    calls = _select_calls(result, layer_names, depth, show_all=show_all or as_json)
    if as_json:
        for call in calls:
            record = {"schema": SCHEMA, "model": subject.name, "device": result.device, **asdict(call)}
            click.echo(json.dumps(add_old_keys(TRACE, record), allow_nan=False))
    else:
        width = shutil.get_terminal_size((WIDTH, 0)).columns
        click.echo(format_trace(result, calls, subject.name, subject.source, width))
    return 0


def _build_with_noise(choice: ModelChoice) -> _TraceInput:
    import_torch()
    from gradcam.layers.find import unwrap
    from gradcam.models.device import place_model
    from gradcam.models.providers import DEFAULT_MODEL
    from gradcam.models.skeletons import build_with_random_weights

    name = choice.model or DEFAULT_MODEL
    size = (choice.size, choice.size) if isinstance(choice.size, int) else choice.size
    with custom_code_context(name):
        skeleton = build_with_random_weights(name, size=size)
        model = place_model(unwrap(skeleton.model), choice.device, choice.precision)
    images = _make_noise(model, (skeleton.channels, *skeleton.size))
    return _TraceInput(name, model, images, "noise, random weights")


def _load(choice: ModelChoice, image: Path | None) -> _TraceInput:
    """Load the model and read the image. Exit with status 1 if the image cannot be read."""
    from gradcam.layers.find import unwrap
    from gradcam.models.device import find_input_device, find_input_dtype
    from gradcam.models.probe import make_noise

    classifier = load_model(choice)
    print_notes(classifier.notes, OutputMode(as_json=False, quiet=False))
    model = unwrap(classifier.model)
    if image is None:
        return _TraceInput(classifier.name, model, make_noise(classifier.preprocess, model), "noise")
    try:
        with custom_code_context(choice.reader):
            images = classifier.prepare(image).image[None]
    except Exception as error:  # A custom reader may raise anything.
        click.echo(describe_failure(str(image), error), err=True)
        raise click.exceptions.Exit(1) from error
    return _TraceInput(classifier.name, model, images.to(find_input_device(model), find_input_dtype(model)), image.name)


def _trace(subject: _TraceInput) -> Trace:
    """Trace the model. If it fails on noise, retry with the number of input channels of its first convolution."""
    from gradcam.inspection.tracing import trace
    from gradcam.models.device import first_channels
    from gradcam.models.skeletons import to_run_error

    try:
        return trace(subject.model, subject.images)
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:  # A model may raise anything.
        channels = first_channels(subject.model)
        if subject.source.startswith("noise") and channels not in (0, subject.images.shape[1]):
            images = _make_noise(subject.model, (channels, *subject.images.shape[2:]))
            return _trace(replace(subject, images=images))
        raise to_run_error(subject.name, subject.images.shape[1:], error) from error


def _make_noise(model: nn.Module, shape: Sequence[int]) -> Tensor:
    import torch

    from gradcam.models.device import find_input_device, find_input_dtype

    noise = torch.randn(1, *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return noise.to(find_input_device(model), find_input_dtype(model))


def _select_calls(trace: Trace, names: set[str] | None, depth: int | None, *, show_all: bool) -> list[Call]:
    calls = list(trace.calls)
    if names is not None:
        calls = [call for call in calls if names & {call.name, *call.other_names}]
        if not calls:
            problem = f"Layer {join_names(sorted(names)[:3])} is not called in evaluation mode"
            raise LayerError(f"{problem}. Choose a different layer with --layer.")
    elif depth is None and not show_all:
        depth = find_fitting_depth([call.depth for call in calls if call.depth])
    return [call for call in calls if depth is None or call.depth <= depth]
