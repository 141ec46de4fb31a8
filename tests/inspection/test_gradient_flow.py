"""Compare the gradients at every layer and parameter with plain autograd on a float64 copy."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradcam
from gradcam.errors import GradcamError, ImageError, LayerError, ModelError, TargetError
from gradcam.inspection.flow import GradientFlow, LayerGradients, Statistics, gradients, join, rms
from gradcam.inspection.plot import draw_gradients
from gradcam.targets import ClassTarget
from tests.helpers import TINY, assert_same, tiny_model, traces


def worked_model() -> nn.Sequential:
    """Return Linear, ReLU, Linear, whose gradients can be worked out by hand."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, 2, 3], [-4, -5, -6], [7, 8, 9], [-10, -11, -12]]))
        model[1].bias.copy_(torch.tensor([1.0, 2, 3, 4]))
        model[3].weight.copy_(torch.tensor([[1.0, 2, 3, 4]]))
        model[3].bias.fill_(1)
    return model


def assert_statistics(statistics: Statistics | None, values: Any, rtol: float = 1e-6) -> None:
    """Compare each number with NumPy in float64."""
    assert statistics is not None
    values = np.asarray(values, np.float64).ravel()
    scale = np.abs(values).max()
    assert statistics.count == values.size
    assert statistics.norm == pytest.approx(np.sqrt((values**2).sum()), rel=rtol)
    assert statistics.mean == pytest.approx(values.mean(), rel=rtol, abs=rtol * scale)
    assert statistics.std == pytest.approx(values.std(ddof=1) if values.size > 1 else 0, rel=rtol, abs=1e-12)
    assert statistics.zeros == pytest.approx((values == 0).mean())
    assert statistics.largest == pytest.approx(scale, rel=rtol)
    assert (statistics.nans, statistics.infinities) == (0, 0)


def by_name(flow: GradientFlow) -> dict[str, LayerGradients]:
    return {layer.name: layer for layer in flow.layers}


def test_worked_numbers() -> None:
    flow = gradients(worked_model(), torch.ones(1, 1, 1, 3))
    assert [(layer.name, layer.type, layer.runs) for layer in flow.layers] == [
        ("0", "Flatten", 1), ("1", "Linear", 1), ("2", "ReLU", 1), ("3", "Linear", 1),
    ]  # fmt: skip
    for layer, expected in zip(flow.layers, [[22, 26, 30], [1, 0, 3, 0], [1, 2, 3, 4], [1]]):
        assert_statistics(layer.activations, expected)
    weight, bias = flow.layers[1].parameters
    assert (weight.name, bias.name) == ("weight", "bias")
    assert_statistics(weight.gradient, [[1, 1, 1], [0, 0, 0], [3, 3, 3], [0, 0, 0]])
    assert_statistics(bias.gradient, [1, 0, 3, 0])
    assert flow.layers[1].parameters_norm == pytest.approx(math.sqrt(30 + 10))
    assert weight.norm == pytest.approx(math.sqrt(650))
    assert weight.ratio == pytest.approx(math.sqrt(30) / math.sqrt(650))
    assert_statistics(flow.layers[3].parameters[0].gradient, [7, 0, 27, 0])
    assert flow.scores.tolist() == [[89]]
    assert flow.classes is not None
    assert flow.classes.tolist() == [[1]]  # the class of a single logit
    assert flow.reference == 1
    assert repr(flow) == "GradientFlow(Sequential, 4 layer(s), 1 image(s), nothing conspicuous)"


def reference_gradients(model: nn.Sequential, images: Tensor, scores: Callable[[Tensor], Tensor]) -> tuple[dict, dict]:
    """Return the gradients of all outputs and parameters in float64. Each layer gets a clone of its input."""
    model = copy.deepcopy(model).double().eval().requires_grad_()
    values, outputs = images.double().requires_grad_(), {}
    for name, layer in model.named_children():
        outputs[name] = layer(values.clone())
        outputs[name].retain_grad()
        values = outputs[name]
    scores(values).sum().backward()
    return {name: item.grad for name, item in outputs.items()}, {
        name: item.grad for name, item in model.named_parameters()
    }


