"""Compare methods that run the model again with slow loops from their papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.cam.forward import recorded_pass
from gradcam.cam.grid import find_activations
from gradcam.cam.methods import perturbation as ablation
from gradcam.errors import GradcamError, LayerError
from gradcam.hooks.containers import to_batch
from gradcam.hooks.memory import RerunBudget
from gradcam.layers.find import find_layer
from tests import perturbation_oracles as slow
from tests.helpers import TINY, tiny_model

CLASSES = [[0, 3], [4, 1], [2, 2]]
IMAGES = TINY.double()


def select_classes(classes: list[list[int]]) -> Callable[[Tensor], Tensor]:
    return lambda output: output.gather(1, torch.tensor(classes))


def make_nonlinear_model() -> nn.Module:
    """Return the tiny model with a tail that is not linear in the layer."""
    model = tiny_model().double().eval()
    model[6] = nn.Sequential(nn.Flatten(), nn.Softplus(beta=20))
    return model


def assert_maps(maps: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert expected.abs().max() > 0
    torch.testing.assert_close(maps.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


# Layers 1 and 3 precede an in-place ReLU; layers 2 and 4 are in-place ReLUs.
@pytest.mark.parametrize("layer", ["0", "1", "2", "3", "4"])
def test_ablationcam_equals_the_loop_over_the_channels(layer: str) -> None:
    weights, activations = slow.ablationcam(make_nonlinear_model(), IMAGES, layer, select_classes(CLASSES))
    explanation = gradcam.explain(make_nonlinear_model(), IMAGES, layer, method="ablationcam", target=CLASSES)
    assert_maps(explanation.maps, slow.sum_of_channels(weights, activations))
    options = {"method": "ablationcam", "target": CLASSES, "evidence": "signed"}
    signed = gradcam.explain(make_nonlinear_model(), IMAGES, layer, **options)
    assert_maps(signed.maps, torch.einsum("nkc,nchw->nkhw", weights, activations))


def test_ablationcam_by_hand_with_scores_below_and_at_zero() -> None:
    class Sum(nn.Module):
        def __init__(self, offset: float) -> None:
            super().__init__()
            self.layer, self.offset = nn.Identity(), offset

        def forward(self, images: Tensor) -> Tensor:
            return self.layer(images).sum((1, 2, 3))[:, None] + self.offset

    # The channels sum to 3, 3 and 0, so the score without offset is 6.
    image = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]], [[0.0, 0.0]]]])
    for offset, divisor in ((0.0, 6.0), (-8.0, 2.0), (-6.0, 1.0)):  # the score is 6, -2 or 0
        explanation = gradcam.explain(Sum(offset), image, "layer", method="ablationcam", target=1, evidence="signed")
        assert explanation.maps.tolist() == [[[[(3 * 1 + 3 * 3) / divisor, 3 * 2 / divisor]]]]


def assert_weights(model: nn.Module, image: Tensor, layer: str, classes: list[int], channels: list[int]) -> None:
    """Compare some weights with a loop, from a map to which only these channels contribute.

    The map of all channels is a sum, which does not reveal single weights.
    """
    batch, score = to_batch(image), select_classes([classes])
    with recorded_pass(model, batch, [find_layer(model, layer)], [classes], grad_order=0) as recorded:
        site = find_activations(layer, recorded)
        some = torch.zeros_like(site.grid)
        some[:, channels] = site.grid[:, channels]
        explanation = ablation.ablationcam(recorded, dataclasses.replace(site, grid=some), RerunBudget(batch))
        plain = score(recorded.output)
    weighted = []
    for channel in channels:

        def ablate(output: Tensor, channel: int = channel) -> Tensor:
            output[:, channel] = 0
            return output

        weight = (plain - slow.scores_with(model, image, layer, ablate, score)) / plain.abs()
        weighted.append(weight[..., None, None] * slow.layer_output(model, image, layer)[:, None, channel])
    assert_maps(explanation.maps, sum(weighted).double())


@pytest.mark.parametrize("layer", ["layer4", "layer3", "layer4.1.conv2"])
def test_ablationcam_of_resnet_equals_the_loop_over_channels(layer: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None, num_classes=7).eval()
    image = torch.randn(1, 3, 64, 64)
    assert_weights(model.double(), image.double(), layer, [2, 5], [0, 1, 77, 130, 255])


@pytest.mark.parametrize("layer", ["1", "2", "4"])
def test_reciprocam_equals_the_loop_over_the_places(layer: str) -> None:
    lengths = (6, 8) if layer == "4" else (12, 16)
    expected = slow.reciprocam(make_nonlinear_model(), IMAGES, layer, select_classes(CLASSES), lengths)
    options = {"method": "reciprocam", "target": CLASSES, "evidence": "signed"}
    explanation = gradcam.explain(make_nonlinear_model(), IMAGES, layer, **options)
    assert_maps(explanation.maps, expected)
    assert expected.min() < 0 < expected.max()


def test_reciprocam_of_a_volume() -> None:
    torch.manual_seed(0)
    tail = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Softplus(20), nn.Linear(3, 2)]
    model = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), *tail).double()
    images = torch.randn(2, 1, 3, 2, 4, dtype=torch.float64)
    expected = slow.reciprocam(model, images, "1", select_classes([[1], [0]]), (3, 2, 4))
    explanation = gradcam.explain(model, images, "1", method="reciprocam", target=[1, 0], evidence="signed")
    assert_maps(explanation.maps, expected)


def test_reciprocam_has_zero_where_nothing_is_added() -> None:
    model, options = make_nonlinear_model(), {"method": "reciprocam", "target": 1, "evidence": "signed"}
    assert gradcam.explain(model, IMAGES * 0, "0", **options).maps.abs().max() > 0
    model[0].bias.data.zero_()  # The layer's output is then zero.
    assert gradcam.explain(model, IMAGES * 0, "0", **options).maps.abs().max() == 0


def make_model_with_dead_channels() -> nn.Module:
    """Return a model whose channel 1 is zero everywhere and channel 4 is three everywhere."""
    model = make_nonlinear_model()
    for channel, bias in ((1, -9.0), (4, 3.0)):
        model[3].weight.data[channel] = 0
        model[3].bias.data[channel] = bias
    return model


def test_scorecam_equals_the_loop_and_leaves_constant_channels_out() -> None:
    model = make_model_with_dead_channels()
    weights, activations = slow.scorecam_weights(model, IMAGES, "4", CLASSES)
    assert (weights[:, :, [1, 4]] == 0).all()
    passes: list[tuple[int, int]] = []
    options = {"method": "scorecam", "target": CLASSES, "progress": lambda *both: passes.append(both)}
    explanation = gradcam.explain(model, IMAGES, "4", **options)
    assert passes[-1] == (4, 4)
    assert_maps(explanation.maps, slow.sum_of_channels(weights, activations))


def test_scorecam_where_no_channel_varies_is_blank() -> None:
    model = make_nonlinear_model()
    model[3].weight.data.zero_()
    explanation = gradcam.explain(model, IMAGES, "4", method="scorecam", target=CLASSES)
    assert explanation.maps.shape == (3, 2, 6, 8)
    assert not explanation.maps.any()


def test_scorecam_where_images_differ_in_their_constant_channels() -> None:
    class Dark(nn.Module):
        """A model whose channels see one colour each."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head = nn.MaxPool2d(2), nn.Linear(3, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.layer(images).square().mean((2, 3)))

    model, images = Dark().double(), IMAGES.clone()
    images[0, 1], images[1] = 0.5, 0.0  # image by image, two channels vary, none, and all three
    weights, activations = slow.scorecam_weights(model, images[[0, 2]], "layer", [CLASSES[0], CLASSES[2]])
    maps = gradcam.explain(model, images, "layer", method="scorecam", target=CLASSES).maps
    assert_maps(maps[[0, 2]], slow.sum_of_channels(weights, activations))
    assert not maps[1].any()


