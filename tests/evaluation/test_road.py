"""ROAD: against values worked by hand, its definition in slow loops, and grad-cam's on the same maps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import Subject, road
from tests.helpers import TINY, assert_same, tiny_model, traces
from tests.imputation_oracle import impute_exactly


class Corner(nn.Module):
    """Two classes: what the corner's pixel is, and its opposite."""

    def forward(self, images: Tensor) -> Tensor:
        corner = images[:, 0, 0, 0]
        return torch.stack([corner, -corner], 1)


class Record(nn.Module):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.extend(images)
        return torch.zeros(len(images), 2)


def corner_subject() -> Subject:
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 0, 0] = 1.5
    return Subject(Corner(), image, 0)


def falling(height: int = 5, width: int = 5) -> Tensor:
    """From the corner on, row by row, less and less relevant."""
    return torch.linspace(1, -1, height * width).reshape(1, height, width)


def sure(value: float) -> float:
    """The first class's probability where the corner has this value."""
    return 1 / (1 + float(np.exp(-2 * value)))


def test_a_map_that_is_exactly_right_and_one_that_is_exactly_wrong() -> None:
    subject = corner_subject()
    gained = (sure(1.5) - 0.5) / 2  # without the corner, the image is zero
    right = road(subject, falling(), noise=0)
    assert right.combined.tolist() == pytest.approx([gained], abs=1e-6)
    assert right.most.tolist() == [pytest.approx([0.5] * 9, abs=1e-6)]
    assert right.least.tolist() == [pytest.approx([sure(1.5)] * 9, abs=1e-6)]
    assert right.shares == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    assert road(subject, -falling(), noise=0).combined.tolist() == pytest.approx([-gained], abs=1e-6)


