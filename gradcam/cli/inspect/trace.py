"""`gradcam inspect trace`: every call of a model's modules in one forward pass."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import check_model_name, load_model, print_notes
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.cli._terminal import custom_code_context, shorten_name, find_fitting_depth, import_torch, format_shape
from gradcam.errors import GradcamError, LayerError, describe_failure, join_names, printable
from gradcam.renames import TRACE, add_old_keys
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradcam.inspection.tracing import Call, Trace

LONGEST_TYPE = 20  # characters; names of layers are never shortened, for they are there to be copied
MOST_SHARED = 5  # lines about modules and parameters that have several names
LEFT = ("layer", "type", "input", "output", "dtype")  # the rest are numbers, which end in one column
TO_SPARE = ("input", "share", "memory", "type", "parameters")  # what a narrow terminal goes without, first to last
WIDTH = 120  # characters, where there is no terminal
OF_PICTURES = ("labels", "mean", "std", "crop", "reader", "reshape")  # options without a meaning for noise
UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def format_trace(trace: Trace, calls: Sequence[Call], name: str, what: str, width: int) -> str:
    """Several lines, at most `width` characters each if that can be had: the totals, the calls, what they share.
    `name`: the model's. `what`: what it ran on, in words."""
    whole = trace.calls[0]
    model = click.style(printable(name), bold=True)
    shape = " x ".join(map(str, whole.inputs[0]))
    times = [] if trace.seconds is None else [f"{1000 * trace.seconds:.1f} ms"]
    cost = "unknown" if trace.multiply_adds is None else human(trace.multiply_adds).rstrip()
    totals = [f"{trace.parameters:,} parameters", f"{cost} multiply-adds"]
    totals += [f"{human(trace.activation_bytes)}B of activations", *times]
    rows = [call for call in calls if call.depth] or list(calls)
    table, spared = _table(trace, rows, width)
    title = [f"{model} on {trace.device}", shape, printable(what)]
    lines = ["   ".join(title), "   ".join(totals), "", *table, "", *_shared(rows)]
    inner = len(trace.calls) - 1
    if len(rows) < inner:
        lines.append(f"{len(rows)} of {inner} calls are listed. Use --depth N, --all or --layer PATTERN for more.")
    if spared:
        lines.append(f"Hidden columns: {', '.join(spared)}. Widen the terminal, or use --json.")
    return "\n".join(lines).rstrip("\n")


def human(number: int) -> str:
    """Three digits and a unit: 118 M; what follows may be "B"."""
    for size, unit in UNITS:
        if number >= size * 0.9995:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{number} "


def _table(trace: Trace, calls: Sequence[Call], width: int) -> tuple[list[str], list[str]]:
    columns, spared = _columns(trace, calls), []
    for title in TO_SPARE:
        widths = {title: max(len(title), *map(len, cells)) for title, cells in columns.items()}
        if sum(widths.values()) + 2 * len(widths) <= width:
            break
        if columns.pop(title, None) is not None:
            spared.append(title)
    signs = {title: f"{'<' if title in LEFT else '>'}{widths[title]}" for title in columns}
    rows = zip(*([f"{cell:{signs[title]}}" for cell in (title, *cells)] for title, cells in columns.items()))
    return ["  ".join(["", *row]).rstrip() for row in rows], spared


