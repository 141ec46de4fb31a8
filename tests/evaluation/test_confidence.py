"""Test confidence and coherency of images multiplied by their maps, by hand and by definition."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import BlindLayerError, GradcamError, ImageError
from gradcam.evaluation import ConfidenceChange, Explainer, Subject, adcc, coherency, complexity, confidence_change
from tests import curve_oracles as slow
from tests.helpers import TINY, assert_same, tiny_model, traces

Classifier = gradcam.Classifier
MAPS = torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(3))


class Mean(nn.Module):
    """A model whose probabilities are each image's mean and one minus it."""

    def forward(self, images: Tensor) -> Tensor:
        probability = images.mean((1, 2, 3))
        return torch.stack([probability, 1 - probability], 1)


def judge(values: list[float], target: int = 0) -> Subject:
    """Return a subject with an image of four equal pixels for each value."""
    pictures = torch.tensor(values)[:, None, None, None].expand(-1, 1, 2, 2)
    return Subject(Mean(), pictures, target, activation="none")


def sharp_model() -> nn.Module:
    model = tiny_model().double()
    model[-1].weight.data.mul_(100)
    return model


HALF = torch.tensor([[[1.0, 0.0], [3.0, -3.0]]])  # scaled to [0,1], this is 1/3, 0, 1 and 0


# By hand


def test_confidence_changes_by_hand() -> None:
    change = confidence_change(judge([0.5]), HALF)  # the masked image has a third of the mean 0.5
    assert change.drop.tolist() == pytest.approx([2 / 3])
    assert (change.increase.tolist(), change.gain.tolist()) == ([0], [0])
    other_class = confidence_change(judge([0.5], target=1), HALF)  # the probability rises from 1/2 to 5/6
    assert other_class.drop.tolist() == [0]
    assert other_class.increase.tolist() == [1]
    assert other_class.gain.tolist() == pytest.approx([2 / 3])


def test_probabilities_of_exactly_zero_and_one() -> None:
    for target, values in ((0, [0.0, 1.0]), (1, [1.0, 0.0])):  # the probabilities are 0 and 1
        change = confidence_change(judge(values, target), HALF.expand(2, -1, -1))
        for values_of_change in (change.drop, change.increase, change.gain):
            assert values_of_change.isfinite().all()
        assert change.drop[0] == 0
        assert change.gain[1] == 0
    assert change.gain.tolist() == pytest.approx([2 / 3, 0])  # the probability rises from 0 to 2/3
    assert change.increase.tolist() == [1, 0]
    assert confidence_change(judge([1.0]), HALF).drop.tolist() == pytest.approx([2 / 3])
    assert confidence_change(judge([0.0]), HALF).increase.tolist() == [0]


def test_a_blank_map_hides_all_and_a_constant_one_nothing() -> None:
    for blank in (torch.zeros(1, 2, 2), -torch.ones(1, 2, 2)):
        change = confidence_change(judge([0.3]), blank)
        assert (change.drop.tolist(), change.increase.tolist(), change.gain.tolist()) == ([1], [0], [0])
    change = confidence_change(judge([0.3], target=1), torch.zeros(1, 2, 2))
    assert (change.increase.tolist(), change.gain.tolist()) == ([1], [1])
    for constant in (torch.ones(1, 2, 2), torch.full((1, 2, 2), 1e-3)):
        change = confidence_change(judge([0.3]), constant)
        assert (change.drop.tolist(), change.increase.tolist(), change.gain.tolist()) == ([0], [0], [0])


def test_a_constant_map_changes_nothing_even_where_batches_round_otherwise() -> None:
    class Rounding(nn.Module):
        """A model whose output grows slightly with each call, like rounding that depends on the batch."""

        calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return images.flatten(1)[:, :2] + torch.tensor([1e-6 * self.calls, 0])

    subject = Subject(Rounding(), torch.zeros(2, 1, 2, 2), 0)
    maps = torch.stack([torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.5]])])
    assert confidence_change(subject, maps).increase.tolist() == [0, 1]


def test_complexity_by_hand() -> None:
    maps = torch.cat([HALF, torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.2), -torch.ones(1, 2, 2)])
    assert complexity(maps).tolist() == pytest.approx([1 / 3, 0, 1, 0])
    assert complexity(maps.numpy()[:, None]).dtype == torch.float32


@pytest.mark.parametrize("zero", [(1.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.5, 1.0)])
def test_adcc_is_zero_where_a_part_of_it_is(zero: tuple[float, float, float]) -> None:
    assert adcc(*([value] for value in zero)).tolist() == [0]


def test_adcc_is_the_harmonic_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    drop, coherent, complex_ = torch.rand(3, 20, generator=generator)
    parts = zip(coherent.tolist(), (1 - complex_).tolist(), (1 - drop).tolist())
    expected = [statistics.harmonic_mean(part) for part in parts]
    np.testing.assert_allclose(adcc(drop, coherent.numpy(), complex_.tolist()), expected, rtol=1e-5)


# Coherency


def give(maps: Tensor) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    return lambda model, images, classes: maps[: len(images)]


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (HALF, 1),
        (HALF.clamp(min=0) * 7, 1),
        (3 - HALF.clamp(min=0), 0),  # the opposite order
        (torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]), (1 - 6**-0.5) / 2),
        (torch.zeros(1, 2, 2), 0.5),
        (torch.ones(1, 2, 2), 0.5),
        (-torch.ones(1, 2, 2), 0.5),
    ],
)
def test_coherency_by_hand(again: Tensor, expected: float) -> None:
    assert coherency(judge([0.5]), HALF, give(again)).tolist() == pytest.approx([expected], abs=1e-6)


