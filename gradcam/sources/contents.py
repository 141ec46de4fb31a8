"""Represent the contents of images in files, in archives and in memory, and of unreadable images."""

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

LOCAL_HEADER = struct.Struct("<4s22xHH")  # A zip member's signature, and the lengths of its name and its extra fields.
HEADER_BYTES = LOCAL_HEADER.size + 400  # A local header with all its fields is rarely longer.

ERROR_REASONS: dict[type[Exception], str] = dict.fromkeys((FileNotFoundError, NotADirectoryError), "does not exist")
ERROR_REASONS |= {IsADirectoryError: "is not a file", MemoryError: "does not fit into memory"}

Stamp = tuple[int, int, int]  # (inode, size, modification time)


class ImageContent(Protocol):
    """An object that reads the bytes of an image. The object is thread-safe, and can be pickled."""

    @property
    def path(self) -> Path | None:
        """Return the path of the image file, or None if the image is in an archive, in a store or in memory."""

    def read(self) -> bytes:
        """Return all bytes.

        Raises `ImageError` if the bytes cannot be read, or if they change while they are read. The message does not
        contain the image's name.
        """


@dataclass(frozen=True, slots=True)
class InputImage:
    """One image of the input.

    `name` is unique, and relative to the input's root, with "/" between folders. If a list requests a class for the
    image, `wanted` is the label or index of the class.
    """

    name: str
    content: ImageContent
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class FileContent:
    """An image in a separate file on this machine."""

    filename: str

    @property
    def path(self) -> Path:
        return Path(self.filename)

    def read(self) -> bytes:
        with _translate_errors(), open_file(self.filename) as file:
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
class UnreadableContent:
    """An image that cannot be read, and the reason."""

    reason: str
    path = None

    def read(self) -> bytes:
        raise ImageError(self.reason)


@dataclass(frozen=True, slots=True, eq=False)
class InMemoryImage:
    """An image in memory, in a form that `Classifier.prepare` accepts."""

    picture: Any
    path = None

    def read(self) -> bytes:
        """Raise `ImageError`, because an image in memory has no file."""
        raise ImageError("is not in a file")


class Archive(Protocol):
    """An archive whose bytes can be read. The object can be sent to other processes."""

    def open(self, start: int, size: int) -> AbstractContextManager[BinaryIO]:
        """Open the archive at `start`, to read about `size` bytes.

        Raises `ImageError` if the archive cannot be opened, or changed after it was listed.
        """


class ArchiveFile:
    """An archive in a file on a disk. If the file changes after it was listed, `open` raises `ImageError`.

    The file is opened again for each read, so that threads do not share a file position. The object can be sent to
    other processes, which may run on other machines. These processes ignore the inode, because it may differ there.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.name = path
        self._stamp = _stamp(file)
        self._compared = slice(0, None)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compared": slice(1, None)}

    @property
    def where(self) -> tuple[str, object]:
        return self.name, self._stamp

    @contextlib.contextmanager
    def open(self, start: int, size: int) -> Iterator[BinaryIO]:
        try:
            # The file is opened outside the with statement, so that only errors of opening are caught here.
            file = open_file(self.name)
        except OSError as error:
            raise ImageError(f"is in an archive that cannot be opened ({error.strerror})") from None
        with file:
            if _stamp(file)[self._compared] != self._stamp[self._compared]:
                raise ImageError("is in an archive that changed after it was listed")
            file.seek(start)
            yield file


@dataclass(frozen=True, slots=True, eq=False)
class TarContent:
    """An image in a tar: `size` bytes from the position `start`."""

    archive: Archive
    start: int
    size: int
    path = None

    def read(self) -> bytes:
        with _translate_errors(), self.archive.open(self.start, self.size) as file:
            data = file.read(self.size)
        if len(data) != self.size:
            raise ImageError("is damaged or cut off (the archive ends too early)")
        return data


@dataclass(frozen=True, slots=True, eq=False)
class ZipContent:
    """An image in a zip: the position of its local header, and fields of its entry in the zip's central directory."""

    # These fields replace a ZipInfo, which would take five times as much memory.
    archive: Archive
    header: int
    packed_size: int
    size: int
    checksum: int
    method: int
    path = None

    def read(self) -> bytes:
        with _translate_errors(), self.archive.open(self.header, HEADER_BYTES + self.packed_size) as file:
            signature, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
            if signature != b"PK\3\4":
                raise ImageError("is damaged or cut off (it is not where the archive's index says)")
            file.seek(name_length + extra_length, os.SEEK_CUR)
            info = zipfile.ZipInfo()
            info.compress_type, info.compress_size = self.method, self.packed_size
            info.file_size, info.CRC = self.size, self.checksum
            # For bzip2 and LZMA, zipfile limits the packed bytes per read, but not the unpacked bytes. Small reads
            # therefore save memory.
            is_limited = self.method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            read_size = self.size if is_limited else zipfile.ZipExtFile.MIN_READ_SIZE
            with zipfile.ZipExtFile(file, "r", info) as member:
                data = b"".join(iter(partial(member.read, read_size), b""))
        if len(data) != self.size:
            raise ImageError("is damaged or cut off (it is shorter than the archive's index says)")
        return data


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn any error in reading an image's bytes into an `ImageError` with one line that does not name the image."""
    try:
        yield
    except (ImageError, StoreError):
        raise
    except Exception as error:
        reason = next((reason for kind, reason in ERROR_REASONS.items() if isinstance(error, kind)), None)
        if isinstance(error, NotImplementedError):  # zipfile raises this error for an unknown compression.
            reason = f"uses an unsupported compression ({error})"
        elif isinstance(error, NotAFileError):
            reason = str(error.strerror).removeprefix("it ")
        # An OSError with an errno comes from the system. An OSError without errno comes from a decompressor.
        elif isinstance(error, OSError) and error.errno is not None:
            reason = reason or f"cannot be opened ({error.strerror})"
        # Other possible errors are OSError, BadZipFile, zlib.error, lzma.LZMAError, EOFError and struct.error.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(reason or f"is damaged or cut off ({cause})") from None


def _stamp(file: BinaryIO) -> Stamp:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def get_store_url(item: InputImage) -> str | None:
    """Return the URL of an image that is a separate object in a store, or None for any other image."""
    return getattr(item.content, "url", None)
