"""Test images of any bit depth, against levels computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gradcam.images.read import scale_for_display, to_8_bits


def grey(*levels: int) -> np.ndarray:
    """Return a row of RGB pixels with these grey levels."""
    return np.array([[[level] * 3 for level in levels]], dtype=np.uint8)


@pytest.mark.parametrize(
    ("values", "levels", "note"),
    [
        # 255 * (values - 40) / 3160: 1620 gives 127.5, which rounds to the even 128.
        (np.array([[40, 1620, 3200]], np.uint16), (0, 128, 255), "showing values from 40 to 3200 of 65535"),
        (np.array([[60000, 60001, 60002]], np.uint16), (0, 128, 255), "showing values from 60000 to 60002 of 65535"),
        (np.array([[0, 32767]], np.uint16), (0, 255), "showing values from 0 to 32767 of 65535"),
        (np.array([[0, 32768]], np.uint16), (0, 128), None),  # 127.502
        (np.array([[257, 65535]], np.uint16), (1, 255), None),
        (np.array([[700, 700]], np.uint16), (3, 3), None),  # 2.72: a constant image has no range to scale
        (np.array([[700]], np.uint16), (3,), None),
        (np.array([[10, 20]], np.uint8), (10, 20), None),
        (np.array([[-1024, 988, 3000]], np.int32), (0, 128, 255), "showing values from -1024 to 3000"),
        (np.array([[0, 4000000000]], np.uint32), (0, 255), None),
        (np.array([[0.0, 0.25]], np.float32), (0, 255), "showing values from 0 to 0.25"),
        (np.array([[0.0, 0.5, 1.0]], np.float64), (0, 128, 255), None),
        (np.array([[-1.0, 0.0, 1.0]], np.float32), (0, 128, 255), "showing values from -1 to 1"),
        (
            np.array([[np.nan, 0.1, 0.2, np.inf, -np.inf]], np.float32),
            (0, 0, 255, 255, 0),
            "showing values from 0.1 to 0.2",
        ),
        (np.array([[np.nan, 0.0, 1.0, np.inf]], np.float32), (0, 0, 255, 255), None),
        (np.array([[np.nan, np.inf]], np.float32), (0, 0), None),
        (np.array([[0.0, 1e30]], np.float32), (0, 255), None),
    ],
)
def test_less_than_half_of_the_range_is_stretched(
    values: np.ndarray, levels: tuple[int, ...], note: str | None
) -> None:
    picture, actual = scale_for_display(values)
    assert picture.dtype == np.uint8
    np.testing.assert_array_equal(picture, grey(*levels))
    assert actual == note


def test_colours_are_stretched_together() -> None:
    picture, note = scale_for_display(np.array([[[0, 100, 200], [1000, 500, 400]]], np.uint16))
    np.testing.assert_array_equal(picture, [[[0, 26, 51], [255, 128, 102]]])  # 25.5 and 127.5 round to the even number
    assert note == "showing values from 0 to 1000 of 65535"


@pytest.mark.parametrize(
    ("channels", "expected", "note"),
    [
        (1, [[[51, 51, 51]]], None), (2, [[[51, 51, 51]]], "showing channel 1 of 2"), (3, [[[51, 102, 153]]], None),
        (5, [[[51, 102, 153]]], "showing channels 1 to 3 of 5"),
    ],
)  # fmt: skip
def test_the_first_channels_are_shown(channels: int, expected: list[list[list[int]]], note: str | None) -> None:
    values = np.array([[[51, 102, 153, 0, 255]]], np.uint8)[..., :channels]
    picture, actual = scale_for_display(values)
    np.testing.assert_array_equal(picture, expected)
    assert actual == note


def test_channels_that_are_not_shown_do_not_count() -> None:
    values = np.array([[[0, 0, 0, 65535], [100, 100, 100, 0]]], np.uint16)
    picture, note = scale_for_display(values)
    np.testing.assert_array_equal(picture, grey(0, 255))
    assert note == "showing channels 1 to 3 of 4; showing values from 0 to 100 of 65535"
    picture, note = scale_for_display(np.array([[[0, 0, 0, 6e4], [1, 1, 1, 0]]], np.float32))
    np.testing.assert_array_equal(picture, grey(0, 255))
    assert note == "showing channels 1 to 3 of 4"


def test_values_are_not_changed() -> None:
    for values in (np.array([[np.nan, 0.1, np.inf]], np.float32), np.array([[40, 3200]], np.uint16)):
        before = values.copy()
        scale_for_display(values)
        to_8_bits(values)
        np.testing.assert_array_equal(values, before)


def test_eight_bits_of_rgb_are_the_picture_itself() -> None:
    values = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert to_8_bits(values) is values
