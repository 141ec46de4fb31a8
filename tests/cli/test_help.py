"""Test the short and long help of every command, and run every example in it."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import tarfile
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from gradcam.cli import cli, ui
from gradcam.cli._help import EXAMPLES
from gradcam.models.providers import embedded
from gradcam.models.providers.torchvision import find_cache_path
from tests.cli.test_cli import Command, Photo, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

MAX_LINES, MAX_WIDTH = 30, 125
NET = """
import torch
from torch import nn

def build():
    features = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.Conv2d(8, 8, 3, 4), nn.ReLU())
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
"""


def list_commands() -> list[str]:
    """Return all commands as they are typed after `gradcam`; "" is `gradcam` itself."""
    names = cli.list_commands(None)
    inside = cli.get_command(None, "inspect").list_commands(None)
    return ["", *names, *(f"inspect {name}" for name in inside)]


@pytest.mark.parametrize("command", list_commands())
def test_the_short_help_fits_on_a_screen_and_has_examples(command: str, gradcam_command: Command) -> None:
    outcome = gradcam_command(*command.split(), "-h")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_WIDTH
    path = f"gradcam {command}".strip()
    assert lines[0].startswith(f"Usage: {path} [OPTIONS]")
    examples = lines[lines.index("Examples:") + 1 :]
    assert [line[:10] for line in examples[:2]] == ["  gradcam "] * 2
    assert re.fullmatch(rf"All options, with explanations: {path}( COMMAND)? --help", lines[-1])


@pytest.mark.parametrize("command", list_commands())
def test_the_long_help_has_the_examples_first_and_all_options(command: str, gradcam_command: Command) -> None:
    outcome = gradcam_command(*command.split(), "--help")
    assert (outcome.status, outcome.err) == (0, "")
    title = outcome.out.splitlines().index("Examples:")
    examples = list(EXAMPLES[command])
    help_lines = outcome.out.splitlines()[title + 1 :][: len(examples)]
    assert [re.sub(r"(?<=\S)   +", "  # ", help_line.strip()) for help_line in help_lines] == examples
    short = gradcam_command(*command.split(), "-h").out
    assert set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", short, re.M)) <= set(re.findall(r"--[\w-]+", outcome.out))


def test_every_command_has_examples_and_nothing_else_has() -> None:
    assert sorted(EXAMPLES) == sorted(list_commands())
    assert set(map(len, EXAMPLES.values())) <= {2, 3}


def test_a_number_out_of_range_is_refused_with_the_range(gradcam_command: Command) -> None:
    for option, value, message in (
        ("--top-k", "0", "0 is out of range: expected an integer from 1 to 1000000000."),
        ("--top-k", "two", "'two' is not an integer."),
        ("--alpha", "nan", "nan is out of range: expected a number from 0 to 1."),
        ("--crop", "0", "0 is out of range: expected a number above 0 and at most 1."),
    ):
        gradcam_command("run", "photo.jpg", option, value).check_error(2, message)


@pytest.fixture
def workspace(folder: Path, photo: Photo, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the examples name. Random weights replace the pretrained ones."""
    Image.open(photo("cat_and_espresso.jpg")).resize((400, 320)).save(folder / "photo.jpg")
    names = ("chelsea.jpg", "coffee.jpg", "rocket.jpg", "koala.webp")
    for directory in ("photos", "scans"):
        (folder / directory).mkdir()
        for name in names:
            image = Image.open(photo(name)).convert("RGB").resize((120, 100))
            image.save((folder / directory / name).with_suffix(".jpg"))
    rows = [f"{Path(name).stem}.jpg,20,20,90,80,{label}" for name, label in zip(names, ("tabby", "espresso"))]
    (folder / "boxes.csv").write_text("\n".join(["image,left,top,right,bottom,class", *rows]))
    with tarfile.open(folder / "photos.tar", "w") as archive:
        archive.add(folder / "photos", "photos")
    (folder / "net.py").write_text(NET)
    namespace: dict[str, object] = {}
    exec(NET, namespace)
    for name in ("a.pth", "b.pth", "best.pth"):
        torch.save(namespace["build"]().state_dict(), folder / name)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(folder.parent / "hub"))
    return folder


