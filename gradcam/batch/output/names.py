"""What the results of many pictures are called: like the pictures, and no two alike, on any file system."""

from __future__ import annotations

import hashlib
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import count

from gradcam.batch.items import Item
from gradcam.naming import LONGEST_NAME

ENDING = 150  # bytes of what is put behind a stem: method, class, layer, kind and suffix
NUMBER = 8  # bytes of "-" and a number
LONGEST_FOLDERS = 700  # bytes; paths end at 1024 on some systems
# What Windows, and disks that come from there, do not take, characters that steer terminals, and bytes that are not UTF-8.
UNSAFE = re.compile('[<>:"|?*\\\\\x00-\x1f\x7f\ud800-\udfff]')


def plan_stems(items: Iterable[Item], *, ending: int = ENDING) -> dict[str, str]:
    """For each item's name the path below the output folder that its results' names begin with: `<folders>/<stem>`.

    It is the name without its suffix. Where two pictures would have the same, case and Unicode's forms aside, each gets
    its suffix, `<stem>-<suffix>`, and where that is taken as well a number, from 2. Other pictures make no difference,
    nor does any order. Stems and folders that are too long are cut, and end in a hash of the whole.
    `ending`: how many bytes may follow a stem, so that the name fits and need not be cut again.
    """
    names = [item.name for item in items]
    room = LONGEST_NAME - ending - NUMBER
    stems = {name: _to_stem(name, room, with_suffix=False) for name in names}
    shared = _find_shared(stems)
    if not shared:
        return stems
    taken = {_fold(stem) for name, stem in stems.items() if name not in shared}
    for name in shared:
        stems[name] = _to_stem(name, room, with_suffix=True)
    still_shared = _find_shared({name: stems[name] for name in shared})
    still_shared |= {name for name in shared if _fold(stems[name]) in taken}
    taken |= {_fold(stems[name]) for name in shared - still_shared}
    numbers = {_fold(stems[name]): count(2) for name in still_shared}
    for name in sorted(still_shared):
        stem = stems[name]
        while _fold(stem) in taken:
            stem = f"{stems[name]}-{next(numbers[_fold(stems[name])])}"
        taken.add(_fold(stem))
        stems[name] = stem
    return stems


def _find_shared(stems: dict[str, str]) -> set[str]:
    """The names whose stems are not theirs alone."""
    counts = Counter(map(_fold, stems.values()))
    if len(counts) == len(stems):
        return set()
    return {name for name, stem in stems.items() if counts[_fold(stem)] > 1}


def _fold(text: str) -> str:
    """What is the same for names that some file system takes for the same (Unicode 3.13, D145: canonical caseless)."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())


def _to_stem(name: str, room: int, *, with_suffix: bool) -> str:
    """A relative path that leads nowhere else, with "/" between folders."""
    *folders, file = [part for part in name.split("/") if part] or [""]
    stem, suffix = posixpath.splitext(file)
    if with_suffix and suffix:
        stem = f"{stem}-{suffix[1:]}"
    path = "/".join(_shorten(_make_safe(folder).rstrip(". ") or "_", LONGEST_NAME) for folder in folders)
    if len(path.encode()) > LONGEST_FOLDERS:
        path = _hash(path)
    return posixpath.join(path, _shorten(_make_safe(stem), room))


def _make_safe(part: str) -> str:
    plain = UNSAFE.sub("_", part)
    return "_" if plain in ("", ".", "..") else plain


def _shorten(text: str, most: int) -> str:
    """At most so many bytes of it, the last of which are of a hash of all of it; a character is not cut in two."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    mark = f"-{_hash(text)}"
    return encoded[: most - len(mark)].decode(errors="ignore") + mark


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
