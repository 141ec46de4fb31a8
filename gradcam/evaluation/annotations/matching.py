"""Pictures found by what annotations call them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

from gradcam.errors import InputError, join_names, shorten

Parts = tuple[str, ...]  # of a path


class Pictures:
    """The names of the pictures that were given, to be found by other names of theirs.

    Paths are of one picture where one of them ends in the other, folder by folder: `cats/a.jpg` is `a.jpg`, and
    `/data/cats/a.jpg`. Of several, the one that agrees in most folders is meant. `keep_suffix`: whether `a.png` is
    another picture than `a.jpg`.
    """

    def __init__(self, names: Iterable[str | os.PathLike[str]], *, keep_suffix: bool = True) -> None:
        self._keep_suffix = keep_suffix
        self.names = list(dict.fromkeys(os.fspath(name) for name in names))
        self._by_last: defaultdict[str, list[tuple[Parts, str]]] = defaultdict(list)
        for name in self.names:
            parts = self._split(name)
            if parts:
                self._by_last[parts[-1]].append((parts, name))

    def find(self, wanted: str, where: str) -> str | None:
        """The name of the picture that is meant, None where nobody gave it. Raises `InputError` where it may be several."""
        parts = self._split(wanted)
        found: defaultdict[int, list[str]] = defaultdict(list)
        for other, name in self._by_last.get(parts[-1], []) if parts else []:
            if other == parts:
                found[len(parts) + 1].append(name)
            common = min(len(parts), len(other))
            if other[-common:] == parts[-common:]:
                found[common].append(name)
        if not found:
            return None
        best = found[max(found)]
        if len(best) > 1:
            raise InputError(
                f"{where}: {shorten(wanted)} may be {join_names(best[:3])}: write more of its path, or give one of these "
                "pictures."
            )
        return best[0]

    def _split(self, path: str) -> Parts:
        plain = path.replace("\\", "/") if self._keep_suffix else os.path.splitext(path.replace("\\", "/"))[0]
        return tuple(part for part in plain.split("/") if part not in ("", ".", ".."))
