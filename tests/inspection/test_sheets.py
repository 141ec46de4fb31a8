"""Check sheets of activation maps: the place of each channel, its colours, and the text."""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from gradcam.errors import GradcamError, ImageError
from gradcam.images import draw as drawing
from gradcam.images.draw import GAP_PIXELS
from gradcam.images.sheets import INK, LINE_HEIGHT, MARGIN
from gradcam.inspection import draw_activations, sheets
from gradcam.inspection.sheets import BAR, BAR_HEIGHT, CAPTION, CAPTION_COLOUR, HEADING, LABEL, TEXT, TITLE

BLACK, MAGENTA = (0, 0, 0), (255, 0, 255)
MAX_COLOUR, MIN_COLOUR = (255, 245, 215), (235, 250, 255)  # the colours at both ends of a signed scale
HALF, MINUS_HALF = (200, 90, 40), (50, 130, 190)


def colour(share: float, colormap: int = cv2.COLORMAP_INFERNO) -> tuple[int, ...]:
    level = np.array([[round(share * 255)]], np.uint8)
    return tuple(int(value) for value in cv2.applyColorMap(level, colormap)[0, 0, ::-1])


def cell(sheet: np.ndarray[Any, Any], place: int, *, size: int, columns: int = 8, top: int | None = None) -> Any:
    """Return the pixels of a square cell of the first block of a sheet without image and title."""
    start = MARGIN + LINE_HEIGHT + GAP_PIXELS + HEADING + GAP_PIXELS if top is None else top
    down = start + place // columns * (size + CAPTION + GAP_PIXELS)
    across = MARGIN + place % columns * (size + GAP_PIXELS)
    return sheet[down : down + size, across : across + size]


def is_all(pixels: Any, colour_of_all: tuple[int, ...]) -> bool:
    return bool((pixels == colour_of_all).all())


