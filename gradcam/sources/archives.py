"""Archives: the pictures in zip and tar files, which stay where they are until they are read."""

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
from gradcam.sources.contents import Archive, ArchiveFile, Content, Refused, TarContent, ZipContent
from gradcam.sources.folders import is_hidden, is_picture
from gradcam.storage.fetch import StoreArchive, blaming_store

# By what a compressed file begins with.
OPENERS: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
KEPT = 4  # archives that a process to which pictures were sent keeps unpacked: they come one archive after another
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARCHIVE_SUFFIXES = (".zip", *TAR_SUFFIXES)
LARGEST = 2**30  # bytes of a member; more is no picture, but an attempt to fill the memory
AT_ONCE = 8  # archives in stores that are looked into
LEADS_OUT = "has a path outside the archive"
BRACES = re.compile(r"\{[^{}]*(?:\.\.|,)[^{}]*\}")


class UnpackedArchive:
    """What a compressed archive unpacks to, in a file without a name, which goes with this object. It can be sent to
    other processes, which unpack the archive for themselves when they first read from it."""

    def __init__(self, packed: ArchiveFile | StoreArchive, file: BinaryIO | None = None) -> None:
        self._packed, self._file, self._lock = packed, file, threading.Lock()
        if file is not None:
            weakref.finalize(self, file.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_received, (self._packed,)

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        with self._lock:
            if self._file is None:
                with self._packed.open(0, 2**20) as packed:
                    opener = find_opener(packed)
                    if opener is None:
                        raise ImageError("is in an archive that changed after it was listed")
                    try:
                        self._file = unpack(self._packed.name, opener(packed))
                    except InputError as error:
                        raise ImageError(f"is in an archive that cannot be read ({error})") from None
                weakref.finalize(self, self._file.close)
            self._file.seek(start)
            yield self._file


_received: OrderedDict[object, UnpackedArchive] = OrderedDict()
_receiving = threading.Lock()


def _find_received(packed: ArchiveFile | StoreArchive) -> UnpackedArchive:
    with _receiving:
        found = _received.setdefault(packed.where, UnpackedArchive(packed))
        _received.move_to_end(packed.where)
        if len(_received) > KEPT:
            _received.popitem(last=False)
        return found


def find_opener(file: BinaryIO) -> Callable[[Any], Any] | None:
    """What unpacks a file, by what it begins with; None where it is not packed. It is at its start then."""
    start = file.read(8)
    file.seek(0)
    return next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), None)


