"""Test the grid pointing game: by hand, against its definition in slow loops, and with control maps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import gradcam
from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import ImageError
from gradcam.evaluation.heatmap_sources import CONTROLS
from gradcam.evaluation.metrics.mosaic import grid_pointing_game
from tests.colours import COLOURS, ColourNet, picture


def compute_slowly(heatmaps: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Böhle et al., equation 14, pixel by pixel in float64.

    Of several maxima, count the share in the right cell.
    """
    count, _, height, width = heatmaps.shape
    mass, hits = torch.zeros(2, count, 4, dtype=torch.float64)
    for m in range(count):
        for k in range(4):
            total_mass = mass_inside = maxima = right_maxima = 0.0
            maximum = max(0.0, float(heatmaps[m, k].max()))
            for y in range(height):
                for x in range(width):
                    value = float(heatmaps[m, k, y, x])
                    is_own = (y >= height // 2) * 2 + (x >= width // 2) == k
                    total_mass += max(value, 0)
                    mass_inside += max(value, 0) * is_own
                    maxima += value == maximum > 0
                    right_maxima += (value == maximum > 0) * is_own
            mass[m, k] = mass_inside / total_mass if total_mass else 0
            hits[m, k] = right_maxima / maxima if maxima else 0
    return mass, hits


def order_slowly(heatmaps: Tensor) -> Tensor:
    """Return how often a pixel of the map's cell exceeds one of another cell, pair by pair. Ties count half."""
    count, _, height, width = heatmaps.shape
    order = torch.zeros(count, 4, dtype=torch.float64)
    for m in range(count):
        for k in range(4):
            places = [(y, x) for y in range(height) for x in range(width)]
            in_cell = [(y >= height // 2) * 2 + (x >= width // 2) == k for y, x in places]
            values = [float(heatmaps[m, k, y, x]) for y, x in places]
            inside = [value for value, is_own in zip(values, in_cell) if is_own]
            outside = [value for value, is_own in zip(values, in_cell) if not is_own]
            won = sum((a > b) + (a == b) / 2 for a in inside for b in outside)
            order[m, k] = won / (len(inside) * len(outside))
    return order


def only(cell: int, size: int = 4) -> Tensor:
    half = size // 2
    heatmap = torch.zeros(size, size)
    heatmap[cell // 2 * half :, cell % 2 * half :][:half, :half] = 1
    return heatmap


@pytest.mark.parametrize("size", [(6, 8), (7, 5), (2, 2)])
def test_it_is_the_papers_definition(size: tuple[int, int]) -> None:
    heatmaps = torch.randn(5, 4, *size)
    game = grid_pointing_game(heatmaps)
    mass, hits = compute_slowly(heatmaps)
    assert game.mass.dtype == game.hits.dtype == torch.float32
    torch.testing.assert_close(game.mass.double(), mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(game.hits.double(), hits)
    assert 0 < hits.mean() < 1
    torch.testing.assert_close(game.order.double(), order_slowly(heatmaps), rtol=0, atol=1e-7)
    tied = (heatmaps * 2).round()
    torch.testing.assert_close(grid_pointing_game(tied).order.double(), order_slowly(tied), rtol=0, atol=1e-7)


def test_a_map_worked_by_hand() -> None:
    heatmap = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 0], [4, 0, 0, -9], [0, 1, 0, 0]])
    game = grid_pointing_game(heatmap.expand(1, 4, 4, 4))
    assert game.mass[0].tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0])
    assert game.hits[0].tolist() == [0, 0, 1, 0]
    # The first cell has 1, 0, 0, 0; the other cells have 2, 0, 0, 0, then 4, 0, 0, 1, then 0, -9, 0, 0. Of the 48
    # pairs, the first cell is greater in 9 + 3 and equal in 1 + 24.
    assert game.order[0, 0].item() == pytest.approx((9 + 3 + 25 / 2) / 48)


@pytest.mark.parametrize("cell", range(4))
def test_all_in_one_cell_is_right_for_that_cells_class_alone(cell: int) -> None:
    game = grid_pointing_game(only(cell).expand(1, 4, 4, 4))
    expected = [float(k == cell) for k in range(4)]
    assert game.mass[0].tolist() == game.hits[0].tolist() == expected
    # The cells of the other classes are zero: equal to two of the three cells around them, and less than one.
    assert game.order[0].tolist() == pytest.approx([1.0 if k == cell else 1 / 3 for k in range(4)])


