"""Test read_image() and write_image() on unusual files, against pixels computed by hand."""

from __future__ import annotations

import importlib
import io
import os
import random
import struct
import subprocess
import sys
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.images.read import read_values
from gradcam.images.write import encode_image, encode_png

# All pixels differ, and every colour changes if red and blue are swapped.
PIXELS = np.array([[[255, 0, 0], [0, 255, 7], [0, 9, 254]], [[10, 20, 30], [200, 100, 50], [1, 2, 3]]], dtype=np.uint8)
BLOCKS = np.repeat(np.repeat(PIXELS, 16, axis=0), 16, axis=1)
PHOTO = "coffee.jpg"
AVIF = ["avif"] if ".avif" in Image.registered_extensions() else []  # since Pillow 11.3


def save(path: Path, image: Image.Image | np.ndarray, **options: object) -> Path:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(path, **options)
    return path


def grey(*levels: int) -> np.ndarray:
    """Return a row of RGB pixels with these grey levels."""
    return np.array([[[level] * 3 for level in levels]], dtype=np.uint8)


def png(
    width: int, height: int, bits: int, colour_type: int, rows: bytes, *, transparency: bytes = b"", exif: bytes = b""
) -> bytes:
    """Encode a PNG file by hand, because Pillow cannot write every kind of PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    key = chunk(b"tRNS", transparency) if transparency else b""
    key += chunk(b"eXIf", exif) if exif else b""
    chunks = chunk(b"IHDR", header) + key + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.png", {}), ("a.bmp", {}), ("a.tiff", {}), ("a.tif", {"compression": "tiff_lzw"}),
        ("a.tif", {"compression": "tiff_deflate"}), ("a.webp", {"lossless": True, "exact": True}), ("a.gif", {}),
        ("a.ppm", {}), ("a.tga", {}), ("a.jp2", {}), ("misnamed.jpg", {"format": "PNG"}),
        ("no suffix", {"format": "BMP"}),
    ],
)  # fmt: skip
def test_lossless_files_are_read_exactly(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    image = gradcam.read_image(save(tmp_path / name, PIXELS, **options))
    assert image.dtype == np.uint8
    assert image.flags.writeable
    np.testing.assert_array_equal(image, PIXELS)


@pytest.mark.parametrize("suffix", ["jpg", "webp", "mpo", *AVIF])
def test_lossy_files_are_read_nearly_exactly(tmp_path: Path, suffix: str) -> None:
    image = gradcam.read_image(save(tmp_path / f"a.{suffix}", BLOCKS, quality=95))
    centres = image[8::16, 8::16].astype(int)
    assert abs(centres - PIXELS).max() <= 8


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_a_photograph_has_the_values_that_pillow_decodes(
    tmp_path: Path, photo: Callable[[str], Path], suffix: str
) -> None:
    with Image.open(photo(PHOTO)) as opened:
        path = save(tmp_path / f"a{suffix}", opened)
    with Image.open(path) as opened:
        expected = np.asarray(opened)
    np.testing.assert_array_equal(gradcam.read_image(path), expected)
    np.testing.assert_array_equal(read_values(path, path.read_bytes()), expected)


@pytest.mark.parametrize("exif", [None, 1])
def test_a_picture_that_lies_upright_is_not_copied_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exif: int | None
) -> None:
    options = {} if exif is None else {"exif": orientation(exif)}
    path = save(tmp_path / "a.jpg", BLOCKS, quality=100, subsampling=0, **options)
    copied: list[str] = []
    monkeypatch.setattr(Image.Image, "copy", lambda image: copied.append("copy"))
    assert abs(gradcam.read_image(path).astype(int) - BLOCKS).max() <= 8
    assert copied == []


def palette_image(pixels: list[int], colours: list[int]) -> Image.Image:
    image = Image.new("P", (len(pixels), 1))
    image.putpalette(colours)
    image.putdata(pixels)
    return image


HALF_SEEN = {"transparency": bytes([255, 0, 128])}
PALETTE = palette_image([0, 1, 2], [255, 0, 10, 20, 30, 40, 7, 8, 9])
TWO_BITS = Image.fromarray(np.array([[0, 255, 255]], dtype=np.uint8)).convert("1")
GREY = Image.fromarray(np.array([[0, 7, 255]], dtype=np.uint8))
# Over white: value * alpha / 255 + 255 - alpha, so that 10 at 128 is 5.02 + 127 and 100 at 128 is 50.2 + 127.
GREY_ALPHA = Image.fromarray(np.array([[[100, 255], [100, 128], [100, 0]]], dtype=np.uint8))
RGBA = Image.fromarray(np.array([[[10, 20, 30, 255], [10, 20, 30, 128], [10, 20, 30, 0]]], dtype=np.uint8))
OVER_WHITE = [[[10, 20, 30], [132, 137, 142], [255, 255, 255]]]
# (255 - ink) * (255 - black) / 255
CMYK = Image.frombytes("CMYK", (3, 1), bytes([0, 255, 255, 0, 51, 0, 102, 51, 0, 0, 0, 204]))
CMYK_AS_RGB = [[[255, 0, 0], [163, 204, 122], [51, 51, 51]]]


@pytest.mark.parametrize(
    ("name", "image", "options", "expected"),
    [
        ("one bit.png", TWO_BITS, {}, grey(0, 255, 255)), ("one bit.tiff", TWO_BITS, {}, grey(0, 255, 255)),
        ("one bit.bmp", TWO_BITS, {}, grey(0, 255, 255)), ("grey.png", GREY, {}, grey(0, 7, 255)),
        ("grey.tiff", GREY, {}, grey(0, 7, 255)), ("grey.webp", GREY, {"lossless": True}, grey(0, 7, 255)),
        ("grey with alpha.png", GREY_ALPHA, {}, grey(100, 177, 255)), ("alpha.png", RGBA, {}, OVER_WHITE),
        ("alpha.webp", RGBA, {"lossless": True, "exact": True}, OVER_WHITE), ("alpha.tiff", RGBA, {}, OVER_WHITE),
        ("palette.png", PALETTE, {}, [[[255, 0, 10], [20, 30, 40], [7, 8, 9]]]),
        ("palette.gif", PALETTE, {}, [[[255, 0, 10], [20, 30, 40], [7, 8, 9]]]),
        ("see-through palette.png", PALETTE, {"transparency": 1}, [[[255, 0, 10], [255, 255, 255], [7, 8, 9]]]),
        ("see-through palette.gif", PALETTE, {"transparency": 1}, [[[255, 0, 10], [255, 255, 255], [7, 8, 9]]]),
        ("half-see-through.png", PALETTE, HALF_SEEN, [[[255, 0, 10], [255, 255, 255], [131, 131, 132]]]),
        ("cmyk.tiff", CMYK, {}, CMYK_AS_RGB),
    ],
)  # fmt: skip
def test_every_mode_looks_as_in_a_viewer(
    tmp_path: Path, name: str, image: Image.Image, options: dict[str, object], expected: object
) -> None:
    np.testing.assert_array_equal(gradcam.read_image(save(tmp_path / name, image, **options)), expected)


def test_a_colour_that_stands_for_transparency_is_white(tmp_path: Path) -> None:
    expected = PIXELS.copy()
    expected[1, 1] = 255
    path = save(tmp_path / "key.png", PIXELS, transparency=(200, 100, 50))
    np.testing.assert_array_equal(gradcam.read_image(path), expected)


def test_a_cmyk_jpeg_has_its_colours(tmp_path: Path) -> None:
    large = CMYK.resize((48, 16), Image.Resampling.NEAREST)
    image = gradcam.read_image(save(tmp_path / "cmyk.jpg", large, quality=95))
    assert abs(image[8, 8::16].astype(int) - CMYK_AS_RGB[0]).max() <= 4


SIXTEEN_BITS = np.array([[0, 32896, 65535, 257]], dtype=np.uint16)  # 32896 is 128 * 257


@pytest.mark.parametrize("name", ["deep.png", "deep.tiff"])
def test_sixteen_bits_of_grey_become_eight(tmp_path: Path, name: str) -> None:
    image = gradcam.read_image(save(tmp_path / name, SIXTEEN_BITS))
    np.testing.assert_array_equal(image, grey(0, 128, 255, 1))
    dark = gradcam.read_image(save(tmp_path / name, np.array([[0, 2570, 5140]], dtype=np.uint16)))
    np.testing.assert_array_equal(dark, grey(0, 10, 20))


def test_the_grey_of_sixteen_bits_that_stands_for_transparency_is_white(tmp_path: Path) -> None:
    path, row = tmp_path / "key.png", b"\0" + struct.pack(">4H", 0, 257, 32896, 258)
    path.write_bytes(png(4, 1, 16, 0, row, transparency=struct.pack(">H", 257)))
    np.testing.assert_array_equal(gradcam.read_image(path), grey(0, 255, 128, 1))
    np.testing.assert_array_equal(read_values(path), [[0, 65535, 32896, 258]])


def test_sixteen_bits_of_colour_become_eight(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    path.write_bytes(png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 0, 32896, 65535, 65535, 0, 257)))
    np.testing.assert_array_equal(gradcam.read_image(path), [[[0, 128, 255], [255, 0, 1]]])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], (0, 128, 255)), ([0.0, 0.1, 0.2], (0, 26, 51)), ([0.0, 128.0, 255.0], (0, 128, 255)),
        ([0.0, 32896.0, 65535.0], (0, 128, 255)), ([-1.0, 0.5, 1.0], (0, 128, 255)),
        ([np.nan, 0.5, 1.0], (0, 128, 255)), ([-np.inf, 0.0, 0.5, np.inf], (0, 0, 128, 128)),
        ([0.0, 0.5, 1.0, np.inf], (0, 128, 255, 255)), ([np.inf, np.inf], (0, 0)), ([0.0, 0.0, 0.0], (0, 0, 0)),
    ],
)  # fmt: skip
def test_floats_are_scaled_by_the_range_of_their_kind(
    tmp_path: Path, values: list[float], expected: tuple[int, ...]
) -> None:
    path = save(tmp_path / "floats.tiff", np.array([values], dtype=np.float32))
    np.testing.assert_array_equal(gradcam.read_image(path), grey(*expected))


def tiff(values: np.ndarray, *, order: str = "<", planar: bool = False, **tags: int) -> bytes:
    """Encode a TIFF file by hand, with one strip or one per channel, in this byte order; Pillow writes only a few kinds."""
    height, width = values.shape[:2]
    channels = 1 if values.ndim == 2 else values.shape[2]
    planes = np.moveaxis(values, 2, 0) if planar else values[None]
    strips = [plane.astype(plane.dtype.newbyteorder(order)).tobytes() for plane in planes]
    starts = [8 + sum(map(len, strips[:i])) for i in range(len(strips))]
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    entries = {
        256: [width], 257: [height], 258: [8 * values.itemsize] * channels, 259: [1], 262: [tags.get("photometric", 1)],
        273: starts, 274: [tags.get("orientation", 1)], 277: [channels], 278: [height],
        279: [len(strip) for strip in strips], 284: [2 if planar else 1], 339: [kind] * channels,
    }  # fmt: skip
    if channels == 4:
        entries[338] = [2]
    entries = dict(sorted(entries.items()))
    if tags.get("without") in entries:
        del entries[tags["without"]]
    directory, beyond = b"", b""
    first = 8 + sum(map(len, strips))
    end = first + 2 + 12 * len(entries) + 4
    for number, actual in entries.items():
        data = struct.pack(f"{order}{len(actual)}I", *actual)
        if len(actual) > 1:
            data, beyond = struct.pack(f"{order}I", end + len(beyond)), beyond + data
        directory += struct.pack(f"{order}HHI", number, 4, len(actual)) + data
    header = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, first)
    count = struct.pack(f"{order}H", len(entries))
    return header + b"".join(strips) + count + directory + bytes(4) + beyond


# All values differ, and so do the two bytes of each value.
DEEP = np.arange(18, dtype=np.uint16).reshape(2, 3, 3) * 3000 + 7


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bits_of_colour_keep_their_depth(tmp_path: Path, order: str) -> None:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in DEEP)
    files = {"a.png": png(3, 2, 16, 2, rows), "a.tif": tiff(DEEP, order=order, photometric=2)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        values = read_values(tmp_path / name)
        assert values.dtype == np.uint16
        np.testing.assert_array_equal(values, DEEP)
        np.testing.assert_array_equal(gradcam.read_image(tmp_path / name), np.round(DEEP / 257))


def test_colours_of_sixteen_bits_lie_on_white(tmp_path: Path) -> None:
    # 1000 * 0.2 + 65535 * 0.8 is 52628, 2000 * 0.2 gives 52828, 60000 * 0.2 gives 64428
    values = np.array([[[1000, 2000, 60000, 13107], [1, 2, 3, 65535], [4, 5, 6, 0]]], np.uint16)
    expected = [[[52628, 52828, 64428], [1, 2, 3], [65535] * 3]]
    files = {"a.png": png(3, 1, 16, 6, b"\0" + values.astype(">u2").tobytes()), "a.tif": tiff(values, photometric=2)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        np.testing.assert_array_equal(read_values(tmp_path / name), expected)


def test_grey_of_sixteen_bits_lies_on_white(tmp_path: Path) -> None:
    values = np.array([[[1000, 13107], [3, 65535], [5, 0]]], np.uint16)
    path = tmp_path / "a.png"
    path.write_bytes(png(3, 1, 16, 4, b"\0" + values.astype(">u2").tobytes()))
    actual = read_values(path)
    assert actual.dtype == np.uint16
    np.testing.assert_array_equal(actual, [[52628, 3, 65535]])
    np.testing.assert_array_equal(gradcam.read_image(path), grey(205, 0, 255))


def test_the_colour_of_sixteen_bits_that_stands_for_transparency_is_white(tmp_path: Path) -> None:
    key, near = (1000, 2000, 3000), (1000, 2000, 3001)
    path = tmp_path / "key.png"
    path.write_bytes(png(2, 1, 16, 2, b"\0" + struct.pack(">6H", *key, *near), transparency=struct.pack(">3H", *key)))
    np.testing.assert_array_equal(read_values(path), [[[65535] * 3, near]])
    np.testing.assert_array_equal(gradcam.read_image(path), [[[255] * 3, [4, 8, 12]]])


@pytest.mark.parametrize("number", range(1, 10))
def test_deep_colours_are_upright_whatever_their_orientation(tmp_path: Path, number: int) -> None:
    expected = ORIENTATIONS[number](DEEP)
    if number < 9:
        (tmp_path / "a.tif").write_bytes(tiff(DEEP, photometric=2, orientation=number))
        np.testing.assert_array_equal(read_values(tmp_path / "a.tif"), expected)
    for channels, colour_type in ((slice(3), 2), (0, 4)):
        stored = DEEP[..., channels]
        if colour_type == 4:
            stored = np.stack([stored, np.full_like(stored, 65535)], axis=2)
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in stored)
        path = tmp_path / "a.png"
        path.write_bytes(png(3, 2, 16, colour_type, rows, exif=orientation(number).tobytes()[6:]))
        np.testing.assert_array_equal(read_values(path), expected[..., channels])


@pytest.mark.parametrize("number", [1, 6, 7])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.float32])
def test_deep_grey_is_upright(tmp_path: Path, number: int, dtype: type) -> None:
    values = DEEP[..., 0].astype(dtype)
    (tmp_path / "a.tif").write_bytes(tiff(values, orientation=number))
    actual = read_values(tmp_path / "a.tif")
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, ORIENTATIONS[number](DEEP)[..., 0])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([[0, 1, 65535]], np.uint16), np.uint16),
        (np.array([[-32768, 1, 32767]], np.int16), np.int32),
        (np.array([[-(2**31), 1, 2**31 - 1]], np.int32), np.int32),
        (np.array([[-1.5, 0, 1e30]], np.float32), np.float32),
    ],
)
def test_single_channels_keep_their_values(tmp_path: Path, values: np.ndarray, dtype: type, order: str) -> None:
    (tmp_path / "a.tif").write_bytes(tiff(values, order=order))
    read = read_values(tmp_path / "a.tif")
    assert read.dtype == dtype
    assert read.dtype.isnative
    np.testing.assert_array_equal(read, values)


def test_a_tiff_that_does_not_say_the_kind_of_its_numbers_has_unsigned_ones(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(tiff(np.array([[7, 2**32 - 1]], np.uint32), without=339))
    np.testing.assert_array_equal(read_values(tmp_path / "a.tif"), [[7, 2**32 - 1]])


def test_a_tiff_in_which_zero_is_white_is_turned_round(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(tiff(np.array([[0, 1000, 65535]], np.uint16), photometric=0))
    np.testing.assert_array_equal(read_values(tmp_path / "a.tif"), [[65535, 64535, 0]])
    (tmp_path / "b.tif").write_bytes(tiff(np.array([[0, 100, 255]], np.uint8), photometric=0))
    np.testing.assert_array_equal(read_values(tmp_path / "b.tif"), grey(255, 155, 0))


@pytest.mark.parametrize(
    ("most", "stored", "expected"), [(65535, [1, 65535], [1, 65535]), (4095, [1, 4095], [16, 65535])]
)
def test_a_pgm_is_scaled_by_its_largest_value(
    tmp_path: Path, most: int, stored: list[int], expected: list[int]
) -> None:
    (tmp_path / "a.pgm").write_bytes(f"P5 2 1 {most}\n".encode() + struct.pack(">2H", *stored))
    values = read_values(tmp_path / "a.pgm")
    assert values.dtype == np.uint16
    np.testing.assert_array_equal(values, [expected])


def test_deep_channels_in_planes_of_their_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(tiff(DEEP, photometric=2, planar=True))
    refuse(tmp_path / "a.tif", "stores its 16-bit channels in separate planes, which is not supported")
    shallow = (DEEP // 257).astype(np.uint8)
    (tmp_path / "b.tif").write_bytes(tiff(shallow, photometric=2, planar=True))
    np.testing.assert_array_equal(read_values(tmp_path / "b.tif"), shallow)


def test_deep_colours_that_opencv_does_not_decode_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    (tmp_path / "a.tif").write_bytes(tiff(DEEP, photometric=2))
    for decoded in (None, DEEP.astype(np.uint8), DEEP[..., 0]):
        monkeypatch.setattr(cv2, "imdecode", lambda *args, decoded=decoded: decoded)
        refuse(tmp_path / "a.tif", "has 16-bit channels that cannot be decoded: save it as PNG")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("fraction", [0.5, 0.95])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_deep_picture_that_was_cut_off_is_refused(
    tmp_path: Path, channels: int, fraction: float, suffix: str
) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (40, 50, channels), dtype=np.uint16)
    if suffix == "png":
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        data = png(50, 40, 16, 0 if channels == 1 else 2, rows)
    else:
        data = tiff(values[..., 0] if channels == 1 else values, photometric=1 if channels == 1 else 2)
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(data)
    assert read_values(path).shape[:2] == (40, 50)
    path.write_bytes(data[: int(len(data) * fraction)])
    refuse(path, "")


# Map each EXIF orientation to the rotation or reflection of the stored pixels that restores the image.
ORIENTATIONS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: stored.transpose(1, 0, 2)[:, ::-1],  # a quarter turn clockwise
    7: lambda stored: stored.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda stored: stored.transpose(1, 0, 2)[::-1],  # a quarter turn anticlockwise
    9: lambda stored: stored,  # 9 is not a valid orientation
}


def orientation(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


@pytest.mark.parametrize("number", ORIENTATIONS)
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_a_picture_is_upright_whatever_its_exif_orientation(tmp_path: Path, number: int, suffix: str) -> None:
    path = save(tmp_path / f"a.{suffix}", BLOCKS, exif=orientation(number), quality=95)
    image = gradcam.read_image(path)
    expected = ORIENTATIONS[number](PIXELS).astype(int)
    assert image.shape == (16 * expected.shape[0], 16 * expected.shape[1], 3)
    assert abs(image[8::16, 8::16] - expected).max() <= 8


BROKEN_EXIF = {
    "garbage": b"Exif\0\0" + b"garbage" * 5,
    "cut after its header": b"Exif\0\0MM\0*",
    "offset beyond its end": b"Exif\0\0MM\0*\0\0\xff\xff",
    "more entries than there are": b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
    "orientation in letters": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abc\0\0\0\0\0",
}


@pytest.mark.parametrize("exif", BROKEN_EXIF.values(), ids=BROKEN_EXIF)
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_picture_with_broken_exif_data_is_read_as_it_lies(tmp_path: Path, exif: bytes, suffix: str) -> None:
    path = save(tmp_path / f"a.{suffix}", BLOCKS, exif=exif, quality=95)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about such data
        image = gradcam.read_image(path)
    assert abs(image[8::16, 8::16].astype(int) - PIXELS).max() <= 8


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_the_first_frame_of_an_animation_is_read(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 2), colour) for colour in ("red", "blue", "lime")]
    path = save(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:], lossless=True)
    np.testing.assert_array_equal(gradcam.read_image(path), np.full((2, 4, 3), [255, 0, 0]))


@pytest.mark.parametrize("name", ["two  words.png", "kätzchen-猫-🐈.png", "a'b\"c$d%s{e}.png", "-n.png", "UPPER.PNG"])
def test_odd_names_are_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / name, PIXELS)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, str(tmp_path / name), name):
        np.testing.assert_array_equal(gradcam.read_image(path), PIXELS)


@pytest.mark.parametrize("size", [(1, 1), (3, 2000), (2000, 3)])
def test_extreme_sizes_are_read(tmp_path: Path, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    np.testing.assert_array_equal(gradcam.read_image(save(tmp_path / "a.png", pixels)), pixels)


def refuse(path: Path, reason: str) -> None:
    """Check that reading fails with a one-line message with the file's name and this reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about some of these files
        with pytest.raises(ImageError) as caught:
            gradcam.read_image(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert reason in message


@pytest.mark.parametrize("path", [3, None, b"a.png"])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(ImageError, match="expected a string or a pathlib.Path"):
        gradcam.write_image(path, BLOCKS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "does not fit into memory"),
        (OSError(24, "Too many open files"), "cannot be opened (Too many open files)"),
        (OSError("broken data stream"), "is damaged or cut off (broken data stream)"),
        (PermissionError(13, "Permission denied"), "cannot be opened (Permission denied)"),
        (RuntimeError("first line\n  second line"), "is damaged or cut off (first line second line)"),
    ],
)
def test_what_fails_is_not_blamed_on_the_file(
    tmp_path: Path, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a.png", BLOCKS)

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(Image, "open", fail)
    refuse(path, reason)


def test_missing_and_empty_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    for path, reason in {"missing.jpg": "does not exist", ".": "is not a file", "empty.png": "is empty"}.items():
        refuse(tmp_path / path, reason)


CUT = [
    ("jpg", {}), ("jpg", {"progressive": True}), ("png", {}), ("webp", {}), ("webp", {"lossless": True}), ("gif", {}),
    ("bmp", {}), ("tiff", {}), ("tiff", {"compression": "tiff_lzw"}), ("jp2", {}), ("ppm", {}), ("tga", {}),
    *((suffix, {}) for suffix in AVIF),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "options"), CUT)
