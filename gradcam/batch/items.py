"""A picture to be explained: what it is called, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Content(Protocol):
    """Where a picture's bytes are. Several threads may read at once, and it can be sent to other processes."""

    @property
    def path(self) -> Path | None:
        """The file, where it is one of its own on this machine; None for what lies in an archive or a store."""

    def read(self) -> bytes:
        """All of it. Raises `ImageError`, without the picture's name, where that cannot be had, or changes meanwhile."""


@dataclass(frozen=True, slots=True)
class Item:
    """One picture.

    `name`: relative to the input's root, with "/" between folders; it tells pictures apart, and is the record's `image`.
    `wanted`: the class that a list asks for it, by label or index; None for whatever is asked for all.
    """

    name: str
    content: Content
    wanted: str | None = None


def find_url(item: Item) -> str | None:
    """Where a picture lies in a store, if it is an object of its own there."""
    return getattr(item.content, "url", None)
