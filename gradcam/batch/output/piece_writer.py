"""Lines that grow into numbered pieces: where nothing can be added to a file, each piece is written once, whole."""

from __future__ import annotations

import threading

from gradcam.batch.output.parts import name_piece
from gradcam.errors import OutputError
from gradcam.stores import Store


class PieceWriter:
    """Collects lines, and writes them as the next piece of a folder in a store when it is told to; several threads may add.

    `last`: the highest number that there is already.
    """

    def __init__(self, store: Store, folder: str, last: int) -> None:
        self._store, self._folder, self._number = store, folder, last
        self._lines: list[bytes] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many lines are waiting."""
        return len(self._lines)

    def add(self, line: bytes) -> None:
        """Add a line, with its end. It is lost unless it is written."""
        with self._lock:
            self._lines.append(line)

    def write(self) -> None:
        """Write what is waiting; nothing where nothing is.

        Raises `OutputError` where somebody else wrote that piece, and what a `Store` does; the lines wait on then.
        """
        with self._lock:
            if not self._lines:
                return
            name, data = name_piece(self._folder, self._number + 1), b"".join(self._lines)
            # It may be ours, written by a request whose answer was lost.
            if self._store.is_file(name) and self._store.read(name) != data:
                raise OutputError(
                    f"{self._store.below(name).url}: another process wrote it meanwhile; one at a time works there, or one "
                    "for each --shard. Go on with --resume"
                )
            self._store.write(name, data)
            self._number += 1
            self._lines.clear()
