"""What the terminal says of a picture."""

from __future__ import annotations

import _thread
import codecs
import contextlib
import gc
import importlib
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TextIO

import click

from gradcam.cli._settings import Output
from gradcam.errors import CONTROLS, GradcamWarning, ModelError, describe_unexpected, printable
from gradcam.models.labels import name_class
from gradcam.storage.records import Prediction, Record, Report
from gradcam.storage.retry import LOG

if TYPE_CHECKING:
    from gradcam.options import Progress

ENDING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]  # Windows has no SIGHUP


class Terminated(BaseException):
    """A signal came that ends processes, with that status: none that a model's code may raise. Nothing is half written."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.status = 128 + number


class Interrupted(KeyboardInterrupt):
    """SIGINT came. Unlike its base class it can be referred to weakly."""


# What signals raised. When one of these is released before `acknowledge`, Python has dropped it.
_raised: list[weakref.ref[BaseException]] = []


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """Have the main thread raise `Terminated` when SIGTERM comes, or SIGHUP, also where a library makes an error of it.
    SIGINT is a KeyboardInterrupt. One that is ignored stays so: `nohup` asks for that. What comes when this has ended
    ends the process at once.

    Python drops what is raised while it releases an object, or compiles a module. The signal is sent again then.
    """
    came: list[int] = []
    is_over = False

    def end(number: int, frame: FrameType | None) -> NoReturn:
        if is_over:
            os._exit(128 + number)
        came.append(number)
        # What would be written to a terminal that is gone goes nowhere: each line would be an error.
        for stream in () if number in (signal.SIGINT, signal.SIGTERM) else (1, 2):
            try:
                os.write(stream, b"")
            except OSError:  # noqa: PERF203  (of this one)
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        raise _watch(number)  # no variable here may hold it

    def show_dropped(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, (Interrupted, Terminated)):
            show_others(dropped)

    show_others, sys.unraisablehook = sys.unraisablehook, show_dropped
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    except Exception as error:
        if came:
            raise Terminated(came[0]) from error
        raise
    finally:
        is_over = True
        acknowledge()
        sys.unraisablehook = show_others


def acknowledge() -> None:
    """Say that what signals raised has been dealt with."""
    _raised.clear()


def _watch(number: int) -> BaseException:
    error = Interrupted() if number == signal.SIGINT else Terminated(number)
    _raised.append(weakref.ref(error, lambda _: _thread.start_new_thread(_send_again, (number,))))
    return error


def _send_again(number: int) -> None:
    time.sleep(0.01)  # in which the main thread is likely to leave what dropped it
    if not _raised:
        return
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # also ends a wait
    else:
        _thread.interrupt_main(signal.Signals(number))


def heed_nothing() -> None:
    """From now on a signal ends the process at once: while Python shuts down, an exception would only print a traceback.
    Those that come meanwhile wait: Python tells of one whose handler is taken away before it ran."""
    numbers = [number for number in (signal.SIGINT, *ENDING) if signal.getsignal(number) is not signal.SIG_IGN]
    can_wait = hasattr(signal, "pthread_sigmask")  # on Windows they cannot
    if can_wait:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    if can_wait:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


# Replacements in encodings that lack these characters, such as cp1252 on Windows. Parts of a bar's character are rounded.
ASCII = {"→": "->", "↑": "^", "…": "...", "±": "+-", "×": "x"} | dict.fromkeys("█▉▊▋▌", "#") | dict.fromkeys("▍▎▏", " ")
IN_ASCII = "gradcam-ascii"  # the name of the error handler


def _replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return what is written in place of characters that an encoding lacks, and where encoding goes on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error(IN_ASCII, _replace_by_ascii)


def make_streams_safe() -> None:
    """Terminals without Unicode get replacements, and none gets control characters of somebody else's."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure") and not isinstance(stream, SafeStream):
            stream.reconfigure(errors=IN_ASCII)
            setattr(sys, name, SafeStream(stream))


