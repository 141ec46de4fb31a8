"""Test that no float64 is used on Apple's GPUs: a simulated device raises an error for such a tensor."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import gradcam
from gradcam.attributions import ATTRIBUTIONS
from gradcam.cam.methods.base import AttentionMethod
from gradcam.cam.methods.table import METHODS
from gradcam.evaluation import METRICS, check, evaluate, recommend
from gradcam.evaluation.study.results import Results
from gradcam.targets import Box, Like, Mask, Text
from tests import colour_model
from tests.adapters.test_embedding import TEXT, VISION, towers
from tests.apple import AppleGpu, pretend_apple_gpu
from tests.colours import COLOURS, ColourNet, classifier_of, picture
from tests.detectors import make_detector, make_pictures
from tests.helpers import TINY, tiny_model
from tests.targets.test_text import SENTENCES, word_tokenizer


@pytest.fixture
def gpu() -> Iterator[AppleGpu]:
    """Provide the simulated GPU, and check that it raised no error, not even a caught one."""
    with pretend_apple_gpu() as gpu:
        yield gpu
    assert gpu.errors == []


def load_colours(device: str = "mps") -> gradcam.Classifier:
    settings: Any = {"mean": (0, 0, 0), "std": (1, 1, 1), "size": colour_model.SIZE, "crop": 1.0, "layer": "relu"}
    return gradcam.load_classifier(colour_model.make().to(device), labels=list(colour_model.LABELS), **settings)


class TestStandIn:
    def test_tensors_are_where_they_were_moved(self, gpu: AppleGpu) -> None:
        moved = TINY.to("mps")
        tensors = [moved + 1, moved[0], torch.zeros(2, device="mps"), torch.zeros_like(moved), TINY.to(moved)]
        assert {tensor.device.type for tensor in tensors} == {"mps"}
        assert {tensor.device.type for tensor in (TINY, moved.cpu(), (moved + 1).to("cpu"))} == {"cpu"}
        assert moved.cpu().double().dtype == torch.float64

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda tensor: tensor.double(),
            lambda tensor: tensor.to(torch.float64),
            lambda tensor: tensor.to("cpu", torch.float64),  # PyTorch converts the dtype before it copies.
            lambda tensor: tensor.sum(dtype=torch.float64),
            lambda tensor: torch.ones(1, dtype=torch.float64).to(tensor.device),
            lambda tensor: torch.ones(1, dtype=torch.float64, device=tensor.device),
            lambda tensor: tensor.numpy(),
        ],
    )
    def test_what_the_device_cannot_do(self, wrong: Any) -> None:
        with pretend_apple_gpu() as gpu:
            tensor = TINY.to("mps")
            with pytest.raises(TypeError):
                wrong(tensor)
        assert len(gpu.errors) == 1

    def test_gradients_are_where_their_tensors_are(self, gpu: AppleGpu) -> None:
        model = tiny_model().eval().to("mps")
        images = TINY.to("mps").requires_grad_()
        gradients = torch.autograd.grad(model(images).sum(), [images, *model.parameters()])
        assert {tensor.device.type for tensor in gradients} == {"mps"}


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.place != "text"])
def test_every_method(gpu: AppleGpu, method: str) -> None:
    used: Any = METHODS[method].using(masks=40) if method in ("rise", "drise") else method
    if not isinstance(METHODS[method], AttentionMethod):
        model, images = tiny_model().eval(), TINY
    else:
        model = torchvision.models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=8).eval()
        nn.init.normal_(model.heads.head.weight)
        images = torch.randn(2, 3, 32, 32)
    expected = gradcam.explain(model, images, method=used, target=1)
    explanation = gradcam.explain(model.to("mps"), images.to("mps"), method=used, target=1)
    assert explanation.maps.device.type == "mps"
    torch.testing.assert_close(explanation.maps.cpu(), expected.maps)


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_every_attribution(gpu: AppleGpu, method: str) -> None:
    function, model = ATTRIBUTIONS[method].function, tiny_model().eval()
    expected = function(model, TINY, target=1)
    actual = function(model.to("mps"), TINY.to("mps"), target=1)
    torch.testing.assert_close(actual.values.cpu(), expected.values)


def test_a_box_and_a_mask(gpu: AppleGpu) -> None:
    detector, images = make_detector("fcos").float(), [image.float() for image in make_pictures()[:1]]
    segmenter, pixels = nn.Sequential(tiny_model()[:5], nn.Conv2d(6, 3, 1)).eval(), TINY[:1]
    for model, inputs, target in ((detector, images, Box(0)), (segmenter, pixels, Mask(1, (0, 0, 4, 4)))):
        expected = gradcam.explain(model, inputs, target=target)
        moved: Any = [image.to("mps") for image in inputs] if isinstance(inputs, list) else inputs.to("mps")
        explanation = gradcam.explain(model.to("mps"), moved, target=target)
        torch.testing.assert_close(explanation.maps.cpu(), expected.maps)


def test_gradients_at_all_layers(gpu: AppleGpu) -> None:
    model = tiny_model().eval()
    expected = gradcam.inspection.gradients(model, TINY)
    actual = gradcam.inspection.gradients(model.to("mps"), TINY.to("mps"))
    assert actual.reference == pytest.approx(expected.reference)


def test_check(gpu: AppleGpu, tmp_path: Path) -> None:
    path = colour_model.paint(tmp_path / "green.png", 1, seed=1)
    classifier = load_colours()
    assert classifier.device.type == "mps"
    actual, expected = check(classifier, path), check(load_colours("cpu"), path)
    outcomes = [[(test.name, test.outcome) for test in verdict.tests] for verdict in (actual, expected)]
    assert outcomes[0] == outcomes[1]


def test_recommend(gpu: AppleGpu) -> None:
    images = {colour: picture(colour) for colour in COLOURS}
    options: Any = {"methods": ["gradcam", "eigencam"], "mosaics": 4}
    recommendation = recommend(classifier_of(ColourNet().to("mps")), images, **options)
    assert recommendation.to_dict() == recommend(classifier_of(ColourNet()), images, **options).to_dict()


@pytest.mark.slow
def test_every_metric(gpu: AppleGpu, tmp_path: Path) -> None:
    paths = [colour_model.paint(tmp_path / f"images/{colour}.png", colour) for colour in range(4)]
    boxes = [f"{path.name},10,8,28,26" for path in paths]
    (tmp_path / "boxes.csv").write_text("\n".join(["image,left,top,right,bottom", *boxes]))

    def measure(classifier: gradcam.Classifier) -> Results:
        options: Any = {"methods": ["gradcam"], "controls": ["centre"], "annotations": tmp_path / "boxes.csv"}
        return evaluate(classifier, tmp_path / "images", metrics=["all"], **options)

    actual, expected = measure(load_colours()), measure(load_colours("cpu"))
    assert {measurement.metric for measurement in actual.measurements} == set(METRICS)
    values = [measurement.value for measurement in expected.measurements]
    assert [measurement.value for measurement in actual.measurements] == pytest.approx(values, rel=1e-5, abs=1e-6)
    assert actual.failures == []


@pytest.mark.parametrize("method", ["gradcam", "grad-eclip"])
def test_sentences_and_similar_images(gpu: AppleGpu, method: str) -> None:
    model, tokenizer = towers("CLIP", TEXT, VISION, projection_dim=12).float(), word_tokenizer()
    images = torch.randn(2, 3, 32, 32)
    expected = gradcam.explain(model, images, method=method, target=Text(SENTENCES, tokenizer=tokenizer))
    alike = gradcam.explain(model, images, method=method, target=Like(images[:1]))
    model, images = model.to("mps"), images.to("mps")
    explanation = gradcam.explain(model, images, method=method, target=Text(SENTENCES, tokenizer=tokenizer))
    torch.testing.assert_close(explanation.maps.cpu(), expected.maps)
    explanation = gradcam.explain(model, images, method=method, target=Like(images[:1]))
    torch.testing.assert_close(explanation.maps.cpu(), alike.maps)
