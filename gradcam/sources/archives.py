"""List the images in zip and tar archives, so that they can be read later without extracting the archives."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import posixpath
import re
import shutil
import stat
import tarfile
import tempfile
import threading
import weakref
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, BinaryIO

from gradcam.errors import GradcamError, ImageError, InputError, StoreError, to_pip_command
from gradcam.images.files import is_url, open_file
from gradcam.sources.contents import Archive, ArchiveFile, ImageContent, TarContent, UnreadableContent, ZipContent
from gradcam.sources.folders import has_image_suffix, is_hidden
from gradcam.storage.fetch import StoreArchive, translate_input_store_errors

Opener = Callable[[Any], Any]
OPENERS_BY_MAGIC: dict[bytes, Opener] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# A worker process keeps at most this many archives unpacked. A small number is enough, because images are mostly read
# one archive after another.
MAX_UNPACKED_ARCHIVES = 4
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARCHIVE_SUFFIXES = (".zip", *TAR_SUFFIXES)
MAX_MEMBER_BYTES = 2**30  # A larger member is not an image, and may be an attempt to fill the memory.
MAX_CONCURRENT_LISTINGS = 8  # The limit for listing archives in stores at the same time.
OUTSIDE_PATH_REASON = "has a path outside the archive"
BRACE_PATTERN = re.compile(r"\{[^{}]*(?:\.\.|,)[^{}]*\}")


class UnpackedArchive:
    """The contents of a compressed tar, in an anonymous temporary file that is closed when this object is deleted.

    The object can be sent to other processes. Each process unpacks the archive when it first reads from it.
    """

    def __init__(self, packed: ArchiveFile | StoreArchive, file: BinaryIO | None = None) -> None:
        self._packed, self._file, self._lock = packed, file, threading.Lock()
        if file is not None:
            weakref.finalize(self, file.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reuse_unpacked, (self._packed,)

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        with self._lock:
            if self._file is None:
                with self._packed.open(0, 2**20) as packed:
                    opener = find_opener(packed)
                    if opener is None:
                        raise ImageError("is in an archive that changed after it was listed")
                    try:
                        self._file = decompress_tar(self._packed.name, opener(packed))
                    except InputError as error:
                        raise ImageError(f"is in an archive that cannot be read ({error})") from None
                weakref.finalize(self, self._file.close)
            self._file.seek(start)
            yield self._file


_unpacked_archives: OrderedDict[object, UnpackedArchive] = OrderedDict()
_unpacked_lock = threading.Lock()


def _reuse_unpacked(packed: ArchiveFile | StoreArchive) -> UnpackedArchive:
    with _unpacked_lock:
        archive = _unpacked_archives.setdefault(packed.where, UnpackedArchive(packed))
        _unpacked_archives.move_to_end(packed.where)
        if len(_unpacked_archives) > MAX_UNPACKED_ARCHIVES:
            _unpacked_archives.popitem(last=False)
        return archive


def find_opener(file: BinaryIO) -> Opener | None:
    """Return the function that decompresses a file, or None if the file is not compressed.

    The first bytes of the file identify the compression. Afterwards, the file is rewound.
    """
    start = file.read(8)
    file.seek(0)
    return next((opener for magic, opener in OPENERS_BY_MAGIC.items() if start.startswith(magic)), None)


def decompress_tar(name: str, packed: BinaryIO) -> BinaryIO:
    """Decompress a tar into an anonymous temporary file.

    Several threads read the members in any order, but a compressed stream can only be read from start to end. Raises
    `InputError` if the temporary file cannot be written, for example because the disk is full. Errors of the stream are
    raised unchanged.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the reader of the members closes it)
    try:
        with packed:
            shutil.copyfileobj(packed, file, 2**20)
        file.flush()
    except BaseException as error:
        file.close()
        if isinstance(error, OSError) and error.errno is not None:
            problem = f"cannot be unpacked in {tempfile.gettempdir()} ({error.strerror})"
            raise InputError(f"{name}: {problem}; set TMPDIR to another folder") from error
        raise
    return file


@dataclass(frozen=True)
class Members:
    """The images in an archive with their unique safe names, and the number of other files that were left out.

    In a WebDataset, an image and its labels have the same name up to the first dot. In a tar, a file that has the same
    name as an image, up to the first dot, is therefore not counted.
    """

    images: list[tuple[str, ImageContent]]
    left_out: int


def list_archive(location: str) -> Members:
    """List the visible images in a ``.zip`` or a ``.tar``, given by path or URL, in the order of the archive.

    An image that cannot be read is listed as well. If such an image is read, the error is raised. Raises `InputError`
    if the archive is damaged or incomplete, and `StoreError` if its store fails.
    """
    images: list[tuple[str, ImageContent]] = []
    other_files: Counter[str] = Counter()  # The keys are file names or, in a tar, the parts before the first dot.
    is_zip = location.lower().endswith(".zip")
    with _translate_errors(location), _open(location) as (file, archive):
        for member_name, content in (_list_zip if is_zip else _list_tar)(location, file, archive):
            name, leads_out = _to_safe_name(member_name)
            if is_hidden(name) or "__MACOSX" in name.split("/"):  # macOS adds this folder of metadata.
                continue
            if has_image_suffix(name):
                images.append((name, UnreadableContent(OUTSIDE_PATH_REASON) if leads_out else content))
            else:
                other_files[name if is_zip else _strip_suffixes(name)] += 1
    for name, _ in images if other_files and not is_zip else ():
        del other_files[_strip_suffixes(name)]  # A Counter raises no error for a missing key.
    return Members(_make_unique(images), sum(other_files.values()))


