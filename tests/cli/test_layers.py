"""Test `gradcam layers`: its list, its table, and its errors for wrong names and sizes."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torchvision import models

import gradcam
from gradcam.cam.listing import list_layers
from gradcam.cli import main
from gradcam.models.providers import find_blueprint
from gradcam.models.skeletons import survey
from gradcam.plugins import import_object
from tests.cli.test_cli import Command, Outcome, Photo, folder, gradcam_command, small
from tests.helpers import tiny_vit

__all__ = ["folder", "gradcam_command", "small"]  # fixtures


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Return a function that runs `gradcam layers` in an empty folder, without access to weights."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were asked for")

    for place in ("torch.hub.load_state_dict_from_url", "torch.load", "safetensors.torch.load_file"):
        monkeypatch.setattr(place, fail)

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr("sys.argv", ["gradcam", "layers", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    yield call
    signal.signal(signal.SIGTERM, before)


def records(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {record["name"]: record for record in map(json.loads, outcome.out.splitlines())}


def table(outcome: Outcome) -> list[str]:
    """Return the layer names in the table, without the mark of the default layer."""
    lines = outcome.out.splitlines()
    return [line[2:].split()[0] for line in lines[lines.index("") + 2 : len(lines) - lines[::-1].index("") - 1]]


def test_the_table_of_resnet50(layers: Command) -> None:
    outcome = layers("resnet50")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "resnet50   3 x 224 x 224   25,557,032 parameters"
    assert lines[2].split() == ["layer", "type", "output", "stride", "parameters", "map"]
    assert "  conv1     Conv2d             64 x 112 x 112       2       9,408  yes ±" in lines
    assert "→ layer4    Sequential         2048 x 7 x 7        32  14,964,736  suggested" in lines
    assert "  fc        Linear             1000                 -   2,049,000  no grid" in lines
    assert [line for line in lines if line.startswith("→")] == [line for line in lines if line.endswith("suggested")]
    assert lines[-2] == "26 of 150 layers are listed. For more, use --depth N, --all or a PATTERN."
    assert lines[-1] == "gradcam run photo.jpg --model resnet50 --layer layer4"
    assert all(len(line) <= 80 for line in lines)


def test_the_embedded_model_is_listed_with_the_layer_that_run_takes(layers: Command) -> None:
    outcome = layers()
    assert outcome.out.startswith("efficientnet_lite0   3 x 224 x 224   4,652,008 parameters\n")
    assert outcome.out.endswith("\ngradcam run photo.jpg --layer layer4\n")
    assert records(layers("--json"))["layer4"]["suggested"]
    assert layers("efficientnet_lite0") == layers("-m", "efficientnet_lite0") == outcome


def test_a_long_name_is_never_cut(layers: Command) -> None:
    outcome = layers("vit_b_32")
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("→"))
    assert line.split() == (
        ["→", "encoder.layers.encoder_layer_11.ln_1", "LayerNorm", "50", "x", "768", "32", "1,536", "suggested", "±"]
    )
    assert "NonDynamicallyQuantiz…" in layers("vit_b_32", "out_proj").out


def test_json_is_what_python_lists(layers: Command) -> None:
    outcome = layers("resnet18", "--json", "--size", "64x96")
    rows = list_layers(models.resnet18(weights=None).to("meta"), (64, 96))
    expected = [asdict(row) for row in rows]
    for fields in expected:
        fields["suggested"] = fields.pop("is_suggested")
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert all((fields.pop("schema"), fields.pop("model")) == (1, "resnet18") for fields in lines)
    assert lines == json.loads(json.dumps(expected))
    assert records(outcome)["layer4"]["grid"] == [2, 3]


def test_how_deep_the_table_goes(layers: Command) -> None:
    assert table(layers("resnet50", "--depth", "1")) == [
        name for name, _ in models.resnet50(weights=None).named_children()
    ]
    deep = [name for name, _ in models.resnet50(weights=None).named_modules() if name]
    assert table(layers("resnet50", "--all")) == table(layers("resnet50", "--depth", "4")) == deep
    assert "of 150 layers" not in layers("resnet50", "--all").out
    assert len(table(layers("resnet50", "--depth", "2"))) == 26
    # Three levels would take 67 rows, more than a screen.
    assert len(table(layers("resnet18"))) == 10 + 4 * 2
    assert len(table(layers("vgg11"))) == 31
    assert "encoder.layers.encoder_layer_11.ln_1" in table(layers("vit_b_32", "--depth", "1"))
    assert len(records(layers("resnet18", "--json", "--depth", "1"))) == 10


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer4.0.conv", ["layer4.0.conv1", "layer4.0.conv2"]),
        ("layer?.1.bn2", [f"layer{item}.1.bn2" for item in (1, 2, 3, 4)]),
        ("layer[34]", ["layer3", "layer4"]),
        ("*", [name for name, _ in models.resnet18(weights=None).named_modules() if name]),
    ],
)
def test_a_pattern_chooses_names(layers: Command, pattern: str, expected: list[str]) -> None:
    assert table(layers("resnet18", pattern)) == expected
    assert list(records(layers("-m", "resnet18", pattern, "--json"))) == expected


def test_the_suggestion_catches_the_eye_in_colour_too(layers: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcam.cli._colour", lambda: True)
    lines = layers("resnet18").out.splitlines()
    (line,) = (line for line in lines if "suggested" in line)
    assert line.startswith(click.style("→", fg="green", bold=True, reset=False))
    assert [line for line in lines if "\x1b[2m" in line] == [line for line in lines if "no grid" in line]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["resnet5"], 2, "Error: There is no model 'resnet5'. Nearest: 'resnet50'"),
        (["resnet18:IMAGENET"], 2, "resnet18 has no weights 'IMAGENET': choose one of 'IMAGENET1K_V1'."),
        (["resnet18", "layer4.0.convv1"], 2, "No layer name matches 'layer4.0.convv1'. Nearest: 'layer4.0.conv1'"),
        (["vit_b_32", "--size", "300"], 2, "vit_b_32 does not run with an image of 3 x 300 x 300: Wrong image height!"),
        (["alexnet", "--size", "8"], 2, "alexnet does not run with an image of 3 x 8 x 8: "),
        ([""], 2, "The model's name is empty: remove --model"),
        (["--size", "0"], 2, "'0' is not a size: expected one side, such as 224"),
        (["--depth", "0"], 2, "Invalid value for '--depth'"),
        (["--depth", "1", "--all"], 2, "--all and --depth contradict each other"),
        (["a", "b", "c"], 2, "3 names were given: expected at most a model and a pattern"),
        (["nothing.py:build"], 2, "nothing.py: does not exist, expected a Python file."),
        (["no_such_package.x:build"], 2, "There is no module 'no_such_package.x'"),
        (["timm:resnet5"], 2, "timm has no model 'resnet5'. Nearest: 'resnet"),
    ],
)
def test_one_clear_error(layers: Command, arguments: list[str], status: int, message: str) -> None:
    outcome = layers(*arguments)
    assert (outcome.status, outcome.out) == (status, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    errors = [line for line in outcome.err.splitlines() if line.startswith("Error")]
    assert len(errors) == 1


def test_sizes_are_those_of_the_weights() -> None:
    def size(name: str) -> tuple[int, int]:
        return find_blueprint(name).size

    assert size("resnet50") == size("resnet50:IMAGENET1K_V1") == (224, 224)
    assert size("inception_v3") == (299, 299)
    assert size("swin_v2_t") == (256, 256)
    assert size("vit_b_32:IMAGENET1K_V1") == (224, 224)
    assert size("vit_b_32:ViT_B_32_Weights.IMAGENET1K_V1") == (224, 224)
    assert size("vit_b_16:imagenet1k_swag_e2e_v1") == (384, 384)
    assert {row.shape for row in survey("vit_b_16:IMAGENET1K_SWAG_E2E_V1").rows if row.name == "encoder"} == {
        (1, 1 + 24 * 24, 768)
    }


MODEL_WITH_CACHE = """
import functools
import torch
from torch import nn

