"""Test torchvision's MobileNetV2 on labelled photographs: its pretrained weights if cached, otherwise step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image

import gradcam
from gradcam.cli import cli
from gradcam.models.providers.torchvision import find_cache_path

WEIGHTS = torchvision.models.MobileNet_V2_Weights.DEFAULT
# The ImageNet classes of the photographs; CREDITS.md names the same objects.
PHOTOGRAPHS = {
    "chelsea.jpg": {281, 282, 285}, "coffee.jpg": {967, 504, 968}, "rocket.jpg": {657, 744}, "camera.png": {872},
    "crocodile.webp": {49, 50}, "komodo_dragon.webp": {48}, "koala.webp": {105}, "lemur.webp": {383},
    "macaw.webp": {88}, "panda.webp": {388}, "polar_bear.webp": {296},
}  # fmt: skip
MIN_ACCURACY = 17 / 20


def predictions(names: list[str], capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> list[int]:
    """Return the top class that the command line reports for each photograph."""
    arguments = ["run", *names, "--json", "--device", "cpu", "--output", str(folder), *options]
    assert cli.main(arguments, standalone_mode=False) == 0
    records = map(json.loads, capsys.readouterr().out.splitlines())
    return [record["predictions"][0]["index"] for record in records]


@pytest.mark.skipif(not find_cache_path(WEIGHTS).exists(), reason="the genuine weights are not in torch hub's cache")
def test_the_pretrained_weights_recognise_the_photographs(
    photo: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    top_classes = predictions([str(photo(name)) for name in PHOTOGRAPHS], capsys, tmp_path, "--model", "mobilenet_v2")
    correct = sum(index in classes for index, classes in zip(top_classes, PHOTOGRAPHS.values()))
    assert correct >= MIN_ACCURACY * len(PHOTOGRAPHS)


def test_the_embedded_weights_recognise_the_photographs(
    photo: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    top_classes = predictions([str(photo(name)) for name in PHOTOGRAPHS], capsys, tmp_path)
    correct = sum(index in classes for index, classes in zip(top_classes, PHOTOGRAPHS.values()))
    assert correct >= MIN_ACCURACY * len(PHOTOGRAPHS)


def test_inputs_and_predictions_agree_with_torchvisions_example_code(
    photo: Callable[[str], Path], tmp_path: Path
) -> None:
    """With random weights, every pixel affects the logits, so agreement here implies it for pretrained weights."""
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    torch.save(model.state_dict(), tmp_path / "random.pth")
    classifier = gradcam.load_classifier("mobilenet_v2", weights=tmp_path / "random.pth", device="cpu")
    transform = WEIGHTS.transforms()
    for name in PHOTOGRAPHS:
        picture = gradcam.read_image(photo(name))
        theirs = transform(Image.fromarray(picture))
        level = abs(classifier.preprocess(picture) - theirs) * torch.tensor(transform.std)[:, None, None] * 255
        assert level.max() < 2.01  # of 256 levels, because Pillow rounds after each axis
        assert level.mean() < 0.05
        with torch.no_grad():
            expected = model.eval()(theirs[None]).softmax(1)
        probabilities = classifier.explain(photo(name), target=0).probabilities()
        torch.testing.assert_close(probabilities, expected, rtol=0.02, atol=1e-5)
    assert list(classifier.labels or ()) == WEIGHTS.meta["categories"]
