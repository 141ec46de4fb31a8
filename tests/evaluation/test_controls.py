"""Test the control maps, the order of pixels, and reproducible random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

import gradcam
from gradcam.evaluation import CONTROLS
from gradcam.evaluation.subject import count_pixels, derive_seed, make_generator, rank_pixels
from tests.helpers import TINY

# Controls


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_a_heatmap_and_knows_its_name(name: str) -> None:
    control = CONTROLS[name]
    assert control.name == name
    assert control.summary
    heatmaps = control.make(TINY, 0)
    assert heatmaps.shape == (3, 12, 16)
    assert heatmaps.dtype == torch.float32
    assert heatmaps.min() >= 0
    torch.testing.assert_close(heatmaps.amax((1, 2)), torch.ones(3))
    assert torch.equal(heatmaps, control.make(TINY, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_of_images_of_any_precision(name: str, dtype: torch.dtype) -> None:
    heatmaps = CONTROLS[name].make(TINY.to(dtype), 0).float()
    torch.testing.assert_close(heatmaps, CONTROLS[name].make(TINY, 0), atol=0.05, rtol=0)


def test_the_order_in_which_they_are_shown() -> None:
    assert list(CONTROLS) == ["random", "centre", "edges", "constant"]


def test_a_constant_map_is_one_everywhere() -> None:
    assert (CONTROLS["constant"].make(TINY, 3) == 1).all()


def test_the_centre_is_a_gaussian_of_a_quarter_of_each_side() -> None:
    (heatmap,) = CONTROLS["centre"].make(torch.zeros(1, 3, 9, 40), 0).double().numpy()
    for y in range(9):
        for x in range(40):
            down, across = (y + 0.5) / 9 - 0.5, (x + 0.5) / 40 - 0.5
            nearest = 0.5 / 40  # the centre of the image lies between two pixels
            expected = np.exp(-(down**2 + across**2 - nearest**2) / (2 * 0.25**2))
            assert heatmap[y, x] == pytest.approx(expected, rel=1e-5)


def test_random_maps_are_coarse_differ_between_images_and_repeat() -> None:
    make = CONTROLS["random"].make
    heatmaps = make(torch.zeros(4, 3, 70, 140), 5)
    assert torch.equal(heatmaps, make(torch.ones(4, 3, 70, 140), 5))
    assert not torch.equal(heatmaps, make(torch.zeros(4, 3, 70, 140), 6))
    first, second = heatmaps[0].flatten(), heatmaps[1].flatten()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5
    steps = (heatmaps.diff(dim=2).abs().mean() / heatmaps.std()).item()
    assert steps < 0.1  # independent noise per pixel would have more than 1
    noise = torch.rand(4, 1, 7, 7, generator=torch.Generator().manual_seed(derive_seed(5, "random map")))
    for heatmap, cells in zip(heatmaps, noise[:, 0]):
        # OpenCV uses the same bicubic kernel.
        large = cv2.resize(cells.numpy(), (140, 70), interpolation=cv2.INTER_CUBIC)
        np.testing.assert_allclose(heatmap, large.clip(0) / large.max(), atol=1e-3)


def test_edges_are_those_of_opencv(photo: Callable[[str], Path]) -> None:
    picture = gradcam.read_image(photo("chelsea.jpg")).astype(np.float32)
    images = torch.from_numpy(picture).permute(2, 0, 1)[None]
    grey = picture.mean(2)
    across, down = (cv2.Sobel(grey, cv2.CV_32F, *axes, borderType=cv2.BORDER_REPLICATE) for axes in ((1, 0), (0, 1)))
    expected = np.hypot(across, down)
    np.testing.assert_allclose(CONTROLS["edges"].make(images, 0)[0], expected / expected.max(), atol=1e-5)


def test_a_picture_without_edges_has_a_blank_map() -> None:
    assert not CONTROLS["edges"].make(torch.full((2, 3, 8, 8), 0.3), 0).any()


# The order of pixels


def test_places_by_hand() -> None:
    maps = torch.tensor([[[0.1, 0.9], [-3.0, 0.5]], [[4.0, 3.0], [2.0, 1.0]]])
    ranks = rank_pixels(maps)
    assert ranks.dtype == torch.int64
    assert ranks.tolist() == [[[2, 0], [3, 1]], [[0, 1], [2, 3]]]


def test_places_equal_those_of_a_sort() -> None:
    maps = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(0))
    for heatmap, places in zip(maps.numpy(), rank_pixels(maps, 7).numpy()):
        expected = np.empty(600, int)
        expected[sorted(range(600), key=lambda i: -heatmap.flatten()[i])] = range(600)
        np.testing.assert_array_equal(places.flatten(), expected)


def test_ties_are_in_an_order_by_chance_and_only_they() -> None:
    maps = torch.tensor([[[1.0] * 50 + [2.0] + [0.0] * 49]])
    orders = {tuple(rank_pixels(maps, seed).flatten().tolist()) for seed in range(20)}
    assert len(orders) == 20
    for places in orders:
        assert places[50] == 0
        assert sorted(places[:50]) == list(range(1, 51))
        assert sorted(places[51:]) == list(range(51, 100))
    assert torch.equal(rank_pixels(maps, 3), rank_pixels(maps, 3))
    assert torch.equal(rank_pixels(maps), rank_pixels(maps, 0))


def test_a_constant_map_favours_no_place() -> None:
    mean = sum(rank_pixels(torch.zeros(1, 4, 4), seed).double() for seed in range(400)) / 400
    assert isinstance(mean, Tensor)
    assert (mean - 7.5).abs().max() < 1  # the standard deviation of a mean of 400 ranks is 4.6 / 20


def test_negative_zero_is_zero() -> None:
    zeros = torch.zeros(1, 1, 40)
    assert torch.equal(rank_pixels(zeros, 1), rank_pixels(-zeros, 1))


def test_an_images_order_does_not_depend_on_its_neighbours() -> None:
    maps = torch.randint(0, 3, (4, 6, 5), generator=torch.Generator().manual_seed(0)).float()
    together = rank_pixels(maps, 2)
    for i in range(4):
        assert torch.equal(rank_pixels(maps[i : i + 1], 2)[0], together[i])


@pytest.mark.parametrize(
    ("share", "pixels", "expected"),
    [(0, 10, 0), (1, 10, 10), (0.5, 5, 3), (0.24, 10, 2), (0.25, 10, 3), (0.05, 9, 0), (0.1, 50176, 5018)],
)
def test_counts_of_pixels_are_rounded_to_the_nearest(share: float, pixels: int, expected: int) -> None:
    assert count_pixels(share, pixels) == expected


# Random numbers


def test_what_is_drawn_depends_on_the_seed_and_the_purpose_alone() -> None:
    def numbers(*names: object) -> list[float]:
        torch.rand(3)  # PyTorch's global generator has no influence
        return torch.rand(4, generator=make_generator(*names)).tolist()

    assert numbers(0, "ties") == numbers(0, "ties")
    distinct = [numbers(*names) for names in ((0, "ties"), (1, "ties"), (0, "noise"), (0, "ties", "cat.jpg"), (0,))]
    assert len({tuple(values) for values in distinct}) == 5


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "ties") == int(hashlib.sha256(b"0\nties").hexdigest()[:16], 16) // 2
    assert all(0 <= derive_seed(seed) < 2**63 for seed in range(100))
    assert make_generator(7, "x").initial_seed() == derive_seed(7, "x")


def test_a_purpose_may_be_a_file_name_that_is_no_text() -> None:
    assert derive_seed(0, b"caf\xe9.jpg".decode("utf-8", "surrogateescape")) != derive_seed(0, "caf.jpg")


def test_pytorchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    rank_pixels(torch.zeros(1, 4, 4), 3)
    CONTROLS["random"].make(TINY, 1)
    assert torch.equal(before, torch.get_rng_state())
