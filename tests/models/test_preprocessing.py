"""Test preprocessing against timm's and torchvision's transforms, and its region against the measured one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision import transforms

from gradcam.errors import ImageError
from gradcam.models.preprocess import Preprocessing

HALVES = (0.5, 0.5, 0.5)
CROP = Preprocessing(size=(224, 224), resize=256, mean=HALVES, std=HALVES)
LEVEL = 2 / 255  # one of 256 levels, in the units of the model's input
RESIZE = transforms.Resize(256, interpolation=transforms.InterpolationMode.BICUBIC)
RESIZE_AND_CROP = transforms.Compose([RESIZE, transforms.CenterCrop(224)])
TORCHVISION = transforms.Compose([RESIZE_AND_CROP, transforms.ToTensor(), transforms.Normalize(HALVES, HALVES)])
TIMM = timm.data.create_transform((3, 224, 224), interpolation="bicubic", mean=HALVES, std=HALVES, crop_pct=0.875)


@pytest.mark.parametrize("transform", [TORCHVISION, TIMM], ids=["torchvision", "timm"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cat_and_espresso.jpg", None),
        ("koala.webp", None),
        ("rocket.jpg", None),
        ("coffee.jpg", (341, 256)),
        ("coffee.jpg", (340, 255)),
        ("coffee.jpg", (224, 224)),
        ("coffee.jpg", (256, 256)),
        ("coffee.jpg", (301, 257)),
        ("coffee.jpg", (53, 37)),
        ("coffee.jpg", (37, 53)),
        ("coffee.jpg", (900, 300)),
    ],
)
def test_pictures_are_prepared_as_torchvision_and_timm_do(
    photo: Callable[[str], Path], name: str, size: tuple[int, int] | None, transform: Callable[..., torch.Tensor]
) -> None:
    picture = Image.open(photo(name)).convert("RGB")
    picture = picture.resize(size or picture.size)
    difference = abs(CROP(np.array(picture)) - transform(picture)) / LEVEL
    # Both round to 8 bits after each axis, and may round a value halfway between two levels differently.
    assert difference.max() < 2.01
    assert difference.mean() < 0.001


@pytest.mark.parametrize("size", [(211, 800), (100, 1000)])
def test_tall_pictures_are_prepared_nearly_as_torchvision_does(
    photo: Callable[[str], Path], size: tuple[int, int]
) -> None:
    picture = Image.open(photo("coffee.jpg")).resize(size)
    difference = abs(CROP(np.array(picture)) - TORCHVISION(picture)) / LEVEL
    # Here Pillow resizes the other axis first, so every tenth value is rounded differently.
    assert difference.max() < 3.01
    assert difference.mean() < 0.15


def test_mean_and_deviation_belong_to_red_green_and_blue_in_this_order() -> None:
    crop = Preprocessing(size=(8, 8), resize=8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    tensor = crop(np.full((8, 8, 3), [51, 102, 204], np.uint8))  # 0.2, 0.4, 0.8 as fractions of 255
    assert tensor.dtype == torch.float32
    assert tensor.shape == (3, 8, 8)
    expected = torch.tensor([0.2, 0.8, 2.5])[:, None, None].expand(3, 8, 8)
    torch.testing.assert_close(tensor, expected)


def test_a_picture_of_the_right_size_is_cropped_by_hand() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    tensor = Preprocessing(size=(8, 8), resize=10, mean=(0, 0, 0), std=(1, 1, 1))(pixels)
    np.testing.assert_array_equal(np.rint(tensor.numpy() * 255), pixels[1:9, 2:10].transpose(2, 0, 1))


def measure_torchvision_region(height: int, width: int) -> tuple[float, float, float, float]:
    """Measure the top, left, bottom and right edges of the region that the transform passes on.

    A brightness ramp stays a ramp. A straight line fitted to it tells which position of the image each edge comes from.
    """
    edges = []
    for shape, axis in (((height, 1), 0), ((1, width), 1)):
        ramp = np.linspace(0, 1, height if axis == 0 else width, dtype=np.float32).reshape(shape)
        picture = Image.fromarray(np.broadcast_to(ramp, (height, width)).copy())
        # The borders of the image are left out.
        brightness = np.asarray(RESIZE_AND_CROP(picture)).mean(axis=1 - axis)[20:-20]
        slope, start = np.polyfit(np.arange(20, 204) + 0.5, brightness, 1)
        last = (height if axis == 0 else width) - 1
        edges.append([(start + slope * edge) * last + 0.5 for edge in (0, 224)])
    return edges[0][0], edges[1][0], edges[0][1], edges[1][1]


@pytest.mark.parametrize(
    ("height", "width"),
    [(768, 1024), (1024, 768), (683, 1024), (640, 800), (300, 451), (257, 301), (255, 340), (600, 211), (224, 224)],
)
def test_the_region_is_that_of_the_transform(height: int, width: int) -> None:
    y0, x0, rows, columns = CROP.region(height, width)
    edges = np.array([y0, x0, y0 + rows, x0 + columns])
    resized = min(height, width) / 256  # one pixel of the resized image, to which the transform rounds, in image pixels
    assert abs(edges - measure_torchvision_region(height, width)).max() < 0.55 + resized


@pytest.mark.parametrize(
    ("height", "width", "region"),
    [
        (640, 800, (40, 120, 560, 560)),  # resized to 256 x 320, cropped from 16 and 48, times 2.5
        (256, 256, (16, 16, 224, 224)),
        (512, 512, (32, 32, 448, 448)),
        (400, 600, (25, 125, 350, 350)),  # resized to 256 x 384, cropped from 16 and 80, times 1.5625
        (768, 1024, (48, 176, 672, 672)),
        (1024, 768, (176, 48, 672, 672)),
        (1, 1, (0, 0, 1, 1)),
    ],
)
def test_the_region_is_the_one_worked_by_hand(height: int, width: int, region: tuple[int, int, int, int]) -> None:
    assert CROP.region(height, width) == region


SIZES = [(height, width) for height in (1, 2, 3, 7, 100, 999, 2000) for width in (1, 2, 5, 64, 333, 2000)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_region_is_inside_the_picture_and_in_its_middle(height: int, width: int) -> None:
    y0, x0, rows, columns = CROP.region(height, width)
    resized = min(height, width) / 256  # one pixel of the resized image, in image pixels
    for start, length, side in ((y0, rows, height), (x0, columns, width)):
        assert 0 <= start < start + length <= side
        assert abs(start + length / 2 - side / 2) <= 1 + resized
        assert abs(length - 0.875 * min(height, width)) <= 1 + resized


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 2000), (2000, 3), (2000, 1), (1, 30000)])
def test_extreme_pictures_are_prepared_quickly(height: int, width: int) -> None:
    pixels = np.full((height, width, 3), [255, 0, 127], np.uint8)
    start = time.process_time()
    tensor = CROP(pixels)
    assert time.process_time() - start < 1
    expected = torch.tensor([1.0, -1.0, 127 / 127.5 - 1])[:, None, None].expand(3, 224, 224)
    torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_middle_of_a_long_strip_is_cropped(axis: int) -> None:
    pixels = np.zeros((3, 2000, 3), np.uint8)
    pixels[:, 1000:] = 255
    tensor = CROP(pixels if axis == 1 else pixels.transpose(1, 0, 2)).movedim(1 + axis, 0)
    assert (tensor[:60] < -0.9).all()
    assert (tensor[-60:] > 0.9).all()


@pytest.mark.parametrize("values", [np.full((50, 60, 3), 7, np.uint8), np.full((50, 60), 0.3, np.float32)])
def test_the_picture_is_not_changed(values: np.ndarray) -> None:
    before = values.copy()
    CROP(values)
    np.testing.assert_array_equal(values, before)


def test_invalid_images_are_refused() -> None:
    with pytest.raises(ImageError, match="expected an RGB array"):
        CROP(np.zeros((3, 224, 224), np.float32))


# the scaled values, without normalisation
THREE_CHANNELS = Preprocessing(size=(2, 3), resize=(2, 3), mean=(0.0,) * 3, std=(1.0,) * 3)
ONE_CHANNEL = Preprocessing(size=(2, 3), resize=(2, 3), mean=(0.0,), std=(1.0,))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 51, 255], [102, 153, 204]], np.uint8), [[0, 0.2, 1], [0.4, 0.6, 0.8]]),
        (np.array([[0, 13107, 65535], [1, 2, 3]], np.uint16), [[0, 0.2, 1], [1 / 65535, 2 / 65535, 3 / 65535]]),
        (np.array([[0, 0.25, 1], [1, 0.5, 0]], np.float64), [[0, 0.25, 1], [1, 0.5, 0]]),
        (np.array([[-1000, 0.5, 255], [1, 2, 7e4]], np.float32), [[-1000, 0.5, 255], [1, 2, 7e4]]),
        (np.array([[-1000, 0, 255], [1, 2, 70000]], np.int32), [[-1000, 0, 255], [1, 2, 70000]]),
        (np.array([[0, 1, 255], [1, 2, 70000]], np.uint32), [[0, 1, 255], [1, 2, 70000]]),
        (np.array([[-128, 0, 127], [1, 2, 3]], np.int8), [[-128, 0, 127], [1, 2, 3]]),
        (np.array([[0, 13107, 65535], [1, 2, 3]], ">u2"), [[0, 0.2, 1], [1 / 65535, 2 / 65535, 3 / 65535]]),
        (np.array([[0, 0.25, 1], [1, 0.5, 0]], ">f8"), [[0, 0.25, 1], [1, 0.5, 0]]),
    ],
)
def test_only_integers_of_8_and_16_bits_without_sign_are_scaled(
    values: np.ndarray, expected: list[list[float]]
) -> None:
    """Test one channel, with and without a channel axis, for one mean and for three."""
    for image in (values, values[..., None]):
        for preprocess, channels in ((ONE_CHANNEL, 1), (THREE_CHANNELS, 3)):
            tensor = preprocess(image)
            assert tensor.dtype == torch.float32
            expected_tensor = torch.tensor(expected).float().expand(channels, 2, 3)
            torch.testing.assert_close(tensor, expected_tensor, rtol=1e-7, atol=1e-9)


def test_mean_and_deviation_are_in_the_units_of_floats() -> None:
    crop = Preprocessing(size=(2, 2), resize=2, mean=(-600.0,), std=(1500.0,))
    torch.testing.assert_close(crop(np.full((4, 4), 900, np.float32)), torch.ones(1, 2, 2))
    torch.testing.assert_close(crop(np.full((4, 4), -2100, np.int16)), -torch.ones(1, 2, 2))


def test_one_channel_has_three_means() -> None:
    crop = Preprocessing(size=(8, 8), resize=8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    expected = torch.tensor([0.6, 0.8, 0.5])[:, None, None].expand(3, 8, 8)
    torch.testing.assert_close(crop(np.full((8, 8), 26214, np.uint16)), expected)  # 0.4 of 65535


def test_the_luminance_of_rgb_is_pillows(photo: Callable[[str], Path]) -> None:
    picture = Image.open(photo("coffee.jpg")).convert("RGB").crop((0, 0, 300, 200))
    exact = Preprocessing(size=(200, 300), resize=(200, 300), mean=(0.0,), std=(1.0,))
    expected = torch.from_numpy(np.array(picture.convert("L"))).float()[None] / 255
    torch.testing.assert_close(exact(np.array(picture)), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_luminance_follows_itu_r_601_and_grey_values_are_unchanged(dtype: type) -> None:
    full = np.iinfo(dtype).max
    exact = Preprocessing(size=(1, 3), resize=(1, 3), mean=(0.0,), std=(1.0,))
    primaries = exact(np.array([[[full, 0, 0], [0, full, 0], [0, 0, full]]], dtype))
    torch.testing.assert_close(primaries, torch.tensor([[[0.299, 0.587, 0.114]]]), rtol=0, atol=1 / full)
    all_levels = Preprocessing(size=(1, full + 1), resize=(1, full + 1), mean=(0.0,), std=(1.0,))
    levels = np.arange(full + 1, dtype=dtype)[None]
    rgb = np.repeat(levels[..., None], 3, axis=2)
    torch.testing.assert_close(all_levels(rgb), all_levels(levels), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_images_with_as_many_channels_as_means_are_unchanged(dtype: type) -> None:
    bands = np.random.default_rng(0).integers(0, 256, (5, 6, 4)).astype(dtype)
    crop = Preprocessing(size=(5, 6), resize=(5, 6), mean=(1.0, 2.0, 3.0, 4.0), std=(1.0, 2.0, 3.0, 4.0))
    full = {np.uint8: 255, np.uint16: 65535}.get(dtype, 1)
    expected = [(bands[..., i] / full - (i + 1)) / (i + 1) for i in range(4)]
    np.testing.assert_allclose(crop(bands), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
@pytest.mark.parametrize("resize", [256, (240, 300)])
def test_deep_pictures_are_resized_as_those_of_eight_bits(
    photo: Callable[[str], Path], interpolation: str, resize: int | tuple[int, int]
) -> None:
    """Also at edges, where a cubic overshoots and 8 bits are clipped after each axis."""
    crop = Preprocessing(size=(224, 200), resize=resize, mean=HALVES, std=HALVES, interpolation=interpolation)
    generator = np.random.default_rng(0)
    edges = generator.integers(0, 2, (70, 90, 3), dtype=np.uint8) * np.uint8(255)
    for pixels in (np.array(Image.open(photo("coffee.jpg"))), edges, edges[:9, :7], edges[:1, :30]):
        shallow = crop(pixels)
        for deep in (pixels / 255, (pixels / 255).astype(np.float32), pixels * np.uint16(257)):
            difference = abs(crop(deep) - shallow) / LEVEL
            assert difference.max() < 1.2  # Values of 8 bits are rounded after each axis.
            assert difference.mean() < 0.4


def test_a_cubic_may_overshoot_if_values_have_no_fixed_range() -> None:
    crop = Preprocessing(size=(8, 8), resize=8, mean=(0.0,), std=(1.0,))
    step = np.zeros((4, 4), np.float32)
    step[:, 2:] = 1000
    tensor = crop(step)
    assert tensor.min() < -1
    assert tensor.max() > 1001
    assert crop(step / 1000).min() == 0
    assert crop(step / 1000).max() == 1


@pytest.mark.parametrize("values", [np.full((3, 2000), 700, np.uint16), np.full((2000, 3), 0.25), np.full((1, 1), 9.0)])
def test_extreme_deep_pictures_are_prepared(values: np.ndarray) -> None:
    level = 700 / 65535 if values.dtype == np.uint16 else values[0, 0]
    torch.testing.assert_close(CROP(values), torch.full((3, 224, 224), level).float() * 2 - 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "means", "message"),
    [
        ((4, 5, 4), np.uint8, 3, "uint8 (4, 5, 4), with 4 channel(s), but the model takes 3 channels: expected an RGB"),
        ((4, 5, 2), np.float32, 3, "with 2 channel(s), but the model takes 3 channels"),
        ((4, 5, 3), np.float32, 1, "float32 (4, 5, 3), with 3 channel(s), but the model takes one channel: expected"),
        ((4, 5, 3), np.int32, 1, "with 3 channel(s), but the model takes one channel"),
        ((4, 5), np.uint16, 2, "uint16 (4, 5), with 1 channel(s), but the model takes 2 channels: expected"),
        ((4, 5, 3), np.uint8, 13, "with 3 channel(s), but the model takes 13 channels: expected an array (H,W,13)."),
        ((4,), np.uint8, 3, "The image is uint8 (4,), expected an RGB array, uint8 (H,W,3)"),
        ((1, 4, 5, 3), np.uint8, 3, "The image is uint8 (1, 4, 5, 3), expected"),
        ((4, 0, 3), np.uint8, 3, "The image is uint8 (4, 0, 3), expected"),
        ((4, 5), bool, 3, "The image is bool (4, 5), expected"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_with_the_numbers(
    shape: tuple[int, ...], dtype: type, means: int, message: str
) -> None:
    with pytest.raises(ImageError) as caught:
        Preprocessing(size=(2, 2), resize=2, mean=(0.0,) * means, std=(1.0,) * means)(np.zeros(shape, dtype))
    assert message in str(caught.value)
