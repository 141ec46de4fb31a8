"""What people give to be explained, as one list of pictures in an order of its own, each once, each with its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradcam.errors import InputError, StoreError, join_names, shorten
from gradcam.images.files import is_url, to_path
from gradcam.images.read import PictureLike, is_one_picture
from gradcam.sources.archives import ARCHIVE_SUFFIXES, Members, expand_shards, list_archive, listing_ahead
from gradcam.sources.contents import Content, FileContent, GivenContent, Item
from gradcam.sources.folders import expand_pattern, is_pattern, is_picture, to_absolute, walk_folder
from gradcam.sources.lists import LIST_SUFFIXES, STANDARD_INPUT, Entry, read_list, read_standard_input
from gradcam.sources.stores import Roots, Source, find_bucket, find_stored, to_place
from gradcam.storage.fetch import StoreContent
from gradcam.storage.store import Store

NAMED = 3  # inputs in a message
Inputs = PictureLike | Sequence[PictureLike]


@dataclass
class Collection:
    """Items by what tells their contents apart: of files their paths without links in their folders."""

    roots: Roots
    seen: set[str]  # folders that are not to be walked through any more, on disks and in stores
    look_into: Callable[[str], Members] = list_archive
    items: dict[object, Item] = field(default_factory=dict)
    left_out: int = 0
    _sources: list[Source] = field(default_factory=list)
    _resolved: dict[str, str] = field(default_factory=dict)  # folders
    _archives: set[str] = field(default_factory=set)
    _buckets: set[str] = field(default_factory=set)  # whose URLs can be followed

    def add(self, source: Source) -> None:
        """Whatever is in it and was not there yet."""
        self._sources.append(source)
        if source.folder is None:
            self.left_out += source.left_out
        if source.folder is not None and source.names is not None:
            self._add_stored_folder(source.folder, source.names, source.left_out)
        elif source.folder is not None:
            self._add_folder(source.folder)
        elif source.archive is not None:
            self._add_archive(source.archive)
        for entry in source.entries:
            self._add_entry(entry, source)
        if source.given is not None:
            self._add(source.given.content, source.given.name, source.given.content)

    def _add_folder(self, path: str) -> None:
        prefix = self.roots.name(path, "/")
        for folder in walk_folder(path, self.seen):
            for name in folder.files:
                if is_picture(name):
                    where = os.path.join(folder.path, name)
                    self._add(where, prefix + folder.name + name, FileContent(where))
                else:
                    self.left_out += 1

    def _add_stored_folder(self, url: str, names: Sequence[str], left_out: int) -> None:
        if not any(f"{url}/".startswith(f"{seen}/") for seen in self.seen if is_url(seen)):
            self.left_out += left_out
        self.seen.add(url)
        prefix, store = self.roots.name(url, "/"), Store(url)
        for name in names:
            where = store.below(name).url
            self._add(where, prefix + name, StoreContent(where))

    def _add_archive(self, path: str) -> None:
        if self._resolve(path) in self._archives:
            return
        self._archives.add(self._resolve(path))
        prefix, members = self.roots.name(path, "/"), self.look_into(path)
        self.left_out += members.left_out
        for name, content in members.pictures:
            self._add(content, prefix + name, content)

    def _add_entry(self, entry: Entry, source: Source) -> None:
        where = self._resolve(entry.path)
        earlier = self.items.get(where)
        if earlier is None:
            content = self._to_content(where, entry, source) if is_url(where) else FileContent(where)
            self._add(where, self.roots.name(entry.path), content, entry.wanted)
        elif earlier.wanted is None:
            self.items[where] = replace(earlier, wanted=entry.wanted)
        elif entry.wanted not in (None, earlier.wanted):
            raise InputError(
                f"{source.list_name}, line {entry.line}: asks for '{entry.wanted}' in {entry.path}, but "
                f"{self._find_line(where)} asks for '{earlier.wanted}'; a picture has one class in lists, so name it once"
            )

    def _to_content(self, url: str, entry: Entry, source: Source) -> StoreContent:
        """Raises `InputError` where a list has a URL that no picture can have, and `StoreError`."""
        bucket = find_bucket(url)
        try:
            if bucket not in self._buckets:
                Store(url).check()
            self._buckets.add(bucket)
            if not url[len(bucket) :].strip("/") and not bucket.startswith("memory"):
                raise StoreError(f"{url}: names no object in this bucket")
        except StoreError as error:
            if not entry.line:
                raise
            raise InputError(f"{source.list_name}, line {entry.line}: {error}") from error
        return StoreContent(url)

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

    def _resolve(self, path: str) -> str:
        """The path without links in its folders; the same object where there are none."""
        if is_url(path):
            return path
        folder, name = os.path.split(path)
        if folder not in self._resolved:
            self._resolved[folder] = os.path.realpath(folder)
        resolved = self._resolved[folder]
        return path if resolved == folder else os.path.join(resolved, name)


@dataclass(frozen=True)
class Listing:
    """The pictures to be explained, and how many files were left out because their suffix is not one of a picture.

    `root`: the folder that the pictures' names are relative to; None where they are those in an archive, and where the
    pictures lie in several stores, or on a disk as well. `archives`: paths and URLs of those that pictures lie in.
    """

    items: Sequence[Item]
    left_out: int
    root: Path | Store | None
    archives: Sequence[str] = ()

    @property
    def has_classes(self) -> bool:
        """Whether a list asks for a class in any of them."""
        return any(item.wanted is not None for item in self.items)


def list_inputs(inputs: Inputs, *, exclude: Path | Store | None = None) -> Listing:
    """All the pictures in files, folders, globs, lists (`.txt`, `.csv`, `.tsv`, "-" for standard input) and archives.

    Each may be a path, or a URL such as `s3://bucket/photos/`; a list may have both. Braces in the name of a tar mean the
    shards of a WebDataset. They come in the order of the inputs; within a folder, and of a glob, sorted by name; of a list
    or an archive, as it has them. In folders, archives and globs, files without a picture's suffix are left out and
    counted, hidden ones without a word. A file that is named, here or in a list, is taken for a picture whatever it is
    called, and one that cannot be read is found out when it is. A file that is reached twice is explained once; two links
    to it are two.
    An item's name is relative to the input's root: the folder, or the inside of the archive, and of several inputs
    their deepest common folder, in which an archive is a folder. Of inputs in several buckets, or on a disk as well, there
    is no root: names in a store then begin with the bucket, those on the disk with the deepest common folder's name.
    A picture in another form, as `gradcam.read_image` takes it, is called `inputs[3]` by its place among the inputs.

    `exclude`: the output folder, which is left out of folders and globs.
    Raises `InputError` for an input that does not exist or cannot be listed, for one file of which two classes are asked,
    and where there is no picture at all; `StoreError` where a store cannot be asked.
    """
    given = _to_texts(inputs)
    texts = [text for text in given if isinstance(text, str)]
    excluded = exclude if exclude is None or isinstance(exclude, Store) else os.path.realpath(exclude)
    sources = [source for one in given for source in _expand(one, excluded)]
    roots = Roots(source for source in sources if not _is_output(source, excluded))
    with listing_ahead(source.archive for source in sources if source.archive is not None) as look_into:
        collection = Collection(roots, {excluded} if isinstance(excluded, str) else set(), look_into)
        for source in sources:
            collection.add(source)
    if not collection.items:
        raise InputError(_describe_nothing(texts, sources, collection.left_out, excluded))
    is_archive = roots.root is not None and any(source.archive == roots.root for source in sources)
    place = None if is_archive else to_place(roots.root)
    archives = [source.archive for source in sources if source.archive is not None]
    return Listing(list(collection.items.values()), collection.left_out, place, archives)


def _to_texts(inputs: Any) -> list[str | Item]:
    """The paths and URLs that were given, and the pictures in other forms."""
    if not is_one_picture(inputs) and not isinstance(inputs, Iterable):
        raise InputError(f"The inputs are {shorten(inputs)}, expected paths of files, folders, lists or archives.")
    given = [inputs] if is_one_picture(inputs) else list(inputs)
    if not given:
        raise InputError("There is nothing to explain: give files, folders, globs, lists or archives.")
    found = [_to_text(one, place) for place, one in enumerate(given)]
    if found.count("-") > 1:
        raise InputError(f"'-' is given {found.count('-')} times, but {STANDARD_INPUT} can be read once.")
    return found


def _to_text(one: Any, place: int) -> str | Item:
    if isinstance(one, (str, os.PathLike)) and os.fspath(one) and "\0" not in os.fsdecode(one):
        return to_path(os.fsdecode(one))
    if hasattr(one, "read_bytes") and is_url(str(one)):  # a path of universal-pathlib
        return str(one)
    if isinstance(one, (str, os.PathLike)) or not is_one_picture(one):
        raise InputError(f"An input is {shorten(one)}, expected the path of a file, a folder, a list or an archive.")
    return Item(f"inputs[{place}]", GivenContent(one))


def _expand(one: str | Item, excluded: str | Store | None) -> Iterator[Source]:
    if isinstance(one, Item):
        yield Source(given=one)
        return
    for text in expand_shards(one):
        yield from _find_sources(text, excluded)


def _find_sources(text: str, excluded: str | Store | None) -> Iterator[Source]:
    if text == "-":
        yield Source(entries=read_standard_input(), list_name=STANDARD_INPUT)
    elif is_url(text):
        yield from find_stored(text, excluded if isinstance(excluded, Store) else None)
    elif not is_pattern(text) or os.path.lexists(text):  # a name may have brackets
        yield _find_source(text)
    else:
        yield from _find_matches(text, excluded if isinstance(excluded, str) else None)


def _find_source(text: str) -> Source:
    """Raises `InputError` where there is nothing of that name."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "is a link that leads nowhere" if os.path.islink(text) else "does not exist"
        if is_url(text.replace(":/", "://", 1)):
            reason += "; give a URL as a string, as a Path takes a slash away"
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


def _is_output(source: Source, excluded: str | Store | None) -> bool:
    if isinstance(excluded, Store):
        return source.folder == excluded.url
    return source.folder is not None and not is_url(source.folder) and os.path.realpath(source.folder) == excluded


def _describe_nothing(
    texts: Sequence[str], sources: Iterable[Source], left_out: int, excluded: str | Store | None
) -> str:
    where = join_names(texts[:NAMED]) + (f" and {len(texts) - NAMED} more" if len(texts) > NAMED else "")
    is_output = any(_is_output(source, excluded) for source in sources)
    files = f"; {left_out} other {'file was' if left_out == 1 else 'files were'} left out" if left_out else ""
    output = "; the output folder is left out, so choose another one" if is_output else ""
    return f"There are no pictures in {where}{files}{output}."
