"""Test whether people can see the marks on images: contrast is computed in plain Python, positions by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradcam
from gradcam.errors import ImageError
from gradcam.images.draw import GAP_PIXELS, overlay
from gradcam.images.marks import COLOURS, Mark, draw_mark_panel, draw_marks, fit_mark
from gradcam.images.sheets import LINE_HEIGHT, MARGIN, fit_text, measure_text

SIZE = 200, 300  # height and width
GREY = np.full((*SIZE, 3), 118, np.uint8)
BOX = (60, 70, 240, 160)
STRONG, WEAK = 4, 2  # line widths in an image of this size


def luminance(pixels: Any) -> np.ndarray:
    shares = np.asarray(pixels) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(first: Any, second: Any) -> np.ndarray:
    first, second = luminance(first) + 0.05, luminance(second) + 0.05
    return np.maximum(first, second) / np.minimum(first, second)


def changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return (before != after).any(2)


def bounds(where: np.ndarray) -> tuple[int, int, int, int]:
    """Return the left, top, right and bottom of the true pixels; right and bottom are exclusive."""
    rows, columns = np.nonzero(where)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def plate_of(mark: Mark, picture: np.ndarray = GREY) -> tuple[int, int, int, int]:
    """Return the box of a mark's label: the pixels that differ from the same mark without a label."""
    bare = Mark(**{**vars(mark), "text": ""})
    return bounds(changed(draw_marks(picture, [bare]), draw_marks(picture, [mark])))


def along(picture: np.ndarray, box: tuple[int, int, int, int], reach: int = 3) -> list[np.ndarray]:
    """Return the pixels across each side of a box, at each position along the side: (position, across, 3)."""
    x0, y0, x1, y1 = box
    across = picture.transpose(1, 0, 2)
    return [
        *(picture[y0 + 8 : y1 - 8, at - reach : at + reach] for at in (x0, x1)),
        *(across[x0 + 8 : x1 - 8, at - reach : at + reach] for at in (y0, y1)),
    ]


def backgrounds(photo: Callable[[str], Path]) -> dict[str, np.ndarray]:
    ramp = np.tile(np.linspace(0, 1, SIZE[1], dtype=np.float32), (SIZE[0], 1))
    return {
        "black": np.zeros_like(GREY),
        "white": np.full_like(GREY, 255),
        "noise": np.random.default_rng(0).integers(0, 256, GREY.shape, dtype=np.uint8),
        "photograph": gradcam.read_image(photo("cat_and_espresso.jpg"))[200:400, 300:600],
        **{name: overlay(GREY, ramp, alpha=1, colormap=name) for name in ("turbo", "jet", "viridis")},
    }


@pytest.mark.parametrize("weak", [False, True])
def test_lines_show_on_any_picture(weak: bool, photo: Callable[[str], Path]) -> None:
    for name, picture in backgrounds(photo).items():
        for number in range(len(COLOURS)):
            result = draw_marks(picture, [Mark(number=number, box=BOX, weak=weak)])
            for old, new in zip(along(picture, BOX), along(result, BOX)):
                around = luminance(old).mean(1, keepdims=True) + 0.05
                lines = np.where((old != new).any(2), luminance(new) + 0.05, around)
                differs = np.maximum(lines / around, around / lines).max(1)
                assert differs.min() >= 3, (name, number)


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("number", range(len(COLOURS)))
def test_lines_show_on_every_grey(number: int, weak: bool) -> None:
    for grey in range(0, 256, 5):
        picture = np.full((60, 80, 3), grey, np.uint8)
        result = draw_marks(picture, [Mark(number=number, box=(20, 15, 60, 45), weak=weak)])
        for old, new in zip(along(picture, (20, 15, 60, 45)), along(result, (20, 15, 60, 45))):
            assert contrast(old, new).max(1).min() >= 3


