"""Folders of pictures, made from the photographs in assets/."""

from __future__ import annotations

import os
import random
from pathlib import Path

from PIL import Image

from benchmark.cases import PICTURE, ROOT, SEED

WIDTH, HEIGHT = 1024, 768
QUALITY = 90  # of JPEG, of what is read and of what is written
LARGE = ".webp"  # the photographs that are about as large as that; of others there is less detail


def make_pictures(folder: Path, count: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
    """So many JPEG files of this (width, height) in a new folder: parts of the photographs, each time the same."""
    folder.mkdir()
    photographs = sorted(path for path in (ROOT / PICTURE).parent.iterdir() if path.suffix == LARGE)
    chance = random.Random(SEED)
    for number in range(count):
        with Image.open(photographs[number % len(photographs)]) as opened:
            picture = opened.convert("RGB")
        share = chance.uniform(0.9, 1) * min(picture.width / WIDTH, picture.height / HEIGHT)
        width, height = share * WIDTH, share * HEIGHT
        left, top = chance.uniform(0, picture.width - width), chance.uniform(0, picture.height - height)
        box = (left, top, left + width, top + height)
        picture.resize(size, Image.Resampling.LANCZOS, box=box).save(folder / f"{number:05}.jpg", quality=QUALITY)


def repeat_pictures(source: Path, folder: Path, count: int) -> None:
    """So many files in a new folder: hard links to those of another, under names of their own."""
    folder.mkdir()
    files = sorted(source.iterdir())
    for number in range(count):
        os.link(files[number % len(files)], folder / f"{number:06}.jpg")
