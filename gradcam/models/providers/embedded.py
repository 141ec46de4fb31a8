"""Define the included model EfficientNet-Lite0, and load its weights and labels.

Lite0 is EfficientNet-B0 without squeeze-and-excitation and with ReLU6 instead of swish (Tan & Le, "EfficientNet", ICML
2019; the Lite variants are from Google's `tpu` repository). The weights were trained in TensorFlow. Therefore, the
padding and the epsilon of the batch norms are TensorFlow's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.preprocess import Preprocessing
from gradcam.models.providers.base import Blueprint, Parts, build_for

FOLDER = resources.files("gradcam.models") / "embedded"
WEIGHTS = "efficientnet_lite0.safetensors"
LABELS = "imagenet_labels.txt"
PREPROCESSING = Preprocessing(size=(224, 224), resize=256, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
# Over all methods, these layers have the best localisation: see scripts/choose_defaults.md. `layer4` is a linear
# bottleneck with negative values. `head.0` ends with the next activation. Methods that assume non-negative
# activations localise 2 to 5 times as well at `head.0` as at `layer4`: see docs/benchmarks.md.
LAYERS: dict[str, Any] = {"layer": "layer4", "layer_for_positive": "head.0"}
TASK = "classification"
CLASSES = 1000
NOTE = "Assuming the 1000 classes of ImageNet. For other classes, give labels (--labels FILE)."
TENSORFLOW_EPSILON = 1e-3


def build(classes: int) -> nn.Module:
    """Return the network without weights, for this number of classes."""
    with torch.device("meta"):  # avoids the sampling of random weights
        return EfficientNetLite0(classes)


def read_labels() -> list[str]:
    """Return the names of ImageNet's 1000 classes."""
    return (FOLDER / LABELS).read_text(encoding="utf-8").splitlines()


def name_classes(parts: Parts) -> Parts:
    """Return the parts with ImageNet's labels and a note, if the checkpoint has 1000 classes."""
    if parts.classes != CLASSES:
        return parts
    return replace(parts, labels=read_labels(), activation="softmax", notes=[*parts.notes, NOTE])


def load(name: str, weights: Path | None) -> Parts:
    """Load the network with its own weights or a checkpoint. The argument `name` is not used."""
    if weights is not None:
        model, classes, notes = build_for(read_checkpoint(weights), build, CLASSES)
        return name_classes(Parts(model, PREPROCESSING, classes=classes, notes=notes, task=TASK, **LAYERS))
    model, labels = build(CLASSES), read_labels()
    with resources.as_file(FOLDER / WEIGHTS) as path:
        stored = read_checkpoint(path).tensors
        # Convert from half precision. Copy all other values, because the file is mapped into memory, and may change.
        state = {name: value.float() if value.is_floating_point() else value.clone() for name, value in stored.items()}
    model.load_state_dict(state, assign=True)  # The alternative to `assign`, `to_empty`, would import SymPy.
    return Parts(model, PREPROCESSING, labels=labels, classes=CLASSES, activation="softmax", task=TASK, **LAYERS)


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model, with random weights."""
    return Blueprint(partial(EfficientNetLite0, CLASSES), PREPROCESSING.size, **LAYERS)


def _measure_paddings(convolution: nn.Conv2d, x: Tensor) -> list[int]:
    """Return TensorFlow's "SAME" padding (left, right, top, bottom).

    If the total padding of an axis is odd, the extra pixel is at the right or bottom.
    """
    paddings: list[int] = []
    for size, kernel, stride in zip(x.shape[:-3:-1], convolution.kernel_size[::-1], convolution.stride[::-1]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        paddings += total // 2, total - total // 2
    return paddings


class SamePaddedConv2d(nn.Conv2d):
    """A strided convolution with TensorFlow's "SAME" padding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, _measure_paddings(self, x)))


def _convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    if stride == 1:  # The padding is symmetric, so the convolution itself can pad.
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return SamePaddedConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)