def test_fasterscorecam_keeps_to_the_channels_that_vary_most() -> None:
    method = gradcam.METHODS["fasterscorecam"].using(channels=2)
    explanation = gradcam.explain(make_nonlinear_model(), IMAGES, "4", method=method, target=CLASSES)

    def most_varied(activations: np.ndarray) -> list[int]:
        return sorted(range(len(activations)), key=lambda channel: -activations[channel].var())[:2]

    weights, activations = slow.scorecam_weights(make_nonlinear_model(), IMAGES, "4", CLASSES, channels=most_varied)
    assert ((weights > 0).sum(2) == 2).all()
    assert_maps(explanation.maps, slow.sum_of_channels(weights, activations))


def test_sscam_equals_the_loop_over_samples() -> None:
    method = gradcam.METHODS["sscam"].using(samples=3, noise=0.7, seed=5)
    explanation = gradcam.explain(make_model_with_dead_channels(), IMAGES, "4", method=method, target=CLASSES)

    def noisy(mask: np.ndarray, rank: int) -> list[np.ndarray]:
        generators = [torch.Generator().manual_seed(5 + 3 * rank + sample) for sample in range(3)]
        return [mask + 0.7 * torch.randn(12, 16, generator=item).double().numpy() for item in generators]

    weights, activations = slow.scorecam_weights(make_model_with_dead_channels(), IMAGES, "4", CLASSES, masks_of=noisy)
    assert_maps(explanation.maps, slow.sum_of_channels(weights, activations))


