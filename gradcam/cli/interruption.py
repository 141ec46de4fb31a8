"""What a signal other than Ctrl-C's becomes."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


class Terminated(BaseException):
    """SIGTERM came: as an exception, so that nothing half written is left, and not one that a model's code may raise."""


def heed_sigterm() -> None:
    """From now on the main thread raises `Terminated` when SIGTERM comes."""
    signal.signal(signal.SIGTERM, _terminate)


def heed_nothing() -> None:
    """From now on a signal ends the process at once: while Python shuts down, an exception would only print a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
