"""Test the labels of detectors and segmenters: one for each class, or for each class except the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import detection, segmentation

import gradcam

NAMES = ["cup", "cat", "rocket"]
UNTRAINED: dict[str, Any] = {"weights": None, "weights_backbone": None}
DETECTORS = ["ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn"]


def channels(count: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, count, 1))


@pytest.mark.parametrize("name", [*DETECTORS, "fcos_resnet50_fpn"])
def test_labels_of_a_detector_without_the_background(name: str) -> None:
    model = detection.__dict__[name](**UNTRAINED, num_classes=4)
    detector = gradcam.load_detector(model, labels=NAMES)
    assert detector.labels == ["background", *NAMES]
    assert any("class 0 is background and class 1 is cup" in note for note in detector.notes)
    complete = gradcam.load_detector(model, labels=["nothing", *NAMES])
    assert (complete.labels, complete.notes) == (["nothing", *NAMES], ())
    for labels in (NAMES[:2], [*NAMES, "moon", "sun"], ["background", *NAMES[:2]]):
        with pytest.raises(gradcam.GradcamError, match=f"There are {len(labels)} labels, but the model has 4 classes"):
            gradcam.load_detector(model, labels=labels)


@pytest.mark.slow
def test_labels_of_a_file_and_a_checkpoint(tmp_path: Path) -> None:
    model = detection.ssdlite320_mobilenet_v3_large(**UNTRAINED, num_classes=4)
    torch.save(model.state_dict(), tmp_path / "detector.pth")
    (tmp_path / "labels.txt").write_text("\n".join(NAMES))
    options = {"weights": tmp_path / "detector.pth", "labels": tmp_path / "labels.txt", "device": "cpu"}
    detector = gradcam.load_detector("ssdlite320_mobilenet_v3_large", threshold=0.0, **options)
    assert (detector.find_class("cup"), detector.label(3)) == (1, "rocket")
    explanation = detector.explain(torch.rand(3, 64, 64).mul(255).byte(), target="cup")
    assert explanation.instances[0][0].name == "cup"
    (tmp_path / "labels.txt").write_text("cup\ncat")
    with pytest.raises(gradcam.GradcamError, match=r"labels.txt has 2 labels, but the model has 4 classes"):
        gradcam.load_detector("ssdlite320_mobilenet_v3_large", **options)


@pytest.mark.parametrize(
    "build", [channels, lambda count: segmentation.lraspp_mobilenet_v3_large(**UNTRAINED, num_classes=count)]
)
def test_labels_of_a_segmenter_without_the_background(build: Any) -> None:
    segmenter = gradcam.load_segmenter(build(4), labels=NAMES, size=64)
    assert segmenter.labels == ["background", *NAMES]
    assert any("class 1 is cup" in note for note in segmenter.notes)
    with pytest.raises(gradcam.GradcamError, match="There are 3 labels, but the model has 5 classes"):
        gradcam.load_segmenter(build(5), labels=NAMES, size=64)


def test_a_label_of_a_segmenter_with_one_channel() -> None:
    assert gradcam.load_segmenter(channels(1), labels=["crack"], size=64).labels == ["not crack", "crack"]
    assert gradcam.load_segmenter(channels(1), labels=["sound", "crack"], size=64).labels == ["sound", "crack"]
    with pytest.raises(gradcam.GradcamError, match="expected one label, or two"):
        gradcam.load_segmenter(channels(1), labels=NAMES, size=64)


def test_a_detector_without_a_background_needs_all_labels() -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4, "num_labels": 4}
    model = transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes))
    with pytest.raises(gradcam.GradcamError, match="There are 3 labels, but the model has 4 classes"):
        gradcam.load_detector(model, labels=NAMES)
    assert gradcam.load_detector(model, labels=[*NAMES, "moon"]).labels == [*NAMES, "moon"]
