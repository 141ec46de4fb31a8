"""Test images as tensors: rotated and resized like Pillow, drawn on like OpenCV; and the parsing of JPEG headers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

import gradcam
from gradcam.images import on_device
from gradcam.images.jpeg import Codec, JpegHeader, find_codec, read_header, to_tensor
from gradcam.models.preprocess import Preprocessing

PHOTOGRAPHS = ("cat_and_espresso.jpg", "koala.webp", "chelsea.jpg", "lemur.webp", "macaw.webp", "coffee.jpg")
CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def read(path: Path) -> np.ndarray:
    return np.array(Image.open(path).convert("RGB"))


def to_planes(picture: np.ndarray, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(picture).permute(2, 0, 1).to(device)


def to_picture(planes: torch.Tensor) -> np.ndarray:
    return planes.permute(1, 2, 0).cpu().numpy()


def jpeg(picture: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "jpeg", **options)
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_orientation_is_that_of_pillow(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, "png", exif=exif)
    expected = np.array(ImageOps.exif_transpose(Image.open(file)))
    np.testing.assert_array_equal(to_picture(on_device.apply_orientation(to_planes(NOISE), turn)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("resampling_name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((224, 224), (0.0, 0.0, 800.0, 640.0)), ((224, 224), (100.3, 40.7, 700.1, 600.2)),
        ((300, 100), (0.0, 0.0, 800.0, 640.0)), ((500, 400), (3.2, 5.1, 210.6, 250.0)),
        ((30, 900), (0.0, 0.0, 800.0, 640.0)), ((200, 700), (10.0, 20.0, 800.0, 440.0)),
        ((7, 5), (1.5, 2.5, 6.5, 9.5)),
    ],
)  # fmt: skip
def test_resizing_gives_the_levels_of_pillow(
    photo: Any, size: Any, box: Any, resampling_name: str, device: str
) -> None:
    picture = read(photo("cat_and_espresso.jpg"))
    resampling = Image.Resampling[resampling_name.upper()]
    expected = np.array(Image.fromarray(picture).resize(size[::-1], resampling, box=box)).astype(float)
    both = torch.stack([to_planes(picture, device)] * 2)
    first, second = on_device.resize(both, size, box, resampling_name)
    difference = abs(to_picture(first) - expected)
    assert difference.mean() <= 0.02
    assert difference.max() <= 1
    assert torch.equal(first, second)
    assert torch.equal(first, first.round())


def test_a_flat_picture_stays_flat() -> None:
    white = torch.full((1, 3, 33, 47), 255, dtype=torch.uint8)
    for filter_name in on_device.FILTERS:
        assert (on_device.resize(white, (20, 60), (1.3, 2.2, 40.1, 30.9), filter_name) == 255).all()


@pytest.mark.parametrize("resize", [256, (224, 224), 232, (300, 250)])
def test_what_the_network_takes_is_that_of_the_preprocessing(photo: Any, resize: Any) -> None:
    preprocessing = Preprocessing((224, 224), resize, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
    picture = read(photo("koala.webp"))
    top, left, height, width = preprocessing.find_part(*picture.shape[:2])
    resized = on_device.resize(
        to_planes(picture)[None], preprocessing.size, (left, top, left + width, top + height), "bilinear"
    )
    expected = (
        preprocessing(picture) * torch.tensor(preprocessing.std)[:, None, None]
        + torch.tensor(preprocessing.mean)[:, None, None]
    )
    difference = (resized[0] / 255 - expected).abs() * 255
    assert difference.mean() <= 0.02
    assert difference.max() <= 1.01


@pytest.mark.parametrize("size", [(640, 800), (224, 500), (300, 100), (50, 60)])
def test_maps_are_stretched_as_by_opencv(size: tuple[int, int]) -> None:
    maps = np.random.default_rng(1).random((2, 112, 96), np.float32)
    is_smaller = size[0] <= 112 and size[1] <= 96
    interpolation = cv2.INTER_AREA if is_smaller else cv2.INTER_CUBIC
    actual = on_device.stretch(torch.from_numpy(maps), *size)
    for resized, heatmap in zip(actual, maps):
        np.testing.assert_allclose(
            resized.numpy(), cv2.resize(heatmap, size[::-1], interpolation=interpolation), atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "look",
    [
        {}, {"alpha": 1.0, "colormap": "viridis", "outline": True}, {"alpha": 0.3, "colormap": "jet"},
        {"signed": True, "outline": True}, {"alpha": 0.0, "outline": True}, {"base": "color"},
        {"base": "color", "signed": True}, {"blend": "uniform"}, {"base": "color", "blend": "grow", "alpha": 0.4},
    ],
    ids=str,
)  # fmt: skip
def test_overlays_are_those_of_opencv(photo: Any, classifier: gradcam.Classifier, look: Any, device: str) -> None:
    evidence = "signed" if look.get("signed") else "positive"
    for name in PHOTOGRAPHS:
        explanation = classifier.explain(photo(name), evidence=evidence)
        picture, heatmap = explanation.images[0], explanation.heatmaps[0, 0]
        for region in (explanation.regions[0], (0, 0, *picture.shape[:2]), (20, 30, 100, 90)):
            planes, maps = to_planes(picture, device)[None], heatmap.to(device)[None]
            (drawn,) = on_device.overlay(planes, maps, region=region, **look)
            expected = gradcam.overlay(picture, heatmap, region=region, **look)
            difference = abs(to_picture(drawn).astype(int) - expected)
            # Some values lie between two levels of the colormap. At full opacity, the next level's colour is twice as
            # far away.
            assert difference.max() <= (2 if look.get("alpha", 0.5 if look.get("base") else 0.8) <= 0.5 else 4)
            assert difference.mean() <= 0.01
            assert np.array_equal(to_picture(planes[0]), picture)


def test_a_blank_heatmap_has_no_outline_and_its_neighbour_has_one() -> None:
    pictures, region = to_planes(NOISE)[None].repeat(2, 1, 1, 1), (2, 3, 18, 30)
    maps = torch.stack([torch.zeros(5, 5), torch.eye(5)])
    blank, drawn = on_device.overlay(pictures, maps, region=region, outline=True)
    grey = gradcam.overlay(NOISE, torch.zeros(5, 5), region=region)
    assert (to_picture(blank) == grey).all()
    (coloured, _) = on_device.overlay(pictures, maps, region=region, outline=True, base="color")
    assert torch.equal(coloured, pictures[0])
    expected = gradcam.overlay(NOISE, maps[1], region=region, outline=True)
    assert abs(to_picture(drawn).astype(int) - expected).max() <= 2


# JPEG


def patched(data: bytes, marker: int, change: Callable[[bytearray, int], None]) -> bytes:
    changed = bytearray(data)
    change(changed, data.index(bytes([0xFF, marker])))
    return bytes(changed)


def set_byte(offset: int, value: int) -> Callable[[bytearray, int], None]:
    def change(data: bytearray, place: int) -> None:
        data[place + offset] = value

    return change


GREY_JPEG, RGB_JPEG = jpeg(NOISE[..., 0]), jpeg(NOISE)
TURNED = Image.Exif()
TURNED[0x0112] = 6
XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" %s</rdf:RDF></x:xmpmeta>"""
EXIF = b"\xff\xe1" + (len(TURNED.tobytes()) + 2).to_bytes(2, "big") + TURNED.tobytes()
CMYK = io.BytesIO()
Image.fromarray(NOISE).convert("CMYK").save(CMYK, "jpeg")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (RGB_JPEG, JpegHeader(24, 40, False, 1)),
        (GREY_JPEG, JpegHeader(24, 40, True, 1)),
        (jpeg(NOISE, exif=TURNED), JpegHeader(24, 40, False, 6)),
        (jpeg(NOISE, subsampling=0), JpegHeader(24, 40, False, 1)),
        (jpeg(NOISE, subsampling=1), JpegHeader(24, 40, False, 1)),
        (RGB_JPEG + b"what a camera adds", JpegHeader(24, 40, False, 1)),
        (jpeg(NOISE, exif=b"Exif\0\0" + b"broken" * 9), JpegHeader(24, 40, False, 1)),
        (jpeg(NOISE, xmp=(XMP % 'tiff:Orientation="1"/>').encode()), JpegHeader(24, 40, False, 1)),
        (jpeg(NOISE, xmp=(XMP % 'tiff:Orientation="6"/>').encode()), None),
        (jpeg(NOISE, xmp=(XMP % "><tiff:Orientation>8</tiff:Orientation></rdf:Description>").encode()), None),
        (RGB_JPEG[:2] + EXIF + EXIF + RGB_JPEG[2:], None),
        (jpeg(NOISE, progressive=True), None),
        (jpeg(NOISE, keep_rgb=True), None),
        (CMYK.getvalue(), None),
        (patched(RGB_JPEG, 0xC0, set_byte(4, 12)), None),  # bit depth
        (patched(RGB_JPEG, 0xC0, set_byte(11, 0x31)), None),  # an unusual chroma subsampling
        (RGB_JPEG[:-2], None),
        (RGB_JPEG[:300], None),
        (RGB_JPEG[:20], None),
        (b"", None),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), None),
    ],
)
def test_which_files_a_device_is_given(data: bytes, expected: JpegHeader | None) -> None:
    if expected is None and data == RGB_JPEG:
        pytest.skip("this Pillow writes no XMP, or always YCbCr")
    assert read_header(data) == expected
    if expected is not None:
        upright = (expected.height, expected.width)[:: -1 if expected.turn >= 5 else 1]
        assert gradcam.read_image(data).shape[:2] == upright, "as the processor reads it"


