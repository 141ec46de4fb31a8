"""What a person is told while a store, or the start of torch, is waited for."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator

import click

from gradcam.cli.settings import Output
from gradcam.errors import printable
from gradcam.stores.waiting import LOG


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
