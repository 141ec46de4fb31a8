"""Run the command and the Python code that a page shows for copying, for each kind of target, and compare the maps."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import Visit, needs_browser
from tests.cli.test_cli import Command, folder, gradcam_command
from tests.cli.test_tasks import (
    BLUE,
    DETECTOR,
    GREEN,
    MATCHER,
    PREPROCESSING,
    RED,
    SEGMENTER,
    flag,
    models_file,
    street,
    write_colours,
)
from tests.web.test_page import read, to_maps

__all__ = ["flag", "folder", "gradcam_command", "models_file", "street"]  # fixtures

pytestmark = [pytest.mark.slow, needs_browser]
CLASSIFIER = ("--model", "../mine.py:classes", "--size", "32", *PREPROCESSING)
CAPTIONER = ("--model", "../mine.py:captioner", "--size", "32x32", *PREPROCESSING)
KEYPOINTS = ("--model", "../mine.py:segmenter", "--size", "32", *PREPROCESSING, "--task", "pose")
# The arguments of gradcam page, the words of the command that select target N, and the number of targets.
CASES: dict[str, tuple[tuple[str, ...], str, int]] = {
    "class": (CLASSIFIER, "--class N", 3),
    "box": (DETECTOR, "--box N", 12),
    "edge": ((*DETECTOR, "--box", "1", "--edge", "left"), "--box 1 --edge left", 1),
    "missed": ((*DETECTOR, "--missed", "8,8,40.5,48", "--class", "1"), "--missed 8,8,40.5,48 --class 1", 1),
    "mask": (SEGMENTER, "--class N", 2),
    "mask at a point": ((*SEGMENTER, "--mask", "40,5"), "--class 0 --mask 40,5", 1),
    "mask in a box": ((*SEGMENTER, "--mask", "4,4,12,16", "--class", "1"), "--class 1 --mask 4,4,12,16", 1),
    "text": ((*MATCHER, "--text", "a red flag", "--text", "it's green"), "--text ", 2),
    "like": ((*MATCHER, "--like", "other.png"), "--like other.png", 1),
    "word": (CAPTIONER, "--word N", 40),
    "keypoint": ((*KEYPOINTS, "--keypoint", "all"), "--keypoint N", 3),
    "axis": ((*KEYPOINTS, "--keypoint", "1,2", "--axis", "y"), "--axis y", 2),
}


def assert_close(values: Any, expected: Any) -> None:
    """Compare a map of positive evidence with a map of the page, whose values are stored in eight bits."""
    np.testing.assert_allclose(np.asarray(values), np.maximum(expected, 0), atol=0.006 * float(np.abs(expected).max()))


@pytest.fixture
def photos(folder: Path, flag: Path, street: Path, models_file: str) -> Path:
    """Return a folder with the images, beside the models."""
    for path in (flag, street):
        (folder / path.name).write_bytes(path.read_bytes())
    return write_colours(folder / "other.png", GREEN, RED, BLUE).parent


@pytest.mark.parametrize("kind", CASES)
def test_copied_commands_and_code_reproduce_the_heatmap(
    kind: str, visit: Callable[..., Visit], gradcam_command: Command, photos: Path
) -> None:
    arguments, words, count = CASES[kind]
    image = photos / ("flag.png" if {"../mine.py:segmenter", "../mine.py:towers"} & {*arguments} else "street.png")
    outcome = gradcam_command("page", image.name, *arguments, "-o", "page.html", "--device", "cpu")
    assert outcome.status == 0, outcome.err
    data = read(photos / "page.html")
    (entry,) = [item for item in data["maps"] if item["layer"] == data["maps"][0]["layer"]]
    maps, names = to_maps(entry), data["targets"]["names"]
    assert len(names) == len(maps) == count
    page, mapped = visit().page, [target for target, values in enumerate(maps) if (values > 0).any()]
    for target in {mapped[0], mapped[-1]}:  # A blank map equals any other blank map.
        index = data["targets"]["indices"][target]
        number = index if kind in ("class", "mask") else target
        page.goto("about:blank")
        page.goto((photos / "page.html").as_uri() + f"#target={index if kind == 'class' else target}")
        command = page.locator("#command").inner_text()
        assert words.replace("N", str(number)) in command
        outcome = gradcam_command(*shlex.split(command)[1:], "--save", "map", "-o", f"out{target}", "--device", "cpu")
        assert outcome.status == 0, (command, outcome.err)
        files = [file for file in (photos / f"out{target}").iterdir() if file.name.startswith(image.stem)]
        (values,) = [np.load(file) for file in files]
        assert_close(values, maps[target])
        code = page.locator("#python").inner_text()
        namespace: dict[str, Any] = {}
        exec(code.rpartition("\n")[0], namespace)  # Runs all but the line that saves the file.
        assert_close(namespace["explanation"].maps[0, 0], maps[target])
