"""Test models for tasks other than classification: which kind is loaded, where regions are, and their evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import gradcam
from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.models.instance_scores import to_instance_classifier
from gradcam.models.task_models import Captioner, Detector, Matcher, PoseFinder, Segmenter
from gradcam.targets import Box, ClassTarget, Like, Mask, MissedBox, Text, Token
from tests import drawn
from tests.drawn.pictures import SHAPES, Scene, draw_scenes

LABELS = ["dark", "bright"]


SMALL_CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SEGFORMER = {"num_labels": 3, "hidden_sizes": [8, 8, 8, 16], "depths": [1] * 4, "decoder_hidden_size": 8}
YOLOS = SMALL_CONFIG | {"num_labels": 3, "intermediate_size": 16, "image_size": [64, 64], "num_detection_tokens": 4}
FOLDERS = [
    ("SegformerForSemanticSegmentation", SEGFORMER, Segmenter),
    ("YolosForObjectDetection", YOLOS, Detector),
    ("Dinov2Model", SMALL_CONFIG | {"image_size": 28}, Matcher),
    ("BlipForConditionalGeneration", None, Captioner),
    ("VitPoseForPoseEstimation", None, PoseFinder),
]


def bright() -> nn.Module:
    """Return a segmenter with cells of eight pixels; the score of class 1 is the brightness above the mean."""
    network = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for layer, weight, bias in ((network[0], 1 / 192, 1.0), (network[2], 0.25, 0.0)):
        nn.init.constant_(layer.weight, weight)  # type: ignore[arg-type]
        nn.init.constant_(layer.bias, bias)  # type: ignore[arg-type]
    network[2].weight.data[0] = 0
    network[2].bias.data[0] = 1  # type: ignore[index]
    return network


def save_words(folder: Path, words: list[str], **special: Any) -> None:
    """Save a tokenizer with these words, whose ids are their positions."""
    tokenizers, library = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    ids = {word: k for k, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], **special).save_pretrained(folder)


def two_squares() -> np.ndarray:
    """Return a black image, 300 x 200, with a white square at the upper left and one at the lower right."""
    picture = np.zeros((200, 300, 3), np.uint8)
    picture[20:60, 30:70] = picture[140:180, 230:270] = 255
    return picture


@pytest.fixture
def detector() -> Detector:
    import torchvision

    torch.manual_seed(0)
    make: Any = torchvision.models.detection.ssdlite320_mobilenet_v3_large
    model = make(weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0, detections_per_img=3)
    return gradcam.load_detector(model, labels=["nothing", "cup", "cat"])


class TestLoading:
    """Test that the task is read from the model."""

    @pytest.mark.slow
    def test_torchvision_with_a_checkpoint_of_fewer_classes(self, tmp_path: Path) -> None:
        import torchvision

        make: Any = torchvision.models.detection.ssdlite320_mobilenet_v3_large
        torch.save(make(weights=None, weights_backbone=None, num_classes=4).state_dict(), tmp_path / "four.pth")
        model = gradcam.load_model("ssdlite320_mobilenet_v3_large", weights=tmp_path / "four.pth", threshold=0.25)
        assert isinstance(model, Detector)
        assert (model.task, model.classes, model.labels[3]) == ("detection", 4, "class 3")  # type: ignore[index]
        assert model.model.score_thresh == 0.25
        with pytest.raises(ModelError, match="is a model for detection, not a classifier: use gradcam.load_model"):
            gradcam.load_classifier("ssdlite320_mobilenet_v3_large", weights=tmp_path / "four.pth")

    @pytest.mark.parametrize(("kind", "config", "expected"), FOLDERS)
    def test_a_folder_of_hugging_face(self, kind: str, config: Any, expected: type, tmp_path: Path) -> None:
        library = pytest.importorskip("transformers")
        model_class = getattr(library, kind)
        small = SMALL_CONFIG | {"intermediate_size": 16}
        if kind.startswith("Blip"):
            text, vision = small | {"vocab_size": 20}, small | {"image_size": 32}
            settings = library.BlipConfig(text_config=text, vision_config=vision)
        elif kind.startswith("VitPose"):
            backbone = library.VitPoseBackboneConfig(**small, image_size=[64, 48], out_indices=[2])
            settings = library.VitPoseConfig(backbone_config=backbone)
        else:
            settings = model_class.config_class(**config)
        model_class(settings).save_pretrained(tmp_path)
        processor: Any = library.ViTImageProcessor(size={"height": 64, "width": 64})
        processor.save_pretrained(tmp_path)
        model = gradcam.load_model(f"hf:{tmp_path}")
        assert type(model) is expected
        assert model.preprocess(two_squares()).shape == (3, 64, 64)

    def test_a_language_model_gets_the_default_prompt_or_a_custom_one(self, tmp_path: Path) -> None:
        library = pytest.importorskip("transformers")
        torch.manual_seed(0)
        small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        plain_words = "USER : ASSISTANT Describe the picture in a sentence . what is it ?"
        words = ["<unk>", "<s>", "</s>", "<pad>", "<image>", *plain_words.split()]
        save_words(tmp_path, words, pad_token="<pad>", additional_special_tokens=["<image>"])
        vision = library.CLIPVisionConfig(**small, image_size=32, patch_size=8)
        ends = {"vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
        configs = {"vision_config": vision, "text_config": library.LlamaConfig(**small, **ends)}
        config = library.LlavaConfig(**configs, image_token_index=4, image_seq_length=16)
        library.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
        processor: Any = library.LlavaProcessor(
            library.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
            library.AutoTokenizer.from_pretrained(tmp_path),
            patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip
        processor.save_pretrained(tmp_path)
        for prompts, prompt in (((), "Describe the picture in a sentence."), (("what is it ?",), "what is it ?")):
            captioner = gradcam.load_model(f"hf:{tmp_path}", prompts=prompts)
            assert isinstance(captioner, Captioner)
            assert captioner.prompt == prompt
            explanation = captioner.explain(two_squares(), target=Token([9, 10]))
            text = f"USER: <image>\n{prompt} ASSISTANT:"
            inputs = processor(images=Image.fromarray(two_squares()), text=text, return_tensors="pt")
            plain = gradcam.explain(captioner.model, dict(inputs), target=Token([9, 10]))
            torch.testing.assert_close(explanation.maps, plain.maps)
            assert explanation.regions == [(0, 50, 200, 200)]
        with pytest.raises(ModelError, match="takes one prompt, but 2 were given"):
            gradcam.load_model(f"hf:{tmp_path}", prompts=["a", "the"])
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match="The model has no processor of images and text"):
            gradcam.load_model(f"hf:{tmp_path}")

    def test_oneformer_gets_its_task(self, tmp_path: Path) -> None:
        library = pytest.importorskip("transformers")
        ones = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2}
        swin = library.SwinConfig(image_size=64, **ones, out_features=[f"stage{k}" for k in range(1, 5)])
        config = library.OneFormerConfig(
            encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=5, dim_feedforward=16, hidden_dim=64,
            backbone_config=swin, mask_dim=64, conv_dim=64, encoder_feedforward_dim=16, text_encoder_width=16,
            query_dec_layers=1, text_encoder_num_layers=1, text_encoder_vocab_size=50, text_encoder_context_length=7,
            task_seq_len=7, text_encoder_n_ctx=2, is_training=False, num_labels=3,
        )  # fmt: skip
        library.OneFormerForUniversalSegmentation(config).save_pretrained(tmp_path)
        library.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="No tokenizer was found for the model"):
            gradcam.load_model(f"hf:{tmp_path}")
        save_words(tmp_path, ["<unk>", "the", "task", "is", "semantic", "<pad>"], pad_token="<pad>")
        segmenter = gradcam.load_model(f"hf:{tmp_path}")
        assert isinstance(segmenter, Segmenter)
        assert segmenter.inputs["task_inputs"].tolist() == [[1, 2, 3, 4, 5, 5, 5]]
        assert segmenter.explain([two_squares()] * 2).maps.any()

    @pytest.mark.parametrize("has_auxiliary", [True, False])
    def test_torchvision_s_with_and_without_the_head_of_training(self, tmp_path: Path, has_auxiliary: bool) -> None:
        import torchvision

        name = "deeplabv3_mobilenet_v3_large"
        options = {"weights": None, "weights_backbone": None, "num_classes": 3, "aux_loss": has_auxiliary}
        model: Any = torchvision.models.get_model(name, **options).eval()
        torch.save(model.state_dict(), tmp_path / "own.pth")
        segmenter = gradcam.load_segmenter(name, weights=tmp_path / "own.pth")
        images = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
        assert torch.equal(segmenter.model(images)["out"], model(images)["out"])

    def test_segmentation_models_pytorch(self, tmp_path: Path) -> None:
        library = pytest.importorskip("segmentation_models_pytorch")
        model = library.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=2)
        model.save_pretrained(tmp_path)
        segmenter = gradcam.load_model(f"smp:{tmp_path}", size=64)
        assert isinstance(segmenter, Segmenter)
        assert segmenter.preprocess(two_squares()).shape == (3, 64, 96)
        assert torch.equal(segmenter.model.state_dict()["encoder.conv1.weight"], model.encoder.conv1.weight)
        with pytest.raises(ModelError, match="expected a folder written by"):
            gradcam.load_model(f"smp:{tmp_path}/nowhere")

    def test_open_clip_takes_a_checkpoint(self, tmp_path: Path) -> None:
        library = pytest.importorskip("open_clip")
        with pytest.raises(ModelError, match="needs a checkpoint: give --weights"):
            gradcam.load_model("open_clip:RN50")
        with pytest.raises(ModelError, match="no architecture 'RN5O'. Nearest: 'RN50'"):
            gradcam.load_model("open_clip:RN5O", weights=tmp_path)
        name = next(name for name in library.list_models() if name.startswith("MobileCLIP-S0") or name == "RN50")
        model = library.create_model(name, pretrained=None)
        torch.save(model.state_dict(), tmp_path / "own.pt")
        matcher = gradcam.load_model(f"open_clip:{name}", weights=tmp_path / "own.pt")
        assert isinstance(matcher, Matcher)
        side = model.visual.image_size
        shape = (side, side) if isinstance(side, int) else tuple(side)
        assert tuple(matcher.preprocess(two_squares()).shape[1:]) == shape

    def test_timm_without_a_classifier(self, tmp_path: Path) -> None:
        timm = pytest.importorskip("timm")
        torch.save(timm.create_model("resnet10t", num_classes=0).state_dict(), tmp_path / "own.pth")
        matcher = gradcam.load_matcher("timm:resnet10t", weights=tmp_path / "own.pth")
        assert isinstance(matcher, Matcher)
        assert matcher.model.get_classifier().__class__ is nn.Identity  # type: ignore[operator]

    def test_models_with_one_channel_get_greyscale_images(self) -> None:
        segmenter = bright()
        segmenter[0] = nn.Conv2d(1, 4, 8, 8)  # type: ignore[index]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        classifier = nn.Sequential(nn.Conv2d(1, 4, 8, 8), nn.ReLU(), *head)
        cases = (segmenter, Segmenter, (1, 520, 780)), (classifier, gradcam.Classifier, (1, 224, 224))
        for model, kind, size in cases:
            loaded = gradcam.load_model(model)
            assert type(loaded) is kind
            assert loaded.preprocess(two_squares()).shape == size
            assert "greyscale image" in loaded.notes[0]
            assert loaded.explain(two_squares()).images[0].shape[2] == 3

    def test_modules(self) -> None:
        assert isinstance(gradcam.load_model(bright()), Segmenter)
        assert isinstance(gradcam.load_model(drawn.load("convolutional"), size=96), Matcher)
        assert gradcam.load_model().task == "classification"
        with pytest.raises(ModelError, match="is not a known model for detection"):
            gradcam.load_detector(bright())
        with pytest.raises(ModelError, match="task is 'sleep', expected one of"):
            gradcam.load_model(bright(), task="sleep")
        with pytest.raises(ModelError, match="takes no text prompts"):
            gradcam.load_model(prompts=["a cat"])


class TestPlaces:
    """Test that regions are in image pixels, for every preprocessing."""

    def test_the_region_under_a_point(self) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        for point, (x0, y0) in {(50, 40): (30, 20), (250, 160): (230, 140)}.items():
            explanation = segmenter.explain(two_squares(), target=Mask(None, point), method="hirescam")
            (instance,) = explanation.instances[0]  # type: ignore[index]
            assert instance.name == "bright"
            assert instance.box == pytest.approx((x0, y0, x0 + 40, y0 + 40), abs=18)
            down, across = np.unravel_index(explanation.heatmaps[0][0].argmax(), explanation.heatmaps[0][0].shape)
            scale = 200 / explanation.heatmaps.shape[2]
            assert y0 - 9 <= down * scale <= y0 + 49
            assert x0 - 9 <= across * scale <= x0 + 49

    @pytest.mark.parametrize("classes", [[1], [0, 1]])
    def test_classes_are_masks(self, classes: list[int]) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        maps = [
            segmenter.explain(two_squares(), target=target, method="hirescam").maps
            for target in (ClassTarget([classes]), Mask(classes))
        ]
        assert maps[0].shape[:2] == (1, len(classes))
        torch.testing.assert_close(*maps)

    def test_a_mask_of_the_pictures_size(self, tmp_path: Path) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        mask = np.zeros((200, 300), np.uint8)
        mask[140:180, 230:270] = 255
        Image.fromarray(mask).save(tmp_path / "mask.png")
        targets = Mask(1, mask), Mask(1, tmp_path / "mask.png")
        maps = [segmenter.explain(two_squares(), target=target, method="hirescam").maps for target in targets]
        torch.testing.assert_close(*maps)
        assert maps[0][0, 0, :6, :9].sum() == 0
        with pytest.raises(TargetError, match="The mask is 30 x 20, but the image is 300 x 200"):
            segmenter.explain(two_squares(), target=Mask(1, mask[:20, :30]))

    def test_pictures_of_two_sizes(self) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        with pytest.raises(ImageError, match="explain images of different sizes one by one"):
            segmenter.explain([two_squares(), two_squares()[:100, :150]], target=Mask(1, (50, 40)))

    def test_a_missed_box_keeps_its_position(self, detector: Detector) -> None:
        explanation = detector.explain(two_squares(), target=MissedBox((30, 20, 70, 60), "cat"))
        (instance,) = explanation.instances[0]  # type: ignore[index]
        assert (instance.box, instance.name, instance.index) == ((30, 20, 70, 60), "cat", 2)


class TestMatching:
    """Test that the reference image also has maps."""

    @pytest.fixture
    def matcher(self) -> Matcher:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return gradcam.load_matcher(nn.Sequential(*layers), size=96, crop=1.0)

    def test_maps_on_both(self, matcher: Matcher, tmp_path: Path) -> None:
        gradcam.write_image(tmp_path / "other.png", two_squares()[:, ::-1].copy())
        explanation = matcher.explain(two_squares(), target=Like(tmp_path / "other.png"))
        reference = explanation.reference
        assert reference is not None
        assert np.array_equal(reference.images[0], two_squares()[:, ::-1])  # type: ignore[attr-defined]
        images = matcher.batch([two_squares(), tmp_path / "other.png"])
        with torch.no_grad():
            embedding, reference_embedding = nn.functional.normalize(matcher.model(images), dim=1)
        assert explanation.scores.item() == pytest.approx(float(embedding @ reference_embedding), abs=1e-6)
        assert reference.scores.item() == pytest.approx(float(embedding @ reference_embedding), abs=1e-6)

    def test_unsupported_targets_are_refused(self, matcher: Matcher) -> None:
        with pytest.raises(TargetError, match="Give targets.Text"):
            matcher.explain(two_squares())
        with pytest.raises(TargetError, match="has no text encoder"):
            matcher.explain(two_squares(), target=Text("a cat"))


class TestEvaluation:
    """Test the evaluation functions: an instance or region is treated like a class."""

    @pytest.fixture(scope="class")
    def shapes(self) -> Detector:
        """Return a detector trained on drawn shapes, so that its detections are correct."""
        return gradcam.load_detector(drawn.load("detector"), labels=["ground", *SHAPES])

    @pytest.fixture(scope="class")
    def scene(self) -> Scene:
        return next(scene for scene in draw_scenes(5, 20) if len(scene.things) >= 3)

    def test_the_same_scores_and_maps(self, shapes: Detector, scene: Scene) -> None:
        prepared = shapes.prepare(scene.picture)
        classifier = to_instance_classifier(shapes, prepared)
        images = classifier.batch([prepared])
        boxes = shapes.explain(prepared, target=Box(all))
        count = boxes.scores.shape[1]
        scores: Tensor = classifier.model(torch.cat([images, images * 0]))
        torch.testing.assert_close(scores[:1], boxes.scores, rtol=1e-4, atol=1e-6)
        assert count >= 3
        assert scores[1].max() < 0.2 < scores[0].min()
        assert [label.split(",")[0] for label in classifier.labels or ()] == [f"box {k}" for k in range(count)]
        again = classifier.explain(prepared, target=[list(range(count))], method="hirescam")
        torch.testing.assert_close(again.maps, boxes.maps, rtol=1e-3, atol=1e-6)

    def test_pictures_of_two_sizes_have_a_panel_each(self, shapes: Detector, scene: Scene) -> None:
        pictures = [scene.picture, np.pad(scene.picture, ((0, 0), (0, 24), (0, 0)))]
        explanations = shapes.compare(pictures, methods=["hirescam", "eigencam"])
        narrow, wide = (gradcam.panel(explanations, k, height=240) for k in range(2))
        assert wide.shape[1] - narrow.shape[1] == 3 * 60
        with pytest.raises(gradcam.GradcamError, match="The images have different sizes"):
            gradcam.fuse(explanations)

    def test_a_single_instance_is_a_binary_class(self) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        classifier = to_instance_classifier(segmenter, segmenter.prepare(two_squares()), Mask(1))
        assert classifier.labels == ["no bright", "bright"]
        assert classifier.find_instance(0) == 1

    def test_a_verdict(self) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        # Before the output layer, all channels are equal, so any weights give the same map.
        verdict = gradcam.evaluation.check(segmenter, two_squares(), target=Mask(1), layer="2")
        assert (verdict.class_name, verdict.method, verdict.label, verdict.index) == ("bright", "hirescam", "bright", 1)
        assert verdict.to_record()["mask"] == "predicted"
        outcomes = dict.fromkeys(["stability", "classes", "randomisation"], "passed")
        # Bright squares have edges, so any weights mark them.
        assert {test.name: test.outcome for test in verdict.tests} == outcomes | {"covering": "undecided"}
        assert {"mirrored", "shifted", "noise", "centre"} <= {*verdict.distinguished_from}
        message = "is not distinguished from the heatmap of a network with random weights, the image's edges."
        assert message in verdict.summary

    @pytest.mark.slow
    def test_a_box_is_distinguished_from_the_other_boxes(self, shapes: Detector, scene: Scene) -> None:
        boxes = shapes.explain(scene.picture, target=Box(all)).instances[0]  # type: ignore[index]
        verdict = gradcam.evaluation.check(shapes, scene.picture, target=Box(1))
        box_names = [f"box {box.number}, {box.name}" for box in boxes]
        assert (verdict.class_name, verdict.label, verdict.labels) == (box_names[1], boxes[1].name, box_names)
        assert {verdict.artifacts.rivals.index(k) for k in range(len(boxes)) if k != 1} == set(range(len(boxes) - 1))
        record = verdict.to_record()
        assert (record["number"], record["index"]) == (1, boxes[1].index)
        assert record["box"] == pytest.approx(boxes[1].box, abs=0.06)
        heatmap = shapes.explain(scene.picture, target=Box(1)).heatmaps[0][0]
        torch.testing.assert_close(verdict.artifacts.heatmap, heatmap, rtol=1e-3, atol=1e-4)
        with pytest.raises(TargetError, match="The target is a position, left, which has no probability"):
            gradcam.evaluation.check(shapes, scene.picture, target=Box(1, "left"))

    def test_user_defined_class_names_are_in_messages(self, shapes: Detector, scene: Scene) -> None:
        missing = next(k for k in range(len(SHAPES)) if all(thing.shape != k for thing in scene.things))
        name = SHAPES[missing]
        with pytest.raises(TargetError, match=f"No {name} was found .* Best candidates: {name}"):
            shapes.explain(scene.picture, target=name)
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        message = r"No pixel is predicted as dark \(0\)\. Predicted: bright \(1\) 100\.0 %"
        with pytest.raises(TargetError, match=message):
            segmenter.explain(np.full((96, 96, 3), 255, np.uint8), target="dark")

    def test_a_study_may_name_its_target(self, tmp_path: Path) -> None:
        matcher = gradcam.load_matcher(drawn.load("convolutional"), size=96, mean=[0] * 3, std=[1] * 3)
        scene = next(iter(draw_scenes(5, 1)))
        gradcam.write_image(tmp_path / "scene.png", scene.picture)
        options: dict[str, Any] = {"methods": ["gradcam"], "metrics": ["complexity"], "controls": []}
        results = gradcam.evaluation.evaluate(matcher, tmp_path, target=Text("a red star"), **options)
        assert [measurement.label for measurement in results.measurements] == ["a red star"]
        assert results.conditions.target == "Text(text='a red star')"

    def test_a_segmenter_is_evaluated_for_the_annotated_class(self, tmp_path: Path) -> None:
        segmenter = gradcam.load_segmenter(bright(), labels=LABELS, size=96)
        gradcam.write_image(tmp_path / "squares.png", two_squares())
        options: dict[str, Any] = {"methods": ["hirescam"], "metrics": ["complexity"], "controls": []}
        options["annotations"] = tmp_path / "boxes.csv"
        for label in LABELS:
            (tmp_path / "boxes.csv").write_text(f"image,label,xmin,ymin,xmax,ymax\nsquares.png,{label},30,20,70,60\n")
            results = gradcam.evaluation.evaluate(segmenter, tmp_path / "squares.png", **options)
            assert {measurement.label for measurement in results.measurements} == {label}

    def test_annotations(self, shapes: Detector, scene: Scene, tmp_path: Path) -> None:
        gradcam.write_image(tmp_path / "scene.png", scene.picture)
        boxes = shapes.explain(scene.picture, target=Box(all)).instances[0]  # type: ignore[index]
        last = boxes[-1]
        x0, y0, x1, y1 = last.box  # type: ignore[misc]
        rows = f"image,label,xmin,ymin,xmax,ymax\nscene.png,{last.name},{x0:.0f},{y0:.0f},{x1:.0f},{y1:.0f}\n"
        (tmp_path / "boxes.csv").write_text(rows)
        results = gradcam.evaluation.evaluate(
            shapes, tmp_path / "scene.png", methods=["hirescam"], metrics=["energy-pointing"], controls=["constant"],
            annotations=tmp_path / "boxes.csv",
        )  # fmt: skip
        values = {measurement.method: measurement.value for measurement in results.measurements}
        assert values["constant"] == pytest.approx((x1 - x0) * (y1 - y0) / 96**2, rel=0.1)
        heatmap = shapes.explain(scene.picture, target=Box(last.number)).heatmaps[0][0]
        box = slice(round(y0), round(y1)), slice(round(x0), round(x1))
        assert values["hirescam"] == pytest.approx(float(heatmap[box].sum() / heatmap.sum()), abs=0.01)
