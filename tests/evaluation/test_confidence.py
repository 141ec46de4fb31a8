"""What picture times map keeps of a class and of its map: by hand, against the definitions, beside peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
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
    """The images' means as probabilities, and what is missing to one."""

    def forward(self, images: Tensor) -> Tensor:
        actual = images.mean((1, 2, 3))
        return torch.stack([actual, 1 - actual], 1)


def judge(values: list[float], target: int = 0) -> Subject:
    """A picture of four pixels for each value, all of that value."""
    pictures = torch.tensor(values)[:, None, None, None].expand(-1, 1, 2, 2)
    return Subject(Mean(), pictures, target, activation="none")


def sharp_model() -> nn.Module:
    model = tiny_model().double()
    model[-1].weight.data.mul_(100)
    return model


HALF = torch.tensor([[[1.0, 0.0], [3.0, -3.0]]])  # to [0,1]: a third, and one


# By hand


def test_confidence_changes_by_hand() -> None:
    actual = confidence_change(judge([0.5]), HALF)  # picture times map: a third of 0.5
    assert actual.drop.tolist() == pytest.approx([2 / 3])
    assert (actual.increase.tolist(), actual.gain.tolist()) == ([0], [0])
    against = confidence_change(judge([0.5], target=1), HALF)  # from 1/2 to 5/6
    assert against.drop.tolist() == [0]
    assert against.increase.tolist() == [1]
    assert against.gain.tolist() == pytest.approx([2 / 3])


def test_probabilities_of_exactly_zero_and_one() -> None:
    for target, values in ((0, [0.0, 1.0]), (1, [1.0, 0.0])):  # the probabilities are 0 and 1
        actual = confidence_change(judge(values, target), HALF.expand(2, -1, -1))
        for item in (actual.drop, actual.increase, actual.gain):
            assert item.isfinite().all()
        assert actual.drop[0] == 0
        assert actual.gain[1] == 0
    assert actual.gain.tolist() == pytest.approx([2 / 3, 0])  # from 0 to 2/3
    assert actual.increase.tolist() == [1, 0]
    assert confidence_change(judge([1.0]), HALF).drop.tolist() == pytest.approx([2 / 3])
    assert confidence_change(judge([0.0]), HALF).increase.tolist() == [0]


def test_a_blank_map_hides_all_and_a_constant_one_nothing() -> None:
    for blank in (torch.zeros(1, 2, 2), -torch.ones(1, 2, 2)):
        actual = confidence_change(judge([0.3]), blank)
        assert (actual.drop.tolist(), actual.increase.tolist(), actual.gain.tolist()) == ([1], [0], [0])
    actual = confidence_change(judge([0.3], target=1), torch.zeros(1, 2, 2))
    assert (actual.increase.tolist(), actual.gain.tolist()) == ([1], [1])
    for constant in (torch.ones(1, 2, 2), torch.full((1, 2, 2), 1e-3)):
        actual = confidence_change(judge([0.3]), constant)
        assert (actual.drop.tolist(), actual.increase.tolist(), actual.gain.tolist()) == ([0], [0], [0])


def test_a_constant_map_changes_nothing_even_where_batches_round_otherwise() -> None:
    class Rounding(nn.Module):
        """A little more each time."""

        calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return images.flatten(1)[:, :2] + torch.tensor([1e-6 * self.calls, 0])

    subject = Subject(Rounding(), torch.zeros(2, 1, 2, 2), 0)
    maps = torch.stack([torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.5]])])
    assert confidence_change(subject, maps).increase.tolist() == [0, 1]


def test_increases_are_strict() -> None:
    assert confidence_change(judge([0.0]), HALF).increase.tolist() == [0]  # zero before and after


def test_complexity_by_hand() -> None:
    maps = torch.cat([HALF, torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.2), -torch.ones(1, 2, 2)])
    assert complexity(maps).tolist() == pytest.approx([1 / 3, 0, 1, 0])
    assert complexity(maps.numpy()[:, None]).dtype == torch.float32


