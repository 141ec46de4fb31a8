"""Options that several commands share."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gradcam.attributions.table import ATTRIBUTIONS, AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_method, offer
from gradcam.cli._commands import FILE, to_box, to_mask, to_means, to_sentence, to_stds
from gradcam.cli._completion import complete, list_classes, list_colormaps, list_layers, list_models
from gradcam.cli._settings import ALL
from gradcam.cli._terminal import code_of_the_user, to_command
from gradcam.errors import GradcamError, InputError, join_names, shorten
from gradcam.images.files import is_url, to_path, to_plain
from gradcam.options import (
    ACTIVATIONS,
    AUGMENTATIONS,
    AXES,
    EDGES,
    EDIT_FORM,
    EVIDENCE,
    LAYOUTS,
    MAX_COUNT,
    MAX_MAGNITUDE,
    MAX_PIXELS,
    PRECISIONS,
    PREDICTIONS,
    SAVED,
    SCORES,
    SMOOTHINGS,
    TASKS,
    to_fit_word,
)
from gradcam.plugins import Kind, installed, is_own, load
from gradcam.sources.shards import parse_limit, parse_shard
from gradcam.storage.store import EXTRAS, Store, to_place


class Parsed(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some versions
    """What a function makes of a word; what that raises `GradcamError` for is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except GradcamError as error:
            self.fail(str(error), parameter, context)


def _to_size(text: str) -> int | tuple[int, ...]:
    sides = re.fullmatch(r"[1-9]\d{0,4}(\s*[x×]\s*[1-9]\d{0,4}){0,2}", text.strip(), re.ASCII | re.IGNORECASE)
    if sides is None:
        raise GradcamError(f"{text!r} is no size: expected a side, 224, or height x width, 320x240.")
    size = tuple(map(int, re.findall(r"\d+", sides[0], re.ASCII)))
    return size if len(size) > 1 else size[0]


def to_weights(text: str) -> Path:
    is_word = re.fullmatch(r"(\w+_Weights\.)?\w+", text) and not Path(text).exists()
    return Path(text) if is_word else Path(FILE.convert(text, None, None))


def _find_numbers(names: Sequence[str]) -> Sequence[int]:
    if odd := [name for name in names if not re.fullmatch(r"\d{1,9}", name, re.ASCII)]:
        raise GradcamError(f"{odd[0]!r} is no number from 0, nor several with commas between them.")
    return [int(name) for name in names]


def _find_some(names: Sequence[str]) -> Sequence[int | str]:
    if ALL not in names:
        return _find_numbers(names)
    if set(names) != {ALL}:
        raise GradcamError("all is of every one: leave the numbers out.")
    return [ALL]


def _to_folder(text: str) -> Path | Store:
    scheme, colon, rest = text.partition(":/")
    if colon and scheme in EXTRAS and not rest.startswith("/"):
        raise GradcamError(f"{text!r} is no URL: {scheme}:// has two slashes.")
    return to_place(text)


FOLDER = Parsed("folder", _to_folder)
LIMIT = Parsed("limit", parse_limit)  # of failures: a number, or a share with %
SHARE = Parsed("share", parse_shard)  # of the pictures: I/N


class Real(click.FloatRange):
    """A number in a range; click lets NaN through, which is neither below nor above."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if math.isnan(number):
            self.fail(f"{value} is not a number from {self.min:g} to {self.max:g}.", parameter, context)
        return number


def find_reshape(context: click.Context, parameter: click.Parameter, text: str | None) -> str | tuple[int, ...] | None:
    """What `--reshape` says: a grid, or a layout's name."""
    if text is None or text.replace("-", " ") in LAYOUTS:
        return text
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){1,2}", text):
        raise click.BadParameter(
            f"{text!r} is neither a grid, such as 14x14, nor one of {join_names(LAYOUTS)}.", context, parameter
        )
    return tuple(map(int, text.split("x")))


MANY = 100  # pictures of a folder; of more, it is said what is made for them