@pytest.mark.parametrize("power", [2, 4, 8])
def test_sharpening_raises_the_mass_and_not_the_order(power: int) -> None:
    heatmaps = torch.rand(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    heatmaps[:, 0, :8, :8] += 0.2
    plain, sharp = grid_pointing_game(heatmaps), grid_pointing_game(heatmaps**power)
    assert torch.equal(sharp.order, plain.order)
    assert torch.equal(sharp.hits, plain.hits)
    assert (sharp.mass[:, 0] > plain.mass[:, 0] + 0.02).all()


def test_the_most_mass_that_a_map_of_a_layers_grid_can_have() -> None:
    """A map that is 1 in its cell of 14 x 14 and 0 elsewhere loses mass only by resizing.

    The expected value adds up the weights of PyTorch's cubic interpolation along each axis.
    """
    maps = torch.zeros(1, 4, 14, 14)
    for k in range(4):
        maps[0, k, k // 2 * 7 :, k % 2 * 7 :][:7, :7] = 1
    game = grid_pointing_game(to_heatmaps(maps, (448, 448)))
    inside = outside = 0.0
    for pixel in range(448):
        position = (pixel + 0.5) / 32 - 0.5
        value = 0.0
        for cell in range(math.floor(position) - 1, math.floor(position) + 3):
            x, a = abs(position - cell), -0.75
            weight = (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4)
            value += weight * (min(max(cell, 0), 13) < 7)
        inside, outside = inside + max(value, 0) * (pixel < 224), outside + max(value, 0) * (pixel >= 224)
    expected = (inside / (inside + outside)) ** 2
    assert expected == pytest.approx(0.967, abs=5e-4)
    assert game.mass[0].tolist() == pytest.approx([expected] * 4, abs=5e-4)
    assert game.order.min() > 0.9999
    assert game.hits.tolist() == [[1.0] * 4]


def test_rules_for_maps_without_a_direction() -> None:
    constant, blank, negative = torch.full((4, 4), 0.3), torch.zeros(4, 4), torch.full((4, 4), -1.0)
    tied = only(0)
    tied[3, 3] = 1
    game = grid_pointing_game(torch.stack([constant, blank, negative, tied])[:, None].expand(4, 4, 4, 4))
    assert game.mass[0].tolist() == game.hits[0].tolist() == [0.25] * 4
    assert game.order[:3].tolist() == [[0.5] * 4] * 3
    assert game.mass[1:3].count_nonzero() == game.hits[1:3].count_nonzero() == 0
    assert game.hits[3].tolist() == pytest.approx([0.8, 0, 0, 0.2])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_makes_no_difference(scale: float) -> None:
    heatmaps = torch.rand(3, 4, 6, 6)
    game, scaled_game = grid_pointing_game(heatmaps), grid_pointing_game(heatmaps * scale)
    torch.testing.assert_close(game.mass, scaled_game.mass)
    assert torch.equal(game.hits, scaled_game.hits)
    assert torch.equal(game.order, scaled_game.order)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_map_that_does_not_know_the_class_is_at_chance(name: str) -> None:
    maps = CONTROLS[name].make(torch.randn(6, 3, 32, 32), 0)
    game = grid_pointing_game(maps[:, None].expand(-1, 4, -1, -1))
    torch.testing.assert_close(game.mass.mean(1), torch.full((6,), 0.25))
    torch.testing.assert_close(game.hits.mean(1), torch.full((6,), 0.25))
    torch.testing.assert_close(game.order.mean(1), torch.full((6,), 0.5))


def test_maps_of_the_colour_network_are_right_before_the_rotation_and_wrong_after_it() -> None:
    cells = [picture(colour) for colour in ("red", "cyan", "blue", "yellow")]
    mosaic = torch.cat([torch.cat(cells[:2], 2), torch.cat(cells[2:], 2)], 1)[None]
    classes = [[COLOURS.index(colour) for colour in ("red", "cyan", "blue", "yellow")]]
    model = ColourNet().eval()
    explained = gradcam.compare(model, mosaic, layers=["active", "turn"], methods=["gradcam"], target=classes)
    for layer, share in (("active", 1.0), ("turn", 0.0)):
        game = grid_pointing_game(explained[layer, "gradcam"])
        assert game.mass[0].tolist() == pytest.approx([share] * 4, abs=1e-6)
        assert game.hits[0].tolist() == [share] * 4
        assert game.order[0].tolist() == pytest.approx([1.0 if share else 1 / 3] * 4)


def test_arrays_and_views_are_taken_and_left_as_they_are() -> None:
    heatmaps = torch.randn(2, 4, 6, 6)
    before = heatmaps.clone()
    expected = grid_pointing_game(heatmaps)
    turned = np.asfortranarray(heatmaps.numpy())
    assert torch.equal(grid_pointing_game(turned).mass, expected.mass)
    assert torch.equal(grid_pointing_game(heatmaps.half().requires_grad_()).hits, expected.hits)
    assert torch.equal(heatmaps, before)


@pytest.mark.parametrize(
    ("heatmaps", "message"),
    [
        (torch.zeros(2, 3, 4, 4), r"shape \(2, 3, 4, 4\), expected \(M,4,H,W\)"),
        (torch.zeros(4, 4, 4), r"shape \(4, 4, 4\), expected \(M,4,H,W\)"),
        (torch.zeros(1, 4, 1, 4), r"shape \(1, 4, 1, 4\)"),
        ([[1.0]], "expected a tensor or an array"),
        (torch.full((1, 4, 4, 4), float("nan")), "NaN or infinite"),
    ],
)
def test_errors_are_reported(heatmaps: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        grid_pointing_game(heatmaps)
