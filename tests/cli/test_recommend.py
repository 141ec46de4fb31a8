"""Test `gradcam recommend`: its numbers against the Python API, the command that it prints, and its errors."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradcam
from gradcam.cli import recommend as recommend_outcome
from gradcam.cli._job import load_model
from gradcam.errors import LayerError
from gradcam.evaluation.recommendation import recommend as measure
from tests.cli.test_cli import Command, files, folder, gradcam_command
from tests.colours import COLOURS, SIGNS

__all__ = ["folder", "gradcam_command"]  # fixtures

MODEL = """
from tests.colours import ColourNet

def make():
    print("the model speaks")
    return ColourNet()
"""
PREPROCESSING = ("--size", "8x8", "--crop", "1", "--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--device", "cpu")


@pytest.fixture
def photos(folder: Path) -> Path:
    """Return a folder with eight images of six colours, a grey image and a text file."""
    root = folder / "photos"
    root.mkdir()
    texture = np.linspace(0.9, 1, 64).reshape(8, 8, 1)
    for name, signs in zip(COLOURS, SIGNS.numpy()):
        Image.fromarray((127.5 + 127.5 * signs * texture).round().astype(np.uint8)).save(root / f"{name}.png")
    for name in COLOURS[:2]:
        Image.open(root / f"{name}.png").point(lambda value: min(value, 250)).save(root / f"{name}2.png")
    Image.new("RGB", (8, 8), (128, 128, 128)).save(root / "grey.png")
    (root / "notes.md").write_text("nothing to see")
    return root


@pytest.fixture
def recommend(gradcam_command: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `gradcam recommend` with a network that distinguishes colours.

    Its default layer is "turn", whose cells are not aligned with the image. `explain` would refuse this layer.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(recommend_outcome, "load_model", lambda choice, layer="turn": load_model(choice, layer=layer))
    (folder / "net.py").write_text(MODEL)
    (folder / "labels.txt").write_text("\n".join(COLOURS))
    return lambda *arguments: gradcam_command(
        "recommend", "--model", "net.py:make", "--labels", "labels.txt", *PREPROCESSING, *arguments
    )


def line(*options: str) -> list[str]:
    mean = "0.5,0.5,0.5"
    model_options = ["--model", "net.py:make", "--labels", "labels.txt", "--mean", mean, "--std", mean, "--size", "8x8"]
    return ["gradcam", "run", "photo.jpg", *model_options, "--crop", "1", "--device", "cpu", *options]


def test_it_says_what_is_best_for_two_questions_and_by_how_much(recommend: Command, folder: Path) -> None:
    outcome = recommend("photos", "--methods", "gradcam,hirescam", "--scores", "logit")
    assert outcome.status == 0, outcome.err
    first, _, head, *remaining = outcome.out.splitlines()
    assert first.startswith("net.py:make on cpu   8 of 9 images, 1 not in a mosaic   12 mosaics of 16 x 16   seed 0   ")
    assert " ".join(head.split()) == "method score layer order ↑ ROAD ↑ mass maximum"
    several, default = (
        next(row for row in remaining if f" {mark} " in row[:5] or row[:3].strip() == mark) for mark in "4*"
    )
    # 8 / (8 + 1.96²), the lower Wilson bound for 8 hits out of 8.
    assert several.split()[1:6] == ["gradcam", "logit", "active", "1.000", "[0.676,"]
    assert default.split()[-7:-5] == ["logit", "turn"] or "turn" in default
    assert (
        "Which of several objects belongs to the class? gradcam of the logit at active: compared with the default, "
        "gradcam of the logit at turn, its order in mosaics is higher by 0.667 " in outcome.out
    )
    assert shlex.split(outcome.out.splitlines()[-1]) == line("--method", "gradcam", "--layer", "active")
    assert "Where is the object? The default, gradcam of the logit at turn" in outcome.out
    assert "\n".join(map(str.strip, remaining)).count("gradcam run photo.jpg") == 2
    expected = [*(f"{name}.png" for name in (*COLOURS, "red2", "green2", "grey")), "notes.md"]
    assert files(folder / "photos") == sorted(expected)


def test_of_too_few_pictures_nothing_is_recommended(recommend: Command, folder: Path) -> None:
    """Recommend only the default for six images, however large the gain. The JSON contains no infinity."""
    for name in ("red2", "green2"):
        (folder / "photos" / f"{name}.png").unlink()
    outcome = recommend("photos", "--methods", "gradcam,hirescam", "--scores", "logit")
    assert outcome.status == 0, outcome.err
    assert "6 images are too few to compare: 8 or more are needed. The default is therefore recommended." in outcome.out
    commands = [text for text in outcome.out.splitlines() if text.startswith("  gradcam run")]
    assert [shlex.split(text) for text in commands] == [line("--method", "gradcam", "--layer", "turn")] * 2
    message = recommend("photos", "--methods", "gradcam,hirescam", "--scores", "logit", "--json").out.splitlines()[-1]
    record = json.loads(message, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    gain = record["several_objects"]["gain"]
    assert (gain["n"], gain["low"], gain["high"]) == (6, None, None)
    assert record["several_objects"]["leader"]["layer"] == "active"


def test_annotated_objects_say_where_one_is(recommend: Command, folder: Path) -> None:
    """Use the upper halves as boxes. Both halves have the same colour, so only the texture orders the maps."""
    rows = [f"{name}.png,0,0,8,4,{name[:-1] if name[-1] == '2' else name}" for name in (*COLOURS, "red2", "green2")]
    (folder / "boxes.csv").write_text("\n".join(["image,left,top,right,bottom,class", *rows]))
    options = ("photos", "--methods", "gradcam", "--scores", "logit", "--annotations", "boxes.csv")
    record = json.loads(recommend(*options, "--json").out.splitlines()[-1])
    assert record["single_object"]["measure"] == "objects"
    scores = {row["layer"]: row["objects"] for row in record["rows"]}
    # The images get brighter downwards. In every pair, the upper half therefore has less evidence than the lower half
    # at "active", and more at "turn".
    # Images of 8 bits have ties.
    assert (scores["active"]["mean"], scores["turn"]["mean"]) == pytest.approx((0, 1), abs=0.01)
    assert scores["turn"]["n"] == 8
    assert "on objects ↑" in recommend(*options).out
    (folder / "boxes.csv").write_text("image,left,top,right,bottom,class\nnowhere.png,0,0,8,4,red\n")
    assert "nowhere.png" in recommend(*options).err


def test_the_line_that_it_ends_with_runs(recommend: Command, gradcam_command: Command, folder: Path) -> None:
    outcome = recommend("photos", "--methods", "hirescam", "--scores", "contrast", "-l", "active")
    words = shlex.split(outcome.out.splitlines()[-1])
    assert words[-6:] == ["--method", "hirescam", "--score", "contrast", "--layer", "active"]
    (folder / "photos" / "red.png").rename(folder / "photo.jpg")
    assert gradcam_command(*words[1:]).status == 0
    assert (folder / "photo-hirescam-net.py_make.png").exists()


def test_json_has_all_that_python_measures(recommend: Command, folder: Path) -> None:
    outcome = recommend("photos", "--methods", "gradcam,eigencam", "--json", "--seed", "3")
    assert outcome.status == 0, outcome.err
    (record,) = map(json.loads, outcome.out.splitlines())
    commands = [record[name].pop("command") for name in ("single_object", "several_objects", "one", "several")]
    assert all(command.startswith("gradcam run photo.jpg ") for command in commands)
    settings = {"labels": COLOURS, "mean": (0.5,) * 3, "std": (0.5,) * 3, "size": (8, 8), "layer": "turn"}
    classifier = gradcam.load_classifier("net.py:make", **settings)
    pictures = {path.name: path for path in sorted((folder / "photos").glob("*.png"))}
    expected = measure(classifier, pictures, methods=["gradcam", "eigencam"], seed=3).to_dict()
    counts = dict.fromkeys(("input_count", "sampled_count", "given", "taken"), 9)
    assert record == {"schema": 1, **json.loads(json.dumps(expected)), **counts, "failed": 0}
    assert (record["several_objects"]["method"], record["several_objects"]["layer"]) == ("gradcam", "active")
    assert record["images"] == sorted(f"{name}.png" for name in (*COLOURS, "red2", "green2"))
    again = recommend("photos", "--methods", "gradcam,eigencam", "--json", "--seed", "3").out
    assert again.splitlines()[-1] == outcome.out.strip()  # The lines before it are printed by the model.


def test_a_picture_that_cannot_be_read_is_named_and_left_out(recommend: Command, folder: Path) -> None:
    (folder / "photos" / "broken.png").write_bytes(b"nothing")
    outcome = recommend("photos", "--methods", "gradcam", "--scores", "logit", "--json")
    outcome.check_error(1, "broken.png: ")
    record = json.loads(outcome.out)
    assert (record["input_count"], record["sampled_count"], record["failed"]) == (10, 10, 1)
    recommendation = recommend("photos", "--methods", "gradcam", "--scores", "logit")
    assert "8 of 10 images, 1 failed, 1 not in a mosaic" in recommendation.out


def test_of_many_pictures_some_are_drawn_by_the_seed(recommend: Command, folder: Path) -> None:
    for name in ("grey", "red2", "green2"):
        (folder / "photos" / f"{name}.png").unlink()
    drawn = set()
    for seed in range(6):
        outcome = recommend(
            "photos", "--limit", 5, "--methods", "gradcam", "--scores", "logit", "--seed", seed, "--json"
        )
        record = json.loads(outcome.out)
        assert (record["input_count"], record["sampled_count"], len(record["images"]), record["mosaics"]) == (
            6, 5, 5, 5
        )  # fmt: skip
        drawn.add(tuple(record["images"]))
    assert len(drawn) > 1


def test_classes_that_a_list_asks_for_make_no_difference(recommend: Command, folder: Path) -> None:
    lines = [f"photos/{name}.png,no such class" for name in COLOURS]
    (folder / "list.csv").write_text("\n".join(["image,class", *lines]))
    assert recommend("list.csv", "--methods", "gradcam", "--scores", "logit", "-q").status == 0


def test_quiet_prints_nothing_and_all_prints_all_rows(recommend: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = recommend("photos", "--methods", "gradcam", "--scores", "logit", "-q")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", "the model speaks\n")
    monkeypatch.setattr(recommend_outcome, "MAX_ROWS", 1)
    options = ("photos", "--methods", "gradcam,hirescam,layercam")
    short, full = recommend(*options).out, recommend(*options, "--all").out
    assert "of 18 combinations are listed. Use --all to list them all." in short
    assert short.count("  gradcam  logit") < 6
    assert "--all" not in full
    assert sum("layercam" in row for row in full.splitlines()) == 6


def test_a_model_without_default_layer_uses_the_given_one(recommend: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(choice: Any, *, layer: str | None = None) -> gradcam.Classifier:
        if layer is None:
            raise LayerError("No layer has a grid.")
        return load_model(choice, layer=layer)

    monkeypatch.setattr("gradcam.cli.recommend.load_model", refuse)
    options = ("photos", "--methods", "gradcam", "--scores", "logit")
    assert "No layer has a grid." in recommend(*options).err
    outcome = recommend(*options, "-l", "active", "-l", "turn")
    assert (
        "The default, gradcam of the logit at active: no other combination has a better order in mosaics."
        in outcome.out
    )


def test_what_has_no_map_is_said(recommend: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = recommend(
        "photos", "--size", "40x40", "--methods", "gradcam,kpcacam", "--scores", "logit", "-l", "active"
    )
    assert outcome.status == 0, outcome.err
    assert "kpcacam at active cannot be used: The grid of this layer has 6400 cells" in outcome.out


def test_too_few_classes_are_an_error_with_what_there_is(recommend: Command, folder: Path) -> None:
    for name in ("red", "green", "blue", "red2", "green2"):
        (folder / "photos" / f"{name}.png").unlink()
    outcome = recommend("photos")
    assert outcome.status == 2
    assert "predicted class has a probability of 0.5 or more are used: they have 3 classes." in outcome.err
    assert "grey.png 0.1" in outcome.err
    assert outcome.out == ""
    for option in ("--min-probability", "--least"):  # --least is the old name.
        relaxed = recommend("photos", option, "0.1", "--methods", "gradcam", "--scores", "logit")
        assert (relaxed.status, "4 of 4 images" in relaxed.out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["photos", "--methods", "gradcan"], "'gradcam'"),
        (["photos", "--methods", "gradcam,rise"], "rise uses no target layer: remove this method"),
        (["photos", "--scores", "logits"], "There is no score 'logits'. Choose from logit, probability, contrast"),
        (["photos", "-l", "activ"], "There is no layer 'activ'"),
        (["photos", "--limit", "3"], "--limit"),
        (["photos", "--min-probability", "2"], "--min-probability"),
        (["nowhere"], "nowhere: does not exist"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage(recommend: Command, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcam.cli.recommend._read", lambda *args: pytest.fail("read"))
    outcome = recommend(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err


@pytest.mark.slow
def test_the_embedded_model_needs_no_option(gradcam_command: Command, folder: Path, photo: Any) -> None:
    for name in ("koala.webp", "macaw.webp", "panda.webp", "lemur.webp"):
        Image.open(photo(name)).convert("RGB").reduce(2).save(folder / Path(name).with_suffix(".png").name)
    options = ("--device", "cpu", "--methods", "gradcam", "--scores", "logit", "-l", "layer4", "-l", "head.0")
    outcome = gradcam_command("recommend", ".", *options)
    assert outcome.status == 0, outcome.err
    assert "4 of 4 images   1 mosaic of 448 x 448" in outcome.out
    last = outcome.out.splitlines()[-1].strip()
    assert last in [
        f"gradcam run photo.jpg --device cpu --method gradcam --layer {layer}" for layer in ("layer4", "head.0")
    ]
