"""Photographs in folders that are named like their classes, for the tests of pages and for the images of the site."""

from pathlib import Path

from PIL import Image

ASSETS = Path(__file__).parent.parent.parent / "assets"


def make_labelled(folder: Path) -> Path:
    """Write twelve crops of each of two photographs, in folders that are named like their classes."""
    for name, source in {"espresso": "coffee.jpg", "macaw": "macaw.webp"}.items():
        (folder / name).mkdir(parents=True)
        with Image.open(ASSETS / source) as picture:
            side = min(picture.size) * 4 // 5
            for number in range(12):
                x0, y0 = number % 4 * (picture.width - side) // 3, number // 4 * (picture.height - side) // 2
                part = picture.convert("RGB").crop((x0, y0, x0 + side, y0 + side))
                part.resize((240, 240)).save(folder / name / f"{number:02}.jpg")
    return folder
