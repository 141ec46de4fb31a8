"""Output folders, on a disk or in a store, as far as runs are told of there: their files, and what these say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradcam.batch.output.disk import check_file, open_lines, show
from gradcam.batch.output.parts import FOLDER
from gradcam.errors import OutputError
from gradcam.stores import Store

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