def test_an_imputed_corner_by_hand() -> None:
    image = torch.tensor([[[[9.0, 2.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]]])
    actual = road(Subject(Corner(), image, 0), falling(3, 3), shares=(1 / 9,), noise=0)
    imputed = (2 * (2.0 + 1.0) + 0.5) / 5
    assert actual.most.item() == pytest.approx(sure(imputed), abs=1e-5)
    assert actual.combined.item() == pytest.approx((sure(9.0) - sure(imputed)) / 2, abs=1e-5)


def test_the_mean_over_the_shares_is_of_half_the_differences() -> None:
    maps = falling().flip(
        1
    )  # the corner is the 21st of 25: among the 23 most relevant, and the 13 and 23 least relevant
    actual = road(corner_subject(), maps, shares=(0.5, 0.9), noise=0)
    kept = sure(1.5)
    assert actual.most.tolist() == [pytest.approx([kept, 0.5], abs=1e-6)]
    assert actual.least.tolist() == [pytest.approx([0.5, 0.5], abs=1e-6)]
    assert actual.combined.tolist() == pytest.approx([((0.5 - kept) / 2 + 0) / 2], abs=1e-6)


def test_the_definition_in_slow_loops() -> None:
    model = tiny_model().eval()
    images, shares = TINY[:2], (0.2, 0.5, 0.85)
    maps = torch.randn(2, 12, 16)
    actual = road(Subject(model, images, [1, 4]), maps, shares=shares, noise=0)
    for number, index in enumerate([1, 4]):
        order = maps[number].flatten().argsort(descending=True).tolist()
        for column, share in enumerate(shares):
            count = round(share * len(order))
            for gone, probabilities in ((order[:count], actual.most), (order[-count:], actual.least)):
                known = torch.ones(12 * 16, dtype=torch.bool)
                known[gone] = False
                imputed = impute_exactly(images[number], known.reshape(12, 16)).float()
                with torch.no_grad():
                    expected = model(imputed[None]).softmax(1)[0, index].item()
                assert probabilities[number, column].item() == pytest.approx(expected, abs=2e-4)
    torch.testing.assert_close(actual.combined, ((actual.least - actual.most) / 2).mean(1))


@pytest.fixture(scope="module")
def pictures(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> Tensor:
    names = ("chelsea.jpg", "coffee.jpg", "koala.webp", "panda.webp", "macaw.webp", "lemur.webp")
    images = classifier.batch([gradcam.read_image(photo(name)) for name in names])
    return nn.functional.interpolate(images, (96, 96), mode="area")


def explained(classifier: gradcam.Classifier, pictures: Tensor) -> tuple[Subject, Tensor]:
    subject = Subject(classifier.model, pictures)
    maps = gradcam.explain(classifier.model, pictures, "layer4", target=subject.classes[:, None], evidence="signed")
    return subject, maps.heatmaps[:, 0]


@pytest.mark.slow
def test_scores_are_those_of_grad_cam_without_noise(classifier: gradcam.Classifier, pictures: Tensor) -> None:
    peer = pytest.importorskip("pytorch_grad_cam.metrics.road")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    subject, maps = explained(classifier, pictures[:2])
    maps = maps + 1e-6 * torch.rand_like(maps)  # no two alike: there that package takes more than the share away
    aims = [targets.ClassifierOutputSoftmaxTarget(index) for index in subject.classes.tolist()]
    shares = (0.1, 0.3, 0.9)  # percentiles that come to the very same numbers of pixels
    actual = road(subject, maps, shares=shares, noise=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about how that package calls it
        for column, share in enumerate(shares):
            for way, own in (("Most", actual.most), ("Least", actual.least)):
                removal = getattr(peer, f"Remove{way}RelevantFirst")(
                    round(100 * (1 - share)), peer.NoisyLinearImputer(noise=0)
                )
                metric = peer.PerturbationConfidenceMetric(removal)
                scores = metric(pictures[:2], maps.numpy(), aims, classifier.model, return_diff=False)
                assert own[:, column].tolist() == pytest.approx(scores.tolist(), abs=2e-3)


@pytest.mark.slow
def test_scores_are_those_of_grad_cam_with_noise(classifier: gradcam.Classifier, pictures: Tensor) -> None:
    peer = pytest.importorskip("pytorch_grad_cam.metrics.road")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    subject, maps = explained(classifier, pictures)
    aims = [targets.ClassifierOutputSoftmaxTarget(index) for index in subject.classes.tolist()]
    percentiles = [10, 30, 50, 70, 90]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = peer.ROADCombined(percentiles=percentiles)(pictures, maps.numpy(), aims, classifier.model)
    combined = road(subject, maps, shares=[1 - percentile / 100 for percentile in percentiles]).combined.numpy()
    assert np.corrcoef(combined, expected)[0, 1] > 0.99
    assert np.abs(combined - expected).max() < 0.03
    assert np.abs(expected).max() > 0.1


def test_exactly_so_many_pixels_are_taken_away_also_where_all_are_alike() -> None:
    for maps in (torch.ones(1, 10, 11), torch.zeros(1, 10, 11), (torch.rand(1, 10, 11) > 0.6).float()):
        model = Record()
        subject = Subject(model, torch.rand(1, 2, 10, 11), 0)
        model.seen.clear()
        road(subject, maps, shares=(0.0, 0.25, 0.5, 1.0), noise=0.5)
        changed = [(seen != subject.images[0]).any(0) for seen in model.seen]
        assert [int(item.sum()) for item in changed] == [0, 0, 28, 28, 55, 55, 110, 110]
        assert not (changed[4] & changed[5]).any()  # the two halves, of one order
        assert bool((changed[2] & ~changed[4]).any()) is False  # each share contains the one before


def test_pixels_of_one_value_are_taken_by_chance_and_so_a_constant_map_scores_nothing() -> None:
    subject = corner_subject()
    flat, options = torch.ones(1, 5, 5), {"noise": 0, "shares": (0.3, 0.7)}
    scores = torch.cat([road(subject, flat, seed=seed, **options).combined for seed in range(40)])
    assert scores.unique().numel() > 3
    assert abs(scores.mean().item()) < 0.05
    assert scores.abs().max().item() > 0.1


def test_share_zero_is_the_image_and_share_one_is_nothing() -> None:
    subject = Subject(tiny_model(), TINY, [0, 1, 2])
    actual = road(subject, torch.rand(3, 12, 16), shares=(0, 1), noise=0)
    torch.testing.assert_close(actual.most[:, 0], subject.probabilities)
    torch.testing.assert_close(actual.least[:, 0], subject.probabilities)
    nothing = Subject(tiny_model(), torch.zeros_like(TINY), [0, 1, 2]).probabilities
    torch.testing.assert_close(actual.most[:, 1], nothing)
    torch.testing.assert_close(actual.least[:, 1], nothing)


def test_the_seed_decides_on_the_noise_and_nothing_else_does() -> None:
    subject, maps = Subject(tiny_model(), TINY, [0, 1, 2]), torch.rand(3, 12, 16)
    before = torch.get_rng_state()
    actual = road(subject, maps, noise=0.3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again = road(subject, maps, noise=0.3, seed=5)
    assert torch.equal(actual.combined, again.combined)
    assert torch.equal(actual.most, again.most)
    assert torch.equal(actual.least, again.least)
    other = road(subject, maps, noise=0.3, seed=6)
    assert not torch.equal(actual.most, other.most)
    assert not torch.equal(road(subject, maps, seed=5).most, road(subject, maps, noise=0, seed=5).most)


def test_each_share_has_noise_of_its_own_and_both_ends_the_same() -> None:
    model = Record()
    subject = Subject(model, torch.zeros(1, 1, 8, 8), 0)
    model.seen.clear()
    road(subject, falling(8, 8), shares=(0.75, 1.0, 1.0), noise=0.5)
    most, least, everything, *_ = model.seen
    both = (most != 0) & (least != 0)
    assert both.sum() == 32
    assert torch.equal(most[both], least[both])
    assert not torch.equal(most[both], everything[both])
    assert everything.std().item() == pytest.approx(0.5, rel=0.25)


def test_an_image_scores_what_it_scores_alone() -> None:
    maps = torch.randn(3, 12, 16)
    actual = road(Subject(tiny_model(), TINY, [0, 1, 2]), maps)
    for number in range(3):
        one = slice(number, number + 1)
        alone = road(Subject(tiny_model(), TINY[one], number), maps[one])
        torch.testing.assert_close(alone.combined[0], actual.combined[number], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone.least[0], actual.least[number], rtol=0, atol=1e-6)


def test_the_batch_size_does_not_matter() -> None:
    maps = torch.randn(3, 12, 16)
    actual = road(Subject(tiny_model(), TINY, [0, 1, 2]), maps)
    other = road(Subject(tiny_model(), TINY, [0, 1, 2], batch_size=4), maps)
    torch.testing.assert_close(actual.most, other.most, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.least, other.least, rtol=0, atol=1e-6)


def test_maps_of_any_library_by_their_order_alone() -> None:
    from captum.attr import LayerAttribution, LayerGradCam

    model = tiny_model().eval()
    subject = Subject(model, TINY, [0, 1, 2])
    maps = LayerGradCam(model, model[3]).attribute(TINY, target=[0, 1, 2])
    enlarged = LayerAttribution.interpolate(maps, (12, 16), interpolate_mode="bilinear")
    actual = road(subject, enlarged)
    assert (actual.combined != 0).all()
    assert torch.equal(actual.combined, road(subject, enlarged.detach().numpy()[:, 0] * 8 - 3).combined)


def test_probabilities_of_exactly_zero_and_one() -> None:
    class Certain(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return Corner()(images) * 1e6

    image = torch.zeros(2, 1, 5, 5)
    image[:, 0, 0, 0] = torch.tensor([1.0, -1.0])
    image[:, 0, 0, 1] = -image[:, 0, 0, 0]  # what the corner is imputed from
    subject = Subject(Certain(), image, 0)
    assert subject.probabilities.tolist() == [1, 0]
    actual = road(subject, falling().expand(2, -1, -1), shares=(0.04,), noise=0)
    assert actual.combined.tolist() == [0.5, -0.5]


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
        ({"shares": 0.5}, "shares is 0.5"),
        ({"shares": "all"}, "shares is 'all'"),
        ({"shares": (0.5, 10)}, r"shares is \(0.5, 10\)"),
        ({"shares": (0.5, -0.1)}, r"shares is \(0.5, -0.1\)"),
        ({"shares": (0.5, float("nan"))}, "nan"),
        ({"shares": (True,)}, r"\(True,\)"),
        ({"shares": ("0.5",)}, r"\('0.5',\)"),
        ({"noise": -1}, "noise is -1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        road(corner_subject(), falling(), **options)


def test_a_map_of_another_size() -> None:
    with pytest.raises(ImageError, match="one per image, of its size"):
        road(corner_subject(), torch.rand(1, 5, 6))


@pytest.mark.cuda
def test_cpu_and_cuda_agree() -> None:
    maps = torch.randn(3, 12, 16)
    actual = road(Subject(tiny_model().cuda(), TINY.cuda(), [0, 1, 2]), maps)
    assert actual.combined.is_cuda
    expected = road(Subject(tiny_model(), TINY, [0, 1, 2]), maps)
    torch.testing.assert_close(actual.most.cpu(), expected.most, rtol=0, atol=1e-3)