def find_pictures(context: click.Context, parameter: click.Parameter, named: Sequence[str]) -> tuple[Path, ...]:
    """List the files, and the images in the folders. Raises `click.UsageError` for a URL, `InputError` for no image."""
    images, empty = list[Path](), list[InputError]()
    for text in map(os.fsdecode, named):
        if "://" in text and is_url(text):
            line = to_command(["gradcam", "batch", text, "-o", "explained/"])
            raise click.UsageError(
                f"{text} is a URL, and {context.command_path} reads files. Download it, or type: {line}"
            )
        path = Path(to_path(text) if "://" in text else text)
        try:
            images += _list_folder(path, context) if os.path.isdir(path) else [path]
        except InputError as error:
            empty.append(error)
    if empty and not images:
        raise empty[0]
    for reason in empty:
        click.echo(f"Note: {reason}", err=True)
    return tuple(images)


def _list_folder(folder: Path, context: click.Context) -> list[Path]:
    from gradcam.sources.list import list_inputs

    pictures = [folder / item.name for item in list_inputs([folder]).items]
    stems = {path.stem for path in pictures}
    pictures = [path for path in pictures if path.suffix != ".png" or not _is_result(path.stem, stems)]
    if len(pictures) > MANY and not context.params.get("quiet"):
        line = to_command(["gradcam", "batch", str(folder), "-o", "explained/"])
        click.echo(f"Note: there are {len(pictures)} pictures in {folder}; for so many there is: {line}", err=True)
    return pictures


def _is_result(stem: str, stems: set[str]) -> bool:
    """Whether a file is called like what we wrote of another picture there: a second run would explain explanations."""
    from gradcam.batch.names import COMPARISON
    from gradcam.evaluation.controls import CONTROLS

    names = (*METHODS, *ATTRIBUTIONS, COMPARISON, "activations", "gradients", *(f"{it}-check" for it in CONTROLS))
    parts = stem.split("-")
    ends = (("-".join(parts[:count]), "-".join(parts[count:])) for count in range(1, len(parts)))
    if any(start in stems and any(end == it or end.startswith(f"{it}-") for it in names) for start, end in ends):
        return True
    other, like, end = stem.rpartition("-like-")  # on another picture, which one of these was likened to
    plain = [to_plain(it) for it in stems] if like and other.endswith(tuple(f"-{it}" for it in names)) else []
    return any(end == it or end.startswith(f"{it}-") for it in plain)


Command = TypeVar("Command", bound=Callable[..., Any])


def _allow_pixels(context: click.Context, parameter: click.Parameter, pixels: int | None) -> None:
    """For whatever reads pictures, in whichever thread or process: the environment says it to all of them."""
    if pixels is not None:
        given = os.environ.get(MAX_PIXELS)
        os.environ[MAX_PIXELS] = str(pixels)
        context.call_on_close(lambda: os.environ.update({MAX_PIXELS: given}) if given else os.environ.pop(MAX_PIXELS))


def choice(name: str, values: Iterable[str], what: str) -> Callable[[Command], Command]:
    """An option that has one of these values; the first is what it has where nothing is said."""
    known = list(values)
    return click.option(name, type=click.Choice(known), default=known[0], show_default=True, help=what)


max_pixels = click.option(
    "--max-pixels",
    metavar="N",
    type=click.IntRange(1, MAX_MAGNITUDE**2),
    expose_value=False,
    callback=_allow_pixels,
    help="Read pictures of up to N pixels, whatever memory that takes.  [default: what 1 GiB is enough for]",
)


def _of_others(kind: Kind) -> str:
    return f" Of other packages: {', '.join(installed(kind))}." if installed(kind) else ""


def _find_target(context: click.Context, parameter: click.Parameter, name: str | None) -> Any:
    if name is None:
        return None
    try:
        with code_of_the_user(name):
            found = load("targets", name)
    except GradcamError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    if not callable(found) or isinstance(found, type):
        said = f"{name} is {shorten(found)}, expected a function of the model's output."
        raise click.BadParameter(said, context, parameter)
    return found


def _choice_of(*names: str, help: str, metavar: str = "NAME|INDEX", **settings: Any) -> Callable[[Command], Command]:
    return click.option(*names, metavar=metavar, help=help, shell_complete=complete(list_classes), **settings)


def layer(what: str, name: str = "layer", metavar: str = "NAME", **settings: Any) -> Callable[[Command], Command]:
    """Which layer."""
    return click.option(
        "-l", "--layer", name, metavar=metavar, help=what, shell_complete=complete(list_layers), **settings
    )


def class_(name: str, what: str) -> Callable[[Command], Command]:
    """One class, by its label or its index."""
    return _choice_of("-c", "--class", name, help=what)


