"""Define commands and groups with short and long help, parse option values, and suggest commands after typos."""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam import plugins
from gradcam._version import __version__
from gradcam.cli._terminal import quote_command
from gradcam.errors import GradcamError, find_similar_names, join_names, shorten
from gradcam.images.files import READ_SUFFIXES, is_url
from gradcam.options import LAYOUTS, MAX_MAGNITUDE

if TYPE_CHECKING:
    from gradcam.storage.store import Store

# This table maps each section of the long help to its options. All other options are in the first section, "Options".
SECTIONS = {
    "Target": (
        *("--task", "--box", "--edge", "--missed", "--threshold", "--mask", "--text", "--like"),
        *("--prompt", "--caption", "--word", "--say", "--with", "--keypoint", "--axis", "--target"),
    ),
    "Explanation": (
        *("--fit", "--predictions", "--score", "--against", "--evidence"),
        *("--augmentation", "--smoothing", "--interpolation", "--reshape"),
    ),
    "Appearance": (
        *("--base", "--alpha", "--colormap", "--blend", "--format", "--quality"),
        *("--channels", "--columns", "--order", "--scale", "--cell"),
    ),
    "Model and preprocessing": (
        *("--weights", "--labels", "--class-names", "--activation", "--size", "--crop", "--mean", "--std"),
        *("--reader", "--max-pixels"),
    ),
    "Device and performance": (
        *("--device", "--precision", "--batch-size", "--workers", "--processes", "--pixels", "--shard"),
        *("--engine", "--ray-address", "--actors-per-gpu"),
    ),
    "Printing and help": ("--json", "--quiet", "-h", "--help"),
}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FIRST_SECTION = "Options"
COLUMN = 24  # width of the option column in help, in characters
MAX_DEFAULT = 40  # in characters; the short help omits longer default values
MAX_ALIGNED = 60  # in characters; if a help text is longer, its default value is not aligned
SETTINGS = {
    "help_option_names": ["--help"],  # `add_short_help` adds -h, the short help.
    "max_content_width": 110,
    # Accept the plural of some option names, such as --methods.
    "token_normalize_func": partial(re.compile("^(?:(method|metric|score|layer)s|(class)es)$").sub, r"\1\2"),
}


