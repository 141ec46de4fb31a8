"""Test targets on models of other libraries: maps, messages and default arguments."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError
from gradcam.targets import Box, Like, Mask, MissedBox, Text

IMAGES = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def to_backbone(transformers: Any) -> Any:
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12, 16, 20], depths=[1] * 4, layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


@pytest.fixture
def transformers() -> Any:
    module = pytest.importorskip("transformers")
    module.set_seed(0)
    return module


@pytest.fixture
def panoptic(transformers: Any) -> nn.Module:
    config = transformers.DetrConfig(
        backbone_config=to_backbone(transformers), num_queries=6, num_labels=5, d_model=32, encoder_layers=1,
        encoder_attention_heads=8, encoder_ffn_dim=32, decoder_layers=1, decoder_ffn_dim=32, decoder_attention_heads=8,
    )  # fmt: skip
    model: nn.Module = transformers.DetrForSegmentation(config).eval()
    return model


@pytest.fixture
def clipseg(transformers: Any) -> Any:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = dict(small, num_hidden_layers=2, vocab_size=99, max_position_embeddings=16, bos_token_id=97, eos_token_id=98)
    vision = dict(small, num_hidden_layers=3, image_size=64, patch_size=8)
    return transformers.CLIPSegConfig(
        text_config=text, vision_config=vision, projection_dim=16, extract_layers=[0, 1], reduce_dim=8,
        decoder_num_attention_heads=2, decoder_intermediate_size=16,
    )  # fmt: skip


def tokenize(prompts: list[str]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[97, 5, 9, 98]] * len(prompts)),
        "attention_mask": torch.ones(len(prompts), 4).long(),
    }


class TestDetectorsWithMasks:
    def test_box(self, panoptic: nn.Module) -> None:
        explanation = gradcam.explain(panoptic, IMAGES, target=Box(0, threshold=0.01))
        best = explanation.output.logits.softmax(-1)[0, :, :-1].max()
        assert torch.allclose(explanation.scores[0, 0], best)
        assert explanation.heatmaps.any()

    def test_missed_box(self, panoptic: nn.Module) -> None:
        assert gradcam.explain(panoptic, IMAGES, target=MissedBox((0, 0, 64, 64))).heatmaps.any()

    def test_part_that_does_not_run(self, panoptic: Any) -> None:
        """Use a module around a detector that calls the detector's parts itself."""

        class Wrapper(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = panoptic

            def forward(self, images: Tensor) -> Any:
                return self.inner.detr.class_labels_classifier(self.inner.detr.model(images).last_hidden_state)

        with pytest.raises(GradcamError, match="function of the model's output"):
            gradcam.explain(Wrapper().eval(), IMAGES, target=Box(0))


class TestClipseg:
    def test_text_and_likeness(self, transformers: Any, clipseg: Any) -> None:
        model, second = transformers.CLIPSegModel(clipseg).eval(), torch.rand(3, 64, 64)

        def embed(output: Any) -> Tensor:
            return output if isinstance(output, Tensor) else output.pooler_output

        with torch.no_grad():
            first, second_embedding = (embed(model.get_image_features(pixel_values=x)) for x in (IMAGES, second[None]))
            prompt = embed(model.get_text_features(**tokenize(["a cat"])))
        for target, vector in ((Text("a cat", tokenizer=tokenize), prompt), (Like(second), second_embedding)):
            score = gradcam.explain(model, IMAGES, target=target).scores
            assert torch.allclose(score, torch.cosine_similarity(first, vector)[:, None], atol=1e-5)

    def test_tokens_of_another_vocabulary(self, transformers: Any, clipseg: Any) -> None:
        target = Text("a cat", tokenizer=lambda prompts: {"input_ids": torch.tensor([[97, 400, 98]] * len(prompts))})
        with pytest.raises(TargetError, match=r"tokens 97 to 400, but CLIPSegModel takes 0 to 98.*tokenizer="):
            gradcam.explain(transformers.CLIPSegModel(clipseg).eval(), IMAGES, target=target)

    def test_mask(self, transformers: Any, clipseg: Any) -> None:
        model = transformers.CLIPSegForImageSegmentation(clipseg).eval()
        inputs = {"pixel_values": IMAGES, **tokenize(["a cat"])}
        explanation = gradcam.explain(model, inputs, target=Mask(1, (8, 8, 40, 40)))
        logits = explanation.output.logits.reshape(1, 64, 64)
        assert torch.allclose(explanation.scores[0, 0], logits[0, 8:40, 8:40].mean(), atol=1e-5)


def test_candidates_are_in_pixels_of_the_image(transformers: Any, tmp_path: Path) -> None:
    """Check that the boxes of the message can be passed to --missed, even if the processor resizes the image."""
    config = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=[64, 64],
        patch_size=16, num_detection_tokens=4, num_labels=3,
    )  # fmt: skip
    transformers.YolosForObjectDetection(config).save_pretrained(tmp_path)
    transformers.RTDetrImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path)
    detector = gradcam.load_detector(f"hf:{tmp_path}", threshold=0.99)
    image = np.random.default_rng(0).integers(0, 255, (128, 320, 3), dtype=np.uint8)
    with pytest.raises(TargetError, match="Best candidates") as caught:
        detector.explain(image)
    number = r"(-?\d+)"
    boxes = torch.tensor([[*map(float, item)] for item in re.findall(",".join([number] * 4), str(caught.value))])
    with torch.no_grad():
        output = detector.model(detector.preprocess(image)[None])
    centres, sides = output.pred_boxes[0].split(2, -1)
    expected = torch.cat([centres - sides / 2, centres + sides / 2], -1) * torch.tensor([320, 128, 320, 128])
    assert len(boxes) == 3
    assert (torch.cdist(boxes, expected, p=float("inf")).min(1).values < 1.5).all()
    with pytest.raises(TargetError, match=r"\(330\.0, 10\.0, 400\.0, 90\.0\) is outside the image, 320 x 128 pixels"):
        detector.explain(image, target=MissedBox((330, 10, 400, 90)))