def settle_warnings() -> None:
    """Notes of what a person should know of the maps, each once; nothing of metadata in files that nobody asked for."""
    for reader in ("PIL", "pydicom"):
        warnings.filterwarnings("ignore", module=reader)
    show_others = warnings.showwarning
    warnings.simplefilter("once", GradcamWarning)

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, GradcamWarning):
            show_others(message, category, *place, **more)
        else:
            print_above_bar(f"Note: {message}")

    warnings.showwarning = show


BAR = 24  # characters for 100 %
FOUND = 10  # boxes, words and the like, at most
COSINES = ("text", "like")  # kinds whose score is what people want to know
EIGHTHS = " ▏▎▍▌▋▊▉█"
MOST_ROWS = 32  # of a table where nobody has said how deep it should go


def format_report(report: Report) -> str:
    """Several lines: what it is, what the model saw in it, what was explained, how much of it was seen, and its note."""
    name = report.record.image.replace("\\", "/").rpartition("/")[2]
    record = _make_printable(replace(report.record, image=name))
    height, width = record.size or (0, 0)
    title = click.style(record.image, bold=True)
    task = [] if report.task == "classification" else [report.task]
    parts = [title, f"{width} x {height}", f"{record.model} on {report.device}", *task, f"{report.seconds:.1f} s"]
    lines = ["   ".join(parts), ""]
    if record.predictions:
        lines += [*(_things(record.predictions, report.task) if task else _classes(record)), ""]
    lines += [*_explained(record, report.grids), ""] if record.explained else []
    note = [] if record.note is None else [f"  {record.note[:1].upper() + record.note[1:]}."]
    return "\n".join([*lines, _seen(record, has_fit=not task), *note, ""])


def _make_printable(record: Record) -> Record:
    """Return the record with the control characters in its texts escaped."""
    parts: list[Any] = [record, *record.predictions, *record.explained]
    texts = {text for part in parts for text in vars(part).values() if isinstance(text, str)}
    escaped = {text: printable(text) for text in texts if not text.isprintable()}
    if not escaped:
        return record
    first, *others = [
        replace(part, **{name: escaped.get(text, text) for name, text in vars(part).items() if isinstance(text, str)})
        for part in parts
    ]
    count = len(record.predictions)
    found: Record = replace(first, predictions=others[:count], explained=others[count:])
    return found


def _classes(record: Record) -> list[str]:
    """List the classes and their probabilities; a star marks those that are explained, unless it is the first alone."""
    predictions = record.predictions
    explained = {entry.index for entry in record.explained} - {None}
    marked = set() if explained <= {predictions[0].index} else explained
    names = [name_class(each.index, each.label) for each in predictions]
    width, digits = max(map(len, names)), max(len(str(each.index)) for each in predictions)
    marks = ["*" if each.index in marked else " " for each in predictions]
    rows = zip(marks, names, predictions)
    starts = [f"{mark} {name:<{width}}   {prediction.index:>{digits}}   " for mark, name, prediction in rows]
    shares = [each.probability for each in predictions]
    if len(shares) > 1 and all(0 <= share <= 1 for share in shares):
        bars = [click.style(draw_bar(share), fg="cyan") for share in shares]
        # A class that was named is often improbable: show how improbable.
        is_small = [mark == "*" and 0 < share < 0.01 for mark, share in zip(marks, shares)]
        percents = [f"{100 * share:.1g} %" if small else _percent(share) for share, small in zip(shares, is_small)]
        return [f"{start}{percent:>5}   {bar}" for start, percent, bar in zip(starts, percents, bars)]
    # Outputs that are no probabilities, such as logits: neither a percentage nor a bar would be true.
    values = [f"{share:.4g}" for share in shares]
    longest = max(5, *map(len, values))
    return [f"{start}{value:>{longest}}" for start, value in zip(starts, values)]