def add_random_weights() -> None:
    """Write the file of ResNet-50's pretrained weights with random ones."""
    file = find_cache_path(torchvision.models.ResNet50_Weights.DEFAULT)
    file.parent.mkdir(parents=True)
    torch.save(torchvision.models.resnet50().state_dict(), file)


def write_classes(folder: Path, photo: Photo) -> None:
    """Write photos/ with ten images of each of two classes, and labels.csv with the class of each."""
    shutil.rmtree(folder / "photos")
    image = Image.open(photo("cat_and_espresso.jpg"))
    rows = ["image,class"]
    for name, x0 in (("Egyptian cat", 0), ("espresso", 400)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(10):
            crop = image.crop((x0 + 4 * number, 100, x0 + 4 * number + 350, 480)).resize((96, 96))
            crop.save(folder / "photos" / name / f"{number}.jpg")
            rows.append(f"photos/{name}/{number}.jpg,{name}")
    (folder / "labels.csv").write_text("\n".join(rows))


def stop_when_ready(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have `gradcam ui` use any free port and stop when its page is ready; return the addresses that are opened."""
    opened: list[str] = []
    bind = ui._bind
    monkeypatch.setattr(ui, "_bind", lambda host, port: bind(host, 0))
    monkeypatch.setattr(ui, "_serve", lambda application, sockets, jobs: (sockets[0].close(), jobs.close(), 0)[-1])
    monkeypatch.setattr(webbrowser, "open", opened.append)
    return opened


class ColourModel(nn.Sequential):
    """Classifier of red, green, blue and black with the layer names and classes of the embedded model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 16, 16, bias=False)  # Outputs the mean colour and its negative.
        for name in ("layer1", "layer2", "layer3", "layer4"):
            convolution = nn.Conv2d(6, 6, 3, padding=1, bias=False)
            nn.init.dirac_(convolution.weight)
            self.add_module(name, nn.Sequential(convolution, nn.ReLU()))
        self.head = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 1000))
        signs = [[1, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
        with torch.no_grad():
            self.stem.weight.copy_(
                torch.cat([torch.eye(3), -torch.eye(3)])[..., None, None].expand(-1, -1, 16, 16) / 256
            )
            self.head[3].weight.normal_(std=0.1)
            self.head[3].weight[:4] = 20.0 * torch.tensor(signs)


def use_colours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the embedded model with a small one, and write images of its classes to photos/."""
    load = embedded.load
    monkeypatch.setattr(embedded, "load", lambda name, weights: replace(load(name, weights), model=ColourModel()))
    for path, colour in zip(sorted((folder / "photos").iterdir()), ("red", "lime", "blue", "black"), strict=True):
        image = Image.new("RGB", (120, 100), "gray")
        image.paste(colour, (20, 10, 120, 100))
        image.save(path)


COSTLY = ("evaluate", "page", "recommend")  # These run thousands of forward passes.
SLOW = ("audit", "check", "evaluate", "recommend")


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[pytest.mark.slow] if command in SLOW else []) for command in list_commands()],
)
@pytest.mark.filterwarnings("ignore")
def test_every_example_runs(
    command: str, gradcam_command: Command, workspace: Path, photo: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = stop_when_ready(monkeypatch)
    if command in COSTLY:
        use_colours(workspace, monkeypatch)
    examples = [line.partition("  # ")[0] for line in EXAMPLES[command]]
    if any("resnet50" in line for line in examples):
        add_random_weights()
    if command == "audit":
        write_classes(workspace, photo)
    for line in examples:
        if "--figure" in line and importlib.util.find_spec("matplotlib") is None:
            continue
        program, *arguments = shlex.split(line)
        outcome = gradcam_command(*arguments)
        assert (program, outcome.status) == ("gradcam", 0), (line, outcome.err)
        assert outcome.out
    assert len(opened) == (2 if command == "ui" else 0)
