"""Inputs in stores: what a URL means, and what lies below it, found out with a request or two, however much that is."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from gradcam.errors import InputError
from gradcam.images.files import is_url
from gradcam.sources.archives import ARCHIVE_SUFFIXES
from gradcam.sources.contents import Item
from gradcam.sources.folders import is_hidden, is_pattern, is_picture
from gradcam.sources.lists import LIST_SUFFIXES, Entry, read_stored_list
from gradcam.storage.fetch import blaming_store
from gradcam.storage.store import EXTRAS, Store

NAMED = LIST_SUFFIXES + ARCHIVE_SUFFIXES
DISK = ""  # in place of a bucket


@dataclass(frozen=True)
class Source:
    """One input: a folder or an archive, by its absolute path or its URL, or files, which a list may name, or a
    picture. `names`: the pictures in a folder of a store; None for a folder on a disk."""

    folder: str | None = None
    archive: str | None = None
    entries: Sequence[Entry] = ()
    list_name: str = ""
    left_out: int = 0
    names: Sequence[str] | None = None
    given: Item | None = None

    def bases(self) -> set[str]:
        whole = self.folder or self.archive
        return {whole} if whole else {_find_parent(entry.path) for entry in self.entries}


def _find_parent(address: str) -> str:
    if not is_url(address):
        return os.path.dirname(address)
    parent = address.rpartition("/")[0]
    return address if parent.endswith(":/") else parent  # a bucket is in no folder


class Roots:
    """Where the inputs begin: a root for the disk, and one for each bucket. With several, a name in a store begins with
    the bucket, and one on the disk with the root folder's name."""

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


def _find_common(bucket: str, bases: set[str]) -> str:
    if bucket:
        levels = zip(*(base[len(bucket) :].split("/") for base in bases))
        return bucket + "/".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    try:
        return os.path.commonpath(bases) if bases else os.getcwd()
    except ValueError as error:
        raise InputError("The inputs are on different drives: explain the inputs of each drive separately.") from error


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


def find_stored(url: str, exclude: Store | None) -> Iterator[Source]:
    """What a URL means: a folder, which is all that begins so, one object, a list, an archive, or a glob. `exclude`: a
    folder that is left out. Raises `InputError` where there is nothing that may be read, and `StoreError`."""
    bucket = find_bucket(url)
    if is_pattern(bucket):
        raise InputError(f"{url}: a glob cannot match buckets: write the name of one bucket")
    if bucket.endswith("://") and bucket.partition(":")[0] in EXTRAS:
        raise InputError(f"{url}: names no bucket, expected a URL like {bucket}BUCKET/FOLDER/")
    with blaming_store(url):
        store = Store(url)
        if not is_pattern(url) or store.is_file():  # a key may have brackets
            # What looks like one object by its suffix is looked up, anything else is listed: one request mostly.
            looks_like_one = not url.endswith("/") and (is_picture(store.url) or store.url.lower().endswith(NAMED))
            if looks_like_one and store.is_file():
                yield _find_object(store)
            elif (names := _leave_out(store, store.find(), exclude)) is not None:
                yield _to_folder(store, names)
            elif not url.endswith("/") and not looks_like_one and store.is_file():
                yield _find_object(store)
            else:
                raise InputError(f"{store.url}: does not exist, neither as an object nor as a folder")
        else:
            yield from _find_matches(url, exclude)


def _find_object(store: Store) -> Source:
    lowered = store.url.lower()
    if lowered.endswith(LIST_SUFFIXES):
        return Source(entries=read_stored_list(store), list_name=store.url)
    if lowered.endswith(ARCHIVE_SUFFIXES):
        return Source(archive=store.url)
    return Source(entries=[Entry(store.url)])


def _leave_out(store: Store, names: Iterable[str], exclude: Store | None) -> list[str] | None:
    """The names without those in the folder that is left out; None where there were none."""
    found = list(names)
    if exclude is None or not found:
        return found or None
    if store.url == exclude.url:
        return []
    below = f"{exclude.url[len(store.url) + 1 :]}/" if exclude.url.startswith(f"{store.url}/") else None
    return found if below is None else [name for name in found if not name.startswith(below)]


def _to_folder(store: Store, found: Iterable[str]) -> Source:
    """Its pictures, a folder's before those of the folders in it, as on a disk; nothing hidden."""
    seen = [name for name in found if not is_hidden(name)]
    pictures = sorted(filter(is_picture, seen), key=lambda name: (name[: name.rfind("/") + 1].split("/"), name))
    return Source(folder=store.url, names=pictures, left_out=len(seen) - len(pictures))


def _find_matches(pattern: str, exclude: Store | None) -> Iterator[Source]:
    """As on a disk: pictures first, and what is none only where the glob asks for its suffix; then folders and the rest."""
    base, parts = _divide(pattern)
    only_folders = not parts[-1]
    if only_folders:
        parts.pop()
    suffix = os.path.splitext(parts[-1])[1]
    asks_for_suffix = bool(suffix) and not is_pattern(suffix)
    pictures, others, left_out = [], set(), 0
    folders: dict[str, list[str]] = {}
    inside = exclude if exclude is None or exclude.url.startswith(f"{base.url}/") else None
    for name in _leave_out(base, base.find(), inside) or ():
        own = name.split("/")
        ends = set(_find_ends(own, parts))
        for end in ends - {len(own)}:
            folders.setdefault("/".join(own[:end]), []).append("/".join(own[end:]))
        if len(own) not in ends or only_folders:
            continue
        if asks_for_suffix and name.lower().endswith(NAMED):
            others.add(name)
        elif asks_for_suffix or is_picture(name):
            pictures.append(name)
        else:
            left_out += 1
    if not (pictures or others or folders or left_out):
        raise InputError(f"{pattern}: does not exist, and matches nothing as a glob")
    entries = [Entry(base.below(name).url) for name in sorted(pictures, key=lambda name: name.split("/"))]
    yield Source(entries=entries, left_out=left_out)
    for name in sorted({*others, *folders}, key=lambda name: name.split("/")):
        if name in others:
            yield _find_object(base.below(name))
        else:
            yield _to_folder(base.below(name), folders[name])


def _divide(pattern: str) -> tuple[Store, list[str]]:
    bucket = find_bucket(pattern)
    parts = pattern[len(bucket) :].lstrip("/").split("/")
    fixed = next(place for place, part in enumerate(parts) if is_pattern(part))
    return Store("/".join([bucket, *parts[:fixed]])), parts[fixed:]


def _find_ends(name: list[str], parts: list[str]) -> Iterator[int]:
    """How many parts of a name a pattern takes, in each of the ways in which it fits the name or a folder that it is in."""
    if not parts:
        yield 0
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        deep = next((place for place, one in enumerate(name) if one.startswith(".")), len(name))
        if not rest:
            yield from (len(name),) if deep == len(name) else ()
            return
        for start in range(min(deep, len(name) - 1) + 1):
            yield from (start + end for end in _find_ends(name[start:], rest))
    elif name and _fits(name[0], part):
        yield from (1 + end for end in _find_ends(name[1:], rest))


def _fits(own: str, part: str) -> bool:
    """Hidden ones only where the pattern says so; and nothing stands for a name that is empty, as before a `//`."""
    if not own or not part:
        return own == part
    return fnmatch.fnmatchcase(own, part) and (part.startswith(".") or not own.startswith("."))