def assert_equals_reference(flow: GradientFlow, outputs: dict, parameters: dict, rtol: float = 1e-4) -> None:
    for layer in flow.layers:
        assert_statistics(layer.activations, outputs[layer.name], rtol)
        for parameter in layer.parameters:
            assert_statistics(parameter.gradient, parameters[f"{layer.name}.{parameter.name}"], rtol)


@pytest.mark.parametrize("frozen", ["trained", "frozen", "half frozen"])
def test_every_layer_and_every_parameter_in_place_operations_too(frozen: str) -> None:
    model = tiny_model()
    if frozen != "trained":
        (model if frozen == "frozen" else model[:3]).requires_grad_(False)
    flow = gradients(model, TINY, target=[1, 4, 2])
    assert [layer.name for layer in flow.layers] == [*"01234568"]  # dropout, layer 7, returns its input
    assert_equals_reference(flow, *reference_gradients(model, TINY, lambda logits: logits[torch.arange(3), [1, 4, 2]]))
    assert flow.reference == pytest.approx(math.sqrt(3))


def test_the_gradient_is_that_of_the_sum_of_all_scores() -> None:
    target = [[0, 1], [2, 3], [4, 0]]
    flow = gradients(tiny_model(), TINY, target=target)
    reference = reference_gradients(tiny_model(), TINY, lambda item: item.gather(1, torch.tensor(target)))
    assert_equals_reference(flow, *reference)
    assert flow.scores.shape == (3, 2)


def test_functions_and_other_scores() -> None:
    flow = gradients(tiny_model(), TINY, target=lambda logits: logits.square().sum(1))
    assert_equals_reference(flow, *reference_gradients(tiny_model(), TINY, lambda item: item.square().sum(1)))
    assert flow.classes is None
    flow = gradients(tiny_model(), TINY, target=ClassTarget(2, score="probability"))
    assert_equals_reference(flow, *reference_gradients(tiny_model(), TINY, lambda item: item.softmax(1)[:, 2]))


def test_the_top_class_is_the_default() -> None:
    flow = gradients(tiny_model(), TINY)
    expected = tiny_model().eval()(TINY).max(1)
    assert flow.classes is not None
    assert torch.equal(flow.classes[:, 0], expected.indices)
    torch.testing.assert_close(flow.scores[:, 0], expected.values.detach())


