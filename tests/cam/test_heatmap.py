import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gradcam
from gradcam.cam.postprocess import resize, to_heatmaps
from tests import oracles
from tests.helpers import TINY, tiny_model

TORCH_MODES = {"bicubic": "bicubic", "bilinear": "bilinear", "nearest": "nearest-exact"}
VOLUME_MODES = {"bilinear": "trilinear", "nearest": "nearest-exact"}


@pytest.mark.parametrize(
    ("grid", "size"),
    [((7, 7), (224, 224)), ((3, 5), (17, 8)), ((1, 4), (6, 6)), ((9, 9), (4, 5)), ((2, 3, 4), (5, 7, 6))],
)
def test_resize_equals_the_slow_loop(grid: tuple[int, ...], size: tuple[int, ...]) -> None:
    values = torch.rand(1, 1, *grid, dtype=torch.float64)
    expected = oracles.resize_cubic(values[0, 0].numpy(), size)
    np.testing.assert_allclose(resize(values, size)[0, 0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("size", [(50, 61), (5, 4), (7, 9), (3, 20)])
@pytest.mark.parametrize("mode", TORCH_MODES)
def test_resize_equals_the_interpolation_of_pytorch(mode: str, size: tuple[int, ...]) -> None:
    values = torch.rand(2, 3, 7, 9)
    expected = F.interpolate(values, size, mode=TORCH_MODES[mode]).clamp(min=0)
    torch.testing.assert_close(resize(values, size, mode=mode), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", VOLUME_MODES)
def test_volumes_are_resized_as_by_pytorch(mode: str) -> None:
    values = torch.rand(2, 1, 2, 3, 4)
    expected = F.interpolate(values, (5, 7, 6), mode=VOLUME_MODES[mode])
    torch.testing.assert_close(resize(values, (5, 7, 6), mode=mode), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", TORCH_MODES)
def test_heatmaps_of_any_interpolation_stay_in_their_range(mode: str) -> None:
    spikes = (torch.rand(50, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.7).float()
    heatmaps = to_heatmaps(spikes, (61, 50), mode=mode)
    assert (heatmaps.min(), heatmaps.max()) == (0, 1)
    signed = to_heatmaps(spikes - 0.5, (61, 50), signed=True, mode=mode)
    assert (signed.min(), signed.max()) == (-1, 1)


@pytest.mark.parametrize("evidence", ["positive", "negative", "signed"])
@pytest.mark.parametrize("mode", TORCH_MODES)
def test_the_option_of_explain_sets_the_interpolation(mode: str, evidence: str) -> None:
    explanation = gradcam.explain(tiny_model(), TINY, "3", target=[[0, 1]] * 3, evidence=evidence, interpolation=mode)
    halves = (half.relu() for half in (explanation.maps, -explanation.maps))
    signs = [F.interpolate(half, (12, 16), mode=TORCH_MODES[mode]).relu() for half in halves]
    resized = signs[0] - signs[1]
    expected = resized / resized.abs().amax((2, 3), keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(explanation.heatmaps, expected, rtol=0, atol=1e-5)
    assert explanation.interpolation == mode


def test_nearest_shows_the_cells_as_blocks() -> None:
    maps = torch.tensor([[[[0.0, 1.0], [0.25, 0.5]]]])
    expected = maps.repeat_interleave(3, 2).repeat_interleave(3, 3)
    torch.testing.assert_close(to_heatmaps(maps, (6, 6), mode="nearest"), expected)


def test_the_default_is_bicubic() -> None:
    default, bicubic = (
        gradcam.explain(tiny_model(), TINY, "3", **options) for options in ({}, {"interpolation": "bicubic"})
    )
    assert torch.equal(default.heatmaps, bicubic.heatmaps)


@pytest.mark.parametrize("value", ["cubic", "nearest-exact", None, True])
def test_unknown_interpolations(value: object) -> None:
    message = f"interpolation is {value!r}, expected one of 'bicubic', 'bilinear', 'nearest'"
    with pytest.raises(gradcam.errors.GradcamError, match=message):
        gradcam.explain(tiny_model(), TINY, "3", interpolation=value)  # type: ignore[arg-type]


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
