"""Test typing mistakes: errors take two lines and suggest the next command. Also test completion and short help."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gradcam
from gradcam.cli import cli
from gradcam.images.draw import COLORMAPS
from tests.cli.test_cli import POSIX, Command, Photo, files, folder, gradcam_command, pixels, records, run, small

__all__ = ["folder", "gradcam_command", "run", "small"]  # fixtures

SINGULAR = {"methods": "method", "scores": "score", "metrics": "metric", "layers": "layer", "classes": "class"}


def commands() -> list[list[str]]:
    names = cli.list_commands(None)
    inside = cli.get_command(None, "inspect").list_commands(None)
    return [[], *([name] for name in names), *(["inspect", name] for name in inside)]


def words(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else "-"


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (["photo.png"], 2, "Did you mean: gradcam run photo.png"),
        (["my photo.jpg", "-q"], 2, "Did you mean: gradcam run 'my photo.jpg' -q"),
        (["photos"], 2, "Did you mean: gradcam run photos"),
        (["https://host/a.jpg"], 2, "Did you mean: gradcam batch https://host/a.jpg -o explained/"),
        (["rnu", "photo.png"], 2, "There is no command 'rnu'. Nearest: 'run'."),
        (["help", "run"], 2, "Did you mean: gradcam run -h"),
        (["inspect", "activation", "photo.png"], 2, "Nearest: 'activations'."),
        (["run"], 2, "Type: gradcam run IMAGE..."),
        (["batch"], 2, "Type: gradcam batch INPUT... -o DIR"),
        (["batch", "photos"], 2, "Type: gradcam batch INPUT... -o DIR"),
        (["run", "photo.png", "--modle", "resnet18"], 2, "--model"),
        (["run", "photo.png", "--method", "gradcm"], 2, "Nearest: 'gradcam'"),
        (["run", "photo.png", "--save", "heatmaps"], 2, "choose from overlay, heatmap, map, panel"),
        (["run", "https://host/a.jpg"], 2, "or type: gradcam batch https://host/a.jpg -o explained/"),
        (["check", "s3://bucket/a.jpg"], 2, "or type: gradcam batch s3://bucket/a.jpg -o explained/"),
        (["run", "missing.jpg"], 1, "missing.jpg: does not exist\n"),
        (["run", "photos/phot.pgn", "photo.pgn"], 1, "photo.pgn: does not exist; nearest: 'photo.png'\n"),
        (["run", "empty"], 2, "There are no images in 'empty'"),
        (["run", "photo.png", "--labels", "missing.txt"], 2, "'missing.txt' does not exist"),
        (["evaluate", "photos", "--metrics", "foo"], 2, "Metrics: average-drop, increase,"),
        (["evaluate", "photos", "--metrics", "raod"], 2, "Nearest: 'road'."),
        (["layers", "resnet5"], 2, "Nearest: 'resnet50'"),
    ],
    ids=words,
)
def test_advice_for_a_line(line: list[str], status: int, message: str, gradcam_command: Command, folder: Path) -> None:
    for name in ("photos", "empty"):
        (folder / name).mkdir()
    for name in ("photo.png", "photos/a.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    outcome = gradcam_command(*line)
    assert (outcome.status, outcome.out) == (status, "")
    assert message in outcome.err
    assert outcome.err.count("\n") <= 2


def test_nothing_typed_is_answered_with_what_there_is(gradcam_command: Command) -> None:
    outcome = gradcam_command()
    assert outcome == gradcam_command("-h")
    assert "\n  gradcam run photo.jpg " in outcome.out
    assert gradcam_command("inspect") == gradcam_command("inspect", "-h")


@pytest.mark.parametrize("command", commands(), ids=words)
def test_the_long_help_has_every_option_once(command: list[str], gradcam_command: Command) -> None:
    outcome = gradcam_command(*command, "--help")
    assert outcome.status == 0
    sections = re.split(r"(?m)^(?!Usage|Examples)\w.*:$", outcome.out, maxsplit=1)[1]
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+|-\w)", sections, re.M)
    assert len(listed) == len(set(listed))
    assert set(listed).isdisjoint(f"--{name}" for name in SINGULAR)
    options = [
        param for param in find_command(command).params if param.param_type_name == "option" and not param.hidden
    ]
    assert set(listed) - {"--help"} == {max(option.opts, key=len) for option in options}


def find_command(names: list[str]) -> object:
    command = cli
    for name in names:
        command = command.get_command(None, name)
    return command


def test_what_is_common_comes_first_in_the_help(gradcam_command: Command) -> None:
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)|^(\w.*):$", gradcam_command("run", "--help").out, re.M)
    order = [option or title for option, title in listed]
    order = order[order.index("Options") :]
    assert order[:7] == ["Options", "--model", "--layer", "--method", "--class", "--top-k", "--output"]
    preprocessing = order.index("Model and preprocessing")
    assert max(map(order.index, ("--score", "--reshape", "--colormap"))) < preprocessing
    assert preprocessing < order.index("--mean") == order.index("--std") - 1
    assert order[-3:] == ["--json", "--quiet", "--help"]


@pytest.mark.parametrize(
    "command", [command for command in commands() if command[:1] not in ([], ["inspect"]) or len(command) > 1]
)
def test_both_spellings_of_an_option_are_taken(command: list[str]) -> None:
    parser = find_command(command)
    options = {name for param in parser.params for name in param.opts}
    for plural, singular in SINGULAR.items():
        if f"--{singular}" in options:
            value = {"method": "gradcam", "metric": "road", "score": "logit"}.get(singular, "x")
            with cli.make_context("gradcam", [command[0]], resilient_parsing=True) as parent:
                contexts = [
                    parser.make_context(command[-1], [f"--{name}", value], parent=parent, resilient_parsing=True)
                    for name in (plural, singular)
                ]
            assert contexts[0].params == contexts[1].params
            values = [
                param[0] if isinstance(param, tuple) and param else param for param in contexts[0].params.values()
            ]
            assert value in [getattr(item, "name", item) for item in values]


def test_names_may_be_repeated_and_have_commas(run: Command, small: Photo, folder: Path) -> None:
    path = small("coffee.jpg")
    assert run(path, "--methods", "gradcam, layercam", "--method", "hirescam,gradcam", "-q").status == 0
    assert files(folder) == ["coffee-gradcam.png", "coffee-hirescam.png", "coffee-layercam.png"]


# Input folders and output files


def test_a_folder_means_the_pictures_in_it(gradcam_command: Command, small: Photo, folder: Path) -> None:
    small("coffee.jpg").rename(folder / "coffee.png")
    (folder / "more").mkdir()
    small("koala.webp").rename(folder / "more" / "koala.png")
    (folder / "notes.txt").write_text("no picture")
    for name in ("coffee-centre.png", "coffee-random-check.png", "coffee-gradcam-967-espresso.png"):
        (folder / name).write_bytes((folder / "coffee.png").read_bytes())
    for _ in range(2):  # The second run must not explain the overlays of the first.
        outcome = gradcam_command("run", ".", "--device", "cpu", "--json")
        assert (outcome.status, outcome.err) == (0, "")
        assert [record["image"] for record in records(outcome)] == ["coffee-centre.png", "coffee.png", "more/koala.png"]
    assert len([name for name in files(folder) if name.endswith("-gradcam.png")]) == 3
    assert len(files(folder)) == 9


def test_large_folders_need_batch(gradcam_command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "photos").mkdir()
    for number in range(101):
        (folder / "photos" / f"{number}.png").touch()
    monkeypatch.setattr("gradcam.cli.run.prepare_job", lambda *_, **__: sys.exit(7))
    outcome = gradcam_command("run", "photos")
    assert outcome.status == 7
    assert outcome.err == (
        "Note: photos contains 101 images. For large folders, use: gradcam batch photos -o explained/\n"
    )
    assert gradcam_command("run", "photos", "-q").err == ""
    (folder / "photos" / "7.png").unlink()
    assert gradcam_command("run", "photos").err == ""


def test_maps_and_heatmaps_are_saved_as_by_batch(
    gradcam_command: Command, run: Command, small: Photo, folder: Path, classifier: gradcam.Classifier
) -> None:
    path = small("coffee.jpg")
    outcome = run(path, "--save", "overlay,map", "--save", "heatmap", "--json")
    (record,) = records(outcome)
    (explained,) = record["explained"]
    names = {"overlay": "coffee-gradcam.png", "heatmap": "coffee-gradcam-heatmap.png", "map": "coffee-gradcam.npy"}
    assert {kind: explained[kind] for kind in names} == names
    assert files(folder) == sorted(names.values())
    explanation = classifier.explain(path)
    assert np.array_equal(np.load(folder / names["map"]), explanation.maps[0, 0].numpy())
    assert np.array_equal(pixels(folder / names["overlay"]), explanation.overlay())
    assert gradcam_command("batch", path, "-o", "out", "--save", "heatmap", "--format", "png", "-q").status == 0
    assert np.array_equal(pixels(folder / names["heatmap"]), pixels(folder / "out" / names["heatmap"]))


def test_a_map_alone_can_be_one_file(run: Command, small: Photo, folder: Path) -> None:
    path = small("coffee.jpg")
    outcome = run(path, "--save", "map", "-o", "it.npy", "-c", "espresso")
    assert "espresso at layer4 (7 x 7)  →  it.npy\n" in outcome.out
    assert files(folder) == ["it.npy"]
    assert np.load(folder / "it.npy").shape == (7, 7)
    assert "it.png: maps can only be written as .npy" in run(path, "--save", "map", "-o", "it.png").err
    assert "several results" in run(path, "--save", "map,heatmap", "-o", "it.png").err


def test_a_panel_is_saved_once(run: Command, small: Photo, folder: Path) -> None:
    outcome = run(small("coffee.jpg"), "--save", "panel", "--top-k", 2, "--method", "gradcam,hirescam")
    assert files(folder) == ["coffee-compare.png"]
    assert "  →  coffee-compare.png\n" in outcome.out
    run(small("coffee.jpg"), "--save", "panel", "--method", "input-gradients").check_error(2, "A panel needs heatmaps")


# Output names


@pytest.fixture
def small_model(folder: Path) -> str:
    (folder.parent / "net.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))\n"
    )
    return "../net.py:make"


@pytest.mark.parametrize(
    ("command", "ending"),
    [
        (["run"], "gradcam"),
        (["compare", "--method", "gradcam"], "compare"),
        (["check"], "gradcam-check"),
        (["inspect", "activations"], "activations"),
        (["inspect", "gradients"], "gradients"),
    ],
)
def test_another_model_writes_another_file(
    command: list[str], ending: str, gradcam_command: Command, small: Photo, small_model: str
) -> None:
    pytest.importorskip("matplotlib")
    path = small("coffee.jpg")
    for _ in range(2):  # Running the same command again must write the same file.
        assert gradcam_command(*command, path, "--device", "cpu", "-q", "-m", small_model, "--size", 32).status == 0
    assert files(Path()) == [f"coffee-{ending}-net.py_make.png"]


def test_other_weights_write_another_file(run: Command, small: Photo, folder: Path) -> None:
    weights = next(Path(gradcam.__file__).parent.rglob("efficientnet_lite0.safetensors"))
    (folder.parent / "fine tuned.safetensors").symlink_to(weights)
    assert run(small("coffee.jpg"), "--weights", "../fine tuned.safetensors", "-q").status == 0
    assert run(small("coffee.jpg"), "-m", "efficientnet_lite0", "-q").status == 0
    assert files(folder) == ["coffee-gradcam-fine_tuned.png", "coffee-gradcam.png"]


# Paths that the system rejects


@POSIX
@pytest.mark.parametrize("output", ["x" * 300, "photo.png/out", "loop/out", "/dev/null/out"])
def test_an_output_that_cannot_be_a_folder_is_named(output: str, run: Command, small: Photo, folder: Path) -> None:
    small("coffee.jpg").rename(folder / "photo.png")
    (folder / "loop").symlink_to("loop")
    outcome = run("photo.png", "-o", output)
    assert outcome.status == 1
    assert "standard output" not in outcome.err
    assert f"{output}: the folder cannot be created (" in outcome.err
    assert outcome.err.count("\n") == 1
    assert files(folder) == ["photo.png"]


def test_a_forbidden_folder_is_named(gradcam_command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "locked").mkdir()

    def refuse(path: object, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    outcome = gradcam_command("run", "locked")
    assert outcome.status == 2
    assert re.fullmatch(r"Error: .*locked: this folder cannot be read \(Permission denied\).*\n", outcome.err)
    monkeypatch.setattr("gradcam.cli.run.prepare_job", lambda *_, **__: refuse("locked/out"))
    (folder / "photo.png").touch()
    outcome = gradcam_command("run", "photo.png", "-o", "locked/out")
    assert (outcome.status, outcome.err) == (1, "Error: locked/out: cannot be used (Permission denied).\n")


# Progress on a terminal


def watch(*arguments: str, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Return the text on standard output and on a standard error that is a terminal."""
    import fcntl
    import pty
    import struct
    import termios

    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "gradcam", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(gradcam.__file__).parent.parent)}
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(controller, 65536):
                chunks.append(data)
        except OSError:  # The command has closed its end.
            pass

    reader = threading.Thread(target=read)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment) as process:
        os.close(terminal)
        reader.start()
        out = process.stdout.read()
    reader.join()
    os.close(controller)
    return out, b"".join(chunks).decode()


