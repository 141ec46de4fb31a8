"""List the images of all inputs in a fixed order. Each image is listed once, and has a unique name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradcam.errors import InputError, StoreError, join_names, shorten
from gradcam.images.files import is_url, to_path
from gradcam.images.read import ImageLike, is_one_image
from gradcam.sources.archives import ARCHIVE_SUFFIXES, Members, expand_shards, list_archive, listing_ahead
from gradcam.sources.contents import FileContent, ImageContent, InMemoryImage, InputImage
from gradcam.sources.folders import expand_pattern, has_image_suffix, is_glob, to_absolute, walk_folder
from gradcam.sources.list_files import LIST_SUFFIXES, STANDARD_INPUT, ListEntry, read_list, read_standard_input
from gradcam.sources.roots import Roots, Source, find_bucket
from gradcam.sources.store_inputs import find_stored
from gradcam.storage.fetch import StoreImage
from gradcam.storage.store import Store, parse_location

MAX_INPUTS_IN_MESSAGE = 3
Inputs = ImageLike | Sequence[ImageLike]


@dataclass
class InputCollector:
    """The images of all inputs, collected one input at a time.

    The keys of `items` identify images, so that each image is listed once. The key of a file is its path, after the
    links in its folder's path are resolved.
    """

    roots: Roots
    # Folders on disks and in stores that must not be listed, because they are excluded or already listed.
    visited: set[str]
    list_members: Callable[[str], Members] = list_archive
    items: dict[object, InputImage] = field(default_factory=dict)
    left_out: int = 0
    _sources: list[Source] = field(default_factory=list)
    _resolved: dict[str, str] = field(default_factory=dict)  # Maps folders to their paths without links.
    _archives: set[str] = field(default_factory=set)
    _buckets: set[str] = field(default_factory=set)  # The buckets that passed `Store.check`.

    def add(self, source: Source) -> None:
        self._sources.append(source)
        if source.folder is not None:
            images = self._list_folder(source.folder) if source.names is None else self._list_stored(source)
        elif source.archive is not None:
            images = self._list_archive(source.archive)
        else:
            images = iter([(item.content, item.name, item.content) for item in [source.item] if item is not None])
            self.left_out += source.left_out
        for key, name, content in images:
            self.items.setdefault(key, InputImage(name, content))
        for entry in source.entries:
            self._add_entry(entry, source)

    def _list_folder(self, path: str) -> Iterator[tuple[object, str, ImageContent]]:
        prefix = self.roots.name(path, "/")
        for folder in walk_folder(path, self.visited):
            images = [name for name in folder.files if has_image_suffix(name)]
            self.left_out += len(folder.files) - len(images)
            for name in images:
                filename = os.path.join(folder.path, name)
                yield filename, prefix + folder.name + name, FileContent(filename)

    def _list_stored(self, source: Source) -> Iterator[tuple[object, str, ImageContent]]:
        url = source.folder or ""
        if not any(f"{url}/".startswith(f"{folder}/") for folder in self.visited if is_url(folder)):
            self.left_out += source.left_out
        self.visited.add(url)
        prefix, store = self.roots.name(url, "/"), Store(url)
        for name in source.names or ():
            image_url = store.below(name).url
            yield image_url, prefix + name, StoreImage(image_url)

    def _list_archive(self, path: str) -> Iterator[tuple[object, str, ImageContent]]:
        if self._resolve(path) not in self._archives:
            self._archives.add(self._resolve(path))
            prefix, members = self.roots.name(path, "/"), self.list_members(path)
            self.left_out += members.left_out
            yield from ((content, prefix + name, content) for name, content in members.images)

    def _add_entry(self, entry: ListEntry, source: Source) -> None:
        location = self._resolve(entry.path)
        earlier = self.items.get(location)
        if earlier is None:
            content = self._to_content(location, entry, source) if is_url(location) else FileContent(location)
            self.items[location] = InputImage(self.roots.name(entry.path), content, entry.wanted)
        elif earlier.wanted is None:
            self.items[location] = replace(earlier, wanted=entry.wanted)
        elif entry.wanted not in (None, earlier.wanted):
            # For the message, find the line that requested a class first. Search the lists, because storing a line
            # number with every image would take much memory.
            requests = ((origin, row) for origin in self._sources for row in origin.entries if row.wanted is not None)
            first, row = next(request for request in requests if self._resolve(request[1].path) == location)
            problem = f"the class of {entry.path} is '{entry.wanted}'"
            conflict = f"'{earlier.wanted}' in {first.list_name}, line {row.line}"
            place = f"{source.list_name}, line {entry.line}"
            raise InputError(f"{place}: {problem}, but {conflict}; list each image with one class")

    def _to_content(self, url: str, entry: ListEntry, source: Source) -> StoreImage:
        """Return the content of the image at a URL.

        Raises `StoreError` if the URL cannot be an image. If such a URL is in a list, raises `InputError` with the line
        number instead.
        """
        bucket = find_bucket(url)
        try:
            if bucket not in self._buckets:
                Store(url).check()
            self._buckets.add(bucket)
            if not url[len(bucket) :].strip("/") and not bucket.startswith("memory"):
                raise StoreError(f"{url}: is only a bucket, expected an object in it")
        except StoreError as error:
            if not entry.line:
                raise
            raise InputError(f"{source.list_name}, line {entry.line}: {error}") from error
        return StoreImage(url)

    def _resolve(self, path: str) -> str:
        """Resolve the links in the folder of a path. To save memory, return the same string if there are no links."""
        if is_url(path):
            return path
        folder, name = os.path.split(path)
        resolved = self._resolved[folder] = self._resolved.get(folder) or os.path.realpath(folder)
        return path if resolved == folder else os.path.join(resolved, name)


@dataclass(frozen=True)
class InputListing:
    """The images to explain, and the number of files that were left out because they have no image suffix.

    `root` is the folder to which names are relative. If the only input is an archive, `root` is None. If the images are
    in several buckets, or both in a store and on a disk, `root` is also None.
    """

    items: Sequence[InputImage]
    left_out: int
    root: Path | Store | None
    archives: Sequence[str] = ()

    @property
    def has_classes(self) -> bool:
        return any(item.wanted is not None for item in self.items)


def list_inputs(inputs: Inputs, *, exclude: Path | Store | None = None) -> InputListing:
    """Return all images of the inputs: in files, folders, globs, lists and archives, by path or URL, or in memory.

    Lists are ``.txt``, ``.csv`` and ``.tsv`` files, or "-" for standard input. Braces in the name of a tar stand for
    the shards of a WebDataset. Images are in the order of the inputs. The images of a folder or a glob are sorted by
    name. If several inputs contain the same image, it is listed once. In folders, archives and globs, files without an
    image suffix are left out and counted. Any other file that is given by name counts as an image, even without an
    image suffix.

    Names are relative to the deepest common folder of the inputs. If inputs are in several buckets, or in a store and
    on a disk, a name in a store begins with the bucket's name. A name on the disk then begins with the folder's name.
    An image in memory is called `inputs[3]`, by its index. `exclude` is the output folder, whose images are left out.

    Raises `InputError` if an input does not exist or cannot be listed, if two classes are requested for one file, or if
    there are no images. Raises `StoreError` if a store fails.
    """
    arguments = _to_texts(inputs)
    excluded = exclude if exclude is None or isinstance(exclude, Store) else os.path.realpath(exclude)
    sources = [source for argument in arguments for source in _expand(argument, excluded)]
    roots = Roots(source for source in sources if not _is_output(source, excluded))
    with listing_ahead(source.archive for source in sources if source.archive is not None) as list_members:
        collection = InputCollector(roots, {excluded} if isinstance(excluded, str) else set(), list_members)
        for source in sources:
            collection.add(source)
    left_out = collection.left_out
    if not collection.items:
        texts = [text for text in arguments if isinstance(text, str)]
        count = len(texts) - MAX_INPUTS_IN_MESSAGE
        names = join_names(texts[:MAX_INPUTS_IN_MESSAGE]) + (f" and {count} more" if count > 0 else "")
        subject, verb = ("file", "was") if left_out == 1 else ("files", "were")
        files = f"; {left_out} {subject} without an image suffix {verb} left out" if left_out else ""
        is_output = any(_is_output(source, excluded) for source in sources)
        output = "; the output folder is left out: choose another --output" if is_output else ""
        raise InputError(f"There are no images in {names}{files}{output}.")
    archives = [source.archive for source in sources if source.archive is not None]
    root = None if roots.root is None or roots.root in archives else parse_location(roots.root)
    return InputListing(list(collection.items.values()), left_out, root, archives)


def _to_texts(inputs: Any) -> list[str | InputImage]:
    if not is_one_image(inputs) and not isinstance(inputs, Iterable):
        raise InputError(f"The inputs are {shorten(inputs)}, expected paths of files, folders, lists or archives.")
    values = [inputs] if is_one_image(inputs) else list(inputs)
    if not values:
        raise InputError("There is nothing to explain: give files, folders, globs, lists or archives.")
    arguments = [_to_text(value, index) for index, value in enumerate(values)]
    count = arguments.count("-")
    if count > 1:
        raise InputError(f"'-' is given {count} times, but {STANDARD_INPUT} can be read only once: give '-' once.")
    return arguments


def _to_text(value: Any, index: int) -> str | InputImage:
    if isinstance(value, (str, os.PathLike)) and os.fspath(value) and "\0" not in os.fsdecode(value):
        return to_path(os.fsdecode(value))
    # Accept the paths of universal-pathlib, which have this method, but are not os.PathLike.
    if hasattr(value, "read_bytes") and is_url(str(value)):
        return str(value)
    if isinstance(value, (str, os.PathLike)) or not is_one_image(value):
        raise InputError(f"An input is {shorten(value)}, expected the path of a file, a folder, a list or an archive.")
    return InputImage(f"inputs[{index}]", InMemoryImage(value))


def _expand(argument: str | InputImage, excluded: str | Store | None) -> Iterator[Source]:
    if isinstance(argument, InputImage):
        yield Source(item=argument)
        return
    for text in expand_shards(argument):
        if text == "-":
            yield Source(entries=read_standard_input(), list_name=STANDARD_INPUT)
        elif is_url(text):
            yield from find_stored(text, excluded if isinstance(excluded, Store) else None)
        elif not is_glob(text) or os.path.lexists(text):  # A file whose name contains brackets is not a glob.
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
    return Source(entries=[ListEntry(path)])


def _find_matches(pattern: str, excluded: str | None) -> Iterator[Source]:
    """Yield the images, lists, archives and folders that match a glob.

    Files without an image suffix are left out, unless the glob ends with their suffix. Images come before folders, as
    in the listing of a folder.
    """
    matches = expand_pattern(pattern, excluded)
    if not matches:
        raise InputError(f"{pattern}: does not exist, and matches nothing as a glob")
    suffix = os.path.splitext(pattern)[1]
    requires_suffix = bool(suffix) and not is_glob(suffix)
    images, containers, left_out = [], [], 0
    for match in matches:
        if os.path.isdir(match) or (requires_suffix and match.lower().endswith(LIST_SUFFIXES + ARCHIVE_SUFFIXES)):
            containers.append(match)
        elif requires_suffix or has_image_suffix(match):
            images.append(ListEntry(to_absolute(match)))
        else:
            left_out += 1
    yield Source(entries=images, left_out=left_out)
    yield from map(_find_source, containers)


def _is_output(source: Source, excluded: str | Store | None) -> bool:
    if isinstance(excluded, Store):
        return source.folder == excluded.url
    return source.folder is not None and not is_url(source.folder) and os.path.realpath(source.folder) == excluded