@given(st.integers(0, len(RGB_JPEG) - 1), st.binary(min_size=1, max_size=4))
def test_a_damaged_header_never_raises(place: int, damage: bytes) -> None:
    read_header(RGB_JPEG[:place] + damage + RGB_JPEG[place + len(damage) :])
    read_header(RGB_JPEG[:place])


@pytest.fixture(params=DEVICES)
def codec(request: pytest.FixtureRequest) -> Codec:
    actual = find_codec(torch.device(request.param))
    if actual is None and request.param == "cpu":
        pytest.skip("torchvision before 0.20 decodes no lists of JPEG files")
    assert actual is not None
    return actual


def test_what_is_decoded_is_what_pillow_decodes(photo: Any, codec: Codec) -> None:
    data = [photo(name).read_bytes() for name in ("cat_and_espresso.jpg", "chelsea.jpg")]
    for planes, item in zip(codec.decode([to_tensor(encoded) for encoded in data], False), data):
        expected = np.array(Image.open(io.BytesIO(item))).astype(int)
        difference = abs(to_picture(planes) - expected)
        assert difference.mean() <= (0.0 if planes.device.type == "cpu" else 2)
    (grey,) = codec.decode([to_tensor(GREY_JPEG)], True)
    assert grey.shape == (3, 24, 40)
    assert abs(to_picture(grey) - np.array(Image.open(io.BytesIO(GREY_JPEG)).convert("RGB")).astype(int)).max() <= 2


def test_what_is_encoded_is_the_picture(photo: Any, codec: Codec) -> None:
    picture = read(photo("coffee.jpg"))
    device = "cuda" if "nvJPEG" in codec.name else "cpu"
    low, high = (codec.encode([to_planes(picture, device)] * 2, quality)[1] for quality in (50, 95))
    assert len(low) < len(high)
    assert abs(np.array(Image.open(io.BytesIO(high))).astype(int) - picture).mean() < 3


def test_there_is_no_codec_for_other_devices() -> None:
    assert find_codec(torch.device("meta")) is None
