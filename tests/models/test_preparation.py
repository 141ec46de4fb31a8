"""Test half precision against float32 on every photograph, autocast, and the tensors that stay float32."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradcam
from gradcam.models.device import prepare_model
from gradcam.models.providers import DEFAULT_MODEL, load_parts
from tests.conftest import ASSETS
from tests.helpers import assert_same, traces

PHOTOGRAPHS = sorted(path for path in ASSETS.iterdir() if path.suffix in (".jpg", ".png", ".webp"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_TIE_DIFFERENCE = 0.01  # Two classes whose probabilities differ by less than this may change places.
# The largest accepted error of a probability. bfloat16 rounds a logit between 8 and 16 by up to 0.03, and so does every
# layer before it: 0.0301 to 0.0307 were measured with the kernels of five instruction sets.
MAX_PROBABILITY_ERROR = {"bf16": 0.04, "fp16": 0.005}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def half(precision: str) -> gradcam.Classifier:
    return gradcam.load_classifier(device="cpu", precision=precision)


@pytest.fixture(scope="module")
def photographs(precision: str) -> list[Path]:
    return PHOTOGRAPHS if precision == "bf16" else PHOTOGRAPHS[::4]  # Few CPUs have instructions for fp16.


@pytest.fixture(scope="module")
def expected(classifier: gradcam.Classifier, photographs: list[Path]) -> gradcam.ImageExplanation:
    return classifier.explain(photographs)


@pytest.fixture(scope="module")
def explanation(
    half: gradcam.Classifier, expected: gradcam.ImageExplanation, photographs: list[Path]
) -> gradcam.ImageExplanation:
    return half.explain(photographs, target=expected.classes)


def assert_correlated(ours: torch.Tensor, full: torch.Tensor, minimum: float = 0.99) -> None:
    """Check the correlation of the maps, image by image."""
    assert ours.dtype == torch.float32
    correlations = [
        np.corrcoef(cam.flatten(), expected.flatten())[0, 1] for cam, expected in zip(ours, full, strict=True)
    ]
    assert min(correlations) > minimum, correlations


def test_there_are_photographs() -> None:
    assert len(PHOTOGRAPHS) > 10


@pytest.mark.slow
def test_maps_of_every_photograph_agree_with_float32(
    explanation: gradcam.ImageExplanation, expected: gradcam.ImageExplanation, precision: str
) -> None:
    assert explanation.output.dtype == DTYPES[precision]
    # CPUs round bf16 products differently: on an AMD EPYC, the smallest correlation is 0.9979.
    assert_correlated(explanation.maps, expected.maps, minimum=0.997)
    assert_correlated(explanation.heatmaps, expected.heatmaps, minimum=0.997)
    torch.testing.assert_close(explanation.heatmaps, expected.heatmaps, rtol=0, atol=0.05)


def test_every_photograph_keeps_its_class_and_its_probabilities(
    explanation: gradcam.ImageExplanation, expected: gradcam.ImageExplanation, precision: str
) -> None:
    ours, full = explanation.probabilities(), expected.probabilities()
    assert explanation.scores.dtype == ours.dtype == torch.float32
    torch.testing.assert_close(ours, explanation.output.double().softmax(1).float(), rtol=1e-5, atol=1e-7)
    assert (ours - full).abs().max() < MAX_PROBABILITY_ERROR[precision]
    first, second = full.topk(2).values.T
    same_class = ours.argmax(1) == full.argmax(1)
    assert same_class[first - second > MAX_TIE_DIFFERENCE].all()
    assert (first - second > MAX_TIE_DIFFERENCE).sum() >= len(full) - 1


def test_maps_at_other_layers_agree_with_float32(
    half: gradcam.Classifier, classifier: gradcam.Classifier, precision: str
) -> None:
    minimums = {"layer4.4.project.1": 0.99, "head.0": 0.99, "head.0.1": 0.99}
    # At an earlier layer more roundings affect the gradient, and its mean over many cells cancels more.
    minimums["layer3"] = {"bf16": 0.95, "fp16": 0.99}[precision]
    options = {"layers": list(minimums), "methods": ["gradcam"], "target": [105, 285]}
    pictures = [ASSETS / "koala.webp", ASSETS / "cat_and_espresso.jpg"]
    ours, full = half.compare(pictures, **options), classifier.compare(pictures, **options)
    for layer, method in full:
        assert_correlated(ours[layer, method].maps, full[layer, method].maps, minimums[layer])


def test_float32_stays_exact_and_every_tensor_its_value(classifier: gradcam.Classifier) -> None:
    plain = load_parts(DEFAULT_MODEL, None).model.eval()
    assert_same(dict(plain.state_dict()), dict(classifier.model.state_dict()))
    images = torch.randn(2, 3, 224, 224)
    ours, theirs = gradcam.explain(classifier.model, images, "layer4"), gradcam.explain(plain, images, "layer4")
    torch.testing.assert_close(ours.output, theirs.output, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.heatmaps, theirs.heatmaps, rtol=0, atol=1e-4)


def small() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.LayerNorm(6), nn.Flatten())
    nn.init.uniform_(model[1].running_var, 0.1, 2)
    nn.init.uniform_(model[1].weight, 0.1, 2)
    model[2].register_buffer("scale", torch.rand(3))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_prepared(dtype: torch.dtype) -> None:
    model = small().train()
    before = copy.deepcopy(model.state_dict())
    prepared = prepare_model(model, CPU, dtype)
    assert prepared is model
    assert not any(module.training for module in prepared.modules())
    assert not any(parameter.requires_grad for parameter in prepared.parameters())
    assert prepared[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert list(prepared.state_dict()) == list(before)
    for name, tensor in prepared.state_dict().items():
        is_rounded = tensor.is_floating_point() and not name.startswith("1.")  # batch norms stay float32
        assert tensor.dtype == (dtype if is_rounded else before[name].dtype), name
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name


@pytest.mark.parametrize(
    ("device", "dtype", "is_channels_last"),
    [
        ("cpu", torch.float32, True),
        ("cpu", torch.bfloat16, True),
        ("meta", torch.float32, False),  # stands in for a GPU
        ("meta", torch.bfloat16, True),
        ("meta", torch.float16, True),
    ],
)
def test_weights_are_channels_last_for_half_precision(device: str, dtype: torch.dtype, is_channels_last: bool) -> None:
    model = prepare_model(small(), torch.device(device), dtype)
    assert model[0].weight.device.type == device
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) == is_channels_last
    assert model[0].weight.is_contiguous() != is_channels_last


def test_a_callers_model_is_never_prepared(classifier: gradcam.Classifier) -> None:
    model = load_parts(DEFAULT_MODEL, None).model.train()
    before = traces(model)
    gradcam.explain(model, classifier.batch([gradcam.read_image(ASSETS / "koala.webp")]), "layer4")
    assert_same(before, traces(model))


class TestAutocast:
    @pytest.fixture(scope="class")
    def pictures(self) -> list[Path]:
        return [ASSETS / name for name in ("koala.webp", "rocket.jpg", "chelsea.jpg")]

    def test_a_callers_model(self, classifier: gradcam.Classifier, pictures: list[Path]) -> None:
        model = load_parts(DEFAULT_MODEL, None).model.eval()
        images = classifier.batch([gradcam.read_image(path) for path in pictures])
        plain = gradcam.explain(model, images, "layer4")
        before = traces(model)
        with torch.autocast("cpu", torch.bfloat16):
            ours = gradcam.explain(model, images, "layer4", target=plain.classes)
            assert torch.is_autocast_enabled("cpu")
        assert_same(before, traces(model))
        assert (ours.output.dtype, plain.output.dtype) == (torch.bfloat16, torch.float32)
        assert ours.scores.dtype == torch.float32
        assert_correlated(ours.maps, plain.maps)
        assert_correlated(ours.heatmaps, plain.heatmaps)

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_a_classifier(self, classifier: gradcam.Classifier, pictures: list[Path], precision: str) -> None:
        ours = classifier if precision == "fp32" else gradcam.load_classifier(device="cpu", precision=precision)
        plain = classifier.explain(pictures)
        with torch.autocast("cpu", torch.bfloat16):
            cast = ours.explain(pictures, target=plain.classes)
            probabilities = cast.probabilities()
        assert cast.output.dtype == torch.bfloat16
        assert_correlated(cast.maps, plain.maps)
        assert probabilities.dtype == torch.float32
        assert (probabilities - plain.probabilities()).abs().max() < 0.03


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_gpu_agrees_in_every_precision(classifier: gradcam.Classifier, name: str) -> None:
    full = classifier.explain(PHOTOGRAPHS)
    ours = gradcam.load_classifier(device="cuda", precision=name).explain(PHOTOGRAPHS, target=full.classes)
    assert_correlated(ours.maps.cpu(), full.maps)
