"""Check that maps of images that depend on one another explain only their own scores, with a warning."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamWarning
from tests import oracles
from tests.helpers import FunctionModule

IMAGES = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class MinusMean(nn.Module):
    """A module that subtracts the batch mean without being a known normalisation layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def network(mixing: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    front = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), mixing, nn.Softplus()]
    return nn.Sequential(*front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double().eval()


# Softmax over the images looks like probabilities.
@pytest.mark.filterwarnings("ignore:The model's output is probabilities")
@pytest.mark.parametrize(
    "mix",
    [
        lambda y: y / y.mean(), lambda y: y - y.sum() * y, lambda y: y * y.mean(-2, keepdim=True), lambda y: y @ y.t(),
        lambda y: y.softmax(-2), lambda y: y.t().softmax(1).t(), lambda y: y.view(1, -1).softmax(1).view(y.shape),
        lambda y: y * torch.cat([y[:1] * 0 + 1, y[:-1]]),  # the first image does not depend on any other
        lambda y: y * torch.cat([y[1:], y[:1] * 0 + 1]),  # the last image does not depend on any other
    ],
)  # fmt: skip
def test_any_operation_that_mixes_images_is_noticed(mix: Callable[[Tensor], Tensor]) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        return mix(module.head(module.body(x).relu().mean((2, 3))))

    model = FunctionModule(forward, body=nn.Conv2d(3, 8, 3, stride=2), head=nn.Linear(8, 3)).double().eval()
    classes = [1, 2, 0]
    with torch.no_grad():
        start = model.body(IMAGES)
    for _ in range(2):
        with pytest.warns(GradcamWarning, match="depend on one another") as caught:
            explanation = gradcam.explain(model, IMAGES, "body", target=classes, evidence="signed")
        assert sum("depend on one another" in str(item.message) for item in caught) == 1
        for image, index in enumerate(classes):
            activations = start.clone().requires_grad_()
            score = mix(model.head(activations.relu().mean((2, 3))))[image, index]
            (gradient,) = torch.autograd.grad(score, activations)
            expected = torch.einsum("c,chw->hw", gradient[image].mean((1, 2)), start[image])
            torch.testing.assert_close(explanation.maps[image, 0].double(), expected, rtol=1e-4, atol=1e-8)


MIXING = {"batch norm": lambda: nn.BatchNorm2d(4, track_running_stats=False), "mean": MinusMean}


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("method", ["gradcam", "hirescam"])
def test_a_map_is_that_of_its_own_score(kind: str, method: str) -> None:
    model = network(MIXING[kind]())
    with torch.no_grad():
        start = model[1](model[0](IMAGES))
    for classes in ([1, 2, 3], [1, 4, 0]):
        with pytest.warns(GradcamWarning, match="depend on one another"):
            explanation = gradcam.explain(model, IMAGES, "1", target=classes, method=method)
        for image, index in enumerate(classes):
            activations = start.clone().requires_grad_()
            score = model[2:](activations)[image, index]
            (gradient,) = torch.autograd.grad(score, activations)
            other_gradients = gradient[[row for row in range(3) if row != image]]
            assert other_gradients.any()  # summing the scores would mix these in
            if method == "gradcam":
                expected = oracles.gradcam_map(start[image], gradient[image])
            else:
                expected = (start[image] * gradient[image]).sum(0).relu()
            torch.testing.assert_close(explanation.maps[image, 0].double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", MIXING)
def test_several_classes_and_second_derivatives(kind: str) -> None:
    model = network(MIXING[kind]())
    classes = [[1, 2], [3, 0], [4, 1]]
    with torch.no_grad():
        start = model[1](model[0](IMAGES))
    methods = ["gradcam", "finercam", "shapleycam"]
    with pytest.warns(GradcamWarning, match="depend on one another"):
        explanations = gradcam.compare(model, IMAGES, layers=["1"], methods=methods, target=classes, evidence="signed")
    for image in range(3):
        for k, index in enumerate(classes[image]):
            activations = start.clone().requires_grad_()
            score = model[2:](activations)[image, index]
            (gradient,) = torch.autograd.grad(score, activations, create_graph=True)
            (product,) = torch.autograd.grad((gradient * start).sum(), activations)
            weights = (gradient - product / 2)[image].mean((1, 2)).detach()
            expected = torch.einsum("c,chw->hw", weights, start[image])
            shapley = explanations["1", "shapleycam"].maps[image, k].double()
            assert expected.abs().max() > 0
            torch.testing.assert_close(shapley, expected, rtol=1e-4, atol=1e-7)


def test_independent_images_give_no_warning_and_a_changed_model_is_checked_again() -> None:
    model = network(nn.BatchNorm2d(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            gradcam.explain(model, IMAGES, "1", target=[1, 2, 3])
            gradcam.explain(network(MIXING["batch norm"]()), IMAGES[:1], "3", target=1)  # a single image
    model[2].running_mean = model[2].running_var = None
    with pytest.warns(GradcamWarning, match="depend on one another"):
        gradcam.explain(model, IMAGES, "1", target=[1, 2, 3])
    model[2] = MinusMean()
    with pytest.warns(GradcamWarning, match="depend on one another"):
        gradcam.explain(model, IMAGES, "1", target=[1, 2, 3])


@pytest.mark.parametrize("method", ["scorecam", "ablationcam", "rise", "eigencam"])
def test_methods_without_gradients_warn_about_dependent_images_too(method: str) -> None:
    method_or_name = gradcam.METHODS["rise"].using(masks=8) if method == "rise" else method
    with pytest.warns(GradcamWarning, match="depend on one another"):
        gradcam.explain(network(MIXING["batch norm"]()), IMAGES, "1", method=method_or_name, target=1)


def test_attributions_warn_about_dependent_images_too() -> None:
    with pytest.warns(GradcamWarning, match="depend on one another"):
        gradcam.attributions.input_gradients(network(MIXING["batch norm"]()), IMAGES, target=1)
