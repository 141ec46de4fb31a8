"""What the terminal says of a picture."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from gradcam.cli._settings import Output
from gradcam.errors import CONTROLS, printable
from gradcam.storage.records import Explained, Prediction, Record
from gradcam.storage.retry import LOG

if TYPE_CHECKING:
    from tqdm import tqdm

    from gradcam.cam.budget import Progress


ENDING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]  # Windows has no SIGHUP


class Terminated(BaseException):
    """A signal came that ends processes: as an exception, so that nothing half written is left.

    It is none that a model's code may raise. `status`: what the process is to exit with.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.status = 128 + number


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """Have the main thread raise `Terminated` when SIGTERM comes, or SIGHUP: a terminal was closed.

    SIGINT is a KeyboardInterrupt. One that is ignored stays so: `nohup` asks for that. Where a library makes an error of its
    own of such an exception, `Terminated` is raised in its place.
    """
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        came.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number != signal.SIGTERM:
            _forget_closed_terminal()
        raise Terminated(number)

    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    except Exception as error:
        if came:
            raise Terminated(came[0]) from error
        raise


def heed_nothing() -> None:
    """From now on a signal ends the process at once: while Python shuts down, an exception would only print a traceback."""
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _forget_closed_terminal() -> None:
    """What would be written to a terminal that is gone goes nowhere: each line would be an error."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:  # noqa: PERF203  (of this one)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


BAR = 24  # characters for 100 %
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Result:
    """A record, and what else is worth saying: the maps' sizes, and the time in seconds."""

    record: Record
    grids: Sequence[tuple[int, ...]] = ()
    device: str = ""
    seconds: float = 0.0

    @property
    def error(self) -> str | None:
        """The record's."""
        return self.record.error

    def to_json(self) -> str:
        """The record's."""
        return self.record.to_json()

    def format(self) -> str:
        """Several lines, as `format_result` has them."""
        return format_result(self)


def format_result(result: Result) -> str:
    """Several lines: what it is, what the model saw in it, what was explained, how much of it was seen, and its note."""
    record = result.record
    height, width = record.size or (0, 0)
    title = click.style(printable(record.image.replace("\\", "/").rpartition("/")[2]), bold=True)
    parts = [title, f"{width} x {height}", f"{printable(record.model)} on {result.device}", f"{result.seconds:.1f} s"]
    lines = ["   ".join(parts), "", *_predictions(record.predictions), "", *_explained(result), "", _seen(record)]
    if record.note is not None:
        lines.append(f"  {printable(record.note[:1].upper() + record.note[1:])}.")
    lines.append("")
    return "\n".join(lines)


def _predictions(predictions: Sequence[Prediction]) -> list[str]:
    width = max(len(_name(prediction)) for prediction in predictions)
    digits = max(len(str(prediction.index)) for prediction in predictions)
    if not all(0 <= prediction.probability <= 1 for prediction in predictions):
        return _plain_numbers(predictions, width, digits)
    return [
        f"  {_name(prediction):<{width}}   {prediction.index:>{digits}}   {_percent(prediction.probability):>5}   "
        + click.style(_bar(prediction.probability), fg="cyan")
        for prediction in predictions
    ]


def _plain_numbers(predictions: Sequence[Prediction], width: int, digits: int) -> list[str]:
    """Outputs that are no probabilities, such as logits: neither a percentage nor a bar would be true."""
    values = [f"{prediction.probability:.4g}" for prediction in predictions]
    longest = max(5, *map(len, values))
    return [
        f"  {_name(prediction):<{width}}   {prediction.index:>{digits}}   {value:>{longest}}"
        for prediction, value in zip(predictions, values)
    ]


def _explained(result: Result) -> list[str]:
    explained = result.record.explained
    if len(explained) > 1 and len({_file(entry) for entry in explained}) == 1:
        return _together(result)
    width = max(len(_name(entry)) for entry in explained)
    several_methods = len({entry.method for entry in explained}) > 1
    places = [
        f"{f'{entry.method} at ' if several_methods else 'at '}{printable(entry.layer)} ({' x '.join(map(str, grid))})"
        for entry, grid in zip(explained, result.grids)
    ]
    longest = max(map(len, places))
    return [
        _explained_line(entry, f"  {_name(entry):<{width}} {place:<{longest}}")
        for entry, place in zip(explained, places)
    ]


