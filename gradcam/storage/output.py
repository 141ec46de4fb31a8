"""Read and write an output folder, on a disk or in an object store."""

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
from gradcam.images import files as image_files
from gradcam.storage import disk
from gradcam.storage.fetch import StoreArchive
from gradcam.storage.retry import describe_refusal
from gradcam.storage.run_file import PIECE_FOLDER
from gradcam.storage.store import Store


@dataclass(frozen=True)
class DiskReader:
    """Read access to an output folder on a disk.

    Names are relative to the folder, with "/" between folders. All methods raise `OSError`. If the name
    does not belong to a regular file, `read` and `read_lines` raise `OutputError`.
    """

    folder: Path

    def locate(self, name: str) -> Path:
        """Return the full path of the named file."""
        return self.folder / name

    def show(self, name: str = "") -> str:
        """Return the path of the folder, or of a file in it, for a message."""
        return str(self.folder / name) if name else disk.format_folder(self.folder)

    def list_names(self) -> list[str]:
        """Return the names of all files and folders in this folder, and of all pieces of manifests and logs."""
        names: list[str] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if PIECE_FOLDER.fullmatch(entry.name) and entry.is_dir():
                    names += [f"{entry.name}/{name}" for name in os.listdir(entry.path)]
                else:
                    names.append(entry.name)
        return names

    def find(self, folder: str) -> list[str]:
        """Return the names of all files in a subfolder and below it."""
        top = self.folder / folder
        if top.is_symlink():  # The link may lead out of this output folder.
            return []
        folders = ((Path(parent), names) for parent, _, names in os.walk(top))
        return [(parent / name).relative_to(self.folder).as_posix() for parent, names in folders for name in names]

    def select(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that lead to files inside the folder or, in a store, to existing objects."""
        paths = ((name, disk.join_inside(self.folder, name)) for name in names)
        return [name for name, path in paths if path is not None and disk.is_inside(self.folder, path)]

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        disk.check_regular_file(self.folder / name)
        return image_files.read_text_file(self.folder / name)

    def read_head(self, name: str, size: int) -> bytes | None:
        """Return up to `size` bytes from the start of a file, or None if there is no such file."""
        try:
            with image_files.open_file(self.folder / name) as file:
                return file.read(size)
        except (FileNotFoundError, image_files.NotAFileError):
            return None

    def read_lines(self, name: str) -> Iterator[bytes]:
        """Yield the lines of a file, with their line ends."""
        disk.check_regular_file(self.folder / name)
        yield from disk.open_lines(self.folder / name)

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file for sequential reading."""
        return open(self.folder / name, "rb")


@dataclass(frozen=True)
class StoreReader:
    """Read access to an output folder in a store, like `DiskReader`. All methods raise `OSError` and `StoreError`."""

    store: Store

    def locate(self, name: str) -> str:
        return self.store.below(name).url

    def show(self, name: str = "") -> str:
        return self.locate(name) if name else str(self.store)

    def list_names(self) -> list[str]:
        names: list[str] = []
        for name in self.store.list_names():
            is_piece_folder = name.endswith("/") and PIECE_FOLDER.fullmatch(name.rstrip("/"))
            names += self.store.list_names(name.rstrip("/")) if is_piece_folder else [name]
        return names

    def find(self, folder: str) -> list[str]:
        return list(self.store.find(folder))

    def select(self, names: Iterable[str]) -> list[str]:
        sizes = self.store.find()
        return [name for name in dict.fromkeys(names) if name in sizes]

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


OutputReader = DiskReader | StoreReader


def to_reader(folder: Path | Store) -> OutputReader:
    """Return the reader of an output folder."""
    return StoreReader(folder) if isinstance(folder, Store) else DiskReader(folder)


def translate_output_errors(folder: Path | Store) -> contextlib.AbstractContextManager[None]:
    """Turn an error of a disk or a store into an `OutputError` with advice. A `StoreError` is raised unchanged."""
    return translate_output_store_errors(folder) if isinstance(folder, Store) else disk.translate_disk_errors(folder)


@contextlib.contextmanager
def translate_output_store_errors(store: Store) -> Iterator[None]:
    """Turn an error of a store into an `OutputError` with advice. A `StoreError` is raised unchanged."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        problem, advice = "cannot be written to", ""
        if isinstance(error, PermissionError):
            problem = "the credentials do not allow listing, reading or writing it"
            advice = "use other credentials, or "
        elif isinstance(error, FileNotFoundError):
            problem, advice = "the bucket, or an object in it, does not exist", "check the URL, or "
        reason = describe_refusal(error)
        raise OutputError(f"{store}: {problem} ({reason}); {advice}choose another --output") from error


@dataclass(frozen=True)
class DiskWriter:
    """Write access to an output folder on a disk.

    The object can be pickled. Several threads may write at once. `temporary` is a folder on the same disk for
    unfinished files.
    """

    root: Path
    temporary: Path | None = None

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """Write all `files` or none, then the `views` (images of a report).

        Each of the `files` is synced to the disk before it gets its name. Views are not synced, so a power cut can lose
        views. Raises `ImageError` if a file cannot be written because of its name, and `OutputError` for all other
        failures.
        """
        with disk.translate_disk_errors(self.root):
            _write_all(self, files)
            for name, data in views.items():
                self.put_view(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Write one file completely or not at all. Raises `OSError`."""
        image_files.write_atomically(self._make_parent(name), data, beside=self.temporary)

    def put_view(self, name: str, data: bytes) -> None:
        with image_files.open_replacement(self._make_parent(name), beside=self.temporary) as file:
            file.write(data)

    def _make_parent(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def remove(self, names: Iterable[str]) -> None:
        """Remove the files that exist. Raises `OSError`."""
        for name in names:
            disk.remove(self.root / name)

    def begin(self) -> Path:
        """Return a new path on this machine, for a file that is written step by step. `keep` stores the file later."""
        return (self.temporary or self.root) / image_files.TEMPORARY_NAME.format(secrets.token_hex(8))

    def keep(self, file: Path, name: str) -> None:
        """Move a finished file of this machine into the output folder. Raises `OSError`.

        The file is synced to the disk before it gets its name.
        """
        with open(file, "rb+") as unsynced:
            os.fsync(unsynced.fileno())
        os.replace(file, self.root / name)


@dataclass(frozen=True)
class StoreWriter:
    """Write access to an output folder in a store, like `DiskWriter`. All methods also raise `StoreError`.

    Unfinished files lie in this machine's temporary folder.
    """

    root: Store

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """Write all `files` or none, then the `views`. Readers never see an incomplete object."""
        with translate_output_store_errors(self.root):
            _write_all(self, files)
            self.root.write_all(views)

    def put(self, name: str, data: bytes) -> None:
        self.root.write(name, data)

    put_view = put

    def remove(self, names: Iterable[str]) -> None:
        self.root.remove(names)

    def begin(self) -> Path:
        return Path(tempfile.gettempdir(), image_files.TEMPORARY_NAME.format(secrets.token_hex(8)))

    def keep(self, file: Path, name: str) -> None:
        """Upload a finished file of this machine, and delete the local file. Readers never see an incomplete object."""
        self.root.upload(name, str(file))
        file.unlink()


OutputWriter = DiskWriter | StoreWriter


def _write_all(writer: OutputWriter, files: Mapping[str, bytes]) -> None:
    written: list[str] = []
    in_store = isinstance(writer, StoreWriter)
    try:
        for name, data in files.items():
            writer.put(name, data)
            written.append(name)
    except OSError as error:
        # In a store, remove the last object as well: the store may have written the object although the request failed.
        writer.remove([*written, name] if in_store else written)
        if error.errno in disk.FILE_NAME_ERRNOS:
            reason = describe_refusal(error) if in_store else disk.describe_os_error(error)
            raise ImageError(f"{name}: this result cannot be written ({reason})") from error
        raise


def to_writer(folder: Path | Store, temporary: Path | None = None) -> OutputWriter:
    """Return the writer of an output folder."""
    return StoreWriter(folder) if isinstance(folder, Store) else DiskWriter(folder, temporary)