@pytest.mark.slow
@POSIX
def test_a_terminal_shows_that_torch_is_loaded_and_how_far_an_attribution_is(small: Photo, folder: Path) -> None:
    line = ("run", str(small("coffee.jpg")), "--device", "cpu", "--method", "smoothgrad")
    out, err = watch(*line)
    assert "coffee-smoothgrad.png" in out
    assert err.startswith("Loading PyTorch ...\r\x1b[K")
    assert re.search(r"\d of 25", err)
    assert not re.sub(r"[^\r]*\r", "", err).removeprefix("\x1b[K").strip()  # The progress bar is erased.
    assert watch(*line[:-1], "gradcam", "-q") == ("", "")


# Shell completion


def offers(*words: str) -> list[str]:
    environment = {**os.environ, "_GRADCAM_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["gradcam", *words])}
    environment |= {"COMP_CWORD": str(len(words)), "PYTHONPATH": str(Path(gradcam.__file__).parent.parent)}
    code = (
        "import sys\nsys.argv = ['gradcam']\nfrom gradcam.cli import main\ntry:\n    main()\n"
        "finally:\n    sys.stdout.flush()\n    assert 'torch' not in sys.modules, 'torch'"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "Error" not in result.stderr, result.stderr
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["ru"], {"run"}),
        (["run", "a.jpg", "--method", "layer"], {"layercam"}),
        (["run", "a.jpg", "--method", "gradcam,layer"], {"gradcam,layercam"}),
        (["check", "a.jpg", "--method", "ran"], {"random"}),
        (["evaluate", "a", "--metric", "roa"], {"road"}),
        (["run", "a.jpg", "--save", "ma"], {"map", "mask"}),
        (["run", "a.jpg", "-m", "resnet1"], {"resnet18", "resnet152", "resnet101"}),
        (["layers", "efficientnet_l"], {"efficientnet_lite0"}),
        (["run", "a.jpg", "-l", "layer4."], {f"layer4.{number}" for number in range(5)}),
        (["run", "a.jpg", "-m", "resnet18", "-l", "layer"], set()),
        (["run", "a.jpg", "-c", "tiger_c"], {"tiger_cat"}),
        (["run", "a.jpg", "--colormap", "turb"], {"turbo"}),
        (["run", "a.jpg", "--score", "l"], {"logit"}),
        (["run", "a.jpg", "--task", "det"], {"detection"}),
        (["run", "a.jpg", "--box", ""], {"all"}),
        (
            ["run", "a.jpg", "-m", "fasterrcnn_mob"],
            {"fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn"},
        ),
    ],
    ids=words,
)
def test_tab_offers_names(words: list[str], some: set[str]) -> None:
    names = offers(*words)
    assert {name for name in names if "." not in name or name.count(".") < 2} == some


def test_tab_knows_all_models_layers_classes_and_colour_maps(classifier: gradcam.Classifier) -> None:
    from torchvision import models

    places = (models, models.detection, models.segmentation)
    assert offers("run", "a.jpg", "-m", "") == [
        "efficientnet_lite0",
        *sorted(name for place in places for name in models.list_models(module=place)),
        *("timm:", "hf:", "open_clip:", "smp:", "yolo:"),
    ]
    weighted = {name.rpartition(".")[0] for name, _ in classifier.model.named_parameters()}
    layers = set(offers("run", "a.jpg", "-l", ""))
    assert weighted <= layers <= {name for name, _ in classifier.model.named_modules()}
    labels = offers("run", "a.jpg", "-c", "")
    assert [classifier.labels[classifier.find_class(labels[index])] for index in (0, 282, 999)] == [
        classifier.labels[index] for index in (0, 282, 999)
    ]
    assert set(offers("run", "a.jpg", "--colormap", "")) == set(COLORMAPS)
