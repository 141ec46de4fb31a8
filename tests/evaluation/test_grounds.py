"""Test grids and masks of a check: the effect of masks, and the chance that an unrelated heatmap scores as well."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from gradcam.evaluation import Subject
from gradcam.evaluation.checks.control_maps import (
    RANDOM_POSITIONS,
    compare_with_control,
    make_control_maps,
    make_spectrum_noise,
    move_randomly,
)
from gradcam.evaluation.checks.placement import (
    FILLINGS,
    SINGLE_IMAGE_SHARES,
    compute_placement_chance,
    fill_inpainted,
    find_recognised_grid,
    place_alone,
    place_in_grid,
    read_bundled_images,
)

GENERATOR = torch.Generator().manual_seed(0)


class Red(nn.Module):
    """A model whose log-odds of class 1 are the redness of the image, at any size."""

    def forward(self, images: Tensor) -> Tensor:
        redness = (images[:, 0] - images[:, 1]).mean((1, 2))
        return torch.stack([torch.zeros_like(redness), 8 * redness], 1)


class Fixed(Red):
    """A `Red` that accepts images of 16 x 16 only."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (16, 16):
            raise ValueError("16 x 16 alone")
        return super().forward(images)


def red_picture() -> Tensor:
    image = torch.zeros(1, 3, 16, 16)
    image[:, 0] = 1
    return image


def make_grey_images() -> Tensor:
    return torch.rand(3, 1, 16, 16, generator=GENERATOR).expand(-1, 3, -1, -1)  # grey images have no redness


