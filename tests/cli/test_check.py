"""Test `gradcam check`: its output, its files and its exit status."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import gradcam
from gradcam.cli.check import WIDTH
from gradcam.evaluation import check as check_in_python
from tests import colour_model
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command, pixels, records, small
from tests.helpers import strict

__all__ = ["folder", "gradcam_command", "small"]  # fixtures

# The network has random weights, so its heatmaps carry little evidence; "constant" is a map that ignores the model.
STATUSES = [
    ("gradcam", "failed", 0), ("gradcam", "undecided", 1), ("constant", "failed", 1), ("constant", "undecided", 1)
]  # fmt: skip
MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
"""

COLOUR_MODEL = ["-m", f"{colour_model.__file__}:make", "--size", 32, "--crop", 1, "--mean", "0,0,0", "--std", "1,1,1"]
FUNCTIONS = '''
import torch
from torch.nn import functional as F


def correct(model, images, classes):
    """Return Grad-CAM of the colour model, without gradcam."""
    with torch.no_grad():
        maps = model.relu(model.cells(images))[range(len(images)), classes]
    return F.interpolate(maps[:, None], images.shape[2:], mode="bilinear")[:, 0]


def moved(model, images, classes):
    """Move the heatmaps by one cell (4 pixels) to the right: a bug."""
    return F.pad(correct(model, images, classes), (4, -4))
'''
SCHEMAS = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture
def check(gradcam_command: Command, folder: Path) -> Command:
    """Return a function that runs `gradcam check` with a small, fast model."""
    (folder.parent / "model.py").write_text(MODEL)
    name = f"{folder.parent / 'model.py'}:make"
    return lambda *arguments: gradcam_command("check", "-m", name, "--size", 64, "--device", "cpu", *arguments)


@pytest.mark.slow
def test_the_koala_passes(gradcam_command: Command, folder: Path, photo: Photo, classifier: gradcam.Classifier) -> None:
    outcome = gradcam_command("check", "--device", "cpu", photo("koala.webp"))
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == ["koala-gradcam-check.png"]
    verdict = check_in_python(classifier, photo("koala.webp"))
    assert np.array_equal(pixels(folder / "koala-gradcam-check.png"), verdict.panel())
    assert re.search(r"^koala\.webp   \d+ x \d+   efficientnet_lite0 on cpu   \d+\.\d s$", outcome.out, re.M)
    assert "  koala (105), 93 %, by gradcam at layer4\n" in outcome.out
    text = " ".join(outcome.out.split())
    for test in verdict.tests:
        assert f"passed {test.question} {test.reason}" in text
    assert "Verdict: passed. A passed test does not prove that the heatmap is right." in text
    assert f"{verdict.summary} → koala-gradcam-check.png" in text
    controls = "the mirrored heatmap, the heatmap shifted by a third, the heatmap of another image"
    assert f"The heatmap is distinguished from {controls}" in text
    assert max(map(len, outcome.out.splitlines())) <= WIDTH


@pytest.mark.slow
def test_a_map_that_fails_is_a_result(gradcam_command: Command, folder: Path, photo: Photo) -> None:
    outcome = gradcam_command("check", "--device", "cpu", "--method", "centre", photo("koala.webp"), "--json")
    (record,) = records(outcome)
    assert (outcome.status, record["outcome"], record["status"]) == (0, "failed", "ok")
    assert (record["method"], record["layer"], record["distinguished_from"]) == ("centre", None, [])
    assert [(test["name"], test["outcome"]) for test in record["tests"]] == [
        ("stability", "passed"),
        ("classes", "failed"),
    ]
    assert record["panel"] == "koala-centre-check.png"
    assert files(folder) == ["koala-centre-check.png"]
    outcome = gradcam_command("check", "--device", "cpu", "--method", "centre", photo("koala.webp"))
    assert "Verdict: failed." in outcome.out
    assert "passed test" not in outcome.out


