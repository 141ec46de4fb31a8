"""Chance that can be repeated: a generator for each purpose, whatever else was drawn before, and in whichever order."""

from __future__ import annotations

import hashlib

import torch


def draw(seed: int, *names: object) -> torch.Generator:
    """PyTorch's generator, on the CPU, for one seed and one purpose: the same numbers on every device."""
    return torch.Generator("cpu").manual_seed(derive(seed, *names))


def derive(seed: int, *names: object) -> int:
    """A seed of its own for one purpose."""
    text = "\n".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") >> 1