def to_numbers(text: str) -> tuple[float, ...]:
    """Return the comma-separated numbers. Raise `GradcamError` if the text contains anything else."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise GradcamError(f"{text!r} is neither a number nor a list of numbers, such as 0.5,0.5,0.5.") from None


def to_integer(text: str, *, minimum: int, maximum: int) -> int:
    """Return the integer. Raise `GradcamError` if the text is not an integer in the range."""
    if not re.fullmatch(r"\s*[-+]?\d{1,20}\s*", text, re.ASCII):
        raise GradcamError(f"{text!r} is not an integer.")
    if not minimum <= int(text) <= maximum:
        raise GradcamError(f"{text} is out of range: expected an integer from {minimum} to {maximum}.")
    return int(text)


def to_real(text: str, *, minimum: float, maximum: float, above: bool) -> float:
    """Return the number. Raise `GradcamError` if the number is out of range. `above` excludes the minimum itself."""
    try:
        number = float(text)
    except ValueError:
        raise GradcamError(f"{text!r} is not a number.") from None
    if not minimum <= number <= maximum or (above and number == minimum):
        limits = f"above {minimum:g} and at most {maximum:g}" if above else f"from {minimum:g} to {maximum:g}"
        raise GradcamError(f"{text} is out of range: expected a number {limits}.")
    return number


def to_size(text: str) -> int | tuple[int, ...]:
    """Return one side, or a tuple of two or three sides. Raise `GradcamError` if the text is not a size."""
    sides = re.fullmatch(r"[1-9]\d{0,4}(\s*[x×]\s*[1-9]\d{0,4}){0,2}", text.strip(), re.ASCII | re.IGNORECASE)
    if sides is None:
        problem = f"{text!r} is not a size"
        raise GradcamError(f"{problem}: expected one side, such as 224, or height x width, such as 320x240.")
    size = tuple(map(int, re.findall(r"\d+", sides[0], re.ASCII)))
    return size if len(size) > 1 else size[0]


def to_folder(text: str) -> Path | Store:
    """Return the path of a local folder, or the store of a URL. Raise `GradcamError` for a URL such as "s3:/bucket"."""
    from gradcam.storage.store import EXTRAS_BY_PROTOCOL, parse_location

    scheme, colon, remainder = text.partition(":/")
    if colon and scheme in EXTRAS_BY_PROTOCOL and not remainder.startswith("/"):
        raise GradcamError(f"{text!r} is not a URL: write {scheme}:// with two slashes.")
    return parse_location(text)


def to_means(text: str) -> tuple[float, ...]:
    """Return the comma-separated numbers. Raise `GradcamError` if a number is infinite or too large."""
    numbers = to_numbers(text)
    if not all(abs(number) <= MAX_MAGNITUDE for number in numbers):
        raise GradcamError(f"{text!r} is out of range: expected numbers from -{MAX_MAGNITUDE} to {MAX_MAGNITUDE}.")
    return numbers


def to_stds(text: str) -> tuple[float, ...]:
    """Return the comma-separated numbers. Raise `GradcamError` if a number is not positive."""
    numbers = to_means(text)
    if min(numbers) <= 0:
        raise GradcamError(f"{text!r} is out of range: expected numbers above 0.")
    return numbers


def to_weights(text: str) -> Path:
    """Return the path of a checkpoint. The name of pretrained weights is also returned as a path."""
    is_word = re.fullmatch(r"(\w+_Weights\.)?\w+", text) and not Path(text).exists()
    return Path(text) if is_word else Path(FILE.convert(text, None, None))


def to_layout(text: str) -> str | tuple[int, ...]:
    """Return a grid, or the name of a layout. Raise `GradcamError` if the text is neither."""
    if text.replace("-", " ") in LAYOUTS:
        return text
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){1,2}", text):
        names = join_names(name.replace(" ", "-") for name in LAYOUTS)
        raise GradcamError(f"{text!r} is not a layout: expected a grid, such as 14x14, or one of {names}.")
    return tuple(map(int, text.split("x")))


def to_box(text: str) -> tuple[float, ...]:
    """Return left, top, right and bottom. Raise `GradcamError` if the text is not a box."""
    sides = to_numbers(text)
    is_box = len(sides) == 4 and all(abs(side) <= MAX_MAGNITUDE for side in sides)
    if not is_box or sides[0] >= sides[2] or sides[1] >= sides[3]:
        problem = f"{text!r} is not a box"
        raise GradcamError(f"{problem}: expected left, top, right and bottom in pixels, such as 40,60,220,400.")
    return sides


def to_mask(text: str) -> tuple[float, ...] | Path:
    """Return a point, a box, or the path of a mask file. An existing file takes precedence over a point or box."""
    if re.fullmatch(r"[-+.\d\s,]*,[-+.\d\s,]*", text) and not os.path.exists(text):
        return to_means(text) if len(to_numbers(text)) == 2 else to_box(text)
    return Path(FILE.convert(text, None, None))


def to_sentence(text: str) -> str:
    """Return the sentence. Raise `GradcamError` if the sentence is empty."""
    if not text.strip():
        raise GradcamError("The sentence is empty: describe what to look for.")
    return text


def store_verbose(context: click.Context, _: click.Parameter, is_verbose: bool) -> None:
    """Store `--verbose` for `show_version`. This callback runs first, because `--verbose` is eager."""
    context.meta["verbose"] = is_verbose


def show_version(context: click.Context, _: click.Parameter, is_requested: bool) -> None:
    """Print the version and exit. With `--verbose`, also print the facts that a bug report needs."""
    if not is_requested or context.resilient_parsing:
        return
    click.echo(f"gradcam, version {__version__}")
    if context.meta["verbose"]:
        import torch

        from gradcam.storage.run_file import describe_versions

        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        facts = describe_versions() | {"system": platform.platform(), "cpu threads": torch.get_num_threads()}
        for name, value in (facts | {"gpu": ", ".join(gpus) or "none"}).items():
            click.echo(f"{name:12} {value}")
    context.exit()


def format_examples(context: click.Context) -> list[str]:
    """Return the lines of the section "Examples", or an empty list for commands of plug-ins."""
    from gradcam.cli._help import EXAMPLES

    rows = [line.split("  # ") for line in EXAMPLES.get(_to_name(context), ())]
    width = max((len(line) for line, _ in rows), default=0)
    return ["", "Examples:", *(f"  {line:<{width}}   {comment}" for line, comment in rows)] if rows else []


def _to_name(context: click.Context) -> str:
    return context.command_path.partition(" ")[2]


def format_short_help(context: click.Context) -> list[str]:
    """Return the lines of the short help: usage, summary, examples, and commands or the most used options."""
    command, path = context.command, context.command_path
    if isinstance(command, Group):
        title, rows, path = "Commands", command.list_lines(), f"{path} COMMAND"
    else:
        title, rows = FIRST_SECTION, _list_common_options(context)
    lines = [f"  {name:<{COLUMN}}  {text}" for name, text in rows]
    usage, summary = command.get_usage(context), f"{first_sentence(command.help or '')}."
    end = f"All options, with explanations: {path} --help"
    return [usage, "", summary, *format_examples(context), "", f"{title}:", *lines, "", end]


def _list_common_options(context: click.Context) -> list[tuple[str, str]]:
    """Return each option of the short help, with the first sentence of its help text and its default."""
    from gradcam.cli._help import OPTIONS

    records = list_records(context)
    names = OPTIONS.get(_to_name(context), "").split() or [name for name in records if name not in ("-h", "--help")]
    rows = []
    for name in names:
        option, record = records[name]
        text, _, default = record.partition("  [")
        spelling = f"    {option}" if option.startswith("--") else option
        rows.append((spelling, first_sentence(text), default and f"[{default}"))
    width = max((len(text) for _, text, default in rows if default and len(text) <= MAX_ALIGNED), default=0)
    return [(name, f"{text:<{width}}  {end}" if 0 < len(end) <= MAX_DEFAULT else text) for name, text, end in rows]


def write_long_help(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write usage, examples, description and all options."""
    command.format_usage(ctx, formatter)
    if lines := format_examples(ctx):
        formatter.write("\n".join([*lines, ""]))
    command.format_help_text(ctx, formatter)
    command.format_options(ctx, formatter)
    command.format_epilog(ctx, formatter)