@pytest.mark.parametrize("fraction", [0.5, 0.95])
def test_a_picture_that_was_cut_off_is_refused(
    tmp_path: Path, photo: Callable[[str], Path], suffix: str, options: dict[str, object], fraction: float
) -> None:
    path = save(tmp_path / f"cut.{suffix}", Image.open(photo(PHOTO)).reduce(4), **options)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    refuse(path, "")


def test_a_whole_picture_of_the_kinds_that_were_cut_is_read(tmp_path: Path, photo: Callable[[str], Path]) -> None:
    small = Image.open(photo(PHOTO)).reduce(4)
    for suffix, options in CUT:
        image = gradcam.read_image(save(tmp_path / f"whole.{suffix}", small, **options))
        assert abs(image.astype(float) - np.asarray(small)).mean() < 8, suffix


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("text.jpg", b"Dear reader,\nthis is no picture.\n" * 20), ("random.png", random.Random(0).randbytes(5000)),
        ("only its signature.png", b"\x89PNG\r\n\x1a\n"), ("page.webp", b"<!doctype html><title>404</title>"),
        ("drawing.svg", b'<svg xmlns="http://www.w3.org/2000/svg"/>'),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    refuse(tmp_path / name, "is not an image in a supported format")


def test_a_file_that_claims_too_many_pixels_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png(60000, 60000, 8, 2, b"\0" * 100))
    data = bytearray(save(tmp_path / "bomb.bmp", PIXELS).read_bytes())
    data[18:26] = struct.pack("<ii", 60000, 60000)
    (tmp_path / "bomb.bmp").write_bytes(data)
    for name in ("bomb.png", "bomb.bmp"):
        refuse(tmp_path / name, "has 60000 x 60000 pixels and needs 23.5 GiB to read, but the limit is 1 GiB")


