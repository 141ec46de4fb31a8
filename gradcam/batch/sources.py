"""What people give to be explained, as one list of pictures in an order of its own, each once, each with its name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradcam.batch.archives import ARCHIVE_SUFFIXES, list_archive
from gradcam.batch.contents import FileContent
from gradcam.batch.folders import expand_pattern, is_pattern, is_picture, to_absolute, walk_folder
from gradcam.batch.items import Content, Item
from gradcam.batch.lists import LIST_SUFFIXES, STANDARD_INPUT, Entry, read_list, read_standard_input
from gradcam.errors import InputError, join_names, shorten

NAMED = 3  # inputs in a message


@dataclass(frozen=True)
class Listing:
    """The pictures to be explained, and how many files were left out because their suffix is not one of a picture.

    `root`: the folder that the pictures' names are relative to; None where they are those in an archive.
    """

    items: Sequence[Item]
    left_out: int
    root: Path | None

    @property
    def has_classes(self) -> bool:
        """Whether a list asks for a class in any of them."""
        return any(item.wanted is not None for item in self.items)


@dataclass(frozen=True)
class Source:
    """One input: a folder or an archive, by its absolute path, or files, which a list may name."""

    folder: str | None = None
    archive: str | None = None
    entries: Sequence[Entry] = ()
    list_name: str = ""
    left_out: int = 0

    def bases(self) -> set[str]:
        """The folders that its pictures' names could be relative to."""
        whole = self.folder or self.archive
        return {whole} if whole else {os.path.dirname(entry.path) for entry in self.entries}


def list_inputs(
    inputs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str], *, exclude: Path | None = None
) -> Listing:
    """All the pictures in files, folders, globs, lists (`.txt`, `.csv`, `.tsv`, "-" for standard input) and archives.

    They come in the order of the inputs; within a folder, and of a glob, sorted by name; of a list or an archive, as it
    has them. In folders, archives and globs, files without a picture's suffix are left out and counted, hidden ones
    without a word. A file that is named, here or in a list, is taken for a picture whatever it is called, and one that
    cannot be read is found out when it is. A file that is reached twice is explained once; two links to it are two.
    An item's name is relative to the input's root: the folder, or the inside of the archive, and of several inputs
    their deepest common folder, in which an archive is a folder.

    `exclude`: the output folder, which is left out of folders and globs.
    Raises `InputError` for an input that does not exist or cannot be listed, for one file of which two classes are asked,
    and where there is no picture at all.
    """
    texts = _to_texts(inputs)
    excluded = None if exclude is None else os.path.realpath(exclude)
    sources = [source for text in texts for source in _find_sources(text, excluded)]
    root = _find_root(source for source in sources if not _is_output(source, excluded))
    collection = Collection(root, set() if excluded is None else {excluded})
    for source in sources:
        collection.add(source)
    if not collection.items:
        raise InputError(_describe_nothing(texts, sources, collection.left_out, excluded))
    is_archive = any(source.archive == root for source in sources)
    return Listing(list(collection.items.values()), collection.left_out, None if is_archive else Path(root))