class ConvolutionUnit(nn.Sequential):
    """A convolution, a batch norm and, except in projections, an activation.

    On the CPU, a pass without gradients folds the batch norm into the convolution's weights. Folding saves a third of
    the network's time (`scripts/bench --only process`). The folded weights are not cached, so they are never outdated.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self._can_fold(x):
            return super().forward(x)
        modules: list[Any] = list(self)
        convolution, norm, *activation = modules
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        weight = convolution.weight * scale[:, None, None, None]
        left, right, top, bottom = _measure_paddings(convolution, x)
        if left != right or top != bottom:
            # Extend the kernel by zeros on one side. The padding is then symmetric, which saves a copy of the input.
            weight = F.pad(weight, (right - left, 0, bottom - top, 0))
        bias = norm.bias - norm.running_mean * scale
        x = F.conv2d(x, weight, bias, convolution.stride, (bottom, right), groups=convolution.groups)
        for module in activation:
            x = module(x)
        return x

    def _can_fold(self, x: Tensor) -> bool:
        """Return whether to fold the batch norm: folding saves time, keeps the result, and skips no hook."""
        modules: list[Any] = list(self)
        # Do not fold subclasses, which may be adapters, parametrized modules or quantised modules.
        if [type(module) for module in modules[:2]] not in FOLDED or any(map(_is_watched, modules)):
            return False
        weight, norm = modules[0].weight, modules[1]
        if norm.training or norm.running_mean is None:
            return False
        # If gradients are required, folding would record more operations than it saves.
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or norm.weight.requires_grad):
            return False
        if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        return bool(x.dtype == weight.dtype == norm.running_mean.dtype == torch.float32)


FOLDED = [nn.Conv2d, nn.BatchNorm2d], [SamePaddedConv2d, nn.BatchNorm2d]


def _is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks or a replaced `forward`. Folding would skip hooks and `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def _convolution_unit(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> ConvolutionUnit:
    norm = nn.BatchNorm2d(outputs, eps=TENSORFLOW_EPSILON)
    return ConvolutionUnit(_convolution(inputs, outputs, kernel, stride, groups), norm, nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """An inverted residual block: expand, depthwise convolution, project, and add the input if the shapes allow it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = _convolution_unit(inputs, hidden) if expansion > 1 else nn.Identity()
        self.depthwise = _convolution_unit(hidden, hidden, kernel, stride, groups=hidden)
        self.project = ConvolutionUnit(_convolution(hidden, outputs), nn.BatchNorm2d(outputs, eps=TENSORFLOW_EPSILON))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.is_residual else y


def _blocks(inputs: int, outputs: int, kernel: int, stride: int, repeats: int) -> list[nn.Module]:
    first = InvertedResidual(inputs, outputs, kernel, stride, expansion=6)
    return [first, *(InvertedResidual(outputs, outputs, kernel, 1, expansion=6) for _ in range(repeats - 1))]


class EfficientNetLite0(nn.Module):
    """A classifier of images (N,3,H,W), scaled to [-1,1], that returns logits (N,classes).

    `layer1` to `layer4` end at strides 4, 8, 16 and 32, as in a ResNet. The convolution to 1280 channels
    comes after `layer4`. After this convolution, Grad-CAM localises less well on mosaics of four photographs
    (`scripts/measure_layer4`).
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution_unit(3, 32, 3, 2), InvertedResidual(32, 16, 3, 1, expansion=1))
        self.layer1 = nn.Sequential(*_blocks(16, 24, 3, 2, repeats=2))
        self.layer2 = nn.Sequential(*_blocks(24, 40, 5, 2, repeats=2))
        self.layer3 = nn.Sequential(*_blocks(40, 80, 3, 2, repeats=3), *_blocks(80, 112, 5, 1, repeats=3))
        self.layer4 = nn.Sequential(*_blocks(112, 192, 5, 2, repeats=4), *_blocks(192, 320, 3, 1, repeats=1))
        # Use no `ConvolutionUnit`. After the default target layer, gradients are required, so nothing would be folded.
        features = nn.Sequential(*_convolution_unit(320, 1280))
        self.head = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer4(self.layer3(self.layer2(self.layer1(self.stem(images))))))
