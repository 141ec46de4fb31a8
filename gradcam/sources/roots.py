"""Describe the inputs, and name their images relative to common roots."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from gradcam.errors import InputError
from gradcam.images.files import is_url
from gradcam.sources.contents import InputImage
from gradcam.sources.list_files import ListEntry

DISK = ""  # For paths on a disk, this value replaces the URL of a bucket.


@dataclass(frozen=True)
class Source:
    """One input: a folder, an archive, single files (which may come from a list), or an image in memory.

    Folders and archives are absolute paths or URLs. For a folder in a store, `names` contains the names of its images.
    For a folder on a disk, `names` is None.
    """

    folder: str | None = None
    archive: str | None = None
    entries: Sequence[ListEntry] = ()
    list_name: str = ""
    left_out: int = 0
    names: Sequence[str] | None = None
    item: InputImage | None = None

    def bases(self) -> set[str]:
        container = self.folder or self.archive
        return {container} if container else {_find_parent(entry.path) for entry in self.entries}


def _find_parent(address: str) -> str:
    if not is_url(address):
        return os.path.dirname(address)
    parent = address.rpartition("/")[0]
    return address if parent.endswith(":/") else parent  # A bucket has no parent folder.


class Roots:
    """The root folders to which image names are relative. There is one root for the disk, and one for each bucket.

    If there are several roots, names begin with a prefix. In a store, the prefix is the bucket's name. On the disk, the
    prefix is the name of the root folder.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        bases: dict[str, set[str]] = {}
        for base in dict.fromkeys(base for source in sources for base in sorted(source.bases())):
            bases.setdefault(find_bucket(base), set()).add(base)
        self.is_single = len(bases) < 2
        tops = {bucket: _find_common(bucket, addresses) for bucket, addresses in (bases or {DISK: set()}).items()}
        self._roots = {bucket: top if self.is_single or bucket == DISK else bucket for bucket, top in tops.items()}
        self._prefixes = dict.fromkeys(self._roots, "") if self.is_single else _choose_prefixes(self._roots)

    @property
    def root(self) -> str | None:
        return next(iter(self._roots.values())) if self.is_single else None

    def name(self, address: str, ending: str = "") -> str:
        """Return the name of a path or URL relative to its root, with "/" between folders.

        `ending` is appended to the name of a folder. If the folder is the only root, its name is empty, and nothing is
        appended.
        """
        bucket = find_bucket(address)
        remaining = address[len(self._roots.get(bucket, "")) :].replace(os.sep, "/").lstrip("/")
        name = self._prefixes.get(bucket, "") + remaining
        if not name and not ending:  # In some stores, an object and its bucket have the same URL.
            return address.rpartition("/")[2]
        return name.rstrip("/") + ending if name else ""


def find_bucket(address: str) -> str:
    """Return the URL of the bucket of a URL, or `DISK` for a path."""
    if not is_url(address):
        return DISK
    protocol, _, path = address.rpartition("://")
    return f"{protocol}://{path.partition('/')[0]}"


def _find_common(bucket: str, bases: set[str]) -> str:
    if bucket:
        levels = zip(*(base[len(bucket) :].split("/") for base in bases))
        return bucket + "/".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    try:
        return os.path.commonpath(bases) if bases else os.getcwd()
    except ValueError as error:
        raise InputError("The inputs are on different drives: explain the inputs of each drive separately.") from error


def _choose_prefixes(roots: dict[str, str]) -> dict[str, str]:
    """Return the prefix of image names for each root.

    The prefix is the last part of the root's path. If several roots have the same last part, the
    first keeps it, and the others get a number: `name-2`, `name-3`.
    """
    prefixes: dict[str, str] = {}
    for bucket, root in roots.items():
        name = label = root.rstrip("/" + os.sep).replace(os.sep, "/").rpartition("/")[2] or "disk"
        numbers = count(2)
        while f"{label}/" in prefixes.values():
            label = f"{name}-{next(numbers)}"
        prefixes[bucket] = f"{label}/"
    return prefixes
