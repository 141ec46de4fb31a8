"""Test the pointing games: against slow loops and TorchRay's rule, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import energy_pointing_game, order_pointing_game, pointing_game


def make_case(count: int, height: int = 40, width: int = 52) -> tuple[Tensor, Tensor]:
    """Return noise as maps, and boxes of all sizes as objects."""
    generator = torch.Generator().manual_seed(7)
    heatmaps = torch.rand(count, height, width, generator=generator)
    masks = torch.zeros(count, height, width, dtype=torch.bool)
    for mask in masks:
        box_height, box_width = (
            1 + int(torch.randint(0, length // 2, (1,), generator=generator)) for length in (height, width)
        )
        y0 = int(torch.randint(0, height - box_height + 1, (1,), generator=generator))
        x0 = int(torch.randint(0, width - box_width + 1, (1,), generator=generator))
        mask[y0 : y0 + box_height, x0 : x0 + box_width] = True
    return heatmaps, masks


def point_slowly(heatmap: Tensor, mask: Tensor, tolerance: float) -> float:
    """Return the share of the maxima that are within the tolerance of a pixel of the object."""
    values, inside = heatmap.tolist(), mask.nonzero().tolist()
    maximum = max(map(max, values))
    maxima = [(row, column) for row, line in enumerate(values) for column, value in enumerate(line) if value == maximum]
    near = [any(math.hypot(row - y, column - x) <= tolerance for y, x in inside) for row, column in maxima]
    return sum(near) / len(maxima)


def point_as_torchray(heatmap: Tensor, mask: Tensor, tolerance: float) -> float:
    """Apply TorchRay's rule: a disc around the first maximum, without its border, meets the object."""
    row, column = divmod(int(heatmap.argmax()), heatmap.shape[1])
    for y in range(mask.shape[0]):
        for x in range(mask.shape[1]):
            if (y - row) ** 2 + (x - column) ** 2 < tolerance**2 and mask[y, x]:
                return 1.0
    return 0.0


@pytest.mark.parametrize("tolerance", [0, 1, 2.5, 5, 15, 1000])
def test_the_pointing_game_is_that_of_a_slow_loop(tolerance: float) -> None:
    heatmaps, masks = make_case(40)
    expected = [point_slowly(heatmap, mask, tolerance) for heatmap, mask in zip(heatmaps, masks)]
    scores = pointing_game(heatmaps, masks, tolerance=tolerance)
    assert scores.tolist() == expected
    assert scores.dtype == torch.float32
    assert tolerance == 1000 or 0 < sum(expected) < 40  # the cases contain hits and misses


def test_the_pointing_game_is_torchrays_but_at_the_very_border() -> None:
    heatmaps, masks = make_case(60)
    expected = [point_as_torchray(heatmap, mask, 15.01) for heatmap, mask in zip(heatmaps, masks)]
    assert pointing_game(heatmaps, masks).tolist() == expected


def test_a_maximum_at_exactly_the_tolerance_is_near_enough() -> None:
    """A distance of 15 counts along a row, along a column, and as the hypotenuse of legs of 9 and 12."""
    masks = torch.zeros(1, 60, 60, dtype=torch.bool)
    masks[0, 30, 30] = True
    for row, column, hit in [(30, 45, 1), (30, 46, 0), (15, 30, 1), (14, 30, 0), (39, 42, 1), (40, 42, 0), (21, 18, 1)]:
        heatmaps = torch.zeros(1, 60, 60)
        heatmaps[0, row, column] = 1
        assert pointing_game(heatmaps, masks).item() == hit, (row, column)
    heatmaps = torch.zeros(1, 60, 60)
    heatmaps[0, 39, 42] = 1
    assert point_as_torchray(heatmaps[0], masks[0], 15) == 0  # TorchRay excludes the exact distance


def test_the_tolerance_reaches_around_no_border() -> None:
    heatmaps, masks = torch.zeros(2, 30, 40), torch.zeros(2, 30, 40, dtype=torch.bool)
    masks[:, :, 0] = True
    masks[1] = False
    masks[1, 0] = True
    heatmaps[0, 3, 39] = 1
    heatmaps[1, 29, 3] = 1
    assert pointing_game(heatmaps, masks).tolist() == [0, 0]


def test_right_wrong_constant_and_blank_maps_by_hand() -> None:
    """The object is a quarter of the image, so without tolerance a constant map scores 1/4."""
    masks = torch.zeros(4, 8, 8, dtype=torch.bool)
    masks[:, :4, :4] = True
    heatmaps = torch.zeros(4, 8, 8)
    heatmaps[0, :4, :4] = 0.7
    heatmaps[1, 4:] = 0.7
    heatmaps[2] = 0.7
    assert pointing_game(heatmaps, masks, tolerance=0).tolist() == [1, 0, 0.25, 0]
    assert energy_pointing_game(heatmaps, masks).tolist() == [1, 0, 0.25, 0]
    assert pointing_game(heatmaps, masks, tolerance=1).tolist() == [1, pytest.approx(4 / 32), pytest.approx(24 / 64), 0]


def test_several_maxima_count_by_their_share() -> None:
    heatmaps, masks = torch.zeros(1, 5, 5), torch.zeros(1, 5, 5, dtype=torch.bool)
    heatmaps[0, 0, 0] = heatmaps[0, 4, 4] = heatmaps[0, 0, 4] = heatmaps[0, 2, 2] = 3
    heatmaps[0, 1, 1] = 2.9
    masks[0, :2, :2] = True
    assert pointing_game(heatmaps, masks, tolerance=0).item() == 0.25