def test_several_methods_get_a_verdict_each(check: Command, folder: Path, small: Photo) -> None:
    outcome = check(small("koala.webp"), "--methods", "gradcam,Random", "--json")
    assert [record["method"] for record in records(outcome)] == ["gradcam", "random"]
    assert [record["panel"] for record in records(outcome)] == files(folder)
    assert files(folder) == [f"koala-{name}-check-model.py_make.png" for name in ("gradcam", "random")]
    assert "several results" in check(small("koala.webp"), "--method", "gradcam,random", "-o", "it.png").err


@pytest.mark.parametrize(("method", "limit", "status"), STATUSES)
def test_a_verdict_may_end_with_a_status(check: Command, small: Photo, method: str, limit: str, status: int) -> None:
    outcome = check(small("koala.webp"), "--method", method, "--fail-on", limit)
    assert outcome.status == status


def test_the_other_images_are_compared(gradcam_command: Command, folder: Path, classifier: gradcam.Classifier) -> None:
    pictures = [
        colour_model.paint(folder / f"{number}.png", colour, seed=1) for number, colour in enumerate([1, 0, 0, 0])
    ]
    (folder / "broken.png").write_bytes(b"no picture")
    outcome = gradcam_command("check", *COLOUR_MODEL, "--device", "cpu", "--json", *pictures, folder / "broken.png")
    rows = records(outcome)
    assert [record["status"] for record in rows] == ["ok"] * 4 + ["failed"]
    alone = records(gradcam_command("check", *COLOUR_MODEL, "--device", "cpu", "--json", "-o", "alone", pictures[0]))[0]
    effects = [{sham["name"]: sham["effect"] for sham in record["controls"]} for record in (rows[0], alone)]
    assert effects[0]["edges"] != effects[1]["edges"]  # The other images of the command are its references.


def test_a_broken_picture_does_not_stop_the_others(check: Command, folder: Path, small: Photo) -> None:
    outcome = check("missing.png", small("koala.webp"), small("panda.webp"), "--json")
    outcome.check_error(1, "missing.png: does not exist\n")
    failed, *successes = records(outcome)
    assert (failed["status"], failed["image"], failed["error"]) == (
        "failed",
        "missing.png",
        "missing.png: does not exist",
    )
    assert "outcome" not in failed
    assert [item["status"] for item in successes] == ["ok", "ok"]
    assert files(folder) == ["koala-gradcam-check-model.py_make.png", "panda-gradcam-check-model.py_make.png"]


# The verdict over all images


@pytest.fixture
def check_painted(gradcam_command: Command, folder: Path) -> Command:
    """Return a function that runs `gradcam check` on a number of painted images with the colour model."""
    (folder / "functions.py").write_text(FUNCTIONS)

    def call(count: int, *arguments: object) -> Any:
        paths = [colour_model.paint(folder / f"{number}.png", number % 5, seed=number) for number in range(count)]
        return gradcam_command("check", *COLOUR_MODEL, "--device", "cpu", "-o", "panels", *paths, *arguments)

    return call


def test_a_verdict_over_all_images_ends_the_output(check_painted: Command, folder: Path) -> None:
    outcome = check_painted(6, "--method", "functions.py:moved")
    options = {"size": 32, "crop": 1.0, "mean": (0, 0, 0), "std": (1, 1, 1), "device": "cpu"}
    classifier = gradcam.load_classifier(f"{colour_model.__file__}:make", **options)
    paths = [folder / f"{number}.png" for number in range(6)]
    verdict = check_in_python(classifier, paths, method="functions.py:moved")
    text, _, last = outcome.out.partition("\n6 images, by moved: ")
    title, *lines = last.splitlines()
    assert text.count("Verdict: ") == 6
    assert (title, outcome.status) == ("failed", 0)
    assert " ".join(map(str.strip, lines)) == verdict.summary
    assert "The heatmaps are displaced 1.0 grid cells right (4 pixels;" in verdict.summary
    assert max(map(len, lines)) <= WIDTH


