"""Where pictures lie: in files of their own, in archives, or nowhere that they may be read from."""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from gradcam.errors import ImageError, StoreError
from gradcam.images.files import NotAFileError, open_file
from gradcam.images.read import check_memory

LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip's member: its signature, and the lengths of its name and its extras
HEADERS = LOCAL_HEADER.size + 400  # bytes before a member's data, as far as names are not longer than usual

Stamp = tuple[int, int, int]  # which file it is, its size and its time


class Content(Protocol):
    """Where a picture's bytes are. Several threads may read at once, and it can be sent to other processes."""

    @property
    def path(self) -> Path | None:
        """The file, where it is one of its own on this machine; None for what lies in an archive or a store."""

    def read(self) -> bytes:
        """All of it. Raises `ImageError`, without the picture's name, where that cannot be had, or changes meanwhile."""


@dataclass(frozen=True, slots=True)
class Item:
    """One picture. `name`: relative to the input's root, with "/" between folders; it tells pictures apart. `wanted`:
    the class that a list asks for it, by label or index."""

    name: str
    content: Content
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class FileContent:
    """A picture in a file of its own."""

    where: str

    @property
    def path(self) -> Path:
        return Path(self.where)

    def read(self) -> bytes:
        with _wording_errors(), open_file(self.where) as file:
            before = os.fstat(file.fileno())
            check_memory(0, 0, 0, before.st_size)
            data = file.read()
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns, len(data)) != (after.st_size, after.st_mtime_ns, after.st_size):
            raise ImageError("changed while it was read")
        if not data:
            raise ImageError("is empty")
        return data


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A picture that is not read, and the reason."""

    reason: str
    path = None

    def read(self) -> bytes:
        raise ImageError(self.reason)


@dataclass(frozen=True, slots=True, eq=False)
class GivenContent:
    """A picture that somebody holds, in a form that `Classifier.prepare` takes."""

    picture: Any
    path = None

    def read(self) -> bytes:
        """Raises `ImageError`: it is to be prepared as it is."""
        raise ImageError("is not in a file")


class Archive(Protocol):
    """What the bytes of an archive's members are read from. It can be sent to other processes."""

    def open(self, start: int, size: int) -> AbstractContextManager[BinaryIO]:
        """Its bytes from there on, of which about so many will be read. Raises `ImageError` where they are not to be
        had, or no longer those that were listed."""


class ArchiveFile:
    """An archive, as it was when it was listed. Each reader opens it anew: threads share no position. It can be sent to
    other processes, also on machines that give the file another number."""

    def __init__(self, where: str, listed: BinaryIO) -> None:
        self.name = where
        self._stamp = _stamp(listed)
        self._compared = slice(0, None)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compared": slice(1, None)}

    @property
    def where(self) -> tuple[str, object]:
        return self.name, self._stamp

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        try:
            file = open_file(self.name)  # closed below; its own errors are not those of its readers
        except OSError as error:
            raise ImageError(f"is in an archive that cannot be opened ({error.strerror})") from None
        with file:
            if _stamp(file)[self._compared] != self._stamp[self._compared]:
                raise ImageError("is in an archive that changed after it was listed")
            file.seek(start)
            yield file


@dataclass(frozen=True, slots=True, eq=False)
class TarContent:
    """A picture in a tar archive: so many bytes from there on."""

    archive: Archive
    start: int
    size: int
    path = None

    def read(self) -> bytes:
        with _wording_errors(), self.archive.open(self.start, self.size) as file:
            data = file.read(self.size)
        if len(data) != self.size:
            raise ImageError("is damaged or cut off (the archive ends too early)")
        return data


@dataclass(frozen=True, slots=True, eq=False)
class ZipContent:
    """A picture in a zip archive: where its header begins, and what the archive's directory says of it."""

    # Not the ZipInfo itself, which takes five times the memory.
    archive: Archive
    header: int
    packed_size: int
    size: int
    checksum: int
    method: int
    path = None

    def read(self) -> bytes:
        with _wording_errors(), self.archive.open(self.header, HEADERS + self.packed_size) as file:
            signature, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
            if signature != b"PK\3\4":
                raise ImageError("is damaged or cut off (it is not where the archive's index says)")
            file.seek(name_length + extra_length, os.SEEK_CUR)
            info = zipfile.ZipInfo()
            info.compress_type, info.compress_size = self.method, self.packed_size
            info.file_size, info.CRC = self.size, self.checksum
            # Of bzip2 and LZMA, zipfile unpacks so many packed bytes at once, to whatever length.
            is_counted = self.method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            step = self.size if is_counted else zipfile.ZipExtFile.MIN_READ_SIZE
            with zipfile.ZipExtFile(file, "r", info) as member:
                data = b"".join(iter(partial(member.read, step), b""))
        if len(data) != self.size:
            raise ImageError("is damaged or cut off (it is shorter than the archive's index says)")
        return data


@contextlib.contextmanager
def _wording_errors() -> Iterator[None]:
    """Whatever goes wrong with a picture's bytes becomes one `ImageError` of one line, without its name."""
    try:
        yield
    except (ImageError, StoreError):
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise ImageError("does not exist") from None
    except IsADirectoryError:
        raise ImageError("is not a file") from None
    except MemoryError:
        raise ImageError("does not fit into memory") from None
    except NotImplementedError as error:  # from zipfile
        raise ImageError(f"uses an unsupported compression ({error})") from None
    except NotAFileError as error:
        raise ImageError(str(error.strerror).removeprefix("it ")) from None
    except Exception as error:  # OSError, BadZipFile, zlib.error, lzma.LZMAError, EOFError, struct.error and more
        if isinstance(error, OSError) and error.errno is not None:  # a decompressor's has none
            raise ImageError(f"cannot be opened ({error.strerror})") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"is damaged or cut off ({reason})") from None


def _stamp(file: BinaryIO) -> Stamp:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def find_url(item: Item) -> str | None:
    """Where a picture lies in a store, if it is an object of its own there."""
    return getattr(item.content, "url", None)
