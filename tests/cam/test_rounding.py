"""Check that maps whose terms all cancel are blank, with a warning, and that small correct maps stay."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.cam.rounding import denoise_method
from gradcam.targets import ClassTarget
from tests.helpers import FunctionModule

IMAGES = torch.rand(3, 3, 24, 32, generator=torch.Generator().manual_seed(0))
LAYER = "3"
ALL = [[0, 1, 2, 3]] * 3
CHANNELS = 24


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of each cell without epsilon, so that scaling all channels changes nothing."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.movedim(1, -1)).movedim(-1, 1)


def network(behind: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    front = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, CHANNELS, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *front, behind, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 4)
    ).eval()


def channel_norm(seed: int = 0) -> nn.Sequential:
    return network(ChannelNorm(CHANNELS, eps=0.0), seed)


def instance_norm(seed: int = 0) -> nn.Sequential:
    return network(nn.InstanceNorm2d(CHANNELS), seed)


CANCELLING = [("hirescam", channel_norm), ("gradcam", instance_norm), ("finercam", instance_norm)]


@pytest.mark.parametrize(("method", "make"), CANCELLING)
@pytest.mark.parametrize("evidence", ["positive", "negative", "signed"])
@pytest.mark.parametrize("augmentation", ["none", "flip"])
def test_a_map_whose_terms_cancel_is_blank_with_a_warning(
    method: str, make: Callable[[], nn.Sequential], evidence: str, augmentation: str
) -> None:
    options: dict[str, Any] = {"method": method, "target": ALL, "evidence": evidence, "augmentation": augmentation}
    with pytest.warns(gradcam.GradcamWarning, match=f"of 12 heatmaps of {method} at layer '3'") as message:
        explanation = gradcam.explain(make(), IMAGES, LAYER, **options)
    assert not explanation.maps.any()
    assert not explanation.heatmaps.any()
    assert len(message) == 1
    assert message[0].filename == __file__
    assert len(str(message[0].message)) < 250
    assert gradcam.explain(make(), IMAGES, LAYER, method="layercam", target=ALL).maps.any()  # its terms do not cancel


@pytest.mark.parametrize(("method", "make"), CANCELLING)
@pytest.mark.filterwarnings("ignore::gradcam.GradcamWarning")
def test_no_rounding_slips_through(method: str, make: Callable[[int], nn.Sequential]) -> None:
    for seed in range(15):
        maps = gradcam.explain(make(seed), IMAGES, LAYER, method=method, target=ALL, evidence="signed").maps
        assert not maps.any()


def test_terms_that_cancel_by_hand() -> None:
    """Check that 3 x 0.1 - 0.3, which is 1e-8 in float32, becomes 0, for each image and class separately."""
    activations = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.2, 0.4]])[..., None, None]
    gradients = torch.tensor([[1.0, 1.0, -1.0], [0.0, 1.0, 0.0]])[None, :, :, None, None].repeat(2, 1, 1, 1, 1)
    plain = METHODS["hirescam"].compute(activations, gradients)
    assert plain[0, 0].item() != 0 or plain[1, 0].item() != 0
    (settled,) = denoise_method(METHODS["hirescam"].compute, 1e-5, activations, gradients)
    assert settled.maps.flatten().tolist() == [0, *plain.flatten().tolist()[1:]]
    rounding_mask = 0 if settled.rounding_mask is None else settled.rounding_mask.sum()
    assert rounding_mask == int(plain[0, 0].item() != 0)


def test_a_genuine_class_beside_one_that_cancels() -> None:
    def forward(module: Any, images: Tensor) -> Tensor:
        features = module.net(images)
        return torch.stack([module.norm(features)[:, :, :3].square().sum((1, 2, 3)), features.sum((1, 2, 3))], 1)

    model = FunctionModule(forward, net=instance_norm()[:4], norm=nn.InstanceNorm2d(CHANNELS)).eval()
    with pytest.warns(gradcam.GradcamWarning, match="of 6 heatmaps of gradcam at layer 'net'"):
        explanation = gradcam.explain(model, IMAGES, "net", target=[[0, 1]] * 3, evidence="signed")
    assert not explanation.maps[:, 0].any()
    torch.testing.assert_close(explanation.maps[:, 1], instance_norm()[:4](IMAGES).sum(1))


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**40])
def test_the_scale_of_a_map_does_not_matter(factor: float) -> None:
    def scaled_network(factor: float) -> nn.Module:
        return FunctionModule(lambda module, images: module.net(images) * factor, net=network(nn.Identity()))

    for method in ("gradcam", "hirescam", "layercam", "xgradcam", "eigengradcam", "reciprocam"):
        scaled, plain = (
            gradcam.explain(scaled_network(item), IMAGES, "net.3", method=method, target=ALL, evidence=evidence(method))
            for item in (factor, 1.0)
        )
        assert plain.maps.flatten(2).any(2).sum() >= 4
        torch.testing.assert_close(scaled.heatmaps, plain.heatmaps, rtol=1e-5, atol=1e-6)


def evidence(method: str) -> str:
    return "signed" if METHODS[method].is_signed else "positive"


def test_the_map_of_a_tiny_probability_is_not_blank() -> None:
    model = network(nn.Identity())
    with torch.no_grad():
        model[-1].bias[2] = -20.0
    target = ClassTarget(2, score="probability")
    explanation = gradcam.explain(model, IMAGES, LAYER, target=target, evidence="signed")
    expected = gradcam.explain(copy.deepcopy(model).double(), IMAGES.double(), LAYER, target=target, evidence="signed")
    assert explanation.scores.max() < 1e-8
    assert explanation.maps.abs().max() < 1e-9
    torch.testing.assert_close(explanation.heatmaps, expected.heatmaps, rtol=1e-3, atol=1e-4)


def test_a_map_without_positive_evidence_is_blank_without_a_warning() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    with torch.no_grad():
        model[4].weight.fill_(-1.0)
    assert not gradcam.explain(model, IMAGES, "1").maps.any()  # no warning either: warnings are errors here


def test_rounding_of_one_sign_beside_genuine_evidence_is_blank() -> None:
    """Check a map with negative evidence in one cell; in all others the terms cancel up to rounding of either sign."""
    activations = torch.rand(1, 1, 1, 50, generator=torch.Generator().manual_seed(0)).repeat(1, 3, 1, 1)
    activations[0, 1] *= 3.1
    activations[0, 2] *= 4.1
    gradients = torch.tensor([1.0, 1.0, -1.0])[None, None, :, None, None].repeat(1, 1, 1, 1, 50)
    gradients[..., 0] = -1.0
    compute = METHODS["hirescam"].compute
    assert (compute(activations, gradients)[..., 1:] > 0).any()
    (settled,) = denoise_method(compute, 3e-5, activations, gradients)
    assert settled.maps.max() == 0
    assert settled.maps[0, 0, 0, 0] < -1
    assert settled.rounding_mask.tolist() == [[[True, False]]]


def sum_shares(module: Any, images: Tensor) -> Tensor:
    """Return a score that is always 1 up to rounding, beside one that varies."""
    # A sum of more values has a larger rounding error.
    features = nn.functional.adaptive_avg_pool2d(module.net[:4](images), 4).flatten(1)
    return torch.stack([(features * 3).softmax(1).sum(1), features.sum(1)], 1)


@pytest.mark.parametrize("name", ["ablationcam", "reciprocam", "rise"])
def test_scores_that_differ_only_by_rounding_give_a_blank_map(name: str) -> None:
    method = METHODS[name].using(masks=40) if name == "rise" else METHODS[name]
    model = FunctionModule(sum_shares, net=network(nn.Identity())).eval()
    assert 0 < (model(IMAGES)[:, 0] - 1).abs().max() < 2e-6
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        explanation = gradcam.explain(model, IMAGES, "net.3", method=method, target=[[0, 1]] * 3, evidence="signed")
    assert not explanation.maps[:, 0].any()
    assert explanation.maps[:, 1].flatten(1).any(1).all()
    assert [warning.category for warning in message] == [gradcam.GradcamWarning]


def test_half_precision_has_rounding_of_its_own() -> None:
    with pytest.warns(gradcam.GradcamWarning, match="12 heatmaps"):
        explanation = gradcam.explain(
            channel_norm().bfloat16(), IMAGES.bfloat16(), LAYER, method="hirescam", target=ALL
        )
    assert not explanation.maps.any()
    model = network(nn.Identity())
    plain = gradcam.explain(model, IMAGES, LAYER, target=ALL).heatmaps
    half = gradcam.explain(model.bfloat16(), IMAGES.bfloat16(), LAYER, target=ALL).heatmaps
    torch.testing.assert_close(half, plain, rtol=0, atol=0.1)


def test_only_maps_that_may_be_rounding_are_tested() -> None:
    calls = []

    def gradcam_counted(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return METHODS["gradcam"].compute(activations, gradients)

    activations, gradients = torch.rand(2, 5, 4, 6), torch.randn(2, 3, 5, 4, 6)
    for factor in (1.0, 1e-12, 1e12):
        calls.clear()
        denoise_method(gradcam_counted, 1e-5, activations, factor * gradients)
        assert len(calls) == 1
    gradients -= gradients.mean((3, 4), keepdim=True)  # now the means are only rounding error
    (settled,) = denoise_method(gradcam_counted, 1e-5, activations, gradients)
    assert len(calls) > 2
    assert settled.rounding_mask.any(2).all()
    assert not settled.maps.any()


def test_many_classes_are_changed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = gradcam.explain(network(nn.Identity()), IMAGES, LAYER, target=ALL)
    monkeypatch.setattr("gradcam.cam.rounding.MAX_DERIVATIVE_BYTES", 1)
    chunked = gradcam.explain(network(nn.Identity()), IMAGES, LAYER, target=ALL)
    torch.testing.assert_close(chunked.maps, explanation.maps, rtol=1e-5, atol=1e-9)


def test_the_sign_of_a_component_does_not_depend_on_rounding() -> None:
    """Check that the component's peak is positive where the sum of channels, which decides the sign, cancels."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        place = torch.rand(1, 1, 4, 5, generator=generator)
        activations = torch.cat([place, place * 3.1, place * 4.1], 1)
        gradients = torch.tensor([1.0, 1.0, -1.0])[None, None, :, None, None].repeat(1, 1, 1, 4, 5)
        component = METHODS["eigengradcam"].compute(activations, gradients)
        torch.testing.assert_close(component / component.max(), place / place.max())


@pytest.mark.filterwarnings("ignore:.*have both signs")
def test_a_channel_whose_sum_is_rounding_has_no_weight_in_xgradcam() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()
    assert not gradcam.explain(model, IMAGES, "1", method="xgradcam", target=[[0, 1]] * 3, evidence="signed").maps.any()


def test_a_channel_that_is_constant_up_to_rounding_stands_out_nowhere() -> None:
    channel = torch.full((1, 2, 5, 5), 0.7)
    channel[0, 0, 2, 3] += 1e-7
    channel[0, 1] = 0.0
    channel[0, 1, 1, 1] = 1.0
    mask = METHODS["fem"].compute(channel)
    assert mask.nonzero().tolist() == [[0, 1, 1]]


def test_a_channel_that_is_constant_up_to_rounding_has_no_mask() -> None:
    model = FunctionModule(lambda module, images: module.layer(images).mean((2, 3))[:, :1], layer=nn.Identity())
    images = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    images[0, 1] = 0.7
    expected = gradcam.explain(model, images, "layer", method="scorecam", target=0).maps
    images[0, 1, 2, 3] += 1e-7
    torch.testing.assert_close(gradcam.explain(model, images, "layer", method="scorecam", target=0).maps, expected)
