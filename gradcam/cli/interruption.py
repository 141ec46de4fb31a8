"""What a signal other than Ctrl-C's becomes."""

from __future__ import annotations

import os
import signal
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


def heed_signals() -> None:
    """From now on the main thread raises `Terminated` when SIGTERM comes, or SIGHUP: a terminal was closed.

    One that is ignored stays so: `nohup` asks for that.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def heed_nothing() -> None:
    """From now on a signal ends the process at once: while Python shuts down, an exception would only print a traceback."""
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    if number != signal.SIGTERM:
        _forget_closed_terminal()
    raise Terminated(number)


def _forget_closed_terminal() -> None:
    """What would be written to a terminal that is gone goes nowhere: each line would be an error."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:  # noqa: PERF203  (of this one)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
