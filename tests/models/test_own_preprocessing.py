"""Test the preprocessing that a model object carries against its library, and the warning if the object has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

import gradcam
from tests.models.test_providers import save_classifier, vit_config, vit_processor

timm: Any = pytest.importorskip("timm")

IMAGE = np.kron(np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8), np.ones((50, 50, 1), np.uint8))


def same_pixels(classifier: gradcam.Classifier, expected: Tensor) -> bool:
    """Return whether the images agree up to rounding to 8 bits."""
    batch = classifier.batch([IMAGE])
    return batch.shape[1:] == expected.shape and bool((batch[0] - expected).abs().mean() < 0.01)


def timm_transform(model: nn.Module, **options: Any) -> Tensor:
    config = timm.data.resolve_model_data_config(model, options)
    result: Tensor = timm.data.create_transform(**config)(Image.fromarray(IMAGE))
    return result


class Wrapped(nn.Module):
    """A user-defined head on timm's features."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(1000, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped, nn.DataParallel])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", {}),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", {"img_size": 64}),
        ("resnet18.a1_in1k", {}),
        ("lcnet_050", {"num_classes": 1000}),
    ],
)
@pytest.mark.filterwarnings("error:Assumed")
def test_a_model_of_timm(name: str, options: dict[str, Any], wrap: Any) -> None:
    model = timm.create_model(name, pretrained=False, **options).eval()
    expected = timm_transform(model, **{key: value for key, value in options.items() if key == "img_size"})
    assert same_pixels(gradcam.load_classifier(wrap(model).eval(), activation="softmax"), expected)


@pytest.mark.filterwarnings("error:Assumed")
def test_a_model_of_timm_that_a_function_returns(tmp_path: Path) -> None:
    code = "import timm\ndef build():\n    return timm.create_model('vit_tiny_patch16_224', img_size=64)\n"
    (tmp_path / "net.py").write_text(code)
    classifier = gradcam.load_classifier(f"{tmp_path}/net.py:build", device="cpu")
    assert classifier.preprocess.mean == (0.5, 0.5, 0.5)  # type: ignore[attr-defined]
    assert any("Using the preprocessing in the settings of the model" in note for note in classifier.notes)
    larger = gradcam.load_classifier(f"{tmp_path}/net.py:build", device="cpu", mean=(0.1, 0.1, 0.1))
    assert larger.preprocess.mean == (0.1, 0.1, 0.1)  # type: ignore[attr-defined]


def test_a_model_of_timm_for_greyscale_images_has_statistics_of_three_channels() -> None:
    model = timm.create_model("lcnet_050", in_chans=1)
    with pytest.warns(gradcam.GradcamWarning, match="Assumed greyscale images"):
        classifier = gradcam.load_classifier(model, activation="softmax")
    assert classifier.batch([IMAGE]).shape == (1, 1, 224, 224)


def test_settings_that_pad_images_are_reported() -> None:
    model = timm.create_model("lcnet_050", pretrained_cfg_overlay={"crop_mode": "border"})
    with pytest.warns(gradcam.GradcamWarning, match="Assumed a size of 224"):
        classifier = gradcam.load_classifier(model)
    assert any("pads images" in note for note in classifier.notes)


@pytest.mark.parametrize(("mode", "shape"), [("shortest", (32, 32)), ("squash", (32, 32)), ("squash", (32, 48))])
@pytest.mark.filterwarnings("error:Assumed")
def test_a_model_of_open_clip(mode: str, shape: tuple[int, int]) -> None:
    library = pytest.importorskip("open_clip")
    vision = {"image_size": shape, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8}
    model = library.CLIP(16, vision, {"width": 16, "heads": 2, "layers": 1}).eval()
    settings = library.transform.PreprocessCfg(size=shape, resize_mode=mode, interpolation="bilinear")
    library.model.set_model_preprocess_cfg(model, vars(settings))
    expected = library.transform.image_transform_v2(settings, is_train=False)(Image.fromarray(IMAGE))
    assert same_pixels(gradcam.load_matcher(model), expected)
    assert same_pixels(gradcam.load_matcher(model.visual), expected)


@pytest.mark.filterwarnings("error:Assumed")
def test_a_model_of_transformers_with_its_processor_in_the_folder(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    processor = vit_processor(image_mean=[0.2, 0.3, 0.4], image_std=[0.5, 0.6, 0.7])
    save_classifier(tmp_path, vit_config(num_labels=3), processor)
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    expected = processor(Image.fromarray(IMAGE), return_tensors="pt")["pixel_values"][0]
    assert same_pixels(gradcam.load_classifier(model, activation="softmax"), expected)


def test_a_model_of_transformers_without_a_processor_has_the_size_of_its_configuration() -> None:
    transformers: Any = pytest.importorskip("transformers")
    with pytest.warns(gradcam.GradcamWarning, match="Assumed a size of 32"):
        classifier = gradcam.load_classifier(transformers.ViTForImageClassification(vit_config(num_labels=3)))
    assert classifier.batch([IMAGE]).shape == (1, 3, 32, 32)


def test_a_segmenter_has_the_statistics_of_its_encoder() -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.Unet("tu-tf_efficientnet_lite0", encoder_weights=None, classes=3).eval()
    with pytest.warns(gradcam.GradcamWarning, match="a shorter side of 512 pixels. Override with --size"):
        segmenter = gradcam.load_segmenter(model)
    assert (segmenter.preprocess.mean, segmenter.preprocess.std) == ((0.5,) * 3, (0.5,) * 3)  # type: ignore[attr-defined]
    batch = segmenter.batch([IMAGE])
    assert batch.shape == (1, 3, 512, 672)  # multiples of the encoder's stride of 32
    assert gradcam.load_segmenter(model, size=64).batch([IMAGE]).shape == (1, 3, 64, 96)


@pytest.mark.filterwarnings("error:Assumed")
def test_assumed_settings_of_a_model_object_are_a_warning_until_they_are_given() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    with pytest.warns(gradcam.GradcamWarning, match="Assumed a size of 224, a crop of 0.875, ImageNet's mean and std"):
        gradcam.load_classifier(model)
    gradcam.load_classifier(model, size=32, crop=1, mean=(0, 0, 0), std=(1, 1, 1))
    segmenter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    with pytest.warns(gradcam.GradcamWarning, match="Assumed the whole image with a shorter side of 520 pixels"):
        gradcam.load_segmenter(segmenter)


@pytest.mark.filterwarnings("error:Assumed")
def test_a_segmenter_on_features_of_timm_has_their_statistics() -> None:
    backbone = timm.create_model("vit_tiny_patch16_224", img_size=32, dynamic_img_size=True, num_classes=0)
    model = nn.Sequential(Grid(backbone), nn.Conv2d(192, 3, 1))
    with pytest.warns(gradcam.GradcamWarning, match="Assumed the whole image with a shorter side of 520 pixels. "):
        segmenter = gradcam.load_segmenter(model)
    assert segmenter.preprocess.mean == (0.5, 0.5, 0.5)  # type: ignore[attr-defined]


class Grid(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.backbone.forward_features(images)[:, 1:]  # type: ignore[operator]
        rows = images.shape[2] // 16
        return tokens.mT.unflatten(2, (rows, tokens.shape[1] // rows))
