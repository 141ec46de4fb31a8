"""Fixtures with the files that pages name: images, models with random weights, and a user's own files."""

import importlib.util
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from tests.adapters.test_yolo import build
from tests.docs.labelled import make_labelled
from tests.docs.pages import ROOT

MINE = """
import gradcam


@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)


@gradcam.evaluation.metric("mymetric", summary="mean of the heatmap", better="lower")
def mymetric(subject, heatmaps):
    return heatmaps.flatten(1).mean(1)


def score(output):
    return output[:, 967] - output[:, 968]


def segmenter():  # 1 is what is bright
    from torch import nn

    network = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for layer, weight, bias in ((network[0], 1 / 192, 1.0), (network[2], 0.25, 0.0)):
        nn.init.constant_(layer.weight, weight)
        nn.init.constant_(layer.bias, bias)
    network[2].weight.data[0] = 0
    network[2].bias.data[0] = 1
    return network


def network():
    import torch, torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=3)


def quantised():
    model = network()
    for weight in model.parameters():
        step = weight.data.abs().max().clamp(min=1e-12) / 127
        weight.data = (weight.data / step).round() * step
    return model
"""
TRAIN = """
from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
"""
HEAD = """
import torchvision
from torch import nn


def build():
    model = torchvision.models.resnet18(weights=None)
    model.fc = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 3))
    return model
"""


def make_readers(folder: Path) -> None:
    """Write a small CLIP and a small captioner with random weights, with a tokenizer of a few words each."""
    import tokenizers
    import transformers as library

    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "a", "an", "the", "cat", "dog", "cup", "of", "on", "sofa", "coffee"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("[BOS]", 1), ("[EOS]", 2)]
    inner.post_processor = tokenizers.processors.TemplateProcessing("[BOS] $A [EOS]", None, ends)
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=12, **names)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ends = {"vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    picture = {**small, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    text = {**small, **ends, "max_position_embeddings": 12}
    clip = library.CLIPModel(library.CLIPConfig(text_config=text, vision_config=picture, projection_dim=12))
    git = library.GitForCausalLM(
        library.GitConfig(vision_config=picture, **small, **{**ends, "eos_token_id": 13}, max_position_embeddings=16)
    )
    git.generation_config.max_new_tokens = 4
    for name, model in (("my-clip", clip), ("my-captioner", git)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        library.CLIPImageProcessor(**sizes).save_pretrained(folder / name)
    from tests.adapters.vlm_folders import save_folder

    save_folder("qwen2_vl", folder).rename(folder / "my-vlm")


def make_yolo(folder: Path) -> None:
    """Write a small detector and a small segmentation model of ultralytics with random weights, if it is installed."""
    if importlib.util.find_spec("ultralytics") is None:
        return
    for head, task, name in (("Detect", "detect", "best.pt"), ("Segment", "segment", "segment.pt")):
        model = build(head).float()
        model.names = dict(enumerate(["person", "dog", "cup", "car"]))
        model.args, model.task = {}, task
        torch.save({"model": model, "train_args": {}}, folder / name)


@pytest.fixture(scope="session")
def page_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that the pages name, once: random weights of five kinds of checkpoints, images, a shard, code."""
    import segmentation_models_pytorch as smp
    import timm
    from safetensors.torch import save_file
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    folder, assets = tmp_path_factory.mktemp("made"), ROOT / "assets"
    (folder / "torch/hub/checkpoints").mkdir(parents=True)
    file = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(torchvision.models.resnet18().state_dict(), folder / "torch/hub/checkpoints" / file)
    detector_file = torchvision.models.detection.SSDLite320_MobileNet_V3_Large_Weights.DEFAULT.url.rpartition("/")[2]
    detector = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    torch.save(detector.state_dict(), folder / "torch/hub/checkpoints" / detector_file)
    Image.fromarray(np.pad(np.full((100, 100), 255, np.uint8), ((100, 200), (200, 300)))).save(folder / "mask.png")
    save_file(timm.create_model("resnet18").state_dict(), folder / "timm.safetensors")
    names = {0: "nothing", 1: "coffee", 2: "tea"}
    config = ViTConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, id2label=names)
    ViTForImageClassification(config).save_pretrained(folder / "my-vit")
    ViTImageProcessor().save_pretrained(folder / "my-vit")
    make_readers(folder)
    make_yolo(folder)
    chest = torchvision.models.densenet121(num_classes=14).state_dict()
    state = {f"module.{name}": item for name, item in chest.items()}
    torch.save({"state_dict": state, "epoch": 3}, folder / "chest.ckpt")
    (folder / "findings.txt").write_text("\n".join(f"finding {number}" for number in range(14)))
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), folder / "best.pth")
    (folder / "labels.txt").write_text("nothing\ncoffee\ntea\n")
    (folder / "train.py").write_text(TRAIN)
    (folder / "mine.py").write_text(MINE)
    network: dict = {}
    exec(TRAIN, network)
    torch.save(network["build"]().state_dict(), folder / "last.pth")
    (folder / "head.py").write_text(HEAD)
    exec(HEAD, network)
    torch.save(network["build"]().state_dict(), folder / "two_layer.pth")
    smp.Unet("resnet18", encoder_weights=None, classes=3).save_pretrained(folder / "my-unet")
    Image.fromarray(np.random.default_rng(0).integers(100, 4000, (80, 100), dtype=np.uint16)).save(folder / "scan.png")
    folders = {
        "photos": ("coffee.jpg", "rocket.jpg"),
        "more": ("camera.png",),
        "testset": ("astronaut.jpg", "chelsea.jpg", "china.jpg", "coffee.jpg", "flower.jpg", "rocket.jpg"),
    }
    for subfolder, pictures in folders.items():
        (folder / subfolder).mkdir()
        for name in pictures:
            shutil.copy(assets / name, folder / subfolder)
    (folder / "chosen.csv").write_text("path,class\nphotos/coffee.jpg,cup\nmore/camera.png,\n")
    for number, name in enumerate(("coffee.jpg", "rocket.jpg")):
        with tarfile.open(folder / f"photos-{number:06}.tar", "w") as tar:
            tar.add(assets / name, name)
    make_labelled(folder / "labelled")
    shutil.copytree(assets, folder / "assets")
    shutil.copy(assets / "coffee.jpg", folder / "photo.jpg")
    shutil.copy(assets / "camera.png", folder / "other.png")
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), folder / "before.pth")
    return folder


@pytest.fixture
def workspace(page_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the page files to a temporary folder and make it the current one. Big files are links."""
    shutil.copytree(page_files, tmp_path / "desk", copy_function=_link_or_copy)
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("TORCH_HOME", str(page_files / "torch"))
    monkeypatch.syspath_prepend(str(tmp_path / "desk"))
    return tmp_path / "desk"


def _link_or_copy(source: str, target: str) -> None:
    if Path(source).stat().st_size > 1_000_000:
        Path(target).symlink_to(source)
    else:
        shutil.copy(source, target)