MEASURE = """
import sys, pathlib
from gradcam.models.preprocess import read_image_file
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
for path in map(pathlib.Path, sys.argv[1:]):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    read_image_file(path)
    print(status("VmHWM") - before)
"""
EACH = {  # bytes per pixel that reading needs
    "rgb.png": 7, "grey.png": 4, "transparent.png": 7, "deep.png": 17, "deep transparent.png": 17, "deep grey.png": 9,
    "rgb.tiff": 8, "rgb.jpg": 7, "progressive.jpg": 10, "turned.jpg": 7, "a.webp": 17, "a.gif": 4,
}  # fmt: skip


def save_large(path: Path, side: int) -> None:
    if path.name.startswith("deep"):
        channels, colours = {"deep.png": (3, 2), "deep transparent.png": (4, 6), "deep grey.png": (1, 0)}[path.name]
        row = bytes(range(250)) * (2 * channels * side // 250)
        path.write_bytes(png(side, side, 16, colours, (b"\0" + row) * side))
        return
    mode = {"grey.png": "L", "transparent.png": "RGBA", "a.gif": "P"}.get(path.name, "RGB")
    picture = Image.linear_gradient("L").resize((side, side)).convert(mode)
    options = {"exif": orientation(6)} if path.name == "turned.jpg" else {}
    picture.save(path, progressive=path.name == "progressive.jpg", **options)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by what Linux says of a process")
def test_reading_takes_no_more_memory_than_it_is_held_to(tmp_path: Path) -> None:
    """Allow 40 MB more for the values computed per strip. The first file only triggers the imports."""
    side, paths = 3000, [tmp_path / name for name in EACH]
    for path in paths:
        save_large(path, side)
    save(tmp_path / "first.png", BLOCKS.astype(np.uint8))
    command = [sys.executable, "-c", MEASURE, tmp_path / "first.png", paths[3], *paths]
    actual = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2:])
    item = {name: (memory - 40e6) / side**2 for name, memory in zip(EACH, actual)}
    assert {name: round(entry, 1) for name, entry in item.items() if entry > EACH[name]} == {}


