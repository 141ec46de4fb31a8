"""What a signal that ends processes becomes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

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
