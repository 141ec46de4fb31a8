"""How commands are typed: help in sections, two spellings of an option, and the line that was meant."""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from gradcam import plugins
from gradcam._version import __version__
from gradcam.cli._terminal import to_command
from gradcam.errors import GradcamError, join_names, nearest, shorten
from gradcam.images.files import READ_SUFFIXES, is_url
from gradcam.options import MAX_MAGNITUDE

# Which options stand together in a command's help, and in which order; those that are not named here come first.
SECTIONS = {
    "What is explained": (
        *("--task", "--box", "--edge", "--missed", "--threshold", "--mask", "--text", "--like"),
        *("--caption", "--word", "--keypoint", "--axis", "--target"),
    ),
    "How it is explained": (
        *("--fit", "--predictions", "--score", "--against", "--evidence"),
        *("--augmentation", "--smoothing", "--reshape"),
    ),
    "How it is drawn": (
        *("--alpha", "--colormap", "--format", "--quality", "--channels", "--columns", "--order", "--scale", "--cell"),
    ),
    "What the model is, and what it takes": (
        *("--weights", "--labels", "--class-names", "--activation", "--size", "--crop", "--mean", "--std"),
        *("--reader", "--max-pixels"),
    ),
    "Where it runs": (
        *("--device", "--precision", "--batch-size", "--workers", "--processes", "--pixels", "--shard"),
        *("--engine", "--ray-address", "--actors-per-gpu"),
    ),
    "What is printed": ("--json", "--quiet", "--help"),
}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FIRST = "Options"  # the section of all others
SETTINGS = {  # of all commands; options may be typed in the plural
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": partial(re.compile("^(?:(method|metric|score|layer)s|(class)es)$").sub, r"\1\2"),
}