def test_adcc_by_hand() -> None:
    actual = adcc(torch.tensor([0.5, 0.0, 0.2]), torch.tensor([0.5, 1.0, 0.9]), torch.tensor([0.5, 0.0, 0.6]))
    assert actual.tolist() == pytest.approx([0.5, 1, 3 / (1 / 0.8 + 1 / 0.9 + 1 / 0.4)])


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
        (3 - HALF.clamp(min=0), 0),  # exactly the other way round
        (torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]), (1 - 6**-0.5) / 2),
        (torch.zeros(1, 2, 2), 0.5),
        (torch.ones(1, 2, 2), 0.5),
        (-torch.ones(1, 2, 2), 0.5),
    ],
)
def test_coherency_by_hand(again: Tensor, expected: float) -> None:
    assert coherency(judge([0.5]), HALF, give(again)).tolist() == pytest.approx([expected], abs=1e-6)


def test_blank_and_constant_maps_are_not_explained_again() -> None:
    asked: list[tuple[Tensor, Tensor]] = []

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        asked.append((images, classes))
        return HALF

    maps = torch.cat([torch.zeros(1, 2, 2), HALF, torch.ones(1, 2, 2)])
    subject = Subject(Mean(), torch.tensor([1.0, 2, 3])[:, None, None, None].expand(-1, 1, 2, 2), [0, 1, 0])
    assert coherency(subject, maps, explain).tolist() == pytest.approx([0.5, 1, 0.5])
    ((images, classes),) = asked
    torch.testing.assert_close(images, 2 * HALF.clamp(min=0)[:, None] / 3)
    assert classes.tolist() == [1]
    assert coherency(subject, maps[[0, 2, 0]], explain).tolist() == [0.5] * 3
    assert len(asked) == 1