def test_the_picture_of_350_kilobytes_that_took_5_gigabytes_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png(13370, 13370, 16, 2, b"\0" * 1000)  # the pixel data is too short to decode
    (tmp_path / "bomb.png").write_bytes(data)
    refuse(
        tmp_path / "bomb.png",
        "needs 2.83 GiB to read, but the limit is 1 GiB: raise the limit with --max-pixels 178756900",
    )
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("bomb.png", data)
    (result,) = gradcam.explain_files(tmp_path / "a.zip", batch_size=1)
    assert "bomb.png: has 13370 x 13370 pixels and needs 2.83 GiB" in str(result.error)
    monkeypatch.setenv("GRADCAM_MAX_PIXELS", str(13370**2))
    refuse(tmp_path / "bomb.png", "is damaged or cut off")
    monkeypatch.setenv("GRADCAM_MAX_PIXELS", str(13370**2 - 1))
    refuse(tmp_path / "bomb.png", "has 13370 x 13370 = 178756900 pixels, but --max-pixels or ")
    monkeypatch.setenv("GRADCAM_MAX_PIXELS", "many")
    refuse(tmp_path / "bomb.png", "GRADCAM_MAX_PIXELS is 'many', expected a number of pixels")


def test_more_pixels_than_pillow_reads_are_read_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    save(tmp_path / "a.png", BLOCKS)
    assert gradcam.read_image(tmp_path / "a.png").shape == np.asarray(BLOCKS).shape
    assert Image.MAX_IMAGE_PIXELS == 10


