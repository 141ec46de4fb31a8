"""Check the default layer and the map of torchvision's classification models with random weights."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from tests import oracles

pytestmark = pytest.mark.slow

ALL_NAMES = torchvision.models.list_models(module=torchvision.models)
# Larger models are wider or deeper copies of smaller ones, except for the three named below.
MAX_PARAMETERS = 62_000_000
NAMES = [
    name
    for name in ALL_NAMES
    if name in ("vgg11", "vit_b_16", "wide_resnet50_2")
    or torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"] <= MAX_PARAMETERS  # type: ignore[attr-defined]
]

# By the beginning of the model's name: the default layer, and the operation that brings its output to channels first.
LAYERS: dict[str, str] = {
    **dict.fromkeys(("alexnet", "convnext", "densenet", "efficientnet", "mobilenet", "vgg"), "features"),
    "googlenet": "inception5b", "inception_v3": "Mixed_7c", "maxvit": "blocks.3", "mnasnet": "layers",
    "regnet": "trunk_output", "resne": "layer4", "wide_resnet": "layer4", "shufflenet": "conv5",
    "squeezenet": "classifier.2",  # after the last convolution, which has one channel per class
    "swin": "permute",  # brings the output of the last norm to channels first
    "vit": "encoder.layers.encoder_layer_11.ln_1",
}  # fmt: skip
# Sizes other than 64: where 64 leaves a grid of one cell, does not fit the windows or patches, or takes too long.
SIZES = {"alexnet": 96, "inception_v3": 128, "maxvit_t": 224}
MAX_FLOAT64_PARAMETERS = 100_000_000  # the slow reference of larger models is in float32

NOISE = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


def fill(tensor: Tensor, *_: object, **__: object) -> Tensor:
    """Return random numbers of a usual scale by repetition, because sampling five billion parameters takes too long."""
    fan_in = math.prod(tensor.shape[1:]) if tensor.ndim > 1 else 2500
    with torch.no_grad():
        flat = tensor.view(-1)
        full = len(flat) // len(NOISE) * len(NOISE)
        flat[:full].view(-1, len(NOISE)).copy_(NOISE)
        flat[full:].copy_(NOISE[: len(flat) - full])
        return flat.mul_(fan_in**-0.5).view_as(tensor)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], nn.Module]:
    for name in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_"):
        monkeypatch.setattr(nn.init, name, fill)

    def build(name: str) -> nn.Module:
        options: dict[str, Any] = {"num_classes": 7}
        if name.startswith("vit"):
            options["image_size"] = size_for(name)
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = True
        model = torchvision.models.get_model(name, weights=None, **options)
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():  # heads and class tokens are initialised to zero
                fill(parameter)
        return model

    return build


def size_for(name: str) -> int:
    return SIZES.get(name, 64)


def slow_map(model: nn.Module, images: Tensor, layer: str, target: int) -> Tensor:
    """Return Grad-CAM without its ReLU, by plain autograd on a copy of the model."""
    if sum(parameter.numel() for parameter in model.parameters()) < MAX_FLOAT64_PARAMETERS:
        model, images = copy.deepcopy(model).double(), images.double()
    pair = oracles.reference(model, images, [layer], lambda output: output[:, target].sum())[layer]
    if pair[0].ndim == 3:  # a class token, and then the patches row by row
        pair = [item[:, 1:].mT.unflatten(2, (math.isqrt(item.shape[1] - 1), -1)) for item in pair]
    values, gradients = pair
    return torch.einsum("nc,nchw->nhw", gradients.mean((2, 3)), values)[:, None]


@pytest.mark.parametrize("name", NAMES)
def test_the_map_at_the_automatic_layer(name: str, build: Callable[[str], nn.Module]) -> None:
    model = build(name).eval()
    images = torch.randn(2, 3, size_for(name), size_for(name))
    explanation = gradcam.explain(model, images, target=3, evidence="signed")
    family = max((layer for layer in LAYERS if name.startswith(layer)), key=len)
    assert explanation.layer == LAYERS[family]
    expected = slow_map(model, images, explanation.layer, 3)
    assert explanation.maps.isfinite().all()
    for image, single in zip(explanation.maps[:, 0], expected[:, 0]):
        assert image.numel() > 1
        assert image.amax() - image.amin() > 1e-3 * image.abs().amax()
        torch.testing.assert_close(image.double(), single.double(), rtol=1e-3, atol=1e-3 * single.abs().max().item())


def test_every_family_is_here() -> None:
    families = {min((item for item in NAMES if name.startswith(item[:4])), default=None, key=len) for name in ALL_NAMES}
    assert None not in families
    assert [name for name in NAMES if not name.startswith(tuple(LAYERS))] == []
