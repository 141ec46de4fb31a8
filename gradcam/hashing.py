"""The SHA-256 of files, whatever their size."""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK = 2**20  # bytes


def hash_file(file: Path) -> str:
    """The SHA-256 of what is in it, in hexadecimal digits. Raises `OSError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open(file, "rb", buffering=0) as content:
        while count := content.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