@contextlib.contextmanager
def listing_ahead(archives: Iterable[str]) -> Iterator[Callable[[str], Members]]:
    """Yield a function like `list_archive`. Archives in stores are listed in advance, with several requests at once."""
    urls = [location for location in dict.fromkeys(archives) if is_url(location)]
    if len(urls) < 2:
        yield list_archive
        return
    pool = ThreadPoolExecutor(MAX_CONCURRENT_LISTINGS)
    try:
        pending = {location: pool.submit(list_archive, location) for location in urls}
        yield lambda location: pending.pop(location).result() if location in pending else list_archive(location)
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _open(location: str) -> Iterator[tuple[BinaryIO, ArchiveFile | StoreArchive]]:
    if is_url(location):
        with translate_input_store_errors(location):
            stored = StoreArchive(location)
            yield stored.read_on(), stored
    else:
        with open_file(location) as file:
            yield file, ArchiveFile(location, file)


def _strip_suffixes(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _list_zip(_: str, file: BinaryIO, container: Archive) -> Iterator[tuple[str, ImageContent]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if not member.is_dir() and kind != stat.S_IFDIR:
                fields = member.header_offset, member.compress_size, member.file_size, member.CRC, member.compress_type
                problems = {"is a link": kind == stat.S_IFLNK, "is not a file": kind not in (0, stat.S_IFREG)}
                problems["is encrypted: unpack the archive with its password first"] = bool(member.flag_bits & 1)
                yield member.filename, _find_problem(problems, member.file_size) or ZipContent(container, *fields)


def _find_problem(problems: dict[str, bool], size: int) -> UnreadableContent | None:
    too_large = f"declares {size} bytes, but the limit for an image in an archive is {MAX_MEMBER_BYTES}"
    problems = {**problems, too_large: size > MAX_MEMBER_BYTES, "is empty": not size}
    return next((UnreadableContent(reason) for reason, applies in problems.items() if applies), None)


def _list_tar(location: str, file: BinaryIO, packed: ArchiveFile | StoreArchive) -> Iterator[tuple[str, ImageContent]]:
    container: Archive = packed
    opener = find_opener(file)
    if opener is not None:
        file = decompress_tar(location, opener(file))
        container = UnpackedArchive(packed, file)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        # If a tar is empty, `next` of Python 3.10 would seek to a position before the start.
        if archive.firstmember is None:  # type: ignore[attr-defined]
            return
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all members in memory.
            if not member.isdir():
                problems = {"is a link": member.issym() or member.islnk(), "is not a file": not member.isreg()}
                sparse_reason = "is stored as a sparse file, which is not supported: pack the archive without --sparse"
                unreadable = _find_problem({**problems, sparse_reason: member.issparse()}, member.size)
                yield member.name, unreadable or TarContent(container, member.offset_data, member.size)
        # After the first header, tarfile treats a broken header as the end of the archive. To detect this, check that
        # the block at the end contains only zeros.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("a broken header")


def _to_safe_name(name: str) -> tuple[str, bool]:
    """Return a member's name as a safe relative path, and whether the name leads out of the archive."""
    path = posixpath.normpath(name.replace("\\", "/"))
    safe_name = re.sub(r"^(\.\./)+", "", re.sub("^([A-Za-z]:)?/+", "", path))
    return safe_name, safe_name != path


def _make_unique(images: list[tuple[str, ImageContent]]) -> list[tuple[str, ImageContent]]:
    """Make names unique. Of several equal names, the first stays unchanged, and the others are numbered from 2."""
    names = {name for name, _ in images}
    if len(names) == len(images):
        return images
    numbers: dict[str, Iterator[int]] = {}
    unique = []
    for name, content in images:
        stem, suffix = posixpath.splitext(name)
        unique_name = name
        while name in numbers and unique_name in names:
            unique_name = f"{stem}-{next(numbers[name])}{suffix}"
        numbers.setdefault(name, count(2))
        names.add(unique_name)
        unique.append((unique_name, content))
    return unique


@contextlib.contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    """Turn any error in listing an archive into an `InputError` with a one-line message that names the archive."""
    try:
        yield
    except (InputError, StoreError):
        raise
    except Exception as error:
        # Possible errors include OSError, BadZipFile, TarError, zlib.error, LZMAError, EOFError and ValueError.
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{path}: this archive cannot be opened ({error.strerror})") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: this archive is damaged or cut off ({reason})") from error


def check_webdataset() -> None:
    """Raise `GradcamError` with the install command if the webdataset library cannot be imported."""
    try:
        import webdataset  # noqa: F401 (only tests the import)
    except ImportError as error:
        problem = f"which cannot be imported ({' '.join(str(error).split())})"
        remedy = to_pip_command("webdataset")
        raise GradcamError(f"WebDatasets need the webdataset library, {problem}: {remedy}") from error


def expand_shards(text: str) -> list[str]:
    """Expand the braces in the path or URL of tars, such as `shards-{000000..000146}.tar`.

    Any other text, including the name of an existing file, is returned unchanged. Raises `GradcamError` if the
    webdataset library is missing, and `InputError` if the library cannot expand the braces.
    """
    if not BRACE_PATTERN.search(text) or not text.lower().endswith(TAR_SUFFIXES) or os.path.lexists(text):
        return [text]
    check_webdataset()
    from webdataset.shardlists import expand_urls

    try:
        return [str(shard) for shard in expand_urls(text)]
    except Exception as error:  # The library may raise any exception, because it does not document its exceptions.
        raise InputError(f"{text}: its braces cannot be expanded ({' '.join(str(error).split())})") from error
