"""torchvision's MobileNetV2 on labelled photographs: with its genuine weights where they are, and step by step without."""

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
from gradcam.models.providers.torchvision import cached_file

WEIGHTS = torchvision.models.MobileNet_V2_Weights.DEFAULT
# ImageNet's classes of what is on the photographs; CREDITS.md says the same in words.
PHOTOGRAPHS = {
    "chelsea.jpg": {281, 282, 285}, "coffee.jpg": {967, 504, 968}, "rocket.jpg": {657, 744}, "camera.png": {872},
    "crocodile.webp": {49, 50}, "komodo_dragon.webp": {48}, "koala.webp": {105}, "lemur.webp": {383},
    "macaw.webp": {88}, "panda.webp": {388}, "polar_bear.webp": {296},
}  # fmt: skip
SHARE = 17 / 20


def predictions(names: list[str], capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> list[int]:
    """What the shell says is on the photographs."""
    arguments = ["run", *names, "--json", "--device", "cpu", "--output", str(folder), *options]
    assert cli.main(arguments, standalone_mode=False) == 0
    records = map(json.loads, capsys.readouterr().out.splitlines())
    return [record["predictions"][0]["index"] for record in records]


@pytest.mark.skipif(not cached_file(WEIGHTS).exists(), reason="the genuine weights are not in torch hub's cache")
def test_the_genuine_weights_know_the_photographs(
    photo: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    actual = predictions([str(photo(name)) for name in PHOTOGRAPHS], capsys, tmp_path, "--model", "mobilenet_v2")
    right = sum(index in classes for index, classes in zip(actual, PHOTOGRAPHS.values()))
    assert right >= SHARE * len(PHOTOGRAPHS)


def test_the_embedded_weights_know_the_photographs(
    photo: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    actual = predictions([str(photo(name)) for name in PHOTOGRAPHS], capsys, tmp_path)
    right = sum(index in classes for index, classes in zip(actual, PHOTOGRAPHS.values()))
    assert right >= SHARE * len(PHOTOGRAPHS)


def test_any_weights_see_and_say_what_torchvisions_own_lines_do(photo: Callable[[str], Path], tmp_path: Path) -> None:
    """With random weights, whose logits hang on every pixel: so what is true of them is true of the genuine ones."""
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
        assert level.max() < 2.01  # of 256 levels: Pillow rounds after each axis
        assert level.mean() < 0.05
        with torch.no_grad():
            expected = model.eval()(theirs[None]).softmax(1)
        actual = classifier.explain(photo(name), target=0).probabilities()
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=1e-5)
    assert list(classifier.labels or ()) == WEIGHTS.meta["categories"]
