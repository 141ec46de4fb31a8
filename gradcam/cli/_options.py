"""Define the arguments and options that several commands share."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gradcam import options as allowed
from gradcam.attributions.table import ATTRIBUTIONS, AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_method, suggest_names
from gradcam.cli import _commands as parse
from gradcam.cli._completion import complete, list_classes, list_colormaps, list_layers, list_models
from gradcam.cli._settings import ALL
from gradcam.cli._terminal import custom_code_context, quote_command
from gradcam.errors import GradcamError, InputError, shorten
from gradcam.fit import parse_fit
from gradcam.images.files import is_url, to_path, to_safe_name
from gradcam.options import EDIT_FORM, EVIDENCE, MAX_PIXELS, SCORES
from gradcam.plugins import PluginKind, is_custom, list_entry_points, load_plugin
from gradcam.sources.shards import parse_failure_limit, parse_shard

Command = TypeVar("Command", bound=Callable[..., Any])


class Parser(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some versions of click
    """A parameter type that converts text with a function. The function's `GradcamError` is reported as wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except GradcamError as error:
            self.fail(str(error), parameter, context)


def option(
    usage: str, text: str, convert: Any = None, *, name: str | None = None, **settings: Any
) -> Callable[[Command], Command]:
    """Return an option with the help `text`.

    `usage` has the names and the metavar, such as "-o --output PATH". `convert` is a click type, or a function that
    converts text and raises `GradcamError`. `name` is the parameter's name if it differs from the option's name.
    """
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    settings |= {"metavar": words[-1]} if len(words) > len(names) else {}
    kind = convert if convert is None or isinstance(convert, click.ParamType) else Parser("text", convert)
    names += [] if name is None else [name]
    settings["show_default"] = "default" in settings and "[default:" not in text
    return click.option(*names, type=kind, help=text, **settings)


def _find_numbers(names: Sequence[str]) -> Sequence[int]:
    if invalid := [name for name in names if not re.fullmatch(r"\d{1,9}", name, re.ASCII)]:
        problem = f"{invalid[0]!r} is not a whole number"
        raise GradcamError(f"{problem}: give a number from 0, or several numbers with commas, such as 0,2,5.")
    return [int(name) for name in names]


def _find_numbers_or_all(names: Sequence[str]) -> Sequence[int | str]:
    if ALL not in names:
        return _find_numbers(names)
    if set(names) != {ALL}:
        raise GradcamError("'all' already includes every number: give only 'all'.")
    return [ALL]


LARGE_FOLDER_IMAGES = 100  # If a folder has more images, a note recommends `gradcam batch`.
FOLDER = Parser("folder", parse.to_folder)
FAILURE_LIMIT = Parser("limit", parse_failure_limit)  # a number of images, or a percentage
SHARD = Parser("share", parse_shard)  # I/N divides the images into N parts, and selects part I.


def real(minimum: float, maximum: float, *, above: bool = False) -> Parser:
    """Return the type of a number in a range. `click.FloatRange` would accept NaN, and print the range in the help."""
    return Parser("float", functools.partial(parse.to_real, minimum=minimum, maximum=maximum, above=above))


def integer(minimum: int, maximum: int) -> Parser:
    """Return the type of an integer in a range. `click.IntRange` would print the range in the help."""
    return Parser("integer", functools.partial(parse.to_integer, minimum=minimum, maximum=maximum))


