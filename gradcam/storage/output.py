"""Where tars are kept: made in a file that has no name there yet, and then put in their place whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from gradcam.errors import ImageError, OutputError
from gradcam.images.files import UNFINISHED, replacing, write_whole
from gradcam.storage.disk import OF_THE_NAME, blaming_disk, check_file, describe_os_error, open_lines, remove, show
from gradcam.storage.fetch import StoreArchive
from gradcam.storage.retry import refusal_of
from gradcam.storage.run_file import FOLDER
from gradcam.storage.store import Store


class Place(Protocol):
    """Where files go. It can be sent to other processes, and several threads may write at once."""

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """Write all of these files, or none, by names relative to the place, with "/"; then the views of a report.

        Views can be made again, so that they need not survive a power cut.
        Raises `ImageError` where a file's name is the reason why it cannot be written, and `OutputError` or `StoreError`
        for reasons that other pictures would meet as well.
        """


@dataclass(frozen=True)
class Disk:
    """A folder. `temporary`: one on the same disk, for files that are not whole yet."""

    folder: Path
    temporary: Path

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """As `Place.write`; each file is whole and on the disk before it has its name."""
        written: list[Path] = []
        with blaming_disk(self.folder):
            try:
                for name, data in files.items():
                    path = self.folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(path, data, beside=self.temporary)
                    written.append(path)
            except OSError as error:
                for path in written:
                    remove(path)
                if error.errno in OF_THE_NAME:
                    raise ImageError(f"{name}: this result cannot be written ({describe_os_error(error)})") from error
                raise
            for name, data in views.items():
                self._write_view(self.folder / name, data)

    def _write_view(self, path: Path, data: bytes) -> None:
        """Without waiting for the disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, beside=self.temporary) as file:
            file.write(data)


LONGEST = 2**26  # bytes of a file that is read at once: a million names that a shell put in place of a * are fewer