@functools.lru_cache
def table(count):  # which outlives the model that asked for it first
    return torch.empty(1, count, 1, 1).fill_(2.0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head, self.table = nn.Conv2d(3, 8, 3, 4), nn.Linear(8, 5), table(8)

    def forward(self, x):
        x = x / x.std().item()
        return self.head((torch.relu(self.conv(x)) * self.table).mean((2, 3)))
"""


def test_what_a_users_code_keeps_has_values(layers: Command, tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(MODEL_WITH_CACHE)
    outcome = layers("kept.py:Net")
    assert (outcome.status, outcome.err) == (0, "")
    assert "run with random weights" in outcome.out
    assert gradcam.load_classifier("kept.py:Net", device="cpu").classes == 5


def test_a_skeleton_has_the_parts_of_the_model_and_no_values() -> None:
    model = survey("mobilenet_v3_small").skeleton.model
    real = models.mobilenet_v3_small(weights=None)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in real.state_dict().items()
    }
    assert not any(parameter.is_meta for parameter in torch.nn.Linear(2, 2).parameters())


TIED_MODEL = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d({channels}, 4, 3, stride=2)
        self.rows = nn.Flatten(0, 1)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, images):
        x = self.conv(images)
        {line}
        return self.other(self.one(x.mean((2, 3))))

def build():
    return Tied()

def raises():
    raise ValueError("not today")

def nothing():
    return 5

def looks():
    model = Tied()
    model.scale = float(model.one.weight.abs().max())
    return model
"""


def test_a_model_of_ones_own(layers: Command, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TIED_MODEL.format(channels=3, line="self.rows(x)"))
    lines = layers("own.py:build", "--size", "9x17").out.splitlines()
    assert lines[0] == "own.py:build   3 x 9 x 17   136 parameters"  # The 16 shared parameters are counted once.
    assert "→ conv   Conv2d   4 x 4 x 8  2.2 x 2.1         112  suggested ±" in lines
    assert "  rows   Flatten  4 x 4 x 8          -           -  its first axis is not the batch" in lines
    assert lines[-1] == "gradcam run photo.jpg --model own.py:build --size 9x17 --layer conv"
    assert layers("own.py:looks", "--size", "9x17").out.splitlines()[1:-1] == lines[1:-1]
    assert "own.py:raises raised ValueError: not today (" in layers("own.py:raises").err
    assert "own.py:nothing returned 5, int, expected a torch.nn.Module." in layers("own.py:nothing").err
    assert "There is no 'bild' in own.py. Nearest: 'build'." in layers("own.py:bild").err


VOLUMES = """
import torch
from torch import nn

def build():
    head = nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(nn.Conv3d({channels}, 4, 3, 2, 1), nn.ReLU(), *head)

class Pathways(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow, self.fast, self.head = nn.Conv3d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Linear(8, 3)
    def forward(self, clips):
        return self.head(torch.cat([m(x).mean((2, 3, 4)) for m, x in zip((self.slow, self.fast), clips, strict=True)], 1))

class OfOneClip(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Pathways()
    def forward(self, clip):
        model = self.model
        return {forward}
"""


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_volumes(layers: Command, tmp_path: Path, channels: int) -> None:
    (tmp_path / "own.py").write_text(VOLUMES.format(channels=channels, forward="..."))
    lines = layers("own.py:build").out.splitlines()
    assert lines[0].startswith(f"own.py:build   {channels} x 16 x 224 x 224   ")
    lines = layers("own.py:build", "--size", "6x8x12").out.splitlines()
    assert lines[0].startswith(f"own.py:build   {channels} x 6 x 8 x 12   ")
    assert any(line.startswith("→ 1") and "4 x 3 x 4 x 6 " in line for line in lines)
    way = lines[-1].removeprefix("This model takes volumes. Explain a volume in Python: ").removesuffix(".")
    model, volume = import_object("own.py:build")().eval(), torch.randn(1, channels, 6, 8, 12)
    explanation = eval(way, {"gradcam": gradcam, "model": model, "volume": volume})
    assert (explanation.layer, explanation.maps.shape) == ("1", (1, 1, 3, 4, 6))
    if channels == 3:
        assert [list_layers(model, size)[1].grid for size in ((6, 8, 12), 8)] == [(3, 4, 6), (8, 4, 4)]


def test_what_is_said_of_two_pathways_works(layers: Command, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(VOLUMES.format(channels=3, forward="model(clip)"))
    err = layers("own.py:OfOneClip").err
    forward = err.partition("forward(clip) returns ")[2].partition(". If the model")[0]
    (tmp_path / "own.py").write_text(VOLUMES.format(channels=3, forward=forward))
    assert layers("own.py:OfOneClip", "--size", "16x12x12").status == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "own.py:build"],
        ["--model", "own.py:build", "--size", "16"],
        [
            *["own.py:build", "--size", "20x30", "--mean", "0.5", "--std", "0.25", "--crop", "1", "--labels"],
            "my names.txt",
        ],
        [
            "-m",
            "own.py:build",
            "--activation",
            "sigmoid",
            "--weights",
            "my.pth",
            "--device",
            "cpu",
            "--precision",
            "bf16",
        ],
        ["-m", "own.py:build", "--reader", "own:read", "--reshape", "channels-first"],
    ],
)
def test_the_last_line_runs_for_grey(options: list[str], gradcam_command: Command, folder: Path, small: Photo) -> None:
    (folder / "own.py").write_text(
        "import numpy as np\nfrom torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(1, 8, 3), "
        "nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))\n\n\ndef read(path):\n    return np.eye(40)\n"
    )
    code: dict[str, Any] = {}
    exec((folder / "own.py").read_text(), code)
    torch.save(code["build"]().state_dict(), folder / "my.pth")
    (folder / "my names.txt").write_text("one\ntwo\nthree\n")
    small("coffee.jpg").rename(folder / "photo.jpg")
    line = shlex.split(gradcam_command("layers", *options).out.splitlines()[-1])
    typed = [word for word in options if word not in ("-m", "--model")]
    assert sorted(line) == sorted(["gradcam", "run", "photo.jpg", "--model", *typed, "--layer", "1"])
    outcome = gradcam_command(*line[1:], "--json")
    assert outcome.status == 0, outcome.err