def test_a_picture_in_an_icon_that_is_larger_than_the_icon_says_is_refused(tmp_path: Path) -> None:
    inner = png(20000, 20000, 8, 2, b"\0" * 100)
    (tmp_path / "a.ico").write_bytes(struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner)
    refuse(tmp_path / "a.ico", "has 20000 x 20000 pixels and needs 2.98 GiB to read")


def test_a_tile_that_is_larger_than_its_picture_is_refused(tmp_path: Path) -> None:
    tags = {256: 16, 257: 16, 258: 8, 259: 5, 262: 1, 277: 1, 322: 2**16, 323: 2**16, 324: 8, 325: 100}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tiff").write_bytes(struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4))
    refuse(tmp_path / "a.tiff", "16 GiB to read, but the limit is 1 GiB")


def test_a_tiff_of_many_pages_is_read_by_its_first(tmp_path: Path) -> None:
    pages = [Image.new("L", (64, 64), i % 256) for i in range(300)]
    pages[0].save(tmp_path / "a.tiff", save_all=True, append_images=pages[1:])
    assert not gradcam.read_image(tmp_path / "a.tiff").any()


@pytest.mark.parametrize("turn", [None, 3, 6, 7])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "CMYK", "I;16", "F", "1"])
def test_a_picture_that_is_read_strip_by_strip_is_whole(tmp_path: Path, mode: str, turn: int | None) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 900, 4), dtype=np.uint8)
    picture = (
        Image.fromarray(noise[..., 0].astype(np.uint16) * 200)
        if mode == "I;16"
        else Image.fromarray(noise).convert(mode)
    )
    suffix = "jpg" if mode == "CMYK" else "tiff" if mode == "F" else "png"
    path = save(tmp_path / f"a.{suffix}", picture, **({} if turn is None else {"exif": orientation(turn)}))
    with Image.open(path) as opened:
        upright = ImageOps.exif_transpose(opened)
        if upright.has_transparency_data:
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
        expected = np.asarray(upright if mode in ("I;16", "F") else upright.convert("RGB"))
    np.testing.assert_array_equal(read_values(path), expected)


