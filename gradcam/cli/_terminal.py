"""Handle signals, and print to the terminal: safe streams, reports of images, progress bars and notes."""

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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TextIO

import click

from gradcam.cli._settings import OutputMode
from gradcam.errors import CONTROL_CHARACTERS, GradcamWarning, ModelError, describe_unexpected, escape_controls
from gradcam.models.labels import name_class
from gradcam.storage.records import ImageOutcome, Prediction, Record

if TYPE_CHECKING:
    from gradcam.options import Progress

TERMINATION_SIGNALS = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]  # Windows has no SIGHUP


class TerminationSignal(BaseException):
    """The exception that SIGTERM and SIGHUP raise, so that no file is left half written.

    The class does not derive from `Exception`, so that `except Exception` in a model's code does not catch it.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.status = 128 + number


class InterruptSignal(KeyboardInterrupt):
    """The exception that SIGINT raises. Unlike `KeyboardInterrupt`, this class supports weak references."""


# This list has weak references to the exceptions that signals raised. If an exception is deleted while its reference is
# in the list, Python has swallowed the exception.
_signal_exceptions: list[weakref.ref[BaseException]] = []


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Raise an exception in the main thread when SIGINT, SIGTERM or SIGHUP arrives.

    An ignored signal stays ignored, as `nohup` requires. If a library turns the exception into another error, the
    context raises `TerminationSignal` from the other error. After the context, a signal ends the process at once.

    If the exception is raised while Python deletes an object or compiles a module, Python swallows the exception. The
    signal is then sent again.
    """
    received: list[int] = []
    has_ended = False

    def raise_exception(number: int, frame: FrameType | None) -> NoReturn:
        if has_ended:
            os._exit(128 + number)
        received.append(number)
        # If the terminal has been closed, redirect its streams. Otherwise, every printed line would raise an error.
        for stream in () if number in (signal.SIGINT, signal.SIGTERM) else (1, 2):
            try:
                os.write(stream, b"")
            except OSError:  # noqa: PERF203  (only this stream is redirected)
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        raise _watch(number)  # A variable would keep a swallowed exception alive.

    def show_other_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, (InterruptSignal, TerminationSignal)):
            show_unraisable(unraisable)

    show_unraisable, sys.unraisablehook = sys.unraisablehook, show_other_unraisable
    for number in (signal.SIGINT, *TERMINATION_SIGNALS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, raise_exception)
    try:
        yield
    except Exception as error:
        if received:
            raise TerminationSignal(received[0]) from error
        raise
    finally:
        has_ended = True
        acknowledge_signals()
        sys.unraisablehook = show_unraisable


def acknowledge_signals() -> None:
    """Mark the exceptions raised by signals as handled, so that their signals are not sent again."""
    _signal_exceptions.clear()


def _watch(number: int) -> BaseException:
    error = InterruptSignal() if number == signal.SIGINT else TerminationSignal(number)
    _signal_exceptions.append(weakref.ref(error, lambda _: _thread.start_new_thread(_send_again, (number,))))
    return error


def _send_again(number: int) -> None:
    time.sleep(0.01)  # Wait until the main thread has left the code that swallowed the exception.
    if not _signal_exceptions:
        return
    if hasattr(signal, "pthread_kill"):
        # Unlike `interrupt_main`, `pthread_kill` also ends a blocking system call.
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def restore_default_signals() -> None:
    """Let signals end the process at once, because an exception during shutdown would only print a traceback.

    Signals are blocked while the handlers are removed. Otherwise, the handler of a signal could be removed
    after the signal has arrived, and Python would print an error.
    """
    signals = (signal.SIGINT, *TERMINATION_SIGNALS)
    numbers = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    can_wait = hasattr(signal, "pthread_sigmask")  # Windows has no pthread_sigmask.
    if can_wait:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    if can_wait:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


# Some encodings, such as cp1252 on Windows, lack these characters. A partial block becomes # or a space.
ASCII = {"→": "->", "↑": "^", "…": "...", "±": "+-", "×": "x"} | dict.fromkeys("█▉▊▋▌", "#") | dict.fromkeys("▍▎▏", " ")
ASCII_ERROR_HANDLER = "gradcam-ascii"


def _replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded. Return the new text and the next position, as codecs require."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error(ASCII_ERROR_HANDLER, _replace_by_ascii)


