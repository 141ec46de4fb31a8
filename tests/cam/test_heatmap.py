import numpy as np
import pytest
import torch

from gradcam.cam.postprocess import resize, to_heatmaps
from tests import oracles


@pytest.mark.parametrize(
    ("grid", "size"),
    [((7, 7), (224, 224)), ((3, 5), (17, 8)), ((1, 4), (6, 6)), ((9, 9), (4, 5)), ((2, 3, 4), (5, 7, 6))],
)
def test_resize_equals_the_slow_loop(grid: tuple[int, ...], size: tuple[int, ...]) -> None:
    values = torch.rand(1, 1, *grid, dtype=torch.float64)
    expected = oracles.resize_cubic(values[0, 0].numpy(), size)
    np.testing.assert_allclose(resize(values, size)[0, 0].numpy(), expected, atol=1e-6)


def test_resize_equals_the_interpolation_of_pytorch() -> None:
    values = torch.rand(2, 3, 7, 9)
    expected = torch.nn.functional.interpolate(values, (50, 61), mode="bicubic", align_corners=False).clamp(min=0)
    torch.testing.assert_close(resize(values, (50, 61)), expected, rtol=0, atol=1e-5)


def test_a_cell_lies_where_its_pixels_are() -> None:
    maps = torch.zeros(1, 1, 7, 7)
    maps[0, 0, 2, 5] = 3
    heatmap = to_heatmaps(maps, (224, 224))[0, 0]
    row, column = divmod(int(heatmap.argmax()), 224)
    assert abs(row + 0.5 - (2 + 0.5) * 32) <= 1  # half-pixel centres
    assert abs(column + 0.5 - (5 + 0.5) * 32) <= 1


def test_each_map_is_divided_by_its_own_maximum_and_the_minimum_stays() -> None:
    maps = torch.tensor([[[[1.0, 2.0]], [[5.0, 10.0]]], [[[0.0, 0.0]], [[0.25, 0.5]]]])
    expected = torch.tensor([[[[0.5, 1.0]], [[0.5, 1.0]]], [[[0.0, 0.0]], [[0.5, 1.0]]]])
    assert torch.equal(to_heatmaps(maps, (1, 2)), expected)


def test_the_overshoot_of_the_cubic_is_cut_off_below_and_rescaled_above() -> None:
    maps = torch.zeros(1, 1, 1, 8)
    maps[..., 4:] = 1
    assert torch.nn.functional.interpolate(maps, (1, 64), mode="bicubic").min() < 0
    heatmap = to_heatmaps(maps, (1, 64))
    assert heatmap.min() == 0
    assert heatmap.max() == 1


def test_smallest_numbers_survive() -> None:
    assert to_heatmaps(torch.full((1, 1, 2, 2), 1e-38), (4, 4)).min() == 1