@pytest.mark.parametrize("name", ["a.eps", "an eps file called.png"])
def test_postscript_is_never_run(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, program = tmp_path / "was run", tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    save(tmp_path / name, BLOCKS, format="EPS")
    refuse(tmp_path / name, "is not an image in a supported format")
    assert not marker.exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    reader = threading.Thread(target=refuse, args=(pipe, "is not a file"), daemon=True)
    reader.start()
    reader.join(timeout=10)
    assert not reader.is_alive()


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".tiff", ".PNG"])
def test_lossless_files_are_written_exactly(tmp_path: Path, suffix: str) -> None:
    gradcam.write_image(tmp_path / f"a{suffix}", PIXELS)
    with Image.open(tmp_path / f"a{suffix}") as written:
        assert written.format == Image.registered_extensions()[suffix.lower()]
        np.testing.assert_array_equal(np.asarray(written), PIXELS)


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".webp", ".JPG"])
def test_lossy_files_are_written_nearly_exactly(tmp_path: Path, suffix: str) -> None:
    gradcam.write_image(str(tmp_path / f"a{suffix}"), BLOCKS)
    with Image.open(tmp_path / f"a{suffix}") as written:
        assert written.format == Image.registered_extensions()[suffix.lower()]
        assert abs(np.asarray(written)[8::16, 8::16].astype(int) - PIXELS).max() <= 8


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg"])
def test_jpegs_have_quality_95(tmp_path: Path, suffix: str) -> None:
    gradcam.write_image(tmp_path / f"a{suffix}", BLOCKS)
    with (
        Image.open(tmp_path / f"a{suffix}") as ours,
        Image.open(save(tmp_path / "b.jpg", BLOCKS, quality=95)) as theirs,
    ):
        assert ours.quantization == theirs.quantization