def test_lines_run_along_the_boxs_sides_and_nothing_else_changes() -> None:
    for weak, width in ((False, STRONG), (True, WEAK)):
        x0, y0, x1, y1 = BOX
        expected = np.zeros(SIZE, bool)
        expected[y0 - width // 2 : y1 + width // 2, x0 - width // 2 : x1 + width // 2] = True
        expected[y0 + width // 2 : y1 - width // 2, x0 + width // 2 : x1 - width // 2] = False
        np.testing.assert_array_equal(changed(GREY, draw_marks(GREY, [Mark(box=BOX, weak=weak)])), expected)


def test_boxes_are_rounded_to_whole_pixels() -> None:
    near = [side + shift for side, shift in zip(BOX, (0.4, -0.4, 0.3, -0.3))]
    expected = draw_marks(GREY, [Mark(box=BOX)])
    for box in (near, np.array(near), torch.tensor(near)):
        np.testing.assert_array_equal(draw_marks(GREY, [Mark(box=box)]), expected)


def test_what_is_outside_of_the_picture_is_cut() -> None:
    result = draw_marks(GREY, [Mark(box=(-50, 70, 1e9, 160))])
    np.testing.assert_array_equal(result, draw_marks(GREY, [Mark(box=(0, 70, 300, 160))]))
    old, new = GREY[90:140], result[90:140]
    for side in (slice(0, 4), slice(-4, None)):  # along the image border
        assert contrast(old[:, side], new[:, side]).max(1).min() >= 3


@pytest.mark.parametrize(
    "box",
    [
        (100, 50, 100, 50), (100, 50, 101, 120), (150, 90, 140, 80), (0, 0, 0, 0), (300, 200, 300, 200),
        (299, 0, 300, 1), (-9, 400, -5, 500), (-1e30, -1e30, 1e30, 1e30),
    ],
)  # fmt: skip
@pytest.mark.parametrize("weak", [False, True])
def test_boxes_without_an_area_show(box: tuple[float, ...], weak: bool) -> None:
    x0, y0, x1, y1 = bounds(changed(GREY, draw_marks(GREY, [Mark(box=box, weak=weak)])))
    width = WEAK if weak else STRONG
    assert min(x1 - x0, y1 - y0) >= 2 * width + 2  # the frame has an inside
    near = [min(max(side, 0), size) for side, size in zip(box, (300, 200, 300, 200))]
    assert x0 <= max(near[0], near[2]) + width
    assert x1 >= min(near[0], near[2]) - width
    assert y0 <= max(near[1], near[3]) + width
    assert y1 >= min(near[1], near[3]) - width


@pytest.mark.parametrize(("edge", "side"), [("left", 0), ("top", 2), ("right", 1), ("bottom", 3)])
def test_the_explained_edge_is_a_bar(edge: str, side: int) -> None:
    result = draw_marks(GREY, [Mark(box=BOX, edge=edge)])
    widths = [(old != new).any(2).sum(1).mean() for old, new in zip(along(GREY, BOX, 10), along(result, BOX, 10))]
    assert widths[side] == pytest.approx(10, abs=0.5)
    assert [widths[item] for item in range(4) if item != side] == [STRONG] * 3
    x0, y0, x1, y1 = bounds(changed(GREY, result))
    assert (x1 - x0) * (y1 - y0) < (180 + 2 * 6) * (90 + 2 * 6)  # the bar stays near the box


@pytest.mark.parametrize("edge", ["left", "top", "right", "bottom"])
def test_an_edge_at_the_pictures_border_is_whole(edge: str) -> None:
    result = draw_marks(GREY, [Mark(box=(0, 0, 300, 200), edge=edge)])
    line = {"left": result[100, :20], "right": result[100, -20:], "top": result[:20, 150], "bottom": result[-20:, 150]}
    assert (line[edge] != 118).any(1).sum() == 10


def test_a_missed_box_is_dashed() -> None:
    solid, dashed = (draw_marks(GREY, [Mark(box=BOX, dashed=item)]) for item in (False, True))
    for old, full, new in zip(along(GREY, BOX), along(solid, BOX), along(dashed, BOX)):
        drawn = (old != new).any((1, 2))
        assert (old != full).any((1, 2)).all()
        assert 0.3 < drawn.mean() < 0.7
        lengths = [len(list(run)) for _, run in itertools.groupby(drawn)][1:-1]
        assert 7 <= min(lengths) <= max(lengths) <= 13
        np.testing.assert_array_equal(new[drawn], full[drawn])
    for x, y in itertools.product(BOX[::2], BOX[1::2]):
        assert (dashed[y - 1 : y + 1, x - 1 : x + 1] != 118).any(2).all()  # the corners are drawn


def border_of(mask: np.ndarray) -> np.ndarray:
    """Return the border pixels of a mask; the image border does not count."""
    border = np.zeros_like(mask)
    for row, column in np.argwhere(mask):
        beside = mask[max(row - 1, 0) : row + 2, column], mask[row, max(column - 1, 0) : column + 2]
        border[row, column] = not all(part.all() for part in beside)
    return border


def widened(where: np.ndarray, by: int) -> np.ndarray:
    result = np.zeros_like(where)
    for row, column in np.argwhere(where):
        result[max(0, row - by) : row + by + 1, max(0, column - by) : column + by + 1] = True
    return result


Y, X = np.mgrid[: SIZE[0], : SIZE[1]]
RING = (np.hypot(X - 150, Y - 100) < 80) & (np.hypot(X - 160, Y - 100) > 30)


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize(
    "mask", [RING, RING & (X > 150), (X > 100) & (X < 104) & (Y > 20) & (Y < 90), (X == 80) & (Y == 90)]
)
def test_a_masks_contour_lies_on_its_border(mask: np.ndarray, weak: bool) -> None:
    result = draw_marks(GREY, [Mark(mask=mask, weak=weak)])
    lines, border = changed(GREY, result), border_of(mask)
    assert lines[border].all()
    assert not lines[~widened(border, 4)].any()  # the contour stays near the border, on both sides
    outside = lines & ~mask
    assert luminance(result[outside]).min() < 0.05  # the dark part of the line
    assert contrast(result[lines], GREY[lines]).max() >= 3


def test_a_contour_is_dark_outside_and_light_inside() -> None:
    mask = (X > 50) & (X < 250) & (Y > 40) & (Y < 160)
    result = draw_marks(GREY, [Mark(mask=mask)])
    across = luminance(result[100, 44:58])
    dark, light = across.argmin() + 44, across.argmax() + 44
    assert dark < 51 <= light <= 54


@pytest.mark.parametrize("weak", [False, True])
def test_a_mask_that_ends_at_the_pictures_border_is_closed_there(weak: bool) -> None:
    white = np.full_like(GREY, 255)
    result = draw_marks(white, [Mark(mask=X > 150, number=3, weak=weak)])
    assert contrast(white[20:180, -5:], result[20:180, -5:]).max(1).min() >= 3
    for rows in (slice(0, 5), slice(-5, None)):
        assert contrast(white[rows, 160:290], result[rows, 160:290]).max(0).min() >= 3


def test_a_masks_colour_is_the_marks() -> None:
    result = draw_marks(GREY, [Mark(mask=RING, number=4)])
    assert (result == COLOURS[4]).all(2).sum() > border_of(RING).sum()


def test_masks_may_be_tensors_and_empty() -> None:
    expected = draw_marks(GREY, [Mark(mask=RING)])
    np.testing.assert_array_equal(draw_marks(GREY, [Mark(mask=torch.from_numpy(RING))]), expected)
    np.testing.assert_array_equal(draw_marks(GREY, [Mark(mask=np.zeros(SIZE, bool))]), GREY)
    assert changed(GREY, draw_marks(GREY, [Mark("0 dog", mask=np.zeros(SIZE, bool))])).any()


@pytest.mark.parametrize("weak", [False, True])
def test_a_point_is_a_ring_with_a_centre(weak: bool) -> None:
    lines = changed(GREY, draw_marks(GREY, [Mark(point=(120.7, 90.2), weak=weak)]))
    distance = np.hypot(X - 120, Y - 90)  # distance from the pixel that contains the point
    assert lines[distance < 2].all()
    assert not lines[(distance > 3.6) & (distance < 5.4)].any()
    assert lines[(distance > 8.6) & (distance < 9.6)].all()
    assert not lines[distance > 11].any()
    np.testing.assert_allclose(np.argwhere(lines).mean(0), (90, 120))


@pytest.mark.parametrize("point", [(0, 0), (300, 200), (-40, 90), (1e12, -1e12)])
def test_a_point_at_the_border_shows(point: tuple[float, float]) -> None:
    lines = changed(GREY, draw_marks(GREY, [Mark(point=point)]))
    x, y = min(max(int(point[0]), 0), 299), min(max(int(point[1]), 0), 199)
    assert lines[y, x]
    assert not lines[np.hypot(X - x, Y - y) > 11].any()


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("number", range(len(COLOURS)))
def test_labels_are_legible(number: int, weak: bool, photo: Callable[[str], Path]) -> None:
    for picture in backgrounds(photo).values():
        mark = Mark("3 person", number=number, box=BOX, weak=weak)
        x0, y0, x1, y1 = plate_of(mark, picture)
        plate = draw_marks(picture, [mark])[y0:y1, x0:x1].reshape(-1, 3)
        colours, counts = np.unique(plate, axis=0, return_counts=True)
        ground = colours[counts.argmax()]
        assert counts.max() > 0.5 * len(plate)
        assert contrast(colours, ground).max() >= 4.5
        assert (contrast(plate, ground) >= 4.5).mean() > 0.05  # whole strokes, not single pixels
        assert y1 - y0 >= 15


def test_a_label_is_above_its_box() -> None:
    x0, y0, x1, y1 = plate_of(Mark("0 dog", box=BOX))
    assert (x0, y1) == (BOX[0] - STRONG // 2, BOX[1] - STRONG // 2)
    assert x1 <= 300
    assert y0 > 0


def test_a_label_is_inside_where_there_is_no_room_above() -> None:
    x0, y0, x1, y1 = plate_of(Mark("0 dog", box=(60, 5, 240, 160)))
    assert 60 + STRONG // 2 <= x0 < x1 < 240 - STRONG // 2
    assert 5 + STRONG // 2 <= y0 < y1 < 160 - STRONG // 2
    assert y0 < 15


def test_a_label_is_below_a_small_box_at_the_top() -> None:
    x0, y0, _, y1 = plate_of(Mark("0 telephone", box=(60, 5, 80, 30)))
    assert y0 == 30 + STRONG // 2
    assert x0 == 60 - STRONG // 2
    assert y1 < 60


@pytest.mark.parametrize(
    "mark",
    [
        Mark("0 a dog with a hat", box=(280, 100, 300, 120)), Mark("0 dog", box=(0, 0, 300, 200)),
        Mark("0 dog", box=(290, 190, 300, 200)), Mark("0 dog", box=(0, 0, 3, 3)),
        Mark("0 dog", box=(120, 0, 130, 200)), Mark("0 dog", point=(299, 0)), Mark("0 dog", mask=X > 290),
        Mark("a dog on a sofa"), Mark("0 " + "a very long name of a class " * 9, box=BOX),
    ],
)  # fmt: skip
def test_labels_are_inside_the_picture(mark: Mark) -> None:
    x0, y0, x1, y1 = plate_of(mark)
    assert 0 <= x0 < x1 <= 300
    assert 15 <= y1 - y0 < 20  # the full height of a label
    wide = measure_text(mark.text, 12)
    assert x1 - x0 == (wide + 8 if wide < 200 else pytest.approx(300, abs=15))


def test_a_long_label_keeps_its_beginning() -> None:
    text = "3 person in front of a very long description of nothing in particular"
    short, long = Mark("3 person in front", number=0, box=BOX), Mark(text, number=0, box=BOX)
    (x0, y0, x1, y1), (x2, y2, _, _) = plate_of(short), plate_of(long)
    ink = slice(0, x1 - x0 - 6)
    first, second = (draw_marks(GREY, [item]) for item in (short, long))
    np.testing.assert_array_equal(first[y0:y1, x0:x1][:, ink], second[y2 : y2 + y1 - y0, x2 : x2 + x1 - x0][:, ink])


def test_texts_are_cut_with_an_ellipsis_where_they_must_be() -> None:
    text = "a tiger cat on a sofa in the sun"
    assert fit_text(text, measure_text(text, 17), 17) == text
    for width in range(20, measure_text(text, 17)):
        cut = fit_text(text, width, 17)
        prefix = cut.removesuffix("…")
        assert cut != prefix
        assert text.startswith(prefix)
        assert measure_text(cut, 17) <= width
        assert measure_text(f"{text[: len(prefix) + 2]}…", 17) > width  # A letter more, or a space and a letter.
    assert fit_text("word " * 10**6, 100, 17).startswith("word wor")
    assert fit_text("word", 1, 17) == "…"
    assert fit_text("", 1, 17) == ""


def test_labels_do_not_cover_each_other() -> None:
    drawn = draw_marks(GREY, [Mark(f"{number} person 98 %", number=number) for number in range(7)])
    alone = [plate_of(Mark(f"{item} person 98 %", number=item)) for item in range(7)]
    grounds = [draw_marks(GREY, [Mark(f"{item} person 98 %", number=item)])[0, 0] for item in range(7)]
    places = [bounds((drawn == ground).all(2)) for ground in grounds]
    for (x0, y0, x1, y1), (start, high, end, low) in zip(places, alone):
        assert (x1 - x0, y1 - y0) == (end - start, low - high)
    for first, second in itertools.combinations(places, 2):
        assert first[3] <= second[1] or second[3] <= first[1]


def test_labels_of_boxes_at_one_place_move_apart() -> None:
    marks = [Mark(f"{number} person", number=number, box=BOX) for number in range(5)]
    bare = draw_marks(GREY, [Mark(number=number, box=BOX) for number in range(5)])
    difference = changed(bare, draw_marks(GREY, marks))
    sizes = [plate_of(mark) for mark in marks]
    area = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in sizes)
    assert difference.sum() >= 0.97 * area  # A label over a line of the same colour changes nothing there.
    x0, y0, x1, y1 = bounds(difference)
    assert 58 <= x0 < x1 < 240  # near the box: above, below, beside, or in its corner
    assert 68 - 3 * 16 <= y0 < y1 <= 162 + 3 * 16


def test_more_labels_than_there_is_room_for() -> None:
    picture = GREY[:40, :60]
    marks = [Mark(f"{number} person", box=(5, 5, 40, 30)) for number in range(60)]
    result = draw_marks(picture, marks)
    x0, y0, x1, y1 = plate_of(marks[0], picture)
    first = draw_marks(picture, [Mark("0 person", number=0, box=(5, 5, 40, 30))])
    np.testing.assert_array_equal(result[y0:y1, x0:x1], first[y0:y1, x0:x1])  # The first label is on top.


@pytest.mark.parametrize(
    "text",
    ["3 кот", "3 猫と犬", "3 📷👩‍👩‍👧", "3 \ud800 x", "3 a\nb\tc\x00", "3 \u202eabc", "3 שלום", " ", "3 e\u0301", "…"],
)
def test_any_letters_can_be_written(text: str) -> None:
    x0, y0, x1, y1 = plate_of(Mark(text, box=BOX))
    assert 0 <= x0 < x1 <= 300
    assert 15 <= y1 - y0 < 20


def test_letters_with_accents_are_written_without_them() -> None:
    texts = ("0 cafe Zurich", "0 café Zürich", "0 cafe\u0301 Zu\u0308rich")
    plain, accents, apart = (draw_marks(GREY, [Mark(text, box=BOX)]) for text in texts)
    np.testing.assert_array_equal(accents, plain)
    np.testing.assert_array_equal(apart, plain)
    half, twelve = (draw_marks(GREY, [Mark(item, box=BOX)]) for item in ("0 ½", "0 12"))
    assert changed(half, twelve).any()  # written as 12, one half would change its meaning


def test_a_number_has_one_colour_in_all_pictures() -> None:
    three = draw_marks(GREY, [Mark(number=3, box=BOX)])
    marks = draw_marks(GREY, [Mark(number=1, box=(5, 5, 30, 30)), Mark(number=3, box=BOX)])
    np.testing.assert_array_equal(marks[60:], three[60:])
    by_place = draw_marks(GREY, [Mark(box=(5, 5, 30, 30)), Mark(box=BOX)])
    np.testing.assert_array_equal(by_place[60:], draw_marks(GREY, [Mark(number=1, box=BOX)])[60:])
    np.testing.assert_array_equal(draw_marks(GREY, [Mark(number=3 + len(COLOURS), box=BOX)]), three)
    used = {tuple(draw_marks(GREY, [Mark(number=item, box=BOX)])[100, 60]) for item in range(len(COLOURS))}
    assert used == set(COLOURS)


def test_weak_marks_lie_below_the_others() -> None:
    across = (20, 100, 280, 190)
    strong, weak = Mark(number=0, box=BOX), Mark(number=1, box=across, weak=True)
    expected = changed(GREY, draw_marks(GREY, [strong]))
    for marks in ([strong, weak], [weak, strong]):
        result = draw_marks(GREY, marks)
        np.testing.assert_array_equal(result[expected], draw_marks(GREY, [strong])[expected])


@pytest.mark.parametrize(("side", "width", "letters"), [(100, 4, 12), (640, 4, 14), (1280, 8, 28)])
def test_lines_and_letters_grow_with_the_picture(side: int, width: int, letters: int) -> None:
    picture = np.zeros((side // 2, side * 2, 3), np.uint8)  # as many pixels as a square of this side
    box = (side // 2, side // 4, side, side // 2 - side // 10)
    result = draw_marks(picture, [Mark(box=box)])
    assert changed(picture, result)[box[1] + 10, : side * 3 // 4].sum() == width
    _, y0, _, y1 = plate_of(Mark("0 dog", box=box), picture)
    assert y1 - y0 == round(1.3 * letters)


@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (90, 1), (3, 5), (12, 12), (20, 40), (7, 4000)])
def test_the_smallest_pictures(shape: tuple[int, int]) -> None:
    picture = np.full((*shape, 3), 118, np.uint8)
    mask = np.ones(shape, bool)
    for edge, weak in itertools.product(["left", "top", "right", "bottom", None], [False, True]):
        mark = Mark("3 person 98 %", 3, (0, 0, 2, 2), edge, mask, (1, 1), dashed=True, weak=weak)
        result = draw_marks(picture, [mark, mark])
        assert result.shape == picture.shape
        assert changed(picture, result).any()


def test_the_picture_is_left_as_it_is() -> None:
    picture = GREY.copy()
    picture.flags.writeable = False
    mark = Mark("0 dog", box=BOX, edge="top", mask=RING, point=(20, 30))
    result = draw_marks(picture, [mark])
    assert (picture == 118).all()
    assert result.flags.writeable
    assert not np.shares_memory(result, picture)
    np.testing.assert_array_equal(draw_marks(np.asfortranarray(picture), [mark]), result)
    np.testing.assert_array_equal(draw_marks(np.repeat(picture, 2, 1)[:, ::2], (item for item in [mark])), result)
    none = draw_marks(picture, [])
    np.testing.assert_array_equal(none, picture)
    assert not np.shares_memory(none, picture)


def test_a_mark_on_a_part_of_the_picture_at_another_size() -> None:
    mask = (X >= 100) & (X < 200) & (Y >= 50) & (Y < 100)
    mark = Mark("0 dog", 5, (100, 50, 200, 100), "left", mask, (150, 60), weak=True)
    moved = fit_mark(mark, (50, 60, 100, 240), 200, 120)  # twice as high and half as wide
    assert tuple(moved.box) == (20, 0, 70, 100)
    assert tuple(moved.point) == (45, 20)
    assert moved.mask.dtype == bool
    expected = np.zeros((200, 120), bool)
    expected[:100, 20:70] = True
    assert (moved.mask != expected).mean() < 0.01
    assert (moved.text, moved.number, moved.edge, moved.weak) == ("0 dog", 5, "left", True)
    with pytest.raises(ImageError, match="does not cover the region"):
        fit_mark(mark, (0, 0, 200, 301), 10, 10)


def test_a_panel_of_all_boxes() -> None:
    marks = [Mark(f"{item} dog", box=(20 + 80 * item, 40, 80 + 80 * item, 150)) for item in range(3)]
    heated = [np.full_like(GREY, 60 * item + 60) for item in range(3)]
    panel = draw_mark_panel(GREY, heated, marks, height=200)
    assert panel.shape == (2 * MARGIN + 200 + GAP_PIXELS + LINE_HEIGHT, 2 * MARGIN + 4 * 300 + 3 * GAP_PIXELS, 3)
    weak_marks = [Mark(number=entry, box=mark.box, weak=True) for entry, mark in enumerate(marks)]
    expected = [draw_marks(GREY, marks)]
    for item in range(3):
        explained = Mark(f"{item} dog", item, marks[item].box)
        expected.append(draw_marks(heated[item], [*weak_marks[:item], explained, *weak_marks[item + 1 :]]))
    for column, cell in enumerate(expected):
        x0 = MARGIN + column * (300 + GAP_PIXELS)
        np.testing.assert_array_equal(panel[MARGIN : MARGIN + 200, x0 : x0 + 300], cell)
    assert (panel[:MARGIN] == 255).all()


def test_a_panel_has_rows_and_letters_of_its_own_size() -> None:
    picture, box = np.full((1000, 1500, 3), 118, np.uint8), (300, 350, 1200, 800)
    marks = [Mark(f"{item} dog", number=0, box=box, mask=np.ones((1000, 1500), bool)) for item in range(8)]
    panel = draw_mark_panel(picture, [picture] * 8, marks, height=200)
    assert panel.shape == (2 * MARGIN + 2 * (200 + GAP_PIXELS) + LINE_HEIGHT, 2 * MARGIN + 5 * 300 + 4 * GAP_PIXELS, 3)
    small = fit_mark(marks[0], (0, 0, 1000, 1500), 200, 300)
    assert tuple(small.box) == BOX
    cell = panel[MARGIN : MARGIN + 200, MARGIN + 300 + GAP_PIXELS : MARGIN + 600 + GAP_PIXELS]
    x0, y0, x1, y1 = plate_of(small)
    np.testing.assert_array_equal(cell[y0:y1, x0:x1], draw_marks(GREY, [small])[y0:y1, x0:x1])


def test_a_panels_legend() -> None:
    for signed in (False, True):
        panel = draw_mark_panel(GREY, [GREY], [Mark(box=BOX)], height=100, colormap="jet", signed=signed)
        most = overlay(np.full((1, 1, 3), 128, np.uint8), np.ones((1, 1)), colormap="jet", signed=signed)[0, 0]
        distance = np.abs(panel[-(MARGIN + LINE_HEIGHT) :].astype(int) - most.astype(int)).sum(2)
        assert distance.min() <= 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"box": (1, 2, 3)}, r"The box of a mark is \(1, 2, 3\), expected \(left, top, right, bottom\): finite"),
        ({"box": (1, 2, 3, float("nan"))}, "finite"), ({"box": (1, 2, 3, float("inf"))}, "finite"),
        ({"box": (1, 2, 3, 10**400)}, "finite"), ({"box": ("a", 2, 3, 4)}, "finite"),
        ({"box": 7}, "The box of a mark is 7"), ({"box": np.ones((2, 4))}, "The box of a mark"),
        ({"point": (1, None)}, r"The point of a mark is \(1, None\), expected \(across, down\)"),
        ({"point": (1, 2, 3)}, "expected .across, down."), ({"edge": "middle", "box": BOX}, "The edge is 'middle'"),
        ({"edge": "left"}, "The edge 'left' needs a box"),
        ({"mask": np.ones(SIZE)}, r"The mask to draw is float64 \(200, 300\), expected bool \(H,W\)"),
        ({"mask": np.ones((1, *SIZE), bool)}, r"bool \(1, 200, 300\)"), ({"text": 3}, "text .* is 3, expected a str"),
        ({"number": -1}, "number of a mark is -1, expected .* 0 or more"), ({"number": 1.5}, "The number .* is 1.5"),
    ],
)  # fmt: skip
def test_marks_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ImageError, match=message):
        Mark(**fields)


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ImageError, match="The mask to draw is 300 x 199, but the image is 300 x 200: expected"):
        draw_marks(GREY, [Mark(mask=np.ones((199, 300), bool))])
    with pytest.raises(ImageError, match="expected a Mark"):
        draw_marks(GREY, [BOX])  # type: ignore[list-item]
    for picture in (GREY[..., 0], GREY / 255, GREY[:0], "photo.jpg"):
        with pytest.raises(ImageError, match="expected an RGB array"):
            draw_marks(picture, [])  # type: ignore[arg-type]
    with pytest.raises(ImageError, match="There are 2 overlays for 1 marks, expected one for each"):
        draw_mark_panel(GREY, [GREY, GREY], [Mark(box=BOX)])
    with pytest.raises(ImageError, match="expected an RGB array"):
        draw_mark_panel(GREY, [GREY / 255], [Mark(box=BOX)])
    with pytest.raises(ImageError, match="expected the same size"):
        draw_mark_panel(GREY, [GREY], [Mark(mask=np.ones((400, 600), bool))])
    for height in (0, 2.5, True):
        with pytest.raises(ImageError, match="the height of each image"):
            draw_mark_panel(GREY, [GREY], [Mark(box=BOX)], height=height)  # type: ignore[arg-type]


def test_a_mark_is_shown_in_one_line() -> None:
    assert "\n" not in repr(Mark("0 dog", box=BOX, mask=RING))
    assert "bool (200, 300)" in repr(Mark(mask=RING))
