"""Where the files of a picture's results go: a folder on a disk, or one in a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradcam.batch.output.disk import OF_THE_NAME, blaming_disk, describe, remove
from gradcam.errors import ImageError
from gradcam.files import replacing, write_whole


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
                    raise ImageError(f"{name}: this result cannot be written ({describe(error)})") from error
                raise
            for name, data in views.items():
                self._write_view(self.folder / name, data)

    def _write_view(self, path: Path, data: bytes) -> None:
        """Without waiting for the disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, beside=self.temporary) as file:
            file.write(data)
