"""Test `gradcam run --edit`, which removes parts of an image before the model sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gradcam
from gradcam.images.edit import edit_image
from tests.cli.test_cli import Command, files, folder, gradcam_command, pixels, run

__all__ = ["folder", "gradcam_command", "run"]  # fixtures


def test_edits_count(run: Command, folder: Path, photo: Callable[[str], Path], classifier: gradcam.Classifier) -> None:
    picture = photo("coffee.jpg")
    edits = ["erase:40:100,90+160,120", "mean:0,0,50,50"]
    result = run(picture, *(word for edit in edits for word in ("--edit", edit)), "--json")
    assert result.status == 0, result.err
    record = json.loads(result.out)
    edited = edit_image(gradcam.read_image(picture), edits)
    explanation = classifier.explain(edited)
    assert record["edits"] == edits
    assert record["predictions"][0]["probability"] == pytest.approx(float(explanation.probabilities().max()), abs=1e-4)
    (filename,) = files(folder)
    assert filename == "coffee-gradcam-edited.png"
    assert abs(pixels(folder / filename).astype(int) - explanation.overlay()).mean() < 1


def test_other_words_are_wrong_usage(run: Command, photo: Callable[[str], Path]) -> None:
    run(photo("coffee.jpg"), "--edit", "smear:1,2").check_error(2, "KIND:RADIUS:X,Y")


def test_what_lies_beside_the_picture_is_an_error(run: Command, photo: Callable[[str], Path]) -> None:
    result = run(photo("coffee.jpg"), "--edit", "mean:1000,0,1010,10")
    assert result.status == 1
    assert "mean:1000,0,1010,10 is outside the image, which is 600 pixels wide and 400 high." in result.err
