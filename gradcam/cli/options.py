"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gradcam.attributions import ATTRIBUTIONS, AttributionMethod
from gradcam.choices import ACTIVATIONS, AUGMENTATIONS, EVIDENCE, LAYOUTS, PREDICTIONS, SMOOTHINGS
from gradcam.cli.parameters import Fits, Opacity, Size, Values, Weights, find_reshape
from gradcam.devices import PRECISIONS
from gradcam.errors import GradcamError
from gradcam.methods import METHODS, Method, find_method
from gradcam.methods.finding import offer
from gradcam.scores import SCORES

Command = TypeVar("Command", bound=Callable[..., Any])


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MODEL = (
    click.option(
        "-m",
        "--model",
        metavar="NAME",
        help="The model, as `gradcam models` lists them, or FILE.py:FUNCTION; without it, the one that comes with gradcam.",
    ),
    click.option(
        "--weights",
        metavar="FILE|NAME",
        type=Weights(),
        help="Its weights: safetensors, or what torch.save wrote; or the name of some of its own, as IMAGENET1K_V1.",
    ),
    click.option("--labels", metavar="FILE", type=_FILE, help="Its classes' names: one on each line, or JSON."),
    click.option(
        "--mean", metavar="M[,M,M]", type=Values(), help="Of values in [0,1]; one value is for a grey picture."
    ),
    click.option(
        "--reshape",
        metavar="GRID|LAYOUT",
        callback=find_reshape,
        help=f"How the layer's output lies on the picture: its tokens' grid, such as 14x14, or {', '.join(LAYOUTS)}.",
    ),
    click.option("--std", metavar="S[,S,S]", type=Values(), help="The same for the deviation."),
    click.option(
        "--size",
        metavar="N|HxW",
        type=Size(),
        help="What the network takes: N is of the picture's centre, HxW of all of it, whatever its aspect.",
    ),
    click.option("--crop", metavar="SHARE", type=float, help="How much of the resized picture is kept; 1 for all."),
    click.option(
        "--activation",
        type=click.Choice(list(ACTIVATIONS)),
        default="auto",
        show_default=True,
        help="How logits become probabilities; sigmoid where each class stands for itself.",
    ),
    click.option("--reader", metavar="MODULE:FUNCTION", help="Your own function that reads pictures."),
    click.option("--device", default="auto", metavar="auto|cpu|cuda|cuda:N|mps", help="Where to compute."),
    click.option(
        "--precision", type=click.Choice(list(PRECISIONS)), default="fp32", show_default=True, help="How to compute."
    ),
)
_LAYER = (
    click.option(
        "-l", "--layer", "layers", metavar="NAME", multiple=True, help="Layer to look at, by dotted name; repeatable."
    ),
)
_FIT = (
    click.option(
        "--fit",
        type=Fits(),
        default="crop",
        show_default=True,
        metavar="crop|whole|tiles[:N]",
        help="What is explained: the part that the network sees, the whole picture, or windows of N pixels over it.",
    ),
    click.option(
        "--predictions",
        type=click.Choice(PREDICTIONS),
        default="own",
        show_default=True,
        help="Classify by the network's own crop, or by what --fit lets it see.",
    ),
)
_TARGET = (
    click.option(
        "-c",
        "--class",
        "classes",
        metavar="NAME|INDEX",
        multiple=True,
        help="Class to explain; repeatable. `name:7` is a label in digits.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=1),
        default=1,
        metavar="K",
        help="Explain the K most probable classes.  [default: 1]",
    ),
    click.option(
        "--score",
        type=click.Choice(list(SCORES)),
        default="logit",
        show_default=True,
        help="Which number of the class is explained; the contrast is with its five strongest rivals.",
    ),
    click.option(
        "--against",
        metavar="NAME|INDEX",
        multiple=True,
        help="With --score contrast, the class to contrast with; repeatable.",
    ),
    click.option(
        "--evidence",
        type=click.Choice(list(EVIDENCE)),
        default="positive",
        show_default=True,
        help="What speaks for the class, against it, or both.",
    ),
    click.option(
        "--augmentation",
        type=click.Choice(list(AUGMENTATIONS)),
        default="none",
        show_default=True,
        help="Explain mirrored and scaled views as well, and take the mean.",
    ),
    click.option(
        "--smoothing",
        type=click.Choice(list(SMOOTHINGS)),
        default="none",
        show_default=True,
        help="Eigen: the channels' first principal component in place of their sum.",
    ),
)
_OUTPUT = (
    click.option(
        "-o",
        "--output",
        default=".",
        metavar="PATH",
        help="A folder, or a file by its suffix.  [default: here]",
    ),
)


def find_any(name: str) -> Method | AttributionMethod:
    """A method of either kind, by its name. Raises `GradcamError` for an unknown one, and offers the nearest."""
    if name.lower() in ATTRIBUTIONS:
        return ATTRIBUTIONS[name.lower()]
    try:
        return find_method(name)
    except GradcamError:
        raise GradcamError(f"There is no method {name!r}. {offer(name, [*METHODS, *ATTRIBUTIONS])}") from None


def _find_methods(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(find_any(name).name for name in names)
    except GradcamError as error:
        raise click.BadParameter(str(error), context, parameter) from error


_APPEARANCE = (
    click.option("--alpha", type=Opacity(0, 1), default=0.5, show_default=True, help="Opacity of the heatmap."),
    click.option("--colormap", default="turbo", show_default=True, metavar="NAME", help="Any colour map of OpenCV."),
)
_PRINTING = (
    click.option(
        "--json", "as_json", is_flag=True, help="Print one record per picture, a line of JSON each, and nothing else."
    ),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
)


def pictures(command: Command) -> Command:
    """Which pictures."""
    argument = click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGE...")
    return argument(command)


def model(command: Command) -> Command:
    """Which model, and how it computes."""
    return _apply(_MODEL, command)


def layers(what: str, *, default: str) -> Callable[[Command], Command]:
    """Which layers, by names and patterns."""
    return click.option(
        "-l",
        "--layer",
        "layers",
        metavar="NAME|PATTERN",
        multiple=True,
        help=f"{what}, by dotted name or pattern ('layer*.conv1'); repeatable.  [default: {default}]",
    )


def choices(*, methods: Sequence[str]) -> Callable[[Command], Command]:
    """What to explain, and with which model; these methods unless others are given."""
    option = click.option(
        "--method",
        "methods",
        metavar="NAME",
        multiple=True,
        callback=_find_methods,
        default=methods,
        help="How, as `gradcam methods` lists it; repeatable.",
    )
    return lambda command: _apply((*_MODEL, *_LAYER, option, *_TARGET, *_FIT), command)


def output(command: Command) -> Command:
    """Where to write."""
    return _apply(_OUTPUT, command)


def appearance(command: Command) -> Command:
    """How overlays look."""
    return _apply(_APPEARANCE, command)


def printing(command: Command) -> Command:
    """What is said on the terminal."""
    return _apply(_PRINTING, command)


def _apply(options: Sequence[Callable[[Any], Any]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
