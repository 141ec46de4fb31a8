"""Test guided backpropagation and Guided Grad-CAM: slow loops, captum, and operations that hooks cannot reach."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradcam
from gradcam.attributions import guided_backpropagation, guided_gradcam, input_gradients
from tests.helpers import TINY, set_submodule, tiny_model
from tests.oracles import resize_cubic


class GuidedFunction(torch.autograd.Function):
    """The rule of the paper as an autograd function, without hooks or in-place operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: float) -> Tensor:
        ctx.passes = (x > 0) & (x < largest)
        return x.clamp(0, largest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.passes * (gradient > 0), None


class GuidedModule(nn.Module):
    def __init__(self, largest: float) -> None:
        super().__init__()
        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        return GuidedFunction.apply(x, self.largest)


def reference(model: nn.Module, images: Tensor, classes: list[int]) -> Tensor:
    """Compute guided backpropagation class by class on a copy of the model with every ReLU replaced."""
    model = copy.deepcopy(model).eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.ReLU, nn.ReLU6)):
            set_submodule(model, name, GuidedModule(6.0 if isinstance(module, nn.ReLU6) else float("inf")))
    leaf = images.clone().requires_grad_()
    output = model(leaf)
    gradients = [torch.autograd.grad(output[:, index].sum(), leaf, retain_graph=True)[0] for index in classes]
    return torch.stack(gradients, 1).float()


