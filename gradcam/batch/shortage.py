"""How it is told that there is no memory left."""

from __future__ import annotations

import torch

# How PyTorch and its libraries say it in a RuntimeError.
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, of the machine or of a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part.lower() in str(error).lower() for part in NO_MEMORY)
