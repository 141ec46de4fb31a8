"""EfficientNet-Lite0, written out: the network whose weights come with the package.

Lite0 is EfficientNet-B0 without squeeze-and-excitation and with ReLU6 for swish (Tan & Le, "EfficientNet", ICML 2019;
the Lite variants are from Google's `tpu` repository). Its weights were trained in TensorFlow, hence the padding and the
batch norms' epsilon.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

TENSORFLOW_EPSILON = 1e-3


class SamePaddedConv2d(nn.Conv2d):
    """A strided convolution padded as TensorFlow's "SAME": the odd pixel of padding goes to the right and the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = _same_padding(x.shape[-2], self.kernel_size[0], self.stride[0])
        left, right = _same_padding(x.shape[-1], self.kernel_size[1], self.stride[1])
        return super().forward(F.pad(x, (left, right, top, bottom)))


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    if stride == 1:  # symmetric: plain padding is the same thing, without a copy of the input
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return SamePaddedConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)


def _convolution_unit(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs, eps=TENSORFLOW_EPSILON)
    return nn.Sequential(_convolution(inputs, outputs, kernel, stride, groups), norm, nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Expand, convolve each channel by itself, project; the input is added where shapes allow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = _convolution_unit(inputs, hidden) if expansion > 1 else nn.Identity()
        self.depthwise = _convolution_unit(hidden, hidden, kernel, stride, groups=hidden)
        self.project = nn.Sequential(_convolution(hidden, outputs), nn.BatchNorm2d(outputs, eps=TENSORFLOW_EPSILON))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.is_residual else y


def _blocks(inputs: int, outputs: int, kernel: int, stride: int, repeats: int) -> list[nn.Module]:
    first = InvertedResidual(inputs, outputs, kernel, stride, expansion=6)
    return [first, *(InvertedResidual(outputs, outputs, kernel, 1, expansion=6) for _ in range(repeats - 1))]


class EfficientNetLite0(nn.Module):
    """Images (N,3,H,W), scaled to [-1,1], to logits (N,classes).

    `layer1` to `layer4` end at strides 4, 8, 16 and 32, as a ResNet's do. `layer4` ends with the network's last blocks,
    before the convolution that widens it to 1280 channels: behind that one, Grad-CAM put less of its mass on the right
    quarter of mosaics of four photographs (`scripts/measure_layer4`).
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution_unit(3, 32, kernel=3, stride=2),
            InvertedResidual(32, 16, kernel=3, stride=1, expansion=1),
        )
        self.layer1 = nn.Sequential(*_blocks(16, 24, kernel=3, stride=2, repeats=2))
        self.layer2 = nn.Sequential(*_blocks(24, 40, kernel=5, stride=2, repeats=2))
        self.layer3 = nn.Sequential(
            *_blocks(40, 80, kernel=3, stride=2, repeats=3),
            *_blocks(80, 112, kernel=5, stride=1, repeats=3),
        )
        self.layer4 = nn.Sequential(
            *_blocks(112, 192, kernel=5, stride=2, repeats=4),
            *_blocks(192, 320, kernel=3, stride=1, repeats=1),
        )
        self.head = nn.Sequential(
            _convolution_unit(320, 1280),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1280, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.head(x)
