"""Test edits, which remove parts of an image."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcam.errors import GradcamError, ImageError
from gradcam.images.edit import Edit, edit_image, parse_edit
from gradcam.options import EDITS


def noise(height: int = 40, width: int = 60):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_brush_covers_what_is_near_its_path() -> None:
    picture = noise()
    actual = edit_image(picture, ["erase:5:10,20+40,20"])
    down, across = np.mgrid[:40, :60]
    distance = np.hypot(down - 20, across - across.clip(10, 40))
    assert (actual[distance < 4] == 0).all()
    assert (actual[distance > 7] == picture[distance > 7]).all()


@pytest.mark.parametrize("kind", EDITS)
def test_a_window_is_filled_and_all_else_stays(kind: str) -> None:
    picture = noise()
    actual = edit_image(picture, [f"{kind}:10,5,30,25"])
    inside = np.zeros((40, 60), bool)
    inside[5:25, 10:30] = True
    assert (actual[~inside] == picture[~inside]).all()
    if kind == "erase":
        assert (actual[inside] == 0).all()
    elif kind == "mean":
        assert (actual[inside] == np.rint(picture.reshape(-1, 3).astype(float).mean(0))).all()
    else:
        assert actual[inside].std() < picture[inside].std() / 3
        assert abs(actual[inside].mean() - picture.mean()) < 20


def test_the_order_of_edits_of_one_kind_does_not_matter_and_the_picture_is_left() -> None:
    picture = noise()
    before = picture.copy()
    edits = ["mean:0,0,30,30", "mean:6:30,20"]
    assert (edit_image(picture, edits) == edit_image(picture, edits[::-1])).all()
    assert (picture == before).all()


def test_a_brush_wider_than_any_line_is_refused() -> None:
    with pytest.raises(ImageError, match=r"erase:20500:.* expected at most 16383 pixels"):
        edit_image(noise(8, 9000), ["erase:20500:-20000,-3000+-20000,3000"])
    assert not edit_image(noise(), ["erase:1e9:0,0"]).any()


def test_what_lies_outside_in_part_is_no_matter() -> None:
    picture = noise()
    inside = edit_image(picture, ["erase:0,0,10,10"])
    assert (edit_image(picture, ["erase:-50,-1e9,10,10"]) == inside).all()


@pytest.mark.parametrize("edit", ["erase:5:-1e9,1e9", "erase:500,500,600,600", "blur:-10,0,0,20"])
def test_an_edit_of_nothing_is_an_error(edit: str) -> None:
    with pytest.raises(ImageError, match=r"is outside the image, which is 60 pixels wide and 40 high"):
        edit_image(noise(), ["erase:0,0,10,10", edit])


numbers = st.integers(-1000, 1000).map(float)


@given(st.sampled_from(EDITS), st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), st.integers(1, 99))
def test_what_is_written_is_read(kind: str, points: list[tuple[float, float]], radius: int) -> None:
    edit = Edit(kind, tuple(points), float(radius))
    assert parse_edit(str(edit)) == edit


@pytest.mark.parametrize(
    "text",
    [
        "", "blur", "blur:1,2,3", "blur:5,5,1,1", "blur:0:1,1", "blur:nan:1,1", "blur:2:nan,1", "smear:2:1,1",
        "blur:2:1,1+", "blur:1:2:3", "erase:inf,0,1,1",
    ],
)  # fmt: skip
def test_other_forms_are_told(text: str) -> None:
    with pytest.raises(GradcamError, match="KIND:RADIUS"):
        parse_edit(text)


def test_other_pictures_are_told() -> None:
    with pytest.raises(ImageError, match=r"float32 .*expected an RGB array: uint8"):
        edit_image(np.zeros((4, 4, 3), np.float32), ["blur:2:1,1"])  # type: ignore[arg-type]
