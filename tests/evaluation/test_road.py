"""Test ROAD: by hand and against its definition in slow loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import Subject, road
from tests.helpers import TINY, assert_same, tiny_model, traces
from tests.imputation_oracle import impute_exactly


class Corner(nn.Module):
    """A model of two classes, whose logits are the corner's pixel and its negative."""

    def forward(self, images: Tensor) -> Tensor:
        corner = images[:, 0, 0, 0]
        return torch.stack([corner, -corner], 1)


class RecordingModel(nn.Module):
    """A model that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.inputs.extend(images)
        return torch.zeros(len(images), 2)


def corner_subject() -> Subject:
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 0, 0] = 1.5
    return Subject(Corner(), image, 0)


def make_falling_map(height: int = 5, width: int = 5) -> Tensor:
    """Return a map whose relevance falls row by row from the corner on."""
    return torch.linspace(1, -1, height * width).reshape(1, height, width)


def compute_probability(value: float) -> float:
    """Return the first class's probability if the corner has this value."""
    return 1 / (1 + float(np.exp(-2 * value)))


def test_a_map_that_is_exactly_right_and_one_that_is_exactly_wrong() -> None:
    subject = corner_subject()
    # Without the corner, the whole image is zero, so the probability is 0.5.
    gained = (compute_probability(1.5) - 0.5) / 2
    right = road(subject, make_falling_map(), noise=0)
    assert right.combined.tolist() == pytest.approx([gained], abs=1e-6)
    assert right.most.tolist() == [pytest.approx([0.5] * 9, abs=1e-6)]
    assert right.least.tolist() == [pytest.approx([compute_probability(1.5)] * 9, abs=1e-6)]
    assert right.shares == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    assert road(subject, -make_falling_map(), noise=0).combined.tolist() == pytest.approx([-gained], abs=1e-6)


