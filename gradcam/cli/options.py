"""Options that several commands share, and what they mean together."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from gradcam.attributions import ATTRIBUTIONS, AttributionMethod
from gradcam.choices import AUGMENTATIONS, EVIDENCE, LAYOUTS, SMOOTHINGS
from gradcam.devices import PRECISIONS
from gradcam.errors import GradcamError, join_names, nearest
from gradcam.methods import METHODS, Method, find_method
from gradcam.naming import READ_SUFFIXES, WRITE_SUFFIXES
from gradcam.scores import SCORES

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Settings:
    """What was chosen, as typed."""

    model: str | None
    weights: Path | None
    layers: tuple[str, ...]
    reshape: str | tuple[int, ...] | None
    methods: tuple[str, ...]
    classes: tuple[str, ...]
    top_k: int
    score: str
    against: tuple[str, ...]
    evidence: str
    augmentation: str
    smoothing: str
    device: str
    precision: str
    output: str
    alpha: float
    colormap: str


def _find_reshape(context: click.Context, parameter: click.Parameter, text: str | None) -> str | tuple[int, ...] | None:
    if text is None or text.replace("-", " ") in LAYOUTS:
        return text
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise click.BadParameter(
            f"{text!r} is neither a grid, such as 14x14, nor one of {join_names(LAYOUTS)}.", context, parameter
        )
    return tuple(map(int, text.split("x")))


_MODEL = (
    click.option("-m", "--model", metavar="NAME", help="The model; without it, the one that comes with gradcam."),
    click.option(
        "--weights",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Its weights (safetensors).",
    ),
    click.option(
        "-l", "--layer", "layers", metavar="NAME", multiple=True, help="Layer to look at, by dotted name; repeatable."
    ),
    click.option(
        "--reshape",
        metavar="GRID|LAYOUT",
        callback=_find_reshape,
        help=f"How the layer's output lies on the picture: its tokens' grid, such as 14x14, or {', '.join(LAYOUTS)}.",
    ),
    click.option("--device", default="auto", metavar="auto|cpu|cuda|cuda:N|mps", help="Where to compute."),
    click.option(
        "--precision", type=click.Choice(list(PRECISIONS)), default="fp32", show_default=True, help="How to compute."
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
    offers = nearest(name, [*METHODS, *ATTRIBUTIONS])
    try:
        return find_method(name)
    except GradcamError:
        raise GradcamError(f"There is no method {name!r}. Nearest: {join_names(offers or METHODS)}.") from None


def _find_methods(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(find_any(name).name for name in names)
    except GradcamError as error:
        raise click.BadParameter(str(error), context, parameter) from error


class _Opacity(click.FloatRange):
    """From 0 to 1; click lets NaN through, which is neither below nor above."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if math.isnan(number):
            self.fail(f"{value} is not a number from 0 to 1.", parameter, context)
        return number


_APPEARANCE = (
    click.option("--alpha", type=_Opacity(0, 1), default=0.5, show_default=True, help="Opacity of the heatmap."),
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
    return lambda command: _apply((*_MODEL, option, *_TARGET), command)


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


@dataclass(frozen=True)
class Destination:
    """A folder for results, and, if there is to be one only, its file."""

    folder: Path
    file: Path | None = None


@dataclass(frozen=True)
class Output:
    """How results are told: as JSON, or not at all, or for people."""

    as_json: bool
    quiet: bool


def settings(chosen: dict[str, Any]) -> Settings:
    """The settings. Raises `click.UsageError` where two options contradict each other."""
    found = Settings(**chosen)
    if found.classes and found.top_k > 1:
        raise click.UsageError("--class and --top-k both say which classes to explain: give one of them.")
    if found.against and found.score != "contrast":
        raise click.UsageError("--against names the classes to contrast with: give --score contrast as well.")
    _check_for_attributions(found)
    return found


def has_layer(method: str) -> bool:
    """Whether a method of either kind looks at a layer."""
    return ATTRIBUTIONS[method].has_layer if method in ATTRIBUTIONS else METHODS[method].place == "layer"


def _check_for_attributions(found: Settings) -> None:
    """Options that maps have must not be left unheeded where there are none."""
    no_layer = not any(name not in ATTRIBUTIONS or ATTRIBUTIONS[name].has_layer for name in found.methods)
    unheeded = {
        "--evidence": found.evidence != "positive",
        "--augmentation": found.augmentation != "none",
        "--smoothing": found.smoothing != "none",
        "--layer": bool(found.layers) and no_layer,
        "--reshape": found.reshape is not None and no_layer,
    }
    attributions = [name for name in found.methods if name in ATTRIBUTIONS]
    for option, is_given in unheeded.items():
        if attributions and is_given:
            raise click.UsageError(
                f"{option} is for maps at layers, which {attributions[0]} does not make: leave it out."
            )


def find_destination(output: str, images: Sequence[Path], results: int) -> Destination:
    """Where so many results go. Raises `click.UsageError` for one file for several, or over one of the pictures."""
    path = Path(output)
    is_folder = output.endswith(("/", os.sep)) or path.is_dir()
    if path.suffix.lower() not in READ_SUFFIXES or is_folder:
        return Destination(path)
    if path.suffix.lower() not in WRITE_SUFFIXES:
        raise click.UsageError(f"{path}: pictures are written as {', '.join(sorted(WRITE_SUFFIXES))}.")
    if results > 1:
        raise click.UsageError(f"{path} is one file, and there are several results: give a folder to --output.")
    if any(_is_same(path, image) for image in images):
        raise click.UsageError(f"{path} is the picture itself, which is never overwritten: choose another name.")
    return Destination(path.parent, path)


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))