def _columns(trace: Trace, calls: Sequence[Call]) -> dict[str, list[str]]:
    counts = Counter(dtype for call in trace.calls for dtype in call.dtypes)
    usual = max(counts, key=counts.__getitem__, default="")
    times = [call.seconds for call in calls]
    columns = {
        "layer": [printable(call.name) or "(the model)" for call in calls],
        "run": [f"{call.run} of {call.runs}" if call.runs > 1 else "" for call in calls],
        "type": [shorten_name(call.type, LONGEST_TYPE) for call in calls],
        "input": [_shapes(call.inputs) for call in calls],
        "output": [_shapes(call.outputs) for call in calls],
        "dtype": [", ".join(dict.fromkeys(it for it in call.dtypes if it != usual)) for call in calls],
        "parameters": [_number(call.parameters) for call in calls],
        "mult-adds": [_number(call.multiply_adds) for call in calls],
        "memory": [_number(call.activation_bytes, "B") for call in calls],
        "ms": ["" if it is None else f"{1000 * it:.{2 if it < 0.01 else 1 if it < 1 else 0}f}" for it in times],
        "share": [f"{100 * it / trace.seconds:.0f} %" if it is not None and trace.seconds else "" for it in times],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return format_shape(shapes[0]) + more if shapes else "-"


def _number(number: int | None, unit: str = "") -> str:
    return "?" if number is None else f"{human(number)}{unit}".rstrip() if number else "-"


def _shared(calls: Sequence[Call]) -> list[str]:
    first_runs = [call for call in calls if call.run == 1]
    lines = [
        f"{call.name} is the same module as {', '.join(call.other_names)}." for call in first_runs if call.other_names
    ]
    lines += [f"{call.name} shares a parameter: {', '.join(call.tied)}." for call in first_runs if call.tied]
    more = (
        [f"{len(lines) - MOST_SHARED} more are shared (use --json to list them)."] if len(lines) > MOST_SHARED else []
    )
    return [*lines[:MOST_SHARED], *more]


@dataclass(frozen=True)
class _Subject:
    name: str
    model: nn.Module
    images: Tensor
    what: str


@click.command("trace", cls=Command)
@click.argument("image", required=False, type=click.Path(path_type=Path), metavar="[IMAGE]")
@options.model
@options.layers("Layers to list", default="all")
@options.number("--depth", "Largest nesting depth of the listed calls.")
@click.option("--all", "show_all", is_flag=True, help="Print all calls.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record per call, and nothing else.")
def trace_command(
    image: Path | None, *, layers: tuple[str, ...], depth: int | None, show_all: bool, as_json: bool, **chosen: Any
) -> int:
    """List every layer call with its shapes, cost, memory and time.

    Without IMAGE, the input is noise. If --weights is also missing, the weights are random and nothing is downloaded. The
    parameters, multiply-adds, memory and time of a layer include its submodules. Memory counts only newly allocated
    outputs: in-place operations add nothing. Without --layer, --depth and --all, the table shows only as many levels of
    submodules as fit on the screen.
    """
    if show_all and depth is not None:
        raise click.UsageError("Give either --all or --depth, not both.")
    choice = to_model_choice(chosen)
    check_model_name(choice.model)
    given = [name for name in OF_PICTURES if chosen[name] is not None]
    if image is None and choice.weights is None and given:
        raise click.UsageError(f"--{given[0]} needs an image: give an IMAGE, or remove --{given[0]}.")
    try:
        subject = _make_up(choice) if image is None and choice.weights is None else _load(choice, image)
    except _PictureError as error:
        click.echo(str(error), err=True)
        return 1
    from gradcam.inspection.selection import select_layers

    wanted = set(select_layers(subject.model, layers)) if layers else None
    with custom_code_context(choice.model, choice.reader):
        subject, found = _trace(subject)
    print_notes(found.notes, OutputMode(as_json, quiet=False))
    calls = _choose(found, wanted, depth, show_all=show_all or as_json)
    if as_json:
        for call in calls:
            record = {"schema": SCHEMA, "model": subject.name, "device": found.device, **asdict(call)}
            click.echo(json.dumps(add_old_keys(TRACE, record), allow_nan=False))
    else:
        width = shutil.get_terminal_size((WIDTH, 0)).columns
        click.echo(format_trace(found, calls, subject.name, subject.what, width))
    return 0


class _PictureError(GradcamError):
    """The picture could not be read, as a line that names it."""


def _make_up(choice: ModelChoice) -> _Subject:
    import_torch()
    from gradcam.layers.find import unwrap
    from gradcam.models.device import place
    from gradcam.models.providers import DEFAULT
    from gradcam.models.skeletons import build_with_random_weights

    name = choice.model or DEFAULT
    size = (choice.size, choice.size) if isinstance(choice.size, int) else choice.size
    with custom_code_context(name):
        skeleton = build_with_random_weights(name, size=size)
        model = place(unwrap(skeleton.model), choice.device, choice.precision)
    images = _noise(model, (skeleton.channels, *skeleton.size))
    return _Subject(name, model, images, "noise, random weights")


def _load(choice: ModelChoice, image: Path | None) -> _Subject:
    from gradcam.layers.find import unwrap
    from gradcam.models.device import find_input_device, find_input_dtype
    from gradcam.models.probe import make_noise

    classifier = load_model(choice)
    print_notes(classifier.notes, OutputMode(as_json=False, quiet=False))
    model = unwrap(classifier.model)
    if image is None:
        return _Subject(classifier.name, model, make_noise(classifier.preprocess, model), "noise")
    try:
        with custom_code_context(choice.reader):
            picture = classifier.prepare(image).image[None]
    except Exception as error:  # whatever a reader of the user's raises
        raise _PictureError(describe_failure(str(image), error)) from error
    return _Subject(classifier.name, model, picture.to(find_input_device(model), find_input_dtype(model)), image.name)


def _trace(subject: _Subject) -> tuple[_Subject, Trace]:
    """With as many channels of noise as the first convolution takes, where the model does not take the usual ones."""
    from dataclasses import replace

    from gradcam.inspection.tracing import trace
    from gradcam.models.device import first_channels
    from gradcam.models.skeletons import does_not_run

    try:
        return subject, trace(subject.model, subject.images)
    except GradcamError:
        raise
    except (Exception, SystemExit) as error:  # whatever a model raises
        channels = first_channels(subject.model)
        is_noise = subject.what.startswith("noise")
        if is_noise and channels not in (0, subject.images.shape[1]):
            images = _noise(subject.model, (channels, *subject.images.shape[2:]))
            return _trace(replace(subject, images=images))
        raise does_not_run(subject.name, subject.images.shape[1:], error) from error


def _noise(model: nn.Module, shape: Sequence[int]) -> Tensor:
    import torch

    from gradcam.models.device import find_input_device, find_input_dtype

    noise = torch.randn(1, *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return noise.to(find_input_device(model), find_input_dtype(model))


def _choose(trace: Trace, wanted: set[str] | None, depth: int | None, *, show_all: bool) -> list[Call]:
    calls = list(trace.calls)
    if wanted is not None:
        calls = [call for call in calls if wanted & {call.name, *call.other_names}]
        if not calls:
            raise LayerError(
                f"Layer {join_names(sorted(wanted)[:3])} is not called in evaluation mode. Choose a different layer with "
                "--layer."
            )
    elif depth is None and not show_all:
        depth = find_fitting_depth([call.depth for call in calls if call.depth])
    return [call for call in calls if depth is None or call.depth <= depth]
