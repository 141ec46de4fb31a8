"""Folders and globs: the files in them, in an order that depends on their names alone."""

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


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder below another. `name`: what leads to it from there, ending with "/", or nothing; `path`: without links."""

    name: str
    path: str
    files: list[str]


def walk_folder(top: str, seen: set[str]) -> list[Folder]:
    """The folder and all below it, sorted by code points; nothing hidden. `seen`: resolved paths of folders that are
    passed over, to which those walked through are added. One is called by its own place rather than by a link to it."""
    folders, ahead, links = [], [("", os.path.realpath(top))], deque[tuple[str, str]]()
    while ahead or links:
        name, path = ahead.pop() if ahead else links.popleft()
        if path in seen:
            continue
        seen.add(path)
        files = []
        for entry in _scan(path):
            if not is_folder(entry):
                files.append(entry.name)
            elif entry.is_symlink():
                links.append((f"{name}{entry.name}/", os.path.realpath(entry.path)))
            else:
                ahead.append((f"{name}{entry.name}/", entry.path))
        folders.append(Folder(name, path, files))
    return sorted(folders, key=lambda folder: folder.name.split("/"))


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            f"{path}: this folder cannot be read ({error.strerror}); change its permissions, or give only folders that can "
            "be read"
        ) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Also through a link. One that leads round in circles, or where nobody may look, is taken for a file."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_picture(name: str) -> bool:
    """Whether its suffix is one of a picture."""
    return os.path.splitext(name)[1].lower() in READ_SUFFIXES


def is_hidden(name: str) -> bool:
    """Whether it, or a folder that it is in, begins with a dot."""
    return name.startswith(".") or "/." in name


def to_absolute(path: str) -> str:
    """The path from the root. Links are kept as they are called, except those that ".." may lead out of."""
    if os.pardir not in Path(path).parts:
        return os.path.abspath(path)
    folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) if name else os.path.realpath(folder)


def is_pattern(text: str) -> bool:
    """Whether it has one of `*`, `?` and `[`."""
    return glob.has_magic(text)


def expand_pattern(pattern: str, exclude: str | None) -> list[str]:
    """The files and folders that a glob means, sorted; nothing hidden. `exclude`: the resolved path of a folder that is
    not gone into. Raises `InputError`."""
    # The glob module goes round in loops of links, and leaves out in silence what it may not read.
    anchor = Path(pattern).anchor
    parts = tuple(part for part in pattern[len(anchor) :].replace(os.sep, "/").split("/") if part)
    found = set(_match(anchor, parts, exclude))
    only_folders = pattern.endswith(("/", os.sep))
    return sorted(filter(os.path.isdir, found) if only_folders else found, key=lambda path: Path(path).parts)


def _match(folder: str, parts: tuple[str, ...], exclude: str | None) -> Iterator[str]:
    if not parts:
        yield folder
        return
    part, rest, is_folder = parts[0], parts[1:], os.path.isdir(folder or os.curdir)
    if part == "**" and is_folder:
        seen = set() if exclude is None or exclude == os.path.realpath(folder or os.curdir) else {exclude}
        for below in walk_folder(folder or os.curdir, seen):
            path = os.path.join(folder, below.name)
            # At a pattern's end it stands for files as well.
            yield from _match(path, rest, exclude) if rest else (os.path.join(path, name) for name in below.files)
    elif not glob.has_magic(part):
        path = os.path.join(folder, part)
        if os.path.lexists(path):
            yield from _match(path, rest, exclude)
    elif is_folder:
        for name in _list_names(folder, hidden=part.startswith(".")):
            path = os.path.join(folder, name)
            if fnmatch.fnmatch(name, part) and (exclude is None or os.path.realpath(path) != exclude):
                yield from _match(path, rest, exclude)


def _list_names(folder: str, *, hidden: bool) -> list[str]:
    if not hidden:
        return [entry.name for entry in _scan(folder or os.curdir)]
    try:
        return sorted(os.listdir(folder or os.curdir))
    except OSError as error:
        raise InputError(f"{folder}: this folder cannot be read ({error.strerror})") from error
