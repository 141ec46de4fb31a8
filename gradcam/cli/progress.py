"""What `gradcam batch` says while it works and when it stops."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

import click

from gradcam.cli.terminal import to_command
from gradcam.errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm

    from gradcam.cli.settings import Output
    from gradcam.effort import Progress
    from gradcam.records import Record

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
