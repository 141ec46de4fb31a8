"""What a person is told while a store is waited for."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from gradcam.cli.settings import Output
from gradcam.cli.terminal import printable
from gradcam.stores.waiting import LOG


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
