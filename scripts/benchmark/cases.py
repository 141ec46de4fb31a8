"""The networks, images and classes to explain."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]


SEED = 0


SIZE = 224


CLASSES = 1000


MEGABYTE = 10**6


PICTURE = Path("assets/cat_and_espresso.jpg")


SUFFIXES = {".jpg", ".png", ".webp"}  # The suffixes of the photographs in the same folder.


@dataclass(frozen=True)
class Case:
    """The input of every contender. `classes` has K classes for each of the N images."""

    model: nn.Module
    layer: str
    images: Tensor
    classes: list[list[int]]
    to_grid: Callable[[Tensor], Tensor] | None = None

    @property
    def columns(self) -> list[list[int]]:
        """Return K lists, each with one class per image, for contenders that explain one class per image at a time."""
        return [list(column) for column in zip(*self.classes)]


def build_lite0() -> nn.Module:
    from gradcam.models.providers.embedded import EfficientNetLite0

    return EfficientNetLite0()


@dataclass(frozen=True)
class Network:
    """A network to build. `layer` is its usual target layer.

    If the last layer with a grid is another layer, `last` is its name. If the layer's output is not (N,C,h,w),
    `to_grid` converts the output to this layout, for contenders that need the layout.
    """

    build: Callable[[], nn.Module]
    layer: str
    last: str | None = None
    to_grid: Callable[[Tensor], Tensor] | None = None


def drop_class_token(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].unflatten(1, (14, 14)).movedim(-1, 1)


def to_channels_first(grid: Tensor) -> Tensor:
    return grid.movedim(-1, 1)


NETWORKS = {
    "ResNet-50": Network(torchvision.models.resnet50, "layer4"),
    "VGG16": Network(torchvision.models.vgg16, "features.29"),
    "MobileNetV2": Network(torchvision.models.mobilenet_v2, "features.18"),
    "EfficientNet-Lite0": Network(build_lite0, "layer4", last="head.0"),
}


TRANSFORMERS = {
    "ViT-B/16": Network(torchvision.models.vit_b_16, "encoder.layers.encoder_layer_11.ln_1", to_grid=drop_class_token),
    "Swin-T": Network(torchvision.models.swin_t, "features.7", to_grid=to_channels_first),
}


# The forward pass is so short that the fixed cost of a call is visible.
SMALL_NETWORKS = {"ResNet-18": Network(torchvision.models.resnet18, "layer4")}


def build_model(network: str, device: str) -> nn.Module:
    """Build the network in evaluation mode. Its parameters require gradients, which is the default."""
    torch.manual_seed(SEED)
    model = (NETWORKS | TRANSFORMERS | SMALL_NETWORKS)[network].build().eval().to(device)
    head = next(module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear))
    nn.init.normal_(head.weight, std=0.02)  # torchvision's ViT head is zero, so it passes no gradient.
    return model


def make_case(
    model: nn.Module,
    layer: str,
    batch: int,
    classes: int,
    device: str,
    *,
    to_grid: Callable[[Tensor], Tensor] | None = None,
) -> Case:
    images = torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(SEED)).to(device)
    sampled = [random.Random(SEED + image).sample(range(CLASSES), classes) for image in range(batch)]
    return Case(model, layer, images, sampled, to_grid)