def _things(predictions: Sequence[Prediction], task: str) -> list[str]:
    """What was found, each with its number, so that it can be typed, and how sure the model is of it."""
    shown = predictions[:FOUND]
    names = [name_class(each.index, each.label) for each in shown]
    numbers = [str(each.index if each.number is None else each.number) for each in shown]
    width, digits = max(map(len, names)), max(map(len, numbers))
    what = " of the image" if task == "segmentation" else ""
    lines = [
        f"  {number:>{digits}}   {name:<{width}}   {_percent(each.probability):>5}{what}   "
        f"{click.style(draw_bar(each.probability), fg='cyan')}"
        for number, name, each in zip(numbers, names, shown)
    ]
    left = len(predictions) - len(shown)
    return [*lines, f"  and {left} more (see --json)"] if left else lines


def _explained(record: Record, grids: Sequence[tuple[int, ...]]) -> list[str]:
    entries = record.explained
    names = [entry.title for entry in entries]
    if entries[0].kind in COSINES:
        width = max(map(len, names))
        what = "contrast" if entries[0].against else "cosine"
        names = [f"{name:<{width}}   {what} {entry.score:.3f}" for name, entry in zip(names, entries)]
    files = [", ".join(filter(None, (it.overlay, it.heatmap, it.map, it.panel))) for it in entries]
    places = [f"{it.layer} ({' x '.join(map(str, grid))})" for it, grid in zip(entries, grids)]
    kinds = ["positive or negative" if it.evidence == "signed" else it.evidence for it in entries]
    arrows = [f"  →  {click.style(file, fg='green')}" for file in files]
    if len(entries) > 1 and len(set(files)) == 1:  # all on one picture
        methods = dict.fromkeys(it.method for it in entries)
        lines = [
            f"  {', '.join(dict.fromkeys(names))} at {', '.join(dict.fromkeys(places))}",
            f"  by {', '.join(methods)}",
        ]
        blank = [kind for kind, it in zip(kinds, entries) if it.blank]
        if blank:
            text = f"  no {blank[0]} evidence in {len(blank)} of {len(entries)} heatmaps"
            lines.append(click.style(text, fg="yellow"))
        return [*lines, arrows[0]]
    several_methods = len({it.method for it in entries}) > 1
    places = [f"{f'{it.method} at ' if several_methods else 'at '}{place}" for it, place in zip(entries, places)]
    blanks = [click.style(f"no {kind} evidence", fg="yellow") for kind in kinds]
    ends = [
        f"  {blank}  →  {file}" if it.blank else arrow for it, blank, file, arrow in zip(entries, blanks, files, arrows)
    ]
    width, longest = max(map(len, names)), max(map(len, places))
    return [f"  {name:<{width}} {place:<{longest}}{end}" for name, place, end in zip(names, places, ends)]


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