def find_images(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> tuple[Path, ...]:
    """List the given files, and the images in the given folders.

    Raise `click.UsageError` for a URL, and `InputError` if there are only folders without images.
    """
    images, empty = list[Path](), list[InputError]()
    for text in map(os.fsdecode, texts):
        if "://" in text and is_url(text):
            line = quote_command(["gradcam", "batch", text, "-o", "explained/"])
            raise click.UsageError(
                f"{text} is a URL, but {context.command_path} reads files. Download the file, or type: {line}"
            )
        path = Path(to_path(text) if "://" in text else text)
        try:
            images += _list_images(path, context) if os.path.isdir(path) else [path]
        except InputError as error:
            empty.append(error)
    if empty and not images:
        raise empty[0]
    for reason in empty:
        click.echo(f"Note: {reason}", err=True)
    return tuple(images)


def _list_images(folder: Path, context: click.Context) -> list[Path]:
    from gradcam.sources.collect import list_inputs

    images = [folder / item.name for item in list_inputs([folder]).items]
    stems = {path.stem for path in images}
    images = [path for path in images if path.suffix != ".png" or not _is_result(path.stem, stems)]
    if len(images) > LARGE_FOLDER_IMAGES and not context.params.get("quiet"):
        command = quote_command(["gradcam", "batch", str(folder), "-o", "explained/"])
        click.echo(f"Note: {folder} contains {len(images)} images. For large folders, use: {command}", err=True)
    return images


def _is_result(stem: str, stems: set[str]) -> bool:
    """Return whether an earlier run wrote this file for an image in the folder. Results must not be explained again."""
    from gradcam.batch.result_names import COMPARISON_NAME
    from gradcam.evaluation.heatmap_sources import CONTROLS

    names = (*METHODS, *ATTRIBUTIONS, COMPARISON_NAME, "activations", "gradients", *(f"{c}-check" for c in CONTROLS))
    parts = stem.split("-")
    cuts = (("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts)))
    if any(start in stems and any(end == name or end.startswith(f"{name}-") for name in names) for start, end in cuts):
        return True
    # If --like was used, the name of a heatmap on the second image contains `-like-` and the name of the first image.
    start, like, end = stem.rpartition("-like-")
    if not (like and start.endswith(tuple(f"-{name}" for name in names))):
        return False
    return any(end == name or end.startswith(f"{name}-") for name in map(to_safe_name, stems))


def _set_max_pixels(context: click.Context, parameter: click.Parameter, pixels: int | None) -> None:
    """Set the limit as an environment variable, so that it applies in all threads and processes that read images."""
    if pixels is not None:
        old = os.environ.get(MAX_PIXELS)
        os.environ[MAX_PIXELS] = str(pixels)
        context.call_on_close(lambda: os.environ.update({MAX_PIXELS: old}) if old else os.environ.pop(MAX_PIXELS))


def choice(name: str, values: Iterable[str], text: str) -> Callable[[Command], Command]:
    """Return an option with a fixed set of values. The first value is the default."""
    names = list(values)
    return option(name, text, click.Choice(names), default=names[0])


max_pixels = option(
    "--max-pixels N",
    "Largest image to read, in pixels.  [default: what fits in 1 GiB]",
    integer(1, allowed.MAX_MAGNITUDE**2),
    expose_value=False,
    callback=_set_max_pixels,
)


def _describe_plugins(kind: PluginKind) -> str:
    return f" Other packages add: {', '.join(list_entry_points(kind))}." if list_entry_points(kind) else ""


def _find_target(name: str) -> Any:
    with custom_code_context(name):
        target = load_plugin("targets", name)
    if not callable(target) or isinstance(target, type):
        raise GradcamError(f"{name} is {shorten(target)}: expected a function that takes the model's output.")
    return target


def layer(text: str, usage: str = "-l --layer NAME", **settings: Any) -> Callable[[Command], Command]:
    """Return the option for the target layer."""
    return option(usage, text, shell_complete=complete(list_layers), **settings)


def class_(name: str, text: str, **settings: Any) -> Callable[[Command], Command]:
    """Return the option for a class."""
    return option("-c --class NAME|INDEX", text, name=name, shell_complete=complete(list_classes), **settings)


def against(text: str, metavar: str) -> Callable[[Command], Command]:
    """Return the option --against, which takes classes or sentences to contrast with the target."""
    text += " With a word, only the first token of the answer is explained, unless you also give --word or --caption."
    return option(f"--against {metavar}", text, multiple=True, shell_complete=complete(list_classes))


def colormap(default: str | None, text: str) -> Callable[[Command], Command]:
    """Return the option for the colour map."""
    return option("--colormap NAME", text, default=default, shell_complete=complete(list_colormaps))


def number(
    usage: str, text: str, default: int | None = None, *, minimum: int = 1, maximum: int = allowed.MAX_COUNT
) -> Callable[[Command], Command]:
    """Return an option for an integer in a range. Without a metavar in `usage`, the metavar is N."""
    return option(usage if " " in usage else f"{usage} N", text, integer(minimum, maximum), default=default)


def output_option(text: str, convert: Any = None, default: str | None = None) -> Callable[[Command], Command]:
    """Return the option for the output path."""
    return option("-o --output PATH", text, convert, default=default)


def _to_edit(text: str) -> Any:
    from gradcam.images.edit import parse_edit

    return parse_edit(text)


edits = option(
    "--edit EDIT",
    f"Remove a part of the image before the model sees it; may be repeated. The form is {EDIT_FORM}.",
    _to_edit,
    name="edits",
    multiple=True,
)
score = choice(
    "--score", SCORES, "Score to explain. contrast: the class's logit minus the mean of the five highest other logits."
)
output = output_option("Output file or folder.  [default: the current folder]", default=".")


def output_file(*suffixes: str) -> Parser:
    """Return the type of an output file with one of these suffixes, in an existing folder."""

    def find(text: str) -> Path:
        if Path(text).suffix.lower() not in suffixes:
            raise GradcamError(f"{text!r} does not end in {' or '.join(suffixes)}.")
        if not Path(text).parent.is_dir():
            raise GradcamError(f"{text!r}: there is no folder {Path(text).parent}. Create this folder first.")
        return Path(text)

    return Parser("file", find)


_LABELS_SETTINGS = "File with the names of the model's classes, one per line or as JSON.", parse.FILE
_LABELS = option("--labels FILE", *_LABELS_SETTINGS)
_LAYOUT_CHOICES = ", ".join(f"{name.replace(' ', '-')} {axes}" for name, axes in allowed.LAYOUTS.items())
_MODEL = (
    option(
        "-m --model NAME",
        "Torchvision name, timm:NAME, hf:NAME, or FILE.py:FUNCTION (see `gradcam models`). Without --model, the "
        f"embedded ImageNet classifier is used.{_describe_plugins('models')}",
        shell_complete=complete(list_models),
    ),
    option(
        "--weights FILE|NAME",
        "Checkpoint to load, or the name of pretrained weights, such as IMAGENET1K_V1.",
        parse.to_weights,
    ),
    _LABELS,
    option(
        "--mean M[,M,M]",
        "Mean of each channel, for pixel values from 0 to 1. Give one value for a greyscale model.",
        parse.to_means,
    ),
    option("--std S[,S,S]", "Standard deviation of each channel, for pixel values from 0 to 1.", parse.to_stds),
    option(
        "--size N|HxW",
        "Input size of the model, in pixels. N: a centre crop of N x N; HxW: the whole image, resized.",
        parse.to_size,
    ),
    option(
        "--crop SHARE",
        "Share of the resized image's shorter side that the centre crop keeps, up to 1.",
        real(0, 1, above=True),
    ),
    choice(
        "--activation",
        allowed.ACTIVATIONS,
        "Function that turns logits into probabilities. sigmoid: for multi-label models; auto: softmax, or sigmoid for a "
        "single logit. For outputs that are no logits: none, for regression values and for probabilities of several "
        "classes; applied, for a single probability.",
    ),
    option("--reader MODULE:FUNCTION", "Custom function that reads an image file."),
    max_pixels,
    option("--device DEVICE", "One of auto, cpu, cuda, cuda:N, mps.", default="auto"),
    choice("--precision", allowed.PRECISIONS, "Floating-point precision of the model."),
    option(
        "--reshape GRID|LAYOUT",
        "Layout of the layer's output, if it is not detected. Give the grid of the tokens, such as 14x14, or one of "
        f"{_LAYOUT_CHOICES}. N: images; C or D: channels; h,w: grid; T: tokens.",
        parse.to_layout,
    ),
)
_FIT = (
    option(
        "--fit crop|whole|tiles[:N]",
        "Part of the image to explain. crop: the model's default centre crop; whole: the whole image; tiles: "
        "overlapping windows of N x N pixels, whose heatmaps are joined.",
        lambda text: text if text == "crop" else str(parse_fit(text)),
        default="crop",
    ),
    choice(
        "--predictions",
        allowed.PREDICTIONS,
        "Part of the image for the predictions. own: the model's default crop; seen: the part that --fit selects.",
    ),
)
_TARGET = (
    class_(
        "classes",
        "Class name or index to explain; may be repeated. For a class with the name 7, write name:7.  [default: top class]",
        multiple=True,
    ),
    number("--top-k K", "Explain the K most probable classes.", 1),
    option(
        "--target FILE.py:NAME",
        "Custom target function, instead of a class. The function gets the model's output and returns the score."
        f"{_describe_plugins('targets')}",
        _find_target,
    ),
    score,
    against(
        "What to contrast the target with: a class (needs --score contrast), a sentence (for --text), or a word "
        "(for --prompt). Classes and sentences may be repeated.",
        "NAME|SENTENCE",
    ),
    choice("--evidence", EVIDENCE, "Show evidence for the class (positive), against it (negative), or both (signed)."),
    choice(
        "--augmentation",
        allowed.AUGMENTATIONS,
        "Average the heatmaps of several views. flip: the image and its mirror image. flip-scale: the "
        "image and its mirror image, each with all values multiplied by 1, 0.9 and 1.1.",
    ),
    choice(
        "--smoothing",
        allowed.SMOOTHINGS,
        "Smoothing of the heatmap. eigen: the first principal component of the channels instead of their sum.",
    ),
    choice(
        "--interpolation",
        allowed.INTERPOLATIONS,
        "Interpolation from the layer's grid to the model's input. nearest: each cell of the grid becomes a block.",
    ),
)


def find_any_method(name: str) -> Method | AttributionMethod:
    """Return a CAM or attribution method by its name. Raise `GradcamError` with suggestions for an unknown name."""
    if name.lower() in ATTRIBUTIONS:
        return ATTRIBUTIONS[name.lower()]
    try:
        return find_method(name)
    except GradcamError:
        if is_custom(name) or name in list_entry_points("methods"):
            raise
        raise GradcamError(f"There is no method {name!r}. {suggest_names(name, [*METHODS, *ATTRIBUTIONS])}") from None


images = click.argument("images", nargs=-1, required=True, type=click.Path(), metavar="IMAGE...", callback=find_images)


def names_option(
    usage: str,
    text: str,
    *,
    find: Callable[[Sequence[str]], Iterable[object]],
    completions: Iterable[str],
    **settings: Any,
) -> Callable[[Command], Command]:
    """Return an option for several names. `find` converts the names. Tab completion offers `completions`."""

    def to_names(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[Any, ...]:
        typed = [name.strip() for value in values for name in value.split(",") if name.strip()]
        if values and not typed:
            raise click.BadParameter(f"{values[-1]!r} contains no name.", context, parameter)
        try:
            return tuple(dict.fromkeys(find(typed)))
        except GradcamError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    offers = complete(lambda context: completions)
    return option(usage, text, multiple=True, callback=to_names, shell_complete=offers, **settings)


_EDGE = option("--edge", "Detectors: explain the position of this edge of the box.", click.Choice(allowed.EDGES))
_AXIS = option("--axis", "Pose models: explain this coordinate of the keypoint.", click.Choice(allowed.AXES))
_WITH_TEXT = "Vision-language models: further image in the same prompt, with its own heatmaps; may be repeated."
_WITH = option("--with IMAGE", _WITH_TEXT, parse.FILE, name="with_images", multiple=True)
_OTHER_TARGETS = (
    option(
        "--task TASK",
        f"Task of the model: {', '.join(allowed.TASKS)}.  [default: detected from the model]",
        click.Choice(["auto", *allowed.TASKS]),
        default="auto",
    ),
    names_option(
        "--box N|all",
        "Detectors: number of the detection to explain; may be repeated. 0 is the highest-scoring one.  [default: 0]",
        name="boxes",
        find=_find_numbers_or_all,
        completions=[ALL],
    ),
    _EDGE,
    option(
        "--missed L,T,R,B",
        "Detectors: box around an object that was not detected; may be repeated. Give left, top, right and bottom in "
        "pixels. --class is the class of this object.",
        parse.to_box,
        multiple=True,
    ),
    option("--threshold SCORE", "Detectors: minimum score, from 0 to 1.", real(0, 1)),
    option(
        "--mask X,Y|BOX|FILE",
        "Segmenters: region to explain. X,Y: the predicted region at this point; BOX: left,top,right,bottom in pixels; "
        "FILE: an image that is black outside the region. Without --mask: all pixels that are predicted as the class.",
        parse.to_mask,
    ),
    option(
        "--text SENTENCE",
        "CLIP-like models: sentence to locate; may be repeated. Text-prompted detectors: objects to detect. Captioners: "
        "the same as --prompt.",
        parse.to_sentence,
        name="texts",
        multiple=True,
    ),
    option("--like FILE", "Explain why the image is similar to FILE, a second image.", parse.FILE),
    option("--prompt TEXT", "Vision-language models: question or command about the image.", parse.to_sentence),
    click.option("--caption", is_flag=True, help="Captioners: explain every word (default without --word, --against)."),
    names_option(
        "--word N",
        "Captioners: number of the word to explain, from 0; may be repeated.",
        name="words",
        find=_find_numbers,
        completions=(),
    ),
    option("--say TEXT", "Captioners: explain this answer, even if the model gives another one.", parse.to_sentence),
    _WITH,
    names_option(
        "--keypoint N|all",
        "Pose models: number of the keypoint to explain; may be repeated. The keypoint belongs to "
        "the highest-scoring box, unless you give --box.  [default: 0]",
        name="keypoints",
        find=_find_numbers_or_all,
        completions=[ALL],
    ),
    _AXIS,
)


def layers(text: str, *, default: str) -> Callable[[Command], Command]:
    """Return the option for several layers, by names or patterns. The help mentions `default` as the default."""
    full_text = f"{text}; may be repeated. Names, or patterns such as 'layer*.conv1'.  [default: {default}]"
    return layer(full_text, "-l --layer NAME|PATTERN", name="layers", multiple=True)


def _methods(find: Callable[[str], Any], built_in: Iterable[str], default: str) -> Callable[[Command], Command]:
    """Return the option for methods. `find` returns a method by its name. `built_in` lists the built-in names."""

    def find_all(names: Sequence[str]) -> list[Any]:
        with contextlib.nullcontext() if set(names) <= set(built_in) else custom_code_context(*names):
            return [find(name) for name in names]

    return names_option(
        "--method NAME[,NAME]",
        "CAM method (see `gradcam methods`); may be repeated. FILE.py:NAME is your own method."
        f"{_describe_plugins('methods')}{default}",
        name="methods",
        find=find_all,
        completions=[*built_in, *list_entry_points("methods")],
    )


def explain_options(
    *, default: str = " Some tasks have a different default.  [default: gradcam]"
) -> Callable[[Command], Command]:
    """Return the options for the model, layers, methods and target. The help of --method ends with `default`."""
    text = "Target layer (see `gradcam layers`); may be repeated. Without --layer, the model's default layer is used."
    methods = _methods(find_any_method, [*METHODS, *ATTRIBUTIONS], default)
    return combine(*_MODEL, layer(text, name="layers", multiple=True), methods, *_TARGET, *_OTHER_TARGETS, *_FIT)


def page_options() -> Callable[[Command], Command]:
    """Return the options of `gradcam page` for the model, layers, methods and target."""
    return combine(
        *_MODEL,
        layer(
            "Target layer (see `gradcam layers`); may be repeated. Without --layer, the page shows the default layer and up "
            "to three earlier layers.",
            name="layers",
            multiple=True,
        ),
        _methods(find_method, METHODS, " Some models have a different default.  [default: gradcam]"),
        class_(
            "classes",
            "Class to show first; may be repeated. These classes always have heatmaps.  [default: top class]",
            multiple=True,
        ),
        number("--top", "Number of top classes with heatmaps, if heatmaps of all classes cost too much.", 50),
        *_OTHER_TARGETS,
        *_FIT,
    )


def method(default: str) -> Callable[[Command], Command]:
    """Return the option for a single method."""
    return option(
        "--method NAME",
        f"CAM method (see `gradcam methods`). FILE.py:NAME is your own method.  [default: {default}]",
        shell_complete=complete(lambda context: [*METHODS, *list_entry_points("methods")]),
    )


def html_page(contents: str) -> Callable[[Command], Command]:
    """Return the option for an HTML page with a card per image."""
    text = f"Write an HTML page with the first {contents}."
    return option("--page FILE.html", text, output_file(".html", ".htm"))


def _find_saved(names: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in allowed.OUTPUT_KINDS]:
        raise GradcamError(f"{unknown[0]!r} cannot be saved: choose from {', '.join(allowed.OUTPUT_KINDS)}.")
    return names


def combine(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(lambda result, option: option(result), reversed(options), command)


model = combine(*_MODEL)
# In `gradcam audit`, --labels gives the class of each image. Therefore, --class-names gives the names of the model's
# classes.
audit_model = combine(
    *(option for option in _MODEL if option is not _LABELS),
    option("--class-names FILE", *_LABELS_SETTINGS, name="labels"),
)
model_without_name = combine(*_MODEL[1:])  # without --model, for commands in which an argument names the model
# --edge and --axis explain a coordinate. A coordinate has no probability, so its heatmap cannot be evaluated. Only one
# image is evaluated at a time.
_EVALUATED_TARGETS = (option for option in _OTHER_TARGETS if option not in (_EDGE, _AXIS, _WITH))
_AGAINST = "What to contrast the target with: a sentence (for --text; may be repeated) or a word (for --prompt)."
other_targets = combine(*_EVALUATED_TARGETS, against(_AGAINST, "SENTENCE"))
save = combine(
    names_option(
        "--save KIND[,KIND]",
        f"Results to write: {', '.join(allowed.OUTPUT_KINDS)}; may be repeated. "
        f"{'; '.join(map(': '.join, allowed.OUTPUT_KINDS.items()))}.  [default: overlay]",
        name="saved",
        find=_find_saved,
        completions=allowed.OUTPUT_KINDS,
        default=("overlay",),
    ),
    option(
        "--box-threshold T",
        "For --save mask,boxes: share of the heatmap's maximum that a pixel must reach.",
        real(0, 1, above=True),
        default=allowed.BOX_THRESHOLD,
    ),
    choice("--box-method", allowed.BOX_METHODS, "For --save boxes: the box of the largest region, or of each region."),
)


def figure(file_options: str) -> Callable[[Command], Command]:
    """Return the option for a figure. If it is given, other files are written only with one of `file_options`."""
    text = f"Draw one figure for a paper: .pdf, .svg or .png. Other files are then written only with {file_options}."
    return option("--figure FILE", text, output_file(".pdf", ".svg", ".png"))


def _list_look_defaults(name: str) -> str:
    return ", ".join(f"{defaults[name]} on {base}" for base, defaults in allowed.BASES.items())


appearance = combine(
    option(
        "--base",
        "Draw the image under the heatmap in grey or in colour.  [default: gray]",
        click.Choice([*allowed.BASES]),
    ),
    option(
        "--alpha A",
        f"Opacity of the heatmap, from 0 to 1.  [default: {_list_look_defaults('alpha')}]",
        real(0, 1),
        default=None,
    ),
    colormap(None, f"OpenCV colour map of the heatmap.  [default: {_list_look_defaults('colormap')}]"),
    option(
        "--blend",
        f"How the opacity depends on the heatmap. {'; '.join(map(': '.join, allowed.BLENDS.items()))}."
        f"  [default: {_list_look_defaults('blend')}]",
        click.Choice([*allowed.BLENDS]),
    ),
)
printing = combine(
    click.option("--json", "as_json", is_flag=True, help="Print JSON records, and nothing else."),
    click.option("-q", "--quiet", is_flag=True, is_eager=True, help="Print errors only."),
)
