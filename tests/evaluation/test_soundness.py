"""Test randomised weights, noise, other classes and covering: against slow definitions, by hand, and against captum."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from captum.metrics import sensitivity_max
from torch import Tensor, nn

from gradcam.errors import BlindLayerError, GradcamError, ImageError, ModelError, TargetError
from gradcam.evaluation.explainers import Explainer
from gradcam.evaluation.heatmap_sources import ExplainFunction
from gradcam.evaluation.metrics.soundness import class_difference, max_sensitivity, randomisation, rank_correlation
from gradcam.evaluation.subject import Subject, make_generator
from tests.helpers import TINY, assert_same, tiny_model, traces

GRADCAM = Explainer(("gradcam",), "3").only("gradcam")


def subject(model: nn.Module | None = None, images: Tensor = TINY, classes: object = None) -> Subject:
    return Subject(tiny_model().eval() if model is None else model, images, classes)


def give(maps: Tensor) -> ExplainFunction:
    return lambda model, images, classes: maps


def grey(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return images.mean(1)


# Randomised weights


def weights_at_each_stage(model: nn.Module, stages: int, seed: int = 0) -> tuple[list[str], list[dict[str, Tensor]]]:
    weights: list[dict[str, Tensor]] = []

    def record_weights(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        weights.append({name: value.clone() for name, value in model.named_parameters()})
        return images.mean(1)

    tiny_subject = Subject(model, TINY)
    randomised = randomisation(
        tiny_subject, record_weights, grey(model, TINY, tiny_subject.classes), stages=stages, seed=seed
    )
    return list(randomised.layers), weights


def changed(before: nn.Module, after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.named_parameters() if not torch.equal(value, after[name])}


def test_weights_are_reinitialised_from_the_top_down() -> None:
    model = tiny_model().eval()
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    layers, stages = weights_at_each_stage(model, 4)
    assert layers == ["8", "3", "1", "0"]
    expected: set[str] = set()
    for name, weights in zip(layers, stages):
        expected |= {f"{name}.weight", f"{name}.bias"}
        assert changed(model, weights) == expected


def test_randomised_weights_are_a_permutation() -> None:
    model = tiny_model().eval()
    _, stages = weights_at_each_stage(model, 1)
    for name, value in model.named_parameters():
        permuted = stages[0][name]
        assert torch.equal(permuted.flatten().sort().values, value.detach().flatten().sort().values)
        assert permuted.shape == value.shape
        order = torch.randperm(value.numel(), generator=make_generator(0, "weights", name))
        assert torch.equal(permuted.flatten(), value.detach().flatten()[order])


def test_a_randomised_layer_stays_the_same_at_later_stages() -> None:
    _, stages = weights_at_each_stage(tiny_model().eval(), 4)
    assert all(torch.equal(weights["8.weight"], stages[0]["8.weight"]) for weights in stages)


@pytest.mark.parametrize(
    ("stages", "layers"),
    [(1, ["0"]), (2, ["8", "0"]), (3, ["8", "1", "0"]), (4, ["8", "3", "1", "0"]), (9, ["8", "3", "1", "0"])],
)
def test_stages_begin_at_the_top_and_end_at_the_bottom(stages: int, layers: list[str]) -> None:
    assert weights_at_each_stage(tiny_model().eval(), stages)[0] == layers


def test_layers_are_ordered_by_when_they_run() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)
            self.unused = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.randn(3))
            self.first = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(self.first(images * self.scale[:, None, None]).mean((2, 3)))

    layers, stages = weights_at_each_stage(Crossed().eval(), 8)
    assert layers == ["last", "first", ""]  # a parameter outside the submodules belongs to the model itself
    assert torch.equal(stages[0]["scale"], stages[1]["scale"])
    assert not torch.equal(stages[1]["scale"], stages[2]["scale"])


def test_tied_weights_are_randomised_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    model[1].weight = model[0].weight
    _, stages = weights_at_each_stage(model, 2)
    assert torch.equal(stages[0]["0.weight"], stages[1]["0.weight"])


def test_correlations_are_those_of_the_maps_at_each_stage() -> None:
    tiny_subject = subject()
    randomised = randomisation(tiny_subject, GRADCAM, stages=4, seed=3)
    before = GRADCAM(tiny_subject.model, tiny_subject.images, tiny_subject.classes)
    assert randomised.correlations.shape == (3, 4)
    layers = {"8": ["8"], "3": ["8", "3"], "1": ["8", "3", "1"], "0": ["8", "3", "1", "0"]}
    for stage, (name, randomised_layers) in enumerate(layers.items()):
        model = copy.deepcopy(tiny_subject.model)  # each stage starts from the original weights
        for parameter_name, value in model.named_parameters():
            if parameter_name.rpartition(".")[0] in randomised_layers:
                order = torch.randperm(value.numel(), generator=make_generator(3, "weights", parameter_name))
                value.data = value.data.flatten()[order].reshape(value.shape)
        maps = GRADCAM(model, tiny_subject.images, tiny_subject.classes)
        assert randomised.layers[stage] == name
        torch.testing.assert_close(randomised.heatmaps[:, stage], maps)
        torch.testing.assert_close(randomised.correlations[:, stage], rank_correlation(before, maps))


def test_a_map_that_knows_no_weights_has_a_correlation_of_one() -> None:
    assert randomisation(subject(), grey).correlations.tolist() == [[1] * 4] * 3
    assert randomisation(subject(), give(torch.zeros(3, 12, 16))).correlations.tolist() == [[1] * 4] * 3


def test_maps_of_whatever_library_can_be_given() -> None:
    tiny_subject = subject()
    maps = torch.rand(3, 12, 16)
    randomised = randomisation(tiny_subject, grey, maps.numpy(), stages=1)
    torch.testing.assert_close(
        randomised.correlations[:, 0],
        rank_correlation(maps, grey(tiny_subject.model, tiny_subject.images, tiny_subject.classes)),
    )


def test_the_classes_stay_those_of_the_subject() -> None:
    classes_of_calls: list[list[int]] = []

    def record_classes(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        classes_of_calls.append(classes.tolist())
        return images.mean(1)

    randomisation(subject(classes=[4, 0, 2]), record_classes, stages=2)
    assert classes_of_calls == [[4, 0, 2]] * 3


@pytest.mark.parametrize("raises", [False, True])
def test_the_model_is_not_touched(raises: bool) -> None:
    model = tiny_model().train()
    model.zero_grad()
    before = traces(model)
    calls = iter(range(9))

    def explain(model_copy: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        if raises and next(calls) == 2:
            raise RuntimeError("broken")
        return GRADCAM(model_copy, images, classes)

    if raises:
        with pytest.raises(RuntimeError, match="broken"):
            randomisation(Subject(model, TINY), explain)
    else:
        randomisation(Subject(model, TINY), explain)
    assert_same(before, traces(model))


def test_the_same_seed_gives_the_same_weights_and_another_one_others() -> None:
    first, repeated, reseeded = (randomisation(subject(), GRADCAM, seed=seed).correlations for seed in (1, 1, 2))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, reseeded)


def test_failing_maps_count_as_blank() -> None:
    before = torch.rand(3, 12, 16)

    def blind(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        raise BlindLayerError("zero")

    def overflowing(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return torch.full((3, 12, 16), torch.nan)

    for explain in (blind, overflowing):
        randomised = randomisation(subject(), explain, before, stages=2)
        assert randomised.correlations.tolist() == [[0, 0]] * 3
        assert not randomised.heatmaps.any()


def test_models_that_cannot_be_randomised() -> None:
    empty = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match="Sequential has no parameters, so there is nothing to randomise"):
        randomisation(subject(empty), grey)

    class Unique(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()

        def forward(self, images: Tensor) -> Tensor:
            return self.inner(images)

        def __deepcopy__(self, memo: object) -> object:
            raise TypeError("there is only one")

    with pytest.raises(
        ModelError,
        match="Unique cannot be copied, which is needed to randomise its weights: TypeError: there is only one",
    ):
        randomisation(subject(Unique()), grey)


@pytest.mark.parametrize("stages", [0, -1, 1.5, True, "all"])
def test_stages_that_cannot_be(stages: object) -> None:
    with pytest.raises(GradcamError, match="expected the number of layers to compare, 1 or more"):
        randomisation(subject(), grey, stages=stages)  # type: ignore[arg-type]


def test_maps_of_another_size_are_refused() -> None:
    for function in (randomisation, max_sensitivity):
        with pytest.raises(ImageError, match=r"\(3, 5, 5\), expected \(3, 12, 16\)"):
            function(subject(), grey, torch.zeros(3, 5, 5))
    with pytest.raises(ImageError, match=r"\(3, 5, 5\), expected \(3, 12, 16\)"):
        class_difference(subject(), grey, heatmaps=torch.zeros(3, 5, 5))


# Noise


def test_captum_finds_the_same_sensitivity() -> None:
    tiny_subject = subject()
    samples, radius = 6, 0.3
    generator = make_generator(5, "noise")
    noise = [(2 * torch.rand(TINY.shape, generator=generator) - 1) * radius for _ in range(samples)]

    def perturb(inputs: Tensor, radius: float) -> Tensor:
        return inputs + torch.stack(noise, 1).flatten(0, 1)  # captum puts the samples of an image one after the other

    def explain(inputs: Tensor | tuple[Tensor]) -> tuple[Tensor]:
        images = inputs[0] if isinstance(inputs, tuple) else inputs
        return (GRADCAM(tiny_subject.model, images, tiny_subject.classes.repeat_interleave(len(images) // 3)),)

    expected = sensitivity_max(explain, TINY, perturb_func=perturb, perturb_radius=radius, n_perturb_samples=samples)
    sensitivity = max_sensitivity(tiny_subject, GRADCAM, radius=radius, samples=samples, seed=5)
    assert sensitivity.dtype == torch.float32
    assert sensitivity.min() > 0.01
    torch.testing.assert_close(sensitivity, expected.float(), rtol=1e-4, atol=1e-5)


def test_the_sensitivity_of_a_copy_of_the_image_is_the_largest_noise() -> None:
    tiny_subject = subject(images=torch.rand(2, 3, 4, 5), model=tiny_model().eval())
    sensitivity = max_sensitivity(tiny_subject, grey, radius=0.5, samples=4, seed=1)
    generator = make_generator(1, "noise")
    largest = [0.0, 0.0]
    for _ in range(4):
        noise = (2 * torch.rand(2, 3, 4, 5, generator=generator) - 1) * 0.5
        for i in range(2):
            change = math.sqrt(sum(float(noise[i, :, y, x].mean()) ** 2 for y in range(4) for x in range(5)))
            length = math.sqrt(
                sum(float(tiny_subject.images[i, :, y, x].mean()) ** 2 for y in range(4) for x in range(5))
            )
            largest[i] = max(largest[i], change / length)
    np.testing.assert_allclose(sensitivity.numpy(), largest, rtol=1e-5)


def test_noise_goes_as_far_as_its_radius_and_no_further() -> None:
    batches: list[Tensor] = []

    def record_images(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        batches.append(images)
        return images.mean(1)

    max_sensitivity(subject(), record_images, torch.ones(3, 12, 16), radius=0.25, samples=7)
    noise = torch.stack(batches) - TINY
    assert len(batches) == 7
    assert noise.abs().max() <= 0.25 + 1e-6
    assert noise.min() < -0.24
    assert noise.max() > 0.24
    assert abs(noise.mean()) < 0.01
    assert len({sample.sum().item() for sample in batches}) == 7


def test_a_map_that_never_changes_is_not_sensitive() -> None:
    assert max_sensitivity(subject(), give(torch.rand(3, 12, 16))).tolist() == [0, 0, 0]
    assert max_sensitivity(subject(), GRADCAM, radius=0).tolist() == [0, 0, 0]
    assert max_sensitivity(subject(), give(torch.zeros(3, 12, 16))).tolist() == [0, 0, 0]


def test_the_change_of_a_blank_map_is_left_as_it_is() -> None:
    sensitivity = max_sensitivity(subject(), give(torch.full((3, 12, 16), 2.0)), torch.zeros(3, 12, 16), samples=1)
    assert sensitivity.tolist() == pytest.approx([2 * math.sqrt(12 * 16)] * 3)


def test_the_scale_of_a_map_does_not_count() -> None:
    tiny_subject = subject()
    sensitivity = max_sensitivity(tiny_subject, grey, radius=0.1)
    torch.testing.assert_close(
        max_sensitivity(tiny_subject, lambda *inputs: 50 * grey(*inputs), radius=0.1), sensitivity
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": -0.1}, "radius is -0.1, expected the largest change of a value"),
        ({"radius": math.nan}, "radius is nan"),
        ({"radius": math.inf}, "radius is inf"),
        ({"radius": True}, "radius is True"),
        ({"samples": 0}, "samples is 0, expected the number of noise samples"),
        ({"samples": 2.5}, "samples is 2.5"),
    ],
)
def test_noise_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        max_sensitivity(subject(), grey, **options)  # type: ignore[arg-type]


# Classes


def test_the_difference_to_the_strongest_rivals_map() -> None:
    """The maps of three rivals have the same order, the opposite order, and a correlation of 4.5 / 4.743."""
    maps = {
        0: [[1.0, 2.0], [2.0, 3.0]], 1: [[10.0, 20.0], [20.0, 30.0]], 2: [[3.0, 2.0], [2.0, 1.0]],
        3: [[-1.0, 7.0], [0.5, 100.0]],
    }  # fmt: skip

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return torch.tensor([maps[int(index)] for index in classes])

    class Known(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mean((2, 3))  # the mean of each of four channels is the logit of a class

    images = torch.zeros(3, 4, 2, 2)
    for row, rival in enumerate((1, 2, 3)):
        images[row, 0] = 5
        images[row, rival] = 4
    differences = class_difference(Subject(Known(), images), explain)
    np.testing.assert_allclose(differences.numpy(), [0, 2, 1 - 4.5 / (4.5 * 5) ** 0.5], atol=1e-6)


def test_the_rival_is_the_most_probable_class_but_the_one_that_is_explained() -> None:
    classes_of_calls: list[list[int]] = []

    def record_classes(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        classes_of_calls.append(classes.tolist())
        return images.mean(1)

    tiny_subject = subject(classes=[0, 0, 0])
    class_difference(tiny_subject, record_classes)
    order = tiny_subject.all_probabilities.argsort(1, descending=True)
    assert classes_of_calls == [[0, 0, 0], [int(next(c for c in row if c != 0)) for row in order]]


def test_a_map_without_a_class_is_the_same_for_the_rival() -> None:
    assert class_difference(subject(), grey).tolist() == [0, 0, 0]


def test_maps_that_were_made_before_are_compared() -> None:
    tiny_subject = subject()
    maps = torch.rand(3, 12, 16)
    torch.testing.assert_close(
        class_difference(tiny_subject, grey, heatmaps=maps), 1 - rank_correlation(maps, TINY.mean(1))
    )


def test_a_model_of_one_class_has_no_rival() -> None:
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(TargetError, match="has 1 class, but two are needed"):
        class_difference(Subject(model, TINY, activation="softmax"), grey)
