"""Test `gradcam inspect activations`: its files, its output and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradcam
from gradcam.cli._job import to_record
from gradcam.cli._terminal import format_title
from gradcam.cli.inspect.activations import _format
from gradcam.inspection.channels import activations, measure_strengths
from gradcam.inspection.sheets import draw_activations
from tests.cli.test_cli import Command, Outcome, Photo, files, folder, gradcam_command, pixels

__all__ = ["folder", "gradcam_command"]  # fixtures


@pytest.fixture
def inspect(gradcam_command: Command) -> Command:
    """Return a function that runs `gradcam inspect activations` on the CPU."""
    return lambda *arguments: gradcam_command("inspect", "activations", "--device", "cpu", *arguments)


def draw(classifier: gradcam.Classifier, path: Path, layers: list[str], **options: Any) -> np.ndarray[Any, Any]:
    """Return the sheet as the Python functions draw it."""
    picture = gradcam.read_image(path)
    y0, x0, height, width = classifier.region(*picture.shape[:2])
    feature_maps = activations(classifier.model, classifier.batch([picture]), layers)
    crop, title = picture[y0 : y0 + height, x0 : x0 + width], f"{path.name}, as seen by efficientnet_lite0"
    return draw_activations(feature_maps, input_image=crop, title=title, **options)


# Files


def test_python_draws_the_same(inspect: Command, folder: Path, photo: Photo, classifier: gradcam.Classifier) -> None:
    path = photo("coffee.jpg")
    outcome = inspect(path)
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == ["coffee-activations.png"]
    assert np.array_equal(pixels(folder / "coffee-activations.png"), draw(classifier, path, ["layer4"]))


def test_options_change_the_sheet(inspect: Command, folder: Path, photo: Photo, classifier: gradcam.Classifier) -> None:
    path = photo("koala.webp")
    outcome = inspect(
        path, "-l", "stem.0", "--layer", "layer[34].0", "--channels", "7", "--columns", "3", "--order", "index",
        "--scale", "layer", "--cell", "33", "--colormap", "viridis", "-o", "sheet.png", "-q",
    )  # fmt: skip
    assert outcome == Outcome(0, "", "")
    options = {"channels": 7, "columns": 3, "order": "index", "scale": "layer", "size": 33, "colormap": "viridis"}
    expected = draw(classifier, path, ["stem.0", "layer[34].0"], **options)
    assert files(folder) == ["sheet.png"]
    assert np.array_equal(pixels(folder / "sheet.png"), expected)


def test_a_cells_size_is_not_the_networks(inspect: Command, folder: Path, photo: Photo) -> None:
    widths, grids = [], []
    for options in (["--cell", "40"], ["--size", "160"]):
        outcome = inspect(photo("rocket.jpg"), *options, "-o", "a.png", "--json")
        grids.append(json.loads(outcome.out)["layers"][0]["grid"])
        widths.append(pixels(folder / "a.png").shape[1])
    assert grids == [[7, 7], [5, 5]]
    assert widths[0] < widths[1]


def test_two_images_with_one_stem_have_two_files(inspect: Command, folder: Path, photo: Photo, tmp_path: Path) -> None:
    namesake = tmp_path / "coffee.png"
    Image.open(photo("chelsea.jpg")).save(namesake)
    earlier_sheet = folder / "coffee-activations-2.png"
    Image.open(photo("camera.png")).save(earlier_sheet)
    before = earlier_sheet.read_bytes()
    outcome = inspect(photo("coffee.jpg"), namesake, earlier_sheet, "--channels", "1", "--json")
    assert outcome.status == 0
    written = [json.loads(line)["file"] for line in outcome.out.splitlines()]
    assert written == ["coffee-activations.png", "coffee-activations-3.png", "coffee-activations-2-activations.png"]
    assert earlier_sheet.read_bytes() == before
    assert len(files(folder)) == 4


# Output


def test_the_record_lists_the_drawn_channels(inspect: Command, photo: Photo, classifier: gradcam.Classifier) -> None:
    outcome = inspect(photo("coffee.jpg"), "-l", "head.0", "-l", "layer1", "--channels", "30", "--json")
    record = json.loads(outcome.out)
    assert [record[key] for key in ("schema", "status", "error", "model", "file")] == [
        1, "ok", None, "efficientnet_lite0", "coffee-activations.png"
    ]  # fmt: skip
    assert record["image"] == str(photo("coffee.jpg"))
    batch = classifier.batch([gradcam.read_image(photo("coffee.jpg"))])
    for entry, (name, grid) in zip(
        record["layers"], activations(classifier.model, batch, ["head.0", "layer1"]).items()
    ):
        strengths = measure_strengths(grid[0].numpy())
        assert entry["layer"] == name
        assert (entry["channels"], *entry["grid"]) == grid.shape[1:]
        assert entry["dead"] == (strengths == 0).sum()
        assert [item["strength"] for item in entry["shown"]] == sorted(strengths, reverse=True)[:30]
        assert [strengths[item["channel"]] for item in entry["shown"]] == [item["strength"] for item in entry["shown"]]
    assert record["layers"][0]["dead"] > 100
    assert [len(entry["shown"]) for entry in record["layers"]] == [30, 24]


def test_for_people_it_is_a_line_for_each_layer(inspect: Command, photo: Photo) -> None:
    outcome = inspect(photo("rocket.jpg"), "-l", "stem.0", "-l", "head.0", "--channels", "3", "--order", "index")
    title, blank, stem, head, file, last = outcome.out.splitlines()
    assert title.startswith("rocket.jpg   640 x 427   efficientnet_lite0 on cpu   ")
    assert stem.split("   ")[:2] == ["  stem.0", "32 channels of 112 x 112, 4 dead"]
    assert head.split("   ")[0] == "  head.0"
    assert stem.endswith("3 drawn: 0, 1, 2")
    assert stem.index("3 drawn") == head.index("3 drawn")
    assert file == "  →  rocket-activations.png"
    assert blank == last == ""
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_strengths_that_are_no_numbers_are_null() -> None:
    shown = [{"strength": value} for value in (float("nan"), float("inf"), 1.5)]
    record = json.loads(to_record("a.png", "m", None, {"layers": [{"shown": shown}]}))
    assert record["layers"] == [{"shown": [{"strength": None}, {"strength": None}, {"strength": 1.5}]}]


def test_names_with_control_characters_move_no_cursor() -> None:
    shown = [{"channel": channel, "strength": 1.0} for channel in range(6)]
    row = {"layer": "x", "channels": 7, "grid": (2, 2), "dead": 1, "shown": shown}
    text = _format(format_title("dir/a\x1b[2J.png", (2, 3), "m", "cpu", 1.0), [row], "b\n.png")
    assert "\x1b[2J" not in text
    assert r"a\x1b[2J.png" in text
    assert r"b\n.png" in text
    assert "  x   7 channels of 2 x 2, 1 dead   6 drawn: 0, 1, 2, 3, 4, ..." in text


# Errors


def test_one_broken_picture_does_not_stop_the_others(inspect: Command, folder: Path, photo: Photo) -> None:
    (folder / "torn.jpg").write_bytes(photo("coffee.jpg").read_bytes()[:3000])
    outcome = inspect("nothing.jpg", "torn.jpg", photo("coffee.jpg"), "--channels", "2", "--json")
    assert outcome.status == 1
    missing, torn, fine = map(json.loads, outcome.out.splitlines())
    assert (missing["status"], missing["error"]) == ("failed", "nothing.jpg: does not exist")
    assert torn["status"] == "failed"
    assert missing["file"] is torn["file"] is None
    assert missing["layers"] == torn["layers"] == []
    assert fine["status"] == "ok"
    assert outcome.err.splitlines() == [missing["error"], torn["error"]]
    assert files(folder) == ["coffee-activations.png", "torn.jpg"]


def test_a_layer_without_a_grid_is_the_pictures_failure(inspect: Command, folder: Path, photo: Photo) -> None:
    outcome = inspect(photo("coffee.jpg"), "-l", "head.3")
    assert (outcome.status, outcome.out) == (1, "")
    assert "Layer 'head.3' returns (1, 1000)" in outcome.err
    assert "`gradcam inspect features`" in outcome.err
    assert files(folder) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-l", "layer9"], "There is no layer 'layer9' in EfficientNetLite0. Nearest: 'layer"),
        (["-l", "block*"], "No layer matches 'block*'"),
        (["--channels", "0"], "0 is out of range"),
        (["--columns", "0"], "0 is out of range"),
        (["--cell", "0"], "0 is out of range"),
        (["--order", "weakest"], "'weakest' is not one of 'strongest', 'index'"),
        (["--scale", "image"], "'image' is not one of 'channel', 'layer'"),
        (["--colormap", "infernal"], "There is no colour map 'infernal'. Nearest: 'inferno'"),
        (["-o", "maps.gif"], "images can only be written as"),
        (["other.jpg", "-o", "maps.png"], "is one file, but there are several results"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, inspect: Command, folder: Path, photo: Photo) -> None:
    outcome = inspect(photo("coffee.jpg"), *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in " ".join(outcome.err.split())
    assert files(folder) == []


def test_the_picture_itself_is_never_overwritten(inspect: Command, folder: Path, photo: Photo) -> None:
    Image.open(photo("coffee.jpg")).save(folder / "a.png")
    before = (folder / "a.png").read_bytes()
    inspect("a.png", "-o", "a.png").check_error(2, "never overwritten")
    assert (folder / "a.png").read_bytes() == before
