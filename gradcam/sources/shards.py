"""Shares of the pictures, for several jobs that need not know of each other."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

from gradcam.errors import GradcamError, InputError, shorten
from gradcam.storage.run_file import ShardFiles


class TooManyFailuresError(GradcamError):
    """More pictures failed than was allowed."""


@dataclass(frozen=True)
class FailureLimit:
    """At most `most` pictures may fail; with `is_share`, at most so many in a hundred of all that the run is about."""

    most: float
    is_share: bool = False

    def count(self, pictures: int) -> int:
        return math.floor(self.most * pictures / 100) if self.is_share else int(self.most)

    def __str__(self) -> str:
        return f"{self.most:g}%" if self.is_share else f"{self.most:g}"


def parse_limit(text: str) -> FailureLimit:
    """A limit from "10", so many pictures, or "2.5%" of them. Raises `GradcamError` for anything else."""
    found = re.fullmatch(r"(\d{1,12})|(\d{1,3}(?:\.\d+)?)\s*%", text.strip(), re.ASCII)
    if found is None or (found[2] is not None and float(found[2]) > 100):
        raise GradcamError(
            f"{text!r} is not a failure limit: expected a number of images, such as 10, or a percentage, such as 5%."
        )
    return FailureLimit(float(found[1])) if found[1] else FailureLimit(float(found[2]), is_share=True)


@dataclass(frozen=True)
class Shard:
    """The share number `index`, from 1, of `of` shares. Each picture is in one of them, whatever others there are."""

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            raise InputError(
                f"The shard {self.index}/{self.of} does not exist: expected I/N, with I from 1 to N, such as 2/8."
            )

    def takes(self, name: str) -> bool:
        # Python's own hash differs from process to process. Names need not be UTF-8.
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.of == self.index - 1


def parse_shard(text: str) -> Shard:
    """The share that `I/N` means. Raises `InputError` for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise InputError(f"The shard is {shorten(text)}, expected I/N, with I from 1 to N, such as 2/8.")
    return Shard(int(match[1]), int(match[2]))


def to_shard_files(shard: Shard | None) -> ShardFiles:
    """The part of an output folder that is a share's; the whole of it without one."""
    return ShardFiles() if shard is None else ShardFiles(shard.of, shard.index)
