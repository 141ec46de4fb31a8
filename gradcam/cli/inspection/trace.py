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

from gradcam.cli import options
from gradcam.cli.commands import Command
from gradcam.cli.inspection.trace_table import Heading, format_trace
from gradcam.cli.preparation import check_model_name, code_of_the_user, load_model, say
from gradcam.cli.settings import ModelChoice, Output, to_model_choice
from gradcam.cli.waiting import import_torch
from gradcam.errors import GradcamError, LayerError, describe_failure, join_names
from gradcam.records import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradcam.inspection.tracing import Call, Trace

MOST_ROWS = 32  # of a table where nobody has said how deep it should go
WIDTH = 120  # characters, where there is no terminal
OF_PICTURES = ("labels", "mean", "std", "crop", "reader", "reshape")  # options without a meaning for noise


@dataclass(frozen=True)
class _Subject:
    """What is traced. `what`: the images, in words."""

    name: str
    model: nn.Module
    images: Tensor
    what: str


@click.command("trace", cls=Command, short_help="List each call of each layer: shapes, cost, memory, time.")
@click.argument("image", required=False, type=click.Path(path_type=Path), metavar="[IMAGE]")
@options.model
@options.layers("Layers whose calls are listed", default="all")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Only calls inside fewer than N others.")
@click.option("--all", "show_all", is_flag=True, help="All calls, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each call, and nothing else.")
def trace_command(
    image: Path | None,
    *,
    layers: tuple[str, ...],
    depth: int | None,
    show_all: bool,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Run the network once, and list each call of each layer in order: what goes in, what comes out, what it costs.

    Without IMAGE the network runs on noise, and with random weights unless --weights is given: nothing is downloaded.
    Parameters, multiply-adds, memory and time include those of a layer's parts. Memory is what outputs took anew; what
    is changed in place takes none. Without --layer, --depth and --all, the table goes as deep as fits on a screen.
    """
    if show_all and depth is not None:
        raise click.UsageError("--all and --depth both say how much to list: give one of them.")
    choice = to_model_choice(chosen)
    check_model_name(choice.model)
    given = [name for name in OF_PICTURES if chosen[name] is not None]
    if image is None and choice.weights is None and given:
        raise click.UsageError(f"--{given[0]} is about pictures, and there is none: give an IMAGE, or leave it out.")
    try:
        subject = _make_up(choice) if image is None and choice.weights is None else _load(choice, image)
    except _PictureError as error:
        click.echo(str(error), err=True)
        return 1
    from gradcam.inspection.selection import select_layers

    wanted = set(select_layers(subject.model, layers)) if layers else None
    with code_of_the_user(choice.model, choice.reader):
        subject, found = _trace(subject)
    say(found.notes, Output(as_json, quiet=False))
    calls = _choose(found, wanted, depth, show_all=show_all or as_json)
    if as_json:
        for call in calls:
            record = {"schema": SCHEMA, "model": subject.name, "device": found.device, **asdict(call)}
            click.echo(json.dumps(record, allow_nan=False))
    else:
        width = shutil.get_terminal_size((WIDTH, 0)).columns
        click.echo(format_trace(found, calls, Heading(subject.name, subject.what), width))
    return 0


class _PictureError(GradcamError):
    """The picture could not be read, as a line that names it."""


def _make_up(choice: ModelChoice) -> _Subject:
    """The model with random weights, where and as precisely as it was chosen, and noise for it."""
    import_torch()
    from gradcam.classifiers import DEFAULT
    from gradcam.classifiers.preparation import place
    from gradcam.classifiers.skeletons import build_with_random_weights
    from gradcam.layers import unwrap

    name = choice.model or DEFAULT
    size = (choice.size, choice.size) if isinstance(choice.size, int) else choice.size
    with code_of_the_user(name):
        skeleton = build_with_random_weights(name, size=size)
        model = place(unwrap(skeleton.model), choice.device, choice.precision)
    images = _noise(model, (skeleton.channels, *skeleton.size))
    return _Subject(name, model, images, "noise, random weights")


def _load(choice: ModelChoice, image: Path | None) -> _Subject:
    """The model with its weights, and the picture as it takes it; noise without one."""
    from gradcam.classifiers.preparation import find_input_device, find_input_dtype
    from gradcam.classifiers.probing import make_noise
    from gradcam.layers import unwrap

    classifier = load_model(choice)
    say(classifier.notes, Output(as_json=False, quiet=False))
    model = unwrap(classifier.model)
    if image is None:
        return _Subject(classifier.name, model, make_noise(classifier.preprocess, model), "noise")
    try:
        with code_of_the_user(choice.reader):
            picture = classifier.prepare(image).image[None]
    except Exception as error:  # whatever a reader of the user's raises
        raise _PictureError(describe_failure(str(image), error)) from error
    return _Subject(classifier.name, model, picture.to(find_input_device(model), find_input_dtype(model)), image.name)


def _trace(subject: _Subject) -> tuple[_Subject, Trace]:
    """With as many channels of noise as the first convolution takes, where the model does not take the usual ones."""
    from dataclasses import replace

    from gradcam.classifiers.preparation import first_channels
    from gradcam.classifiers.skeletons import does_not_run
    from gradcam.inspection.tracing import trace

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

    from gradcam.classifiers.preparation import find_input_device, find_input_dtype

    noise = torch.randn(1, *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return noise.to(find_input_device(model), find_input_dtype(model))


def _choose(trace: Trace, wanted: set[str] | None, depth: int | None, *, show_all: bool) -> list[Call]:
    """The calls to be shown, without the model's own where people would read it twice."""
    calls = list(trace.calls)
    if wanted is not None:
        calls = [call for call in calls if wanted & {call.name, *call.also}]
        if not calls:
            raise LayerError(
                f"Layer {join_names(sorted(wanted)[:3])} does not run: in evaluation mode nothing calls it as a module."
            )
    elif depth is None and not show_all:
        depth = _fitting_depth(calls)
    return [call for call in calls if depth is None or call.depth <= depth]


def _fitting_depth(calls: Sequence[Call]) -> int:
    """The greatest depth of which all calls fit on a screen."""
    counts = Counter(call.depth for call in calls if call.depth)
    return max((it for it in counts if sum(counts[each] for each in counts if each <= it) <= MOST_ROWS), default=1)
