"""Test `gradcam inspect trace`: its list, its table on a terminal, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torchvision import models

from gradcam.cli.inspect.trace import format_number, format_trace
from gradcam.inspection.tracing import trace
from tests.cli.test_cli import Command, Outcome, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TRACED_MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d({channels}, 4, 3, stride=2)
        self.act = nn.ReLU(inplace=True)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.twin = self.one
        self.other.weight = self.one.weight
        self.unused = nn.Linear(1, 1)

    def forward(self, images):
        x = self.act(self.conv(images)).mean((2, 3))
        {line}
        return self.other(self.act(self.twin(self.one(x))))

def build():
    return Own()
"""


@pytest.fixture
def run(gradcam_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `gradcam inspect trace` in the folder of the test, 120 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *arguments: gradcam_command("inspect", "trace", *arguments)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were asked for")

    for place in ("torch.hub.load_state_dict_from_url", "torch.load", "safetensors.torch.load_file"):
        monkeypatch.setattr(place, fail)


def write_model(folder: Path, *, channels: int = 3, line: str = "pass") -> str:
    (folder / "own.py").write_text(TRACED_MODEL.format(channels=channels, line=line))
    return "own.py:build"


def records(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def table(outcome: Outcome) -> list[list[str]]:
    lines = outcome.out.splitlines()
    start = lines.index("") + 1
    return [cells(line) for line in lines[start : lines.index("", start)] if line]


@pytest.mark.usefixtures("no_weights")
def test_the_table_of_resnet18(run: Command) -> None:
    outcome = run("-m", "resnet18", "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "resnet18 on cpu   1 x 3 x 224 x 224   noise, random weights"
    assert lines[1].startswith("11,689,512 parameters   1.81 G multiply-adds   20.7 MB of activations   ")
    title, *rows = table(outcome)
    assert title == ["layer", "type", "input", "output", "parameters", "mult-adds", "memory", "ms", "share"]
    expected = ["conv1", "Conv2d", "3 x 224 x 224", "64 x 112 x 112", "9.41 k", "118 M", "3.21 MB"]
    assert rows[0][:7] == expected
    assert rows[2][:7] == ["relu", "ReLU", "64 x 112 x 112", "64 x 112 x 112", "-", "-", "-"]
    assert rows[-1][:7] == ["fc", "Linear", "512", "1000", "513 k", "512 k", "4.00 kB"]
    assert [row[0] for row in rows][4:8] == ["layer1", "layer1.0", "layer1.1", "layer2"]
    assert lines[-1] == "18 of 75 calls are listed. Use --depth N, --all or --layer PATTERN for more."


def test_times_and_shares_are_of_the_whole_pass() -> None:
    full = trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU()), torch.ones(2, 3), rounds=0)
    seconds = (2.0, 1.0, 0.0501, 0.00123)
    timed = replace(full, calls=tuple(replace(call, seconds=item) for call, item in zip(full.calls, seconds)))
    text = click.unstyle(format_trace(timed, timed.calls, "a name", "noise", 120))
    lines = text.splitlines()
    assert lines[:2] == [
        "a name on cpu   2 x 3   noise",
        "0 parameters   0 multiply-adds   72 B of activations   2000.0 ms",
    ]
    assert [cells(line)[-2:] for line in lines[3:]] == [
        ["ms", "share"], ["1000", "50 %"], ["50.1", "3 %"], ["1.23", "0 %"]
    ]  # fmt: skip


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_table_is_as_wide_as_the_terminal_at_most(run: Command, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("-m", "resnet18", "--device", "cpu").out.splitlines()
    assert all(len(line) <= width for line in lines[3 : lines.index("", 3)])
    title = lines[3].split()
    assert title[0] == "layer"
    assert {"output", "mult-adds", "ms"} <= set(title)
    hidden_columns = [name for name in ("input", "share", "memory", "type", "parameters") if name not in title]
    spared = {60: 4, 80: 3, 100: 1, 120: 0}[width]
    assert hidden_columns == ["input", "share", "memory", "type"][:spared]
    note = f"Hidden columns: {', '.join(hidden_columns)}. Widen the terminal, or use --json."
    assert (lines[-1] == note) == bool(hidden_columns)


@pytest.mark.usefixtures("no_weights")
def test_json_has_every_call_and_nothing_else(run: Command) -> None:
    rows = records(run("-m", "resnet18", "--json", "--device", "cpu"))
    assert len(rows) == 76
    assert {(item["schema"], item["model"], item["device"]) for item in rows} == {(1, "resnet18", "cpu")}
    assert [item["name"] for item in rows if item["type"] == "Conv2d"][:3] == [
        "conv1",
        "layer1.0.conv1",
        "layer1.0.conv2",
    ]
    assert rows[0]["multiply_adds"] == 1814073344
    assert (
        rows[1].items()
        >= {
            "name": "conv1",
            "depth": 1,
            "inputs": [[1, 3, 224, 224]],
            "outputs": [[1, 64, 112, 112]],
            "dtypes": ["float32"],
            "parameters": 9408,
            "multiply_adds": 118013952,
            "activation_bytes": 4 * 64 * 112 * 112,
            "run": 1,
            "runs": 1,
            "other_names": [],
            "also": [],  # The old name of "other_names".
            "tied": [],
        }.items()
    )
    assert 0 < rows[1]["seconds"] < rows[0]["seconds"]


@pytest.mark.usefixtures("no_weights")
def test_without_a_name_it_is_the_embedded_model(run: Command) -> None:
    outcome = run("--device", "cpu", "--size", "64", "--depth", "1")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(
        "efficientnet_lite0 on cpu   1 x 3 x 64 x 64   noise, random weights\n4,652,008 parameters "
    )
    assert [row[0] for row in table(outcome)[1:]] == ["stem", "layer1", "layer2", "layer3", "layer4", "head"]


@pytest.mark.usefixtures("no_weights")
def test_which_calls_are_listed(run: Command) -> None:
    small = ("-m", "resnet18", "--size", "32", "--device", "cpu")
    assert [row[0] for row in table(run(*small, "--depth", "1"))[1:]] == [
        name for name, _ in models.resnet18(weights=None).named_children()
    ]
    assert len(table(run(*small, "--all"))) == 1 + 75
    picked = run(*small, "--layer", "layer[12].*.conv1", "-l", "fc")
    assert [row[0] for row in table(picked)[1:]] == [
        *(f"layer{stage}.{block}.conv1" for stage in (1, 2) for block in (0, 1)),
        "fc",
    ]
    as_json = records(run(*small, "--layer", "layer1.0.relu", "--json"))
    assert [(item["name"], item["run"], item["runs"]) for item in as_json] == [
        ("layer1.0.relu", 1, 2),
        ("layer1.0.relu", 2, 2),
    ]
    assert len(records(run(*small, "--json", "--depth", "1"))) == 11


@pytest.mark.usefixtures("no_weights")
def test_repeated_and_shared_modules_are_shown_as_such(run: Command, tmp_path: Path) -> None:
    outcome = run("-m", write_model(tmp_path), "--size", "9x17", "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("own.py:build on cpu   1 x 3 x 9 x 17   noise, random weights\n138 parameters   ")
    title, *rows = table(outcome)
    assert title[:3] == ["layer", "run", "type"]
    assert [row[:2] for row in rows] == [
        ["conv", "Conv2d"], ["act", "1 of 2"], ["one", "1 of 2"], ["one", "2 of 2"], ["act", "2 of 2"],
        ["other", "Linear"]
    ]  # fmt: skip
    assert outcome.out.splitlines()[-4:] == [
        "",
        "one is the same module as twin.",
        "Parameters of one are also called other.weight.",
        "Parameters of other are also called one.weight.",
    ]
    assert [row[0] for row in table(run("-m", write_model(tmp_path), "--size", "9", "-l", "twin"))[1:]] == [
        "one",
        "one",
    ]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("channels", [1, 4])
def test_noise_has_as_many_channels_as_the_model_takes(run: Command, tmp_path: Path, channels: int) -> None:
    outcome = run("-m", write_model(tmp_path, channels=channels), "--size", "9", "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    assert f"on cpu   1 x {channels} x 9 x 9   " in outcome.out


@pytest.mark.usefixtures("no_weights")
def test_unusual_dtypes_have_a_column(run: Command) -> None:
    arguments = ("-m", "resnet18", "--size", "32", "--device", "cpu", "--depth", "1")
    assert "dtype" not in table(run(*arguments))[0]
    title, *rows = table(run(*arguments, "--precision", "bf16"))
    assert "dtype" not in title
    assert {record["dtypes"][0] for record in records(run(*arguments, "--precision", "bf16", "--json"))} == {"bfloat16"}
    assert rows[0][6] == "32.8 kB"  # 64 x 16 x 16 values of two bytes.


@pytest.mark.usefixtures("no_weights")
def test_a_dtype_that_is_not_the_usual_one(run: Command, tmp_path: Path) -> None:
    name = write_model(tmp_path, line="x = self.unused.double()(x[:, :1].double()).float() + x")
    title, *rows = table(run("-m", name, "--size", "9", "--device", "cpu"))
    assert title[:6] == ["layer", "run", "type", "input", "output", "dtype"]
    assert [row[0] for row in rows if "float64" in row] == ["unused"]
    assert not any("float32" in row for row in rows)


def test_a_picture_is_traced_with_the_models_own_weights(run: Command, photo: Callable[[str], Path]) -> None:
    outcome = run(photo("chelsea.jpg"), "--device", "cpu", "--depth", "1")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("efficientnet_lite0 on cpu   1 x 3 x 224 x 224   chelsea.jpg\n4,652,008 parameters")
    assert [row[0] for row in table(outcome)[1:]] == ["stem", "layer1", "layer2", "layer3", "layer4", "head"]
    wide = run(photo("chelsea.jpg"), "--device", "cpu", "--size", "64x96", "--json", "--depth", "1")
    assert records(wide)[0]["inputs"] == [[1, 3, 64, 96]]


def test_weights_are_read_where_they_are_given(run: Command, tmp_path: Path) -> None:
    torch.save(models.resnet18(num_classes=7).state_dict(), tmp_path / "seven.pt")
    outcome = run("-m", "resnet18", "--weights", "seven.pt", "--device", "cpu", "--depth", "1")
    assert outcome.status == 0
    assert outcome.out.startswith("resnet18 on cpu   1 x 3 x 224 x 224   noise\n11,180,103 parameters")
    assert table(outcome)[-1][:4] == ["fc", "Linear", "512", "7"]


@pytest.mark.usefixtures("no_weights")
def test_the_random_state_stays(run: Command) -> None:
    before = torch.get_rng_state()
    run("-m", "resnet18", "--size", "32", "--device", "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_json_is_pure_where_the_users_code_prints(run: Command, tmp_path: Path) -> None:
    outcome = run("-m", write_model(tmp_path, line="print('running')"), "--size", "9", "--json", "--device", "cpu")
    assert [record["name"] for record in records(outcome)] == ["", "conv", "act", "one", "one", "act", "other"]
    assert "running" in outcome.err


def test_a_volume_network(run: Command, gradcam_command: Command, tmp_path: Path, photo: Callable[[str], Path]) -> None:
    (tmp_path / "volumes.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    head = nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3)\n"
        "    return nn.Sequential(nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU(), *head)\n"
    )
    outcome = run("-m", "volumes.py:build", "--size", "6x8x12", "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    assert "1 x 1 x 6 x 8 x 12   noise" in outcome.out.splitlines()[0]
    assert "4 x 3 x 4 x 6" in outcome.out
    for command in (["run"], ["inspect", "gradients"], ["inspect", "trace"], ["check"]):
        message = gradcam_command(*command, photo("china.jpg"), "-m", "volumes.py:build", "--device", "cpu")
        assert message.status == 2
        assert "takes volumes or clips (N,C,D,H,W), not images" in message.err
        assert "explain them in Python, with gradcam.explain(model, volume)." in message.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-m", "resnet5"], 2, "There is no model 'resnet5'. Nearest: 'resnet50'"),
        (["-m", ""], 2, "The model's name is empty"),
        (["--all", "--depth", "1"], 2, "Give either --all or --depth"),
        (["--depth", "0"], 2, "Invalid value for '--depth'"),
        (["-m", "resnet18", "--mean", "0.5"], 2, "--mean needs an image: give an IMAGE"),
        (["-m", "resnet18", "-l", "layr4"], 2, "There is no layer 'layr4' in ResNet. Nearest: 'layer4'"),
        (["-m", "resnet18", "-l", "layr*"], 2, "No layer matches 'layr*'. Nearest: 'layer"),
        (["-m", "own.py:build", "-l", "unused", "--size", "9"], 2, "Layer 'unused' is not called in evaluation mode"),
        (["-m", "vit_b_32", "--size", "40"], 2, "vit_b_32 does not run with an image of 3 x 40 x 40: Wrong image"),
        (["-m", "own.py:build", "--size", "1"], 2, "does not run with an image of 3 x 1 x 1: Calculated padded input"),
        (["nothing.jpg"], 1, "nothing.jpg: "),
        (["own.py"], 1, "own.py: "),
        (["-m", "resnet18", "--device", "nowhere"], 2, "There is no device 'nowhere'"),
    ],
)
def test_one_clear_error(run: Command, tmp_path: Path, arguments: list[str], status: int, message: str) -> None:
    write_model(tmp_path)
    outcome = run(*arguments)
    assert (outcome.status, outcome.out) == (status, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("line", ["raise ValueError('never')", "import sys; sys.exit(3)"])
def test_a_model_that_fails_gets_one_error(run: Command, tmp_path: Path, line: str) -> None:
    outcome = run("-m", write_model(tmp_path, line=line), "--size", "9", "--device", "cpu")
    reason = "never" if "never" in line else "SystemExit: 3"
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == f"Error: own.py:build does not run with an image of 3 x 9 x 9: {reason}\n"


def test_an_error_names_the_layer(run: Command, tmp_path: Path) -> None:
    outcome = run("-m", write_model(tmp_path, line="x = self.unused(x)"), "--size", "9", "--device", "cpu")
    if hasattr(Exception, "add_note"):
        assert outcome.err.endswith("In layer 'unused', Linear, with input (1, 4).\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 "), (7, "7 "), (999, "999 "), (1000, "1.00 k"), (1234, "1.23 k"), (9994, "9.99 k"), (9996, "10.0 k"),
        (99940, "99.9 k"), (99960, "100 k"), (999400, "999 k"), (999600, "1.00 M"), (1814073344, "1.81 G"),
        (3 * 10**12, "3.00 T"), (3 * 10**15, "3000 T"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(number: int, text: str) -> None:
    assert format_number(number) == text
