"""Devices and precisions by the names that people type."""

# torch is imported when used: the shell reads its choices from here.

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gradcam.choices import PRECISIONS
from gradcam.errors import ModelError, shorten

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA, then MPS, then the CPU. Raises `ModelError` where it is not to be had."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", str(name)):
        raise ModelError(f"There is no device {name!r}: choose auto, cpu, cuda, cuda:N or mps.")
    try:  # each build of PyTorch says in an error of its own what it lacks
        device = torch.device(name)
        torch.empty(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).split(". ")[0].split("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(
            f"There is no device {name!r} here ({reason}): choose auto, cpu, cuda, cuda:N or mps."
        ) from error
    return device


def find_precision(name: str) -> torch.dtype:
    """The dtype of that name. Raises `ModelError` for an unknown one."""
    import torch

    if not isinstance(name, str) or name not in PRECISIONS:
        raise ModelError(f"There is no precision {shorten(name)}: choose {', '.join(PRECISIONS)}.")
    dtype: torch.dtype = getattr(torch, PRECISIONS[name])
    return dtype