class Twice(nn.Module):
    """A model with a layer that runs twice and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tanh, self.last = nn.Tanh(), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        self.seen = [self.tanh(self.first(images.flatten(1)))]
        self.seen.append(self.tanh(self.between(self.seen[0])))
        return self.last(self.seen[1])


def test_all_runs_of_a_layer_are_one_row() -> None:
    torch.manual_seed(0)
    model, images = Twice(), torch.randn(2, 1, 2, 2)
    plain = copy.deepcopy(model).double()
    flow = gradients(model, images, target=1)
    runs = {layer.name: layer.runs for layer in flow.layers}
    assert list(runs.items()) == [("first", 1), ("tanh", 2), ("between", 1), ("last", 1)]
    output = plain(images.double())
    for tensor in plain.seen:
        tensor.retain_grad()
    output[:, 1].sum().backward()
    assert_statistics(by_name(flow)["tanh"].activations, torch.cat([item.grad for item in plain.seen]), 1e-5)


def test_statistics_are_joined_as_if_they_were_of_one_tensor() -> None:
    parts = [np.array([1.0, 0, -5]), np.array([0.25]), np.array([3.0, 3])]
    parts_statistics = [
        Statistics(len(part), float(np.linalg.norm(part)), part.mean(), part.std(ddof=1) if len(part) > 1 else 0,
                   (part == 0).mean(), np.abs(part).max(), 0, 0)
        for part in parts
    ]  # fmt: skip
    assert_statistics(join(parts_statistics), np.concatenate(parts))
    assert rms(join(parts_statistics)) == pytest.approx(np.sqrt((np.concatenate(parts) ** 2).mean()))


class Attends(nn.Module):
    """A model with its own parameter, and with attention that reads a linear layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(images), -1, -1), images.flatten(2).transpose(1, 2)], 1)
        return self.head(self.attention(tokens, tokens, tokens)[0][:, 0])


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_layers_that_never_run_have_their_row_where_they_are_used(frozen: bool) -> None:
    torch.manual_seed(0)
    model, images = Attends().requires_grad_(not frozen), torch.randn(2, 8, 3, 3)
    flow = gradients(model, images, target=0)
    layers = by_name(flow)
    assert [(layer.name, layer.runs) for layer in flow.layers] == [
        ("attention.out_proj", 0), ("attention", 1), ("head", 1), ("", 1),
    ]  # fmt: skip
    plain = copy.deepcopy(model).double().requires_grad_()
    plain(images.double())[:, 0].sum().backward()
    for name, parameter in plain.named_parameters():
        layer, _, parameter_name = name.rpartition(".")
        (row,) = [parameter for parameter in layers[layer].parameters if parameter.name == parameter_name]
        assert row.gradient is not None
        assert row.gradient.norm == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
        assert row.gradient.mean == pytest.approx(parameter.grad.mean().item(), rel=1e-4, abs=1e-7)
    assert layers["attention.out_proj"].activations is None
    assert layers["attention.out_proj"].verdict is None
    assert [row["tensor"] for row in flow.rows()][:4] == ["weight", "bias", "output", "in_proj_weight"]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant

    def forward(self, images: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, images.flatten(1), use_reentrant=self.reentrant))

    def part(self, values: Tensor) -> Tensor:
        return self.first(values).tanh()


def test_a_frozen_model_with_checkpoints() -> None:
    torch.manual_seed(0)
    model, images = Checkpointed(), torch.randn(2, 1, 2, 2)
    expected = copy.deepcopy(model).double()
    expected(images.double())[:, 2].sum().backward()
    flow = gradients(model.requires_grad_(False), images, target=2)
    assert [(layer.name, layer.runs) for layer in flow.layers] == [("first", 1), ("last", 1)]
    assert_statistics(flow.layers[0].parameters[0].gradient, expected.first.weight.grad, 1e-5)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return values * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        values, weight = ctx.saved_tensors
        return gradient * weight, (gradient * values).sum(0)


class OwnFunction(nn.Module):
    """A model whose weight goes to a custom autograd function and to an ordinary operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2, 3]))

    def forward(self, images: Tensor) -> Tensor:
        return Scale.apply(images.flatten(1), self.weight) + self.weight * 10


def test_a_gradient_that_comes_through_a_function_of_the_users_own_is_added() -> None:
    (layer,) = gradients(OwnFunction(), torch.full((1, 1, 1, 3), 4.0), target=1).layers
    assert_statistics(layer.parameters[0].gradient, [0, 14, 0])


def test_weights_that_are_computed_and_weights_that_are_shared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    images = torch.randn(2, 1, 2, 2)
    expected = copy.deepcopy(model).double()
    expected(images.double())[:, 0].sum().backward()
    layers = by_name(gradients(model.requires_grad_(False), images, target=0))
    directions = layers["1.parametrizations.weight"].parameters
    for row, parameter in zip(directions, expected[1].parametrizations.weight.parameters()):
        assert_statistics(row.gradient, parameter.grad, 1e-4)
    for name in "23":
        assert_statistics(layers[name].parameters[0].gradient, expected[2].weight.grad, 1e-5)


def test_weights_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = worked_model()
    assert_statistics(gradients(model, torch.ones(1, 1, 1, 3)).layers[1].activations, [1, 0, 3, 0])


def test_a_compiled_model_and_a_wrapped_one() -> None:
    plain = gradients(worked_model(), torch.ones(1, 1, 1, 3))
    for model in (torch.compile(worked_model(), backend="eager"), nn.DataParallel(worked_model())):
        assert gradients(model, torch.ones(1, 1, 1, 3)).layers == plain.layers


# Choice of layers


def test_layers_by_name_and_by_pattern_in_order_of_execution() -> None:
    model = nn.Sequential()
    model.add_module("late", nn.Linear(3, 3))
    model.add_module("block", nn.Sequential(nn.Flatten(), nn.Linear(3, 3)))
    model.forward = lambda images: nn.Sequential.forward(nn.Sequential(model.block, model.late), images)
    images = torch.ones(1, 1, 1, 3)
    assert [layer.name for layer in gradients(model, images).layers] == ["block.0", "block.1", "late"]
    flow = gradients(model, images, layers=["late", "block*"])
    assert [layer.name for layer in flow.layers] == ["block.0", "block.1", "block", "late"]
    assert by_name(flow)["block"].parameters == ()
    assert [layer.name for layer in gradients(model, images, layers=model.block[1]).layers] == ["block.1"]


class Odd(nn.Module):
    """A model with layers that never run, return no tensor, or do not lead to the score."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.aside, self.unused, self.last = Counts(), nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(1)
        self.counts(values)
        self.aside(values)
        return self.last(values)


