"""Test overlay() and sheet(): every pixel against a formula in plain Python, colours and positions computed by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import gradcam
from gradcam.errors import GradcamError, GradcamWarning, ImageError
from gradcam.images.draw import COLORMAPS, GAP_PIXELS, draw_colour_bar, find_colormap, join_rows

pytestmark = pytest.mark.filterwarnings("ignore:A heatmap of .* is stretched")

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (24, 32, 3), dtype=np.uint8)
REGION = (5, 7, 12, 20)
HEAT = RNG.random((12, 20), dtype=np.float32)
BLACK = np.zeros_like(PICTURE)
WHITE = np.full_like(PICTURE, 255)


def inside(picture: np.ndarray, region: tuple[int, int, int, int] = REGION) -> np.ndarray:
    top, left, height, width = region
    return picture[top : top + height, left : left + width]


def table_of(colormap: int) -> list[list[int]]:
    """Return the 256 colours of an OpenCV colormap, converted one by one from BGR to RGB."""
    column = cv2.applyColorMap(np.arange(256, dtype=np.uint8).reshape(256, 1), colormap)
    return [[int(red), int(green), int(blue)] for ((blue, green, red),) in column]


@pytest.mark.parametrize(
    ("look", "default"),
    [
        ({}, {"base": "gray", "alpha": 0.8, "colormap": "inferno", "blend": "grow"}),
        ({"base": "color"}, {"base": "color", "alpha": 0.5, "colormap": "turbo", "blend": "fade"}),
        ({"base": "color", "blend": "grow"}, {"base": "color", "alpha": 0.5, "colormap": "turbo", "blend": "grow"}),
    ],
)
def test_each_base_has_its_own_defaults(look: Any, default: Any) -> None:
    expected = gradcam.overlay(PICTURE, HEAT, region=(0, 0, 24, 32), **default)
    np.testing.assert_array_equal(gradcam.overlay(PICTURE, HEAT, **look), expected)


def luminance(picture: np.ndarray) -> np.ndarray:
    return (picture @ np.array([0.299, 0.587, 0.114]))[..., None].repeat(3, -1)


def test_a_grey_base_is_the_luminance_also_outside_the_region() -> None:
    drawn = gradcam.overlay(PICTURE, np.zeros((7, 7)), region=REGION)
    assert (drawn == drawn[..., :1]).all()
    assert abs(drawn - luminance(PICTURE)).max() <= 0.51
    outside = np.ones(PICTURE.shape[:2], bool)
    outside[5:17, 7:27] = False
    hot = gradcam.overlay(PICTURE, np.ones((7, 7)), region=REGION)
    np.testing.assert_array_equal(hot[outside], drawn[outside])


@pytest.mark.parametrize("grey", [0, 57, 128, 255])
def test_greyscale_pictures_keep_their_greys(grey: int) -> None:
    picture = np.full((4, 4, 3), grey, np.uint8)
    np.testing.assert_array_equal(gradcam.overlay(picture, np.zeros((4, 4))), picture)


@pytest.mark.parametrize(("value", "opacities"), [(0, (0, 0, 1)), (51, (0.36, 0.4, 1)), (204, (0.96, 1, 1))])
def test_the_opacity_follows_the_blend(value: int, opacities: tuple[float, ...]) -> None:
    black, heat = np.zeros((1, 1, 3), np.uint8), np.full((1, 1), value / 255, np.float32)
    for blend, opacity in zip(("grow", "fade", "uniform"), opacities):
        white = gradcam.overlay(black + 255, heat, alpha=0.5, blend=blend).astype(int)
        assert 255 - (white - gradcam.overlay(black, heat, alpha=0.5, blend=blend)) == pytest.approx(
            127.5 * opacity, abs=1.01
        )


def test_signed_heatmaps_fade_even_if_the_blend_is_uniform() -> None:
    heat = HEAT * 2 - 1
    expected = gradcam.overlay(PICTURE, heat, signed=True, blend="fade")
    np.testing.assert_array_equal(gradcam.overlay(PICTURE, heat, signed=True, blend="uniform"), expected)


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ({"base": "grey"}, "base is 'grey', expected one of 'gray', 'color'"),
        ({"base": None}, "base is None, expected"),
        ({"blend": "hard"}, "blend is 'hard', expected one of 'grow', 'fade', 'uniform'"),
    ],
)
def test_an_unknown_base_or_blend_is_an_error(look: Any, message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        gradcam.overlay(PICTURE, HEAT, **look)


@pytest.mark.parametrize("signed", [False, True])
def test_the_colour_bar_has_the_colours_of_the_look(signed: bool) -> None:
    values = np.linspace(-1 if signed else 0, 1, 64, dtype=np.float32)[None]
    on_grey = gradcam.overlay(np.full((1, 64, 3), 128, np.uint8), values, colormap="jet", signed=signed)
    np.testing.assert_array_equal(draw_colour_bar(64, 1, colormap="jet", signed=signed), on_grey)
    earlier = gradcam.overlay(np.full((1, 64, 3), 255, np.uint8), values, alpha=1, base="color", signed=signed)
    np.testing.assert_array_equal(draw_colour_bar(64, 1, base="color", alpha=0.3, signed=signed), earlier)


def test_pixels_outside_the_region_stay_and_all_inside_change() -> None:
    result = gradcam.overlay(WHITE, np.ones((3, 3)), region=REGION)
    changed = (result != WHITE).any(axis=2)
    expected = np.zeros((24, 32), dtype=bool)
    expected[5:17, 7:27] = True
    np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("region", [(0, 0, 24, 32), (0, 0, 1, 1), (23, 31, 1, 1), (0, 31, 24, 1), (23, 0, 1, 32)])
def test_regions_may_touch_the_edges(region: tuple[int, int, int, int]) -> None:
    result = gradcam.overlay(WHITE, np.ones((7, 7)), region=region)
    assert (result != WHITE).any(axis=2).sum() == region[2] * region[3]
    assert (inside(result, region) != 255).any(axis=2).all()


@pytest.mark.parametrize("colormap", ["turbo", "jet", "viridis", "bone"])
def test_no_evidence_leaves_the_picture_as_it_is(colormap: str) -> None:
    result = gradcam.overlay(PICTURE, np.zeros((7, 7)), alpha=1, colormap=colormap, base="color")
    np.testing.assert_array_equal(result, PICTURE)


@pytest.mark.parametrize(
    ("colormap", "first", "last"),
    [
        ("jet", (0, 0, 128), (128, 0, 0)),  # pure dark red in RGB; swapped channels would make it blue
        ("turbo", (48, 18, 59), (122, 4, 3)),
        ("viridis", (68, 1, 84), (253, 231, 37)),
        ("inferno", (0, 0, 4), (252, 255, 164)),
    ],
)
def test_full_heat_has_the_colour_maps_last_colour(
    colormap: str, first: tuple[int, int, int], last: tuple[int, int, int]
) -> None:
    result = gradcam.overlay(PICTURE, np.ones((7, 7)), alpha=1, colormap=colormap, region=REGION)
    assert abs(inside(result).astype(int) - last).max() <= 1
    assert (inside(result) == inside(result)[0, 0]).all()
    assert abs(np.array(table_of(COLORMAPS[colormap])[0]) - first).max() <= 1


@pytest.mark.parametrize(
    "convert",
    [
        torch.from_numpy, lambda heat: torch.from_numpy(heat).requires_grad_(),
        lambda heat: torch.from_numpy(heat.astype(np.float64)), lambda heat: heat.astype(np.float64),
        lambda heat: heat.tolist(), lambda heat: np.asfortranarray(heat),
    ],
)  # fmt: skip
def test_a_heatmap_may_be_a_tensor_or_an_array(convert: Callable[[np.ndarray], object]) -> None:
    expected = gradcam.overlay(PICTURE, HEAT, region=REGION)
    np.testing.assert_array_equal(gradcam.overlay(PICTURE, convert(HEAT), region=REGION), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_heatmap_may_be_in_half_precision(dtype: torch.dtype) -> None:
    heat = torch.from_numpy(HEAT).to(dtype)
    expected = gradcam.overlay(PICTURE, heat.float().numpy(), region=REGION)
    np.testing.assert_array_equal(gradcam.overlay(PICTURE, heat, region=REGION), expected)


def centre_of_heat(heat: np.ndarray, region: tuple[int, int, int, int]) -> tuple[float, float]:
    """Return the centre of mass of the opaque part of an overlay: pixels from the top left corner of a 200 x 300 image."""
    white, black = np.full((200, 300, 3), 255, np.uint8), np.zeros((200, 300, 3), np.uint8)
    through = gradcam.overlay(white, heat, region=region).astype(int) - gradcam.overlay(black, heat, region=region)
    opacity = 255 - through[..., 0]
    rows, columns = np.mgrid[:200, :300] + 0.5
    return (rows * opacity).sum() / opacity.sum(), (columns * opacity).sum() / opacity.sum()


@pytest.mark.parametrize(
    ("cell", "region", "centre"),
    [
        ((2, 4), (10, 20, 140, 210), (10 + 2.5 * 20, 20 + 4.5 * 30)),
        ((3, 3), (0, 0, 200, 300), (100, 150)),
        ((4, 2), (57, 87, 140, 210), (57 + 4.5 * 20, 87 + 2.5 * 30)),
    ],
)
def test_a_hot_cell_lies_where_it_should(
    cell: tuple[int, int], region: tuple[int, int, int, int], centre: tuple[float, float]
) -> None:
    heat = np.zeros((7, 7))
    heat[cell] = 1
    assert centre_of_heat(heat, region) == pytest.approx(centre, abs=0.1)


def test_a_hot_spot_of_a_large_heatmap_lies_where_it_should() -> None:
    heat = np.zeros((224, 448))
    heat[64:80, 128:160] = 1  # its centre: row 72 of 224, column 144 of 448
    region = (20, 30, 56, 112)
    assert centre_of_heat(heat, region) == pytest.approx((20 + 72 / 4, 30 + 144 / 4), abs=0.1)


def test_a_large_heatmap_is_averaged_not_sampled() -> None:
    heat = np.zeros((48, 64))
    heat[::2] = 0.5  # every second row, so a quarter on average
    expected = gradcam.overlay(PICTURE, np.full((24, 32), 0.25))
    assert abs(gradcam.overlay(PICTURE, heat).astype(int) - expected).max() <= 1


def test_neither_the_picture_nor_the_heatmap_is_changed() -> None:
    picture, heat = PICTURE.copy(), HEAT.copy()
    result = gradcam.overlay(picture, heat, region=REGION)
    np.testing.assert_array_equal(picture, PICTURE)
    np.testing.assert_array_equal(heat, HEAT)
    assert not np.shares_memory(result, picture)


def test_a_picture_that_is_a_view_is_drawn_on_like_its_copy() -> None:
    view = PICTURE[::-1, ::2]
    np.testing.assert_array_equal(gradcam.overlay(view, HEAT), gradcam.overlay(view.copy(), HEAT))


def test_rounding_errors_beyond_the_range_are_cut_off() -> None:
    two, nearly = PICTURE[:1, :2], np.array([[-5e-5, 1 + 5e-5]])
    np.testing.assert_array_equal(gradcam.overlay(two, nearly), gradcam.overlay(two, np.array([[0.0, 1.0]])))


@pytest.mark.parametrize(
    ("heatmap", "message"),
    [
        (np.full((7, 7), np.nan), "nan"), (np.array([[0.5, np.nan]]), "nan"), (np.array([[0.5, np.inf]]), "inf"),
        (np.full((7, 7), 255.0), "values from 255 to 255"), (np.array([[-0.1, 0.5]]), "values from -0.1 to 0.5"),
        (np.ones((1, 7, 7)), r"float64 \(1, 7, 7\)"), (np.ones(7), r"float64 \(7,\)"),
        (np.ones((0, 7)), r"float64 \(0, 7\)"), (np.ones((7, 7), np.int64), r"int64 \(7, 7\)"),
        (np.ones((7, 7), np.uint8), r"uint8 \(7, 7\)"), (np.ones((7, 7), bool), r"bool \(7, 7\)"),
        (torch.ones(7, 7, dtype=torch.int64), r"int64 \(7, 7\)"),
        (torch.ones(1, 1, 7, 7), r"float32 \(1, 1, 7, 7\)"), ("heat", "expected one map"),
        (None, "expected one map"),
    ],
)  # fmt: skip
def test_a_heatmap_of_another_form_is_refused(heatmap: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        gradcam.overlay(PICTURE, heatmap)


@pytest.mark.parametrize(
    "region",
    [
        (-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 25, 5), (0, 0, 5, 33), (20, 0, 5, 5), (0, 28, 5, 5), (0, 0, 0, 5),
        (0, 0, 5, 0), (0, 0, 5), (0, 0, 5, 5, 5), (0.5, 0, 5, 5), (), "abcd", 7,
    ],
)  # fmt: skip
def test_a_region_that_is_not_in_the_picture_is_refused(region: object) -> None:
    with pytest.raises(ImageError, match=r"The region .*\(top, left, height, width\)"):
        gradcam.overlay(PICTURE, HEAT, region=region)


@pytest.mark.parametrize("region", [[5, 7, 12, 20], np.array(REGION)])
def test_a_region_may_be_any_four_whole_numbers(region: object) -> None:
    expected = gradcam.overlay(PICTURE, HEAT, region=REGION)
    np.testing.assert_array_equal(gradcam.overlay(PICTURE, HEAT, region=region), expected)


@pytest.mark.parametrize(
    ("name", "offered"), [("turb", "turbo"), ("virdis", "viridis"), ("Jett", "jet"), ("zzz", "turbo")]
)
def test_an_unknown_colour_map_is_refused_with_the_nearest(name: str, offered: str) -> None:
    with pytest.raises(GradcamError, match=f"no colour map {name!r}. Nearest: .*'{offered}'"):
        gradcam.overlay(PICTURE, HEAT, colormap=name)


def test_every_colour_map_of_opencv_has_its_number() -> None:
    numbers = {"jet": cv2.COLORMAP_JET, "turbo": cv2.COLORMAP_TURBO, "deepgreen": cv2.COLORMAP_DEEPGREEN}
    assert {name: find_colormap(name) for name in numbers} == numbers
    assert len(COLORMAPS) == sum(name.startswith("COLORMAP_") for name in dir(cv2))


def test_a_sheet_has_its_pictures_in_rows_with_white_between() -> None:
    red, green, blue = (np.full((10, 20, 3), colour, np.uint8) for colour in ([255, 0, 0], [0, 128, 0], [0, 0, 255]))
    result = join_rows([[red, green], [blue[:, :10]]], height=30)
    expected = np.full((30 + GAP_PIXELS + 30, 60 + GAP_PIXELS + 60, 3), 255, np.uint8)
    expected[:30, :60] = [255, 0, 0]
    expected[:30, 60 + GAP_PIXELS :] = [0, 128, 0]
    expected[30 + GAP_PIXELS :, :30] = [0, 0, 255]
    np.testing.assert_array_equal(result, expected)


def test_a_sheet_of_one_picture_is_the_picture() -> None:
    np.testing.assert_array_equal(join_rows([[PICTURE]], height=24), PICTURE)


def test_a_sheet_shrinks_pictures_by_averaging() -> None:
    fine = np.zeros((40, 40, 3), np.uint8)
    fine[::2] = [200, 100, 50]
    assert (join_rows([[fine]], height=20) == [100, 50, 25]).all()


def test_a_sheet_holds_pictures_of_extreme_shapes() -> None:
    assert join_rows([[np.zeros((2000, 3, 3), np.uint8)], [PICTURE]], height=24).shape == (24 + GAP_PIXELS + 24, 32, 3)


@pytest.mark.parametrize("alpha", ["x", float("nan"), -0.1, 1.1, 50, [0.5]])
def test_an_opacity_out_of_range_or_of_a_wrong_kind_is_refused(alpha: Any) -> None:
    with pytest.raises(GradcamError, match="alpha is .*, expected an opacity from 0 to 1"):
        gradcam.overlay(np.zeros((4, 4, 3), np.uint8), np.zeros((2, 2), np.float32), alpha=alpha)


def test_a_colour_map_of_a_wrong_kind_is_refused() -> None:
    with pytest.raises(GradcamError, match=r"no colour map \['x'\]"):
        find_colormap(["x"])  # type: ignore[arg-type]


def test_signed_colours_by_hand() -> None:
    picture = np.full((1, 2, 3), 100, np.uint8)
    drawn = gradcam.overlay(picture, np.array([[1.0, -1.0]]), signed=True, alpha=0.5)
    assert drawn.tolist() == [[[round((100 + 225) / 2 - 0.01), 50, 68], [62, 62, 152]]]  # halves round to even


def test_negative_values_need_signed() -> None:
    picture = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(ImageError, match=r"from -1 to 0, expected 0 to 1 \(-1 to 1 with signed=True\)"):
        gradcam.overlay(picture, np.array([[-1.0, 0.0]]))
    with pytest.raises(ImageError, match=r"from -1.5 to 0, expected -1 to 1\."):
        gradcam.overlay(picture, np.array([[-1.5, 0.0]]), signed=True)


def test_interpolation_gives_no_rim_of_the_other_sign() -> None:
    heatmap = np.zeros((7, 7))
    heatmap[3, 3] = 1
    white = np.full((200, 200, 3), 255, np.uint8)
    drawn = gradcam.overlay(white, heatmap, signed=True).astype(int)
    assert (drawn[..., 0] >= drawn[..., 2]).all()  # no pixel has more blue than red
    assert drawn[100, 100, 2] < 160


def plain_overlay(
    picture: np.ndarray, heat: np.ndarray, alpha: float, colormap: str, kind: type, *, blend: str = "fade"
) -> np.ndarray:
    """Compute the overlay with whole arrays in one floating-point dtype; a map with negative values is signed."""
    signed = heat.min() < 0
    steps = 127 if signed else 255
    levels = np.rint(heat * np.float32(steps)).astype(int)
    values = levels.astype(kind) / kind(steps)
    strength = abs(values)[..., None]
    if signed:
        warm, cold = (
            np.array(pair, kind) for pair in (((255, 205, 70), (225, 0, 35)), ((90, 225, 255), (25, 25, 205)))
        )
        pairs = np.where((values < 0)[None, ..., None], cold[:, None, None], warm[:, None, None])
        colours = pairs[0] * (1 - strength) + pairs[1] * strength
    else:
        colours = np.array(table_of(COLORMAPS[colormap]), kind)[levels]
    opacity = (
        kind(alpha)
        * {
            "fade": np.minimum(1, 2 * strength),
            "grow": strength * (2 - strength),
            "uniform": np.minimum(1, 2 * strength) if signed else np.ones_like(strength),
        }[blend]
    )
    return picture * (1 - opacity) + colours * opacity


@pytest.mark.parametrize("band", [1, 37, 2**16])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("colormap", COLORMAPS)
def test_every_pixel_is_the_formulas_to_the_last_rounding(
    colormap: str, signed: bool, band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradcam.images.draw.PIXELS_PER_BAND", band)  # Blend the rows in small bands.
    random = np.random.default_rng(list(COLORMAPS).index(colormap))
    alphas = [0, 0.5, 1, *random.random(5)]
    for alpha, blend in zip(alphas, ["fade", "grow", "uniform"] * 3):
        height, width = random.integers(1, 40, 2)
        picture = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        heat = random.random((height, width), dtype=np.float32)
        heat = heat * 2 - 1 if signed else heat
        heat.flat[0] = -1 if signed else 0
        look: Any = {"alpha": alpha, "colormap": colormap, "blend": blend, "signed": signed}
        drawn = gradcam.overlay(picture, heat, base="color", **look)
        exact = plain_overlay(picture, heat, alpha, colormap, np.float64, blend=blend)
        assert abs(drawn - exact).max() <= 0.5001
        single = plain_overlay(picture, heat, alpha, colormap, np.float32, blend=blend)
        assert (drawn == np.rint(single)).all()  # exact halves round to the even number
        grey = gradcam.overlay(picture, heat, base="gray", **look | {"alpha": 0})
        np.testing.assert_array_equal(
            gradcam.overlay(picture, heat, base="gray", **look), gradcam.overlay(grey, heat, base="color", **look)
        )


@pytest.mark.parametrize(
    "is_5", [False, pytest.param(True, marks=pytest.mark.skipif(cv2.__version__ < "5", reason="4"))]
)
@pytest.mark.parametrize("signed", [False, True])
def test_large_pictures_follow_the_formula_too(signed: bool, is_5: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcam.images.draw.HAS_16_BIT_LUT", is_5)  # true in OpenCV 5, false in OpenCV 4
    picture = RNG.integers(0, 256, (768, 1024, 3), dtype=np.uint8)  # several bands; the last band is not full
    heat = RNG.random((768, 1000), dtype=np.float32) * (2 if signed else 1) - (1 if signed else 0)
    drawn = gradcam.overlay(picture, heat, base="color", region=(0, 20, 768, 1000), signed=signed)
    exact = plain_overlay(picture[:, 20:1020], heat, 0.5, "turbo", np.float64)
    assert abs(drawn[:, 20:1020] - exact).max() <= 0.5001
    assert (drawn[:, 20:1020] == np.rint(plain_overlay(picture[:, 20:1020], heat, 0.5, "turbo", np.float32))).all()
    np.testing.assert_array_equal(drawn[:, :20], picture[:, :20])
    np.testing.assert_array_equal(drawn[:, 1020:], picture[:, 1020:])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_the_kind_of_the_opacity_does_not_count(kind: type) -> None:
    drawn = gradcam.overlay(PICTURE, HEAT, alpha=kind(0.375), region=REGION)
    np.testing.assert_array_equal(drawn, gradcam.overlay(PICTURE, HEAT, alpha=0.375, region=REGION))


def test_drawing_in_several_threads_gives_the_same_pictures() -> None:
    jobs = [(name, bool(number % 2)) for number, name in enumerate(COLORMAPS)] * 4
    picture, heat = np.tile(PICTURE, (8, 8, 1)), np.tile(HEAT, (2, 2))

    def draw(job: tuple[str, bool]) -> np.ndarray:
        return gradcam.overlay(picture, heat, colormap=job[0], signed=job[1])

    with ThreadPoolExecutor(8) as pool:
        for actual, expected in zip(pool.map(draw, jobs), map(draw, jobs)):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("shape", "region", "message"),
    [
        ((224, 224), None, r"224 x 224 is stretched and distorted over the whole image of 300 x 200.* region="),
        ((20, 30), None, r"30 x 20 is stretched over the whole image of 300 x 200.* region="),
        ((200, 300), None, None), ((20, 20), (0, 50, 200, 200), None), ((20, 20), (0, 0, 200, 300), None),
    ],
)  # fmt: skip
def test_a_heatmap_of_another_size_needs_a_region(shape: Any, region: Any, message: str | None) -> None:
    def draw() -> None:
        gradcam.overlay(np.zeros((200, 300, 3), np.uint8), np.ones(shape, np.float32), region=region)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if message is None:
            draw()
        else:
            with pytest.raises(GradcamWarning, match=message):
                draw()
