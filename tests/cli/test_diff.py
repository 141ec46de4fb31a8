"""Test `gradcam diff`: its output, its files and its exit status."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

import gradcam
from gradcam.evaluation import diff as diff_in_python
from gradcam.evaluation import read_snapshot
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command, pixels, records, small

__all__ = ["folder", "gradcam_command", "small"]  # fixtures

MODEL = """
import torch
from torch import nn

def make(seed=0, classes=4, name="stem"):
    torch.manual_seed(seed)
    layers = {name: nn.Conv2d(3, 8, 3, stride=4), "relu": nn.ReLU(), "last": nn.Conv2d(8, 8, 3)}
    model = nn.Sequential()
    for key, layer in layers.items():
        model.add_module(key, layer)
    model.add_module("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)))
    return model

def other():
    return make(3)

def five():
    return make(0, 5)

def renamed():
    return make(0, name="trunk")
"""
SIZES = ("--size", 64, "--device", "cpu")


@pytest.fixture
def models(folder: Path) -> Callable[[str], str]:
    (folder.parent / "models.py").write_text(MODEL)
    return lambda name: f"{folder.parent / 'models.py'}:{name}"


@pytest.fixture
def diff(gradcam_command: Command) -> Command:
    return lambda *arguments: gradcam_command("diff", *arguments, *SIZES)


@pytest.fixture
def pictures(small: Photo) -> Path:
    for name in ("koala.webp", "coffee.jpg", "panda.webp"):
        path = small(name)
    return path.parent


def join_words(text: str) -> str:
    return " ".join(text.split())


def test_the_table(gradcam_command: Command, models: Callable[[str], str], pictures: Path, folder: Path) -> None:
    outcome = gradcam_command("diff", models("make"), models("other"), pictures, *SIZES)
    old, new = (gradcam.load_classifier(models(name), size=64, device="cpu") for name in ("make", "other"))
    difference = diff_in_python(old, new, pictures)
    assert outcome.status == 0
    assert files(folder) == []  # Without an option for it, no file is written.
    lines = outcome.out.splitlines()
    assert re.fullmatch(r".*make → .*other   gradcam at last   \d+\.\d s", lines[0])
    assert lines[2].split() == ["image", "old", "new", "correlation", "top", "30", "%", "moved"]
    words = {"map": "different heatmap", "class": "another class", "none": "alike"}
    for line, row in zip(lines[3:], difference.rows):
        old_says, new_says = (f"class {item.index} {100 * item.probability:.0f} %" for item in (row.old, row.new))
        numbers = f"{row.correlation:.3f} {100 * row.overlap:.0f} % {100 * row.moved:.1f} %"
        assert join_words(line) == f"{row.image} {old_says} {new_says} {numbers} {words[row.change]}"
    assert lines[-2:] == [f"  {difference.summary}.", ""]


def test_json_has_a_record_per_image(diff: Command, models: Callable[[str], str], pictures: Path) -> None:
    (pictures / "broken.jpg").write_bytes(b"no picture")
    outcome = diff(models("make"), models("other"), pictures, "--json", "--fail-if", "correlation<2")
    outcome.check_error(1, "broken.jpg: is not an image")
    *rows, failed = records(outcome)
    assert (failed["image"], failed["status"]) == ("broken.jpg", "failed")
    old, new = (gradcam.load_classifier(models(name), size=64, device="cpu") for name in ("make", "other"))
    difference = diff_in_python(old, new, pictures)
    assert [row["image"] for row in rows] == [row.image for row in difference.rows]
    for record, row in zip(rows, difference.rows):
        assert {key: record[key] for key in row.to_record()} == row.to_record()
        assert (record["schema"], record["status"], record["met"]) == (1, "ok", ["correlation<2"])


def test_a_long_list_is_cut(diff: Command, models: Callable[[str], str], small: Photo) -> None:
    folder = small("koala.webp").parent
    content = gradcam.read_image(folder / "koala.png")
    for number in range(12):
        gradcam.write_image(folder / f"{'long-name-of-a-picture-' * 3}{number}.png", content)
    outcome = diff(models("make"), models("make"), folder)
    assert join_words("and 3 more images, all alike (use --json to list all images)") in join_words(outcome.out)
    lines = outcome.out.splitlines()
    assert [line.endswith("alike") for line in lines[3:14]] == [True] * 10 + [False]
    assert max(map(len, lines[3:13])) < 120
    assert "…" in outcome.out


# Snapshots and gates


def test_snapshots_are_compared(diff: Command, models: Callable[[str], str], pictures: Path, folder: Path) -> None:
    assert diff(models("make"), pictures, "--save", "base").status == 0
    assert files(folder) == ["base"]
    assert len(read_snapshot("base").entries) == 3
    unchanged = diff(
        models("make"), pictures, "--against", "base", "--fail-if", "correlation<0.999", "--fail-if", "agree<1"
    )
    assert (unchanged.status, "Failed" in unchanged.err) == (0, False)
    from_snapshot = diff(models("other"), pictures, "--against", "base", "--json")
    with_both = diff(models("make"), models("other"), pictures, "--json")
    keys = ("image", "correlation", "overlap", "moved", "drop", "old", "new")
    for first, second in zip(records(from_snapshot), records(with_both), strict=True):
        assert [first[key] for key in keys] == [second[key] for key in keys]


def test_saving_says_what_it_kept(diff: Command, models: Callable[[str], str], pictures: Path) -> None:
    outcome = diff(models("make"), pictures, "--save", "base.npz")
    assert "models.py:make   gradcam at last   3 images\n" in outcome.out
    assert "→  base.npz" in outcome.out
    again = diff(models("make"), pictures, "--save", "base.npz", "--json")
    assert [record["image"] for record in records(again)] == ["coffee.png", "koala.png", "panda.png"]
    assert all(record["predictions"] for record in records(again))


def test_met_conditions_fail_the_run(diff: Command, models: Callable[[str], str], pictures: Path, folder: Path) -> None:
    options = [
        "--fail-if", "correlation<0.99", "--fail-if", "mean agree<2", "--fail-if", "moved>1", "--junit", "it.xml"
    ]  # fmt: skip
    outcome = diff(models("make"), models("other"), pictures, *options, "-q")
    assert (outcome.status, outcome.out) == (1, "")
    rows = records(diff(models("make"), models("other"), pictures, "--json"))
    least = min(rows, key=lambda row: row["correlation"])
    assert f"images: correlation is {least['correlation']:.4g} for {least['image']}\n" in outcome.err
    moved_errors = diff(models("make"), models("other"), pictures, "--fail-if", "moved>0.0001", "-q").err
    greatest = max(rows, key=lambda row: row["moved"])
    assert (
        moved_errors == f"Failed: moved>0.0001 in 3 images: moved is {greatest['moved']:.4g} for {greatest['image']}\n"
    )
    assert re.search(
        r"^Failed: correlation<0.99 in \d images?: correlation is -?0\.\d+ for \w+\.png$", outcome.err, re.M
    )
    assert re.search(r"^Failed: mean agree<2: agree is [\d.]+ for the mean of all images$", outcome.err, re.M)
    assert "moved" not in outcome.err
    (suite,) = ElementTree.parse(folder / "it.xml").getroot()
    assert suite.get("tests") == "4"
    assert {case.get("name") for case in suite} == {"coffee.png", "koala.png", "panda.png", "the mean of all images"}


def test_the_layer_of_a_snapshot_is_used_if_found(diff: Command, models: Callable[[str], str], pictures: Path) -> None:
    assert diff(models("make"), pictures, "--save", "base", "--layer", "stem").status == 0
    assert "gradcam at stem   " in diff(models("other"), pictures, "--against", "base").out
    outcome = diff(models("renamed"), pictures, "--against", "base")
    assert outcome.status == 0
    assert "gradcam at stem → last" in outcome.out
    assert "Note: OLD is explained at stem and NEW at last." in outcome.err
    assert "Note: The models have different architectures" in outcome.err
    diff(models("renamed"), pictures, "--against", "base", "--layer", "stem").check_error(
        2, "Error: NEW, ", "There is no layer 'stem'", "Set the layer of NEW with --layer-new"
    )


def test_options_of_a_model(
    gradcam_command: Command, models: Callable[[str], str], small: Photo, tmp_path: Path
) -> None:
    import torch

    path = small("koala.webp")
    exec(MODEL, names := {})
    torch.save(names["other"]().state_dict(), tmp_path / "other.pth")
    both = [models("make"), models("make"), path, *SIZES]
    options = ("--precision-old", "bf16", "--json")
    outcome = gradcam_command("diff", *both, "--weights-new", tmp_path / "other.pth", *options)
    expected = gradcam_command("diff", models("make"), models("other"), path, *SIZES, *options)
    (record,), (expected_record,) = records(outcome), records(expected)
    assert record["correlation"] == expected_record["correlation"] != 1
    layers = gradcam_command("diff", *both, "--layer-old", "stem", "--layer-new", "last")
    assert "gradcam at stem → last" in layers.out


# Files


def test_the_page_is_standalone(diff: Command, models: Callable[[str], str], pictures: Path, folder: Path) -> None:
    (pictures / "broken <b>.jpg").write_bytes(b"no picture")
    outcome = diff(models("make"), models("other"), pictures, "--page", "it.html", "--json")
    assert files(folder) == ["it.html"]
    page = (folder / "it.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2><span>(.*?)</span>", page) == [
        record["image"] for record in records(outcome) if record["status"] == "ok"
    ]
    assert page.count("<img ") == 12
    assert "broken &lt;b&gt;.jpg: is not an image" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert str(folder.parent) not in page
    data = base64.b64decode(re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)[0])
    embedded = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    first = gradcam.read_image(pictures / str(records(outcome)[0]["image"]))
    assert abs(embedded.mean() - first.mean()) < 20
    assert diff(models("make"), models("other"), pictures, "--page", "same.html", "-q").status == 1
    assert (folder / "same.html").read_text(encoding="utf-8") == page


def test_panels_are_those_of_python(diff: Command, models: Callable[[str], str], small: Photo, folder: Path) -> None:
    path = small("koala.webp")
    outcome = diff(models("make"), models("other"), path, "-o", "panels", "--json")
    assert files(folder) == ["panels/koala-diff.png"]
    assert records(outcome)[0]["panel"] == "panels/koala-diff.png"
    old, new = (gradcam.load_classifier(models(name), size=64, device="cpu") for name in ("make", "other"))
    assert np.array_equal(pixels(folder / "panels/koala-diff.png"), diff_in_python(old, new, path).rows[0].panel())


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["make", "other"], "There are no images"),
        (["make"], "There are no images"),
        (["make", "koala.png"], "koala.png is not a model. Give two models, OLD NEW, before the images. With --ag"),
        (["make", "photos/", "--save", "a", "--against", "b"], "give only one of them"),
        (["make", "photos/", "--against", "missing"], "Take a snapshot with gradcam diff MODEL IMAGE... --save FILE"),
        (["make", "photos/", "--against", "base", "--weights-old", "A"], "--weights-old needs two models"),
        (["make", "photos/", "--save", "new", "--layer-old", "last"], "--layer-old needs two models"),
        (["make", "photos/", "--save", "models.py"], "models.py: is not a snapshot"),
        (["make", "photos/", "--save", "new", "--page", "a.html"], "compares nothing: remove"),
        (["make", "other", "photos/", "--fail-if", "colour<1"], "'colour<1' is not a condition"),
        (["make", "other", "photos/", "--fail-if", "correlation<=1"], "expected NAME<NUMBER or NAME>NUMBER"),
        (["make", "other", "photos/", "--page", "a.png"], "does not end in .html"),
        (["make", "other", "photos/", "--junit", "nowhere/a.xml"], "there is no folder nowhere"),
        (["make", "other", "photos/", "--alike", "3"], "is out of range"),
        (["make", "other", "photos/", "--method", "gradcm"], "Nearest: 'gradcam'"),
        (["make", "other", "empty/"], "no image"),
        (["make", "other", "nowhere.png"], "nowhere.png: does not exist"),
        (["make", "five", "photos/"], "has 4 classes and NEW"),
        (["make", "renamed", "photos/", "--layer", "stem"], "Set the layer of NEW with --layer-new"),
        (["make", "nobody", "photos/"], "Error: NEW, "),
    ],
)
def test_mistakes_are_told_in_a_line(
    words: list[str], message: str, diff: Command, models: Callable[[str], str], pictures: Path
) -> None:
    folder = Path.cwd()
    pictures.rename(folder / "photos")
    (folder / "empty").mkdir()
    (folder / "models.py").write_text(MODEL)
    if "base" in words:
        diff(models("make"), "photos/", "--save", "base")
    before = files(folder)
    arguments = [models(word) if word in ("make", "other", "five", "renamed", "nobody") else word for word in words]
    outcome = diff(*arguments)
    assert outcome.status == 2
    assert message in join_words(outcome.err)
    assert "Traceback" not in outcome.err
    assert [file for file in files(folder) if "__pycache__" not in file] == before


def test_all_tasks_of_a_keypoint_model_are_named(diff: Command, folder: Path, pictures: Path) -> None:
    code = "from tests.detectors import make_detector\n\ndef make():\n    return make_detector('{}').float()\n"
    for name, tasks in (("keypointrcnn", "detection and pose"), ("fasterrcnn", "detection")):
        (folder / f"{name}.py").write_text(code.format(name))
        outcome = diff(f"{name}.py:make", f"{name}.py:make", pictures)
        assert outcome.status == 2
        assert f"compares classifiers, but this model is for {tasks}.\n" in outcome.err


def test_progress(diff: Command, models: Callable[[str], str], small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small("koala.webp")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert "of 2" in diff(models("make"), models("other"), path, "--json").err


def test_against_is_one_of_the_main_options(gradcam_command: Command) -> None:
    text = gradcam_command("diff", "--help").out
    assert text.index("  --against FILE ") < text.index("\nExplanation:")