def test_signed_maps_point_to_their_largest_value_and_have_the_mass_of_what_is_positive() -> None:
    heatmaps = torch.tensor([[[-5.0, -1.0], [-2.0, -9.0]], [[-5.0, 1.0], [3.0, -9.0]]])
    masks = torch.tensor([[[False, True], [False, False]]] * 2)
    assert pointing_game(heatmaps, masks, tolerance=0).tolist() == [1, 0]
    assert energy_pointing_game(heatmaps, masks).tolist() == [0, 0.25]


def test_the_scale_of_a_map_does_not_matter() -> None:
    heatmaps, masks = make_case(6)
    for scale in (1e-30, 255.0, 1e30):
        assert torch.allclose(energy_pointing_game(heatmaps * scale, masks), energy_pointing_game(heatmaps, masks))
        assert pointing_game(heatmaps * scale, masks).tolist() == pointing_game(heatmaps, masks).tolist()


def test_the_mass_is_that_of_a_slow_sum() -> None:
    heatmaps, masks = make_case(10)
    heatmaps = heatmaps - 0.3
    for heatmap, mask, mass in zip(heatmaps, masks, energy_pointing_game(heatmaps, masks)):
        positive = [max(0.0, value) for value in heatmap.flatten().tolist()]
        inside = [value for value, is_inside in zip(positive, mask.flatten().tolist()) if is_inside]
        assert mass.item() == pytest.approx(math.fsum(inside) / math.fsum(positive), rel=1e-5)


def test_the_order_is_the_area_under_the_roc_curve() -> None:
    """Compare with SciPy's rank test, and by hand; values may be negative and tied."""
    heatmaps, masks = make_case(6)
    for values in (heatmaps, heatmaps - 0.5, (heatmaps * 3).round()):
        for heatmap, mask, order in zip(values, masks, order_pointing_game(values, masks)):
            inside, outside = heatmap[mask].double().numpy(), heatmap[~mask].double().numpy()
            expected = mannwhitneyu(inside, outside).statistic / (len(inside) * len(outside))
            assert order.item() == pytest.approx(expected, abs=1e-7)
    values, mask = torch.tensor([[[3.0, 1.0], [1.0, -2.0]]]), torch.tensor([[[True, True], [False, False]]])
    assert order_pointing_game(values, mask).item() == (2 + 1.5) / 4


def test_rules_for_the_order_of_maps_and_objects_without_one() -> None:
    mask = torch.zeros(3, 4, 4, dtype=torch.bool)
    mask[:2, :2], mask[2] = True, True
    heatmaps = torch.stack([torch.zeros(4, 4), torch.full((4, 4), 0.7), torch.rand(4, 4)])
    assert order_pointing_game(heatmaps, mask).tolist() == [0.5] * 3


def test_a_power_of_a_map_has_another_mass_and_the_same_order() -> None:
    heatmaps, masks = make_case(8)
    heatmaps[masks] += 0.1
    assert torch.equal(order_pointing_game(heatmaps**8, masks), order_pointing_game(heatmaps, masks))
    assert (energy_pointing_game(heatmaps**8, masks) > energy_pointing_game(heatmaps, masks)).all()


def test_a_map_does_not_depend_on_its_neighbours() -> None:
    heatmaps, masks = make_case(7)
    for game in (pointing_game, energy_pointing_game, order_pointing_game):
        alone = torch.cat([game(heatmaps[i : i + 1], masks[i : i + 1]) for i in range(7)])
        assert torch.equal(game(heatmaps, masks), alone)


def test_maps_of_other_libraries_are_arrays_or_have_a_channel() -> None:
    heatmaps, masks = make_case(4)
    expected = energy_pointing_game(heatmaps, masks)
    assert torch.equal(energy_pointing_game(heatmaps.numpy(), masks.numpy()), expected)
    assert torch.equal(energy_pointing_game(heatmaps[:, None].double(), masks), expected)


def test_nothing_that_was_given_is_changed() -> None:
    heatmaps, masks = make_case(3)
    before = heatmaps.clone(), masks.clone()
    pointing_game(heatmaps, masks)
    energy_pointing_game(heatmaps, masks)
    assert torch.equal(heatmaps, before[0])
    assert torch.equal(masks, before[1])


@pytest.mark.parametrize("game", [pointing_game, energy_pointing_game, order_pointing_game])
@pytest.mark.parametrize(
    ("heatmaps", "masks", "message"),
    [
        (torch.ones(1, 4, 4), torch.ones(1, 4, 4), r"The masks are torch.float32 \(1, 4, 4\), expected bool \(N,H,W\)"),
        (torch.ones(1, 4, 4), torch.ones(4, 4, dtype=torch.bool), "expected bool"),
        (torch.ones(1, 4, 4), None, "The masks are None"),
        (torch.ones(1, 4, 4), torch.ones(1, 4, 5, dtype=torch.bool), r"\(1, 4, 4\), expected \(1, 4, 5\)"),
        (torch.ones(2, 4, 4), torch.zeros(2, 4, 4, dtype=torch.bool), "mask of image 0 has no object"),
        (torch.full((1, 4, 4), math.nan), torch.ones(1, 4, 4, dtype=torch.bool), "NaN"),
    ],
)
def test_what_cannot_be_played(game: object, heatmaps: Tensor, masks: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        game(heatmaps, masks)  # type: ignore[operator]


@pytest.mark.parametrize("tolerance", [-1, math.inf, math.nan, "15", True])
def test_a_tolerance_that_is_no_length(tolerance: object) -> None:
    with pytest.raises(GradcamError, match="tolerance is .*, expected a distance in pixels"):
        pointing_game(torch.ones(1, 4, 4), torch.ones(1, 4, 4, dtype=torch.bool), tolerance=tolerance)  # type: ignore[arg-type]
