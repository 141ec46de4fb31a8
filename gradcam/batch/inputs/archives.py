"""Archives: the pictures in zip and tar files, which stay where they are until they are read."""

from __future__ import annotations

import contextlib
import posixpath
import re
import stat
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import BinaryIO

from gradcam.batch.inputs.contents import Archive, ArchiveFile, Refused, TarContent, ZipContent
from gradcam.batch.inputs.folders import is_picture
from gradcam.batch.inputs.store_contents import StoreArchive, blaming_store
from gradcam.batch.inputs.unpacking import UnpackedArchive, find_opener, unpack
from gradcam.batch.items import Content
from gradcam.errors import InputError, StoreError
from gradcam.files import open_file
from gradcam.stores import is_url

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARCHIVE_SUFFIXES = (".zip", *TAR_SUFFIXES)
LARGEST = 2**30  # bytes of a member; more is no picture, but an attempt to fill the memory
AT_ONCE = 8  # archives in stores that are looked into
LEADS_OUT = "leads out of the archive"


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
