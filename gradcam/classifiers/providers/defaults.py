"""Models are built in float32 on the processor, whatever the caller's defaults are; they are moved when they are whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def pytorchs_own_defaults() -> Iterator[None]:
    """PyTorch's default dtype and device as they are when nobody has changed them.

    Weights that are loaded into a model of bfloat16 stay rounded, and what a model computes while it is built has no
    values on the meta device. Where the code that builds the model chooses other defaults itself, those stay.
    """
    before = torch.get_default_dtype()
    is_usual = torch.get_default_device() == torch.device("cpu")
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.nullcontext() if is_usual else torch.device("cpu"):
            yield
    finally:
        if torch.get_default_dtype() == torch.float32:
            torch.set_default_dtype(before)
