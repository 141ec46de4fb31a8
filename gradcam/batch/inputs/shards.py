"""Shares of the pictures, for several jobs that need not know of each other."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from gradcam.errors import InputError, shorten


@dataclass(frozen=True)
class Shard:
    """The share number `index`, from 1, of `of` shares. Each picture is in one of them, whatever others there are."""

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            raise InputError(
                f"The share {self.index}/{self.of} does not exist: expected I/N, with I from 1 to N, such as 2/8."
            )

    def takes(self, name: str) -> bool:
        """Whether the picture of this name is in this share."""
        # Python's own hash differs from process to process. Names need not be UTF-8.
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.of == self.index - 1


def parse_shard(text: str) -> Shard:
    """The share that `I/N` means. Raises `InputError` for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise InputError(f"The share is {shorten(text)}, expected I/N, with I from 1 to N, such as 2/8.")
    return Shard(int(match[1]), int(match[2]))
