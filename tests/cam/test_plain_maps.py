"""Check that the maps of one class per image, which a function of its own computes, equal the maps of several classes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.cam.methods.base import GradientMethod
from tests.helpers import FunctionModule

METHODS = [name for name, method in gradcam.METHODS.items() if isinstance(method, GradientMethod)]


def build_channels_last() -> nn.Module:
    to_last, pool = FunctionModule(lambda _, x: x.permute(0, 2, 3, 1)), FunctionModule(lambda _, x: x.mean((1, 2)))
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), to_last, nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), pool, nn.Linear(8, 5)
    )


def build_tokens() -> nn.Module:
    to_tokens, pool = FunctionModule(lambda _, x: x.flatten(2).mT), FunctionModule(lambda _, x: x.mean(1))
    return nn.Sequential(nn.Conv2d(3, 8, 16, 16), to_tokens, nn.Linear(8, 8), nn.GELU(), pool, nn.Linear(8, 5))


def build_volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 8, 4, 4), nn.SiLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "convolution": (lambda: torchvision.models.resnet18(weights=None, num_classes=5), "layer4", (3, 128, 96)),
    "early": (lambda: torchvision.models.mobilenet_v3_small(weights=None, num_classes=5), "features.1", (3, 64, 96)),
    "tokens": (build_tokens, "3", (3, 64, 64)),
    "channels last": (build_channels_last, "3", (3, 32, 48)),
    "volume": (build_volume, "1", (3, 8, 16, 16)),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_maps_of_one_class_equal_the_same_maps_among_several(name: str, images: int, method: str) -> None:
    torch.manual_seed(0)
    build, layer, size = CASES[name]
    model, pictures, classes = build().eval(), torch.rand(images, *size), [[3], [0], [2]][:images]
    settings: Any = {"method": method, "evidence": choose_evidence(method)}
    several = gradcam.explain(model, pictures, layer, target=[[*row, 1] for row in classes], **settings)
    one = gradcam.explain(model, pictures, layer, target=classes, **settings)
    assert one.maps.flatten(1).any(1).all() or method == "eigengradcam"  # The sign of a component may hide it.
    torch.testing.assert_close(one.maps, several.maps[:, :1], rtol=1e-4, atol=1e-6 * one.maps.abs().max().item())
    torch.testing.assert_close(one.heatmaps, several.heatmaps[:, :1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.scores, several.scores[:, :1], rtol=1e-6, atol=0)
    assert (one.layout, one.layer) == (several.layout, layer)


def choose_evidence(method: str) -> str:
    return "signed" if gradcam.METHODS[method].is_signed else "positive"


@pytest.mark.parametrize("change", [lambda x: x, torch.square])
def test_a_cast_to_float16_is_found_after_the_copy_of_the_layer(change: Callable[[Tensor], Tensor]) -> None:
    # The gradients are about 1e-9. They underflow in float16, unless the scores are scaled before the backward pass.
    head = nn.Linear(4, 2).half()
    cast = FunctionModule(lambda _, x: change(x.half()).float().mean((2, 3)).half())
    shrink = FunctionModule(lambda _, x: x.float() * 1e-6)
    precise = FunctionModule(lambda _, x: (change(x).mean((2, 3)) @ head.weight.float().T) * 1e-6)
    convolution, image = nn.Conv2d(3, 4, 3), torch.rand(1, 3, 16, 16)
    models = (nn.Sequential(convolution, cast, head, shrink), nn.Sequential(convolution, precise))
    maps, expected = (gradcam.explain(x.eval(), image, "0", target=[[1]], evidence="signed").maps for x in models)
    torch.testing.assert_close(maps, expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


def test_a_map_of_a_single_layer_has_the_layers_name() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    joined = gradcam.explain(model, torch.rand(1, 3, 64, 64), layers=["layer4"], join="sum", target=3)
    assert joined.layer == "layer4"


class TokensBeforeNorm(nn.Module):
    """A layer before a layer norm without a mean: its activations times their gradients add up to zero in each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8, bias=False, eps=0), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(images).movedim(1, -1)).mean((1, 2)))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("tolerance", [None, 2.0**-8])
def test_maps_of_rounding_errors_are_blank(
    images: int, tolerance: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if tolerance is not None:  # GPUs may compute products in TensorFloat-32.
        monkeypatch.setattr("gradcam.cam.forward.RecordedPass.tolerance", tolerance)
    with pytest.warns(gradcam.GradcamWarning, match="rounding errors"):
        explanation = gradcam.explain(
            TokensBeforeNorm().eval(), torch.rand(images, 3, 32, 32), "layer", method="hirescam", target=3
        )
    assert not explanation.maps.any()


@pytest.mark.parametrize("images", [1, 3])
def test_maps_without_a_gradient_are_an_error(images: int) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    nn.init.zeros_(model.fc.weight)
    with pytest.raises(gradcam.errors.BlindLayerError, match="exactly zero"):
        gradcam.explain(model, torch.rand(images, 3, 64, 64), "layer4", target=3)


@pytest.mark.parametrize("classes", [[3], [0, 3, 0]])
def test_a_tiny_gradient_is_reported(classes: list[int]) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    nn.init.constant_(model.fc.weight[3], 1e-36)
    with pytest.warns(gradcam.GradcamWarning, match="too small for float32"):
        gradcam.explain(model, torch.rand(len(classes), 3, 64, 64), "layer4", target=classes)


def test_one_image_of_a_batch_without_a_gradient_is_blank_with_a_warning() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    nn.init.zeros_(model.fc.weight[3])
    with pytest.warns(gradcam.GradcamWarning, match="exactly zero for some of the images"):
        explanation = gradcam.explain(model, torch.rand(3, 3, 64, 64), "layer4", target=[0, 3, 1], evidence="signed")
    assert explanation.maps.flatten(1).any(1).tolist() == [True, False, True]


def test_a_value_that_is_not_finite_in_one_image_of_a_batch_is_an_error() -> None:
    model, images = torchvision.models.resnet18(weights=None).eval(), torch.rand(3, 3, 64, 64)
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(gradcam.errors.ModelError, match="The activations of layer 'layer4' are NaN"):
        gradcam.explain(model, images, "layer4", target=3)


def test_a_score_of_another_image_is_noticed_in_float32() -> None:
    torch.manual_seed(0)
    mix = FunctionModule(lambda _, y: y * torch.cat([y[1:], y[:1] * 0 + 1]))  # The last image depends on no other.
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3), mix)
    model, images = model.eval(), torch.rand(3, 3, 16, 16)
    with pytest.warns(gradcam.GradcamWarning, match="depend on one another"):
        together = gradcam.explain(model, images, "0", target=[1, 2, 0], evidence="signed").maps
    start = model[0](images).detach().requires_grad_()
    for image, index in enumerate([1, 2, 0]):
        (gradient,) = torch.autograd.grad(model[1:](start)[image, index], start)
        expected = torch.einsum("c,chw->hw", gradient[image].mean((1, 2)), start[image].detach())
        torch.testing.assert_close(together[image, 0], expected, rtol=1e-4, atol=1e-6)


def test_weights_sampled_in_inference_mode_can_be_used_later() -> None:
    model, images = (
        nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval(),
        torch.rand(13, 3, 9, 9),
    )
    with torch.inference_mode():
        first = gradcam.explain(model, images, "0", target=1, evidence="signed").maps
    torch.testing.assert_close(gradcam.explain(model, images, "0", target=1, evidence="signed").maps, first)