def draw_bar(share: float, length: int = BAR) -> str:
    """So much of a bar of so many characters."""
    whole, eighths = divmod(round(share * length * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def _seen(record: Record, *, has_fit: bool = True) -> str:
    height, width = record.size or (0, 0)
    _, _, rows, columns = record.region or (0, 0, height, width)
    share = rows * columns / (height * width)
    if record.fit is not None:
        kind, _, side = record.fit.partition(":")
        how = f", in windows of {side} x {side} pixels" if kind == "tiles" else ""
        return f"  The heatmap covers the whole image{how}."
    if share == 1:
        return "  The model sees the whole image."
    seen = f"  The model sees a centre crop: {columns} x {rows} of {width} x {height} pixels ({_percent(share)})."
    return f"{seen} Use --fit whole to explain the whole image." if has_fit else seen


SECONDS_BETWEEN_DRAWINGS = 0.1  # of a progress bar
DEFAULT_COLUMNS = 80  # of a terminal that does not tell its width
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
        self._bar: ProgressBar | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Display]:
        total, done = self._pictures, self._done_before
        with shown_bar(self._output, "images", total, done) as self._bar:
            yield self

    def add(self, record: Record) -> None:
        if record.error is not None:
            self._failed += 1
            if self._failed <= LISTED:
                self._errors.append(record.error)
        else:
            self._done += 1
        if self._bar is not None:
            self._bar.failed = self._failed
            self._bar.update(self._done_before + self._done + self._failed)
        if self._output.as_json:
            click.echo(record.to_json(), file=self._out)

    @property
    def has_failures(self) -> bool:
        return self._failed > 0

    def tell_failures(self, manifest: str) -> None:
        for error in self._errors:
            click.echo(printable(error), err=True)
        if self._failed > LISTED:
            click.echo(f"... and {self._failed - LISTED} more, listed as failed in {manifest}.", err=True)

    def tell_end(self, folder: str, *, left_out: int, report: str | None) -> None:
        if self._output.quiet or self._output.as_json:
            return
        seconds, worked_on = time.perf_counter() - self._start, self._done + self._failed
        pace = f"{seconds:.1f} s, {worked_on / seconds:.1f} images per second" if worked_on else "nothing left to do"
        parts = [f"{count(self._done, 'image')} explained"]
        if self._done_before:
            parts.append(f"{self._done_before} explained in an earlier run")
        if self._failed:
            parts.append(click.style(f"{self._failed} failed", fg="red"))
        if left_out:
            parts.append(f"{count(left_out, 'non-image file')} ignored")
        click.echo(f"{', '.join(parts)}   ({pace})")
        for written in filter(None, (folder, report)):
            click.echo(to_arrow(written))

    def tell_stop(self, recorded: int) -> None:
        finished = self._done_before + recorded
        click.echo(f"{finished} of {count(self._pictures, 'image')} are finished. {how_to_go_on()}", err=True)


def count(number: int, what: str, several: str | None = None) -> str:
    """So many of something; `several`: its plural, where that has no s."""
    return f"{number} {what if number == 1 else several or f'{what}s'}"


def how_to_go_on() -> str:
    """Two lines: the second is what to type."""
    is_piped = "-" in sys.argv[2:]  # the names of the pictures
    return f"To resume{', with the same list on standard input' if is_piped else ''}:\n  {resume_line(sys.argv[1:])}"


def resume_line(arguments: Sequence[str]) -> str:
    """What was typed behind `gradcam`, with `--resume` in place of `--overwrite`, for a shell that is bash, zsh or alike."""
    kept = [argument for argument in arguments[1:] if argument not in ("--overwrite", "--resume")]
    return to_command(["gradcam", *arguments[:1], "--resume", *kept])


class ProgressBar:
    """A line on a terminal that is drawn again and again: the share that is done, the rate and the time left."""

    current: ClassVar[ProgressBar | None] = None  # the one on the terminal
    lock = threading.RLock()  # Other threads print above the bar.

    def __init__(self, unit: str, total: int, done: int, *, is_hidden: bool) -> None:
        self.unit, self.total, self.done, self.failed = unit, total, done, 0
        self._is_hidden, self._done_before, self._start = is_hidden, done, time.monotonic()
        self._last_drawn = -math.inf

    def update(self, done: int, total: int | None = None) -> None:
        """Draw the bar again if this many are done, unless it was drawn just now."""
        has_new_total = total not in (None, self.total)
        self.done, self.total = done, self.total if total is None else total
        if has_new_total or time.monotonic() - self._last_drawn >= SECONDS_BETWEEN_DRAWINGS:
            self.draw()

    def draw(self) -> None:
        self._last_drawn = time.monotonic()
        self._write(self._format(_count_columns() - 1))

    def erase(self) -> None:
        self._write(" " * (_count_columns() - 1) + "\r")

    def _format(self, columns: int) -> str:
        share = min(1, self.done / max(1, self.total))
        start, end = f"{_percent(share):>5} |", f"| {self.done} of {self.total}"
        if self.done > self._done_before:
            rate = (self.done - self._done_before) / max(time.monotonic() - self._start, 1e-9)
            left = timedelta(seconds=round(max(0, self.total - self.done) / rate))
            end += f"   {rate:.2f} {self.unit}/s   {left} left"
        end += f", {self.failed} failed" if self.failed else ""
        length = max(0, columns - len(start) - len(end))
        return f"{start}{draw_bar(share, length):{length}}{end}"[:columns]

    def _write(self, text: str) -> None:
        if not self._is_hidden:
            with self.lock, contextlib.suppress(OSError):  # The terminal may be gone.
                sys.stderr.write(f"\r{text}")
                sys.stderr.flush()


def _count_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS
    except (OSError, ValueError):
        return DEFAULT_COLUMNS


def print_above_bar(text: str) -> None:
    """Print a line on standard error, above the progress bar if there is one."""
    with ProgressBar.lock:
        bar = ProgressBar.current
        if bar is not None:
            bar.erase()
        click.echo(printable(text), err=True)
        if bar is not None:
            bar.draw()


@contextlib.contextmanager
def shown_bar(output: Output, unit: str, total: int, done: int = 0) -> Iterator[ProgressBar]:
    """A bar on a terminal that goes away, none with `--quiet`; what a model prints goes to standard error meanwhile."""
    bar = ProgressBar(unit, total, done, is_hidden=output.quiet or not sys.stderr.isatty())
    ProgressBar.current = bar
    try:
        bar.draw()
        with contextlib.redirect_stdout(sys.stderr):
            yield bar
    finally:
        with ProgressBar.lock:
            ProgressBar.current = None
            bar.erase()


@contextlib.contextmanager
def shown_passes(output: Output) -> Iterator[Progress]:
    """A bar that hears of passes done, and of how many."""
    with shown_bar(output, "passes", 1) as bar:
        yield bar.update


def cut_type(name: str, longest: int) -> str:
    """A class's name of so many characters at most; names of layers are never cut, for they are there to be copied."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def show_shape(shape: Sequence[int]) -> str:
    """A tensor's sides; for one picture, without the first, which is the picture's."""
    return " x ".join(map(str, shape[1:] if tuple(shape[:1]) == (1,) else shape)) or "1"


def fitting_depth(depths: Sequence[int]) -> int:
    """The greatest depth of which all rows fit on a screen, by how deep each row lies."""
    return max((it for it in set(depths) if sum(depth <= it for depth in depths) <= MOST_ROWS), default=1)


def to_arrow(file: str) -> str:
    """A line that says where a file is."""
    return f"  →  {click.style(printable(file), fg='green')}"


def to_name(image: str) -> str:
    """What a picture is called, without its folder, for a title."""
    return click.style(printable(image.replace("\\", "/").rpartition("/")[2]), bold=True)


def _load_torch() -> None:
    """Import torch, without looking for garbage among the objects that it makes: they are many, and stay."""
    if "torch" in sys.modules:
        return
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        if is_enabled:
            gc.enable()


def import_torch() -> None:
    """Import torch, which takes seconds; a terminal says so meanwhile, unless `--quiet` was typed."""
    if "torch" in sys.modules:
        return
    context = click.get_current_context(silent=True)
    if context is None or context.params.get("quiet") or not sys.stderr.isatty():
        _load_torch()
        return
    try:
        click.echo("Loading PyTorch ...\r", nl=False, err=True)
        _load_torch()
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
        print_above_bar(record.getMessage())


@contextlib.contextmanager
def code_of_the_user(*names: str | None) -> Iterator[None]:
    """While code runs that may be named so: it can be imported from the current folder, and prints to standard error."""
    if any(name is not None and ":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:  # it would end the program, and say nothing
        raise ModelError(f"The model's code exited the program: {describe_unexpected(error)}.") from error
