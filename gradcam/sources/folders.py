"""List the files of folders and globs, in an order that depends only on the names of the files."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradcam.errors import InputError
from gradcam.images.files import READ_SUFFIXES

is_glob = glob.has_magic  # Returns whether a text contains `*`, `?` or `[`.


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder with its files: the listed folder, or a folder inside the listed folder.

    `name` is the path relative to the listed folder, and ends with "/". For the listed folder itself, `name` is empty.
    `path` contains no links. `files` are the names of the files in the folder.
    """

    name: str
    path: str
    files: list[str]


def walk_folder(top: str, visited: set[str]) -> list[Folder]:
    """Return a folder and all visible folders below it, sorted by code points.

    `visited` holds the resolved paths of folders to skip. The listed folders are added to `visited`. If a folder can be
    reached directly and by a link, it is listed under its direct path.
    """
    folders, pending, links = [], [("", os.path.realpath(top))], deque[tuple[str, str]]()
    while pending or links:
        name, path = pending.pop() if pending else links.popleft()
        if path in visited:
            continue
        visited.add(path)
        files = []
        for entry in _scan(path):
            if not is_folder(entry):
                files.append(entry.name)
            elif entry.is_symlink():
                links.append((f"{name}{entry.name}/", os.path.realpath(entry.path)))
            else:
                pending.append((f"{name}{entry.name}/", entry.path))
        folders.append(Folder(name, path, files))
    return sorted(folders, key=lambda folder: folder.name.split("/"))


def _scan(path: str, *, hidden: bool = False) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if hidden or entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        advice = "change its permissions, or give only folders that can be read"
        raise InputError(f"{path}: this folder cannot be read ({error.strerror}); {advice}") from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry is a folder or a link to one. Link loops and unreadable links count as files."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def has_image_suffix(name: str) -> bool:
    """Return whether the name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in READ_SUFFIXES


def is_hidden(name: str) -> bool:
    """Return whether the name, or a folder in it, begins with a dot."""
    return name.startswith(".") or "/." in name


def to_absolute(path: str) -> str:
    """Return the absolute path. Resolve links only if the path contains "..", which may lead out of a linked folder."""
    if os.pardir not in Path(path).parts:
        return os.path.abspath(path)
    folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) if name else os.path.realpath(folder)


def expand_pattern(pattern: str, exclude: str | None) -> list[str]:
    """Return the visible files and folders that match a glob, sorted.

    A hidden name matches only if its part of the glob begins with a dot. `exclude` is the resolved path of a folder
    that is not searched. Raises `InputError` if a folder cannot be read.
    """
    # Do not use the glob module, because that module follows loops of links, and silently skips unreadable folders.
    anchor = Path(pattern).anchor
    parts = tuple(part for part in pattern[len(anchor) :].replace(os.sep, "/").split("/") if part)
    paths = set(_match(anchor, parts, exclude))
    folders_only = pattern.endswith(("/", os.sep))
    return sorted(filter(os.path.isdir, paths) if folders_only else paths, key=lambda path: Path(path).parts)


def _match(folder: str, parts: tuple[str, ...], exclude: str | None) -> Iterator[str]:
    if not parts:
        yield folder
        return
    part, remaining, is_folder = parts[0], parts[1:], os.path.isdir(folder or os.curdir)
    if part == "**" and is_folder:
        visited = set() if exclude is None or exclude == os.path.realpath(folder or os.curdir) else {exclude}
        for subfolder in walk_folder(folder or os.curdir, visited):
            path = os.path.join(folder, subfolder.name)
            if remaining:
                yield from _match(path, remaining, exclude)
            else:  # "**" at the end of a pattern matches files as well.
                yield from (os.path.join(path, name) for name in subfolder.files)
    elif not is_glob(part):
        path = os.path.join(folder, part)
        if os.path.lexists(path):
            yield from _match(path, remaining, exclude)
    elif is_folder:
        for entry in _scan(folder or os.curdir, hidden=part.startswith(".")):
            path = os.path.join(folder, entry.name)
            if fnmatch.fnmatch(entry.name, part) and (exclude is None or os.path.realpath(path) != exclude):
                yield from _match(path, remaining, exclude)