def test_a_picture_in_which_no_gradient_is_left_has_no_second_map() -> None:
    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        raise BlindLayerError("no gradient")

    assert coherency(judge([0.5]), HALF, explain).tolist() == [0.5]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_second_map_is_made_in_evaluation_mode_with_gradients(mode: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Dropout(), Mean()).train()
    before, seen = traces(model), []

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        seen.append((model[0].training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return HALF.clone().requires_grad_()

    with mode():
        subject = Subject(model, torch.ones(1, 1, 2, 2), 0, activation="none")
        assert not coherency(subject, HALF, explain).requires_grad
    assert seen == [(False, True, False)]
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
    actual = confidence_change(Subject(model, TINY.double(), classes), MAPS)
    expected = []
    for picture, heatmap, wanted in zip(TINY.double().numpy(), MAPS.double().numpy(), classes):

        def score(values: np.ndarray, wanted: int = wanted) -> float:
            logits = model(torch.from_numpy(values)[None])[0].tolist()
            return np.exp(logits[wanted]) / sum(np.exp(logits))

        expected.append(slow.change(picture, heatmap, score))
    np.testing.assert_allclose(torch.stack([actual.drop, actual.increase, actual.gain], 1), expected, rtol=1e-4)
    assert actual.drop.max() > 0.01
    assert actual.gain.max() > 0.01


def test_coherency_equals_the_definition() -> None:
    model, images, classes = sharp_model(), TINY.double(), [0, 3, 1]
    explain = Explainer(("gradcam",), "0").only("gradcam")
    heatmaps = explain(model, images, torch.tensor(classes))
    actual = coherency(Subject(model, images, classes), heatmaps, explain)
    for i, wanted in enumerate(classes):
        masked = images[i : i + 1] * heatmaps[i].double()
        again = gradcam.explain(model, masked, "0", target=wanted).heatmaps[0, 0]
        r = slow.pearson(heatmaps[i].double().numpy(), again.double().numpy())
        assert actual[i].item() == pytest.approx((1 + r) / 2, abs=1e-5)
    assert actual.max() - actual.min() > 0.01


def test_complexity_equals_the_definition() -> None:
    expected = [sum(slow.unit(heatmap).flatten()) / 192 for heatmap in MAPS.double().numpy()]
    np.testing.assert_allclose(complexity(MAPS), expected, rtol=1e-5)


# Beside peers, on photographs


def photographs(classifier: Classifier, photo: Callable[[str], Path]) -> Tensor:
    return classifier.batch([gradcam.read_image(photo(name)) for name in ("crocodile.webp", "koala.webp")])


@pytest.mark.slow
def test_changes_are_grad_cams_times_the_probability(classifier: Classifier, photo: Callable[[str], Path]) -> None:
    """Its DropInConfidence is the drop itself, max(0, Y - O), not the share of Y that the papers take."""
    peer = pytest.importorskip("pytorch_grad_cam.metrics.cam_mult_image")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    images = photographs(classifier, photo)
    subject = Subject(classifier.model, images)
    good = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
    wanted = [targets.ClassifierOutputSoftmaxTarget(int(category)) for category in subject.classes]
    seen = []
    for maps in (good, 1 - good):
        actual = confidence_change(subject, maps / maps.amax((1, 2), keepdim=True))
        given = (images, (maps / maps.amax((1, 2), keepdim=True)).numpy(), wanted, classifier.model)
        np.testing.assert_allclose(actual.drop * subject.probabilities, peer.DropInConfidence()(*given), atol=1e-5)
        np.testing.assert_array_equal(actual.increase, peer.IncreaseInConfidence()(*given))
        seen.append(actual)
    assert (seen[0].drop < seen[1].drop).all()
    assert seen[1].drop.min() > 0.05


@pytest.mark.slow
def test_averages_are_those_of_torchcam(classifier: Classifier, photo: Callable[[str], Path]) -> None:
    """Up to the 1e-7 that it adds to Y. It explains the probability, where it is told to measure that."""
    metrics = pytest.importorskip("torchcam.metrics")
    methods = pytest.importorskip("torchcam.methods")
    images, model = photographs(classifier, photo), classifier.model
    subject = Subject(model, images)
    classes = subject.classes.tolist()
    with methods.GradCAM(model, "layer4") as extractor:
        peer = metrics.ClassificationMetric(extractor, lambda output: output.softmax(1))
        peer.update(images.clone().requires_grad_(), classes)
        (grids,) = extractor(classes, model(images.clone().requires_grad_()).softmax(1))
    heatmaps = nn.functional.interpolate(grids[:, None], (224, 224), mode="bilinear")
    actual = confidence_change(subject, heatmaps * (1 / heatmaps.amax((2, 3), keepdim=True)))
    loose = peer.summary()["avg_drop"]  # its maps do not reach one, once enlarged: they hide a little more
    assert actual.drop.mean().item() == pytest.approx(loose, abs=0.03)
    assert actual.increase.mean().item() == peer.summary()["conf_increase"]


@pytest.mark.slow
def test_coherency_and_complexity_are_those_of_grad_cam(classifier: Classifier, photo: Callable[[str], Path]) -> None:
    peer = pytest.importorskip("pytorch_grad_cam.metrics.arcc")
    images, model = photographs(classifier, photo), classifier.model
    subject = Subject(model, images)
    explain = Explainer(("gradcam",), "layer4").only("gradcam")
    heatmaps = explain(model, images, subject.classes)

    def explain_again(input_tensor: Tensor, targets: Any) -> np.ndarray:
        return explain(model, input_tensor, subject.classes).numpy()

    expected = peer.Coherency()(images, heatmaps.numpy(), None, model, explain_again)
    np.testing.assert_allclose(coherency(subject, heatmaps, explain), expected, atol=1e-4)
    np.testing.assert_allclose(complexity(heatmaps), peer.Complexity()(heatmaps.numpy()), rtol=1e-5)
    blank = torch.zeros_like(heatmaps)
    assert coherency(subject, blank, explain).tolist() == [0.5, 0.5]
    assert peer.Coherency()(images, blank.numpy(), None, model, explain_again).tolist() == [0.5, 0.5]


def test_captums_maps_can_be_judged() -> None:
    from captum.attr import LayerAttribution, LayerGradCam

    model = sharp_model().eval()

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        actual = LayerGradCam(model, model[0]).attribute(images, target=classes, relu_attributions=True)
        return LayerAttribution.interpolate(actual, (12, 16))  # (N,1,H,W)

    subject = Subject(model, TINY.double(), [0, 3, 1])
    captums = explain(model, TINY.double(), subject.classes)
    ours = Explainer(("gradcam",), "0").only("gradcam")  # of a layer of the images' size: nothing is enlarged
    same = ours(model, TINY.double(), subject.classes)
    torch.testing.assert_close(coherency(subject, captums, explain), coherency(subject, same, ours))
    torch.testing.assert_close(confidence_change(subject, captums).drop, confidence_change(subject, same).drop)
    assert confidence_change(subject, same).drop.max() > 0.01


# What comes in, what is left


def test_nothing_is_left_on_what_is_given() -> None:
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
    actual = confidence_change(judge([0.5]), HALF)
    assert isinstance(actual, ConfidenceChange)
    assert repr(actual) == "ConfidenceChange(1 image(s), means: drop 0.667, increase 0, gain 0)"
    assert {actual.drop.dtype, actual.increase.dtype, actual.gain.dtype} == {torch.float32}


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