class Shelf(Protocol):
    """An output folder. All methods raise `OSError`, and of a store `StoreError`; reading `OutputError` for no file."""

    def show(self, name: str = "") -> str:
        """The folder, or a file in it, for a sentence."""

    def list_names(self) -> list[str]:
        """What is directly in it, and in the folders of a manifest's and a log's pieces: names with "/"."""

    def read(self, name: str) -> bytes:
        """All of a file."""

    def read_lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, with their ends."""


@dataclass(frozen=True)
class DiskShelf:
    """A folder on a disk."""

    folder: Path

    def show(self, name: str = "") -> str:
        """As `Shelf.show`."""
        return str(self.folder / name) if name else show(self.folder)

    def list_names(self) -> list[str]:
        """As `Shelf.list_names`."""
        names: list[str] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if FOLDER.fullmatch(entry.name) and entry.is_dir():
                    names += [f"{entry.name}/{name}" for name in os.listdir(entry.path)]
                else:
                    names.append(entry.name)
        return names

    def read(self, name: str) -> bytes:
        """As `Shelf.read`."""
        path = self.folder / name
        check_file(path)
        if path.stat().st_size > LONGEST:
            raise OutputError(
                f"{path}: has {path.stat().st_size} bytes, and no run wrote that; start anew with --overwrite"
            )
        return path.read_bytes()

    def read_lines(self, name: str) -> Iterator[bytes]:
        """As `Shelf.read_lines`."""
        check_file(self.folder / name)
        yield from open_lines(self.folder / name)


@dataclass(frozen=True)
class StoreShelf:
    """A folder in a store."""

    store: Store

    def show(self, name: str = "") -> str:
        """As `Shelf.show`."""
        return self.store.below(name).url if name else str(self.store)

    def list_names(self) -> list[str]:
        """As `Shelf.list_names`."""
        names: list[str] = []
        for name in self.store.list_names():
            is_of_pieces = name.endswith("/") and FOLDER.fullmatch(name.rstrip("/"))
            names += self.store.list_names(name.rstrip("/")) if is_of_pieces else [name]
        return names

    def read(self, name: str) -> bytes:
        """As `Shelf.read`."""
        return self.store.read(name)

    def read_lines(self, name: str) -> Iterator[bytes]:
        """As `Shelf.read_lines`."""
        yield from self.store.read(name).splitlines(keepends=True)


def to_shelf(place: Path | Store) -> Shelf:
    """The output folder there."""
    return StoreShelf(place) if isinstance(place, Store) else DiskShelf(place)


@contextlib.contextmanager
def blaming_store(store: Store) -> Iterator[None]:
    """Whatever the store refuses is an `OutputError` that says what to do; a `StoreError` passes."""
    try:
        yield
    except PermissionError as error:
        raise OutputError(
            f"{store}: may not be listed, read or written to with these credentials ({refusal_of(error)}); take others, or "
            "choose another --output"
        ) from error
    except FileNotFoundError as error:
        raise OutputError(
            f"{store}: there is no such bucket, or something went away there ({refusal_of(error)}); look after it, or "
            "choose another --output"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise OutputError(f"{store}: cannot be written to ({refusal_of(error)}); choose another --output") from error


@dataclass(frozen=True)
class Bucket:
    """A folder in a store; a `Place`."""

    store: Store

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """As `Place.write`; each object is whole as soon as it is there."""
        written: list[str] = []
        with blaming_store(self.store):
            try:
                for name, data in files.items():
                    written.append(name)  # one that failed may be there after all
                    self.store.write(name, data)
            except OSError as error:
                self.store.remove(written)
                if error.errno in OF_THE_NAME:
                    raise ImageError(f"{name}: this result cannot be written ({refusal_of(error)})") from error
                raise
            self.store.write_all(views)


class TarPlace(Protocol):
    """A folder of tars. What it raises is an `OutputError` or a `StoreError`."""

    def list_names(self) -> list[str]:
        """The names of the files in it, but not of those in folders below."""

    def begin(self) -> Path:
        """A name for a file of this machine's, in which a tar can be made."""

    def keep(self, file: Path, name: str) -> None:
        """Put the file there under that name, whole; it is gone from where it was."""

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """The bytes of one."""


@dataclass(frozen=True)
class DiskTars:
    """On a disk. `temporary`: a folder there for files that are not whole yet."""

    folder: Path
    temporary: Path

    def __str__(self) -> str:
        return show(self.folder)

    def list_names(self) -> list[str]:
        """As `TarPlace` says."""
        with blaming_disk(self.folder):
            return os.listdir(self.folder) if self.folder.is_dir() else []

    def begin(self) -> Path:
        """As `TarPlace` says."""
        return self.temporary / UNFINISHED.format(secrets.token_hex(8))

    def keep(self, file: Path, name: str) -> None:
        """As `TarPlace` says: it is on the disk before it has its name."""
        with blaming_disk(self.folder):
            with open(file, "rb+") as whole:
                os.fsync(whole.fileno())
            os.replace(file, self.folder / name)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """As `TarPlace` says."""
        with blaming_disk(self.folder), open(self.folder / name, "rb") as file:
            yield file


@dataclass(frozen=True)
class StoreTars:
    """In a store. What is not whole yet is in this machine's folder for such files."""

    store: Store

    def __str__(self) -> str:
        return str(self.store)

    def list_names(self) -> list[str]:
        """As `TarPlace` says."""
        with blaming_store(self.store):
            return self.store.list_names()

    def begin(self) -> Path:
        """As `TarPlace` says."""
        return Path(tempfile.gettempdir(), UNFINISHED.format(secrets.token_hex(8)))

    def keep(self, file: Path, name: str) -> None:
        """As `TarPlace` says: an object is there whole, or not at all."""
        with blaming_store(self.store):
            self.store.upload(name, str(file))
        file.unlink()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """As `TarPlace` says."""
        with blaming_store(self.store):
            yield StoreArchive(self.store.below(name).url).read_on()
