"""What becomes of pictures: one after another is worked on and told, and none that fails stops the others."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import click

from gradcam.cli.settings import Output
from gradcam.errors import describe_failure, join_names, nearest

LOOKED_AT = 1000  # files of a folder, when one is not there


class Outcome(Protocol):
    """What became of one picture, as a line of JSON and as lines for people; with an error there are none of these."""

    @property
    def error(self) -> str | None:
        """A line that names the picture; None where all went well."""

    def to_json(self) -> str: ...

    def format(self) -> str: ...


def tell_each(
    images: Sequence[Path],
    look: Callable[[Path], Outcome],
    fail: Callable[[str, str], Outcome],
    output: Output,
) -> int:
    """`look` at each picture, print what became of it, and give the exit status: 1 where one failed.

    `fail` makes the outcome of a picture and an error. Errors go to standard error, as does what a model of the user's
    prints.
    """
    status = 0
    for image in images:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                outcome = look(image)
        except (Exception, SystemExit) as error:  # one broken picture does not stop the others
            outcome, status = fail(str(image), describe_failure(str(image), error) + _offer(image)), 1
        _tell(outcome, output)
    return status


def _offer(image: Path) -> str:
    """What somebody may have meant who named a file that is not there."""
    offers: list[str] = []
    if not os.path.lexists(image):
        with contextlib.suppress(OSError):
            there = {os.path.splitext(name)[0]: name for name in os.listdir(image.parent)[:LOOKED_AT]}
            offers = [there[stem] for stem in nearest(image.stem, there, 1)]
    return f"; nearest: {join_names(str(image.with_name(name)) for name in offers)}" if offers else ""


def _tell(outcome: Outcome, output: Output) -> None:
    if outcome.error is not None:
        click.echo(outcome.error, err=True)
    if output.as_json:
        click.echo(outcome.to_json())
    elif not output.quiet and outcome.error is None:
        click.echo(outcome.format())
