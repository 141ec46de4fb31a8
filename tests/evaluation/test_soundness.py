"""Randomised weights, noise, other classes, covering: beside slow definitions, worked values and captum."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from captum.metrics import sensitivity_max
from torch import Tensor, nn

from gradcam.errors import BlindLayerError, GradcamError, ImageError, ModelError, TargetError
from gradcam.evaluation.explainers import Explain, Explainer
from gradcam.evaluation.metrics.soundness import class_difference, max_sensitivity, randomisation, rank_correlation
from gradcam.evaluation.subject import Subject, draw
from tests.helpers import TINY, assert_same, tiny_model, traces

GRADCAM = Explainer(("gradcam",), "3").only("gradcam")


def subject(model: nn.Module | None = None, images: Tensor = TINY, classes: object = None) -> Subject:
    return Subject(tiny_model().eval() if model is None else model, images, classes)


def give(maps: Tensor) -> Explain:
    return lambda model, images, classes: maps


def grey(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return images.mean(1)


class Corner(nn.Module):
    """Class 0 is as probable as the top left quarter is bright; class 1 is the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2] // 2, images.shape[3] // 2
        score = self.weight * images[:, :, :height, :width].mean((1, 2, 3))
        return torch.stack([score, -score], 1)


def corner_images(height: int = 8, width: int = 8) -> Tensor:
    """Bright in the corner and dark elsewhere, so that the mean lowers the score."""
    images = torch.zeros(1, 3, height, width)
    images[:, :, : height // 2, : width // 2] = 1
    return images


def corner_map(height: int = 8, width: int = 8) -> Tensor:
    """Right: more and more towards the corner."""
    rows, columns = torch.arange(height, 0, -1.0), torch.arange(width, 0, -1.0)
    marked = corner_images(height, width)[:, 0]
    return marked * 100 + rows[:, None] + columns / 10


# Randomised weights


def weights_at_each_stage(model: nn.Module, stages: int, seed: int = 0) -> tuple[list[str], list[dict[str, Tensor]]]:
    seen: list[dict[str, Tensor]] = []

    def look(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        seen.append({name: value.clone() for name, value in model.named_parameters()})
        return images.mean(1)

    item = Subject(model, TINY)
    actual = randomisation(item, look, grey(model, TINY, item.classes), stages=stages, seed=seed)
    return list(actual.layers), seen


def changed(before: nn.Module, after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.named_parameters() if not torch.equal(value, after[name])}


def test_weights_are_drawn_anew_from_the_top_down() -> None:
    model = tiny_model().eval()
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    layers, seen = weights_at_each_stage(model, 4)
    assert layers == ["8", "3", "1", "0"]
    expected: set[str] = set()
    for name, weights in zip(layers, seen):
        expected |= {f"{name}.weight", f"{name}.bias"}
        assert changed(model, weights) == expected


def test_what_is_drawn_are_the_parameters_own_values_in_another_order() -> None:
    model = tiny_model().eval()
    _, seen = weights_at_each_stage(model, 1)
    for name, value in model.named_parameters():
        drawn = seen[0][name]
        assert torch.equal(drawn.flatten().sort().values, value.detach().flatten().sort().values)
        assert drawn.shape == value.shape
        order = torch.randperm(value.numel(), generator=draw(0, "weights", name))
        assert torch.equal(drawn.flatten(), value.detach().flatten()[order])


def test_a_layer_once_drawn_stays_so_at_the_stages_below() -> None:
    _, seen = weights_at_each_stage(tiny_model().eval(), 4)
    assert all(torch.equal(weights["8.weight"], seen[0]["8.weight"]) for weights in seen)


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

    layers, seen = weights_at_each_stage(Crossed().eval(), 8)
    assert layers == ["last", "first", ""]  # what no module is called for is the model's own
    assert torch.equal(seen[0]["scale"], seen[1]["scale"])
    assert not torch.equal(seen[1]["scale"], seen[2]["scale"])


def test_tied_weights_are_drawn_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    model[1].weight = model[0].weight
    _, seen = weights_at_each_stage(model, 2)
    assert torch.equal(seen[0]["0.weight"], seen[1]["0.weight"])


def test_correlations_are_those_of_the_maps_at_each_stage() -> None:
    item = subject()
    actual = randomisation(item, GRADCAM, stages=4, seed=3)
    before = GRADCAM(item.model, item.images, item.classes)
    assert actual.correlations.shape == (3, 4)
    layers = {"8": ["8"], "3": ["8", "3"], "1": ["8", "3", "1"], "0": ["8", "3", "1", "0"]}
    for stage, (name, drawn) in enumerate(layers.items()):
        model = copy.deepcopy(item.model)  # slowly: each stage from the beginning
        for parameter_name, value in model.named_parameters():
            if parameter_name.rpartition(".")[0] in drawn:
                order = torch.randperm(value.numel(), generator=draw(3, "weights", parameter_name))
                value.data = value.data.flatten()[order].reshape(value.shape)
        maps = GRADCAM(model, item.images, item.classes)
        assert actual.layers[stage] == name
        torch.testing.assert_close(actual.heatmaps[:, stage], maps)
        torch.testing.assert_close(actual.correlations[:, stage], rank_correlation(before, maps))


def test_a_map_that_knows_no_weights_has_a_correlation_of_one() -> None:
    assert randomisation(subject(), grey).correlations.tolist() == [[1] * 4] * 3
    assert randomisation(subject(), give(torch.zeros(3, 12, 16))).correlations.tolist() == [[1] * 4] * 3


def test_maps_of_whatever_library_can_be_given() -> None:
    item = subject()
    maps = torch.rand(3, 12, 16)
    actual = randomisation(item, grey, maps.numpy(), stages=1)
    torch.testing.assert_close(
        actual.correlations[:, 0], rank_correlation(maps, grey(item.model, item.images, item.classes))
    )


def test_the_classes_stay_those_of_the_subject() -> None:
    asked: list[list[int]] = []

    def look(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        asked.append(classes.tolist())
        return images.mean(1)

    randomisation(subject(classes=[4, 0, 2]), look, stages=2)
    assert asked == [[4, 0, 2]] * 3


@pytest.mark.parametrize("raises", [False, True])
def test_the_model_is_not_touched(raises: bool) -> None:
    model = tiny_model().train()
    model.zero_grad()
    before = traces(model)
    calls = iter(range(9))

    def explain(other: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        if raises and next(calls) == 2:
            raise RuntimeError("broken")
        return GRADCAM(other, images, classes)

    if raises:
        with pytest.raises(RuntimeError, match="broken"):
            randomisation(Subject(model, TINY), explain)
    else:
        randomisation(Subject(model, TINY), explain)
    assert_same(before, traces(model))


def test_the_same_seed_gives_the_same_weights_and_another_one_others() -> None:
    one, same, other = (randomisation(subject(), GRADCAM, seed=seed).correlations for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_maps_that_cannot_be_had_count_as_blank() -> None:
    before = torch.rand(3, 12, 16)

    def blind(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        raise BlindLayerError("zero")

    def overflowing(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return torch.full((3, 12, 16), torch.nan)

    for explain in (blind, overflowing):
        actual = randomisation(subject(), explain, before, stages=2)
        assert actual.correlations.tolist() == [[0, 0]] * 3
        assert not actual.heatmaps.any()


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
    item = subject()
    samples, radius = 6, 0.3
    generator = draw(5, "noise")
    noise = [(2 * torch.rand(TINY.shape, generator=generator) - 1) * radius for _ in range(samples)]

    def perturb(inputs: Tensor, radius: float) -> Tensor:
        return inputs + torch.stack(noise, 1).flatten(0, 1)  # each image's samples are behind one another

    def explain(inputs: Tensor | tuple[Tensor]) -> tuple[Tensor]:
        images = inputs[0] if isinstance(inputs, tuple) else inputs
        return (GRADCAM(item.model, images, item.classes.repeat_interleave(len(images) // 3)),)

    expected = sensitivity_max(explain, TINY, perturb_func=perturb, perturb_radius=radius, n_perturb_samples=samples)
    actual = max_sensitivity(item, GRADCAM, radius=radius, samples=samples, seed=5)
    assert actual.dtype == torch.float32
    assert actual.min() > 0.01
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)


def test_of_a_map_that_is_the_picture_it_is_the_largest_noise() -> None:
    item = subject(images=torch.rand(2, 3, 4, 5), model=tiny_model().eval())
    actual = max_sensitivity(item, grey, radius=0.5, samples=4, seed=1)
    generator = draw(1, "noise")
    most = [0.0, 0.0]
    for _ in range(4):
        noise = (2 * torch.rand(2, 3, 4, 5, generator=generator) - 1) * 0.5
        for i in range(2):
            change = math.sqrt(sum(float(noise[i, :, y, x].mean()) ** 2 for y in range(4) for x in range(5)))
            length = math.sqrt(sum(float(item.images[i, :, y, x].mean()) ** 2 for y in range(4) for x in range(5)))
            most[i] = max(most[i], change / length)
    np.testing.assert_allclose(actual.numpy(), most, rtol=1e-5)


def test_noise_goes_as_far_as_its_radius_and_no_further() -> None:
    seen: list[Tensor] = []

    def look(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        seen.append(images)
        return images.mean(1)

    max_sensitivity(subject(), look, torch.ones(3, 12, 16), radius=0.25, samples=7)
    noise = torch.stack(seen) - TINY
    assert len(seen) == 7
    assert noise.abs().max() <= 0.25 + 1e-6
    assert noise.min() < -0.24
    assert noise.max() > 0.24
    assert abs(noise.mean()) < 0.01
    assert len({item.sum().item() for item in seen}) == 7


def test_a_map_that_never_changes_is_not_sensitive() -> None:
    assert max_sensitivity(subject(), give(torch.rand(3, 12, 16))).tolist() == [0, 0, 0]
    assert max_sensitivity(subject(), GRADCAM, radius=0).tolist() == [0, 0, 0]
    assert max_sensitivity(subject(), give(torch.zeros(3, 12, 16))).tolist() == [0, 0, 0]


def test_the_change_of_a_blank_map_is_left_as_it_is() -> None:
    actual = max_sensitivity(subject(), give(torch.full((3, 12, 16), 2.0)), torch.zeros(3, 12, 16), samples=1)
    assert actual.tolist() == pytest.approx([2 * math.sqrt(12 * 16)] * 3)


def test_the_scale_of_a_map_does_not_count() -> None:
    item = subject()
    one = max_sensitivity(item, grey, radius=0.1)
    torch.testing.assert_close(max_sensitivity(item, lambda *given: 50 * grey(*given), radius=0.1), one)


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
    """Maps whose value at a pixel is known for each class: the same order, the opposite one, and one of 4.5 / 4.743."""
    maps = {
        0: [[1.0, 2.0], [2.0, 3.0]],
        1: [[10.0, 20.0], [20.0, 30.0]],
        2: [[3.0, 2.0], [2.0, 1.0]],
        3: [[-1.0, 7.0], [0.5, 100.0]],
    }

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return torch.tensor([maps[int(item)] for item in classes])

    class Known(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mean((2, 3))  # four channels, four classes

    images = torch.zeros(3, 4, 2, 2)
    for row, rival in enumerate((1, 2, 3)):
        images[row, 0] = 5
        images[row, rival] = 4
    actual = class_difference(Subject(Known(), images), explain)
    np.testing.assert_allclose(actual.numpy(), [0, 2, 1 - 4.5 / (4.5 * 5) ** 0.5], atol=1e-6)


def test_the_rival_is_the_most_probable_class_but_the_one_that_is_explained() -> None:
    asked: list[list[int]] = []

    def look(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        asked.append(classes.tolist())
        return images.mean(1)

    item = subject(classes=[0, 0, 0])
    class_difference(item, look)
    order = item.all_probabilities.argsort(1, descending=True)
    assert asked == [[0, 0, 0], [int(next(c for c in row if c != 0)) for row in order]]


def test_a_map_without_a_class_is_the_same_for_the_rival() -> None:
    assert class_difference(subject(), grey).tolist() == [0, 0, 0]


def test_maps_that_were_made_before_are_compared() -> None:
    item = subject()
    maps = torch.rand(3, 12, 16)
    torch.testing.assert_close(class_difference(item, grey, heatmaps=maps), 1 - rank_correlation(maps, TINY.mean(1)))


def test_a_model_of_one_class_has_no_rival() -> None:
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(TargetError, match="has 1 class, but two are needed"):
        class_difference(Subject(model, TINY, activation="softmax"), grey)


# Beside Quantus


class Redrawn(nn.Conv2d):
    """Whose weights Quantus draws anew as we do; it knows its name."""

    name = ""

    def reset_parameters(self) -> None:
        if not self.name:
            super().reset_parameters()
            return
        for part, value in self.named_parameters():
            order = torch.randperm(value.numel(), generator=draw(0, "weights", f"{self.name}.{part}"))
            value.data = value.data.flatten()[order].reshape(value.shape)


@pytest.mark.filterwarnings("ignore")
def test_quantus_finds_the_same_correlations_layer_by_layer() -> None:
    quantus = pytest.importorskip("quantus")
    torch.manual_seed(1)
    model = nn.Sequential(
        Redrawn(3, 4, 3, padding=1), nn.ReLU(), Redrawn(4, 6, 3), nn.ReLU(), Redrawn(6, 5, 3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()  # fmt: skip
    for name in ("0", "2", "4"):
        model[int(name)].name = name
    explain = Explainer(("gradcam",), "2").only("gradcam")
    item = Subject(model, TINY)

    def theirs(model: nn.Module, inputs: np.ndarray, targets: np.ndarray, **_: object) -> np.ndarray:
        return explain(model, torch.as_tensor(inputs), torch.as_tensor(targets))[:, None].numpy()

    metric = quantus.MPRT(layer_order="top_down", abs=False, normalise=False, disable_warnings=True)
    maps = explain(model, TINY, item.classes)[:, None].numpy()
    actual = metric(model, TINY.numpy(), item.classes.numpy(), maps, explain_func=theirs, device="cpu")
    ours = randomisation(item, explain, stages=3)
    assert ours.layers == ("4", "2", "0")
    for stage, layer in enumerate(ours.layers):
        np.testing.assert_allclose(ours.correlations[:, stage], actual[layer], atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_quantus_finds_the_same_sensitivity() -> None:
    quantus = pytest.importorskip("quantus")
    item = subject()
    generator = draw(2, "noise")
    noise = iter([((2 * torch.rand(TINY.shape, generator=generator) - 1) * 0.2).flatten(1).numpy() for _ in range(5)])

    def theirs(model: nn.Module, inputs: np.ndarray, targets: np.ndarray, **_: object) -> np.ndarray:
        return GRADCAM(model, torch.as_tensor(inputs), torch.as_tensor(targets))[:, None].numpy()

    metric = quantus.MaxSensitivity(
        nr_samples=5, perturb_func=lambda arr, **_: arr + next(noise), disable_warnings=True
    )
    maps = GRADCAM(item.model, TINY, item.classes)
    actual = metric(
        item.model, TINY.numpy(), item.classes.numpy(), maps[:, None].numpy(), explain_func=theirs, device="cpu"
    )
    ours = max_sensitivity(item, GRADCAM, radius=0.2, samples=5, seed=2)
    np.testing.assert_allclose(ours.numpy(), actual, rtol=1e-4)