def test_blank_and_constant_maps_are_not_explained_again() -> None:
    calls: list[tuple[Tensor, Tensor]] = []

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        calls.append((images, classes))
        return HALF

    maps = torch.cat([torch.zeros(1, 2, 2), HALF, torch.ones(1, 2, 2)])
    subject = Subject(Mean(), torch.tensor([1.0, 2, 3])[:, None, None, None].expand(-1, 1, 2, 2), [0, 1, 0])
    assert coherency(subject, maps, explain).tolist() == pytest.approx([0.5, 1, 0.5])
    ((images, classes),) = calls
    torch.testing.assert_close(images, 2 * HALF.clamp(min=0)[:, None] / 3)
    assert classes.tolist() == [1]
    assert coherency(subject, maps[[0, 2, 0]], explain).tolist() == [0.5] * 3
    assert len(calls) == 1


def test_a_picture_in_which_no_gradient_is_left_has_no_second_map() -> None:
    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        raise BlindLayerError("no gradient")

    assert coherency(judge([0.5]), HALF, explain).tolist() == [0.5]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_second_map_is_made_in_evaluation_mode_with_gradients(mode: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Dropout(), Mean()).train()
    before, states = traces(model), []

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        states.append((model[0].training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return HALF.clone().requires_grad_()

    with mode():
        subject = Subject(model, torch.ones(1, 1, 2, 2), 0, activation="none")
        assert not coherency(subject, HALF, explain).requires_grad
    assert states == [(False, True, False)]
    assert_same(before, traces(model))


def test_second_maps_that_do_not_fit() -> None:
    with pytest.raises(ImageError, match=r"shape \(1, 7, 7\), expected \(1, 2, 2\)"):
        coherency(judge([0.5]), HALF, give(torch.rand(1, 7, 7)))
    with pytest.raises(ImageError, match="NaN"):
        coherency(judge([0.5]), HALF, give(HALF / 0))


# Against slow loops


def test_confidence_changes_equal_the_definitions() -> None:
    model = sharp_model().eval()
    classes = [0, 3, 1]
    change = confidence_change(Subject(model, TINY.double(), classes), MAPS)
    expected = []
    for picture, heatmap, index in zip(TINY.double().numpy(), MAPS.double().numpy(), classes):

        def score(values: np.ndarray, index: int = index) -> float:
            logits = model(torch.from_numpy(values)[None])[0].tolist()
            return np.exp(logits[index]) / sum(np.exp(logits))

        expected.append(slow.change(picture, heatmap, score))
    np.testing.assert_allclose(torch.stack([change.drop, change.increase, change.gain], 1), expected, rtol=1e-4)
    assert change.drop.max() > 0.01
    assert change.gain.max() > 0.01


def test_coherency_equals_the_definition() -> None:
    model, images, classes = sharp_model(), TINY.double(), [0, 3, 1]
    explain = Explainer(("gradcam",), "0").only("gradcam")
    heatmaps = explain(model, images, torch.tensor(classes))
    coherencies = coherency(Subject(model, images, classes), heatmaps, explain)
    for i, index in enumerate(classes):
        masked = images[i : i + 1] * heatmaps[i].double()
        again = gradcam.explain(model, masked, "0", target=index).heatmaps[0, 0]
        r = slow.pearson(heatmaps[i].double().numpy(), again.double().numpy())
        assert coherencies[i].item() == pytest.approx((1 + r) / 2, abs=1e-5)
    assert coherencies.max() - coherencies.min() > 0.01


def test_complexity_equals_the_definition() -> None:
    expected = [sum(slow.unit(heatmap).flatten()) / 192 for heatmap in MAPS.double().numpy()]
    np.testing.assert_allclose(complexity(MAPS), expected, rtol=1e-5)


# Inputs, and traces on the model


def test_model_and_inputs_are_left_unchanged() -> None:
    model, images, heatmaps = tiny_model().train(), TINY.clone(), MAPS.clone()
    before = traces(model)
    subject = Subject(model, images)
    confidence_change(subject, heatmaps)
    coherency(subject, heatmaps, Explainer(("gradcam",), "0").only("gradcam"))
    complexity(heatmaps)
    assert_same(before, traces(model))
    assert torch.equal(images, TINY)
    assert torch.equal(heatmaps, MAPS)


def test_changes_say_what_they_are() -> None:
    change = confidence_change(judge([0.5]), HALF)
    assert isinstance(change, ConfidenceChange)
    assert repr(change) == "ConfidenceChange(1 image(s), means: drop 0.667, increase 0, gain 0)"
    assert {change.drop.dtype, change.increase.dtype, change.gain.dtype} == {torch.float32}


def test_heatmaps_that_do_not_fit() -> None:
    with pytest.raises(ImageError, match=r"shape \(1, 2, 1\), expected \(1, 2, 2\)"):
        confidence_change(judge([0.5]), HALF[..., :1])
    with pytest.raises(ImageError, match="NaN"):
        coherency(judge([0.5]), HALF / 0, give(HALF))
    with pytest.raises(ImageError, match=r"expected \(N,H,W\)"):
        complexity(HALF[0])


@pytest.mark.parametrize("name", ["drop", "coherency", "complexity"])
@pytest.mark.parametrize("value", [[1.5], [-0.1], [float("nan")], 0.5, [[0.5]], "half", None])
def test_what_adcc_cannot_be_made_of(name: str, value: Any) -> None:
    values = {"drop": [0.5], "coherency": [0.5], "complexity": [0.5], name: value}
    with pytest.raises(GradcamError, match=rf"The {name} is .*, expected a tensor \(N,\) of values from 0 to 1"):
        adcc(**values)


def test_adcc_of_different_numbers_of_images() -> None:
    with pytest.raises(GradcamError, match=r"2 of coherency, 1 of complexity\): expected one value"):
        adcc([0.5], [0.5, 0.5], [0.5])