def _together(result: Result) -> list[str]:
    """What is all on one picture."""
    explained = result.record.explained
    places = dict.fromkeys(
        f"{printable(entry.layer)} ({' x '.join(map(str, grid))})" for entry, grid in zip(explained, result.grids)
    )
    names = dict.fromkeys(_name(entry) for entry in explained)
    methods = dict.fromkeys(entry.method for entry in explained)
    blank = [entry for entry in explained if entry.blank]
    lines = [f"  {', '.join(names)} at {', '.join(places)}", f"  by {', '.join(methods)}"]
    if blank:
        lines.append(
            click.style(f"  no {_kind(blank[0])} evidence in {len(blank)} of {len(explained)} maps", fg="yellow")
        )
    return [*lines, f"  →  {click.style(_file(explained[0]), fg='green')}"]


def _explained_line(entry: Explained, start: str) -> str:
    if entry.blank:
        return f"{start}  {click.style(f'no {_kind(entry)} evidence', fg='yellow')}  →  {_file(entry)}"
    return f"{start}  →  {click.style(_file(entry), fg='green')}"


def _kind(entry: Explained) -> str:
    return "positive or negative" if entry.evidence == "signed" else entry.evidence


def _name(entry: Prediction | Explained) -> str:
    return f"class {entry.index}" if entry.label is None else printable(entry.label)


def _file(entry: Explained) -> str:
    files = (entry.overlay, entry.heatmap, entry.map, entry.panel)
    return ", ".join(printable(file) for file in files if file is not None)