def _to_texts(inputs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[str]:
    if not isinstance(inputs, (str, os.PathLike, Iterable)):
        raise InputError(f"The inputs are {shorten(inputs)}, expected paths of files, folders, lists or archives.")
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    for one in given:
        if not isinstance(one, (str, os.PathLike)) or not os.fspath(one) or "\0" in os.fsdecode(one):
            raise InputError(
                f"An input is {shorten(one)}, expected the path of a file, a folder, a list or an archive."
            )
    if not given:
        raise InputError("There is nothing to explain: give files, folders, globs, lists or archives.")
    texts = [os.fsdecode(one) for one in given]
    if texts.count("-") > 1:
        raise InputError(f"'-' is given {texts.count('-')} times, but {STANDARD_INPUT} can be read once.")
    return texts


def _find_sources(text: str, excluded: str | None) -> Iterator[Source]:
    if text == "-":
        yield Source(entries=read_standard_input(), list_name=STANDARD_INPUT)
    elif not is_pattern(text) or os.path.lexists(text):  # a name may have brackets
        yield _find_source(text)
    else:
        yield from _find_matches(text, excluded)


def _find_source(text: str) -> Source:
    """Raises `InputError` where there is nothing of that name."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "is a link that leads nowhere" if os.path.islink(text) else "does not exist"
        raise InputError(f"{text}: {reason}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{text}: cannot be opened ({getattr(error, 'strerror', None) or error})") from error
    path, lowered = to_absolute(text), text.lower()
    if os.path.isdir(path):
        return Source(folder=path)
    if lowered.endswith(LIST_SUFFIXES):
        return Source(entries=read_list(text), list_name=text)
    if lowered.endswith(ARCHIVE_SUFFIXES):
        return Source(archive=path)
    return Source(entries=[Entry(path)])


def _find_matches(pattern: str, excluded: str | None) -> Iterator[Source]:
    """What a shell would have made of a glob, but for the files that are no pictures, unless it asks for their suffix.

    As in a folder, files come first.
    """
    matches = expand_pattern(pattern, excluded)
    if not matches:
        raise InputError(f"{pattern}: does not exist, and as a glob it fits nothing")
    suffix = os.path.splitext(pattern)[1]
    asks_for_suffix = bool(suffix) and not is_pattern(suffix)
    pictures, others, left_out = [], [], 0
    for match in matches:
        if os.path.isdir(match) or (asks_for_suffix and match.lower().endswith(LIST_SUFFIXES + ARCHIVE_SUFFIXES)):
            others.append(match)
        elif asks_for_suffix or is_picture(match):
            pictures.append(Entry(to_absolute(match)))
        else:
            left_out += 1
    yield Source(entries=pictures, left_out=left_out)
    yield from map(_find_source, others)


def _find_root(sources: Iterable[Source]) -> str:
    bases = set().union(*(source.bases() for source in sources))
    try:
        return os.path.commonpath(bases) if bases else os.getcwd()
    except ValueError as error:
        raise InputError("The inputs lie on different drives: explain those of each drive on their own.") from error


def _is_output(source: Source, excluded: str | None) -> bool:
    return source.folder is not None and os.path.realpath(source.folder) == excluded


def _describe_nothing(texts: Sequence[str], sources: Iterable[Source], left_out: int, excluded: str | None) -> str:
    where = join_names(texts[:NAMED]) + (f" and {len(texts) - NAMED} more" if len(texts) > NAMED else "")
    is_output = any(_is_output(source, excluded) for source in sources)
    files = f"; {left_out} other {'file was' if left_out == 1 else 'files were'} left out" if left_out else ""
    output = "; the output folder is left out, so choose another one" if is_output else ""
    return f"There are no pictures in {where}{files}{output}."


@dataclass
class Collection:
    """Items by what tells their contents apart: of files their paths without links in their folders."""

    root: str
    seen: set[str]  # folders that are not to be walked through any more
    items: dict[object, Item] = field(default_factory=dict)
    left_out: int = 0
    _sources: list[Source] = field(default_factory=list)
    _resolved: dict[str, str] = field(default_factory=dict)  # folders
    _archives: set[str] = field(default_factory=set)

    def add(self, source: Source) -> None:
        """Whatever is in it and was not there yet."""
        self.left_out += source.left_out
        self._sources.append(source)
        if source.folder is not None:
            self._add_folder(source.folder)
        elif source.archive is not None:
            self._add_archive(source.archive)
        for entry in source.entries:
            self._add_entry(entry, source)

    def _add_folder(self, path: str) -> None:
        prefix = self._to_name(path, "/")
        for folder in walk_folder(path, self.seen):
            for name in folder.files:
                if is_picture(name):
                    where = os.path.join(folder.path, name)
                    self._add(where, prefix + folder.name + name, FileContent(where))
                else:
                    self.left_out += 1

    def _add_archive(self, path: str) -> None:
        if self._resolve(path) in self._archives:
            return
        self._archives.add(self._resolve(path))
        prefix, members = self._to_name(path, "/"), list_archive(path)
        self.left_out += members.left_out
        for name, content in members.pictures:
            self._add(content, prefix + name, content)

    def _add_entry(self, entry: Entry, source: Source) -> None:
        where = self._resolve(entry.path)
        earlier = self.items.get(where)
        if earlier is None:
            self._add(where, self._to_name(entry.path), FileContent(where), entry.wanted)
        elif earlier.wanted is None:
            self.items[where] = replace(earlier, wanted=entry.wanted)
        elif entry.wanted not in (None, earlier.wanted):
            raise InputError(
                f"{source.list_name}, line {entry.line}: asks for '{entry.wanted}' in {entry.path}, but "
                f"{self._find_line(where)} asks for '{earlier.wanted}'; a picture has one class in lists, so name it once"
            )

    def _find_line(self, where: str) -> str:
        """Where a class was asked for first. It is looked for, as to remember all the lines would take much memory."""
        return next(
            f"{source.list_name}, line {entry.line},"
            for source in self._sources
            for entry in source.entries
            if entry.wanted is not None and self._resolve(entry.path) == where
        )

    def _add(self, key: object, name: str, content: Content, wanted: str | None = None) -> None:
        if key not in self.items:
            self.items[key] = Item(name, content, wanted)

    def _to_name(self, path: str, ending: str = "") -> str:
        """The path from the root, with "/" between folders; nothing for the root itself."""
        name = path[len(self.root) :].replace(os.sep, "/").lstrip("/")
        return name + ending if name else ""

    def _resolve(self, path: str) -> str:
        """The path without links in its folders; the same object where there are none."""
        folder, name = os.path.split(path)
        if folder not in self._resolved:
            self._resolved[folder] = os.path.realpath(folder)
        resolved = self._resolved[folder]
        return path if resolved == folder else os.path.join(resolved, name)
