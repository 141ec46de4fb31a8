"""Test `gradcam audit`: its output, its files and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import gradcam
from gradcam.evaluation import audit as audit_in_python
from tests.cli.test_cli import Command, files, folder, gradcam_command
from tests.fruit import CLASSES, IMAGE_PIXELS, MODEL, write_fruit

__all__ = ["folder", "gradcam_command"]  # fixtures


@pytest.fixture
def marked(folder: Path) -> list[str]:
    (folder / "net.py").write_text(MODEL)
    (folder / "names.txt").write_text("\n".join(CLASSES))
    return write_fruit(folder / "fruit")


@pytest.fixture
def audit(gradcam_command: Command, marked: list[str]) -> Command:
    preprocessing = ("--size", f"{IMAGE_PIXELS}x{IMAGE_PIXELS}", "--mean", "0,0,0", "--std", "1,1,1", "--device", "cpu")
    model_options = ("--model", "net.py:fruit", "--class-names", "names.txt", *preprocessing)
    return lambda *arguments: gradcam_command("audit", *arguments, *model_options)


def test_the_mark_is_first_in_table_sheet_and_page(audit: Command, marked: list[str], folder: Path) -> None:
    outcome = audit("fruit/", "--page", "audit.html")
    assert outcome.status == 0, outcome.err
    heading, _, head, first, *remaining = outcome.out.splitlines()
    pattern = r"net\.py:fruit on cpu   gradcam at 1   80 images of 2 classes   \d+ clusters   \d+\.\d s"
    assert re.fullmatch(pattern, heading)
    titles = ["suspicion", "class", "images", "where", "images of other classes with evidence there"]
    assert re.split(r"\s{2,}", head.strip()) == titles
    assert re.split(r"\s{2,}", first.strip())[2:] == ["apple", "6 of 40", "in the bottom right corner", "0 of 40"]
    start = next(
        i for i, line in enumerate(remaining) if line.startswith("  Evidence that most images of a class share")
    )
    assert remaining[start + 1].split() == ["purity", "class", "images", "where"]
    assert {re.split(r"\s{2,}", line.strip())[2] for line in remaining[start + 2 : start + 4]} == {"apple", "lime"}
    looked_at = next(line for line in remaining if "Look at these images first: " in line)
    assert set(re.findall(r"apple/\d\d\.png", looked_at)) <= set(marked)
    assert {"audit.png", "audit.html"} <= set(files(folder))
    page = (folder / "audit.html").read_text()
    assert page.index("in the bottom right corner") < page.index("all over the image") < page.index(", whole class")
    assert all(name in page for name in re.findall(r"apple/\d\d\.png", looked_at))
    preprocessing = {"size": (IMAGE_PIXELS, IMAGE_PIXELS), "mean": (0,) * 3, "std": (1,) * 3}
    name, labels = f"{folder / 'net.py'}:fruit", list(CLASSES)
    classifier = gradcam.load_classifier(name, labels=labels, **preprocessing, device="cpu")
    expected = audit_in_python(folder / "fruit", classifier)
    assert np.array_equal(gradcam.read_image(folder / "audit.png"), expected.sheet())


def test_json_equals_python_and_a_table_gives_the_classes(audit: Command, marked: list[str], folder: Path) -> None:
    rows = [f"fruit/{item}/{number:02}.png,{item}" for item in CLASSES for number in range(40)]
    (folder / "labels.csv").write_text("\n".join(["image,class", *rows[:-1]]))
    outcome = audit("fruit/", "--labels", "labels.csv", "--json", "--output", "found/")
    outcome.check_error(1, "lime/39.png: there is no label in labels.csv")
    record = json.loads(outcome.out)
    assert (record["kind"], record["source"], record["sheet"]) == ("gradcam audit", "labels.csv", "found/audit.png")
    assert set(record["clusters"][0]["members"]) == set(marked)
    assert (folder / "found/audit.png").exists()


def test_what_is_wrong_is_one_line(audit: Command, folder: Path) -> None:
    for arguments, words, status in (
        (("fruit/lime", "--labels", "predicted"), "are of one class, lime", 2),
        (("fruit/", "--labels", "names.json"), "with the columns image and class", 2),
        (("fruit/", "--page", "audit.pdf"), "does not end in .html or .htm", 2),
        (("fruit/", "--page", "none/audit.html"), "there is no folder none", 2),
        (("fruit/", "-o", "fruit/apple/00.png"), "is an input image and is never overwritten", 2),
    ):
        outcome = audit(*arguments)
        assert (outcome.status, outcome.out) == (status, ""), arguments
        assert words in " ".join(outcome.err.split())


def test_many_failures_are_counted(audit: Command, folder: Path) -> None:
    for number in range(15):
        (folder / f"fruit/apple/x{number:02}.png").write_bytes(b"nothing")
    outcome = audit("fruit/", "--quiet")
    assert (outcome.status, outcome.out) == (1, "")
    lines = outcome.err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "... and 5 more. Use --json to list them."
