"""The pictures of all inputs: each once, with its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gradcam.batch.inputs.archives import Members, list_archive
from gradcam.batch.inputs.contents import FileContent
from gradcam.batch.inputs.folders import is_picture, walk_folder
from gradcam.batch.inputs.lists import Entry
from gradcam.batch.inputs.roots import Roots, find_bucket
from gradcam.batch.inputs.source import Source
from gradcam.batch.inputs.store_contents import StoreContent
from gradcam.batch.items import Content, Item
from gradcam.errors import InputError, StoreError
from gradcam.stores import Store, is_url


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