def test_webps_have_quality_95(tmp_path: Path, photo: Callable[[str], Path]) -> None:
    with Image.open(photo(PHOTO)) as opened:
        picture = opened.copy()
    sizes = [save(tmp_path / "theirs.webp", picture, quality=quality).stat().st_size for quality in (92, 98)]
    gradcam.write_image(tmp_path / "ours.webp", np.array(picture))
    assert sizes[0] < (tmp_path / "ours.webp").stat().st_size < sizes[1]


@pytest.mark.parametrize(("suffix", "flag"), [(".jpg", cv2.IMWRITE_JPEG_QUALITY), (".webp", cv2.IMWRITE_WEBP_QUALITY)])
@pytest.mark.parametrize("quality", [20, 90])
def test_the_bytes_are_opencvs_of_blue_green_red(
    photo: Callable[[str], Path], suffix: str, flag: int, quality: int
) -> None:
    picture = gradcam.read_image(photo(PHOTO))
    for view in (picture, picture[::-1, ::2], picture[10:90, 20:80]):
        _, expected = cv2.imencode(
            suffix, np.stack([view[..., 2], view[..., 1], view[..., 0]], axis=2), [flag, quality]
        )
        assert encode_image(view, suffix, quality) == expected.tobytes()


def test_png_bytes_hold_the_picture() -> None:
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(PIXELS)))), PIXELS)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (PIXELS.astype(np.float32), "float32 (2, 3, 3)"), (PIXELS.astype(np.int64), "int64 (2, 3, 3)"),
        (PIXELS[..., 0], "uint8 (2, 3)"), (PIXELS[None], "uint8 (1, 2, 3, 3)"),
        (np.zeros((2, 3, 4), np.uint8), "uint8 (2, 3, 4)"), (np.zeros((0, 3, 3), np.uint8), "uint8 (0, 3, 3)"),
        (PIXELS.tolist(), "list"), (None, "NoneType"),
    ],
)  # fmt: skip
def test_what_is_no_rgb_array_is_not_written(tmp_path: Path, image: object, message: str) -> None:
    with pytest.raises(ImageError, match="expected an RGB array") as caught:
        gradcam.write_image(tmp_path / "a.png", image)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.gif", "a.txt", "a", "a.png.bak"])
