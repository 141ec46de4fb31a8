"""One thing that people give to be explained, as far as it was looked into before it is collected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gradcam.batch.inputs.lists import Entry
from gradcam.batch.items import Item
from gradcam.stores import is_url


@dataclass(frozen=True)
class Source:
    """One input: a folder or an archive, by its absolute path or its URL, or files, which a list may name, or a picture.

    `names`: the pictures in a folder of a store, relative to it, which was listed already; None for a folder on a disk.
    """

    folder: str | None = None
    archive: str | None = None
    entries: Sequence[Entry] = ()
    list_name: str = ""
    left_out: int = 0
    names: Sequence[str] | None = None
    given: Item | None = None

    def bases(self) -> set[str]:
        """The folders that its pictures' names could be relative to."""
        whole = self.folder or self.archive
        return {whole} if whole else {_find_parent(entry.path) for entry in self.entries}


def _find_parent(address: str) -> str:
    if not is_url(address):
        return os.path.dirname(address)
    parent = address.rpartition("/")[0]
    return address if parent.endswith(":/") else parent  # a bucket is in no folder
