"""Test models with one output: by default a binary logit, which is reported, or a value that is explained directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import gradcam
from gradcam.targets import ClassTarget, Mask

IMAGE = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
PREPROCESSING: dict[str, Any] = {"size": 32, "crop": 1, "mean": (0, 0, 0), "std": (1, 1, 1)}


def regressor(bias: float, outputs: int = 1) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs)
    model = nn.Sequential(*layers).eval()
    nn.init.constant_(model[4].bias, bias)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("bias", [61.0, 0.3, -0.25])
@pytest.mark.parametrize("load", [gradcam.load_classifier, gradcam.load_model])
@pytest.mark.filterwarnings("error:Assumed")
def test_a_value_is_explained_directly(load: Any, bias: float) -> None:
    options = {"activation": "none"} if load is gradcam.load_classifier else {"task": "regression"}
    loaded = load(regressor(bias), **options, **PREPROCESSING)
    with torch.no_grad():
        value = loaded.model(loaded.batch([IMAGE])).item()
    explanation = loaded.explain(IMAGE, evidence="signed")
    assert (loaded.classes, loaded.labels, loaded.task) == (1, ["output"], "classification")
    assert explanation.scores.tolist() == explanation.probabilities().tolist() == [[pytest.approx(value)]]
    assert explanation.caption().startswith(f"output, {value:.4g}, signed evidence by gradcam")
    for target in (0, "output", ClassTarget(0)):
        assert torch.equal(loaded.explain(IMAGE, target=target, evidence="signed").maps, explanation.maps)
    images = loaded.batch([IMAGE])
    plain = gradcam.explain(loaded.model, images, "1", target=ClassTarget(activation="none"), evidence="signed")
    assert torch.equal(plain.maps, explanation.maps)


def test_several_values() -> None:
    loaded = gradcam.load_model(regressor(5.0, 3), task="regression", **PREPROCESSING)
    assert (loaded.labels, loaded.activation) == (["output 0", "output 1", "output 2"], "none")
    labelled = gradcam.load_model(regressor(5.0, 3), task="regression", labels=list("abc"), **PREPROCESSING)
    assert labelled.labels == list("abc")


def test_a_single_output_is_taken_as_a_binary_logit_with_a_warning() -> None:
    message = r"a binary logit: .* --task regression \(activation=.none. in Python\)"
    with pytest.warns(gradcam.GradcamWarning, match=message):
        classifier = gradcam.load_classifier(regressor(-0.25), **PREPROCESSING)
    assert (classifier.classes, classifier.activation) == (2, "sigmoid")
    sigmoid_classifier = gradcam.load_classifier(regressor(-0.25), activation="sigmoid", **PREPROCESSING)
    assert not any("binary logit" in note for note in sigmoid_classifier.notes)


@pytest.mark.parametrize(("index", "sign"), [(0, -1), (1, 1)])
def test_classes_and_masks_of_one_channel_mean_the_same(index: int, sign: int) -> None:
    pixels = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    model = nn.Sequential(pixels, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.rand(2, 3, 16, 16)
    expected = sign * model(images).detach()
    with pytest.warns(gradcam.GradcamWarning, match=r"a binary logit.*ClassTarget\(activation=.none.\)"):
        of_class = gradcam.explain(model, images, "0.1", target=index)
    of_mask = gradcam.explain(pixels, images, "1", target=Mask(index, torch.ones(16, 16, dtype=torch.bool)))
    of_loaded = gradcam.load_classifier(model, **PREPROCESSING).explain(IMAGE, target=index)
    torch.testing.assert_close(of_class.scores, expected)
    torch.testing.assert_close(of_mask.scores, expected)
    assert of_loaded.scores.item() == pytest.approx(sign * of_loaded.output.item())
    for options in ({"method": "ablationcam"}, {"augmentation": "flip"}):
        torch.testing.assert_close(gradcam.explain(model, images, "0.1", target=index, **options).scores, expected)
    subject = gradcam.evaluation.Subject(model, images, index)
    torch.testing.assert_close(subject.probabilities, expected[:, 0].sigmoid())


@pytest.mark.filterwarnings("error:Assumed")
def test_the_classes_of_an_explanation_reproduce_it() -> None:
    model, images = regressor(-0.25), torch.rand(2, 3, 16, 16)
    explanation = gradcam.explain(model, images, "1", evidence="signed")
    torch.testing.assert_close(explanation.scores, model(images).detach())
    with pytest.warns(gradcam.GradcamWarning, match="a binary logit"):
        again = gradcam.explain(model, images, "1", target=explanation.classes, evidence="signed")
    assert torch.equal(again.maps, explanation.maps)


@pytest.mark.parametrize("function", ["check", "recommend", "diff"])
def test_maps_of_a_value_are_not_evaluated_by_probabilities(function: str) -> None:
    loaded = gradcam.load_classifier(regressor(61.0), activation="none", **PREPROCESSING)
    calls = {
        "check": lambda: gradcam.evaluation.check(loaded, IMAGE),
        "recommend": lambda: gradcam.evaluation.recommend(loaded, {"one": IMAGE, "two": IMAGE[::-1].copy()}),
        "diff": lambda: gradcam.evaluation.diff(loaded, loaded, [IMAGE]),
    }
    with pytest.raises(gradcam.GradcamError, match="output is a single value, but evaluation needs probabilities"):
        calls[function]()


def test_a_checkpoint_with_another_head_says_how_to_load_it(tmp_path: Path) -> None:
    model = resnet18()
    model.fc = nn.Sequential(nn.Linear(512, 16), nn.ReLU(), nn.Linear(16, 3))  # type: ignore[assignment]
    torch.save(model.state_dict(), tmp_path / "best.pth")
    with pytest.raises(gradcam.GradcamError) as caught:
        gradcam.load_classifier("resnet18", weights=tmp_path / "best.pth")
    assert "--model FILE.py:FUNCTION" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