def to_numbers(text: str) -> tuple[float, ...]:
    """Return the numbers between commas. Raises `GradcamError` if there are other words."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise GradcamError(f"{text!r} is no number, nor several with commas between them.") from None


def to_means(text: str) -> tuple[float, ...]:
    """Return finite numbers of either sign. Raises `GradcamError` if one is too large."""
    numbers = to_numbers(text)
    if not all(abs(number) <= MAX_MAGNITUDE for number in numbers):
        raise GradcamError(f"{text!r} is out of range: expected numbers from -{MAX_MAGNITUDE} to {MAX_MAGNITUDE}.")
    return numbers


def to_stds(text: str) -> tuple[float, ...]:
    """Return numbers above zero. Raises `GradcamError` for others."""
    numbers = to_means(text)
    if min(numbers) <= 0:
        raise GradcamError(f"{text!r} is out of range: expected numbers above 0.")
    return numbers


def to_box(text: str) -> tuple[float, ...]:
    """Return left, top, right and bottom. Raises `GradcamError` for anything else."""
    sides = to_numbers(text)
    is_box = len(sides) == 4 and all(abs(side) <= MAX_MAGNITUDE for side in sides)
    if not is_box or sides[0] >= sides[2] or sides[1] >= sides[3]:
        raise GradcamError(
            f"{text!r} is no box: expected left, top, right and bottom in pixels, such as 40,60,220,400."
        )
    return sides


def to_mask(text: str) -> tuple[float, ...] | Path:
    """Return a point, a box, or the path of a file of that name."""
    if re.fullmatch(r"[-+.\d\s,]*,[-+.\d\s,]*", text) and not os.path.exists(text):
        return to_means(text) if len(to_numbers(text)) == 2 else to_box(text)
    return Path(FILE.convert(text, None, None))


def to_sentence(text: str) -> str:
    """Return the sentence. Raises `GradcamError` for an empty one."""
    if not text.strip():
        raise GradcamError("The sentence is empty: say what to look for.")
    return text


def tell_all(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    """Of `--verbose`: remembered for `show_version`, wherever in the line it stands."""
    context.meta["verbose"] = is_wanted


def show_version(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    """Print the version and end; with `--verbose` all that a report of a problem should hold."""
    if not is_wanted or context.resilient_parsing:
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


class Command(click.Command):
    """A command whose help shows its options in sections. `own`: those that mean something else here than elsewhere."""

    def __init__(self, *arguments: Any, own: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._own = own

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [it for it in self.get_params(ctx) if isinstance(it, click.Option)]
        records = {max(it.opts, key=len): it.get_help_record(ctx) for it in options}
        shown = {name: record for name, record in records.items() if record is not None}
        elsewhere = {name for names in SECTIONS.values() for name in names}.difference(self._own)
        for title, names in {FIRST: [name for name in shown if name not in elsewhere], **SECTIONS}.items():
            rows = [shown[name] for name in names if name in shown and (title == FIRST or name in elsewhere)]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=24)


class Group(click.Group):
    """Commands by name, each with its line of help, and imported from its `module:attribute` when it is asked for, so that
    none waits for another, and help for none. What is typed in place of one is answered with the line that was meant."""

    def __init__(
        self, *arguments: Any, places: Mapping[str, tuple[str, str]], has_plugins: bool = False, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._places = places
        self._has_plugins = has_plugins

    def _list_installed(self) -> dict[str, str]:
        """What other packages add, each with the line that its help has; none of them is imported."""
        found = plugins.installed("commands") if self._has_plugins else {}
        return {
            name: f"Of the package {entry.dist.name}." if entry.dist else entry.value
            for name, entry in found.items()
            if name not in self._places
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._places, *self._list_installed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None. Raises `GradcamError` for one of another package that cannot be had."""
        if cmd_name in self._places:
            place, line = self._places[cmd_name]
            module, _, attribute = place.partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            command.short_help = line
            return command
        if cmd_name not in self._list_installed():
            return None
        try:
            found = plugins.load("commands", cmd_name)
        except GradcamError:
            if ctx.resilient_parsing:  # Tab, which goes on with the others
                return None
            raise
        if not isinstance(found, click.Command):
            raise GradcamError(f"The entry point {cmd_name} is {shorten(found)}, expected a click command.")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._places.items()])
        if self._list_installed():
            with formatter.section("Commands of other packages"):
                formatter.write_dl(list(self._list_installed().items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        """The command. Raises `click.UsageError` with a line to type where there is none of that name."""
        if not ctx.resilient_parsing and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(_guess(args, self.list_commands(ctx), ctx), ctx)
        return super().resolve_command(ctx, args)


def _guess(args: list[str], commands: list[str], context: click.Context) -> str:
    first, path = args[0], context.command_path
    if context.parent is None:
        if is_url(first):
            return f"{first} is a URL, and no command. Type: gradcam batch {to_command(args)} -o explained/"
        if os.path.exists(first) or os.path.splitext(first)[1].lower() in READ_SUFFIXES:
            what = "a folder" if os.path.isdir(first) else "a file"
            return f"{first} is {what}, and no command. Type: gradcam run {to_command(args)}"
    if first == "help":
        return f"There is no command 'help'. Type: {to_command([*path.split(), *args[1:2], '-h'])}"
    offers = nearest(first, commands) or commands
    word = "Nearest" if offers is not commands else "There are"
    return f"There is no command '{first}'. {word}: {join_names(offers)}."


def show_usage_error(error: click.UsageError) -> None:
    """Two lines on standard error: what is wrong, and what to type."""
    click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
    if error.ctx is None or "Type: " in error.message:
        return
    if isinstance(error, click.MissingParameter):
        words = [
            it.make_metavar(error.ctx)
            if isinstance(it, click.Argument)
            else f"{it.opts[0]} {it.make_metavar(error.ctx)}"
            for it in error.ctx.command.get_params(error.ctx)
            if it.required
        ]
        click.echo(f"Type: {' '.join([error.ctx.command_path, *words])}   (-h shows more)", err=True)
    else:
        click.echo(f"Help: {error.ctx.command_path} -h", err=True)
