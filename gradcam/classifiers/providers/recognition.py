"""Which of a library's own files of weights a file is, whose pictures are prepared as those weights were trained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradcam.classifiers.preprocessing import Preprocessing
from gradcam.hashing import hash_file

HASH = re.compile(r"-([0-9a-f]{8,})$")  # the first digits of the file's SHA-256, at the end of the name of each


@dataclass(frozen=True)
class Recognised:
    """The library's own `name` of a file, and whether the content says so, or the file's name alone."""

    name: str
    is_certain: bool


def recognise(path: Path, names: Iterable[str]) -> Recognised | None:
    """Which of the library's files this is, by its content, or, where that is another, by its name; None for neither.

    `names`: such as mobilenet_v2-b0353104.pth. The content is only read where one of them tells its hash.
    """
    stems = {name.rpartition(".")[0]: name for name in names}
    hashes = {found.group(1): name for stem, name in stems.items() if (found := HASH.search(stem))}
    if hashes and path.is_file():
        digest = hash_file(path)
        for prefix, name in hashes.items():
            if digest.startswith(prefix):
                return Recognised(name, True)
    # Saved in another form, or tuned further: mobilenet_v2-b0353104.safetensors.
    alike = [name for stem, name in stems.items() if path.name.startswith(stem)]
    return Recognised(alike[0], False) if alike else None


def describe_preprocessing(path: Path, found: Recognised | None, name: str, preprocess: Preprocessing) -> str:
    """A sentence on which preprocessing a file of weights gets; `name` is that of the weights whose it is."""
    resize, size = (_describe_size(each) for each in (preprocess.resize, preprocess.size))
    steps = f"resized to {resize}, cut to {size}"
    if found is None:
        return f"Pictures are prepared as for {name} ({steps}): '{path.name}' is none of its library's own files."
    how = "its content" if found.is_certain else "its name"
    return f"'{path.name}' is {name}, by {how}: pictures are prepared as for these ({steps})."


def _describe_size(size: int | tuple[int, int]) -> str:
    if isinstance(size, int):
        return str(size)
    return str(size[0]) if size[0] == size[1] else f"{size[0]} x {size[1]}"