def test_the_record_over_all_images_is_the_last_record(check_painted: Command, folder: Path) -> None:
    outcome = check_painted(6, "--methods", "functions.py:correct,functions.py:moved", "--json", "--fail-on", "failed")
    rows = records(outcome)
    kinds = [("folder" in row, row["method"]) for row in rows]
    assert kinds == [*[(False, "correct")] * 6, (True, "correct"), *[(False, "moved")] * 6, (True, "moved")]
    correct, moved = rows[6], rows[13]
    schema = strict(json.loads((SCHEMAS / "folder_check.schema.json").read_text(encoding="utf-8")))
    for record in (correct, moved):
        jsonschema.validate(record, schema)
        assert record["folder"]["images"] == len(record["folder"]["deviations"]) == 6
    assert correct["folder"]["bugs"] == []
    assert max(correct["folder"]["deviations"]) < 1e-5
    assert [bug["kind"] for bug in moved["folder"]["bugs"]] == ["displaced"]
    assert moved["folder"]["displacement"]["across"]["mean"] == pytest.approx(1, abs=0.01)
    assert moved["folder"]["displacement"]["down"]["mean"] == pytest.approx(0, abs=0.01)
    # No single image failed, so the bug that repeats over the images sets the exit status.
    assert "failed" not in {row.get("outcome") for row in rows}
    assert (moved["folder"]["outcome"], outcome.status) == ("failed", 1)


@pytest.mark.parametrize("count", [1, 5])
def test_few_images_have_no_verdict_over_all(check_painted: Command, folder: Path, count: int) -> None:
    outcome = check_painted(count)
    message = (
        f"A verdict over several images needs at least 6 images, got {count}: add images, or check the images one "
    )
    message += "by one."
    assert (message in outcome.out) == (count > 1)
    assert (outcome.status, outcome.out.count("Verdict: "), " images, by " in outcome.out) == (0, count, False)


def test_images_that_cannot_be_read_do_not_count(check_painted: Command, folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"no picture")
    outcome = check_painted(5, folder / "broken.png", "--json")
    assert (outcome.status, [row["status"] for row in records(outcome)]) == (1, ["ok"] * 5 + ["failed"])


def test_options_are_those_of_python(check: Command, folder: Path, small: Photo) -> None:
    path = small("koala.webp")
    options = [
        "-l", 0, "-c", 2, "--method", "HiResCAM", "--score", "contrast", "--seed", 5, "-o", "out/it.png", "--json",
    ]  # fmt: skip
    (record,) = records(check(path, *options))
    assert files(folder) == ["out/it.png"]
    classifier = gradcam.load_classifier(f"{folder.parent / 'model.py'}:make", size=64, device="cpu")
    verdict = check_in_python(classifier, path, layer="0", target=2, method="hirescam", score="contrast", seed=5)
    assert {key: record[key] for key in verdict.to_record()} == verdict.to_record()
    assert np.array_equal(pixels(folder / "out" / "it.png"), verdict.panel())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "gradcm"], "There is no method or control 'gradcm'. Nearest: 'gradcam'"),
        (["--score", "loss"], "'loss' is not one of 'logit', 'probability', 'contrast'"),
        (["--seed", -1], "-1 is out of range"),
        (["-l", "nothing"], "There is no layer 'nothing'"),
        (["-c", "koala"], "koala"),
        (["-o", "it.gif"], "images can only be written as"),
    ],
)
def test_wrong_usage(options: list[object], message: str, check: Command, folder: Path, small: Photo) -> None:
    check(small("koala.webp"), *options).check_error(2, message)
    assert files(folder) == []


def test_one_file_for_two_panels_is_refused(check: Command, small: Photo) -> None:
    check(small("koala.webp"), small("panda.webp"), "-o", "it.png").check_error(2, "it.png is one file, but there are")


PASSES = r"\d of 45"


def test_a_progress_bar(check: Command, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small("koala.webp")
    assert not re.search(PASSES, check(path, "--json").err)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert re.search(PASSES, check(path, "--json").err)
    assert not re.search(PASSES, check(path, "-q").err)
