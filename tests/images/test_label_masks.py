"""Test how the labels of a mask are read from its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradcam.errors import ImageError
from gradcam.images.read import read_label_mask
from tests.images.test_images import png


@pytest.mark.parametrize(("bits", "mode"), [(2, "L"), (4, "L"), (8, "L"), (16, "I;16")])
def test_numbers_are_read_as_the_file_has_them(tmp_path: Path, bits: int, mode: str) -> None:
    """Pillow scales grey images of 2 and 4 bits to 8 bits; the values of the file are needed."""
    values = [0, 1, 3, 2]
    row = int("".join(f"{value:0{bits}b}" for value in values), 2).to_bytes(4 * bits // 8, "big")
    (tmp_path / "a.png").write_bytes(png(4, 1, bits, 0, b"\0" + row))
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode in (mode, "I")  # Pillow before 10.3 reads 16 bits as "I"
    assert read_label_mask(tmp_path / "a.png").tolist() == [values]


def test_a_mask_that_lies_on_its_side_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8)).save(tmp_path / "a.png", exif=exif)
    assert read_label_mask(tmp_path / "a.png").tolist() == [[4, 1], [5, 2], [6, 3]]


def test_a_jpeg_is_no_mask(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.jpg")
    with pytest.raises(ImageError, match="is JPEG, whose lossy compression changes labels"):
        read_label_mask(tmp_path / "a.jpg")
