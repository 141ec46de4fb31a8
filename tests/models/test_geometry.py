"""Test where images lie in the output of image processors, with painted squares and against transformers' results."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.adapters.yolo import Letterbox
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError
from gradcam.images.read import crop
from gradcam.models.preprocess import find_canvas
from gradcam.models.providers.huggingface import make_preprocess
from gradcam.models.task_models import Detector, PoseFinder, Segmenter
from gradcam.targets import Box, Keypoint, Mask, MissedBox
from tests.adapters.test_huggingface_detection import GROUNDED, OF_CANVAS, QUERIED, TEXTS, by_transformers, lively
from tests.adapters.test_pose import make_vitpose, put_bells
from tests.adapters.test_segmentation import model_of

T = pytest.importorskip("transformers")

SIZES = ((120, 241), (200, 90), (150, 150))  # wide, tall, square
SQUARE, EDGES = {"height": 96, "width": 96}, {"shortest_edge": 60, "longest_edge": 96}
PAD = {"height": 128, "width": 160}
MASKED = [
    "Detr",
    "ConditionalDetr",
    "DeformableDetr",
    "GroundingDino",
    "RfDetr",
    "Mask2Former",
    "MaskFormer",
    "OneFormer",
]

# Image processors with the settings that pad, crop or keep the aspect ratio.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"size": EDGES}) for name in (*MASKED, "Yolos")},
    **{f"{name}, padded": (name, {"size": EDGES, "do_pad": True, "pad_size": PAD}) for name in (*MASKED, "Yolos")},
    **{name: (name, {"size": SQUARE}) for name in ("RTDetr", "OwlViT", "Owlv2", "Segformer", "SuperPoint", "Beit")},
    **{f"{name}, padded": (name, {"size": SQUARE, "do_pad": True, "pad_size": PAD}) for name in ("RTDetr", "ViT")},
    "Owlv2Pil": ("Owlv2Pil", {"size": SQUARE}),
    "Eomt": ("Eomt", {"size": {"shortest_edge": 96, "longest_edge": 96}, "do_pad": True}),
    "EomtPil": ("EomtPil", {"size": {"shortest_edge": 96, "longest_edge": 96}, "do_pad": True}),
    "DPT": ("DPT", {"size": SQUARE, "keep_aspect_ratio": True, "ensure_multiple_of": 16}),
    "DPT, padded": ("DPT", {"size": {"height": 90, "width": 90}, "do_pad": True, "size_divisor": 16}),
    "ZoeDepth": ("ZoeDepth", {"size": SQUARE}),  # The padding mirrors the image.
    "ZoeDepthPil": ("ZoeDepthPil", {"size": SQUARE}),
    "GLPN": ("GLPN", {}),
    "CHMv2": ("CHMv2", {}),
    "VitPose": ("VitPose", {"size": {"height": 64, "width": 48}}),
    "VitPosePil": ("VitPosePil", {"size": {"height": 64, "width": 48}}),
    # The crop is larger than the image.
    "MobileViT": ("MobileViT", {"size": {"shortest_edge": 64}, "crop_size": SQUARE}),
    "Bit, a large crop": ("Bit", {"do_resize": False, "crop_size": {"height": 160, "width": 160}}),
    "Levit": ("Levit", {}),
    "ConvNext": ("ConvNext", {"size": {"shortest_edge": 96}}),
    "CLIP": ("CLIP", {"size": {"shortest_edge": 96}, "crop_size": SQUARE}),
    "Llava": ("Llava", {"size": {"shortest_edge": 96}, "crop_size": SQUARE, "do_pad": True}),
    "Donut": ("Donut", {"size": SQUARE}),
    "Sam": ("Sam", {"size": {"longest_edge": 96}, "pad_size": SQUARE}),
    "BridgeTower": ("BridgeTower", {}),
    "Vilt": ("Vilt", {}),
    "Swin2SR": ("Swin2SR", {}),
    "Siglip2": ("Siglip2", {"patch_size": 8, "max_num_patches": 150}),  # rows of patches
    "Idefics2": ("Idefics2", {"size": EDGES}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_processor(name: str) -> Any:
    kind, settings = PROCESSORS[name]
    kind, backend = kind.removesuffix("Pil"), "Pil" if kind.endswith("Pil") else ""
    return getattr(T, f"{kind}ImageProcessor{backend}")(**settings)


def noise(size: tuple[int, int]) -> Any:
    return np.random.default_rng(0).integers(90, 140, (*size, 3), dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_painted_square_maps_back_to_its_place(name: str, size: tuple[int, int]) -> None:
    preprocess, notes = make_preprocess(make_processor(name))
    assert not any("known" in note for note in notes)
    y0, x0, height, width = preprocess.region(*size)
    row, column, side = y0 + height // 3, x0 + width // 3, min(height, width) // 4
    image = np.full((*size, 3), 100, np.uint8)
    unpainted = preprocess(image)
    image[row : row + side, column : column + side] = 200
    painted = (preprocess(image) - unpainted).mean(0).abs().double()
    profiles = [painted.sum(1), painted.sum(0)]
    centre = [float((profile * (torch.arange(len(profile)) + 0.5)).sum() / profile.sum()) for profile in profiles]
    window = preprocess.window(*size) or (0, 0, *painted.shape)
    y, x = (
        start + (place - first) * length / extent
        for place, start, length, first, extent in zip(centre, (y0, x0), (height, width), window[:2], window[2:])
    )
    assert (y, x) == pytest.approx((row + side / 2, column + side / 2), abs=1)
    assert 0 <= y0 < y0 + height <= size[0]
    assert 0 <= x0 < x0 + width <= size[1]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("Eomt", {"size": {"shortest_edge": 64, "longest_edge": None}, "do_split_image": True}, "into [23] crops"),
        ("LlavaNext", {}, "into [0-9] crops|does not depend|more than"),
        ("Mllama", {}, "does not depend on the image"),
        ("Nougat", {}, "more than resize"),  # It crops the margins of each image.
        ("Qwen2VL", {}, "rows of patches"),
        ("Pix2Struct", {}, "'pixel_values'"),
    ],
)
def test_steps_that_cannot_be_inverted_are_refused(kind: str, settings: Any, message: str) -> None:
    with pytest.raises(GradcamError, match=message) as refused:
        make_preprocess(getattr(T, f"{kind}ImageProcessor")(**settings))[0](noise((120, 241)))
    assert "\n" not in str(refused.value)
    assert f"{kind}ImageProcessor" in str(refused.value)


def test_a_square_image_of_a_processor_that_splits_wide_ones() -> None:
    size = {"shortest_edge": 64, "longest_edge": None}
    preprocess, _ = make_preprocess(T.EomtImageProcessor(size=size, do_split_image=True))
    assert preprocess(noise((150, 150))).shape == (3, 64, 64)
    assert preprocess.region(150, 150) == (0, 0, 150, 150)


def test_images_of_one_size_are_measured_once() -> None:
    preprocess, _ = make_preprocess(make_processor("Owlv2"))
    calls: list[Any] = []
    processor = preprocess.processor

    class Counting:
        def __call__(self, *args: Any, **options: Any) -> Any:
            calls.append(args)
            return processor(*args, **options)

        preprocess = processor.preprocess

    counted = replace(preprocess, processor=Counting())
    counted(noise((120, 241)))
    calls.clear()
    counted(noise((120, 241)))
    counted.region(120, 241)
    counted.window(120, 241)
    assert len(calls) == 1


BOXED = {
    "Detr": ("Detr", "Detr, padded"), "ConditionalDetr": ("ConditionalDetr, padded",), "Yolos": ("Yolos, padded",),
    "DeformableDetr": ("DeformableDetr, padded",), "RTDetr": ("RTDetr", "RTDetr, padded"), "OwlViT": ("OwlViT",),
    "Owlv2": ("Owlv2", "Owlv2Pil"), "GroundingDino": ("GroundingDino, padded",),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BOXED.items() for name in names])
def test_boxes_are_those_of_transformers(kind: str, name: str, size: tuple[int, int]) -> None:
    model, processor = copy.deepcopy(lively(kind)), make_processor(name)
    if kind.startswith("Owl"):
        processor.size = {"height": 64, "width": 64}
    texts = QUERIED if kind.startswith("Owl") else TEXTS if kind in GROUNDED else {}
    texts = {key: rows[: 3 if kind.startswith("Owl") else 1] for key, rows in texts.items()}
    preprocess, _ = make_preprocess(processor)
    detector = replace(gradcam.load_detector(model), preprocess=preprocess, inputs=texts)
    assert isinstance(detector, Detector)
    assert detector.family is not None
    detector.family.set_threshold(0.0)
    boxes = [instance.box for instance in detector.explain(noise(size), target=Box([0, 1, 2])).instances[0]]
    inputs = processor(to_pil(noise(size)), return_tensors="pt")
    mask = {} if kind == "Yolos" or "pixel_mask" not in inputs else {"pixel_mask": inputs["pixel_mask"]}
    pixels = inputs["pixel_values"].double()
    with torch.no_grad():
        output = model(pixel_values=pixels, **texts, **mask)
    expected = size
    if "padded" in name and (kind == "Yolos" or kind in OF_CANVAS):
        # Their boxes are fractions of the canvas, and transformers treats the canvas as the image.
        window = preprocess.window(*size)
        expected = tuple(side * total / content for side, total, content in zip(size, pixels.shape[2:], window[2:]))
    reference = by_transformers(kind, output, [expected], 0.0)[0]["boxes"][:3]
    assert_boxes(boxes, reference)


def to_pil(image: Any) -> Any:
    from PIL import Image

    return Image.fromarray(image)


def assert_boxes(boxes: Any, expected: Tensor) -> None:
    assert np.abs(np.array(boxes) - expected.numpy()).max() < 1


def grow(mask: Tensor, side: int) -> Tensor:
    return nn.functional.max_pool2d(mask[None].float(), side, 1, side // 2)[0] > 0


def blocks(size: tuple[int, int]) -> Any:
    small = np.random.default_rng(1).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return small.repeat(-(-size[0] // 4), 0).repeat(-(-size[1] // 4), 1)[: size[0], : size[1]].copy()


def run_transformers(model: Any, processor: Any, image: Any, **inputs: Any) -> tuple[Any, Tensor]:
    prepared = processor.preprocess(to_pil(image), return_tensors="pt")
    if "pixel_mask" in prepared and "pixel_mask" in inspect.signature(model.forward).parameters:
        inputs["pixel_mask"] = prepared["pixel_mask"]
    pixels = prepared["pixel_values"].double()
    with torch.no_grad():
        return model(pixel_values=pixels, **inputs), pixels


MASK_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "eomt": ("Eomt", {"size": {"shortest_edge": 64, "longest_edge": 64}, "do_pad": True}),
    "segformer": ("Segformer", {"size": SQUARE}),
    # These pad to multiples of 32 pixels.
    "mask2former": ("Mask2Former", {"size": EDGES}),
    "maskformer": ("MaskFormer", {"size": EDGES}),
    "oneformer": ("OneFormer", {"size": EDGES, "do_reduce_labels": False}),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MASK_PROCESSORS)
def test_masks_are_those_of_transformers(name: str, size: tuple[int, int]) -> None:
    """Compare up to network pixels, the resolution of the package's masks."""
    model: Any = copy.deepcopy(model_of(name))
    kind, settings = MASK_PROCESSORS[name]
    processor = getattr(T, f"{kind}ImageProcessor")(**settings)
    preprocess = make_preprocess(processor)[0]
    inputs = {"task_inputs": torch.arange(7)[None]} if name == "oneformer" else {}
    segmenter = replace(gradcam.load_segmenter(model), preprocess=preprocess, inputs=inputs)
    assert isinstance(segmenter, Segmenter)
    image = blocks(size)
    output, pixels = run_transformers(model, processor, image, **inputs)
    _, _, *lengths = preprocess.window(*size) or (0, 0, *pixels.shape[2:])
    # transformers treats the whole canvas as the image, so this is the size of the canvas in image pixels.
    canvas = [round(a * b / c) for a, b, c in zip(size, pixels.shape[2:], lengths)]
    labels = processor.post_process_semantic_segmentation(output, target_sizes=[tuple(canvas)])[0]
    labels = labels[: size[0], : size[1]]
    for index in labels.unique().tolist():
        instances = segmenter.explain(image, target=Mask(index)).instances
        assert instances is not None
        instance, expected = instances[0][0], labels == index
        assert instance.mask is not None
        assert instance.mask.shape == size
        reach = 2 * math.ceil(max(size) / 64) + 1
        inner, outer = (grow(expected == inside, reach) == inside for inside in (False, True))
        assert ((instance.mask & ~outer) | (~instance.mask & inner)).double().mean() < 0.002