def make_streams_safe() -> None:
    """Make stdout and stderr replace characters that the encoding lacks, and escape control characters of user text."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure") and not isinstance(stream, SafeStream):
            stream.reconfigure(errors=ASCII_ERROR_HANDLER)
            setattr(sys, name, SafeStream(stream))


def configure_warnings() -> None:
    """Print each `GradcamWarning` once, as a note, and hide the warnings of image readers about metadata."""
    for reader in ("PIL", "pydicom"):
        warnings.filterwarnings("ignore", module=reader)
    show_warning = warnings.showwarning
    warnings.simplefilter("once", GradcamWarning)

    def show_note(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if not issubclass(category, GradcamWarning):
            show_warning(message, category, *place, **options)
        else:
            print_above_bar(f"Note: {message}")

    warnings.showwarning = show_note


BAR_LENGTH = 24  # characters for 100 %
MAX_LISTED_DETECTIONS = 10  # largest number of printed boxes, words, keypoints and so on
COSINE_KINDS = ("text", "like")  # kinds of targets whose score, a cosine similarity, is printed
EIGHTHS = " ▏▎▍▌▋▊▉█"
MAX_TABLE_ROWS = 32  # largest number of rows in a table if --depth is not given


def format_report(report: ImageOutcome) -> str:
    """Format the report of an image: title, predictions, explanations, the part that the model sees, and a note."""
    record: Record = _make_printable(report.record)
    predictions, explained = ([*map(_make_printable, parts)] for parts in (record.predictions, record.explained))
    record = replace(record, predictions=predictions, explained=explained)
    task = [] if report.task == "classification" else [report.task]
    image, size = report.record.image, record.size or (0, 0)
    lines = [format_title(image, size, record.model, report.device, report.seconds, *task), ""]
    lines += [] if record.answer is None else [f"  {record.answer}", ""]
    if record.predictions:
        lines += [*(_format_detections(record.predictions, report.task) if task else _format_classes(record)), ""]
    lines += [*_format_explanations(record, report.grids), ""] if record.explained else []
    note = [] if record.note is None else [f"  {record.note[:1].upper() + record.note[1:]}."]
    return "\n".join([*lines, _format_view(record, has_fit=not task), *note, ""])


def _make_printable(part: Any) -> Any:
    """Return a record, or a part of a record, with escaped control characters."""
    texts = {name: text for name, text in vars(part).items() if isinstance(text, str) and not text.isprintable()}
    return replace(part, **{name: escape_controls(text) for name, text in texts.items()}) if texts else part


def _format_classes(record: Record) -> list[str]:
    """Format classes and probabilities. A star marks explained classes, unless only the first class is explained."""
    explained = {entry.index for entry in record.explained} - {None}
    marked_indices = set() if explained <= {record.predictions[0].index} else explained
    shares = [prediction.probability for prediction in record.predictions]
    are_probabilities = len(shares) > 1 and all(0 <= share <= 1 for share in shares)
    names = [name_class(prediction.index, prediction.label) for prediction in record.predictions]
    rows = []
    for prediction, name, share in zip(record.predictions, names, shares):
        mark = "*" if prediction.index in marked_indices else " "
        # A class that the user chose is often improbable. Print its probability even if it is far below 1 %.
        percent = f"{100 * share:.1g} %" if mark == "*" and 0 < share < 0.01 else _percent(share)
        bar = f"{percent:>5}   {click.style(draw_bar(share), fg='cyan')}" if are_probabilities else f"{share:>5.4g}"
        rows.append((f"{mark} {name}", str(prediction.index), bar))
    return align(rows, right=(1,) if are_probabilities else (1, 2))


def _format_detections(predictions: Sequence[Prediction], task: str) -> list[str]:
    """Format a line for each detection: the number that users type, the class and the score."""
    share_of = " of the image" if task == "segmentation" else ""
    rows = []
    for prediction in predictions[:MAX_LISTED_DETECTIONS]:
        number = prediction.index if prediction.number is None else prediction.number
        bar = click.style(draw_bar(prediction.probability), fg="cyan")
        share = f"{_percent(prediction.probability):>5}{share_of}"
        rows.append((str(number), name_class(prediction.index, prediction.label), share, bar))
    lines, remaining = [f"  {line}" for line in align(rows, right=(0,))], len(predictions) - len(rows)
    return [*lines, f"  and {remaining} more (see --json)"] if remaining else lines


def _format_explanations(record: Record, grids: Sequence[tuple[int, ...]]) -> list[str]:
    entries = record.explained
    names = [entry.title for entry in entries]
    if entries[0].kind in COSINE_KINDS:
        width = max(map(len, names))
        score_name = "contrast" if entries[0].against else "cosine"
        names = [f"{name:<{width}}   {score_name} {entry.score:.3f}" for name, entry in zip(names, entries)]
    # Print at most three boxes of each heatmap.
    boxes = [[f"box {','.join(f'{edge:.0f}' for edge in box[:4])}" for box in entry.boxes or ()] for entry in entries]
    files = [", ".join([*entry.files.values(), *texts[:3]]) for entry, texts in zip(entries, boxes)]
    places = [f"{entry.layer} ({' x '.join(map(str, grid))})" for entry, grid in zip(entries, grids)]
    kinds = ["positive or negative" if entry.evidence == "signed" else entry.evidence for entry in entries]
    files = [", ".join(filter(None, (file, record.figure))) for file in files]
    arrows = [f"  →  {click.style(file, fg='green')}" for file in files]
    if len(entries) > 1 and len(set(files)) == 1:  # All entries are in one panel.
        methods = dict.fromkeys(entry.method for entry in entries)
        lines = [f"  {', '.join(dict.fromkeys(names))} at {', '.join(dict.fromkeys(places))}"]
        lines.append(f"  by {', '.join(methods)}")
        blank = [kind for kind, entry in zip(kinds, entries) if entry.blank]
        if blank:
            text = f"  no {blank[0]} evidence in {len(blank)} of {len(entries)} heatmaps"
            lines.append(click.style(text, fg="yellow"))
        return [*lines, arrows[0]]
    several_methods = len({entry.method for entry in entries}) > 1
    places = [f"{f'{entry.method} at ' if several_methods else 'at '}{place}" for entry, place in zip(entries, places)]
    blanks = [f"  {click.style(f'no {kind} evidence', fg='yellow')}  →  {file}" for kind, file in zip(kinds, files)]
    ends = [blank if entry.blank else arrow for entry, blank, arrow in zip(entries, blanks, arrows)]
    width, longest = max(map(len, names)), max(map(len, places))
    return [f"  {name:<{width}} {place:<{longest}}{end}" for name, place, end in zip(names, places, ends)]


def quote_command(words: Sequence[str]) -> str:
    """Join words into a command line, quoted for a POSIX shell."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if escape_controls(word) == word:
        return shlex.quote(word)
    escaped = escape_controls(word.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{escaped}'"  # ANSI-C quoting, which bash, zsh and ksh understand


# The package itself prints these control sequences: line ends, colours, and the sequences of the progress bar.
OWN_SEQUENCES = r"\n|\r|\t|\x1b\[(?:[0-9;]*m|[AK]|\?25[lh])"
CONTROL_PATTERN = re.compile(f"({OWN_SEQUENCES})|({CONTROL_CHARACTERS.pattern})")


class SafeStream:
    """A text stream that escapes all control characters, except those that this package prints itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text. Escape control characters that this package does not print itself."""
        return self._stream.write(CONTROL_PATTERN.sub(lambda match: match[1] or escape_controls(match[2]), text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "< 1 %"
    return f"{min(share, 0.99 if share < 1 else 1) * 100:.0f} %"


def draw_bar(share: float, length: int = BAR_LENGTH) -> str:
    """Return a bar of block characters for a fraction `share`. A bar for 100 % has `length` characters."""
    full_blocks, eighths = divmod(round(share * length * 8), 8)
    return "█" * full_blocks + EIGHTHS[eighths].strip()


def _format_view(record: Record, *, has_fit: bool = True) -> str:
    height, width = record.size or (0, 0)
    _, _, rows, columns = record.region or (0, 0, height, width)
    share = rows * columns / (height * width)
    if record.fit is not None:
        kind, _, side = record.fit.partition(":")
        window_note = f", in windows of {side} x {side} pixels" if kind == "tiles" else ""
        return f"  The heatmap covers the whole image{window_note}."
    if share == 1:
        return "  The model sees the whole image."
    sentence = f"  The model sees a centre crop: {columns} x {rows} of {width} x {height} pixels ({_percent(share)})."
    return f"{sentence} Use --fit whole to explain the whole image." if has_fit else sentence


SECONDS_BETWEEN_DRAWINGS = 0.1  # the minimum time between two updates of a progress bar
DEFAULT_COLUMNS = 80  # if the terminal's width is unknown
MAX_LISTED_FAILURES = 20  # number of failures printed at the end; the manifest lists all failures


class Display:
    """The terminal output of a batch: a progress bar, a record per image with `--json`, and failures at the end.

    `total` is the number of all images. `done_before` is the number of images that an earlier run has finished.
    """

    def __init__(self, output: OutputMode, total: int, done_before: int) -> None:
        self._output = output
        self._total, self._done_before = total, done_before
        self._out: TextIO = sys.stdout  # Save the stream, because sys.stdout is redirected while models run.
        self._errors: list[str] = []  # The length is limited, because a batch may have a million broken images.
        self.failed = self._explained = 0
        self._start = time.perf_counter()
        self.bar: ProgressBar | None = None

    def add(self, record: Record) -> None:
        if record.error is not None:
            self.failed += 1
            if self.failed <= MAX_LISTED_FAILURES:
                self._errors.append(record.error)
        else:
            self._explained += 1
        if self.bar is not None:
            self.bar.failed = self.failed
            self.bar.update(self._done_before + self._explained + self.failed)
        if self._output.as_json:
            click.echo(record.to_json(), file=self._out)

    def print_failures(self, manifest: str) -> None:
        for error in self._errors:
            click.echo(escape_controls(error), err=True)
        if self.failed > MAX_LISTED_FAILURES:
            click.echo(
                f"... and {self.failed - MAX_LISTED_FAILURES} more failed images, listed in {manifest}.", err=True
            )

    def print_summary(self, folder: str, *, left_out: int, report: str | None) -> None:
        if self._output.quiet or self._output.as_json:
            return
        seconds, processed = time.perf_counter() - self._start, self._explained + self.failed
        pace = f"{seconds:.1f} s, {processed / seconds:.1f} images per second" if processed else "nothing left to do"
        parts = [f"{plural(self._explained, 'image')} explained"]
        parts += [f"{self._done_before} explained in an earlier run"] if self._done_before else []
        parts += [click.style(f"{self.failed} failed", fg="red")] if self.failed else []
        parts += [f"{plural(left_out, 'non-image file')} ignored"] if left_out else []
        click.echo(f"{', '.join(parts)}   ({pace})")
        for path in filter(None, (folder, report)):
            click.echo(format_written_path(path))

    def print_stop(self, recorded: int) -> None:
        finished = self._done_before + recorded
        click.echo(f"{finished} of {plural(self._total, 'image')} are finished. {describe_resume()}", err=True)


def plural(number: int, noun: str, irregular: str | None = None) -> str:
    """Return the number with its noun, such as "3 images". `irregular` is a plural without -s."""
    return f"{number} {noun if number == 1 else irregular or f'{noun}s'}"


def describe_resume() -> str:
    """Return two lines that explain how to resume the run. The second line is the command."""
    is_piped = "-" in sys.argv[2:]  # "-" stands for a list on standard input.
    return f"To resume{', with the same list on standard input' if is_piped else ''}:\n  {format_resume(sys.argv[1:])}"


def format_resume(arguments: Sequence[str]) -> str:
    """Return the command line with `--resume` instead of `--overwrite`. `arguments` are the words after `gradcam`."""
    remaining = [argument for argument in arguments[1:] if argument not in ("--overwrite", "--resume")]
    return quote_command(["gradcam", *arguments[:1], "--resume", *remaining])


class ProgressBar:
    """A line on the terminal that shows the finished share, the rate and the remaining time."""

    current: ClassVar[ProgressBar | None] = None  # the bar that is visible
    lock = threading.RLock()  # The bar needs a lock, because other threads print above it.

    def __init__(self, unit: str, total: int, completed: int, *, is_hidden: bool) -> None:
        self.unit, self.total, self.completed, self.failed = unit, total, completed, 0
        self._is_hidden, self._done_before, self._start = is_hidden, completed, time.monotonic()
        self._last_drawn = -math.inf

    def update(self, completed: int, total: int | None = None) -> None:
        """Set the progress. Draw the bar if the total has changed, or if the last drawing is old enough."""
        has_new_total = total not in (None, self.total)
        self.completed, self.total = completed, self.total if total is None else total
        if has_new_total or time.monotonic() - self._last_drawn >= SECONDS_BETWEEN_DRAWINGS:
            self.draw()

    def draw(self) -> None:
        self._last_drawn = time.monotonic()
        self._write(self._format(_count_columns() - 1))

    def erase(self) -> None:
        self._write(" " * (_count_columns() - 1) + "\r")

    def _format(self, columns: int) -> str:
        share = min(1, self.completed / max(1, self.total))
        start, end = f"{_percent(share):>5} |", f"| {self.completed} of {self.total}"
        if self.completed > self._done_before:
            rate = (self.completed - self._done_before) / max(time.monotonic() - self._start, 1e-9)
            remaining_time = timedelta(seconds=round(max(0, self.total - self.completed) / rate))
            end += f"   {rate:.2f} {self.unit}/s   {remaining_time} left"
        end += f", {self.failed} failed" if self.failed else ""
        length = max(0, columns - len(start) - len(end))
        return f"{start}{draw_bar(share, length):{length}}{end}"[:columns]

    def _write(self, text: str) -> None:
        if not self._is_hidden:
            with self.lock, contextlib.suppress(OSError):  # The terminal may be closed.
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
        click.echo(escape_controls(text), err=True)
        if bar is not None:
            bar.draw()


@contextlib.contextmanager
def show_progress_bar(output: OutputMode, unit: str, total: int, done_before: int = 0) -> Iterator[ProgressBar]:
    """Show a progress bar on a terminal, unless `--quiet` is given. Inside the context, prints go to standard error."""
    bar = ProgressBar(unit, total, done_before, is_hidden=output.quiet or not sys.stderr.isatty())
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
def show_pass_progress(output: OutputMode) -> Iterator[Progress]:
    """Show a progress bar of model passes, and yield the function that updates the bar."""
    with show_progress_bar(output, "passes", 1) as bar:
        yield bar.update


def align(rows: Sequence[Sequence[str]], gap: str = "   ", right: Collection[int] = ()) -> list[str]:
    """Return a line per row, with its cells padded to the width of the column. Columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    signs = [">" if i in right else "<" for i in range(len(widths))]
    return [gap.join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths)).rstrip() for row in rows]


def shorten_name(name: str, max_length: int) -> str:
    """Shorten a name to `max_length` characters. Do not use this function for layer names, because users copy them."""
    return name if len(name) <= max_length else name[: max_length - 1] + "…"


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape as "64 x 56 x 56". A batch axis of 1 is omitted."""
    return " x ".join(map(str, shape[1:] if tuple(shape[:1]) == (1,) else shape)) or "1"


def find_fitting_depth(depths: Sequence[int]) -> int:
    """Return the largest depth at which a table with rows of these depths has at most `MAX_TABLE_ROWS` rows."""
    return max((limit for limit in set(depths) if sum(depth <= limit for depth in depths) <= MAX_TABLE_ROWS), default=1)


def format_written_path(file: str) -> str:
    """Return a line with an arrow and the path of a written file."""
    return f"  →  {click.style(escape_controls(file), fg='green')}"


def format_title(image: str, size: Sequence[int], model: str, device: object, seconds: float, *facts: str) -> str:
    """Return the title of an image's report: its name, its size as width x height, the model, and the time."""
    texts = image.replace("\\", "/").rpartition("/")[2], f"{model} on {device}"
    name, place = (text if text.isprintable() else escape_controls(text) for text in texts)
    return "   ".join([click.style(name, bold=True), f"{size[1]} x {size[0]}", place, *facts, f"{seconds:.1f} s"])


def import_torch() -> None:
    """Import torch, which takes seconds. Meanwhile, a terminal shows a note unless `--quiet` is given.

    Garbage collection is off during the import, because torch's many objects live until the end of the process.
    """
    if "torch" in sys.modules:
        return
    context = click.get_current_context(silent=True)
    has_note = context is not None and not context.params.get("quiet") and sys.stderr.isatty()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        if has_note:
            click.echo("Loading PyTorch ...\r", nl=False, err=True)
        importlib.import_module("torch")
        gc.freeze()
    finally:
        if is_enabled:
            gc.enable()
        if has_note:
            click.echo("\x1b[K", nl=False, err=True)


@contextlib.contextmanager
def report_waits(output: OutputMode) -> Iterator[None]:
    """Print the log messages about waits and retries on standard error, unless `--quiet` is given."""
    handler = logging.NullHandler() if output.quiet else _PrintAboveBarHandler()
    logging.getLogger("gradcam").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("gradcam").removeHandler(handler)


class _PrintAboveBarHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_above_bar(record.getMessage())


@contextlib.contextmanager
def custom_code_context(*names: str | None) -> Iterator[None]:
    """Allow custom code, such as FILE.py:NAME, to import from the current folder. Redirect prints to stderr."""
    if any(name is not None and ":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` also adds this folder.
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:  # Without this error, the program would end without a message.
        raise ModelError(f"The model's code exited the program: {describe_unexpected(error)}.") from error
