"""Files that are whole, or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".gradcam-{}.tmp"  # a dot, and no suffix of a picture: nobody takes it for one


def write_whole(path: Path, data: bytes | Iterable[bytes], *, beside: Path | None = None) -> None:
    """Write a file as `replacing` does, and wait until it is on the disk.

    `data`: all of it, or its parts one after another. Raises `OSError`.
    """
    with replacing(path, beside=beside) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, *, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A file under another name, in the same folder or in `beside`, that gets this one at the end: whole, or not there.

    Raises `OSError`.
    """
    temporary = (beside or path.parent) / UNFINISHED.format(secrets.token_hex(8))
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:  # interruptions too
        temporary.unlink(missing_ok=True)
        raise
