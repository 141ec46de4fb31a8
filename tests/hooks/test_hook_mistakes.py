"""Measure six common mistakes with PyTorch's hooks, and check that this package gives the right result instead."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.attributions import input_gradients
from gradcam.hooks.hooks import Hooks
from gradcam.inspection.edit import clip_gradients, edit_gradients
from gradcam.inspection.selection import follow_layers

IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))


def differentiate(model: nn.Sequential, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the convolution's activations, and the gradient of the sum of squares there, by plain autograd."""
    activations = model[0](images)
    score = model[3](activations.relu().flatten(1)).pow(2).sum()
    return activations.detach(), torch.autograd.grad(score, activations)[0]


def record_by_hooks(model: nn.Sequential, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activations and the gradient recorded by `follow_layers` in a training step."""
    tensors: list[Tensor] = []

    def look(name: str, tensor: Tensor) -> Any:
        tensors.append(tensor.clone())
        return tensors.append

    with Hooks() as hooks:
        follow_layers(hooks, {"0": model[0]}, look)
        model(images).pow(2).sum().backward()
    activations, gradients = tensors
    return activations, gradients


def test_intermediate_gradients_are_gone_without_retain() -> None:
    model = network()
    inputs_of_linear: list[Tensor] = []
    handle = model[3].register_forward_pre_hook(lambda module, inputs: inputs_of_linear.append(inputs[0]))
    model(IMAGES).pow(2).sum().backward()
    handle.remove()
    with pytest.warns(UserWarning, match="not a leaf Tensor"):
        assert inputs_of_linear[0].grad is None
    _, expected = differentiate(model, IMAGES)
    assert expected.any()
    torch.testing.assert_close(record_by_hooks(model, IMAGES)[1], expected)


def test_a_hook_that_assigns_changes_nothing_or_too_much() -> None:
    def assign(gradient: Tensor) -> None:
        gradient = gradient * 10  # only rebinds the local name

    def multiply(gradient: Tensor) -> None:
        gradient *= 10

    def gradients(function: Any, edit: Any) -> list[float]:
        x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
        branch, side = y * 1, x * 3
        edit(side, function)
        (side + branch).backward(torch.tensor([1.0]))
        return [x.grad.item(), y.grad.item()]

    def plain(tensor: Tensor, function: Any) -> None:
        tensor.register_hook(function)

    assert gradients(assign, plain) == [3, 1]  # the same as without a hook
    # The gradient at `y` shares its memory with the one at `side`, so it is multiplied as well.
    assert gradients(multiply, plain) == [30, 10]
    assert gradients(lambda gradient: gradient * 10, edit_gradients) == [30, 1]
    with pytest.raises(gradcam.errors.GradientError, match="in place.*Return a new tensor"):
        gradients(multiply, edit_gradients)


def old_grad_input(module: nn.Module, images: Tensor) -> list[tuple[int, ...] | None]:
    """Return the shapes that the deprecated `register_backward_hook` passes as `grad_input`."""
    results: list[Any] = []
    module = copy.deepcopy(module)
    module.register_backward_hook(lambda module, grad_input, grad_output: results.extend(grad_input))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(images).sum().backward()
    return [None if gradient is None else tuple(gradient.shape) for gradient in results]


def test_the_old_backward_hook_means_something_else_in_each_layer() -> None:
    linear, convolution = nn.Linear(3, 4), nn.Conv2d(3, 4, 3)
    rows, images = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, 5, 5, requires_grad=True)
    assert old_grad_input(linear, rows) == [(4,), (2, 3), (3, 4)]  # bias, input, transposed weight
    assert old_grad_input(convolution, images) == [(2, 3, 5, 5), (4, 3, 3, 3), (4,)]  # input, weight, bias
    assert old_grad_input(nn.Sequential(linear, nn.ReLU()), rows) == [(2, 4)]  # only for the last layer inside
    for module, inputs in ((linear, rows), (convolution, images), (nn.Sequential(linear, nn.ReLU()), rows)):
        model = nn.Sequential(module, nn.Tanh())
        output = module(inputs)
        expected = torch.autograd.grad(output.tanh().sum(), output)[0]
        hook_gradients: list[Tensor] = []
        with edit_gradients(model, hook_gradients.append, layers="0"):
            model(inputs).sum().backward()
        torch.testing.assert_close(hook_gradients, [expected])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_inputs_that_need_no_gradient() -> None:
    model = network()
    calls: list[Any] = []
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: calls.append(grad_input))
    nn.Sequential(model[0], nn.Flatten(), model[3])(IMAGES).sum().backward()
    assert calls == [(None,)]
    model[0]._backward_hooks.clear()
    frozen = network().requires_grad_(False)
    frozen[3].register_full_backward_hook(lambda *_: calls.append("never"))
    assert not frozen(IMAGES).requires_grad
    assert len(calls) == 1

    frozen = network().requires_grad_(False)
    images = IMAGES.clone().requires_grad_()
    expected = torch.autograd.grad(frozen(images)[:, 1].sum(), images)[0]
    torch.testing.assert_close(input_gradients(frozen, IMAGES, target=1).values[:, 0], expected)
    with gradcam.TargetLayer(frozen[0]) as layer:
        assert layer.backward(frozen(IMAGES).pow(2).sum()).any()
    with (
        pytest.raises(
            gradcam.errors.GradientError, match=r"'0' returned nothing that requires a gradient.*requires_grad_"
        ),
        edit_gradients(frozen, torch.zeros_like, layers="0"),
    ):
        frozen(IMAGES)


def test_layers_in_place() -> None:
    model = network()
    hook_outputs: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda module, inputs, output: hook_outputs.append(output.detach()))
    model(IMAGES)
    handle.remove()
    activations, gradients = differentiate(model, IMAGES)
    assert (activations < 0).any()
    assert torch.equal(hook_outputs[0], activations.relu())  # the next layer has changed the output in place
    handle = model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        model(IMAGES)
    handle.remove()
    recorded = record_by_hooks(model, IMAGES)
    assert torch.equal(recorded[0], activations)
    torch.testing.assert_close(recorded[1], gradients)


def test_forgotten_handles() -> None:
    model, once = network(), network()
    once(IMAGES).sum().backward()
    largest = []
    for _ in range(3):
        model.zero_grad()
        model[3].bias.register_hook(lambda gradient: 2 * gradient)  # each step adds another hook
        model(IMAGES).sum().backward()
        largest.append((model[3].bias.grad / once[3].bias.grad).max().item())
    assert largest == [2, 4, 8]

    model = network()
    for _ in range(3):
        model.zero_grad()
        with edit_gradients(model, lambda gradient: 2 * gradient, parameters="3.bias"):
            model(IMAGES).sum().backward()
        assert torch.equal(model[3].bias.grad, 2 * once[3].bias.grad)
    with pytest.raises(ZeroDivisionError), clip_gradients(model, 1e-6):
        raise ZeroDivisionError
    model.zero_grad()
    model(IMAGES).sum().backward()
    assert torch.equal(model[3].bias.grad, once[3].bias.grad)
