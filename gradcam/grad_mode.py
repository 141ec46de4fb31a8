"""The grad mode of a thread, put back in whatever order contexts end."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import torch


class _Modes(threading.local):
    """The grad modes that the open contexts of this thread found, the outermost first."""

    def __init__(self) -> None:
        self.found: list[list[bool]] = []


_modes = _Modes()


@contextlib.contextmanager
def recording_off() -> Iterator[None]:
    """No recording until somebody switches it on; at the end the grad mode is what it was, in whatever order contexts end.

    `torch.no_grad` would not do: where the outer of two contexts ends first, as an abandoned generator's may, the inner one
    would restore what the outer had set, for good.
    """
    found = _modes.found
    mode = [torch.is_grad_enabled()]
    found.append(mode)
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        inner = next((later for earlier, later in itertools.pairwise(found) if earlier is mode), None)
        if inner is None:
            torch.set_grad_enabled(mode[0])
        else:  # it ends later, and then restores what this one found
            inner[0] = mode[0]
        found[:] = [other for other in found if other is not mode]