def test_a_model_that_asks_for_values_is_run_with_random_weights(layers: Command, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TIED_MODEL.format(channels=3, line="x = x * float(x.detach().mean())"))
    lines = layers("own.py:build", "--size", "9").out.splitlines()
    assert lines[1] == "The layers cannot be listed without weight values, so the model was run with random weights."
    assert any(line.startswith("→ conv ") for line in lines)


def test_a_model_that_fails_on_any_device_gets_one_error(layers: Command, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TIED_MODEL.format(channels=3, line="raise ValueError('never')"))
    layers("own.py:build").check_error(2, "own.py:build does not run with an image of 3 x 224 x 224: never")
    (tmp_path / "own.py").write_text(TIED_MODEL.format(channels=3, line="float(x.mean()); x.nothing"))
    assert "has no attribute 'nothing'" in layers("own.py:build").err


@pytest.mark.parametrize("line", ["pass", "x = x * float(x.detach().mean())"])
@pytest.mark.parametrize("channels", [1, 4])
def test_models_with_other_channels_are_run(layers: Command, tmp_path: Path, channels: int, line: str) -> None:
    (tmp_path / "own.py").write_text(TIED_MODEL.format(channels=channels, line=line))
    outcome = layers("own.py:build", "--size", "9")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"own.py:build   {channels} x 9 x 9   ")
    assert "→ conv  " in outcome.out


