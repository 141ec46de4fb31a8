"""Where tars are kept: made in a file that has no name there yet, and then put in their place whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from gradcam.batch.inputs.store_contents import StoreArchive
from gradcam.batch.output.disk import blaming_disk, show
from gradcam.batch.output.store_place import blaming_store
from gradcam.files import UNFINISHED
from gradcam.stores import Store


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
