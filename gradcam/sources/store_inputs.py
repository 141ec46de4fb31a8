"""List the inputs in object stores with one or two requests per URL."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator

from gradcam.errors import InputError
from gradcam.sources.archives import ARCHIVE_SUFFIXES
from gradcam.sources.folders import has_image_suffix, is_glob, is_hidden
from gradcam.sources.list_files import LIST_SUFFIXES, ListEntry, read_stored_list
from gradcam.sources.roots import Source, find_bucket
from gradcam.storage.fetch import translate_input_store_errors
from gradcam.storage.store import EXTRAS_BY_PROTOCOL, Store

CONTAINER_SUFFIXES = LIST_SUFFIXES + ARCHIVE_SUFFIXES


def find_stored(url: str, exclude: Store | None) -> Iterator[Source]:
    """Yield the inputs at a URL, which names an object, a list, an archive, a glob or a folder.

    `exclude` is a folder that is left out. Raises `InputError` if the URL does not exist or matches nothing, and
    `StoreError` if the store fails.
    """
    bucket = find_bucket(url)
    if is_glob(bucket):
        raise InputError(f"{url}: a glob cannot match buckets: write the name of one bucket")
    if bucket.endswith("://") and bucket.partition(":")[0] in EXTRAS_BY_PROTOCOL:
        raise InputError(f"{url}: contains no bucket name, expected a URL like {bucket}BUCKET/FOLDER/")
    with translate_input_store_errors(url):
        store = Store(url)
        if not is_glob(url) or store.is_file():  # An object whose name contains brackets is not a glob.
            # Look first for an object if the URL has the suffix of an object, and otherwise for a folder. Usually, the
            # first request then succeeds.
            has_suffix = has_image_suffix(store.url) or store.url.lower().endswith(CONTAINER_SUFFIXES)
            has_object_suffix = has_suffix and not url.endswith("/")
            if has_object_suffix and store.is_file():
                yield _find_object(store)
            elif (names := _drop_excluded(store, store.find(), exclude)) is not None:
                yield _to_folder(store, names)
            elif not url.endswith("/") and not has_object_suffix and store.is_file():
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
    return Source(entries=[ListEntry(store.url)])


def _drop_excluded(store: Store, names: Iterable[str], exclude: Store | None) -> list[str] | None:
    """Return the names outside the excluded folder, or None if `names` is empty."""
    all_names = list(names)
    if exclude is None or not all_names:
        return all_names or None
    if store.url == exclude.url:
        return []
    if not exclude.url.startswith(f"{store.url}/"):
        return all_names
    prefix = f"{exclude.url[len(store.url) + 1 :]}/"
    return [name for name in all_names if not name.startswith(prefix)]


def _to_folder(store: Store, names: Iterable[str]) -> Source:
    """Return a folder with its visible images.

    As on a disk, images directly in the folder come before images in its subfolders.
    """
    visible = [name for name in names if not is_hidden(name)]
    images = sorted(filter(has_image_suffix, visible), key=lambda name: (name[: name.rfind("/") + 1].split("/"), name))
    return Source(folder=store.url, names=images, left_out=len(visible) - len(images))


def _find_matches(pattern: str, exclude: Store | None) -> Iterator[Source]:
    """Yield the matches of a glob: images first, then folders, lists and archives.

    Files without an image suffix are left out, as on a disk, unless the glob ends with their suffix.
    """
    base, parts = _split_pattern(pattern)
    folders_only = not parts[-1]
    if folders_only:
        parts.pop()
    suffix = os.path.splitext(parts[-1])[1]
    requires_suffix = bool(suffix) and not is_glob(suffix)
    images, containers, left_out = [], set(), 0
    folders: dict[str, list[str]] = {}
    excluded = exclude if exclude is None or exclude.url.startswith(f"{base.url}/") else None
    for name in _drop_excluded(base, base.find(), excluded) or ():
        levels = name.split("/")
        ends = set(_find_ends(levels, parts))
        for end in ends - {len(levels)}:
            folders.setdefault("/".join(levels[:end]), []).append("/".join(levels[end:]))
        if len(levels) not in ends or folders_only:
            continue
        if requires_suffix and name.lower().endswith(CONTAINER_SUFFIXES):
            containers.add(name)
        elif requires_suffix or has_image_suffix(name):
            images.append(name)
        else:
            left_out += 1
    if not (images or containers or folders or left_out):
        raise InputError(f"{pattern}: does not exist, and matches nothing as a glob")
    entries = [ListEntry(base.below(name).url) for name in sorted(images, key=lambda name: name.split("/"))]
    yield Source(entries=entries, left_out=left_out)
    for name in sorted({*containers, *folders}, key=lambda name: name.split("/")):
        if name in containers:
            yield _find_object(base.below(name))
        else:
            yield _to_folder(base.below(name), folders[name])


def _split_pattern(pattern: str) -> tuple[Store, list[str]]:
    bucket = find_bucket(pattern)
    parts = pattern[len(bucket) :].lstrip("/").split("/")
    fixed_count = next(index for index, part in enumerate(parts) if is_glob(part))
    return Store("/".join([bucket, *parts[:fixed_count]])), parts[fixed_count:]


def _find_ends(name: list[str], parts: list[str]) -> Iterator[int]:
    """Yield the numbers n for which the pattern matches the first n parts of the name. Numbers may be repeated."""
    if not parts:
        yield 0
        return
    part, remaining = parts[0], parts[1:]
    if part == "**":
        visible_count = next((index for index, level in enumerate(name) if level.startswith(".")), len(name))
        if not remaining:
            yield from (len(name),) if visible_count == len(name) else ()
            return
        for start in range(min(visible_count, len(name) - 1) + 1):
            yield from (start + end for end in _find_ends(name[start:], remaining))
    elif name and _matches(name[0], part):
        yield from (1 + end for end in _find_ends(name[1:], remaining))


def _matches(name: str, part: str) -> bool:
    """Return whether a part of a name matches a part of a pattern.

    A hidden name matches only if the pattern begins with a dot. The empty name between the slashes of `//` does not
    match a wildcard.
    """
    if not name or not part:
        return name == part
    return fnmatch.fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