def list_records(context: click.Context) -> dict[str, tuple[str, str]]:
    """Map the long name of each option to its spelling and help text."""
    options = [option for option in context.command.get_params(context) if isinstance(option, click.Option)]
    records = {max(option.opts, key=len): option.get_help_record(context) for option in options}
    return {name: record for name, record in records.items() if record is not None}


def first_sentence(text: str) -> str:
    """Return the first sentence, without its period."""
    return re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]


def show_short_help(context: click.Context, _: click.Parameter, is_requested: bool) -> None:
    """Print the short help and exit."""
    if is_requested and not context.resilient_parsing:
        click.echo("\n".join(format_short_help(context)), color=context.color)
        context.exit()


def add_short_help(command: click.Command) -> None:
    """Add the option `-h`, which prints the short help."""
    settings: Any = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": show_short_help}
    command.params.append(click.Option(["-h"], help="Show the most used options, with examples.", **settings))


class Command(click.Command):
    """A command with a short help (-h) and a long help (--help). The long help has a section for each kind of option.

    `main_options` are listed in the first section, because they have a special meaning in this command.
    """

    def __init__(self, *arguments: Any, main_options: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._main_options = main_options
        add_short_help(self)

    format_help = write_long_help

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = list_records(ctx)
        sectioned = {name for names in SECTIONS.values() for name in names}.difference(self._main_options)
        for title, names in {FIRST_SECTION: [name for name in records if name not in sectioned], **SECTIONS}.items():
            rows = [
                records[name] for name in names if name in records and (title == FIRST_SECTION or name in sectioned)
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=COLUMN)


class Group(click.Group):
    """A group of commands. Each command is imported when it is used.

    `places` maps the name of each command to "module:attribute" and a help line. If a command is mistyped, the error
    suggests similar commands.
    """

    def __init__(
        self, *arguments: Any, places: Mapping[str, tuple[str, str]], has_plugins: bool = False, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._places = places
        self._has_plugins = has_plugins
        add_short_help(self)

    def _list_installed(self) -> dict[str, str]:
        """Map the names of plug-in commands to their help lines, without importing the commands."""
        entries = plugins.list_entry_points("commands") if self._has_plugins else {}
        return {
            name: f"From the package {entry.dist.name}." if entry.dist else entry.value
            for name, entry in entries.items()
            if name not in self._places
        }

    def list_lines(self) -> list[tuple[str, str]]:
        """Return the name and help line of each command."""
        return [(name, line) for name, (_, line) in self._places.items()] + list(self._list_installed().items())

    format_help = write_long_help

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._places, *self._list_installed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None if it does not exist. Raise `GradcamError` if a plug-in cannot be imported."""
        if cmd_name in self._places:
            place, line = self._places[cmd_name]
            module, _, attribute = place.partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            command.short_help = line
            return command
        if cmd_name not in self._list_installed():
            return None
        try:
            plugin = plugins.load_plugin("commands", cmd_name)
        except GradcamError:
            if ctx.resilient_parsing:  # A broken plug-in must not break tab completion.
                return None
            raise
        if not isinstance(plugin, click.Command):
            raise GradcamError(f"The entry point {cmd_name} is {shorten(plugin)}: expected a click command.")
        return plugin

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._places.items()])
        if self._list_installed():
            with formatter.section("Commands of other packages"):
                formatter.write_dl(list(self._list_installed().items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["-h"])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command. Raise `click.UsageError` with a suggestion if there is no such command."""
        if not ctx.resilient_parsing and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(_suggest_command(args, self.list_commands(ctx), ctx), ctx)
        return super().resolve_command(ctx, args)


def _suggest_command(args: list[str], commands: list[str], context: click.Context) -> str:
    first, path = args[0], context.command_path
    if context.parent is None:
        if is_url(first):
            return f"{first} is a URL, not a command. Did you mean: gradcam batch {quote_command(args)} -o explained/"
        if os.path.exists(first) or os.path.splitext(first)[1].lower() in READ_SUFFIXES:
            kind = "a folder" if os.path.isdir(first) else "a file"
            return f"{first} is {kind}, not a command. Did you mean: gradcam run {quote_command(args)}"
    if first == "help":
        return f"There is no command 'help'. Did you mean: {quote_command([*path.split(), *args[1:2], '-h'])}"
    offers = find_similar_names(first, commands) or commands
    heading = "Nearest" if offers is not commands else "Commands"
    return f"There is no command '{first}'. {heading}: {join_names(offers)}."


def show_usage_error(error: click.UsageError) -> None:
    """Print the error on standard error. Add a line with a command to type, unless the error contains one."""
    click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
    if error.ctx is None or "Did you mean: " in error.message:
        return
    if isinstance(error, click.MissingParameter):
        words = []
        for parameter in error.ctx.command.get_params(error.ctx):
            if parameter.required:
                metavar = parameter.metavar or parameter.type.name.upper()
                words += parameter.get_usage_pieces(error.ctx) or [parameter.opts[0], metavar]
        click.echo(f"Type: {' '.join([error.ctx.command_path, *words])}   (more with -h)", err=True)
    else:
        click.echo(f"Help: {error.ctx.command_path} -h", err=True)
