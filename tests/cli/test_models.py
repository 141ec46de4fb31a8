"""Test `gradcam models`, and `--model` with its options in `run` and `compare`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

import gradcam
from gradcam.models.providers import torchvision as provider
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command, pixels, records, run, small

__all__ = ["folder", "gradcam_command", "run", "small"]  # fixtures

NETWORK = """
import torch
from torch import nn

print("a word from the model's file")

class Loud(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, classes)

    def forward(self, images):
        print("a word from the model")
        return self.head(self.features(images).mean((2, 3)))

def make():
    return Loud(3, 3)

def one():
    return Loud(3, 1)

def nan():
    model = Loud(3, 3)
    nn.init.constant_(model.head.bias, float("nan"))
    return model

def boom():
    raise KeyError("no such thing")
"""
PREPROCESSING = ("--size", "64", "--crop", "1", "--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25")


@pytest.fixture
def workspace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of the command, with a file of model factories and a file of labels."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("net", "reading"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "net.py").write_text(NETWORK)
    (folder / "labels.txt").write_text("ant\nbee\ncow\n")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the checkpoint folder of torch.hub."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


def load(workspace: Path, **options: Any) -> gradcam.Classifier:
    return gradcam.load_classifier(
        f"{workspace / 'net.py'}:make", size=64, crop=1, mean=(0.5,) * 3, std=(0.25,) * 3, device="cpu", **options
    )


@pytest.mark.parametrize("name", ["net.py:make", "net:make"])
def test_a_model_of_ones_own_is_explained(run: Command, workspace: Path, small: Photo, name: str) -> None:
    path = small("koala.webp")
    outcome = run(path, "--model", name, "--labels", "labels.txt", *PREPROCESSING, "--json", "-c", "cow")
    assert outcome.status == 0
    (record,) = records(outcome)
    assert record["model"] == name
    expected = load(workspace, labels=["ant", "bee", "cow"]).explain(path, target="cow")
    probabilities = {entry["label"]: entry["probability"] for entry in record["predictions"]}
    for label, probability in zip(("ant", "bee", "cow"), expected.probabilities()[0].tolist()):
        assert probabilities[label] == pytest.approx(probability, abs=1e-6)
    assert (pixels(next(workspace.glob("koala-gradcam-*_make.png"))) == expected.overlay()).all()


def test_what_was_assumed_is_said_once_and_beside_the_records(run: Command, workspace: Path, small: Photo) -> None:
    arguments = (small("koala.webp"), small("panda.webp"), "--model", "net.py:make")
    outcome = run(*arguments, "--json")
    assert len(records(outcome)) == 2
    assert outcome.err.count("Note: Assumed a size of 224, a crop of 0.875, ImageNet's mean and std") == 1
    assert outcome.err.count("--activation sigmoid") == 1
    assert "a word from the model" in outcome.err
    quiet = run(*arguments, "--quiet")
    assert (quiet.status, quiet.out) == (0, "")
    assert "Note" not in quiet.err


def test_classes_without_names_have_their_numbers(run: Command, workspace: Path, small: Photo) -> None:
    outcome = run(small("koala.webp"), "--model", "net.py:make", *PREPROCESSING, "--top-k", "2")
    assert outcome.status == 0
    assert "class 1 " in outcome.out
    assert len([name for name in files(workspace) if name.startswith("koala-gradcam-")]) == 2
    assert run(small("koala.webp"), "--model", "net.py:make", "-c", "ant").status == 2


@pytest.mark.parametrize(("class_name", "sign"), [("1", 1), ("0", -1), ("crack", 1), ("not crack", -1)])
def test_evidence_for_a_single_logit(run: Command, workspace: Path, small: Photo, class_name: str, sign: int) -> None:
    (workspace / "labels.txt").write_text("crack\n")
    outcome = run(
        small("koala.webp"), "-m", "net.py:one", "--labels", "labels.txt", *PREPROCESSING, "-c", class_name, "--json"
    )
    (entry,) = records(outcome)[0]["explained"]
    probability = {record["index"]: record["probability"] for record in records(outcome)[0]["predictions"]}
    assert entry["label"] == ("crack" if sign > 0 else "not crack")
    assert probability[1] == pytest.approx(torch.tensor(sign * entry["score"]).sigmoid().item(), abs=1e-5)
    assert probability[0] + probability[1] == pytest.approx(1, abs=1e-6)


def test_each_class_for_itself(run: Command, workspace: Path, small: Photo) -> None:
    path = small("koala.webp")
    outcome = run(path, "-m", "net.py:make", *PREPROCESSING, "--activation", "sigmoid", "--json")
    logits = load(workspace).explain(path).output[0]
    for entry in records(outcome)[0]["predictions"]:
        assert entry["probability"] == pytest.approx(logits[entry["index"]].sigmoid().item(), abs=1e-5)
    assert outcome.err.count("Note") == 0


def test_a_reader_of_ones_own(run: Command, workspace: Path, small: Photo) -> None:
    (workspace / "reading.py").write_text(
        "import gradcam\nfrom gradcam.models.preprocess import Reading\n"
        "def dark(path):\n    pixels = gradcam.read_image(path)\n    return Reading(pixels * 0, pixels)\n"
    )
    path = small("koala.webp")
    outcome = run(path, "-m", "net.py:make", *PREPROCESSING, "--reader", "reading:dark", "--json")
    black = load(workspace).model(torch.full((1, 3, 64, 64), -2.0)).softmax(1)[0]
    for entry in records(outcome)[0]["predictions"]:
        assert entry["probability"] == pytest.approx(black[entry["index"]].item(), abs=1e-5)


def test_models_of_ones_own_are_compared(gradcam_command: Command, workspace: Path, small: Photo) -> None:
    path = small("koala.webp")
    outcome = gradcam_command(
        "compare", path, "--device", "cpu", "-m", "net.py:make", *PREPROCESSING, "--method", "gradcam"
    )
    assert outcome.status == 0
    explanations = load(workspace).compare(path, layers=["features"], methods=["gradcam"])
    assert (pixels(workspace / "koala-compare-net.py_make.png") == gradcam.panel(explanations)).all()


def test_a_torchvision_model_with_weights_from_a_file(run: Command, workspace: Path, small: Photo, hub: Path) -> None:
    model = models.mobilenet_v3_small(num_classes=3)
    nn.init.constant_(model.classifier[3].bias[1:2], 50.0)
    torch.save({"state_dict": {f"model.{name}": value for name, value in model.state_dict().items()}}, "own.ckpt")
    outcome = run(
        small("koala.webp"), "-m", "mobilenet_v3_small", "--weights", "own.ckpt", "--labels", "labels.txt", "--json"
    )
    assert outcome.status == 0
    assert records(outcome)[0]["predictions"][0]["label"] == "bee"
    assert "'model.'" in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-m", "net.py:boom"], "Error: net.py:boom raised KeyError: 'no such thing' ("),
        (["-m", "net.py:mak"], "Error: There is no 'mak' in net.py. Nearest: 'make'."),
        (["-m", "nothing:make"], "Error: There is no model 'nothing:make'. "),
        (["-m", "nothing.py:make"], "Error: nothing.py: does not exist, expected a Python file."),
        (["-m", "net.py:make", "--mean", "a,b"], "'--mean': 'a,b' is neither a number nor a list"),
        (["-m", "net.py:make", "--mean", "0.5"], "Error: mean has 1 value(s) and std has 3"),
        (["-m", "net.py:make", "--crop", "0"], "'--crop': 0 is out of range: expected a number above 0"),
        (["-m", "net.py:make", "--activation", "relu"], "'--activation': 'relu' is not one of"),
        (["-m", "net.py:make", "--labels", "none.txt"], "'none.txt' does not exist"),
        (["-m", "net.py:one", "--labels", "labels.txt"], "labels.txt has 3 labels, but the model has a single logit"),
        (["-m", "net.py:make", "--reader", "net:none"], "Error: There is no 'none' in net."),
        (["-m", "net.py:make", "-l", "featurs"], "Nearest: 'features'"),
        (["-m", "resnet18", "--weights", "labels.txt"], "labels.txt: is a text file"),
    ],
)
def test_wrong_model_options(run: Command, workspace: Path, small: Photo, options: list[str], message: str) -> None:
    before = files(workspace)
    outcome = run(small("koala.webp"), *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert [name for name in files(workspace) if "__pycache__" not in name] == before


def test_an_output_of_nan_is_an_error_of_the_picture(run: Command, workspace: Path, small: Photo) -> None:
    outcome = run(small("koala.webp"), "-m", "net.py:nan", "--json")
    assert outcome.status == 1
    assert "NaN" in records(outcome)[0]["error"]


# gradcam models


@pytest.fixture
def listed(gradcam_command: Command, hub: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that parses the output of `gradcam models --json`."""
    return lambda *arguments: records(gradcam_command("models", "--json", *arguments))


