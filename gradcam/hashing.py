"""The SHA-256 of files, whatever their size."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gradcam.files import open_file

BLOCK = 2**20  # bytes


def hash_file(file: Path) -> str:
    """The SHA-256 of what is in it, in hexadecimal digits. Raises `OSError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open_file(file) as content:
        while count := content.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
