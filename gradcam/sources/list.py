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
from gradcam.sources.stores import Roots, Source, find_bucket, find_stored
from gradcam.storage.fetch import StoreContent
from gradcam.storage.store import Store, to_place

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
        self._sources.append(source)
        if source.folder is not None:
            found = self._list_folder(source.folder) if source.names is None else self._list_stored(source)
        elif source.archive is not None:
            found = self._list_archive(source.archive)
        else:
            given = source.given
            found = iter(() if given is None else [(given.content, given.name, given.content)])
            self.left_out += source.left_out
        for key, name, content in found:
            self.items.setdefault(key, Item(name, content))
        for entry in source.entries:
            self._add_entry(entry, source)

    def _list_folder(self, path: str) -> Iterator[tuple[object, str, Content]]:
        prefix = self.roots.name(path, "/")
        for folder in walk_folder(path, self.seen):
            pictures = [name for name in folder.files if is_picture(name)]
            self.left_out += len(folder.files) - len(pictures)
            for name in pictures:
                where = os.path.join(folder.path, name)
                yield where, prefix + folder.name + name, FileContent(where)

    def _list_stored(self, source: Source) -> Iterator[tuple[object, str, Content]]:
        url = source.folder or ""
        if not any(f"{url}/".startswith(f"{seen}/") for seen in self.seen if is_url(seen)):
            self.left_out += source.left_out
        self.seen.add(url)
        prefix, store = self.roots.name(url, "/"), Store(url)
        for name in source.names or ():
            where = store.below(name).url
            yield where, prefix + name, StoreContent(where)

    def _list_archive(self, path: str) -> Iterator[tuple[object, str, Content]]:
        if self._resolve(path) not in self._archives:
            self._archives.add(self._resolve(path))
            prefix, members = self.roots.name(path, "/"), self.look_into(path)
            self.left_out += members.left_out
            yield from ((content, prefix + name, content) for name, content in members.pictures)

    def _add_entry(self, entry: Entry, source: Source) -> None:
        where = self._resolve(entry.path)
        earlier = self.items.get(where)
        if earlier is None:
            content = self._to_content(where, entry, source) if is_url(where) else FileContent(where)
            self.items[where] = Item(self.roots.name(entry.path), content, entry.wanted)
        elif earlier.wanted is None:
            self.items[where] = replace(earlier, wanted=entry.wanted)
        elif entry.wanted not in (None, earlier.wanted):
            # Where a class was asked for first is looked for: to remember all the lines would take much memory.
            named = ((each, one) for each in self._sources for one in each.entries if one.wanted is not None)
            first = next((each, one.line) for each, one in named if self._resolve(one.path) == where)
            raise InputError(
                f"{source.list_name}, line {entry.line}: gives the class '{entry.wanted}' for {entry.path}, but "
                f"{first[0].list_name}, line {first[1]}, gives '{earlier.wanted}'; list each image with one class"
            )

    def _to_content(self, url: str, entry: Entry, source: Source) -> StoreContent:
        """Raises `InputError` where a list has a URL that no picture can have, and `StoreError`."""
        bucket = find_bucket(url)
        try:
            if bucket not in self._buckets:
                Store(url).check()
            self._buckets.add(bucket)
            if not url[len(bucket) :].strip("/") and not bucket.startswith("memory"):
                raise StoreError(f"{url}: names a bucket, expected an object in it")
        except StoreError as error:
            if not entry.line:
                raise
            raise InputError(f"{source.list_name}, line {entry.line}: {error}") from error
        return StoreContent(url)

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
    """The pictures to be explained, and how many files were left out because of their suffix. `root`: the folder that
    names are relative to; None for those in an archive, in several stores, or on a disk as well."""

    items: Sequence[Item]
    left_out: int
    root: Path | Store | None
    archives: Sequence[str] = ()

    @property
    def has_classes(self) -> bool:
        return any(item.wanted is not None for item in self.items)


def list_inputs(inputs: Inputs, *, exclude: Path | Store | None = None) -> Listing:
    """All the pictures in files, folders, globs, lists (``.txt``, ``.csv``, ``.tsv``, "-" for standard input) and archives,
    by paths or URLs; braces in the name of a tar mean a WebDataset's shards. They come in the order of the inputs;
    within a folder, and of a glob, sorted by name. In folders, archives and globs, files without a picture's suffix are
    left out and counted; a file that is named is taken for a picture. One that is reached twice is explained once.
    Names are relative to the inputs' deepest common folder; of several buckets, or a disk as well, they begin with the
    bucket, or that folder's name. A picture in another form is called `inputs[3]` by its place. `exclude`: the output
    folder. Raises `InputError` for what does not exist or cannot be listed, for one file of which two classes are
    asked, and where there is no picture; and `StoreError`."""
    given = _to_texts(inputs)
    texts = [text for text in given if isinstance(text, str)]
    excluded = exclude if exclude is None or isinstance(exclude, Store) else os.path.realpath(exclude)
    sources = [source for one in given for source in _expand(one, excluded)]
    roots = Roots(source for source in sources if not _is_output(source, excluded))
    with listing_ahead(source.archive for source in sources if source.archive is not None) as look_into:
        collection = Collection(roots, {excluded} if isinstance(excluded, str) else set(), look_into)
        for source in sources:
            collection.add(source)
    left_out = collection.left_out
    if not collection.items:
        where = join_names(texts[:NAMED]) + (f" and {len(texts) - NAMED} more" if len(texts) > NAMED else "")
        subject, verb = ("file", "was") if left_out == 1 else ("files", "were")
        files = f"; {left_out} {subject} without an image suffix {verb} left out" if left_out else ""
        is_output = any(_is_output(source, excluded) for source in sources)
        output = "; the output folder is left out: choose another --output" if is_output else ""
        raise InputError(f"There are no images in {where}{files}{output}.")
    archives = [source.archive for source in sources if source.archive is not None]
    place = None if roots.root is None or roots.root in archives else to_place(roots.root)
    return Listing(list(collection.items.values()), left_out, place, archives)


def _to_texts(inputs: Any) -> list[str | Item]:
    if not is_one_picture(inputs) and not isinstance(inputs, Iterable):
        raise InputError(f"The inputs are {shorten(inputs)}, expected paths of files, folders, lists or archives.")
    given = [inputs] if is_one_picture(inputs) else list(inputs)
    if not given:
        raise InputError("There is nothing to explain: give files, folders, globs, lists or archives.")
    found = [_to_text(one, place) for place, one in enumerate(given)]
    if found.count("-") > 1:
        raise InputError(
            f"'-' is given {found.count('-')} times, but {STANDARD_INPUT} can be read only once: give '-' once."
        )
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
        if text == "-":
            yield Source(entries=read_standard_input(), list_name=STANDARD_INPUT)
        elif is_url(text):
            yield from find_stored(text, excluded if isinstance(excluded, Store) else None)
        elif not is_pattern(text) or os.path.lexists(text):  # a name may have brackets
            yield _find_source(text)
        else:
            yield from _find_matches(text, excluded if isinstance(excluded, str) else None)


def _find_source(text: str) -> Source:
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "is a broken link" if os.path.islink(text) else "does not exist"
        if is_url(text.replace(":/", "://", 1)):
            reason += "; give a URL as a string, because a Path removes a slash"
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
    As in a folder, files come first."""
    matches = expand_pattern(pattern, excluded)
    if not matches:
        raise InputError(f"{pattern}: does not exist, and matches nothing as a glob")
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