@pytest.mark.parametrize("line", ["pass", "x = x * float(x.detach().mean())"])
@pytest.mark.parametrize("precision", ["half", "bfloat16", "double"])
def test_a_model_gets_a_picture_as_precise_as_it_is(layers: Command, tmp_path: Path, precision: str, line: str) -> None:
    (tmp_path / "own.py").write_text(
        TIED_MODEL.format(channels=3, line=line).replace("Tied()", f"Tied().{precision}()")
    )
    outcome = layers("own.py:build", "--size", "9")
    assert (outcome.status, outcome.err) == (0, "")
    assert "→ conv  " in outcome.out


def test_json_is_pure_where_the_users_code_prints(layers: Command, tmp_path: Path) -> None:
    code = TIED_MODEL.format(channels=3, line="print('running')").replace(
        "return Tied()", "print('building'); return Tied()"
    )
    (tmp_path / "own.py").write_text(f"print('importing')\n{code}")
    outcome = layers("own.py:build", "--json", "--size", "9")
    assert list(records(outcome)) == ["conv", "rows", "one", "other"]
    assert [word in outcome.err for word in ("importing", "building", "running")] == [True] * 3


def test_packages_of_the_folder_are_found(layers: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (tmp_path / "package_for_layers").mkdir()
    (tmp_path / "package_for_layers" / "make.py").write_text(TIED_MODEL.format(channels=3, line="pass"))
    outcome = layers("package_for_layers.make:build", "--size", "9")
    assert (outcome.status, outcome.err) == (0, "")
    assert "→ conv  " in outcome.out


@pytest.mark.parametrize("line", ["sys.exit(3)", "x.mean().item(); sys.exit(3)"])
def test_a_model_that_ends_the_program_gets_one_error(layers: Command, tmp_path: Path, line: str) -> None:
    (tmp_path / "own.py").write_text("import sys\n" + TIED_MODEL.format(channels=3, line=line))
    outcome = layers("own.py:build", "--size", "9")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == "Error: own.py:build does not run with an image of 3 x 9 x 9: SystemExit: 3\n"


def test_timms_and_hugging_faces_models(layers: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    outcome = layers("timm:vit_tiny_patch16_224")
    assert outcome.out.splitlines()[-1] == (
        "gradcam run photo.jpg --model timm:vit_tiny_patch16_224 --layer blocks.11.norm1"
    )
    config = tiny_vit(image_size=(32, 64), num_channels=1, architectures=["ViTForImageClassification"])
    config.save_pretrained(tmp_path / "folder")
    outcome = layers(f"hf:{tmp_path / 'folder'}", "--json")
    rows = records(outcome)
    (suggested,) = (row for row in rows.values() if row["suggested"])
    assert suggested["name"].endswith("1.layernorm_before")
    assert (suggested["shape"], suggested["grid"]) == ([1, 33, 16], [4, 8])
    assert suggested["reason"] is None
    processor = {"do_center_crop": True, "crop_size": {"height": 16, "width": 24}, "size": {"shortest_edge": 40}}
    (tmp_path / "folder" / "preprocessor_config.json").write_text(json.dumps(processor))
    assert find_blueprint(f"hf:{tmp_path / 'folder'}").size == (16, 24)
    (tmp_path / "folder" / "preprocessor_config.json").write_text(json.dumps(processor | {"do_center_crop": False}))
    assert find_blueprint(f"hf:{tmp_path / 'folder'}").size == (40, 40)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    outcome = layers(f"hf:{tmp_path / 'empty'}")
    assert "has no config.json" in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


def test_layers_whose_cells_lie_elsewhere_are_marked(layers: Command) -> None:
    rows = records(layers("timm:mobilevitv2_050", "stages.3.1", "--size", "192", "--json"))
    assert rows["stages.3.1.transformer"]["places"] <= 3
    assert rows["stages.3.1"]["places"] is None  # It follows a convolution that folds the cells back.
    out = layers("timm:mobilevitv2_050", "stages.3.1.transformer", "--size", "192").out
    assert "  yes, but its cells are not aligned with the image\n" in out
    assert "elsewhere" not in layers("timm:vit_tiny_patch16_224", "blocks.3", "--size", "224").out
