"""Limit the failures of a run, and divide its images between independent jobs."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

from gradcam.errors import GradcamError, InputError, shorten
from gradcam.storage.run_file import ShardFiles


class TooManyFailuresError(GradcamError):
    """More images failed than the limit allows."""


@dataclass(frozen=True)
class FailureLimit:
    """The maximum number of failed images in a run. If `is_share` is True, `most` is a percentage of all images."""

    most: float
    is_share: bool = False

    def count(self, images: int) -> int:
        return math.floor(self.most * images / 100) if self.is_share else int(self.most)

    def __str__(self) -> str:
        return f"{self.most:g}%" if self.is_share else f"{self.most:g}"


def parse_failure_limit(text: str) -> FailureLimit:
    """Parse a limit such as "10" images or "2.5%" of the images. Raises `GradcamError` for other texts."""
    match = re.fullmatch(r"(\d{1,12})|(\d{1,3}(?:\.\d+)?)\s*%", text.strip(), re.ASCII)
    if match is None or (match[2] is not None and float(match[2]) > 100):
        expected = "a number of images, such as 10, or a percentage, such as 5%"
        raise GradcamError(f"{text!r} is not a failure limit: expected {expected}.")
    return FailureLimit(float(match[1])) if match[1] else FailureLimit(float(match[2]), is_share=True)


@dataclass(frozen=True)
class Shard:
    """One shard of a run. `index` is its number, from 1, and `of` is the number of shards.

    The shard of an image depends only on the image's name and on `of`.
    """

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            expected = "I/N, with I from 1 to N, such as 2/8"
            raise InputError(f"The shard {self.index}/{self.of} does not exist: expected {expected}.")

    def takes(self, name: str) -> bool:
        # Do not use Python's own hash, which differs between processes. Surrogates stand for bytes of names that are
        # not UTF-8.
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.of == self.index - 1


def parse_shard(text: str) -> Shard:
    """Parse a shard `I/N`, such as `2/8`. Raises `InputError` for other texts."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise InputError(f"The shard is {shorten(text)}, expected I/N, with I from 1 to N, such as 2/8.")
    return Shard(int(match[1]), int(match[2]))


def to_shard_files(shard: Shard | None) -> ShardFiles:
    """Return the names of the files that a shard writes to the output folder. None stands for a run without shards."""
    return ShardFiles() if shard is None else ShardFiles(shard.of, shard.index)