def test_the_picture_is_once_in_each_cell() -> None:
    subject = Subject(Red(), red_picture(), 1)
    for is_large, side in ((False, 16), (True, 32)):
        ground = place_in_grid(subject, make_grey_images(), is_large=is_large)
        assert ground.images.shape == (4, 3, side, side)
        red = ground.images[:, 0] - ground.images[:, 1] > 0.99
        assert torch.equal(red, ground.cells)
        assert (ground.cells.sum(0) == 1).all()  # each pixel is in one cell
        corners = [tuple(image.nonzero()[0].tolist()) for image in red]
        assert corners == [*itertools.product((0, side // 2), repeat=2)]


def test_odd_sides_are_halved_as_far_as_they_can_be() -> None:
    subject = Subject(Red(), torch.rand(1, 3, 17, 19, generator=GENERATOR), 1)
    ground = place_in_grid(subject, torch.rand(3, 3, 17, 19, generator=GENERATOR))
    assert ground.cells.flatten(1).sum(1).tolist() == [8 * 9, 8 * 10, 9 * 9, 9 * 10]


def test_order_counts_pairs_in_the_right_order() -> None:
    subject = Subject(Red(), torch.rand(1, 3, 8, 8, generator=GENERATOR), 1)
    ground = place_in_grid(subject, torch.rand(3, 3, 8, 8, generator=GENERATOR))
    maps = torch.randint(0, 5, (4, 8, 8), generator=GENERATOR).float()  # few integer values make many ties
    for trial, cell in itertools.product(range(4), range(4)):
        inside = ground.cells[cell]
        pairs = [(a > b) + (a == b) / 2 for a in maps[trial][inside].tolist() for b in maps[trial][~inside].tolist()]
        assert ground.order(maps)[trial, cell].item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert (ground.order(torch.ones(4, 8, 8)) == 1 / 2).all()


def test_what_matters_is_what_is_kept_less_what_is_removed() -> None:
    subject = Subject(Red(), red_picture(), 1)
    ground = place_alone(subject, make_grey_images())
    assert ground.shares == SINGLE_IMAGE_SHARES
    half = torch.zeros(4, 16, 16, dtype=torch.bool)
    half[:, :8] = True
    effects = ground.measure(half, ~half, ground.cells)
    # Filled with its mean, its blur or by inpainting, a red image stays red. Only filling with another image removes
    # the redness.
    torch.testing.assert_close(effects[0], torch.tensor([0, 0, 0, 0.0], dtype=torch.float64), atol=1e-3, rtol=0)
    assert effects[2, 2].item() == pytest.approx(8, abs=1e-3)


def test_a_quarter_that_is_marked_matters_as_its_cell() -> None:
    subject = Subject(Red(), red_picture(), 1)
    ground = place_in_grid(subject, make_grey_images())
    assert torch.equal(ground.mark(ground.cells.float()), ground.cells)
    first_effect, *other_effects = ground.measure(*(ground.cells.roll(shift, 0) for shift in range(4)))
    assert (first_effect > torch.stack(other_effects).amax(0)).all()


def test_fillings_are_of_the_image_s_range_and_size() -> None:
    image = torch.rand(3, 16, 16, generator=GENERATOR)
    hole = torch.zeros(16, 16, dtype=torch.bool)
    hole[4:12, 4:12] = True
    for fill in FILLINGS:
        filled = fill(image, hole, make_grey_images()[:1])
        assert filled.shape == image.shape
        assert ((filled >= -0.1) & (filled <= 1.1)).all()


def test_inpainting_goes_on_from_around_the_hole() -> None:
    image = torch.linspace(0, 1, 16).expand(3, 16, 16).contiguous()  # a ramp along each row
    hole = torch.zeros(16, 16, dtype=torch.bool)
    hole[6:10, 6:10] = True
    broken = image.masked_fill(hole, 0.5)
    filled = fill_inpainted(broken, hole, image[None])
    assert (filled - image).abs()[:, hole].max() < 0.06
    assert (filled - image).abs()[:, ~hole].max() < 0.0025  # Values are rounded to 1/255.
    torch.testing.assert_close(fill_inpainted(image, torch.ones_like(hole), image[None]), torch.full_like(image, 0.5))


def test_a_class_that_is_seen_among_others_or_not() -> None:
    grey, small = make_grey_images(), red_picture()[..., :15, :15]
    assert find_recognised_grid(Subject(Red(), red_picture(), 1), grey).images.shape[2:] == (16, 16)
    # Grey images have no redness in any cell.
    assert find_recognised_grid(Subject(Red(), grey[:1], 1), grey) is None
    # The model refuses the grid of twice the size.
    assert find_recognised_grid(Subject(Fixed(), grey[:1], 1), grey) is None
    # Cells of less than 8 x 8 pixels are too small.
    assert find_recognised_grid(Subject(Red(), small, 1), grey[..., :15, :15]) is None


class Counted(Red):
    """A `Red` that counts the images of each width."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: Counter[int] = Counter()

    def forward(self, images: Tensor) -> Tensor:
        self.widths[images.shape[3]] += len(images)
        return super().forward(images)


@pytest.mark.parametrize(("is_red", "cells"), [(True, 4), (False, 1)])
def test_other_cells_are_only_measured_if_the_image_has_evidence(is_red: bool, cells: int) -> None:
    grey, model = make_grey_images(), Counted()
    grid = find_recognised_grid(Subject(model, red_picture() if is_red else grey[:1], 1), grey)
    assert (grid is not None) == is_red
    # The model predicts the image (1) and the test images (4). Each cell is then measured in four test images, with only
    # the cell and without the cell.
    assert model.widths == {16: 1 + 4 + 8 * cells, **({} if is_red else {32: 4 + 8 * cells})}


def test_an_unrelated_map_rarely_scores_as_well() -> None:
    """The best of 24 assignments of four positions to four trials has a probability of 1/24.

    Of constant maps, none is better.
    """
    assert compute_placement_chance(torch.full((4, 4), 1 / 2)) == 1
    assert compute_placement_chance(0.4 + 0.5 * torch.eye(4)) == pytest.approx(1 / 24)
    # Two of the four trials are right and the other two are exchanged.
    places = [[0.9, 0.4, 0.4, 0.4], [0.4, 0.4, 0.4, 0.9], [0.4, 0.4, 0.4, 0.9], [0.4, 0.4, 0.4, 0.9]]
    scores = [sum(places[i][permutation[i]] for i in range(4)) for permutation in itertools.permutations(range(4))]
    expected = sum(score >= scores[0] - 1e-6 for score in scores) / 24
    assert compute_placement_chance(torch.tensor(places)) == pytest.approx(expected)
    generator = torch.Generator().manual_seed(3)
    chances = [compute_placement_chance(torch.rand(4, 4, generator=generator)) for _ in range(2000)]
    assert 0.03 < sum(chance <= 1 / 20 for chance in chances) / len(chances) < 0.055


@pytest.mark.slow
def test_random_positions_are_exchangeable_with_the_maps_position() -> None:
    """Smooth noise on a single image passes in one of twenty cases, as documented."""

    class Somewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) ** 4)

        def forward(self, images: Tensor) -> Tensor:
            values = (images.mean(1) * self.weight).mean((1, 2))
            return torch.stack([torch.zeros_like(values), 30 * values], 1)

    subject = Subject(Somewhere(), torch.rand(1, 3, 16, 16, generator=GENERATOR) + 0.5, 1)
    ground = place_alone(subject, make_grey_images())
    blob = torch.outer(*[torch.exp(-((torch.arange(16) - 8.0) ** 2) / 8)] * 2)
    passed = 0
    for seed in range(200):
        heatmap = make_spectrum_noise(blob, seed)
        heatmap = heatmap.roll((seed * 5 % 16, seed * 11 % 16), (0, 1))
        maps = [heatmap, *move_randomly(heatmap, seed)]
        effects = ground.measure(*(ground.mark(moved.expand(4, -1, -1)) for moved in maps)).mean(1)
        passed += int(1 + (effects[1:] >= effects[0]).sum() <= (1 + RANDOM_POSITIONS) / 20)
    assert 2 <= passed <= 20  # the expected number is 10 of 200


def test_noise_has_the_spectrum_of_the_map() -> None:
    heatmap = torch.rand(12, 16, generator=GENERATOR)
    smooth = torch.outer(torch.hann_window(12), torch.hann_window(16))
    for values in (heatmap, smooth):
        noise = make_spectrum_noise(values, 1)
        assert (noise.shape, noise.min()) == (values.shape, 0)
        assert not torch.equal(noise, make_spectrum_noise(values, 2))
        assert torch.equal(noise, make_spectrum_noise(values, 1))

    def roughness(values: Tensor) -> float:
        centred = values - values.mean()
        return float(((centred[1:] - centred[:-1]) ** 2).mean() / (centred**2).mean())

    for values, tolerance in ((heatmap, 0.3), (smooth, 0.6)):
        mean = sum(roughness(make_spectrum_noise(values, seed)) for seed in range(20)) / 20
        assert mean == pytest.approx(roughness(values), rel=tolerance)


def test_a_failing_control_leaves_the_others() -> None:
    def fail() -> Tensor:
        raise RuntimeError("no gradient")

    images = torch.rand(4, 3, 8, 8, generator=GENERATOR)
    makers = {"rival": fail, "random weights": lambda: torch.zeros(4, 8, 8)}
    control_maps, errors = make_control_maps(torch.rand(4, 8, 8, generator=GENERATOR), images, makers, 0)
    assert [*control_maps] == ["mirrored", "shifted", "random weights", "noise", "centre", "edges"]
    assert [*errors] == ["rival"]


@pytest.mark.parametrize(
    ("map_values", "control_values", "is_apart", "is_better"),
    [
        ((0.9, 0.9), (0.5, 0.0), True, False),
        ((0.9, 0.5), (0.75, 0.5), True, False),  # distinguished by order alone
        ((0.6, 0.9), (0.55, 0.6), True, False),  # distinguished by effect alone
        ((0.6, 0.5), (0.55, 0.4), False, False),
        ((0.5, 0.2), (0.9, 0.9), False, True),
        ((0.9, 0.2), (0.5, 0.9), True, False),  # better in order, worse in effect: the order decides
        ((None, 0.9), (None, 0.6), True, False),
        ((None, 0.5), (None, 0.8), False, True),
    ],
)
def test_a_map_is_told_apart_by_what_it_does_better(
    map_values: tuple[float | None, float], control_values: tuple[float | None, float], is_apart: bool, is_better: bool
) -> None:
    comparison = compare_with_control("edges", torch.zeros(2, 2), 0.0, map_values, control_values)
    assert (comparison.is_distinguished, comparison.is_better) == (is_apart, is_better)


def test_the_package_s_own_pictures() -> None:
    assert [picture.shape for picture in read_bundled_images()] == [(192, 192, 3)] * 5