class Counts(nn.Module):
    def forward(self, values: Tensor) -> int:
        return len(values)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("lats", "There is no layer 'lats' in Odd. Nearest: 'last'"),
        ("layer*", "No layer matches 'layer*'"),
        ("unused", "Layer 'unused' did not run"),
        (["last", "un*"], "Layer 'unused' did not run"),
        ("counts", "Layer 'counts' returned no floating-point tensor"),
        ([], "expected a dotted name"),
    ],
)
def test_layers_that_have_no_gradients(layers: Any, message: str) -> None:
    with pytest.raises(LayerError, match=message.replace("*", r"\*")):
        gradients(Odd(), torch.ones(1, 1, 2, 2), layers=layers)


def test_layers_off_the_path_have_no_gradient() -> None:
    layers = by_name(gradients(Odd(), torch.ones(1, 1, 2, 2)))
    assert set(layers) == {"aside", "last"}
    assert layers["aside"].activations is None
    assert layers["aside"].verdict == "no gradient"
    assert [parameter.gradient for parameter in layers["aside"].parameters] == [None, None]
    assert layers["aside"].parameters[0].ratio is None
    assert math.isnan(layers["aside"].parameters_norm)
    assert layers["last"].verdict is None


class Unrecorded(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return images.flatten(1) * 1


def test_passes_without_gradients_are_errors() -> None:
    with pytest.raises(ModelError, match="no recorded operation leads"):
        gradients(Unrecorded(), TINY)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        gradients(Checkpointed(reentrant=True), torch.ones(1, 1, 2, 2))
    with pytest.raises(ImageError, match="expected a floating-point tensor"):
        gradients(tiny_model(), [1, 2])
    with pytest.raises(TargetError):
        gradients(tiny_model(), TINY, target=17)


# Precision


def test_small_gradients_are_not_lost_in_float16() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, 3))
    for layer in layers:
        layer.weight.data = layer.weight.data.mul(0.03).half().float()
    images = torch.randn(2, 1, 4, 4).half()
    flow = gradients(copy.deepcopy(model).half(), images, target=1)
    outputs, expected = reference_gradients(model, images.float(), lambda item: item[:, 1])
    smallest = flow.layers[1].activations
    assert smallest is not None
    assert 0 < smallest.largest < 6e-6  # without scaling, fewer than a hundred float16 steps
    assert_statistics(replace(smallest, zeros=0.0), outputs["1"], 3e-3)
    assert flow.layers[4].parameters[0].gradient is not None
    assert flow.layers[4].parameters[0].gradient.norm == pytest.approx(expected["4.weight"].norm().item(), rel=2e-2)