def unpack(name: str, packed: BinaryIO) -> BinaryIO:
    """What a compressed tar unpacks to, in an anonymous temporary file: it can only be read from its start, and several
    threads want its members at random. Raises `InputError` where there is no room, and whatever the stream does."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  whoever reads the members closes it
    try:
        with packed:
            shutil.copyfileobj(packed, file, 2**20)
        file.flush()
    except BaseException as error:
        file.close()
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(
                f"{name}: cannot be unpacked in {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to another folder"
            ) from error
        raise
    return file


@dataclass(frozen=True)
class Members:
    """The pictures in an archive, by unique names without a way out of it; and how many other files were left out,
    which in a tar are not those that are called like a picture up to its first dot, as in a WebDataset."""

    pictures: list[tuple[str, Content]]
    left_out: int


def list_archive(where: str) -> Members:
    """The pictures in a ``.zip`` or a ``.tar``, by its path or URL, in its order; nothing hidden. Those that cannot be read
    say so when they are. Raises `InputError` for an archive that is not whole, and `StoreError`."""
    pictures: list[tuple[str, Content]] = []
    others: Counter[str] = Counter()  # by what they would have in common with a picture
    is_zip = where.lower().endswith(".zip")
    with _blaming(where), _open(where) as (file, archive):
        for given, content in (_list_zip if is_zip else _list_tar)(where, file, archive):
            name, leads_out = _make_harmless(given)
            if is_hidden(name) or "__MACOSX" in name.split("/"):  # which macOS keeps beside each file
                continue
            if is_picture(name):
                pictures.append((name, Refused(LEADS_OUT) if leads_out else content))
            else:
                others[name if is_zip else _find_key(name)] += 1
    for key in set() if is_zip or not others else {_find_key(name) for name, _ in pictures}:
        del others[key]
    return Members(_tell_apart(pictures), sum(others.values()))


@contextlib.contextmanager
def listing_ahead(archives: Iterable[str]) -> Iterator[Callable[[str], Members]]:
    """`list_archive`, but those in stores, which are far away, are looked into before that, several at once."""
    stored = [where for where in dict.fromkeys(archives) if is_url(where)]
    if len(stored) < 2:
        yield list_archive
        return
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        ahead = {where: pool.submit(list_archive, where) for where in stored}
        yield lambda where: ahead.pop(where).result() if where in ahead else list_archive(where)
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _open(where: str) -> Iterator[tuple[BinaryIO, ArchiveFile | StoreArchive]]:
    if is_url(where):
        with blaming_store(where):
            stored = StoreArchive(where)
            yield stored.read_on(), stored
    else:
        with open_file(where) as file:
            yield file, ArchiveFile(where, file)


def _find_key(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _list_zip(_: str, file: BinaryIO, kept: Archive) -> Iterator[tuple[str, Content]]:
    with zipfile.ZipFile(file) as archive:
        for it in archive.infolist():
            kind = stat.S_IFMT(it.external_attr >> 16)
            if not it.is_dir() and kind != stat.S_IFDIR:
                place = it.header_offset, it.compress_size, it.file_size, it.CRC, it.compress_type
                is_odd = {"is a link": kind == stat.S_IFLNK, "is not a file": kind not in (0, stat.S_IFREG)}
                is_odd["is encrypted: unpack the archive with its password first"] = bool(it.flag_bits & 1)
                yield it.filename, _judge(is_odd, it.file_size) or ZipContent(kept, *place)


def _judge(is_odd: dict[str, bool], size: int) -> Refused | None:
    large = f"declares {size} bytes, but the limit for an image in an archive is {LARGEST}"
    reasons = (reason for reason, holds in {**is_odd, large: size > LARGEST, "is empty": not size}.items() if holds)
    return next(map(Refused, reasons), None)


def _list_tar(where: str, file: BinaryIO, stored: ArchiveFile | StoreArchive) -> Iterator[tuple[str, Content]]:
    kept: Archive = stored
    opener = find_opener(file)
    if opener is not None:
        file = unpack(where, opener(file))
        kept = UnpackedArchive(stored, file)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        if archive.firstmember is None:  # type: ignore[attr-defined]  # of nothing, Python 3.10 seeks before the start
            return
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if not member.isdir():
                is_odd = {"is a link": member.issym() or member.islnk(), "is not a file": not member.isreg()}
                sparse = "is stored as a sparse file, which is not supported: pack the archive without --sparse"
                found = _judge({**is_odd, sparse: member.issparse()}, member.size)
                yield member.name, found or TarContent(kept, member.offset_data, member.size)
        # tarfile takes a broken header behind the first for the end, which is made of zeros.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("a broken header")


def _make_harmless(given: str) -> tuple[str, bool]:
    """A member's name as a plain relative path; and whether it was none, but would lead out of the archive."""
    path = posixpath.normpath(given.replace("\\", "/"))
    is_rooted = path.startswith("/") or re.match("[A-Za-z]:/", path) is not None
    inside = re.sub("^([A-Za-z]:)?/+", "", path) if is_rooted else path
    plain = re.sub(r"^(\.\./)+", "", inside)
    return plain, plain != path


def _tell_apart(pictures: list[tuple[str, Content]]) -> list[tuple[str, Content]]:
    """Of several with one name, which archives allow, the first keeps it, and the others get a number, from 2."""
    taken = {name for name, _ in pictures}
    if len(taken) == len(pictures):
        return pictures
    numbers: dict[str, Iterator[int]] = {}
    told = []
    for name, content in pictures:
        own = name
        if name in numbers:
            stem, suffix = posixpath.splitext(name)
            own = next(free for number in numbers[name] if (free := f"{stem}-{number}{suffix}") not in taken)
            taken.add(own)
        else:
            numbers[name] = count(2)
        told.append((own, content))
    return told


@contextlib.contextmanager
def _blaming(path: str) -> Iterator[None]:
    """Whatever goes wrong while an archive is listed becomes one `InputError` of one line that names it."""
    try:
        yield
    except (InputError, StoreError):
        raise
    except Exception as error:  # OSError, BadZipFile, TarError, zlib.error, LZMAError, EOFError, ValueError and more
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{path}: this archive cannot be opened ({error.strerror})") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: this archive is damaged or cut off ({reason})") from error


def check_webdataset() -> None:
    """Raises `GradcamError` where the library cannot be imported, with the line that installs it."""
    try:
        import webdataset  # noqa: F401  (whether it is there)
    except ImportError as error:
        raise GradcamError(
            f"WebDatasets need the webdataset library, which cannot be imported ({' '.join(str(error).split())}): "
            + to_pip_command("webdataset")
        ) from error


def expand_shards(text: str) -> list[str]:
    """The tars that a path or URL with braces means, such as `shards-{000000..000146}.tar`; anything else as it is.
    Raises `GradcamError` without the library, and `InputError` for braces that it does not understand."""
    if not BRACES.search(text) or not text.lower().endswith(TAR_SUFFIXES) or os.path.lexists(text):
        return [text]
    check_webdataset()
    from webdataset.shardlists import expand_urls

    try:
        return [str(shard) for shard in expand_urls(text)]
    except Exception as error:  # whatever the library raises
        raise InputError(f"{text}: its braces cannot be expanded ({' '.join(str(error).split())})") from error
