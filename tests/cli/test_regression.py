"""Test every command with a network that has one output value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import Command, Photo, folder, gradcam_command, small

__all__ = ["folder", "gradcam_command", "small"]  # fixtures

CODE = """
import torch
from torch import nn

def value(bias=61.0, outputs=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs))
    nn.init.constant_(model[4].bias, bias)
    return model

def share():
    return value(0.3)

def negative():
    return value(-0.25)

def several():
    return value(9.6, 3)

def probabilities():
    return nn.Sequential(value(0.0, 3), nn.Softmax(1))
"""
PREPROCESSING = ["--size", "32", "--crop", "1", "--mean", "0,0,0", "--std", "1,1,1"]


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(CODE)
    return f"{tmp_path}/net.py"


def options(net: str, name: str) -> list[str]:
    return ["--model", f"{net}:{name}", "--task", "regression", "--device", "cpu", *PREPROCESSING]


RANGES = {"value": (60, 62), "share": (0, 1), "negative": (-1, 0)}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.usefixtures("folder")
def test_run_prints_the_value_and_explains_it(gradcam_command: Command, small: Photo, net: str, name: str) -> None:
    outcome = gradcam_command("run", small("coffee.jpg"), *options(net, name))
    assert outcome.status == 0, outcome.err
    (row,) = [line.split() for line in outcome.out.splitlines() if line.strip().startswith("output   0")]
    assert row[:2] == ["output", "0"]
    assert len(row) == 3  # A regression has no percentage and no bar.
    assert RANGES[name][0] < float(row[2]) < RANGES[name][1]
    assert "binary logit" not in outcome.err
    record = json.loads(gradcam_command("run", small("coffee.jpg"), *options(net, name), "--json").out)
    (prediction,), (entry,) = record["predictions"], record["explained"]
    assert (prediction["index"], prediction["label"], entry["label"]) == (0, "output", "output")
    assert prediction["probability"] == pytest.approx(entry["score"])
    assert entry["score"] == pytest.approx(float(row[2]), rel=1e-3)


def test_activation_none_means_the_same(gradcam_command: Command, small: Photo, folder: Path, net: str) -> None:
    image, plain = small("coffee.jpg"), ["--model", f"{net}:negative", "--device", "cpu", *PREPROCESSING, "--json"]
    outcomes = [
        gradcam_command("run", image, *plain, *more) for more in (["--task", "regression"], ["--activation", "none"])
    ]
    assert outcomes[0].out == outcomes[1].out
    assert "--task regression" in gradcam_command("run", image, *plain).err


@pytest.mark.parametrize("command", ["compare", "page", "batch", "report"])
def test_commands_that_draw(gradcam_command: Command, small: Photo, folder: Path, net: str, command: str) -> None:
    image, name = small("coffee.jpg"), "batch" if command == "report" else command
    destination = "page.html" if command == "page" else "results"
    outcome = gradcam_command(name, image, *options(net, "value"), "-o", destination)
    assert outcome.status == 0, outcome.err
    if command == "page":
        assert 'activation=\\"none\\"' in Path(destination).read_text()
    if command == "compare":
        assert "output   0   6" in outcome.out
    if command == "batch":
        (record,) = map(json.loads, Path(destination, "manifest.jsonl").read_text().splitlines())
        assert record["explained"][0]["label"] == "output"
        resumed = gradcam_command(name, image, *options(net, "value"), "-o", destination, "--resume")
        assert resumed.status == 0, resumed.err
        binary = [*options(net, "value"), "-o", destination, "--resume"]
        binary[binary.index("regression")] = "classification"
        assert gradcam_command(name, image, *binary).status == 2
    if command == "report":
        assert gradcam_command("report", destination).status == 0


@pytest.mark.parametrize("command", ["check", "evaluate"])
def test_commands_that_evaluate_by_probabilities_refuse(
    gradcam_command: Command, small: Photo, folder: Path, net: str, command: str
) -> None:
    outcome = gradcam_command(command, small("coffee.jpg"), *options(net, "value"))
    assert outcome.status in (1, 2)
    (line,) = [line for line in outcome.err.splitlines() if "output is a single value" in line]
    assert "--activation sigmoid" in line


@pytest.mark.parametrize("command", ["check", "evaluate", "recommend"])
def test_commands_that_evaluate_refuse_several_values(
    gradcam_command: Command, small: Photo, folder: Path, net: str, command: str
) -> None:
    images, arguments = small("coffee.jpg"), options(net, "several")
    if command == "recommend":
        arguments[2:4] = ["--activation", "none"]
    outcome = gradcam_command(command, images, *arguments)
    assert outcome.status in (1, 2)
    (line,) = [line for line in outcome.err.splitlines() if "but evaluation needs probabilities" in line]
    assert "The model's output contains 9." in line
    assert "%" not in outcome.out


@pytest.mark.parametrize("command", ["check", "evaluate"])
def test_several_probabilities_are_evaluated(
    gradcam_command: Command, small: Photo, folder: Path, net: str, command: str
) -> None:
    outcome = gradcam_command(command, small("coffee.jpg"), *options(net, "probabilities"))
    assert "evaluation needs probabilities" not in outcome.err
    assert "%" in outcome.out if command == "check" else outcome.status == 0
