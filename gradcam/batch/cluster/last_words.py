"""Last words of a process that Ray ends: without its head, Ray ends whoever joined it, and leaves no time to say anything.

This file is a program too, which needs nothing but Python: the process that speaks then.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

DONE = b"done"
PAUSE = 0.5  # seconds between two looks at the head
SECONDS = 3  # to wait for its answer


@contextlib.contextmanager
def last_words(address: str, text: str, *, is_own: bool) -> Iterator[None]:
    """Meanwhile, should Ray end this process, another one says `text` on standard error; not where somebody kills this one.

    `address`: HOST:PORT of the head. `is_own`: whether that ends with this process, however it does.
    """
    command = [sys.executable, "-I", __file__, address, "own" if is_own else "joined", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as witness:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if witness.stdin is not None:
                    witness.stdin.write(DONE)


def _watch(address: str, kind: str, text: str) -> None:
    is_told, is_lost = threading.Event(), threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that is watched can heed that
    for name in ("SIGTERM", "SIGHUP"):  # to all of its group: Ray may be faster than it
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), lambda *_: is_told.set())

    def look() -> None:
        while True:
            (is_lost.clear if _answers(address) else is_lost.set)()
            time.sleep(PAUSE)

    threading.Thread(target=look, daemon=True).start()
    if sys.stdin.buffer.read() == DONE:
        return
    if is_told.is_set() or is_lost.is_set() or (kind == "joined" and not _answers(address)):
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + text + "\n")  # a bar has not ended its line


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _watch(*sys.argv[1:])