def against(what: str, metavar: str) -> Callable[[Command], Command]:
    """What is contrasted with."""
    return _choice_of("--against", multiple=True, metavar=metavar, help=what)


def colormap(default: str, what: str) -> Callable[[Command], Command]:
    """Which colours."""
    offers = complete(list_colormaps)
    return click.option(
        "--colormap", default=default, show_default=True, metavar="NAME", help=what, shell_complete=offers
    )


def number(
    name: str, what: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT, **settings: Any
) -> Callable[[Command], Command]:
    """A whole number."""
    kind = click.IntRange(least, most)
    return click.option(name, type=kind, default=default, show_default=True, help=what, **{"metavar": "N"} | settings)


def output_at(what: str, **settings: Any) -> Callable[[Command], Command]:
    """Where to write."""
    return click.option("-o", "--output", metavar="PATH", help=what, **settings)


def _to_edit(text: str) -> Any:
    from gradcam.images.edit import to_edit

    return to_edit(text)


edits = click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="EDIT",
    type=Parsed("edit", _to_edit),
    help=f"A part that is taken away before the model sees the picture: {EDIT_FORM}; repeatable.",
)
score = choice("--score", SCORES, "The class's number that is explained.")
output = output_at("A folder, or a file by its suffix.  [default: the current folder]", default=".")


def file_of(*suffixes: str) -> Parsed:
    """A file that is written, with one of these suffixes, in a folder that is there."""

    def find(text: str) -> Path:
        if Path(text).suffix.lower() not in suffixes:
            raise GradcamError(f"{text!r} does not end in {' or '.join(suffixes)}.")
        if not Path(text).parent.is_dir():
            raise GradcamError(f"{text!r}: there is no folder {Path(text).parent}: make it first.")
        return Path(text)

    return Parsed("file", find)


_NAMES: dict[str, Any] = {"metavar": "FILE", "type": FILE, "help": "Names of the classes: one on each line, or JSON."}
_LABELS = click.option("--labels", **_NAMES)
_MODEL = (
    click.option(
        "-m",
        "--model",
        metavar="NAME",
        help=f"One that `gradcam models` lists, or FILE.py:FUNCTION.{_of_others('models')}"
        "  [default: the one that comes with gradcam]",
        shell_complete=complete(list_models),
    ),
    click.option(
        "--weights",
        metavar="FILE|NAME",
        type=Parsed("weights", to_weights),
        help="The model's weights: a checkpoint, or the name of some of its own, as IMAGENET1K_V1.",
    ),
    _LABELS,
    click.option(
        "--mean",
        metavar="M[,M,M]",
        type=Parsed("numbers", to_means),
        help="Mean of each channel, of values in [0,1]; a single one is for grey pictures.",
    ),
    click.option(
        "--std",
        metavar="S[,S,S]",
        type=Parsed("numbers", to_stds),
        help="Standard deviation of each channel, of values in [0,1].",
    ),
    click.option(
        "--size",
        metavar="N|HxW",
        type=Parsed("size", _to_size),
        help="Pixels that the network takes: N x N of the picture's centre, or HxW of all of it.",
    ),
    click.option(
        "--crop",
        metavar="SHARE",
        type=Real(0, 1, min_open=True),
        help="Share of the resized picture that is kept; 1 for all.",
    ),
    choice(
        "--activation", ACTIVATIONS, "From logits to probabilities; sigmoid where classes do not exclude each other."
    ),
    click.option("--reader", metavar="MODULE:FUNCTION", help="Your own function that reads a picture."),
    max_pixels,
    click.option(
        "--device", default="auto", metavar="auto|cpu|cuda|cuda:N|mps", help="Which processor or GPU computes."
    ),
    choice("--precision", PRECISIONS, "Precision of the computation."),
    click.option(
        "--reshape",
        metavar="GRID|LAYOUT",
        callback=find_reshape,
        help=f"How the layer's output lies on the picture: a grid of tokens, 14x14, or {', '.join(LAYOUTS)}.",
    ),
)
_FIT = (
    click.option(
        "--fit",
        type=Parsed("fit", to_fit_word),
        default="crop",
        show_default=True,
        metavar="crop|whole|tiles[:N]",
        help="What is explained: the part that the network sees, the whole picture, or windows of N pixels over it.",
    ),
    choice("--predictions", PREDICTIONS, "Classify by the network's own crop, or by what --fit lets it see."),
)
_TARGET = (
    _choice_of(
        "-c",
        "--class",
        "classes",
        multiple=True,
        help="Class to explain; repeatable. name:7 is the label 7.  [default: the most probable]",
    ),
    number("--top-k", "Explain the K most probable classes.", 1, metavar="K"),
    click.option(
        "--target",
        metavar="FILE.py:NAME",
        callback=_find_target,
        help=f"A function of your own, from the model's output to a score, in place of a class.{_of_others('targets')}",
    ),
    choice("--score", SCORES, "The class's number that is explained; the contrast is with its five strongest rivals."),
    against(
        "What --text contrasts its sentences with, or the class that --score contrast contrasts with; repeatable.",
        "NAME|INDEX|SENTENCE",
    ),
    choice("--evidence", EVIDENCE, "What is shown: what speaks for the class, against it, or both."),
    choice("--augmentation", AUGMENTATIONS, "Explain mirrored, and scaled, views as well, and take the mean."),
    choice("--smoothing", SMOOTHINGS, "eigen: the channels' first principal component in place of their sum."),
)


