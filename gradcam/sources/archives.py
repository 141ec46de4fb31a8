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

from gradcam.errors import GradcamError, ImageError, InputError, StoreError
from gradcam.images.files import is_url, open_file
from gradcam.sources.contents import Archive, ArchiveFile, Content, Refused, TarContent, ZipContent
from gradcam.sources.folders import is_picture
from gradcam.storage.fetch import StoreArchive, blaming_store

OPENERS: dict[bytes, Callable[[Any], Any]] = {  # by what a compressed file begins with
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
KEPT = 4  # archives that a process to which pictures were sent keeps unpacked: they come one archive after another
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARCHIVE_SUFFIXES = (".zip", *TAR_SUFFIXES)
LARGEST = 2**30  # bytes of a member; more is no picture, but an attempt to fill the memory
AT_ONCE = 8  # archives in stores that are looked into
LEADS_OUT = "leads out of the archive"
BRACES = re.compile(r"\{[^{}]*(?:\.\.|,)[^{}]*\}")


class UnpackedArchive:
    """What a compressed archive unpacks to, in a file without a name, which goes with this object.

    It can be sent to other processes, which unpack the archive for themselves when they first read from it.
    """

    def __init__(self, packed: ArchiveFile | StoreArchive, file: BinaryIO | None = None) -> None:
        self._packed = packed
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        if file is not None:
            self._keep(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_received, (self._packed,)

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        """Its bytes from there on, for one thread at a time. Raises `ImageError` where it cannot be unpacked here."""
        with self._lock:
            file = self._file or self._keep(self._unpack_again())
            file.seek(start)
            yield file

    def _keep(self, file: BinaryIO) -> BinaryIO:
        self._file = file
        weakref.finalize(self, file.close)
        return file

    def _unpack_again(self) -> BinaryIO:
        with self._packed.open(0, 2**20) as file:
            opener = find_opener(file)
            if opener is None:
                raise ImageError("lies in an archive that changed after it was listed")
            try:
                return unpack(self._packed.name, opener(file))
            except InputError as error:
                raise ImageError(f"lies in an archive that cannot be read ({error})") from None


_received: OrderedDict[object, UnpackedArchive] = OrderedDict()
_receiving = threading.Lock()


def _find_received(packed: ArchiveFile | StoreArchive) -> UnpackedArchive:
    """One for each archive in this process, whatever pictures of it are sent."""
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
    """What a compressed tar unpacks to, in an anonymous temporary file.

    A compressed stream can only be read from its start: to find the members at random, which several threads do, and
    again when a run is resumed, it is unpacked once.
    Raises `InputError` where there is no room, and whatever the stream does.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  whoever reads the members closes it
    try:
        with packed:
            shutil.copyfileobj(packed, file, 2**20)
        file.flush()
    except BaseException as error:
        file.close()
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(
                f"{name}: cannot be unpacked in {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a folder with room"
            ) from error
        raise
    return file


@dataclass(frozen=True)
class Members:
    """The pictures in an archive, by unique names without a way out of it; and how many other files were left out.

    In a tar, a file that is called like a picture up to its first dot belongs to it, as in a WebDataset: it is not left out.
    """

    pictures: list[tuple[str, Content]]
    left_out: int


def list_archive(where: str) -> Members:
    """The pictures in a `.zip` or a `.tar`, compressed or not, in the archive's order; hidden files are left out.

    `where`: a path or a URL. Nothing is written under a name from the archive. Members that lead out of it, links, devices,
    encrypted and far too large ones are pictures that say so when they are read. Raises `InputError` for an archive that
    is not whole, and `StoreError`.
    """
    pictures: list[tuple[str, Content]] = []
    others: Counter[str] = Counter()  # by what they would have in common with a picture
    is_zip = where.lower().endswith(".zip")
    with _blaming(where), _open(where) as (file, archive):
        for given, content in (_list_zip if is_zip else _list_tar)(where, file, archive):
            name, leads_out = _make_harmless(given)
            if _is_hidden(name):
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
    """Its bytes, and what reads pictures from it later."""
    if is_url(where):
        with blaming_store(where):
            stored = StoreArchive(where)
            yield stored.read_on(), stored
    else:
        with open_file(where) as file:
            yield file, ArchiveFile(where, file)


def _find_key(name: str) -> str:
    """What the files of a WebDataset's sample have in common."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _list_zip(_: str, file: BinaryIO, kept: ArchiveFile | StoreArchive) -> Iterator[tuple[str, Content]]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if not info.is_dir() and kind != stat.S_IFDIR:
                yield info.filename, _judge_zipped(info, kind) or _to_content(info, kept)


def _judge_zipped(info: zipfile.ZipInfo, kind: int) -> Refused | None:
    if kind == stat.S_IFLNK:
        return Refused("is a link")
    if kind not in (0, stat.S_IFREG):
        return Refused("is not a file")
    if info.flag_bits & 1:
        return Refused("is encrypted: unpack the archive with its password first")
    return _judge_size(info.file_size)


def _judge_size(size: int) -> Refused | None:
    if size > LARGEST:
        return Refused(f"claims {size} bytes, more than the {LARGEST} that a picture in an archive may have")
    return None if size else Refused("is empty")


def _to_content(info: zipfile.ZipInfo, kept: Archive) -> ZipContent:
    return ZipContent(kept, info.header_offset, info.compress_size, info.file_size, info.CRC, info.compress_type)


def _list_tar(where: str, file: BinaryIO, kept: ArchiveFile | StoreArchive) -> Iterator[tuple[str, Content]]:
    opener = find_opener(file)
    if opener is None:
        yield from _list_members(file, kept)
    else:
        unpacked = unpack(where, opener(file))
        yield from _list_members(unpacked, UnpackedArchive(kept, unpacked))


def _list_members(file: BinaryIO, kept: Archive) -> Iterator[tuple[str, Content]]:
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        if archive.firstmember is None:  # type: ignore[attr-defined]  # of nothing, Python 3.10 seeks before the start
            return
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if not member.isdir():
                yield member.name, _judge_tarred(member) or TarContent(kept, member.offset_data, member.size)
        # tarfile takes a broken header behind the first for the end, which is made of zeros.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("a broken header")


def _judge_tarred(member: tarfile.TarInfo) -> Refused | None:
    if member.issym() or member.islnk():
        return Refused("is a link")
    if not member.isreg():
        return Refused("is not a file")
    if member.issparse():
        return Refused("is packed as a sparse file, which cannot be read: pack it again without --sparse")
    return _judge_size(member.size)


def _make_harmless(given: str) -> tuple[str, bool]:
    """A member's name as a plain relative path; and whether it was none, but would lead out of the archive."""
    path = posixpath.normpath(given.replace("\\", "/"))
    is_rooted = path.startswith("/") or re.match("[A-Za-z]:/", path) is not None
    inside = re.sub("^([A-Za-z]:)?/+", "", path) if is_rooted else path
    plain = re.sub(r"^(\.\./)+", "", inside)
    return plain, plain != path


def _is_hidden(name: str) -> bool:
    """Also what macOS keeps beside each file."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


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
    except OSError as error:
        if error.errno is not None:
            raise InputError(f"{path}: this archive cannot be opened ({error.strerror})") from error
        raise InputError(f"{path}: this archive is damaged or cut off ({' '.join(str(error).split())})") from error
    except (
        Exception
    ) as error:  # BadZipFile, TarError, zlib.error, LZMAError, EOFError, struct.error, ValueError and more
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: this archive is damaged or cut off ({reason})") from error


def check_webdataset() -> None:
    """Raises `GradcamError` where the library cannot be imported, with the line that installs it."""
    try:
        import webdataset  # noqa: F401  (whether it is there)
    except ImportError as error:
        raise GradcamError(
            f"WebDatasets need the webdataset library, which cannot be imported ({' '.join(str(error).split())}): "
            'pip install "gradcam-torch[webdataset]"'
        ) from error


def expand_shards(text: str) -> list[str]:
    """The tars that a path or URL with braces means, such as `shards-{000000..000146}.tar`; anything else as it is.

    Raises `GradcamError` without the library, and `InputError` for braces that it does not understand.
    """
    if not BRACES.search(text) or not text.lower().endswith(TAR_SUFFIXES) or os.path.lexists(text):
        return [text]
    check_webdataset()
    from webdataset.shardlists import expand_urls

    try:
        return [str(shard) for shard in expand_urls(text)]
    except Exception as error:  # whatever the library raises
        raise InputError(f"{text}: its braces cannot be expanded ({' '.join(str(error).split())})") from error