def to_command(words: Sequence[str]) -> str:
    """The line that a shell takes for these words."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    escaped = printable(word.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{escaped}'"  # as shells but the plainest know it


# Of what is printed, these are ours: ends of lines, colours, and what a bar moves in its own line with.
OURS = r"\n|\r|\t|\x1b\[(?:[0-9;]*m|[AK]|\?25[lh])"
FOREIGN = re.compile(f"({OURS})|({CONTROLS.pattern})")


class SafeStream:
    """A text stream that escapes control characters which nobody here has any use for, whatever they come from."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does."""
        return self._stream.write(FOREIGN.sub(lambda found: found[1] or printable(found[2]), text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "< 1 %"
    return f"{min(share, 0.99 if share < 1 else 1) * 100:.0f} %"


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def _seen(record: Record) -> str:
    height, width = record.size or (0, 0)
    _, _, rows, columns = record.region or (0, 0, height, width)
    share = rows * columns / (height * width)
    if record.fit is not None:
        kind, _, side = record.fit.partition(":")
        how = f" in windows of {side} x {side} pixels" if kind == "tiles" else ""
        return f"  The map is of the whole picture{how}."
    if share == 1:
        return "  The network saw the whole picture."
    seen = f"the central {_percent(share)} of the picture, {columns} x {rows} pixels"
    return f"  The network saw {seen}; for all of it, --fit whole."


SHAPE = "{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt}   {rate_noinv_fmt}   {remaining} left{postfix}"  # of a bar
PASSES = "{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt}   {remaining} left"
LISTED = 20  # failures that are named at the end; all of them are in the manifest


class Display:
    """A bar on standard error, records on standard output where they are asked for, and failures at the end."""

    def __init__(self, output: Output, pictures: int, done: int) -> None:
        self._output = output
        self._pictures, self._done_before = pictures, done
        self._out: TextIO = sys.stdout  # what a model of the user's prints goes to standard error meanwhile
        self._errors: list[str] = []  # the first of them: a million broken pictures are not held
        self._failed = self._done = 0
        self._start = time.perf_counter()
        self._bar: tqdm[None] | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Display]:
        """While pictures are worked on."""
        from tqdm import tqdm

        is_hidden = True if self._output.quiet else None  # None: unless standard error is a terminal
        with tqdm(
            total=self._pictures, initial=self._done_before, unit=" pictures", bar_format=SHAPE, dynamic_ncols=True,
            disable=is_hidden, file=sys.stderr, leave=False,
        ) as self._bar, contextlib.redirect_stdout(sys.stderr):  # fmt: skip
            yield self

    def add(self, record: Record) -> None:
        """One more picture."""
        if record.error is not None:
            self._failed += 1
            if self._failed <= LISTED:
                self._errors.append(record.error)
        else:
            self._done += 1
        if self._bar is not None:
            self._bar.update()
            if self._failed:
                self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        if self._output.as_json:
            click.echo(record.to_json(), file=self._out)

    @property
    def has_failures(self) -> bool:
        return self._failed > 0

    def tell_failures(self, manifest: str) -> None:
        """The broken pictures, by name, on standard error."""
        for error in self._errors:
            click.echo(printable(error), err=True)
        if self._failed > LISTED:
            click.echo(f"... and {self._failed - LISTED} more, which have the status failed in {manifest}.", err=True)

    def tell_end(self, folder: str, *, left_out: int, report: str | None) -> None:
        """How many, how fast, and where they are."""
        if self._output.quiet or self._output.as_json:
            return
        seconds, worked_on = time.perf_counter() - self._start, self._done + self._failed
        pace = (
            f"{seconds:.1f} s, {worked_on / seconds:.1f} pictures a second" if worked_on else "nothing was left to do"
        )
        parts = [f"{count(self._done, 'picture')} explained"]
        if self._done_before:
            parts.append(f"{self._done_before} had been before")
        if self._failed:
            parts.append(click.style(f"{self._failed} failed", fg="red"))
        if left_out:
            parts.append(f"{count(left_out, 'other file')} left out")
        click.echo(f"{', '.join(parts)}   ({pace})")
        click.echo(f"  →  {click.style(printable(folder), fg='green')}")
        if report is not None:
            click.echo(f"  →  {click.style(printable(report), fg='green')}")

    def tell_reason(self, reason: str) -> None:
        """Why it stopped, on standard error."""
        click.echo(printable(reason), err=True)

    def tell_stop(self, recorded: int) -> None:
        """How far it came, and the line to go on with, on standard error."""
        finished = self._done_before + recorded
        click.echo(f"{finished} of {count(self._pictures, 'picture')} are finished. {how_to_go_on()}", err=True)


def count(number: int, what: str) -> str:
    """So many of something."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def how_to_go_on() -> str:
    """Two lines: the second is what to type."""
    is_piped = "-" in sys.argv[2:]  # the names of the pictures
    return f"To go on{', with the same list on standard input' if is_piped else ''}:\n  {resume_line(sys.argv[1:])}"


def resume_line(arguments: Sequence[str]) -> str:
    """What was typed behind `gradcam`, with `--resume` in place of `--overwrite`, for a shell that is bash, zsh or alike."""
    kept = [argument for argument in arguments[1:] if argument not in ("--overwrite", "--resume")]
    return to_command(["gradcam", *arguments[:1], "--resume", *kept])


@contextlib.contextmanager
def shown_passes(output: Output, *, wanted: bool = True) -> Iterator[Progress]:
    """A bar on a terminal that hears of passes done, and of how many, and goes away; none with `--quiet`.

    Whatever a model of the user's prints goes to standard error meanwhile.
    """
    from tqdm import tqdm

    is_hidden = True if output.quiet or not wanted else None  # None: unless standard error is a terminal
    with tqdm(
        total=1, bar_format=PASSES, dynamic_ncols=True, disable=is_hidden, file=sys.stderr, leave=False
    ) as bar, contextlib.redirect_stdout(sys.stderr):  # fmt: skip

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def import_torch() -> None:
    """Import torch, which takes seconds; a terminal says so meanwhile, unless `--quiet` was typed."""
    context = click.get_current_context(silent=True)
    is_told = context is not None and not context.params.get("quiet") and sys.stderr.isatty()
    if "torch" in sys.modules or not is_told:
        return
    try:
        click.echo("Loading PyTorch ...\r", nl=False, err=True)
        importlib.import_module("torch")
    finally:
        click.echo("\x1b[K", nl=False, err=True)


@contextlib.contextmanager
def telling_waits(output: Output) -> Iterator[None]:
    """Meanwhile what is waited for is said on standard error, above a bar that is there; not at all with `--quiet`."""
    handler = logging.NullHandler() if output.quiet else _Teller()
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(printable(record.getMessage()), file=sys.stderr)