def test_iscam_equals_the_loop_over_steps() -> None:
    method = gradcam.METHODS["iscam"].using(steps=4)
    explanation = gradcam.explain(make_model_with_dead_channels(), IMAGES, "4", method=method, target=CLASSES)

    def steps(mask: np.ndarray, rank: int) -> list[np.ndarray]:
        return [mask * 0.25, mask * 0.5, mask * 0.75, mask]

    weights, activations = slow.scorecam_weights(make_model_with_dead_channels(), IMAGES, "4", CLASSES, masks_of=steps)
    assert_maps(explanation.maps, slow.sum_of_channels(weights, activations))


def draw_mask(seed: int, size: tuple[int, int], cells: int, probability: float) -> np.ndarray:
    """Return a mask by section 3.2 of RISE's paper, with OpenCV's resizing."""
    generator = torch.Generator().manual_seed(seed)
    is_open = (torch.rand(cells, cells, generator=generator) < probability).double().numpy()
    cell = [-(-length // cells) for length in size]
    large = slow.enlarge(is_open, ((cells + 1) * cell[0], (cells + 1) * cell[1]))
    y0, x0 = (int(torch.randint(length, (1,), generator=generator)) for length in cell)
    return large[y0 : y0 + size[0], x0 : x0 + size[1]]


def test_rise_equals_the_mean_of_masks_by_their_scores() -> None:
    model, number, probability = make_nonlinear_model(), 23, 0.4
    method = gradcam.METHODS["rise"].using(masks=number, cells=3, probability=probability, seed=11)
    explanation = gradcam.explain(model, IMAGES, method=method, target=CLASSES, evidence="signed")
    masks = [draw_mask(11 + i, (12, 16), 3, probability) for i in range(number)]
    with torch.no_grad():
        scores = [select_classes(CLASSES)(model(IMAGES * torch.from_numpy(mask))) for mask in masks]
    paper = sum(score[:, :, None, None] * torch.from_numpy(mask) for score, mask in zip(scores, masks))
    of_mean = sum(scores)[:, :, None, None] / number * torch.from_numpy(sum(masks))
    assert_maps(explanation.maps, (paper - of_mean) / (number * probability))
    assert (explanation.layer, explanation.method) == ("input", "rise")


def test_rise_finds_the_one_place_that_counts() -> None:
    class Corner(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images[:, :, :4, :4].mean((1, 2, 3))[:, None]

    method = gradcam.METHODS["rise"].using(masks=600, cells=4)
    heatmap = gradcam.explain(Corner(), torch.ones(1, 1, 16, 16), method=method).heatmaps[0, 0]
    assert heatmap[:4, :4].min() > 0.5
    assert heatmap[8:, 8:].max() < 0.4


def test_rise_masks_are_open_as_often_as_they_should_be() -> None:
    from gradcam.cam.methods.perturbation import _sample_mask

    mean = torch.stack([_sample_mask((9, 14), 3, 0.3, seed) for seed in range(2000)]).mean(0)
    assert mean.shape == (9, 14)
    torch.testing.assert_close(mean, torch.full_like(mean, 0.3), rtol=0, atol=0.05)
    volume = _sample_mask((4, 6, 5), 2, 0.5, 0)
    assert volume.shape == (4, 6, 5)


def test_rise_stands_once_beside_layers() -> None:
    methods = ["gradcam", gradcam.METHODS["rise"].using(masks=5)]
    explanations = gradcam.compare(tiny_model(), TINY, layers=["2", "4"], methods=methods, target=1)
    assert list(explanations) == [("2", "gradcam"), ("4", "gradcam"), ("input", "rise")]
    assert explanations["input", "rise"].maps.shape == (3, 1, 12, 16)
    alone = gradcam.compare(tiny_model(), TINY, layers=[], methods=methods[1:], target=1)
    assert torch.equal(alone["input", "rise"].maps, explanations["input", "rise"].maps)
    with pytest.raises(LayerError, match="at least one layer"):
        gradcam.compare(tiny_model(), TINY, layers=[], methods=methods, target=1)


def test_smoothgradcam_pp_equals_the_loop() -> None:
    method = gradcam.METHODS["smoothgradcam-pp"].using(samples=3, noise=0.3, seed=7)
    model = nn.Sequential(*[make_nonlinear_model()[i] for i in range(9)]).eval()
    explanation = gradcam.explain(model, IMAGES, "4", method=method, target=[0, 4, 2])
    expected = slow.smooth_gradcam_pp(model, IMAGES, "4", [0, 4, 2], samples=3, noise=0.3, seed=7)
    assert_maps(explanation.maps, expected)


def test_smoothgradcam_pp_keeps_to_the_class_of_the_clean_image() -> None:
    method = gradcam.METHODS["smoothgradcam-pp"].using(samples=4, noise=50.0)
    top = make_nonlinear_model()(IMAGES).argmax(1).tolist()
    explanation = gradcam.explain(make_nonlinear_model(), IMAGES, "4", method=method)
    assert explanation.classes.flatten().tolist() == top
    expected = gradcam.explain(make_nonlinear_model(), IMAGES, "4", method=method, target=top)
    assert torch.equal(explanation.maps, expected.maps)


SEEDED = {"sscam": {"samples": 2}, "rise": {"masks": 9}, "smoothgradcam-pp": {"samples": 2}}


@pytest.mark.parametrize("name", SEEDED)
def test_random_methods_depend_only_on_the_seed(name: str) -> None:
    def maps(seed: int, images: Tensor = IMAGES, budget: int | None = None) -> Tensor:
        method = gradcam.METHODS[name].using(**SEEDED[name], seed=seed)
        return gradcam.explain(make_nonlinear_model(), images, "4", method=method, target=1, memory_budget=budget).maps

    first = maps(1)
    torch.manual_seed(99)
    assert torch.equal(maps(1), first)
    torch.testing.assert_close(maps(1, budget=300_000), first, rtol=1e-5, atol=1e-7)
    # The other images of the batch do not matter.
    torch.testing.assert_close(maps(1, IMAGES[1:2]), first[1:2], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(maps(2), first, rtol=1e-3)


@pytest.mark.parametrize("name", ["ablationcam", "reciprocam", "scorecam"])
def test_an_image_does_not_depend_on_its_neighbours(name: str) -> None:
    together = gradcam.explain(make_nonlinear_model(), IMAGES, "4", method=name, target=[0, 4, 2]).maps
    for index, target in enumerate([0, 4, 2]):
        alone = gradcam.explain(make_nonlinear_model(), IMAGES[index : index + 1], "4", method=name, target=target).maps
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-5, atol=1e-7)


class Transformer(nn.Module):
    """A transformer over patches and a class token, with tokens first as in CLIP or images first."""

    def __init__(self, *, tokens_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=not tokens_first, norm_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, batch_first=not tokens_first, norm_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self.tokens_first = tokens_first

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1)
        if self.tokens_first:
            tokens = tokens.transpose(0, 1)
        tokens = self.second(self.first(tokens))
        return self.head(self.norm(tokens[0] if self.tokens_first else tokens[:, 0]))


SMALL_RUNS = {"sscam": {"samples": 2}, "iscam": {"steps": 2}, "smoothgradcam-pp": {"samples": 2}}
LAYER_METHODS = [name for name, method in gradcam.METHODS.items() if method.place == "layer"]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", LAYER_METHODS)
def test_tokens_first_are_recognised_by_every_method(name: str, images: int) -> None:
    method = gradcam.METHODS[name].using(**SMALL_RUNS.get(name, {}))
    models = [Transformer(tokens_first=first).double().eval() for first in (False, True)]
    images_first_maps, tokens_first_maps = (
        gradcam.explain(model, IMAGES[:images], "first", method=method, target=1).maps for model in models
    )
    assert tokens_first_maps.shape == (images, 1, 3, 4)
    assert images_first_maps.any() or name == "fem"  # none of the twelve cells is two deviations above the mean
    peak = images_first_maps.max().item()
    torch.testing.assert_close(tokens_first_maps, images_first_maps, rtol=1e-4, atol=1e-4 * peak)


def test_the_last_layer_with_tokens_first_is_found() -> None:
    explanation = gradcam.explain(Transformer(tokens_first=True).double().eval(), IMAGES, target=1)
    assert explanation.layer == gradcam.explain(Transformer(tokens_first=False).double().eval(), IMAGES, target=1).layer


def test_ablationcam_takes_a_channel_from_the_class_token_too() -> None:
    model = Transformer(tokens_first=False).double().eval()
    weights, activations = slow.ablationcam(model, IMAGES, "first", select_classes(CLASSES), axis=2)
    patches = activations[:, 1:].unflatten(1, (3, 4)).movedim(-1, 1)
    explanation = gradcam.explain(model, IMAGES, "first", method="ablationcam", target=CLASSES)
    assert_maps(explanation.maps, slow.sum_of_channels(weights, patches))


def test_reciprocam_leaves_the_class_token_as_it_is() -> None:
    model = Transformer(tokens_first=False).double().eval()
    explanation = gradcam.explain(model, IMAGES, "first", method="reciprocam", target=CLASSES, evidence="signed")

    def score_with(mask: Tensor) -> Tensor:
        tensor = torch.cat([torch.ones(1, 1, 1), mask.reshape(1, -1, 1)], 1).double()
        return slow.scores_with(model, IMAGES, "first", lambda tokens: tokens * tensor, select_classes(CLASSES))

    nothing = score_with(torch.zeros(3, 4))
    for place in ((0, 0), (1, 2), (2, 3)):
        expected = score_with(slow.window(place, (3, 4))) - nothing
        torch.testing.assert_close(explanation.maps[:, :, place[0], place[1]].double(), expected, rtol=1e-5, atol=1e-8)
    with pytest.raises(LayerError, match=r"the grid of layer 'second' is changed.*Choose 'second.norm1'"):
        gradcam.explain(model, IMAGES, "second", method="reciprocam", target=CLASSES)


def test_channels_last() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = make_nonlinear_model(), nn.Identity()

        def forward(self, images: Tensor) -> Tensor:
            return self.inner[5:](self.last(self.inner[:5](images).movedim(1, -1)).movedim(-1, 1))

    for name in ("ablationcam", "reciprocam", "scorecam"):
        explanation = gradcam.explain(Last(), IMAGES, "last", method=name, target=CLASSES)
        expected = gradcam.explain(make_nonlinear_model(), IMAGES, "4", method=name, target=CLASSES)
        assert_maps(explanation.maps, expected.maps.double())


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("sscam", {"samples": 0}, "sscam: samples is 0, expected an int, 1 or more"),
    ("sscam", {"noise": -1.0}, "sscam: noise is -1.0, expected a number above 0"),
    ("sscam", {"seed": -1}, "sscam: seed is -1, expected an int, 0 or more"),
    ("iscam", {"steps": 2.5}, "iscam: steps is 2.5"),
    ("fasterscorecam", {"channels": True}, "fasterscorecam: channels is True"),
    ("rise", {"masks": 0}, "rise: masks is 0"),
    ("rise", {"cells": "7"}, "rise: cells is '7'"),
    ("rise", {"probability": 1}, "rise: probability is 1, expected a number above 0 and below 1"),
    ("rise", {"probability": float("nan")}, "rise: probability is nan"),
    ("smoothgradcam-pp", {"samples": None}, "smoothgradcam-pp: samples is None"),
    ("smoothgradcam-pp", {"noise": float("inf")}, "smoothgradcam-pp: noise is inf"),
]


@pytest.mark.parametrize(("name", "options", "message"), OPTIONS)
def test_wrong_options_are_errors(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        gradcam.explain(tiny_model(), TINY, "4", method=gradcam.METHODS[name].using(**options))


def test_the_embedded_classifier_on_a_photograph(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    """Check that every method except the slow ones highlights the cat for the cat, and the cup for espresso."""
    target = [["Egyptian cat", "espresso"]]
    methods = ["gradcam", "ablationcam", "reciprocam", gradcam.METHODS["fasterscorecam"].using(channels=20)]
    explanations = classifier.compare(photo("cat_and_espresso.jpg"), layers=["head.0"], methods=methods, target=target)
    cat, espresso = explanations["head.0", "gradcam"].heatmaps[0]
    for name in ("ablationcam", "reciprocam"):
        maps = explanations["head.0", name].heatmaps[0]
        assert correlate(maps[0], cat) > 0.6
        assert correlate(maps[0], cat) > correlate(maps[0], espresso) + 0.2
        assert correlate(maps[1], espresso) > correlate(maps[1], cat) + 0.2
    assert explanations["head.0", "fasterscorecam"].maps.any()


def correlate(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def test_opencv_and_pytorch_enlarge_alike() -> None:
    values = torch.randn(4, 5, dtype=torch.float64)
    large = nn.functional.interpolate(values[None, None], size=(12, 17), mode="bilinear", align_corners=False)[0, 0]
    resized = cv2.resize(values.numpy(), (17, 12), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(large.numpy(), resized, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ablationcam", "scorecam", "fasterscorecam", "sscam", "iscam", "smoothgradcam-pp"])
def test_methods_that_add_channels_can_be_smoothed(name: str) -> None:
    model = tiny_model().double().eval()
    images = TINY.double()
    method = gradcam.METHODS[name]
    method = method.using(**{key: 2 for key in method.options if key in ("samples", "steps")})
    smoothed = gradcam.explain(model, images, "0", method=method, target=1, smoothing="eigen")
    wish = dataclasses.replace(method, is_signed=True)
    signed = gradcam.explain(model, images, "0", method=wish, target=1, evidence="signed")
    with gradcam.TargetLayer(model[0]) as layer:
        model(images)
    activations = layer.activations[0].detach()
    # The map is the weighted sum of the channels. There are fewer channels than cells, so it determines the weights.
    weights = torch.linalg.lstsq(activations.flatten(1).T, signed.maps[0, 0].double().flatten()[:, None]).solution
    matrix = (weights * activations.flatten(1)).T.numpy()
    vectors, values, _ = np.linalg.svd(matrix, full_matrices=False)
    component = vectors[:, 0] * values[0] * (-1 if vectors[:, 0] @ matrix.sum(1) < 0 else 1)
    np.testing.assert_allclose(smoothed.maps[0, 0].flatten().numpy(), np.maximum(component, 0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["reciprocam", "rise"])
def test_methods_without_channels_cannot_be_smoothed(name: str) -> None:
    with pytest.raises(GradcamError, match=f"{name} does not sum channels"):
        gradcam.explain(tiny_model(), TINY, "0", method=name, smoothing="eigen")