class TestWords:
    def test_network_inside_of_wrappers(self) -> None:
        """Use RF-DETR's own class, which holds the network two objects deep."""
        network = types.SimpleNamespace(model=types.SimpleNamespace(model=nn.Conv2d(3, 3, 1)))
        with pytest.raises(ModelError, match=r"its \.model\.model\.") as caught:
            gradcam.explain(network, IMAGES)
        assert "vmap" not in str(caught.value)
        with pytest.raises(ModelError, match="pass the module inside it") as caught:
            gradcam.explain(types.SimpleNamespace(), IMAGES)
        assert "vmap" not in str(caught.value)

    def test_rows_of_patches(self) -> None:
        inputs = {"input_ids": torch.ones(1, 4).long(), "pixel_values": torch.rand(96, 1176)}
        with pytest.raises(
            ImageError, match="Rows of patches are supported only for known models, such as Qwen2-VL"
        ) as caught:
            gradcam.explain(nn.Conv2d(3, 3, 1), inputs)
        assert "preprocess" not in str(caught.value)

    def test_several_tiles_for_each_sample(self, transformers: Any) -> None:
        """Check that a module which adds the axis of tiles itself gives the same map."""
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = dict(vision, model_type="llama", num_key_value_heads=2, vocab_size=100, pad_token_id=0)
        config = transformers.SmolVLMConfig(
            vision_config=dict(vision, image_size=64, patch_size=8), text_config=text, image_token_id=90, scale_factor=2
        )
        model = transformers.SmolVLMForConditionalGeneration(config).eval()
        inputs = {"input_ids": torch.tensor([[1] + [90] * 16 + [5, 6]]), "pixel_values": IMAGES[:, None]}

        def word(output: Any) -> Tensor:
            logit: Tensor = output.logits[:, -1, 11]
            return logit

        class OneTile(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Any:
                return self.inner(pixel_values=pixel_values[:, None], input_ids=input_ids)

        tiles = gradcam.explain(model, inputs, target=word)
        layer = f"inner.{tiles.layer}"
        explanation = gradcam.explain(
            OneTile(), inputs | {"pixel_values": IMAGES}, layer, target=word, method="hirescam"
        )
        assert torch.allclose(explanation.maps, tiles.maps)
        assert tiles.heatmaps.any()


def test_classifier_of_ultralytics(tmp_path: Path) -> None:
    ultralytics = pytest.importorskip("ultralytics")
    ultralytics.YOLO("yolov8n-cls.yaml").save(tmp_path / "cls.pt")
    classifier = gradcam.load_model(f"yolo:{tmp_path / 'cls.pt'}")
    assert classifier.task == "classification"
    image = np.random.default_rng(0).integers(0, 255, (100, 160, 3), dtype=np.uint8)
    explanation = classifier.explain(image)
    assert float(explanation.probabilities().sum()) == pytest.approx(1, abs=1e-3)
    assert classifier.preprocess(image).shape == (3, 224, 224)


class Decoder(nn.Module):
    """A segmenter whose evidence for a class is the colour at each place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.decoder = nn.Sequential(nn.Conv2d(16, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.interpolate(self.decoder(self.encoder(images)), size=images.shape[2:])


class TestFunctions:
    def test_dense_output(self) -> None:
        """Check that a function and a mask of the same score have the same map if no layer is named."""
        model = Decoder().eval()
        mask, function = (
            gradcam.explain(model, IMAGES, target=target)
            for target in (Mask(2, (8, 8, 24, 24)), lambda output: output[:, 2, 8:24, 8:24].mean((1, 2)))
        )
        assert function.method == mask.method == "hirescam"
        assert torch.allclose(function.scores, mask.scores, atol=1e-6)
        assert torch.allclose(function.maps, mask.maps, atol=1e-6)
        assert function.layer == mask.layer

    def test_named_method_and_rows_of_logits(self) -> None:
        model = nn.Sequential(Decoder(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        assert gradcam.explain(model, IMAGES, target=lambda output: output[:, 1]).method == "gradcam"
        explanation = gradcam.explain(
            Decoder().eval(), IMAGES, method="gradcam", target=lambda output: output.mean((1, 2, 3))
        )
        assert explanation.method == "gradcam"

    def test_levels_of_a_pyramid_are_added(self) -> None:
        effdet = pytest.importorskip("effdet")
        torch.manual_seed(0)
        config = effdet.get_efficientdet_config("tf_efficientdet_d0")
        config.image_size, config.num_classes = (128, 128), 5
        model = effdet.EfficientDet(config, pretrained_backbone=False).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter)
        images, region = torch.rand(1, 3, 128, 128), slice(16, 80)

        def finest(output: Any) -> Tensor:
            scores: Tensor = output[0][0][:, :, 4:8, 4:8]
            return scores.amax((1, 2, 3))

        explanation = gradcam.explain(model, images, target=finest)
        energy = explanation.heatmaps[0, 0] ** 2
        assert (explanation.layer, explanation.method) == ("fpn", "hirescam")
        assert energy[region, region].sum() > 0.7 * energy.sum()
        detector = effdet.DetBenchPredict(model)
        assert gradcam.explain(detector, images, target=lambda output: output[:, 0, 4]).layer == "model.fpn"