def test_an_unknown_suffix_is_refused_with_those_that_there_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match=r"\.jpg, .*\.png, ") as caught:
        gradcam.write_image(tmp_path / name, PIXELS)
    assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named_and_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    for name, reason in {"nowhere/a.png": "No such file or directory", "a.png": ""}.items():
        with pytest.raises(ImageError, match=rf"{name}: cannot be written \({reason}"):
            gradcam.write_image(tmp_path / name, PIXELS)
    assert [path.name for path in tmp_path.rglob("*")] == ["a.png"]


@pytest.mark.parametrize(("suffix", "width"), [(".webp", 16384), (".jpg", 65501)])
def test_a_picture_too_wide_for_its_format_is_refused(tmp_path: Path, suffix: str, width: int) -> None:
    with pytest.raises(ImageError, match=f"cannot be written .*{width} x 1.*choose .png"):
        gradcam.write_image(tmp_path / f"a{suffix}", np.zeros((1, width, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("failure", "raised"),
    [(OSError(28, "Disk is full"), r"new.png: cannot be written \(Disk is full\)$"), (KeyboardInterrupt(), "^$")],
)
def test_a_failing_write_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException, raised: str
) -> None:
    (tmp_path / "old.png").write_bytes(b"what was there")

    def fail(*args: object) -> None:
        raise failure

    monkeypatch.setattr(os, step, fail)
    for name in ("old.png", "new.png"):
        with pytest.raises((ImageError, KeyboardInterrupt), match=raised.replace("new", name[:3])):
            gradcam.write_image(tmp_path / name, PIXELS)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old.png", b"what was there")]


def test_what_takes_the_name_is_whole_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    really_sync, really_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        steps.append(f"sync {os.fstat(descriptor).st_size > 50}")
        really_sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        with Image.open(source) as written:
            steps.append(f"replace {np.array_equal(np.asarray(written), PIXELS)}")
        assert (source.parent, source.name[0], source.suffix) == (target.parent, ".", ".tmp")
        really_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    gradcam.write_image(tmp_path / "a.png", PIXELS)
    assert steps == ["sync True", "replace True"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="there is no umask here")
def test_the_umask_says_who_may_read_what_is_written(tmp_path: Path, umask: int) -> None:
    gradcam.write_image(tmp_path / "a.png", PIXELS)
    assert (tmp_path / "a.png").stat().st_mode & 0o777 == 0o666 & ~umask


class NoOpenCV:
    """A module finder that behaves like a machine without a display, where OpenCV cannot be imported."""

    def find_spec(self, name: str, *args: object) -> None:
        if name == "cv2":
            raise ImportError("libGL.so.1: cannot open shared object file: No such file or directory")


@pytest.fixture
def _without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cv2", "gradcam.images.opencv"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoOpenCV(), *sys.meta_path])


@pytest.mark.usefixtures("_without_opencv")
@pytest.mark.parametrize("use", [lambda: importlib.import_module("gradcam.images.opencv"), lambda: encode_png(PIXELS)])
def test_opencv_that_wants_a_screen_is_explained(use: Callable[[], object]) -> None:
    with pytest.raises(GradcamError, match="pip install opencv-python-headless") as caught:
        use()
    assert "libGL.so.1" in str(caught.value)