def test_an_imputed_corner_by_hand() -> None:
    image = torch.tensor([[[[9.0, 2.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]]])
    score = road(Subject(Corner(), image, 0), make_falling_map(3, 3), shares=(1 / 9,), noise=0)
    imputed = (2 * (2.0 + 1.0) + 0.5) / 5
    assert score.most.item() == pytest.approx(compute_probability(imputed), abs=1e-5)
    assert score.combined.item() == pytest.approx(
        (compute_probability(9.0) - compute_probability(imputed)) / 2, abs=1e-5
    )


def test_the_mean_over_the_shares_is_of_half_the_differences() -> None:
    # The corner is the 21st of 25 pixels: among the 23 most relevant ones, and the 13 and 23 least relevant ones.
    maps = make_falling_map().flip(1)
    score = road(corner_subject(), maps, shares=(0.5, 0.9), noise=0)
    with_corner = compute_probability(1.5)
    assert score.most.tolist() == [pytest.approx([with_corner, 0.5], abs=1e-6)]
    assert score.least.tolist() == [pytest.approx([0.5, 0.5], abs=1e-6)]
    assert score.combined.tolist() == pytest.approx([((0.5 - with_corner) / 2 + 0) / 2], abs=1e-6)


def test_the_definition_in_slow_loops() -> None:
    model = tiny_model().eval()
    images, shares = TINY[:2], (0.2, 0.5, 0.85)
    maps = torch.randn(2, 12, 16)
    score = road(Subject(model, images, [1, 4]), maps, shares=shares, noise=0)
    for number, index in enumerate([1, 4]):
        order = maps[number].flatten().argsort(descending=True).tolist()
        for column, share in enumerate(shares):
            count = round(share * len(order))
            for removed, probabilities in ((order[:count], score.most), (order[-count:], score.least)):
                is_known = torch.ones(12 * 16, dtype=torch.bool)
                is_known[removed] = False
                imputed = impute_exactly(images[number], is_known.reshape(12, 16)).float()
                with torch.no_grad():
                    expected = model(imputed[None]).softmax(1)[0, index].item()
                assert probabilities[number, column].item() == pytest.approx(expected, abs=2e-4)
    torch.testing.assert_close(score.combined, ((score.least - score.most) / 2).mean(1))


def test_the_exact_number_of_pixels_is_removed_also_with_ties() -> None:
    for maps in (torch.ones(1, 10, 11), torch.zeros(1, 10, 11), (torch.rand(1, 10, 11) > 0.6).float()):
        model = RecordingModel()
        subject = Subject(model, torch.rand(1, 2, 10, 11), 0)
        model.inputs.clear()
        road(subject, maps, shares=(0.0, 0.25, 0.5, 1.0), noise=0.5)
        changed = [(image != subject.images[0]).any(0) for image in model.inputs]
        assert [int(mask.sum()) for mask in changed] == [0, 0, 28, 28, 55, 55, 110, 110]
        assert not (changed[4] & changed[5]).any()  # the most and the least relevant half do not overlap
        assert bool((changed[2] & ~changed[4]).any()) is False  # each share contains the pixels of the smaller one


def test_pixels_of_one_value_are_taken_by_chance_and_so_a_constant_map_scores_nothing() -> None:
    subject = corner_subject()
    flat, options = torch.ones(1, 5, 5), {"noise": 0, "shares": (0.3, 0.7)}
    scores = torch.cat([road(subject, flat, seed=seed, **options).combined for seed in range(40)])
    assert scores.unique().numel() > 3
    assert abs(scores.mean().item()) < 0.05
    assert scores.abs().max().item() > 0.1


def test_share_zero_is_the_image_and_share_one_is_nothing() -> None:
    subject = Subject(tiny_model(), TINY, [0, 1, 2])
    score = road(subject, torch.rand(3, 12, 16), shares=(0, 1), noise=0)
    torch.testing.assert_close(score.most[:, 0], subject.probabilities)
    torch.testing.assert_close(score.least[:, 0], subject.probabilities)
    nothing = Subject(tiny_model(), torch.zeros_like(TINY), [0, 1, 2]).probabilities
    torch.testing.assert_close(score.most[:, 1], nothing)
    torch.testing.assert_close(score.least[:, 1], nothing)


def test_the_seed_decides_on_the_noise_and_nothing_else_does() -> None:
    subject, maps = Subject(tiny_model(), TINY, [0, 1, 2]), torch.rand(3, 12, 16)
    before = torch.get_rng_state()
    score = road(subject, maps, noise=0.3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again = road(subject, maps, noise=0.3, seed=5)
    assert torch.equal(score.combined, again.combined)
    assert torch.equal(score.most, again.most)
    assert torch.equal(score.least, again.least)
    reseeded = road(subject, maps, noise=0.3, seed=6)
    assert not torch.equal(score.most, reseeded.most)
    assert not torch.equal(road(subject, maps, seed=5).most, road(subject, maps, noise=0, seed=5).most)


def test_each_share_has_noise_of_its_own_and_both_ends_the_same() -> None:
    model = RecordingModel()
    subject = Subject(model, torch.zeros(1, 1, 8, 8), 0)
    model.inputs.clear()
    road(subject, make_falling_map(8, 8), shares=(0.75, 1.0, 1.0), noise=0.5)
    most, least, everything, *_ = model.inputs
    both = (most != 0) & (least != 0)
    assert both.sum() == 32
    assert torch.equal(most[both], least[both])
    assert not torch.equal(most[both], everything[both])
    assert everything.std().item() == pytest.approx(0.5, rel=0.25)


def test_an_image_scores_what_it_scores_alone() -> None:
    maps = torch.randn(3, 12, 16)
    score = road(Subject(tiny_model(), TINY, [0, 1, 2]), maps)
    for number in range(3):
        rows = slice(number, number + 1)
        alone = road(Subject(tiny_model(), TINY[rows], number), maps[rows])
        torch.testing.assert_close(alone.combined[0], score.combined[number], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone.least[0], score.least[number], rtol=0, atol=1e-6)


def test_the_batch_size_does_not_matter() -> None:
    maps = torch.randn(3, 12, 16)
    score = road(Subject(tiny_model(), TINY, [0, 1, 2]), maps)
    in_small_batches = road(Subject(tiny_model(), TINY, [0, 1, 2], batch_size=4), maps)
    torch.testing.assert_close(score.most, in_small_batches.most, rtol=0, atol=1e-6)
    torch.testing.assert_close(score.least, in_small_batches.least, rtol=0, atol=1e-6)


def test_probabilities_of_exactly_zero_and_one() -> None:
    class Certain(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return Corner()(images) * 1e6

    image = torch.zeros(2, 1, 5, 5)
    image[:, 0, 0, 0] = torch.tensor([1.0, -1.0])
    image[:, 0, 0, 1] = -image[:, 0, 0, 0]  # the corner's neighbour, from which it is imputed
    subject = Subject(Certain(), image, 0)
    assert subject.probabilities.tolist() == [1, 0]
    score = road(subject, make_falling_map().expand(2, -1, -1), shares=(0.04,), noise=0)
    assert score.combined.tolist() == [0.5, -0.5]


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model().train()
    subject, maps = Subject(model, TINY, 0), torch.rand(3, 12, 16)
    before = traces(model)
    road(subject, maps, shares=(0.5,))
    assert_same(before, traces(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": ()}, r"shares is \(\), expected a list of numbers from 0 to 1"),
        ({"shares": 0.5}, "shares is 0.5"), ({"shares": "all"}, "shares is 'all'"),
        ({"shares": (0.5, 10)}, r"shares is \(0.5, 10\)"), ({"shares": (0.5, -0.1)}, r"shares is \(0.5, -0.1\)"),
        ({"shares": (0.5, float("nan"))}, "nan"), ({"shares": (True,)}, r"\(True,\)"),
        ({"shares": ("0.5",)}, r"\('0.5',\)"), ({"noise": -1}, "noise is -1"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        road(corner_subject(), make_falling_map(), **options)


def test_a_map_of_another_size() -> None:
    with pytest.raises(ImageError, match="one per image, of the same size as the image"):
        road(corner_subject(), torch.rand(1, 5, 6))


@pytest.mark.cuda
def test_cpu_and_cuda_agree() -> None:
    maps = torch.randn(3, 12, 16)
    score = road(Subject(tiny_model().cuda(), TINY.cuda(), [0, 1, 2]), maps)
    assert score.combined.is_cuda
    expected = road(Subject(tiny_model(), TINY, [0, 1, 2]), maps)
    torch.testing.assert_close(score.most.cpu(), expected.most, rtol=0, atol=1e-3)