@pytest.mark.parametrize("size", SIZES)
def test_keypoints_are_those_of_transformers(size: tuple[int, int]) -> None:
    pytest.importorskip("scipy")
    model, places = make_vitpose(), [(3, 5), (4, 6), (4, 7), (3, 6)]
    put_bells(model, places)
    height, width = model.config.backbone_config.image_size
    processor = T.VitPoseImageProcessor(size={"height": height, "width": width})
    preprocess, notes = make_preprocess(processor)
    assert len(notes) == 1
    assert "person's box" in notes[0]
    finder = replace(gradcam.load_model(model), preprocess=preprocess)
    assert isinstance(finder, PoseFinder)
    box = [0.0, 0.0, float(size[1]), float(size[0])]
    with torch.no_grad():
        output = model(processor(to_pil(noise(size)), boxes=[[box]], return_tensors="pt")["pixel_values"].double())
    expected = processor.post_process_pose_estimation(output, boxes=[[box]])[0][0]["keypoints"]
    points = [instance.point for instance in finder.explain(noise(size), target=Keypoint(all)).instances[0]]
    assert np.abs(np.array(points) - expected.numpy()).max() < 1


def activation_change(activations: Tensor) -> Tensor:
    return (activations - activations[:1]).norm(dim=1)


class Stack(nn.Module):
    """A classifier for any input size."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Conv2d(3, 8, 8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.grid(pixel_values).relu().mean((2, 3)))


@pytest.mark.parametrize("name", ["ViT, padded", "MobileViT", "Levit", "Donut"])
def test_a_classifiers_map_is_on_the_painted_area(name: str) -> None:
    torch.manual_seed(0)
    classifier = gradcam.load_classifier(Stack().eval(), size=96)
    classifier = replace(classifier, preprocess=make_preprocess(make_processor(name))[0])
    unpainted = noise((120, 241))
    painted = unpainted.copy()
    painted[70:100, 140:170] = 255, 0, 0
    change = gradcam.method("change", summary="distance of the activations from those of the first image")
    explanation = classifier.explain([unpainted, painted], "grid", method=change(activation_change), target=0)
    heat = explanation.heatmaps[1][0].double() ** 4
    y0, x0, height, width = explanation.regions[1]
    rows, columns = (torch.arange(length) + 0.5 for length in heat.shape)
    y = y0 + float((heat.sum(1) * rows).sum() / heat.sum()) * height / heat.shape[0]
    x = x0 + float((heat.sum(0) * columns).sum() / heat.sum()) * width / heat.shape[1]
    assert (y, x) == pytest.approx((85, 155), abs=15)
    if (window := classifier.preprocess.window(120, 241)) and name != "Levit":
        with pytest.raises(ImageError, match="pads images"):
            classifier.attribute(unpainted, "input-gradients", target=0)
        assert window != (0, 0, *classifier.prepare(unpainted).image.shape[1:])


PADDED = ("ViT, padded", "MobileViT", "Owlv2", "Detr, padded", "Donut")
BOX = (140, 70, 170, 100)  # the box around the painted area


def padded_classifier(name: str) -> Any:
    torch.manual_seed(0)
    classifier = gradcam.load_classifier(Stack().eval(), labels=["a", "b", "c"], size=96)
    return replace(classifier, preprocess=make_preprocess(make_processor(name))[0])


def find_red(model: Any, images: Tensor, classes: Any) -> Tensor:
    red = images.amax(1) - images.amin(1)  # The processor may return the channels in any order.
    return (red > red.amax((1, 2), keepdim=True) / 2).float()


def save_painted(folder: Path) -> Path:
    image = noise((120, 241))
    image[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 255, 0, 0
    to_pil(image).save(folder / "a.png")
    mask = np.zeros((120, 241), np.uint8)
    mask[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 1
    (folder / "masks").mkdir()
    to_pil(mask).save(folder / "masks" / "a.png")
    (folder / "boxes.csv").write_text(f"image,left,top,right,bottom\na.png,{','.join(map(str, BOX))}\n")
    return folder / "a.png"


@pytest.mark.parametrize("annotations", ["boxes.csv", "masks"])
@pytest.mark.parametrize("name", PADDED)
def test_annotations_of_a_padded_image_are_on_the_object(name: str, annotations: str, tmp_path: Path) -> None:
    image = save_painted(tmp_path)
    options: Any = {"metrics": ["energy-pointing"], "controls": [], "annotations": tmp_path / annotations}
    results = gradcam.evaluation.evaluate(padded_classifier(name), image, methods=[find_red], target="b", **options)
    (measurement,) = [measurement for measurement in results.measurements if measurement.metric == "energy-pointing"]
    assert measurement.value > 0.8  # Pixels on the border of the object reduce the value.


@pytest.mark.parametrize("name", PADDED)
def test_the_image_of_a_report_includes_the_padding(name: str) -> None:
    classifier = padded_classifier(name)
    image = noise((120, 241))
    image[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 255, 0, 0
    prepared = classifier.prepare(image)
    canvas = crop(image, find_canvas(classifier.preprocess, prepared))
    red = torch.from_numpy((canvas == (255, 0, 0)).all(2)).double()[None, None]
    expected = find_red(None, prepared.image[None].double(), None)
    mask = nn.functional.interpolate(red, expected.shape[1:], mode="area")[0] > 0.5
    assert (mask != (expected > 0)).sum() <= 0.5 * expected.sum()
    assert (mask & (expected > 0)).sum() > 0.7 * expected.sum()


def test_a_missed_box_beside_padding() -> None:
    """The lower edge of a wide image is in the middle of the canvas."""
    detector = replace(gradcam.load_detector(copy.deepcopy(lively("Detr"))), preprocess=Letterbox(64))
    box = (10.0, 62.0, 190.0, 98.0)
    explained = detector.explain(noise((100, 200)), target=MissedBox(box))
    assert explained.instances is not None
    assert explained.instances[0][0].box == pytest.approx(box, abs=1e-3)
    with pytest.raises(TargetError, match="outside"):
        detector.explain(noise((100, 200)), target=MissedBox((150, 120, 190, 130)))


def test_a_mask_of_a_padded_image_comes_back() -> None:
    size = SIZES[0]
    model = copy.deepcopy(model_of("eomt"))
    processor = T.EomtImageProcessor(size={"shortest_edge": 64, "longest_edge": 64}, do_pad=True)
    segmenter = replace(gradcam.load_segmenter(model), preprocess=make_preprocess(processor)[0])
    mask = np.zeros(size, bool)
    mask[60:100, 150:200] = True
    explained = segmenter.explain(noise(size), target=Mask(1, mask)).instances
    assert explained is not None
    assert explained[0][0].mask is not None
    difference = explained[0][0].mask.numpy() != mask
    assert difference.sum() < 2 * 90 * 4  # A pixel of the canvas is 3.8 pixels of the image.


def save(folder: Path, model: Any, processor: Any) -> str:
    model.float().save_pretrained(folder)
    processor.save_pretrained(folder)
    return f"hf:{folder}"


def make_depth(kind: str) -> tuple[Any, Any]:
    small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    head = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
    if kind == "DPT":
        sizes = {"intermediate_size": 64, "image_size": 96, "patch_size": 16, "backbone_out_indices": [0, 1, 2, 3]}
        config = T.DPTConfig(**small, **head, **sizes)
        settings: Any = {"size": {"height": 90, "width": 90}, "do_pad": True, "size_divisor": 16}
        return T.DPTForDepthEstimation(config), T.DPTImageProcessor(**settings)
    out = {"out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    backbone = T.Dinov2Config(**small, **out, image_size=56, patch_size=14, apply_layernorm=True)
    config = T.DepthAnythingConfig(backbone_config=backbone, **head, reassemble_hidden_size=32, patch_size=14)
    settings = {"size": {"height": 56, "width": 56}, "keep_aspect_ratio": True, "ensure_multiple_of": 14}
    return T.DepthAnythingForDepthEstimation(config), T.DPTImageProcessor(**settings)


@pytest.mark.parametrize(("kind", "encoder"), [("DPT", "dpt"), ("DepthAnything", "backbone")])
def test_depth_from_a_folder_takes_a_function(kind: str, encoder: str, tmp_path: Path) -> None:
    layer = f"{encoder}.encoder.layer.0"
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    loaded = gradcam.load_model(save(tmp_path, *make_depth(kind)), device="cpu")
    explained = loaded.explain(noise((120, 241)), layer, target=lambda output: output.predicted_depth.mean((1, 2)))
    assert explained.regions == [(0, 0, 120, 241)]
    assert explained.heatmaps.shape[2:] == tuple(round(item) for item in loaded.preprocess.window(120, 241)[2:])
    with pytest.raises(TargetError, match=f"{kind}ForDepthEstimation returns a depth.*--target"):
        loaded.explain(noise((120, 241)), layer)


def test_patches_of_siglip_from_a_folder(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = small | {"vocab_size": 30, "max_position_embeddings": 16, "projection_size": 32}
    vision = small | {"num_patches": 64, "patch_size": 8}
    model = T.Siglip2Model(T.Siglip2Config(text_config=text, vision_config=vision))
    processor = T.Siglip2ImageProcessor(patch_size=8, max_num_patches=64)
    matcher = gradcam.load_model(save(tmp_path, model, processor), device="cpu")
    image, other_image = noise((120, 241)), noise((241, 120))
    explanation = matcher.explain(image, target=gradcam.targets.Like(image))
    assert explanation.regions == [(0, 0, 120, 241)]
    with torch.no_grad():
        inputs = [processor(to_pil(item), return_tensors="pt") for item in (image, other_image)]
        expected = [matcher.model.get_image_features(**item) for item in inputs]
        cosine = torch.cosine_similarity(*(getattr(item, "pooler_output", item) for item in expected)).item()
    score = matcher.explain(image, target=gradcam.targets.Like(other_image)).scores.item()
    assert score == pytest.approx(cosine, abs=1e-4)


def test_a_processor_that_fails_is_refused() -> None:
    with pytest.raises(ModelError, match="fails on an image"):
        make_preprocess(T.DetrImageProcessor(size=EDGES, do_pad=True, pad_size={"height": 8, "width": 8}))
