"""Small random models for every provider and task, written to files in the formats that users have."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.adapters.test_yolo import build, configure

TASKS = ("classification", "detection", "segmentation", "text", "likeness", "caption", "keypoints")
# the names that --task takes
NAMES = {"text": "matching", "likeness": "matching", "caption": "captioning", "keypoints": "pose"}
SIZE = 64
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "a", "red", "green", "square")
SMALL_TRANSFORMER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPECIAL_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SPECIAL_TOKENS: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
OWN_MODELS = Path(__file__).with_name("own_models.py")


@dataclass(frozen=True)
class Model:
    """A model on the command line: its name, and the options that it needs."""

    name: str
    options: tuple[str, ...] = ()


def randomise(model: nn.Module, scale: float = 1.2) -> nn.Module:
    """Re-initialise all weights, so that outputs differ between places and between classes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=scale / parameter[0].numel() ** 0.5)
    return model.eval()


def save_state(model: nn.Module, folder: Path) -> tuple[str, ...]:
    torch.save(model.state_dict(), folder / "weights.pth")
    return "--weights", str(folder / "weights.pth")


def make_embedded(task: str, folder: Path) -> Model:
    return Model("efficientnet_lite0")


def make_torchvision(task: str, folder: Path) -> Model:
    import torchvision

    name = {
        "classification": "resnet18",
        "detection": "fasterrcnn_mobilenet_v3_large_320_fpn",
        "segmentation": "lraspp_mobilenet_v3_large",
        "keypoints": "keypointrcnn_resnet50_fpn",
    }[task]
    backbone = {} if task == "classification" else {"weights_backbone": None}
    torch.manual_seed(0)
    model: Any = torchvision.models.get_model(name, weights=None, num_classes=5, **backbone).eval()
    if hasattr(model, "roi_heads"):  # With random weights this large, noise images have detections.
        nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=0.3)
    size = ("--size", str(SIZE)) if task in ("classification", "segmentation") else ()
    threshold = ("--threshold", "0") if task == "detection" else ()
    return Model(name, (*save_state(model, folder), *size, *threshold))


def make_timm(task: str, folder: Path) -> Model:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=5)
    return Model("timm:resnet10t", (*save_state(model, folder), "--size", str(SIZE)))


def save_words(folder: Path) -> None:
    """Save a tokenizer for a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **SPECIAL_TOKENS).save_pretrained(folder)


def make_hugging_face(task: str, folder: Path) -> Model:
    import transformers as T

    size: dict[str, Any] = {"size": {"height": SIZE, "width": SIZE}}
    vision = SMALL_TRANSFORMER | {"image_size": SIZE, "patch_size": 8}
    text = SMALL_TRANSFORMER | {"vocab_size": len(WORDS), "max_position_embeddings": 16} | SPECIAL_TOKEN_IDS
    processor: Any = T.ViTImageProcessor(**size)
    options: tuple[str, ...] = ()
    if task == "classification":
        model: Any = T.ViTForImageClassification(T.ViTConfig(**vision, num_labels=5))
    elif task == "detection":
        model = T.YolosForObjectDetection(
            T.YolosConfig(**vision | {"image_size": [SIZE, SIZE]}, num_detection_tokens=6, num_labels=4)
        )
        processor = T.YolosImageProcessor(size={"shortest_edge": SIZE, "longest_edge": 2 * SIZE})
        options = "--threshold", "0"
    elif task == "segmentation":
        model = T.SegformerForSemanticSegmentation(
            T.SegformerConfig(
                num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
                strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=4,
            )
        )  # fmt: skip
        processor = T.SegformerImageProcessor(**size)
    elif task in ("text", "likeness"):
        model = T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
        save_words(folder)
    elif task == "caption":
        model = T.GitForCausalLM(T.GitConfig(vision_config=vision, **text))
        save_words(folder)
    else:
        backbone = T.VitPoseBackboneConfig(
            image_size=[SIZE, SIZE], patch_size=[8, 8], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            out_features=["stage2"],
        )  # fmt: skip
        model = T.VitPoseForPoseEstimation(T.VitPoseConfig(backbone_config=backbone, num_labels=3))
        processor = T.VitPoseImageProcessor(**size)
    randomise(model)
    if task == "caption":
        for name, parameter in model.git.image_encoder.named_parameters():
            parameter.data *= 0.1 if "out_proj" in name else 1  # Attention then mixes the patches less.
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Model(f"hf:{folder}", options)


def make_open_clip(task: str, folder: Path) -> Model:
    import open_clip

    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    vision = {"image_size": SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    settings = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / "small.json").write_text(json.dumps(settings))
    open_clip.add_model_config(folder)
    return Model("open_clip:small", save_state(randomise(open_clip.create_model("small")), folder))


def make_smp(task: str, folder: Path) -> Model:
    import segmentation_models_pytorch as library

    torch.manual_seed(0)
    model = library.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=3)
    model.save_pretrained(folder)
    return Model(f"smp:{folder}", ("--size", str(SIZE)))


def make_yolo(task: str, folder: Path) -> Model:
    from ultralytics.nn.tasks import ClassificationModel

    if task == "classification":
        settings = configure("Detect") | {"head": [[-1, 1, "Classify", ["nc"]]]}
        model: Any = randomise(ClassificationModel(settings, verbose=False))
    else:
        model = build({"detection": "Detect", "segmentation": "Segment", "keypoints": "Pose"}[task]).float()
    torch.save({"model": model, "train_args": {}}, folder / "best.pt")
    return Model(f"yolo:{folder / 'best.pt'}", ("--threshold", "0") if task == "detection" else ())


def make_own(task: str, folder: Path) -> Model:
    return Model(f"{OWN_MODELS}:make_{task}", ("--size", str(SIZE)))


Make = Callable[[str, Path], Model]
PROVIDERS: dict[str, tuple[Make, Sequence[str]]] = {
    "embedded": (make_embedded, ["classification"]),
    "torchvision": (make_torchvision, ["classification", "detection", "segmentation", "keypoints"]),
    "timm": (make_timm, ["classification"]),
    "hf": (make_hugging_face, TASKS),
    "open_clip": (make_open_clip, ["text", "likeness"]),
    "smp": (make_smp, ["segmentation"]),
    "yolo": (make_yolo, ["classification", "detection", "segmentation", "keypoints"]),
    "FILE.py": (make_own, TASKS),
}
PACKAGES = {
    "timm": "timm", "hf": "transformers", "open_clip": "open_clip", "smp": "segmentation_models_pytorch",
    "yolo": "ultralytics",
}  # fmt: skip


@functools.cache
def make_model(provider: str, task: str, root: Path) -> Model:
    """Make the provider's model for a task; without one, return its first model, which has to refuse the task."""
    make, tasks = PROVIDERS[provider]
    available_task = task if task in tasks else tasks[0]
    folder = root / f"{provider}-{available_task}"
    folder.mkdir(exist_ok=True)
    return make(available_task, folder) if task == available_task else make_model(provider, available_task, root)