class Net(nn.Module):
    """A model with a convolution, a function, and the mean of each channel."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, -2.0, 3.0, -1.0])[:, None, None].to(x)
        return (self.function(self, self.conv(x)) * weights).sum(1).mean((1, 2))[:, None] * torch.tensor([1.0, -1.0])


def attribute(function: Callable[..., Tensor], **modules: nn.Module) -> gradcam.attributions.Attribution:
    return guided_backpropagation(Net(function, **modules), TINY, target=[[0, 1]] * 3)


def test_two_layers_by_hand() -> None:
    """Compare with two dense layers and in-place ReLUs in NumPy: R = (f > 0) (R > 0) R at each layer."""
    random = np.random.default_rng(0)
    first, second, third = random.normal(size=(12, 7)), random.normal(size=(7, 6)), random.normal(size=(6, 2))
    layers = [nn.Linear(12, 7, bias=False), nn.Linear(7, 6, bias=False), nn.Linear(6, 2, bias=False)]
    for layer, weight in zip(layers, (first, second, third)):
        layer.weight = nn.Parameter(torch.from_numpy(weight.T.copy()))
    model = nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(inplace=True), layers[1], nn.ReLU(inplace=True), layers[2])
    images = random.normal(size=(3, 3, 2, 2))
    attribution = guided_backpropagation(model, torch.from_numpy(images), target=[[0, 1]] * 3)
    for n in range(3):
        hidden = images[n].reshape(-1) @ first
        deeper = np.maximum(hidden, 0) @ second
        for k in range(2):
            r = third[:, k]
            r = np.where((deeper > 0) & (r > 0), r, 0) @ second.T
            r = np.where((hidden > 0) & (r > 0), r, 0) @ first.T
            np.testing.assert_allclose(attribution.values[n, k].numpy(), r.reshape(3, 2, 2), rtol=1e-5, atol=1e-6)
    assert attribution.values.abs().sum() > 0


def test_captum_on_a_network_that_it_supports() -> None:
    """captum is right if each ReLU is used once and none is in place; the original model keeps its in-place ReLUs."""
    from captum.attr import GuidedBackprop

    model = tiny_model().double().eval()
    captum_model = copy.deepcopy(model)
    for module in captum_model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    attribution = guided_backpropagation(model, TINY.double(), target=[[3, 1]] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [GuidedBackprop(captum_model).attribute(TINY.double(), target=index) for index in (3, 1)]
    torch.testing.assert_close(attribution.values, torch.stack(expected, 1).detach().float())
    gradients = input_gradients(model, TINY.double(), target=[[3, 1]] * 3).values
    assert not torch.allclose(attribution.values, gradients)


@pytest.mark.parametrize("name", ["resnet18", "alexnet", "squeezenet1_1", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_networks_with_relus_in_place_and_used_twice(name: str) -> None:
    model = getattr(torchvision.models, name)(weights=None).double().eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    attribution = guided_backpropagation(model, images, target=[[0, 7]] * 2)
    torch.testing.assert_close(attribution.values, reference(model, images, [0, 7]), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(attribution.output, model(images).detach())


class Subclass(nn.ReLU6):
    pass


def _twice(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.relu(x) - 0.2)


def _changed_later(net: Any, x: Tensor) -> Tensor:
    y = net.relu(x)
    y += 1
    y.mul_(-2)
    return y * x


def _old_name(net: Any, x: Tensor) -> Tensor:
    net.relu(x)
    return x * 2


def _view(net: Any, x: Tensor) -> Tensor:
    return net.relu(x.flatten(2)).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("function", [_twice, _view])
@pytest.mark.parametrize("relu", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), Subclass(inplace=True)])
def test_ways_to_use_a_module(function: Callable[..., Tensor], relu: nn.Module) -> None:
    attribution = attribute(function, relu=relu)
    torch.testing.assert_close(attribution.values, reference(Net(function, relu=relu), TINY, [0, 1]))
    assert attribution.values[:, 0].any()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_output_that_is_changed_in_place_later(in_place: bool) -> None:
    """After an in-place ReLU6, the old name has the new value too. PyTorch forbids this change after a ReLU."""
    attribution = attribute(_changed_later, relu=nn.ReLU6(inplace=in_place))
    equivalent = Net(_changed_as_in_place if in_place else _changed_copy, relu=nn.ReLU6())
    torch.testing.assert_close(attribution.values, reference(equivalent, TINY, [0, 1]))
    with pytest.raises(gradcam.errors.ModelError, match="overwrites a value that the backward pass needs"):
        attribute(_changed_later, relu=nn.ReLU(inplace=in_place))


def _changed_copy(net: Any, x: Tensor) -> Tensor:
    return (net.relu(x) + 1) * -2 * x


def _changed_as_in_place(net: Any, x: Tensor) -> Tensor:
    y = (net.relu(x) + 1) * -2
    return y * y


def test_a_relu_in_place_whose_input_is_used_by_its_old_name() -> None:
    attribution = attribute(_old_name, relu=nn.ReLU(inplace=True))
    torch.testing.assert_close(
        attribution.values, reference(Net(lambda net, x: net.relu(x) * 2, relu=nn.ReLU()), TINY, [0, 1])
    )


def test_a_view_changed_in_place_is_refused_if_its_base_is_used() -> None:
    def half(net: Any, x: Tensor) -> Tensor:
        net.relu(x[:, :2])
        return x

    with pytest.raises(gradcam.GradcamError, match="hooks cannot reach 1 of this"):
        attribute(half, relu=nn.ReLU(inplace=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: F.relu(x), lambda net, x: F.relu(x, inplace=True), lambda net, x: torch.relu(net.relu(x)),
        lambda net, x: F.relu6(x), lambda net, x: x.clamp(min=0), lambda net, x: x.clamp_min(0.0),
        lambda net, x: x.clamp(0, 6), lambda net, x: F.threshold(x, 0, 0), lambda net, x: net.relu.forward(x),
        lambda net, x: F.relu(x[:, :, 1:], inplace=True),
    ],
)  # fmt: skip
def test_relus_that_hooks_cannot_reach_are_counted_and_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(gradcam.errors.ModelError, match=r"hooks cannot reach 1 of this model's.*nn\.ReLU module"):
        attribute(function, relu=nn.ReLU())
    with pytest.raises(gradcam.errors.ModelError, match="hooks cannot reach 3 of this"):
        attribute(lambda net, x: torch.relu(function(net, F.relu(x)) - 0.1), relu=nn.ReLU())


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.relu(x) + F.relu(net.conv.bias).sum(),  # Its input does not depend on the image.
        lambda net, x: (F.relu(x), net.relu(x))[1],  # The score does not depend on it.
        lambda net, x: net.relu(x) + F.relu(x).detach(),
        lambda net, x: net.relu(x.clamp(0, 1)),  # Clamping to a range is no ReLU.
        lambda net, x: net.relu(x.clamp(min=0.01)),
        lambda net, x: net.relu(F.hardtanh(F.leaky_relu(F.gelu(x)))),
    ],
)
def test_other_operations_are_allowed(function: Callable[..., Tensor]) -> None:
    attribution = attribute(function, relu=nn.ReLU())
    torch.testing.assert_close(attribution.values, reference(Net(function, relu=nn.ReLU()), TINY, [0, 1]))


def test_no_relu_at_all() -> None:
    for function in (lambda net, x: F.gelu(x), lambda net, x: x + net.relu(net.conv.bias).sum()):
        with pytest.raises(gradcam.errors.ModelError, match="There is no ReLU between .* use input_gradients"):
            attribute(function, relu=nn.ReLU())


def test_checkpoints() -> None:
    def block(net: Any, x: Tensor, *, use_reentrant: bool) -> Tensor:
        return checkpoint(lambda y: net.relu(net.relu(y) - 0.2), x, use_reentrant=use_reentrant)

    attribution = attribute(lambda net, x: block(net, x, use_reentrant=False), relu=nn.ReLU())
    torch.testing.assert_close(attribution.values, attribute(_twice, relu=nn.ReLU()).values)
    with pytest.raises(gradcam.errors.ModelError, match="set use_reentrant=False"):
        attribute(lambda net, x: net.relu(block(net, x, use_reentrant=True)), relu=nn.ReLU())


def test_torch_func_inside_the_model() -> None:
    with pytest.raises(gradcam.errors.ModelError, match=r"runs under torch\.func"):
        attribute(lambda net, x: torch.func.vmap(net.relu)(x), relu=nn.ReLU())


def test_a_scripted_part() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * 2 + x.sigmoid()

    part = torch.jit.script(Part())
    for _ in range(3):  # From the third pass on, PyTorch compiles the part and hides its operations.
        with pytest.raises(gradcam.errors.ModelError, match="hooks (cannot )?reach"):
            attribute(lambda net, x: net.relu(net.part(x)), relu=nn.ReLU(), part=part)


def test_a_relu_under_another_name() -> None:
    attribution = attribute(_twice, relu=nn.Hardtanh(0, 6, inplace=True))
    torch.testing.assert_close(attribution.values, attribute(_twice, relu=nn.ReLU6()).values)
    with pytest.raises(gradcam.errors.ModelError, match="There is no ReLU"):
        attribute(_twice, relu=nn.Hardtanh(-1, 1))


def test_guided_threads_do_not_affect_other_threads() -> None:
    model = tiny_model().eval()
    expected = [method(model, TINY, target=2).values for method in (guided_backpropagation, input_gradients)]
    assert not torch.allclose(*expected)
    results: list[list[Tensor]] = [[], []]

    def work(index: int, method: Callable[..., Any]) -> None:
        results[index].extend(method(model, TINY, target=2).values for _ in range(20))

    threads = [threading.Thread(target=work, args=args) for args in ((0, guided_backpropagation), (1, input_gradients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread_values, expected_values in zip(results, expected):
        assert len(thread_values) == 20
        for value in thread_values:
            torch.testing.assert_close(value, expected_values)


class TestGuidedGradcam:
    def test_captum(self) -> None:
        """Combine captum's parts with a cubic resize written as a loop, and a heatmap in [0,1]."""
        from captum.attr import LayerGradCam

        model = tiny_model().double().eval()
        images = TINY.double()
        attribution = guided_gradcam(model, images, "3", target=[[3, 1]] * 3)
        fine = reference(model, images, [3, 1])
        assert attribution.layer == "3"
        for k, index in enumerate((3, 1)):
            maps = LayerGradCam(model, model[3]).attribute(images, target=index, relu_attributions=True)
            for n in range(3):
                heatmap = resize_cubic(maps[n, 0].detach().numpy(), (12, 16))
                expected = fine[n, k].numpy() * (heatmap / max(heatmap.max(), 1e-30))
                np.testing.assert_allclose(attribution.values[n, k].numpy(), expected, rtol=1e-4, atol=1e-7)
        assert attribution.values.any()

    def test_the_last_layer_and_a_function(self) -> None:
        model = tiny_model().eval()
        attribution = guided_gradcam(model, TINY, target=lambda output: output[:, 1] - output[:, 2])
        explanation = gradcam.explain(model, TINY, target=lambda output: output[:, 1] - output[:, 2])
        fine = guided_backpropagation(model, TINY, target=lambda output: output[:, 1] - output[:, 2])
        assert attribution.classes is None
        assert attribution.layer == explanation.layer
        torch.testing.assert_close(attribution.values, fine.values * explanation.heatmaps[:, :, None])

    def test_the_score_of_a_class_target(self) -> None:
        from gradcam.targets import ClassTarget

        model = tiny_model().eval()
        target = ClassTarget(top=2, score="contrast")
        attribution = guided_gradcam(model, TINY, "3", target=target)
        explanation = gradcam.explain(model, TINY, "3", target=target)
        torch.testing.assert_close(attribution.scores, explanation.scores)
        fine = guided_backpropagation(model, TINY, target=target)
        torch.testing.assert_close(attribution.values, fine.values * explanation.heatmaps[:, :, None])

    def test_a_model_that_changes_its_input(self) -> None:
        model = nn.Sequential(nn.ReLU(inplace=True), tiny_model()).eval()
        images = TINY.clone()
        attribution = guided_gradcam(model, images, "1.3", target=2)
        assert torch.equal(images, TINY)
        expected = guided_gradcam(nn.Sequential(nn.ReLU(), model[1]), TINY, "1.3", target=2)
        torch.testing.assert_close(attribution.values, expected.values)

    def test_an_unknown_layer(self) -> None:
        with pytest.raises(gradcam.GradcamError, match="There is no layer 'nowhere'"):
            guided_gradcam(tiny_model(), TINY, "nowhere")
