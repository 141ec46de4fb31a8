"""Test the embedded EfficientNet-Lite0: TensorFlow's padding, and batch norms folded into convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.models.providers.embedded import ConvolutionUnit, SamePaddedConv2d


def pad_as_tensorflow(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad as TensorFlow documents "SAME": to ceil(size / stride) output cells, with an odd pixel at the end."""
    paddings = list[int]()
    for size in (x.shape[-1], x.shape[-2]):
        cells = (size + stride - 1) // stride
        total = max((cells - 1) * stride + kernel - size, 0)
        paddings += [total // 2, total - total // 2]
    return F.pad(x, paddings)


def make_unit(kernel: int = 3, stride: int = 2, groups: int = 4) -> ConvolutionUnit:
    torch.manual_seed(0)
    if stride == 1:
        convolution = nn.Conv2d(4, 8, kernel, padding=kernel // 2, groups=groups, bias=False)
    else:
        convolution = SamePaddedConv2d(4, 8, kernel, stride, groups=groups, bias=False)
    unit = ConvolutionUnit(convolution, nn.BatchNorm2d(8, eps=1e-3), nn.ReLU6(inplace=True))
    for values in (unit[1].weight, unit[1].bias, unit[1].running_mean, unit[1].running_var):
        nn.init.uniform_(values, 0.5, 1.5)
    return unit.eval().requires_grad_(False)


def run_by_hand(unit: ConvolutionUnit, x: Tensor) -> Tensor:
    convolution, norm = unit[0], unit[1]
    x = pad_as_tensorflow(x.double(), convolution.kernel_size[0], convolution.stride[0])
    x = F.conv2d(x, convolution.weight.double(), stride=convolution.stride, groups=convolution.groups)
    mean, variance = (values.double()[:, None, None] for values in (norm.running_mean, norm.running_var))
    x = (x - mean) / (variance + 1e-3).sqrt() * norm.weight.double()[:, None, None] + norm.bias.double()[:, None, None]
    return x.clamp(0, 6)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 4])
def test_units_agree_with_tensorflow(kernel: int, stride: int, groups: int) -> None:
    unit = make_unit(kernel, stride, groups)
    for height, width in ((5, 5), (6, 9), (7, 8), (8, 8), (11, 6)):
        x = torch.randn(2, 4, height, width)
        torch.testing.assert_close(unit(x), run_by_hand(unit, x).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("index", [0, 1])
def test_a_hook_sees_the_output_of_its_module(index: int) -> None:
    unit, outputs = make_unit(), list[Tensor]()
    unit[index].register_forward_hook(lambda _module, _inputs, output: outputs.append(output.clone()))
    x = torch.randn(2, 4, 8, 8)
    unit(x)
    expected = F.conv2d(pad_as_tensorflow(x, 3, 2), unit[0].weight, stride=2, groups=4)
    if index == 1:
        expected = F.batch_norm(
            expected, unit[1].running_mean, unit[1].running_var, unit[1].weight, unit[1].bias, eps=1e-3
        )
    torch.testing.assert_close(outputs, [expected])


def test_each_pass_uses_the_current_weights() -> None:
    unit, x = make_unit(), torch.randn(2, 4, 8, 8)
    unit(x)
    unit[1].running_var.data.mul_(3)
    unit[0].weight.data.copy_(torch.randn_like(unit[0].weight))
    torch.testing.assert_close(unit(x), run_by_hand(unit, x).float(), atol=1e-5, rtol=1e-5)


def test_training_mode_uses_the_statistics_of_the_batch() -> None:
    unit, x = make_unit().train(), torch.randn(8, 4, 8, 8)
    unit[2] = nn.Identity()
    outputs = unit(x).detach()
    scaled = (outputs - unit[1].bias[:, None, None]) / unit[1].weight[:, None, None]
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(8), atol=1e-5, rtol=0)


def test_gradients_are_those_of_the_two_modules() -> None:
    unit, x = make_unit().requires_grad_(), torch.randn(2, 4, 8, 8)
    values = [unit[0].weight, unit[1].weight, unit[1].bias]
    weights = torch.randn_like(unit(x))
    folded = torch.autograd.grad((unit(x) * weights).sum(), values)
    plain = torch.autograd.grad((run_by_hand(unit, x) * weights).sum(), values)
    torch.testing.assert_close(folded, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("of", ["input", "weights", "norm"])
def test_batch_norms_are_not_folded_if_gradients_are_needed(of: str) -> None:
    unit, x = make_unit(), torch.randn(2, 4, 8, 8)
    expected = nn.Sequential(*unit)(x)
    assert not torch.equal(unit(x), expected)
    x.requires_grad_(of == "input")
    unit.requires_grad_(of == "weights")
    unit[1].requires_grad_(of in ("weights", "norm"))
    assert torch.equal(unit(x), expected)
    with torch.no_grad():
        assert not torch.equal(unit(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_run(dtype: torch.dtype) -> None:
    unit, x = make_unit().to(dtype), torch.randn(2, 4, 8, 8, dtype=dtype)
    torch.testing.assert_close(unit(x).double(), run_by_hand(unit, x), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, "autocast"])
def test_nothing_is_folded_in_other_precisions(dtype: torch.dtype | str) -> None:
    is_autocast = dtype == "autocast"
    unit, x = make_unit(), torch.randn(2, 4, 8, 8)
    if isinstance(dtype, torch.dtype):
        unit, x = unit.to(dtype), x.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        assert torch.equal(unit(x), nn.Sequential(*unit)(x))


def test_the_network_agrees_with_its_parts() -> None:
    model = gradcam.load_classifier().model
    x = torch.rand(2, 3, 224, 224) * 2 - 1
    with torch.no_grad():
        logits = model(x)
        handles = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
        unfolded = model(x)
    assert len(handles) > 100
    torch.testing.assert_close(logits, unfolded, atol=1e-4, rtol=1e-4)
    assert not torch.equal(logits, unfolded), "nothing was folded"
