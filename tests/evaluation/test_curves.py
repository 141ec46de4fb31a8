"""Test insertion, deletion and sufficiency: by hand on a network that reads one corner, and against loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import Curve, Subject, deletion, insertion, sufficiency
from gradcam.evaluation.subject import BASELINES, make_baseline
from tests import curve_oracles as slow
from tests.helpers import TINY, assert_same, tiny_model, traces

Classifier = gradcam.Classifier


class Corner(nn.Module):
    """A model whose probabilities are the mean of the top left 2 x 2 pixels and one minus it."""

    def forward(self, images: Tensor) -> Tensor:
        probability = images[:, :, :2, :2].mean((1, 2, 3))
        return torch.stack([probability, 1 - probability], 1)


WHITE = torch.ones(1, 1, 4, 4)
RIGHT = torch.zeros(1, 4, 4)
RIGHT[:, :2, :2] = 1


def corner(images: Tensor = WHITE) -> Subject:
    return Subject(Corner(), images, 0, activation="none")


def random_maps(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def sharp_model() -> nn.Module:
    """Return the tiny model with larger differences between its logits."""
    model = tiny_model().double()
    model[-1].weight.data.mul_(100)
    return model


def tiny_subject() -> Subject:
    return Subject(sharp_model(), TINY.double(), [0, 3, 1])


def tiny_scores(classes: Any = (0, 3, 1)) -> list[slow.Score]:
    model = sharp_model().eval()

    def make(index: int) -> slow.Score:
        def score(picture: np.ndarray) -> float:
            logits = model(torch.from_numpy(picture)[None])[0].tolist()
            return np.exp(logits[index]) / sum(np.exp(logits))

        return score

    return [make(index) for index in classes]


# By hand


def test_insertion_of_the_right_map_is_complete_after_the_corner() -> None:
    curve = insertion(corner(), RIGHT, baseline="zero", steps=16)
    assert curve.probabilities.tolist() == [[0, 0.25, 0.5, 0.75, *[1] * 13]]
    assert curve.shares.tolist() == [step / 16 for step in range(17)]
    assert curve.areas.tolist() == [14 / 16]  # trapezoids: 0.25 + 0.5 + 0.75 + 12, and half of the last value


def test_insertion_of_the_wrong_map_begins_with_the_last_pixels() -> None:
    curve = insertion(corner(), -RIGHT, baseline="zero", steps=16)
    assert curve.probabilities.tolist() == [[*[0] * 13, 0.25, 0.5, 0.75, 1]]
    assert curve.areas.tolist() == [2 / 16]


def test_deletion_by_the_right_and_by_the_wrong_map() -> None:
    right = deletion(corner(), RIGHT, steps=16)
    assert right.probabilities.tolist() == [[1, 0.75, 0.5, 0.25, *[0] * 13]]
    assert right.areas.tolist() == [2 / 16]
    assert deletion(corner(), 1 - RIGHT, steps=16).areas.tolist() == [14 / 16]


def test_the_area_between_few_points_is_that_of_trapezoids() -> None:
    curve = insertion(corner(), RIGHT, baseline="zero", steps=2)
    assert curve.probabilities.tolist() == [[0, 1, 1]]
    assert curve.areas.tolist() == [0.75]
    assert insertion(corner(), RIGHT, baseline="zero", steps=1).areas.tolist() == [0.5]


def test_steps_that_do_not_divide_the_pixels_are_as_wide_as_what_they_change() -> None:
    # The steps end at 5.33 and 10.67 pixels, rounded to 5 and 11.
    curve = insertion(corner(), RIGHT, baseline="zero", steps=3)
    assert curve.shares.tolist() == [0, 5 / 16, 11 / 16, 1]
    assert curve.areas.tolist() == [5 / 32 + 11 / 16]
    fine = insertion(corner(), RIGHT, baseline="zero", steps=40)  # more steps than pixels
    assert fine.probabilities.shape == (1, 41)
    assert fine.areas.item() == pytest.approx(14 / 16, abs=1e-6)


def test_a_map_without_an_order_has_one_by_chance() -> None:
    for flat in (torch.ones(1, 4, 4), torch.zeros(1, 4, 4), -torch.ones(1, 4, 4)):
        areas = [insertion(corner(), flat, baseline="zero", steps=16, seed=seed).areas.item() for seed in range(150)]
        assert len(set(areas)) > 20
        # The mean of 150 areas has a standard deviation of 0.01.
        assert sum(areas) / len(areas) == pytest.approx(0.5, abs=0.04)
        assert areas[7] == insertion(corner(), flat, baseline="zero", steps=16, seed=7).areas.item()


def test_sufficiency_by_hand() -> None:
    assert sufficiency(corner(), RIGHT, share=0.25, baseline="zero").tolist() == [0]
    assert sufficiency(corner(), RIGHT, share=0.125, baseline="zero").tolist() == [0.5]
    assert sufficiency(corner(), -RIGHT, share=0.75, baseline="zero").tolist() == [1]
    # The default share of 1/5 is 3 of 16 pixels.
    assert sufficiency(corner(), RIGHT, baseline="zero").tolist() == [0.25]
    dark = corner(torch.where(RIGHT[:, None] > 0, 0.2, 1.0))
    assert sufficiency(dark, -RIGHT, share=0.5, baseline="mean").tolist() == pytest.approx([0.2 - 0.8])


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_probabilities_of_exactly_one_and_zero(logit: float) -> None:
    class Sure(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.stack([images.mean((1, 2, 3)) * 0 + logit, images.mean((1, 2, 3)) * 0], 1)

    subject = Subject(Sure(), WHITE, 0)
    expected = float(logit > 0)
    assert subject.probabilities.tolist() == [expected]
    assert insertion(subject, RIGHT).areas.tolist() == [expected]
    assert deletion(subject, RIGHT).areas.tolist() == [expected]
    assert sufficiency(subject, RIGHT).tolist() == [0]


# Against slow loops


@pytest.mark.parametrize("baseline", BASELINES)
def test_insertion_and_deletion_equal_the_loops(baseline: str) -> None:
    subject, heatmaps = tiny_subject(), random_maps(3, 12, 16)
    inserted = insertion(subject, heatmaps, baseline=baseline, steps=7)
    deleted = deletion(subject, heatmaps, baseline=baseline, steps=7)
    for i, score in enumerate(tiny_scores()):
        picture, heatmap = TINY[i].double().numpy(), heatmaps[i].double().numpy()
        hidden = {
            "blur": slow.blurred(picture, 1),
            "mean": np.stack([np.full((12, 16), sum(row.flatten()) / row.size) for row in picture]),
            "zero": np.zeros_like(picture),
        }[baseline]
        scores, area = slow.curve(hidden, picture, heatmap, 7, score)
        assert max(scores) > 1.05 * min(scores)
        np.testing.assert_allclose(inserted.probabilities[i], scores, rtol=1e-5)
        np.testing.assert_allclose(inserted.areas[i], area, rtol=1e-5)
        scores, area = slow.curve(picture, hidden, heatmap, 7, score)
        np.testing.assert_allclose(deleted.probabilities[i], scores, rtol=1e-5)
        np.testing.assert_allclose(deleted.areas[i], area, rtol=1e-5)


def test_sufficiency_equals_the_loop() -> None:
    subject, heatmaps = tiny_subject(), random_maps(3, 12, 16)
    drops = sufficiency(subject, heatmaps, share=0.3)
    for i, score in enumerate(tiny_scores()):
        picture = TINY[i].double().numpy()
        top_pixels = slow.order(heatmaps[i].double().numpy())[:58]  # 30 % of 192 pixels
        lost = score(picture) - score(slow.replaced(slow.blurred(picture, 1), picture, top_pixels))
        assert drops[i].item() == pytest.approx(lost, abs=1e-6)
    assert drops.abs().min() > 1e-5
    default_drops = sufficiency(subject, heatmaps)  # the default share of 1/5 is 38 pixels
    picture, ordered = TINY[0].double().numpy(), slow.order(heatmaps[0].double().numpy())
    score = tiny_scores()[0]
    lost = score(picture) - score(slow.replaced(slow.blurred(picture, 1), picture, ordered[:38]))
    assert default_drops[0].item() == pytest.approx(lost, abs=1e-6)


@pytest.mark.parametrize(("size", "radius"), [((12, 16), 1), ((90, 70), 2), ((5, 2), 1), ((1, 9), 1), ((60, 68), 1)])
def test_the_blur_equals_the_loop(size: tuple[int, int], radius: int) -> None:
    pictures = torch.randn(2, 2, *size, generator=torch.Generator().manual_seed(0))
    baseline = make_baseline(pictures, "blur")
    for picture, expected in zip(pictures[:, :1], baseline[:, :1]):
        np.testing.assert_allclose(expected, slow.blurred(picture.double().numpy(), radius), atol=1e-5)


def test_areas_of_the_usual_size_are_those_of_rises_code() -> None:
    """RISE takes 224 steps of 224 pixels. This compares its kernel, its padding and its area."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(1, 3, 224, 224, generator=generator)
    heatmaps = torch.randperm(224 * 224, generator=generator).reshape(1, 224, 224).float()
    # Large weights make the blurred image's probability differ clearly from the original's.
    weights = torch.randn(3, 7, 7, generator=generator) * 40

    class Coarse(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            logit = (nn.functional.adaptive_avg_pool2d(images.abs(), 7).double() * weights).mean((1, 2, 3))
            return torch.stack([logit, -logit], 1)

    def score(picture: np.ndarray) -> float:
        return float(Coarse()(torch.from_numpy(picture)[None]).softmax(1)[0, 0])

    subject = Subject(Coarse(), images, 0)
    picture, heatmap = images[0].double().numpy(), heatmaps[0].double().numpy()
    hidden = slow.blurred(picture, 5)
    assert abs(score(hidden) - score(picture)) > 0.1
    inserted, deleted = insertion(subject, heatmaps, steps=224), deletion(subject, heatmaps, steps=224)
    assert inserted.areas.item() == pytest.approx(slow.rise_area(hidden, picture, heatmap, score), abs=1e-6)
    assert deleted.areas.item() == pytest.approx(slow.rise_area(picture, 0 * picture, heatmap, score), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", BASELINES)
def test_a_baseline_is_of_the_images_type(kind: str, dtype: torch.dtype) -> None:
    baseline = make_baseline(TINY.to(dtype), kind)
    assert baseline.dtype == dtype
    expected = make_baseline(TINY, kind)
    torch.testing.assert_close(baseline.float(), expected, atol=0.02, rtol=0.02)
    assert kind == "zero" or expected.abs().max() > 0.01


def test_pixels_are_exactly_those_of_either_picture() -> None:
    """At each precision, every pixel is exactly the image's or the baseline's, even if the two differ much."""
    batches: list[Tensor] = []

    class Watching(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            batches.append(images.clone())
            return images.flatten(1)[:, :2]

    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        batches.clear()
        images = (TINY * 1e3).to(dtype)
        hidden = make_baseline(images, "blur")
        insertion(Subject(Watching(), images, 0), random_maps(3, 12, 16), steps=5)
        variants = torch.cat(batches)[len(images) :].unflatten(0, (-1, 3))  # the mixed images, and then the baseline
        is_original = torch.isclose(variants, images, rtol=0, atol=0)
        assert (is_original | (variants == hidden)).all()
        counts = is_original.all(2).sum((2, 3)).tolist()
        assert counts[:-1] == [[38] * 3, [77] * 3, [115] * 3, [154] * 3]


# Inputs, and traces on the model


def test_heatmaps_of_any_kind() -> None:
    subject = tiny_subject()
    heatmaps = random_maps(3, 12, 16)
    expected = insertion(subject, heatmaps, steps=4).areas
    for variant in (
        heatmaps.numpy(),
        heatmaps[:, None],
        heatmaps.double() * 1e3 - 7,
        heatmaps.clone().requires_grad_(),
    ):
        torch.testing.assert_close(insertion(subject, variant, steps=4).areas, expected, rtol=0, atol=0)
    explanation = gradcam.explain(sharp_model(), TINY.double(), "0", target=[0, 3, 1])
    with_ties = insertion(subject, explanation.heatmaps[:, 0], steps=4).areas
    assert torch.equal(insertion(subject, explanation, steps=4).areas, with_ties)


def test_the_same_seed_gives_the_same_to_the_last_digit() -> None:
    blank = torch.zeros(3, 12, 16)
    for metric in (insertion, deletion):
        first, second = metric(tiny_subject(), blank, seed=1), metric(tiny_subject(), blank, seed=1)
        assert torch.equal(first.probabilities, second.probabilities)
        assert torch.equal(first.areas, second.areas)
        assert not torch.equal(first.areas, metric(tiny_subject(), blank, seed=2).areas)
    assert torch.equal(sufficiency(tiny_subject(), blank, seed=1), sufficiency(tiny_subject(), blank, seed=1))
    assert not torch.equal(sufficiency(tiny_subject(), blank, seed=1), sufficiency(tiny_subject(), blank, seed=2))


def test_values_are_computed_once() -> None:
    """Two methods with five steps each run their variants, the images, and either baseline once."""
    rows: list[int] = []
    subject_model = tiny_model()
    subject_model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    subject = Subject(subject_model, TINY)
    for heatmaps in (random_maps(3, 12, 16), -random_maps(3, 12, 16)):
        insertion(subject, heatmaps, steps=5)
        deletion(subject, heatmaps, steps=5)
    assert sum(rows) == 3 * (1 + 2 + 2 * 2 * 4)
    sufficiency(subject, random_maps(3, 12, 16), baseline="mean")
    assert sum(rows) == 3 * (1 + 2 + 2 * 2 * 4 + 1)


def test_model_and_inputs_are_left_unchanged() -> None:
    model, images, heatmaps = tiny_model().train(), TINY.clone(), random_maps(3, 12, 16)
    before, heatmaps_before = traces(model), heatmaps.clone()
    subject = Subject(model, images)
    insertion(subject, heatmaps, steps=3)
    deletion(subject, heatmaps, steps=3)
    sufficiency(subject, heatmaps)
    assert_same(before, traces(model))
    assert torch.equal(images, TINY)
    assert torch.equal(heatmaps, heatmaps_before)


def test_a_curve_says_what_it_is() -> None:
    curve = insertion(corner(), RIGHT, baseline="zero", steps=16)
    assert isinstance(curve, Curve)
    assert repr(curve) == "Curve(1 image(s), 17 points, mean area 0.875)"
    assert {curve.shares.dtype, curve.probabilities.dtype, curve.areas.dtype} == {torch.float32}


@pytest.mark.parametrize("metric", [insertion, deletion])
@pytest.mark.parametrize("steps", [0, -3, True, 2.0, None])
def test_steps_that_cannot_be(metric: Callable[..., Curve], steps: Any) -> None:
    with pytest.raises(GradcamError, match=rf"{metric.__name__}: steps is .*, expected an int, 1 or more"):
        metric(corner(), RIGHT, steps=steps)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), True, "half"])
def test_shares_that_cannot_be(share: Any) -> None:
    with pytest.raises(GradcamError, match=r"sufficiency: share is .*, expected a number above 0 and below 1"):
        sufficiency(corner(), RIGHT, share=share)


@pytest.mark.parametrize("metric", [insertion, deletion, sufficiency])
def test_a_baseline_or_heatmaps_that_do_not_fit(metric: Callable[..., Any]) -> None:
    with pytest.raises(GradcamError, match=r"There is no baseline 'blurr'. Choose 'blur'\."):
        metric(corner(), RIGHT, baseline="blurr")
    for unknown in (None, ["blur"], WHITE):
        with pytest.raises(GradcamError, match=r"Choose 'blur', 'mean', 'zero'\."):
            metric(corner(), RIGHT, baseline=unknown)
    with pytest.raises(ImageError, match=r"shape \(1, 2, 4\), expected \(1, 4, 4\)"):
        metric(corner(), RIGHT[:, :2])
    with pytest.raises(ImageError, match="NaN"):
        metric(corner(), RIGHT / 0)
