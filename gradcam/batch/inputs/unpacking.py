"""Compressed tars: unpacked once into a file without a name, in each process that reads from them."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from gradcam.batch.inputs.contents import ArchiveFile
from gradcam.batch.inputs.store_contents import StoreArchive
from gradcam.errors import ImageError, InputError

OPENERS: dict[bytes, Callable[[Any], Any]] = {  # by what a compressed file begins with
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
KEPT = 4  # archives that a process to which pictures were sent keeps unpacked: they come one archive after another


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
