"""An output folder, on a disk or in a store: one way to read it, and for each of the two a way to write to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gradcam.errors import ImageError, OutputError
from gradcam.images.files import UNFINISHED, NotAFileError, open_file, read_text_file, replacing, write_whole
from gradcam.storage import disk
from gradcam.storage.fetch import StoreArchive
from gradcam.storage.retry import refusal_of
from gradcam.storage.run_file import FOLDER
from gradcam.storage.store import Store


@dataclass(frozen=True)
class DiskReader:
    """An output folder on a disk, to be read. Names are relative to it, with "/" between folders. All methods raise
    `OSError`; `read` and `read_lines` also `OutputError` for no file."""

    folder: Path

    def locate(self, name: str) -> Path:
        """Where a file of that name is."""
        return self.folder / name

    def show(self, name: str = "") -> str:
        """The folder, or a file in it, for a sentence."""
        return str(self.folder / name) if name else disk.show(self.folder)

    def list_names(self) -> list[str]:
        """What is directly in it, and in the folders of a manifest's and a log's pieces."""
        names: list[str] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if FOLDER.fullmatch(entry.name) and entry.is_dir():
                    names += [f"{entry.name}/{name}" for name in os.listdir(entry.path)]
                else:
                    names.append(entry.name)
        return names

    def find(self, folder: str) -> list[str]:
        """The names of all files in that folder and below it."""
        top = self.folder / folder
        if top.is_symlink():  # what it leads to is not this folder's
            return []
        below = ((Path(place), names) for place, _, names in os.walk(top))
        return [(place / name).relative_to(self.folder).as_posix() for place, names in below for name in names]

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of the names that do not lead out of it; in a store, those that there are."""
        paths = ((name, disk.find_inside(self.folder, name)) for name in names)
        return [name for name, path in paths if path is not None and disk.is_inside(self.folder, path)]

    def read(self, name: str) -> bytes:
        """All of a file."""
        disk.check_file(self.folder / name)
        return read_text_file(self.folder / name)

    def read_head(self, name: str, size: int) -> bytes | None:
        """So many bytes of a file's beginning, fewer where it is shorter; None where there is no such file."""
        try:
            with open_file(self.folder / name) as file:
                return file.read(size)
        except (FileNotFoundError, NotAFileError):
            return None

    def read_lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, with their ends."""
        disk.check_file(self.folder / name)
        yield from disk.open_lines(self.folder / name)

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """The bytes of a file, to be gone through."""
        return open(self.folder / name, "rb")


@dataclass(frozen=True)
class StoreReader:
    """An output folder in a store: as a `DiskReader`. All methods raise `OSError` and `StoreError`."""

    store: Store

    def locate(self, name: str) -> str:
        return self.store.below(name).url

    def show(self, name: str = "") -> str:
        return self.locate(name) if name else str(self.store)

    def list_names(self) -> list[str]:
        names: list[str] = []
        for name in self.store.list_names():
            is_of_pieces = name.endswith("/") and FOLDER.fullmatch(name.rstrip("/"))
            names += self.store.list_names(name.rstrip("/")) if is_of_pieces else [name]
        return names

    def find(self, folder: str) -> list[str]:
        return list(self.store.find(folder))

    def select(self, names: Iterable[str]) -> list[str]:
        there = self.store.find()
        return [name for name in dict.fromkeys(names) if name in there]

    def read(self, name: str) -> bytes:
        return self.store.read(name)

    def read_head(self, name: str, size: int) -> bytes | None:
        try:
            return self.store.read_range(name, 0, size)
        except FileNotFoundError:
            return None

    def read_lines(self, name: str) -> Iterator[bytes]:
        yield from self.store.read(name).splitlines(keepends=True)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        yield StoreArchive(self.locate(name)).read_on()


RunReader = DiskReader | StoreReader


def to_reader(place: Path | Store) -> RunReader:
    """The output folder there."""
    return StoreReader(place) if isinstance(place, Store) else DiskReader(place)


def blaming(place: Path | Store) -> contextlib.AbstractContextManager[None]:
    """Whatever the disk or the store refuses is an `OutputError` that says what to do; a `StoreError` passes."""
    return blaming_store(place) if isinstance(place, Store) else disk.blaming_disk(place)


@contextlib.contextmanager
def blaming_store(store: Store) -> Iterator[None]:
    """Whatever the store refuses is an `OutputError` that says what to do; a `StoreError` passes."""
    try:
        yield
    except PermissionError as error:
        raise OutputError(
            f"{store}: the credentials do not allow listing, reading or writing it ({refusal_of(error)}); use other "
            "credentials, or choose another --output"
        ) from error
    except FileNotFoundError as error:
        raise OutputError(
            f"{store}: the bucket, or an object in it, does not exist ({refusal_of(error)}); check the URL, or choose "
            "another --output"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise OutputError(f"{store}: cannot be written to ({refusal_of(error)}); choose another --output") from error


@dataclass(frozen=True)
class Disk:
    """An output folder on a disk, to be written to. It can be sent to other processes, and several threads may write at
    once. `temporary`: one on the same disk, for files that are not whole yet."""

    folder: Path
    temporary: Path | None = None

    @property
    def root(self) -> Path:
        return self.folder

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """Write all of these files, or none; then the views of a report, which need not survive a power cut. Raises
        `ImageError` where a file's name is the reason why it cannot be written, and `OutputError`. Each file is whole
        and on the disk before it has its name."""
        written: list[str] = []
        with disk.blaming_disk(self.folder):
            try:
                for name, data in files.items():
                    self.put(name, data)
                    written.append(name)
            except OSError as error:
                self.remove(written)
                if error.errno in disk.OF_THE_NAME:
                    raise ImageError(
                        f"{name}: this result cannot be written ({disk.describe_os_error(error)})"
                    ) from error
                raise
            for name, data in views.items():
                self.put_view(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Write one file, whole. Raises `OSError`."""
        write_whole(self._make_parent(name), data, beside=self.temporary)

    def put_view(self, name: str, data: bytes) -> None:
        with replacing(self._make_parent(name), beside=self.temporary) as file:
            file.write(data)

    def _make_parent(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def remove(self, names: Iterable[str]) -> None:
        """Remove these files, as far as they are there. Raises `OSError`."""
        for name in names:
            disk.remove(self.folder / name)

    def begin(self) -> Path:
        """A name for a file of this machine's, in which what is not whole yet can be made."""
        return (self.temporary or self.folder) / UNFINISHED.format(secrets.token_hex(8))

    def keep(self, file: Path, name: str) -> None:
        """Put that file there under this name, whole; it is gone from where it was. Raises `OSError`. It is on the disk
        before it has its name."""
        with open(file, "rb+") as whole:
            os.fsync(whole.fileno())
        os.replace(file, self.folder / name)


@dataclass(frozen=True)
class Bucket:
    """An output folder in a store: as a `Disk`, and all methods raise `StoreError` as well. What is not whole yet is in
    this machine's folder for such files."""

    store: Store

    @property
    def root(self) -> Store:
        return self.store

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """As `Disk.write`; each object is whole as soon as it is there."""
        written: list[str] = []
        with blaming_store(self.store):
            try:
                for name, data in files.items():
                    written.append(name)  # one that failed may be there after all
                    self.put(name, data)
            except OSError as error:
                self.remove(written)
                if error.errno in disk.OF_THE_NAME:
                    raise ImageError(f"{name}: this result cannot be written ({refusal_of(error)})") from error
                raise
            self.store.write_all(views)

    def put(self, name: str, data: bytes) -> None:
        self.store.write(name, data)

    put_view = put

    def remove(self, names: Iterable[str]) -> None:
        self.store.remove(names)

    def begin(self) -> Path:
        return Path(tempfile.gettempdir(), UNFINISHED.format(secrets.token_hex(8)))

    def keep(self, file: Path, name: str) -> None:
        """As `Disk.keep`: an object is there whole, or not at all."""
        self.store.upload(name, str(file))
        file.unlink()


ResultWriter = Disk | Bucket


def to_writer(place: Path | Store, temporary: Path | None = None) -> ResultWriter:
    """What writes to the output folder there."""
    return Bucket(place) if isinstance(place, Store) else Disk(place, temporary)