def test_gradients_that_are_nan_in_float16_stay_so() -> None:
    model = SquareRoot().half()
    layers = by_name(gradients(model, torch.ones(1, 1, 1, 3).half(), target=0))
    assert layers["first"].verdict == "NaN"
    assert layers["last"].verdict is None
    assert layers["last"].activations is not None
    assert layers["last"].activations.norm == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    flow = gradients(worked_model().to(dtype), torch.ones(1, 1, 1, 3, dtype=dtype))
    assert_statistics(flow.layers[0].activations, [22, 26, 30])
    assert flow.scores.dtype == torch.float32


# Verdicts


class SquareRoot(nn.Module):
    """A model with a square root at zero: its derivative is infinite, and infinity times zero is NaN."""

    def __init__(self, factor: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(3, 3), nn.Linear(3, 2), factor

    def forward(self, images: Tensor) -> Tensor:
        return self.last((self.first(images.flatten(1)) * self.factor).sqrt())


def deep_network(activation: type[nn.Module], gain: float | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(30):
        layer = nn.Linear(192 if number == 0 else 64, 64)
        if gain is not None:
            nn.init.kaiming_normal_(layer.weight)
            layer.weight.data *= gain
        layers += [layer, activation()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def verdicts(flow: GradientFlow) -> list[str | None]:
    return [layer.verdict for layer in flow.layers]


IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def test_thirty_sigmoid_layers_vanish_from_the_right_one_on() -> None:
    flow = gradients(deep_network(nn.Sigmoid), IMAGE, target=0)
    outputs, _ = reference_gradients(deep_network(nn.Sigmoid), IMAGE, lambda item: item[:, 0])
    assert verdicts(flow) == ["vanishing" if outputs[layer.name].norm() < 1e-4 else None for layer in flow.layers]
    assert 40 < verdicts(flow).count("vanishing") < 56
    assert flow.layers[0].activations is not None
    assert flow.layers[0].activations.norm == pytest.approx(outputs["0"].norm().item(), rel=1e-3)
    assert flow.layers[0].activations.norm < 1e-24
    assert "vanishing" in repr(flow)


def test_thirty_layers_with_weights_that_are_too_large_explode() -> None:
    flow = gradients(deep_network(nn.ReLU, 4), IMAGE, target=0)
    outputs, _ = reference_gradients(deep_network(nn.ReLU, 4), IMAGE, lambda item: item[:, 0])
    assert verdicts(flow) == ["exploding" if outputs[layer.name].norm() > 1e4 else None for layer in flow.layers]
    assert 35 < verdicts(flow).count("exploding") < 60


def test_no_gradient_before_a_head_of_zeros() -> None:
    model = tiny_model()
    nn.init.zeros_(model[8].weight)
    flow = gradients(model, TINY)
    assert verdicts(flow) == ["no gradient"] * 7 + [None]
    assert flow.layers[0].activations is not None
    assert flow.layers[0].activations.zeros == 1


def test_a_layer_that_gets_zeros_alone_has_no_gradient_at_its_weight_but_at_its_bias() -> None:
    images = torch.zeros(1, 1, 1, 3)
    flow = gradients(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), images, target=0)
    assert [parameter.gradient.zeros for parameter in flow.layers[1].parameters if parameter.gradient] == [1, 0.5]
    assert flow.layers[1].verdict is None
    flow = gradients(nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False)), images, target=0)
    assert flow.layers[1].verdict == "no gradient"


def test_nan_and_infinity_are_told_apart() -> None:
    images = torch.ones(1, 1, 1, 3)
    assert [layer.verdict for layer in gradients(SquareRoot(), images).layers] == ["NaN", None]
    model = SquareRoot(factor=1)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    flow = gradients(model, images)
    assert [layer.verdict for layer in flow.layers] == ["infinite", None]
    assert flow.layers[0].activations is not None
    assert flow.layers[0].activations.infinities == 3


