"""What pictures are called: relative to the deepest folder that all the inputs have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import count, takewhile
from pathlib import Path

from gradcam.batch.inputs.source import Source
from gradcam.errors import InputError
from gradcam.stores import Store, is_url

DISK = ""  # in place of a bucket


class Roots:
    """Where the inputs begin: a root for the disk, and one for each bucket.

    With one of these alone, names are relative to it. With several, a name says where its picture is as well: in a store
    it begins with the bucket and has all that follows it in the URL; on the disk it begins with the root folder's name.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        bases: dict[str, set[str]] = {}
        for base in dict.fromkeys(base for source in sources for base in sorted(source.bases())):
            bases.setdefault(find_bucket(base), set()).add(base)
        self.only = len(bases) < 2
        tops = {bucket: _find_common(bucket, found) for bucket, found in (bases or {DISK: set()}).items()}
        self._roots = {bucket: top if self.only or bucket == DISK else bucket for bucket, top in tops.items()}
        self._prefixes = dict.fromkeys(self._roots, "") if self.only else _tell_apart(self._roots)
        self._last = next(iter(self._roots))

    @property
    def root(self) -> str | None:
        """The one folder or URL that all names are relative to; None where there are several."""
        return next(iter(self._roots.values())) if self.only else None

    def name(self, address: str, ending: str = "") -> str:
        """What a path or a URL is called, with "/" between folders; a folder's has the ending, but for the only root's."""
        bucket = find_bucket(address)
        rest = address[len(self._roots.get(bucket, "")) :].replace(os.sep, "/").lstrip("/")
        name = self._prefixes.get(bucket, "") + rest
        if not name and not ending:  # an object that is its own bucket, as some stores have it
            return address.rpartition("/")[2]
        return name.rstrip("/") + ending if name else ""


def find_bucket(address: str) -> str:
    """The bucket that a URL leads to, as a URL; `DISK` for a path."""
    if not is_url(address):
        return DISK
    protocol, _, path = address.rpartition("://")
    return f"{protocol}://{path.partition('/')[0]}"


def to_place(root: str | None) -> Path | Store | None:
    """A root as what can be looked into."""
    return None if root is None else Store(root) if is_url(root) else Path(root)


def _find_common(bucket: str, bases: set[str]) -> str:
    """The deepest folder that all are in."""
    if bucket:
        levels = zip(*(base[len(bucket) :].split("/") for base in bases))
        return bucket + "/".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    try:
        return os.path.commonpath(bases) if bases else os.getcwd()
    except ValueError as error:
        raise InputError("The inputs lie on different drives: explain those of each drive on their own.") from error


def _tell_apart(roots: dict[str, str]) -> dict[str, str]:
    """What names of each root begin with: its own last part, and of several alike the later ones get a number, from 2."""
    prefixes: dict[str, str] = {}
    for bucket, root in roots.items():
        own = label = root.rstrip("/" + os.sep).replace(os.sep, "/").rpartition("/")[2] or "disk"
        numbers = count(2)
        while f"{label}/" in prefixes.values():
            label = f"{own}-{next(numbers)}"
        prefixes[bucket] = f"{label}/"
    return prefixes
