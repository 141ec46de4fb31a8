"""Make folders of test images from the photographs in assets/."""

from __future__ import annotations

import os
import random
from pathlib import Path

from PIL import Image

from benchmark.cases import PICTURE, ROOT, SEED

WIDTH, HEIGHT = 1024, 768
QUALITY = 90  # The JPEG quality of input files and overlays.
LARGE_PHOTOGRAPH_SUFFIX = ".webp"  # Only photographs with this suffix are large enough.


def make_image_files(folder: Path, count: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
    """Write JPEG files of this (width, height) into a new folder. The files are the same crops in every run."""
    folder.mkdir()
    photographs = sorted(path for path in (ROOT / PICTURE).parent.iterdir() if path.suffix == LARGE_PHOTOGRAPH_SUFFIX)
    rng = random.Random(SEED)
    for number in range(count):
        with Image.open(photographs[number % len(photographs)]) as opened:
            picture = opened.convert("RGB")
        share = rng.uniform(0.9, 1) * min(picture.width / WIDTH, picture.height / HEIGHT)
        width, height = share * WIDTH, share * HEIGHT
        x0, y0 = rng.uniform(0, picture.width - width), rng.uniform(0, picture.height - height)
        box = (x0, y0, x0 + width, y0 + height)
        picture.resize(size, Image.Resampling.LANCZOS, box=box).save(folder / f"{number:05}.jpg", quality=QUALITY)


def link_image_files(source: Path, folder: Path, count: int) -> None:
    """Create a folder with this number of hard links to the files of another folder."""
    folder.mkdir()
    files = sorted(source.iterdir())
    for number in range(count):
        os.link(files[number % len(files)], folder / f"{number:06}.jpg")