def test_the_comparison_is_with_the_models_output_whatever_the_scale_of_the_score() -> None:
    for factor in (1e-9, 1e9):
        flow = gradients(tiny_model(), TINY, target=lambda logits, factor=factor: logits[:, 1] * factor)
        assert set(verdicts(flow)) == {None}
        assert flow.reference == pytest.approx(math.sqrt(3) * factor)
    # The verdicts are the same if the last layers are not requested.
    flow = gradients(deep_network(nn.Sigmoid), IMAGE, target=0, layers=["0", "1"])
    assert verdicts(flow) == ["vanishing", "vanishing"]


def test_healthy_networks_are_told_to_be_healthy(classifier: gradcam.Classifier, photo: Callable[[str], Any]) -> None:
    images = classifier.prepare(photo("cat_and_espresso.jpg")).image[None]
    assert set(verdicts(gradients(classifier.model, images))) == {None}
    torch.manual_seed(0)
    flow = gradients(torchvision.models.resnet18(), images[..., ::2, ::2])
    assert set(verdicts(flow)) == {None}
    assert len(flow.layers) == 52
    assert [layer.runs for layer in flow.layers if layer.type == "ReLU"] == [1] + [2] * 8


def test_rows_are_flat() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(gradients(worked_model(), torch.ones(1, 1, 1, 3)).rows())
    assert table["tensor"].tolist() == ["output", "output", "weight", "bias", "output", "output", "weight", "bias"]
    assert table["layer"].tolist() == ["0", "1", "1", "1", "2", "3", "3", "3"]
    assert table["rms"][1] == pytest.approx(math.sqrt(10 / 4))
    assert table["norm"][2] == pytest.approx(math.sqrt(30))
    assert table["ratio"][2] == pytest.approx(math.sqrt(30 / 650))
    assert table["ratio"].isna().tolist() == [True, True, False, False, True, True, False, False]


# Nothing is left on the model


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model.train()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_is_left_as_it_was(frozen: bool) -> None:
    model = with_gradients(tiny_model()).requires_grad_(not frozen)
    images, before = TINY.clone(), traces(model)
    gradients(model, images)
    assert_same(before, traces(model))
    assert torch.equal(images, TINY)
    assert not images.requires_grad
    assert images.grad_fn is None


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "score"])
def test_also_after_an_exception(kind: type[BaseException], where: str) -> None:
    model = with_gradients(tiny_model())

    def fail(*_: object) -> None:
        raise kind("on purpose")

    def score(logits: Tensor) -> Tensor:
        if where == "score":
            fail()
        if where == "backward":
            logits.register_hook(fail)
        return logits[:, 0]

    handle = model[5].register_forward_hook(fail) if where == "forward" else None
    before = traces(model)
    with pytest.raises(kind, match="on purpose"):
        gradients(model, TINY, target=score)
    assert_same(before, traces(model))
    if handle is not None:
        handle.remove()
    reference = reference_gradients(model, TINY, lambda item: item[:, 0])
    assert_equals_reference(gradients(model, TINY, target=0), *reference)


def test_in_no_grad_and_in_inference_mode() -> None:
    model = tiny_model()
    plain = gradients(model, TINY).layers
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert gradients(model, TINY.clone()).layers == plain
            assert not torch.is_grad_enabled()


