"""The grid pointing game against values worked by hand, its definition written slowly, and maps that know nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import gradcam
from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import ImageError
from gradcam.evaluation.controls import CONTROLS
from gradcam.evaluation.metrics.grid import grid_pointing_game
from tests.colours import COLOURS, ColourNet, picture


def slowly(heatmaps: Tensor) -> tuple[Tensor, Tensor]:
    """Böhle et al., equation 14, pixel by pixel in float64; of several maxima the share in the right cell."""
    count, _, height, width = heatmaps.shape
    mass, hits = torch.zeros(2, count, 4, dtype=torch.float64)
    for m in range(count):
        for k in range(4):
            total = inside = maxima = right = 0.0
            largest = max(0.0, float(heatmaps[m, k].max()))
            for y in range(height):
                for x in range(width):
                    value = float(heatmaps[m, k, y, x])
                    is_own = (y >= height // 2) * 2 + (x >= width // 2) == k
                    total += max(value, 0)
                    inside += max(value, 0) * is_own
                    maxima += value == largest > 0
                    right += (value == largest > 0) * is_own
            mass[m, k] = inside / total if total else 0
            hits[m, k] = right / maxima if maxima else 0
    return mass, hits


def order_slowly(heatmaps: Tensor) -> Tensor:
    """How often a pixel of the own cell has more than one of the others, pair by pair; ties count half."""
    count, _, height, width = heatmaps.shape
    tensor = torch.zeros(count, 4, dtype=torch.float64)
    for m in range(count):
        for k in range(4):
            places = [(y, x) for y in range(height) for x in range(width)]
            own = [(y >= height // 2) * 2 + (x >= width // 2) == k for y, x in places]
            values = [float(heatmaps[m, k, y, x]) for y, x in places]
            ours = [value for value, is_own in zip(values, own) if is_own]
            others = [value for value, is_own in zip(values, own) if not is_own]
            won = sum((our > other) + (our == other) / 2 for our in ours for other in others)
            tensor[m, k] = won / (len(ours) * len(others))
    return tensor


def only(cell: int, size: int = 4) -> Tensor:
    half = size // 2
    heatmap = torch.zeros(size, size)
    heatmap[cell // 2 * half :, cell % 2 * half :][:half, :half] = 1
    return heatmap


@pytest.mark.parametrize("size", [(6, 8), (7, 5), (2, 2)])
def test_it_is_the_papers_definition(size: tuple[int, int]) -> None:
    heatmaps = torch.randn(5, 4, *size)
    actual = grid_pointing_game(heatmaps)
    mass, hits = slowly(heatmaps)
    assert actual.mass.dtype == actual.hits.dtype == torch.float32
    torch.testing.assert_close(actual.mass.double(), mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.hits.double(), hits)
    assert 0 < hits.mean() < 1
    torch.testing.assert_close(actual.order.double(), order_slowly(heatmaps), rtol=0, atol=1e-7)
    tied = (heatmaps * 2).round()
    torch.testing.assert_close(grid_pointing_game(tied).order.double(), order_slowly(tied), rtol=0, atol=1e-7)


def test_a_map_worked_by_hand() -> None:
    heatmap = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 0], [4, 0, 0, -9], [0, 1, 0, 0]])
    actual = grid_pointing_game(heatmap.expand(1, 4, 4, 4))
    assert actual.mass[0].tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0])
    assert actual.hits[0].tolist() == [0, 0, 1, 0]
    # Of the first cell's 1, 0, 0, 0 against 2, 0, 0, 0, 4, 0, 0, 1 and 0, -9, 0, 0: of 48 pairs, it has more in 9 + 3, and
    # as much in 1 + 24.
    assert actual.order[0, 0].item() == pytest.approx((9 + 3 + 25 / 2) / 48)


@pytest.mark.parametrize("cell", range(4))
def test_all_in_one_cell_is_right_for_that_cells_class_alone(cell: int) -> None:
    actual = grid_pointing_game(only(cell).expand(1, 4, 4, 4))
    expected = [float(k == cell) for k in range(4)]
    assert actual.mass[0].tolist() == actual.hits[0].tolist() == expected
    # The other classes' maps have nothing in their cell, and as much as two of the other three.
    assert actual.order[0].tolist() == pytest.approx([1.0 if k == cell else 1 / 3 for k in range(4)])


@pytest.mark.parametrize("power", [2, 4, 8])
def test_mass_can_be_bought_and_order_cannot(power: int) -> None:
    heatmaps = torch.rand(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    heatmaps[:, 0, :8, :8] += 0.2
    plain, sharp = grid_pointing_game(heatmaps), grid_pointing_game(heatmaps**power)
    assert torch.equal(sharp.order, plain.order)
    assert torch.equal(sharp.hits, plain.hits)
    assert (sharp.mass[:, 0] > plain.mass[:, 0] + 0.02).all()


def test_the_most_mass_that_a_map_of_a_layers_grid_can_have() -> None:
    """1 in its cell of 14 x 14 and 0 elsewhere, resized as heatmaps are: the rest is what the resizing spreads. Along each
    axis, cubic weights of PyTorch's interpolation, added up slowly."""
    maps = torch.zeros(1, 4, 14, 14)
    for k in range(4):
        maps[0, k, k // 2 * 7 :, k % 2 * 7 :][:7, :7] = 1
    actual = grid_pointing_game(to_heatmaps(maps, (448, 448)))
    inside = outside = 0.0
    for pixel in range(448):
        place = (pixel + 0.5) / 32 - 0.5
        value = 0.0
        for cell in range(math.floor(place) - 1, math.floor(place) + 3):
            x, a = abs(place - cell), -0.75
            weight = (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4)
            value += weight * (min(max(cell, 0), 13) < 7)
        inside, outside = inside + max(value, 0) * (pixel < 224), outside + max(value, 0) * (pixel >= 224)
    expected = (inside / (inside + outside)) ** 2
    assert expected == pytest.approx(0.967, abs=5e-4)
    assert actual.mass[0].tolist() == pytest.approx([expected] * 4, abs=5e-4)
    assert actual.order.min() > 0.9999
    assert actual.hits.tolist() == [[1.0] * 4]


def test_rules_for_maps_without_a_direction() -> None:
    constant, blank, negative = torch.full((4, 4), 0.3), torch.zeros(4, 4), torch.full((4, 4), -1.0)
    tied = only(0)
    tied[3, 3] = 1
    actual = grid_pointing_game(torch.stack([constant, blank, negative, tied])[:, None].expand(4, 4, 4, 4))
    assert actual.mass[0].tolist() == actual.hits[0].tolist() == [0.25] * 4
    assert actual.order[:3].tolist() == [[0.5] * 4] * 3
    assert actual.mass[1:3].count_nonzero() == actual.hits[1:3].count_nonzero() == 0
    assert actual.hits[3].tolist() == pytest.approx([0.8, 0, 0, 0.2])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_makes_no_difference(scale: float) -> None:
    heatmaps = torch.rand(3, 4, 6, 6)
    one, other = grid_pointing_game(heatmaps), grid_pointing_game(heatmaps * scale)
    torch.testing.assert_close(one.mass, other.mass)
    assert torch.equal(one.hits, other.hits)
    assert torch.equal(one.order, other.order)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_map_that_does_not_know_the_class_is_at_chance(name: str) -> None:
    maps = CONTROLS[name].make(torch.randn(6, 3, 32, 32), 0)
    actual = grid_pointing_game(maps[:, None].expand(-1, 4, -1, -1))
    torch.testing.assert_close(actual.mass.mean(1), torch.full((6,), 0.25))
    torch.testing.assert_close(actual.hits.mean(1), torch.full((6,), 0.25))
    torch.testing.assert_close(actual.order.mean(1), torch.full((6,), 0.5))


def test_maps_of_a_network_that_reads_colours_are_right_before_it_turns_them_and_wrong_behind() -> None:
    cells = [picture(colour) for colour in ("red", "cyan", "blue", "yellow")]
    mosaic = torch.cat([torch.cat(cells[:2], 2), torch.cat(cells[2:], 2)], 1)[None]
    classes = [[COLOURS.index(colour) for colour in ("red", "cyan", "blue", "yellow")]]
    model = ColourNet().eval()
    explained = gradcam.compare(model, mosaic, layers=["active", "turn"], methods=["gradcam"], target=classes)
    for layer, share in (("active", 1.0), ("turn", 0.0)):
        actual = grid_pointing_game(explained[layer, "gradcam"])
        assert actual.mass[0].tolist() == pytest.approx([share] * 4, abs=1e-6)
        assert actual.hits[0].tolist() == [share] * 4
        assert actual.order[0].tolist() == pytest.approx([1.0 if share else 1 / 3] * 4)


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
def test_what_is_wrong_is_said(heatmaps: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        grid_pointing_game(heatmaps)