def find_any(name: str) -> Method | AttributionMethod:
    """A method of either kind, by its name. Raises `GradcamError` for an unknown one, and offers the nearest."""
    if name.lower() in ATTRIBUTIONS:
        return ATTRIBUTIONS[name.lower()]
    try:
        return find_method(name)
    except GradcamError:
        if is_own(name) or name in installed("methods"):
            raise
        raise GradcamError(f"There is no method {name!r}. {offer(name, [*METHODS, *ATTRIBUTIONS])}") from None


pictures = click.argument(
    "images", nargs=-1, required=True, type=click.Path(), metavar="IMAGE...", callback=find_pictures
)


def several(
    *names: str, find: Callable[[Sequence[str]], Iterable[object]], known: Iterable[str], **settings: Any
) -> Callable[[Command], Command]:
    """An option of names without commas in them, which may be repeated and have commas between them. `find`: gives what
    the names are of, and raises `GradcamError` for others. `known`: what Tab offers."""

    def to_names(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[Any, ...]:
        typed = [name.strip() for value in values for name in value.split(",") if name.strip()]
        if values and not typed:
            raise click.BadParameter(f"{values[-1]!r} holds no name.", context, parameter)
        try:
            return tuple(dict.fromkeys(find(typed)))
        except GradcamError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    offers = complete(lambda context: known)
    return click.option(*names, multiple=True, callback=to_names, shell_complete=offers, **settings)


_EDGE = click.option("--edge", type=click.Choice(EDGES), help="Why this edge of the box is where it is.")
_AXIS = click.option("--axis", type=click.Choice(AXES), help="One coordinate of the keypoint alone.")
_THINGS = (
    click.option(
        "--task",
        type=click.Choice(["auto", *TASKS]),
        default="auto",
        metavar="TASK",
        help=f"What the model does with a picture: {', '.join(TASKS)}.  [default: read off the model]",
    ),
    several(
        *("--box", "boxes"),
        find=_find_some,
        known=[ALL],
        metavar="N|all",
        help="A detector's box, by its number; repeatable.  [default: the surest, 0]",
    ),
    _EDGE,
    click.option(
        "--missed",
        metavar="L,T,R,B",
        type=Parsed("box", to_box),
        multiple=True,
        help="Why nothing, or no --class, was found in that place: left, top, right, bottom in pixels; repeatable.",
    ),
    click.option("--threshold", metavar="SCORE", type=Real(0, 1), help="The least score of boxes that count."),
    click.option(
        "--mask",
        metavar="X,Y|L,T,R,B|FILE",
        type=Parsed("mask", to_mask),
        help="The region under a point, a box, or a picture's pixels that are not black.  [default: what is predicted]",
    ),
    click.option(
        "--text",
        "texts",
        metavar="SENTENCE",
        type=Parsed("text", to_sentence),
        multiple=True,
        help="A sentence to find in the picture, or what a detector is told to look for; repeatable.",
    ),
    click.option("--like", metavar="FILE", type=FILE, help="Another picture: what makes these two alike, in both."),
    click.option("--caption", is_flag=True, help="Each word of the caption that the model writes."),
    several(
        *("--word", "words"),
        find=_find_numbers,
        known=(),
        metavar="N",
        help="That word of the caption, by its number; repeatable.",
    ),
    several(
        *("--keypoint", "keypoints"),
        find=_find_some,
        known=[ALL],
        metavar="N|all",
        help="A keypoint, by its number, of the surest or another --box; repeatable.  [default: 0]",
    ),
    _AXIS,
)


def layers(what: str, *, default: str) -> Callable[[Command], Command]:
    """Which layers, by names and patterns."""
    text = f"{what}: names or patterns, 'layer*.conv1'; repeatable.  [default: {default}]"
    return layer(text, "layers", "NAME|PATTERN", multiple=True)


def _methods(find: Callable[[str], Any], ours: Iterable[str], default: str) -> Callable[[Command], Command]:
    """Add the option for methods. `find` returns one by its name; `ours` are those that come with the package."""

    def find_all(names: Sequence[str]) -> list[Any]:
        with contextlib.nullcontext() if set(names) <= set(ours) else code_of_the_user(*names):
            return [find(name) for name in names]

    return several(
        "--method",
        "methods",
        metavar="NAME[,NAME]",
        find=find_all,
        known=[*ours, *installed("methods")],
        help=f"One that `gradcam methods` lists, or FILE.py:NAME; repeatable.{_of_others('methods')}"
        f"  [default: {default}]",
    )


def choices(*, default: str = "gradcam, or what suits the task") -> Callable[[Command], Command]:
    """What to explain, and with which model; `default`: what is said of the methods that are taken otherwise."""
    text = "Layer to look at, as `gradcam layers` lists it; repeatable."
    methods = _methods(find_any, [*METHODS, *ATTRIBUTIONS], default)
    return together(*_MODEL, layer(text, "layers", multiple=True), methods, *_TARGET, *_THINGS, *_FIT)


def paged() -> Callable[[Command], Command]:
    """Of what a page is made, and with which model."""
    return together(
        *_MODEL,
        layer("Layer to look at; repeatable.  [default: the usual one, and three before it]", "layers", multiple=True),
        _methods(find_method, METHODS, "gradcam, or what suits"),
        _choice_of(
            "-c",
            "--class",
            "classes",
            multiple=True,
            help="Class that is shown first, and has maps in any case; repeatable.  [default: the most probable]",
        ),
        number("--top", "Classes with maps, where those of all cost too much.", 50),
        *_THINGS,
        *_FIT,
    )


def method(default: str) -> Callable[[Command], Command]:
    """Add the option for a single method."""
    return click.option(
        "--method",
        metavar="NAME",
        shell_complete=complete(lambda context: [*METHODS, *installed("methods")]),
        help=f"One that `gradcam methods` lists, or FILE.py:NAME.  [default: {default}]",
    )


def page_of(what: str) -> Callable[[Command], Command]:
    """Add the option for a page with cards."""
    text = f"Write a page with the first {what}, in one file."
    return click.option("--page", metavar="FILE.html", type=file_of(".html", ".htm"), help=text)


def _find_saved(names: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in SAVED]:
        raise GradcamError(f"{unknown[0]!r} cannot be saved: choose some of {', '.join(SAVED)}.")
    return names


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


model = together(*_MODEL)  # which model, and how it computes
audited_model = together(  # where --labels says the class of each picture
    *(it for it in _MODEL if it is not _LABELS), click.option("--class-names", "labels", **_NAMES)
)
named_model = together(*_MODEL[1:])  # how one computes that an argument names
_OF_WHOLES = (it for it in _THINGS if it not in (_EDGE, _AXIS))  # a place has no probability to judge its map by
things = together(*_OF_WHOLES, against("What --text contrasts its sentences with; repeatable.", "SENTENCE"))
save = several(
    "--save",
    "saved",
    metavar="WHAT[,WHAT]",
    find=_find_saved,
    known=SAVED,
    default=("overlay",),
    help=f"What is written: {', '.join(SAVED)}; repeatable.  [default: overlay]",
)
appearance = together(
    click.option(
        "--alpha", type=Real(0, 1), default=0.5, show_default=True, metavar="A", help="Opacity of the heatmap."
    ),
    colormap("turbo", "A colour map of OpenCV."),
)
printing = together(
    click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each picture, and nothing else."),
    click.option("-q", "--quiet", is_flag=True, is_eager=True, help="Print nothing but errors."),
)