def test_models_are_listed_with_the_files_that_are_here(listed: Callable[..., list[dict[str, Any]]], hub: Path) -> None:
    weights_path = provider.find_cache_path(models.ResNet50_Weights.IMAGENET1K_V1)
    weights_path.parent.mkdir(parents=True)
    weights_path.touch()
    entries = {entry["name"]: entry for entry in listed()}
    names = list(entries)
    assert names[0] == "efficientnet_lite0"
    places = (models, models.detection, models.segmentation)
    assert names[1:-7] == [name for place in places for name in models.list_models(module=place)]
    of_packages = ["open_clip:NAME", "smp:FOLDER", "yolo:FILE.pt", "timm:NAME", "hf:NAME"]
    assert names[-7:] == [*of_packages, "FILE.py:FUNCTION", "MODULE:FUNCTION"]
    assert [entries[name]["task"] for name in ("resnet50", "ssd300_vgg16", "fcn_resnet50", "hf:NAME")] == [
        "classification", "detection", "segmentation", None
    ]  # fmt: skip
    assert entries["resnet50"]["weights"] == {"IMAGENET1K_V2": False, "IMAGENET1K_V1": True}
    assert list(entries["vgg16"]["weights"]) == ["IMAGENET1K_V1"]  # Its other weights have no classifier head.
    assert all(entry["weights"] or entry["summary"] for entry in entries.values())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("resnet1", ["resnet101", "resnet152", "resnet18", "wide_resnet101_2", "deeplabv3_resnet101", "fcn_resnet101"]),
        ("VIT_*32", ["vit_b_32", "vit_l_32"]),
        ("hf:", ["hf:NAME"]),
        ("efficientnet_lite0", ["efficientnet_lite0"]),
    ],
)
def test_a_pattern_chooses_models(listed: Callable[..., list[dict[str, Any]]], pattern: str, names: list[str]) -> None:
    assert [entry["name"] for entry in listed(pattern)] == names


def test_models_are_listed_for_people(gradcam_command: Command, hub: Path) -> None:
    path = provider.find_cache_path(models.ResNet50_Weights.IMAGENET1K_V1)
    path.parent.mkdir(parents=True)
    path.touch()
    outcome = gradcam_command("models", "*resnet50_[2f]*")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert "wide_resnet50_2             torchvision: IMAGENET1K_V2, IMAGENET1K_V1" in lines
    assert "fasterrcnn_resnet50_fpn     torchvision, detection: COCO_V1" in lines
    outcome = gradcam_command("models", "resnet50")
    assert re.search(r"^resnet50 +torchvision: IMAGENET1K_V2, IMAGENET1K_V1 \(downloaded\)$", outcome.out, re.M)


def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest(gradcam_command: Command, hub: Path) -> None:
    outcome = gradcam_command("models", "resnet51")
    assert outcome.status == 2
    assert outcome.err.startswith("Error: There is no model whose name contains 'resnet51'. Nearest: 'resnet50'")