def flat(*values: float) -> np.ndarray[Any, Any]:
    """Return channels (C,2,2), each with a constant value."""
    return np.broadcast_to(np.array(values, np.float32)[:, None, None], (len(values), 2, 2))


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record all text that is drawn."""
    written: list[str] = []
    write = ImageDraw.ImageDraw.text

    def text(draw: ImageDraw.ImageDraw, place: Any, text: str, *args: Any, **kwargs: Any) -> None:
        written.append(text)
        write(draw, place, text, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return written


# Colours


def test_each_value_is_a_sharp_square_in_its_colour() -> None:
    sheet = draw_activations(np.array([[[0.0, 1.0], [2.0, 4.0]]]), size=16)
    pixels = cell(sheet, 0, size=16)
    for row, column, share in ((0, 0, 0), (0, 1, 0.25), (1, 0, 0.5), (1, 1, 1)):
        assert is_all(pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8], colour(share))
    viridis = cell(draw_activations(np.array([[[0.0, 1.0], [2.0, 4.0]]]), size=16, colormap="viridis"), 0, size=16)
    assert is_all(viridis[8:, :8], colour(0.5, cv2.COLORMAP_VIRIDIS))


def test_signed_values_are_warm_and_cold_and_zero_is_black() -> None:
    maps = torch.tensor([[[0.0, 2.0, -2.0], [1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]])
    pixels = cell(draw_activations(maps, size=3, colormap="viridis"), 0, size=3)
    assert [tuple(pixel) for pixel in pixels[0]] == [BLACK, MAX_COLOUR, MIN_COLOUR]
    assert np.abs(pixels[1, :2].astype(int) - (HALF, MINUS_HALF)).max() <= 1
    assert is_all(pixels[2], BLACK)


def test_one_negative_value_in_a_layer_makes_all_its_channels_signed() -> None:
    maps = flat(1, 2, 3).copy()
    maps[2, 0, 0] = -0.001
    sheet = draw_activations(maps, order="index", size=8)
    assert is_all(cell(sheet, 0, size=8), MAX_COLOUR)
    # The layer is signed even if its negative channel is not drawn.
    assert is_all(cell(draw_activations(maps, order="index", channels=1, size=8), 0, size=8), MAX_COLOUR)
    sheet = draw_activations({"a": flat(1, 2, 3), "b": maps}, order="index", size=8)
    assert is_all(cell(sheet, 0, size=8), colour(1))  # the negative value belongs to the other layer


def test_colours_end_at_each_channels_largest_or_at_the_layers() -> None:
    maps = flat(1, 4, 2)
    activations = draw_activations(maps, order="index", size=8)
    alike = draw_activations(maps, order="index", scale="layer", size=8)
    assert all(is_all(cell(activations, place, size=8), colour(1)) for place in range(3))
    for place, share in enumerate((0.25, 1, 0.5)):
        assert is_all(cell(alike, place, size=8), colour(share))


def test_the_layers_largest_does_not_depend_on_what_is_shown() -> None:
    alike = draw_activations(flat(1, 4), order="index", channels=1, scale="layer", size=8)
    assert is_all(cell(alike, 0, size=8), colour(0.25))


@pytest.mark.parametrize("count", [1, 49, 100, 101, 196, 3136])
def test_the_largest_is_the_99th_percentile_of_what_is_not_zero(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    ranked = sorted(abs(value) for value in values)
    expected = ranked[math.ceil(0.99 * (count - 1))]
    odd = np.concatenate([values, np.zeros(5000), [np.nan, np.inf, -np.inf]])
    assert sheets.find_largest(odd) == expected
    assert (expected == ranked[-1]) == (count <= 100)
    assert sheets.find_largest(np.zeros(9)) == sheets.find_largest(np.array([np.nan])) == 0


def test_values_above_the_largest_have_the_last_colour() -> None:
    values = np.array([[[3.0, 1.0, 0.5], [-3.0, -1.0, 0.0], [0.0, 0.0, 0.0]]])
    pixels = sheets.draw_cell(values[0], 3, largest=1, signed=True, colormap="inferno")
    assert is_all(pixels[0, :2], MAX_COLOUR)
    assert is_all(pixels[1, :2], MIN_COLOUR)


def test_nan_and_infinity_are_magenta_and_do_not_fade_the_rest(texts: list[str]) -> None:
    maps = flat(1, 2, 3).copy()
    maps[0, 0, 0] = np.nan
    maps[1, 1, 1] = np.inf
    sheet = draw_activations({"x": maps}, size=8, scale="layer")
    first, second, third = (cell(sheet, place, size=8) for place in range(3))
    assert is_all(first[:4, :4], MAGENTA)  # the channel with NaN is first, then the one with infinity
    assert is_all(first[4:], colour(1 / 3))
    assert is_all(second[4:, 4:], MAGENTA)
    assert is_all(second[:4], colour(2 / 3))
    assert is_all(third, colour(1))
    assert "3 channels of 2 x 2, 2 values NaN or infinite (magenta)" in texts
    assert texts.count("3.00") == 1  # the end of the colour bar


@pytest.mark.parametrize("values", [(1, 0), (-1, 0)])
def test_a_dead_channel_is_black_and_labelled(values: tuple[float, ...], texts: list[str]) -> None:
    sheet = draw_activations(flat(*values), size=64)
    assert cell(sheet, 1, size=64).max() <= 4  # the first colour of inferno
    assert texts[texts.index("1") + 1] == "dead"
    assert texts.count("dead") == 1


def test_of_a_map_larger_than_its_cell_the_mean_is_coloured() -> None:
    values = np.zeros((4, 4))
    values[:2, :2] = [[1, -1], [1, -1]]  # these values average to zero
    values[:2, 2:] = [[1, 0], [1, 0]]
    values[2:, :2] = [[-1, 0], [-1, 0]]
    values[2:, 2:] = [[1, 1], [np.nan, 1]]
    pixels = sheets.draw_cell(values, 2, largest=1, signed=True, colormap="inferno")
    assert tuple(pixels[0, 0]) == BLACK
    assert np.abs(pixels[0, 1].astype(int) - HALF).max() <= 1
    assert np.abs(pixels[1, 0].astype(int) - MINUS_HALF).max() <= 1
    assert tuple(pixels[1, 1]) == MAGENTA


@pytest.mark.parametrize(("cells", "size"), [(1, 7), (3, 10), (14, 100), (28, 100), (7, 7)])
def test_where_values_meet_inside_a_pixel_it_has_the_mean_of_their_colours(cells: int, size: int) -> None:
    values = np.random.default_rng(0).random((cells, cells))
    pixels = sheets.draw_cell(values, size, largest=1, signed=False, colormap="inferno")
    colours = np.array([[colour(value) for value in row] for row in values], float)
    covers = np.zeros((size, cells))  # the fraction of each pixel that each value covers
    for pixel in range(size):
        for k in range(cells):
            overlap = min((pixel + 1) * cells, (k + 1) * size) - max(pixel * cells, k * size)
            covers[pixel, k] = max(0, overlap) / cells
    expected = np.einsum("ij,jkc,lk->ilc", covers, colours, covers)
    assert np.abs(pixels - expected).max() <= 1


@pytest.mark.parametrize(
    ("grid", "sides"), [((2, 4), (8, 16)), ((4, 2), (16, 8)), ((1, 100), (1, 16)), ((40, 20), (16, 8))]
)
def test_the_longer_side_has_the_size_and_the_aspect_is_kept(grid: tuple[int, int], sides: tuple[int, int]) -> None:
    assert sheets.draw_cell(np.ones(grid), 16, largest=1, signed=False, colormap="bone").shape == (*sides, 3)


# Positions


def test_channels_lie_in_rows_in_their_order() -> None:
    strengths = [3, 1, 7, 5, 6, 2, 4]
    maps = flat(*strengths)
    by_strength = draw_activations(maps, columns=3, size=8, scale="layer")
    by_index = draw_activations(maps, columns=3, size=8, scale="layer", order="index")
    for place, strength in enumerate(sorted(strengths, reverse=True)):
        assert is_all(cell(by_strength, place, size=8, columns=3), colour(strength / 7))
    for place, strength in enumerate(strengths):
        assert is_all(cell(by_index, place, size=8, columns=3), colour(strength / 7))


def test_the_number_of_channels_is_limited(texts: list[str]) -> None:
    some = draw_activations({"conv": flat(3, 1, 7, 5)}, channels=2, size=8)
    assert [text for text in texts if text.isdigit()] == ["2", "3", "0"]  # the channels, and the end of the colour bar
    assert "4 channels of 2 x 2, the strongest 2" in texts
    assert is_all(cell(some, 2, size=8), (255, 255, 255))
    texts.clear()
    draw_activations({"conv": flat(3, 1, 7, 5)}, channels=3, size=8, order="index")
    assert "4 channels of 2 x 2, the first 3" in texts
    texts.clear()
    draw_activations({"conv": flat(3)}, size=8)
    assert "1 channel of 2 x 2" in texts


def test_layers_lie_below_one_another() -> None:
    sheet = draw_activations({"a": flat(1, 2), "b": torch.full((1, 3, 4, 4), -1.0)}, size=8)
    below = MARGIN + LINE_HEIGHT + GAP_PIXELS + (HEADING + GAP_PIXELS + 8 + CAPTION) + GAP_PIXELS + HEADING + GAP_PIXELS
    for place in range(3):
        assert is_all(cell(sheet, place, size=8, top=below), MIN_COLOUR)
    assert len(sheet) == below + 8 + CAPTION + MARGIN


def test_one_image_of_a_batch_is_drawn() -> None:
    batch = torch.stack([torch.tensor(flat(1, 4)), torch.tensor(flat(4, 2))])
    for image, shares in enumerate(((0.25, 1), (1, 0.5))):
        sheet = draw_activations({"a": batch}, image=image, order="index", scale="layer", size=8)
        assert [is_all(cell(sheet, k, size=8), colour(share)) for k, share in enumerate(shares)] == [True, True]
    expected = draw_activations(flat(1, 4).astype(np.float64))
    assert np.array_equal(draw_activations(batch[0].to(torch.bfloat16).requires_grad_()), expected)


# Text


def caption(height: int, width: int, number: str, strength: str) -> np.ndarray[Any, Any]:
    """Return the text below a cell of this width, as Pillow draws it."""
    font = ImageFont.load_default(LABEL)
    canvas = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((0, 3), number, INK, font)
    draw.text((width - round(font.getlength(strength)), 3), strength, CAPTION_COLOUR, font)
    return np.array(canvas)


def test_below_each_cell_are_its_number_and_its_strength() -> None:
    sheet = draw_activations(flat(0.12345, 1234.4, 20), columns=2, size=64)
    top = MARGIN + LINE_HEIGHT + GAP_PIXELS + HEADING + GAP_PIXELS + 64
    for place, (number, strength) in enumerate((("1", "1234"), ("2", "20.0"), ("0", "0.123"))):
        down = top + place // 2 * (64 + CAPTION + GAP_PIXELS)
        x0 = MARGIN + place % 2 * (64 + GAP_PIXELS)
        pixels = sheet[down : down + CAPTION, x0 : x0 + 64]
        assert np.array_equal(pixels, caption(CAPTION, 64, number, strength))


def test_in_small_cells_there_is_room_for_the_number_alone(texts: list[str]) -> None:
    sheet = draw_activations(flat(*range(1, 1001)), channels=1000, columns=40, size=4, order="index")
    assert "999" in texts
    assert "1.00" not in texts
    pitch = round(ImageFont.load_default(LABEL).getlength("999")) + GAP_PIXELS  # so wide that numbers do not overlap
    x0 = MARGIN + 39 * pitch
    assert is_all(sheet[MARGIN + LINE_HEIGHT + GAP_PIXELS + HEADING + GAP_PIXELS :][:4, x0 : x0 + 4], colour(1))
    assert sheet.shape[1] >= x0 + pitch - GAP_PIXELS + MARGIN


def test_the_heading_has_the_name_and_a_bar_of_the_colours() -> None:
    sheet = draw_activations({"layer2.0": flat(*range(1, 9))}, size=112)
    top, base = MARGIN + LINE_HEIGHT + GAP_PIXELS, HEADING - 4
    canvas = Image.new("RGB", (112, HEADING), "white")
    ImageDraw.Draw(canvas).text((0, base), "layer2.0", INK, ImageFont.load_default(TITLE), anchor="ls")
    name = round(ImageFont.load_default(TITLE).getlength("layer2.0"))
    assert np.array_equal(sheet[top : top + HEADING, MARGIN : MARGIN + name], np.array(canvas)[:, :name])
    end = MARGIN + 8 * 112 + 7 * GAP_PIXELS  # the right edge of the last cell
    after = round(ImageFont.load_default(TEXT).getlength("largest of each channel"))
    bar = sheet[top + base - BAR_HEIGHT + 1 : top + base + 1, end - after - GAP_PIXELS - BAR : end - after - GAP_PIXELS]
    assert is_all(bar[:, 0], colour(0))
    assert is_all(bar[:, -1], colour(1))
    assert is_all(sheet[top + base - 4, end - after - GAP_PIXELS], (255, 255, 255))
    assert is_all(bar[:, BAR // 2], colour((BAR // 2) / (BAR - 1)))


@pytest.mark.parametrize(
    ("values", "scale", "ends"),
    [
        ((1, 4), "channel", ("0", "largest of each channel")),
        ((1, 4), "layer", ("0", "4.00")),
        ((1, -4), "channel", ("negative", "positive of each channel")),
        ((1, -4), "layer", ("-4.00", "4.00")),
        ((0, 0), "layer", ("0", "0")),
        ((0, -math.inf), "layer", ("0", "0")),
    ],
)
def test_the_bars_ends_are_named(
    values: tuple[float, ...], scale: str, ends: tuple[str, str], texts: list[str]
) -> None:
    draw_activations(flat(*values), scale=scale, size=8)
    shape = next(number for number, text in enumerate(texts) if text.startswith("2 channels of 2 x 2"))
    assert tuple(texts[shape + 1 : shape + 3]) == ends


def test_a_long_heading_fits() -> None:
    sheet = draw_activations({"a.very.long.name." * 9: flat(1)}, size=8)
    ink = np.nonzero((sheet < 128).any(2))[1]
    assert ink.max() < sheet.shape[1] - MARGIN // 2


def test_the_image_stands_above_at_the_size_of_a_cell(texts: list[str]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    sheet = draw_activations({"a": flat(1)}, input_image=image, title="what it saw", size=30)
    assert np.array_equal(sheet[MARGIN : MARGIN + 30, MARGIN : MARGIN + 45], drawing.scale_to_height(image, 30))
    assert texts[:2] == ["what it saw", texts[1]]
    assert "mean absolute activation" in texts[1]
    beside = np.nonzero((sheet[MARGIN : MARGIN + 52, MARGIN + 45 :] < 255).any((0, 2)))[0]
    assert beside.min() >= MARGIN  # the text does not touch the image


# Errors


@pytest.mark.parametrize(
    ("maps", "options", "message"),
    [
        (flat(1), {"channels": 0}, "channels is 0, expected a whole number, 1 or more"),
        (flat(1), {"channels": True}, "channels is True"),
        (flat(1), {"columns": 2.0}, "columns is 2.0"),
        (flat(1), {"size": 0}, "size is 0"),
        (flat(1), {"order": "weakest"}, "order is 'weakest', expected one of 'strongest', 'index'"),
        (flat(1), {"scale": "image"}, "scale is 'image', expected one of 'channel', 'layer'"),
        (flat(1), {"colormap": "infernal"}, "no colour map 'infernal'. Nearest: 'inferno'"),
        (flat(1), {"image": 1}, "There is no image 1: the number of images is 1, and the first is 0"),
        (flat(1), {"image": -1}, "There is no image -1"),
        (flat(1), {"input_image": np.zeros((2, 2, 2))}, "expected an array"),
        (flat(1), {"size": 20000}, "1 cells of 20000 x 20000 pixels exceed the limit"),
        ({}, {}, "There are no activations"),
        ({"fc": torch.ones(1, 10)}, {}, r"activations of 'fc' are .*float64 \(1, 10\), expected floats \(C,h,w\)"),
        (torch.ones(2, 3, 4, 5, 6), {}, r"volumes.*such as tensor\[:, :, 2\]"),
        (torch.ones(3, 0, 4), {}, r"\(3, 0, 4\), expected floats"),
        (torch.ones(3, 4, 4, dtype=torch.int64), {}, "int64"),
        ([[1.0]], {}, r"The activations are \[\[1.0\]\], expected a tensor"),
    ],
)
def test_wrong_maps_and_options_are_errors(maps: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message) as caught:
        draw_activations(maps, **options)
    assert isinstance(caught.value, ImageError) or {"order", "scale", "colormap"} & options.keys()