def test_several_threads_and_one_that_trains() -> None:
    model = tiny_model().eval()
    model[:3].requires_grad_(False)
    plain, before = gradients(model, TINY, target=0).layers, traces(model)
    model(TINY)[:, 1].sum().backward()
    expected = {name: item.grad for name, item in model.named_parameters()}
    model.zero_grad()
    failures: list[str] = []

    def look() -> None:
        for _ in range(15):
            if gradients(model, TINY, target=0).layers != plain:
                failures.append("other gradients")

    def train() -> None:
        for _ in range(60):
            model.zero_grad()
            model(TINY)[:, 1].sum().backward()
            for name, item in model.named_parameters():
                is_equal = item.grad is None if expected[name] is None else torch.equal(item.grad, expected[name])
                if not is_equal:
                    failures.append(f"{name} has another .grad")

    threads = [threading.Thread(target=work) for work in (look, look, look, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    model.zero_grad()
    assert_same({**before, "random": 0}, {**traces(model), "random": 0})


def test_hooks_on_parameters_are_not_called() -> None:
    model = tiny_model()
    called: list[Tensor] = []
    model[0].weight.register_hook(called.append)
    gradients(model, TINY)
    assert not called


# Plotting


@pytest.fixture
def _no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def share_of(image: np.ndarray, colour: tuple[int, int, int]) -> float:
    return float((np.abs(image.astype(int) - colour).max(2) <= 3).mean())


BLUE, ORANGE, PURPLE, RED = (233, 240, 247), (249, 236, 231), (107, 33, 168), (185, 28, 28)


@pytest.mark.parametrize(
    ("make", "colour"),
    [
        (lambda: gradients(deep_network(nn.Sigmoid), IMAGE), BLUE),
        (lambda: gradients(deep_network(nn.ReLU, 4), IMAGE), ORANGE),
        (lambda: gradients(deep_network(nn.ReLU, 1), IMAGE), None),
    ],
)
def test_the_plot_has_the_colour_of_each_verdict(
    make: Callable[[], GradientFlow], colour: tuple[int, int, int] | None
) -> None:
    pytest.importorskip("matplotlib")
    image = draw_gradients(make())
    assert (image.dtype, image.ndim, image.shape[2]) == (np.uint8, 3, 3)
    for item in (BLUE, ORANGE):
        assert (share_of(image, item) > 0.2) == (item == colour)


def rows_of(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return np.flatnonzero((np.abs(image.astype(int) - colour).max(2) <= 3).sum(1) > 2)


def test_zeros_are_marked_at_the_bottom_and_nan_at_the_top() -> None:
    pytest.importorskip("matplotlib")
    model = tiny_model()
    plain = draw_gradients(gradients(model, TINY))
    nn.init.zeros_(model[8].weight)
    none = draw_gradients(gradients(model, TINY))
    nan = draw_gradients(gradients(SquareRoot(), torch.ones(1, 1, 1, 3)))
    assert len(rows_of(plain, PURPLE)) == len(rows_of(plain, RED)) == 0
    assert rows_of(none, PURPLE).max() > 0.8 * len(none)
    top = rows_of(nan, RED)
    assert (top < 0.2 * len(nan)).sum() >= 6


def test_long_names_make_the_plot_higher_and_leave_the_curve_its_room() -> None:
    pytest.importorskip("matplotlib")
    short = draw_gradients(gradients(deep_network(nn.Sigmoid), IMAGE, layers="1*"))
    inside = nn.Sequential(OrderedDict({"a_block_with_a_name_of_thirty_": deep_network(nn.Sigmoid)}))
    long = draw_gradients(gradients(inside, IMAGE, layers="*.1*"))
    assert short.shape[0] + 100 < long.shape[0]
    heights = [len(rows_of(image, BLUE)) for image in (short, long)]
    assert heights[0] == pytest.approx(heights[1], rel=0.08)


def test_a_title_is_used_literally_and_no_state_changes() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before, loaded = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    flow = gradients(worked_model(), torch.ones(1, 1, 1, 3))
    first, second = draw_gradients(flow, title="$\\frac"), draw_gradients(flow)
    assert first.shape == second.shape
    assert (first != second).any()
    np.testing.assert_array_equal(second, draw_gradients(flow, title="Sequential: gradients of class 1, 89"))
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded


@pytest.mark.usefixtures("_no_matplotlib")
def test_without_matplotlib_the_error_says_how_to_get_it() -> None:
    flow = gradients(worked_model(), torch.ones(1, 1, 1, 3))
    with pytest.raises(GradcamError, match=r'pip install "\.\[plots\]"'):
        draw_gradients(flow)


def test_only_a_flow_is_drawn() -> None:
    with pytest.raises(GradcamError, match="expected the result of inspection.gradients"):
        draw_gradients([1, 2])
