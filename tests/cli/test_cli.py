"""Test the command `gradcam`: its files, its output and its exit status."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import gradcam
from gradcam.cli import main
from gradcam.cli._settings import OutputMode
from gradcam.cli._terminal import SafeStream, format_report, make_streams_safe, show_pass_progress
from gradcam.storage.records import Explained, ImageOutcome, Prediction, Record

Photo = Callable[[str], Path]
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and pipes are others here")


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def check_error(self, status: int, *messages: str) -> None:
        """Assert that the command failed with this status, and printed these messages."""
        assert self.status == status
        for message in messages:
            assert message in self.err


Command = Callable[..., Outcome]
ADVICE = "Use --fit whole to explain the whole image."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def gradcam_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    before = {number: signal.getsignal(number) for number in ENDING}

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gradcam", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), captured.out, captured.err)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(gradcam_command: Command) -> Command:
    """Return a function that runs `gradcam run` on the CPU."""
    return lambda *arguments: gradcam_command("run", "--device", "cpu", *arguments)


@pytest.fixture
def small(tmp_path: Path, photo: Photo) -> Photo:
    """Return a function that writes a photo at half size as a PNG file outside the working folder."""

    def shrink(name: str) -> Path:
        path = tmp_path / "photos" / Path(name).with_suffix(".png").name
        path.parent.mkdir(exist_ok=True)
        Image.open(photo(name)).convert("RGB").reduce(2).save(path)
        return path

    return shrink


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def records(outcome: Outcome) -> list[dict[str, object]]:
    return [json.loads(line) for line in outcome.out.splitlines()]


# Files


def test_one_picture_gets_one_overlay_in_the_current_folder(run: Command, folder: Path, photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    outcome = run(path)
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == ["cat_and_espresso-gradcam.png"]
    overlay, picture = pixels(folder / "cat_and_espresso-gradcam.png"), pixels(path)
    tensor = np.zeros(picture.shape[:2], dtype=bool)
    tensor[40:600, 120:680] = True  # The model sees this centre crop of 800 x 640.
    grey = picture @ [0.299, 0.587, 0.114]
    assert abs(overlay - grey[..., None])[~tensor].max() <= 0.51
    assert (overlay[tensor] != picture[tensor]).any(axis=1).mean() > 0.2


def test_the_overlay_equals_python(run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("koala.webp")
    assert run(path, "-c", "macaw", "--alpha", 0.7, "--colormap", "jet", "-l", "layer3").status == 0
    explanation = classifier.explain(path, "layer3", target="macaw")
    expected = explanation.overlay(alpha=0.7, colormap="jet")
    np.testing.assert_array_equal(pixels(folder / "koala-gradcam-88-macaw.png"), expected)


@pytest.mark.parametrize(
    ("words", "look"),
    [
        ([], {"base": "gray", "alpha": 0.8, "colormap": "inferno", "blend": "grow"}),
        (["--base", "color"], {"base": "color", "alpha": 0.5, "colormap": "turbo", "blend": "fade"}),
        (["--base", "color", "--blend", "uniform"], {"base": "color", "blend": "uniform"}),
    ],
)
def test_the_look_equals_python(
    run: Command, small: Photo, classifier: gradcam.Classifier, words: list[str], look: dict[str, Any]
) -> None:
    path = small("koala.webp")
    folder = path.parent
    assert run(path, "-o", folder, *words).status == 0
    np.testing.assert_array_equal(pixels(folder / "koala-gradcam.png"), classifier.explain(path).overlay(**look))
    classifier.explain(path).save(folder / "python.png", **look)
    np.testing.assert_array_equal(pixels(folder / "koala-gradcam.png"), pixels(folder / "python.png"))


def test_a_second_class_does_not_overwrite_the_first(run: Command, folder: Path, small: Photo) -> None:
    path = small("coffee.jpg")
    for label in ("boxer", "cup"):
        assert run(path, "--class", label, "-q").status == 0
    assert files(folder) == ["coffee-gradcam-242-boxer.png", "coffee-gradcam-968-cup.png"]


def test_the_explained_class_is_marked_in_the_table(run: Command, small: Photo) -> None:
    lines = run(small("coffee.jpg"), "-c", "tiger cat").out.splitlines()
    (line,) = [line for line in lines if line.startswith("* ")]
    assert re.match(r"\* tiger cat +282 +0\.\d+ %", line)
    (record,) = records(run(small("coffee.jpg"), "-c", "tiger cat", "--json"))
    *first, last = record["predictions"]
    assert (len(first), last["label"]) == (5, "tiger cat")
    assert 0 < last["probability"] < min(prediction["probability"] for prediction in first)


def test_an_empty_folder_among_images_is_reported(run: Command, folder: Path, small: Photo) -> None:
    (folder / "empty").mkdir()
    path = small("coffee.jpg")
    outcome = run(path, "empty")
    assert (outcome.status, files(folder)) == (0, ["coffee-gradcam.png"])
    assert "no images in 'empty'" in outcome.err
    assert run("empty").status == 2


@pytest.mark.parametrize("command", ["run", "compare", "check", "page"])
def test_images_that_do_not_exist_need_no_pytorch(folder: Path, command: str) -> None:
    names = ["nothere.jpg"] if command == "page" else ["nothere.jpg", "neither.jpg"]
    line = [sys.executable, "-X", "importtime", "-m", "gradcam", command, *names]
    outcome = subprocess.run(line, capture_output=True, text=True)
    assert outcome.returncode == 1
    lines = outcome.stderr.splitlines()
    assert [f"{name}: does not exist" in lines for name in names] == [True] * len(names)
    assert [line for line in lines if re.search(r"\| +torch$", line)] == []


def test_equal_stems(run: Command, folder: Path, small: Photo, tmp_path: Path, classifier: gradcam.Classifier) -> None:
    first, second = tmp_path / "one" / "a.png", tmp_path / "two" / "a.png"
    for path, name in ((first, "coffee.jpg"), (second, "koala.webp")):
        path.parent.mkdir()
        small(name).rename(path)
    assert run(first, second).status == 0
    assert files(folder) == ["a-gradcam-2.png", "a-gradcam.png"]
    for path, name in ((first, "a-gradcam.png"), (second, "a-gradcam-2.png")):
        np.testing.assert_array_equal(pixels(folder / name), classifier.explain(path).overlay())


def test_an_input_with_the_name_of_an_output_stays(run: Command, folder: Path, small: Photo) -> None:
    path, occupied_path = folder / "a.png", folder / "a-gradcam.png"
    small("coffee.jpg").rename(path)
    small("koala.webp").rename(occupied_path)
    before = occupied_path.read_bytes()
    assert run("a.png", "a-gradcam.png").status == 0
    assert occupied_path.read_bytes() == before
    assert files(folder) == ["a-gradcam-2.png", "a-gradcam-gradcam.png", "a-gradcam.png", "a.png"]


def test_several_classes_are_in_the_names(run: Command, folder: Path, small: Photo) -> None:
    outcome = run(small("coffee.jpg"), "--class", "espresso", "-c", "SOUP_bowl", "-c", "968", "-c", "name:koala")
    assert outcome.status == 0
    assert files(folder) == [
        "coffee-gradcam-105-koala.png",
        "coffee-gradcam-809-soup_bowl.png",
        "coffee-gradcam-967-espresso.png",
        "coffee-gradcam-968-cup.png",
    ]


def test_top_classes_are_in_the_names(run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("coffee.jpg")
    outcome = run(path, "--top-k", 3, "--json")
    top = classifier.explain(path).output[0].argsort(descending=True)[:3].tolist()
    names = [f"coffee-gradcam-{index}-{classifier.labels[index].replace(' ', '_')}.png" for index in top]
    assert [entry["overlay"] for entry in records(outcome)[0]["explained"]] == names
    assert files(folder) == sorted(names)


def test_layers_are_in_the_names(run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("coffee.jpg")
    outcome = run(path, "-l", "layer4", "--layer", "layer3.5.depthwise", "-l", "layer4", "-c", "espresso", "-c", "cup")
    assert outcome.status == 0
    expected = {
        f"coffee-gradcam-{index}-{label}-{layer}.png": classifier.explain(path, layer, target=index).overlay()
        for index, label in ((967, "espresso"), (968, "cup"))
        for layer in ("layer4", "layer3.5.depthwise")
    }
    assert files(folder) == sorted(expected)
    for name, picture in expected.items():
        # The command computes the maps in another batch size.
        assert abs(pixels(folder / name).astype(int) - picture).max() <= 2


@pytest.mark.parametrize("output", ["out.png", "out.JPG", "out.webp", "new/folder/out.tiff"])
def test_an_output_with_a_pictures_suffix_is_a_file(run: Command, folder: Path, small: Photo, output: str) -> None:
    path = small("coffee.jpg")
    outcome = run(path, "-o", output, "--json")
    assert outcome.status == 0
    assert files(folder) == [output]
    assert records(outcome)[0]["explained"][0]["overlay"] == output
    assert pixels(folder / output).shape == pixels(path).shape


@pytest.mark.parametrize("output", ["out", "new/folder", "v1.2", "out/", "existing.png"])
def test_any_other_output_is_a_folder(run: Command, folder: Path, small: Photo, output: str) -> None:
    (folder / "existing.png").mkdir()
    outcome = run(small("coffee.jpg"), "--output", output, "--json")
    assert outcome.status == 0
    name = str(Path(output) / "coffee-gradcam.png")
    assert files(folder) == [name]
    assert records(outcome)[0]["explained"][0]["overlay"] == name


def test_an_output_of_an_earlier_run_is_replaced(run: Command, folder: Path, small: Photo) -> None:
    path = small("coffee.jpg")
    for _ in range(2):
        assert run(path, "-o", "out.png").status == 0
        assert run(path, "-o", ".").status == 0
    assert files(folder) == ["coffee-gradcam.png", "out.png"]


@pytest.mark.parametrize("output", ["a.png", "link.png", "hard link.png", "../here/a.png", "{folder}/a.png"])
def test_the_picture_is_never_its_own_output(run: Command, folder: Path, small: Photo, output: str) -> None:
    small("coffee.jpg").rename(folder / "a.png")
    (folder / "link.png").symlink_to("a.png")
    (folder / "hard link.png").hardlink_to("a.png")
    before = (folder / "a.png").read_bytes()
    run("a.png", "-o", output.format(folder=folder)).check_error(2, "never overwritten")
    assert (folder / "a.png").read_bytes() == before
    assert (folder / "link.png").is_symlink()


def test_a_missing_picture_is_not_its_own_output_either(run: Command, folder: Path) -> None:
    outcome = run("missing.png", "-o", "sub/../missing.png")
    assert (outcome.status, files(folder)) == (1, [])
    assert "does not exist" in outcome.err


@pytest.mark.parametrize(
    "options", [["-c", "koala", "-c", "105"], ["-l", "layer4", "-l", "layer4"], ["--method", "gradcam"] * 2]
)
def test_what_is_said_twice_is_one_result(run: Command, folder: Path, small: Photo, options: list[str]) -> None:
    assert run(small("coffee.jpg"), "-o", "out.png", *options).status == 0
    assert files(folder) == ["out.png"]


@pytest.mark.parametrize(
    "options", [["-c", "koala", "-c", "cup"], ["-l", "layer3", "-l", "layer4"], ["--top-k", "2"], None]
)
def test_several_results_need_a_folder(run: Command, folder: Path, small: Photo, options: list[str] | None) -> None:
    more = [small("koala.webp")] if options is None else options
    run(small("coffee.jpg"), "-o", "out.png", *more).check_error(2, "give a folder to --output")
    assert files(folder) == []


# Refused arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-l", "layer5"], "Nearest: .*'layer4'"),
        (["-l", ""], "Nearest: .*'layer4'"),
        (["-l", "layer4", "-l", "layerX"], "no layer 'layerX'"),
        (["-c", "koalla"], "nearest: 'koala'"),
        (["-c", "koala", "-c", "1000"], "0 to 999"),
        (["-c", "cardigan"], r"264 \(Cardigan\), 474 \(cardigan\)"),
        (["--method", "zzzzzz"], "'--method': There is no method 'zzzzzz'. `gradcam methods` lists them"),
        (["--method", "gradcm"], "'--method': There is no method 'gradcm'. Nearest: 'gradcam'"),
        (["--against", "koala"], "--against needs --score contrast"),
        (["--score", "contrast", "--against", "kaola"], "nearest: 'koala'"),
        (["--evidence", "signed", "--method", "layercam"], "layercam shows positive evidence only"),
        (["--evidence", "both"], "'--evidence': 'both' is not one of"),
        (["-m", "efficientnet_lite"], "Nearest: 'efficientnet_lite0'"),
        (["--device", "gpu"], "choose auto, cpu, cuda, cuda:N or mps"),
        (["--device", "cuda:99"], "The device 'cuda:99' is not available"),
        (["--score", "softmax"], "'--score': 'softmax' is not one of"),
        (["--colormap", "turb"], "Nearest: 'turbo'"),
        (["--alpha", "1.5"], "'--alpha': 1.5 is out of range"),
        (["--top-k", "0"], "'--top-k': 0 is out of range"),
        (["--weights", "missing.safetensors"], "'missing.safetensors' does not exist"),
        (["--weights", "{picture}"], "expected a checkpoint written by safetensors or torch.save"),
        (["-o", "out.gif"], r"out\.gif: images can only be written as \.bmp, "),
        (["--nonsense"], "No such option"),
        (["--model", ""], "^Error: The model's name is empty: remove --model"),
    ],
)
def test_wrong_usage_is_refused(run: Command, folder: Path, small: Photo, options: list[str], message: str) -> None:
    picture = small("coffee.jpg")
    arguments = [option.format(picture=picture) for option in options]
    for kind in ([], ["--json"]):
        outcome = run(picture, "-o", "new", *arguments, *kind)
        assert (outcome.status, outcome.out) == (2, "")
        assert re.search(message, " ".join(outcome.err.split()))
        assert "Traceback" not in outcome.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("typed", "message"), [("run", "Missing argument 'IMAGE...'"), ("rum", "rum")])
def test_missing_arguments_and_unknown_commands(gradcam_command: Command, typed: str, message: str) -> None:
    gradcam_command(typed).check_error(2, message)


# Errors


def test_a_broken_picture_does_not_stop_the_others(run: Command, folder: Path, small: Photo, tmp_path: Path) -> None:
    broken, missing = tmp_path / "broken  one.png", tmp_path / "missing.jpg"
    broken.write_bytes(b"no picture")
    outcome = run(small("coffee.jpg"), broken, missing, small("koala.webp"))
    assert outcome.status == 1
    assert files(folder) == ["coffee-gradcam.png", "koala-gradcam.png"]
    assert outcome.err.splitlines() == [
        f"{tmp_path / 'broken one.png'}: is not an image in a supported format",
        f"{missing}: does not exist",
    ]
    assert "coffee.png" in outcome.out
    assert "koala.png" in outcome.out
    assert "broken" not in outcome.out


def test_a_broken_picture_has_its_record(run: Command, folder: Path, small: Photo) -> None:
    outcome = run("missing.jpg", small("coffee.jpg"), "--json")
    assert outcome.status == 1
    failed, success = records(outcome)
    assert failed == {
        "schema": 1, "image": "missing.jpg", "status": "failed", "error": "missing.jpg: does not exist",
        "model": "efficientnet_lite0", "predictions": [], "explained": [], "note": None, "size": None, "region": None
    }  # fmt: skip
    assert (success["status"], len(success["explained"])) == ("ok", 1)
    assert outcome.err == "missing.jpg: does not exist\n"


def test_a_broken_picture_is_named_when_quiet(run: Command, folder: Path) -> None:
    outcome = run("missing.jpg", "--quiet")
    assert (outcome.status, outcome.out, outcome.err) == (1, "", "missing.jpg: does not exist\n")


def test_an_overlay_that_cannot_be_written_is_named(run: Command, folder: Path, small: Photo) -> None:
    (folder / "coffee-gradcam.png").mkdir()
    path = small("coffee.jpg")
    outcome = run(path, small("koala.webp"))
    assert outcome.status == 1
    assert outcome.err == f"{path}: coffee-gradcam.png: cannot be written (Is a directory)\n"
    assert files(folder) == ["koala-gradcam.png"]


def test_a_folder_that_cannot_be_made_is_named(run: Command, folder: Path, small: Photo) -> None:
    (folder / "out").touch()
    path = small("coffee.jpg")
    outcome = run(path, "-o", "out", "--json")
    assert outcome.status == 1
    assert records(outcome)[0]["error"].startswith(f"{path}: out: the folder cannot be created (File exists)")
    assert files(folder) == ["out"]


def test_a_layer_without_a_grid_is_an_error_of_the_picture(run: Command, folder: Path, small: Photo) -> None:
    run(small("coffee.jpg"), "-l", "head.2").check_error(1, "no spatial grid")
    assert files(folder) == []


def test_a_bug_stops_no_other_image(run: Command, folder: Path, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small("coffee.jpg")

    def fail(*args: object) -> None:
        raise ZeroDivisionError("a bug\nin two lines")

    monkeypatch.setattr(gradcam.Classifier, "prepare", fail)
    outcome = run(path, path)
    assert outcome.status == 1
    line = f"{path}: ZeroDivisionError: a bug in two lines (for the traceback, set GRADCAM_TRACEBACK=1)"
    assert outcome.err.splitlines() == [line, line]


def test_tracebacks_are_shown_when_wanted(run: Command, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in run("missing.jpg").err
    assert "Traceback" not in run(small("coffee.jpg"), "-l", "layer5").err
    monkeypatch.setenv("GRADCAM_TRACEBACK", "1")
    for arguments in (["missing.jpg"], [small("coffee.jpg"), "-l", "layer5"]):
        err = run(*arguments).err
        assert "Traceback (most recent call last):" in err
        assert "gradcam.errors." in err


def test_missing_opencv_is_one_line(run: Command, folder: Path, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = small("coffee.jpg")
    for name in ("cv2", "gradcam.images.opencv", "gradcam.images.draw"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "cv2", None)  # None makes the import fail.
    outcome = run(picture)
    assert (outcome.status, outcome.out, files(folder)) == (2, "", [])
    assert outcome.err.startswith("Error: OpenCV cannot be loaded (")
    assert outcome.err.count("\n") == 1


# Output


def test_the_terminal_says_what_was_seen_and_explained(run: Command, folder: Path, photo: Photo) -> None:
    lines = run(photo("cat_and_espresso.jpg"), "-c", "espresso").out.splitlines()
    assert lines[0].startswith("cat_and_espresso.jpg   800 x 640   efficientnet_lite0 on cpu   ")
    assert lines[0].endswith(" s")
    assert lines[2].startswith("  Egyptian cat   285    58 %   █████████████")
    assert len([line for line in lines if re.search(r"   \d+   +(< )?\d+ %   ", line)]) == 5
    assert "  espresso at layer4 (7 x 7)  →  cat_and_espresso-gradcam-967-espresso.png" in lines
    crop_note = "  The model sees a centre crop: 560 x 560 of 800 x 640 pixels (61 %)."
    assert f"{crop_note} {ADVICE}" in lines


def test_colour_is_for_terminals_only(run: Command, photo: Photo) -> None:
    assert "\x1b" not in run(photo("macaw.webp"), "-c", "koala").out


def test_a_blank_map_is_no_positive_evidence(run: Command, folder: Path, photo: Photo) -> None:
    outcome = run(photo("macaw.webp"), "-c", "koala", "-c", "macaw")
    lines = outcome.out.splitlines()
    assert outcome.status == 0
    assert "  koala at layer4 (7 x 7)  no positive evidence  →  macaw-gradcam-105-koala.png" in lines
    assert "  macaw at layer4 (7 x 7)  →  macaw-gradcam-88-macaw.png" in lines
    overlay, luma = pixels(folder / "macaw-gradcam-105-koala.png"), pixels(photo("macaw.webp")) @ [0.299, 0.587, 0.114]
    assert abs(overlay - luma[..., None]).max() <= 1  # the photograph in grey, without a colour


def test_a_blank_map_is_marked_in_the_record(run: Command, photo: Photo) -> None:
    (record,) = records(run(photo("macaw.webp"), "-c", "koala", "-c", "macaw", "--json"))
    assert [entry["blank"] for entry in record["explained"]] == [True, False]


def test_quiet_prints_nothing(run: Command, folder: Path, small: Photo) -> None:
    outcome = run(small("coffee.jpg"), "-q")
    assert outcome == Outcome(0, "", "")
    assert files(folder) == ["coffee-gradcam.png"]


def test_json_is_one_record_per_picture_and_nothing_else(run: Command, small: Photo, folder: Path) -> None:
    paths = [small("coffee.jpg"), small("koala.webp")]
    outcome = run(*paths, "--json", "--top-k", 2)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 2
    for path, record in zip(paths, records(outcome)):
        keys = ["schema", "image", "status", "error", "model", "predictions", "explained", "note", "size", "region"]
        assert list(record) == keys
        assert (record["schema"], record["image"], record["status"], record["error"]) == (1, str(path), "ok", None)
        assert [list(entry) for entry in record["predictions"]] == [["index", "label", "probability"]] * 5
        keys = ["index", "label", "score", "layer", "method", "overlay", "blank", "evidence"]
        assert [list(entry) for entry in record["explained"]] == [keys] * 2


def test_the_record_has_the_numbers_of_the_network(run: Command, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("lemur.webp")
    (record,) = records(run(path, "--json", "--top-k", 2))
    with torch.no_grad():
        logits = classifier.model(classifier.batch([gradcam.read_image(path)]))[0].double()
    chances = (logits.exp() / logits.exp().sum()).tolist()
    top = sorted(range(1000), key=lambda index: -chances[index])[:5]
    assert [(entry["index"], entry["label"]) for entry in record["predictions"]] == [
        (index, classifier.labels[index]) for index in top
    ]
    assert [entry["probability"] for entry in record["predictions"]] == pytest.approx(
        [chances[i] for i in top], abs=1e-5
    )
    for entry, index in zip(record["explained"], top):
        assert (entry["index"], entry["label"]) == (index, classifier.labels[index])
        assert entry["score"] == pytest.approx(logits[index].item(), abs=1e-3)
        assert (entry["layer"], entry["method"]) == ("layer4", "gradcam")


def test_the_score_is_logit_probability_or_contrast(run: Command, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("lemur.webp")
    records_by_score = {
        score: records(run(path, "--json", "-c", "383", "-c", "105", "--score", score))[0]
        for score in ("logit", "probability", "contrast")
    }
    with torch.no_grad():
        logits = classifier.model(classifier.batch([gradcam.read_image(path)]))[0].tolist()
    for position, index in enumerate((383, 105)):
        rivals = sorted((value for i, value in enumerate(logits) if i != index), reverse=True)[:5]
        expected = {
            "logit": logits[index],
            "probability": np.exp(logits[index]) / np.exp(logits).sum(),
            "contrast": logits[index] - sum(rivals) / 5,
        }
        for score, record in records_by_score.items():
            assert record["explained"][position]["score"] == pytest.approx(expected[score], rel=1e-3, abs=1e-5)
    record = records_by_score["probability"]
    assert record["explained"][0]["score"] == pytest.approx(record["predictions"][0]["probability"], abs=1e-6)


def test_other_weights_are_used(run: Command, small: Photo, classifier: gradcam.Classifier, tmp_path: Path) -> None:
    weights = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in classifier.model.state_dict().items()
    }
    weights["head.3.bias"][0] += 100
    safetensors.torch.save_file(weights, tmp_path / "other.safetensors")
    (record,) = records(run(small("coffee.jpg"), "--json", "--weights", tmp_path / "other.safetensors"))
    assert record["predictions"][0]["label"] == "tench"


ENDS = """
import sys
from torch import nn

class Ends(nn.Sequential):
    def forward(self, images):
        if (images[..., 1:] - images[..., :-1]).abs().mean() < 0.5:  # a photograph, and not noise
            sys.exit(3)
        return super().forward(images)

def make():
    return Ends(nn.Conv2d(3, 4, 3, stride=32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

def read(path):
    sys.exit()
"""


def test_code_of_the_user_that_ends_the_program_is_an_error(run: Command, folder: Path, small: Photo) -> None:
    path = small("coffee.jpg")
    (folder / "ends.py").write_text(ENDS)
    outcome = run(path, path, "--json", "--model", "ends.py:make", "--quiet")
    assert outcome.status == 1
    assert outcome.err == f"{path}: SystemExit: 3 (for the traceback, set GRADCAM_TRACEBACK=1)\n" * 2
    (folder / "always.py").write_text(ENDS.replace("< 0.5", "< 1e6"))
    outcome = run(path, "--json", "--model", "always.py:make")
    assert (outcome.status, outcome.out) == (2, "")
    assert "SystemExit: 3" in outcome.err
    assert outcome.err.count("\n") == 1
    outcome = run(path, path, "--json", "--reader", "ends.py:read")
    assert outcome.status == 1
    assert outcome.err == f"{path}: the reader read failed (SystemExit)\n" * 2
    assert [record["status"] for record in records(outcome)] == ["failed"] * 2


@pytest.mark.parametrize("is_wanted", [False, True])
def test_unexpected_errors(run: Command, small: Photo, monkeypatch: pytest.MonkeyPatch, is_wanted: bool) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for\n7 numbers")

    monkeypatch.setattr("gradcam.models.load.load_model", fail)
    if is_wanted:
        monkeypatch.setenv("GRADCAM_TRACEBACK", "1")
    outcome = run(small("coffee.jpg"))
    assert (outcome.status, outcome.out) == (1, "")
    line = "Error: MemoryError: no room for 7 numbers (for the traceback, set GRADCAM_TRACEBACK=1)\n"
    assert outcome.err.endswith(line)
    assert ("Traceback" in outcome.err, outcome.err == line) == (is_wanted, not is_wanted)


@pytest.mark.parametrize("index", [0, 967])
def test_an_output_of_nan_is_an_error(run: Command, folder: Path, small: Photo, index: int) -> None:
    (folder / "broken.py").write_text(
        "import gradcam\n\ndef make():\n    model = gradcam.load_classifier(device='cpu').model\n"
        f"    model.head[3].bias[{index}] = float('nan')\n    return model\n"
    )
    outcome = run(small("coffee.jpg"), "--json", "--model", "broken.py:make", "-l", "layer4", "-c", "967")
    assert outcome.status == 1
    assert ("output contains NaN or infinite" if index == 0 else "scores are NaN") in outcome.err
    (record,) = records(outcome)
    assert (record["status"], record["predictions"], record["explained"]) == ("failed", [], [])


def test_the_model_and_the_precision_can_be_named(run: Command, small: Photo) -> None:
    path = small("coffee.jpg")
    (full,) = records(run(path, "--json", "--model", "efficientnet_lite0", "--method", "gradcam"))
    (half,) = records(run(path, "--json", "--precision", "bf16"))
    assert (full["model"], half["model"]) == ("efficientnet_lite0", "efficientnet_lite0")
    half_score, full_score = half["explained"][0]["score"], full["explained"][0]["score"]
    assert half_score != full_score
    assert half_score == pytest.approx(full_score, rel=0.05)


def test_an_output_with_a_slash_at_its_end_is_a_folder(run: Command, folder: Path, small: Photo) -> None:
    outcome = run(small("coffee.jpg"), "-o", "kept.jpg/")
    assert outcome.status == 0
    assert files(folder) == ["kept.jpg/coffee-gradcam.png"]
    (folder / "file.jpg").write_text("keep me")
    run(small("coffee.jpg"), "-o", "file.jpg/").check_error(1, "file.jpg: the folder cannot be created")
    assert (folder / "file.jpg").read_text() == "keep me"


def test_the_case_of_a_colour_map_does_not_count(run: Command, folder: Path, small: Photo) -> None:
    picture = small("coffee.jpg")
    assert run(picture, "--colormap", "JET", "-o", "one.png").status == 0
    assert run(picture, "--colormap", "jet", "-o", "other.png").status == 0
    assert (folder / "one.png").read_bytes() == (folder / "other.png").read_bytes()


def test_a_device_without_a_driver_is_refused_in_a_short_line(run: Command, small: Photo) -> None:
    if torch.backends.mps.is_available():
        pytest.skip("there is an MPS device here")
    outcome = run(small("coffee.jpg"), "--device", "mps")
    assert outcome.status == 2
    assert re.fullmatch(r"Error: The device 'mps' is not available \(.{1,150}\): choose auto, .*\n", outcome.err)


def test_names_cannot_move_the_cursor() -> None:
    record = dataclasses.replace(result(0.5).record, image="new\nline\x1b[2J\x9b.jpg")
    title = format_report(dataclasses.replace(result(0.5), record=record)).splitlines()[0]
    assert r"new\nline\x1b[2J\u009b.jpg" in title


@pytest.mark.parametrize(
    ("name", "value", "coloured"),
    [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False), ("TERM", "xterm", True)],
)
def test_colours_obey_the_environment(name: str, value: str, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    color_settings: list[bool | None] = []

    def command(**options: Any) -> int:
        color_settings.append(options["color"])
        return 0

    monkeypatch.setattr("gradcam.cli.cli.main", command)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert color_settings == [None if coloured else False]


@pytest.mark.slow
@POSIX
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line(folder: Path, small: Photo) -> None:
    command = [sys.executable, "-m", "gradcam", "run", str(small("coffee.jpg")), "--device", "cpu"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr == "Error: cannot write to standard output (No space left on device).\n"


def result(share: float, region: tuple[int, int, int, int] = (0, 0, 10, 20)) -> ImageOutcome:
    explained = (
        Explained(3, "cup", 1.0, "layer4", "gradcam", "a.png", blank=False),
        Explained(4, None, 1.0, "layer4", "hirescam", "b.png", blank=True),
    )
    record = Record("photos/a.jpg", "net", None, (Prediction(3, "cup", share), Prediction(14, None, 0.0)), explained)
    record = dataclasses.replace(record, size=(10, 20), region=region)
    return ImageOutcome(record, grids=[(7, 7), (14, 14)], device="cpu", seconds=0.25)


@pytest.mark.parametrize(
    ("share", "percent", "bar"),
    [
        (1.0, "100 %", "█" * 24),
        (0.999, " 99 %", "█" * 24),
        (0.5, " 50 %", "█" * 12),
        (0.25, " 25 %", "█" * 6),
        (0.0625, "  6 %", "█▌"),
        (0.009, "0.9 %", "▎"),
        (0.0, "  0 %", ""),
    ],
)
def test_probabilities_are_shown_as_bars(share: float, percent: str, bar: str) -> None:
    assert format_report(result(share)).splitlines()[2] == f"* cup         3   {percent}   \x1b[36m{bar}\x1b[0m"


def test_outputs_that_are_no_probabilities_are_plain_numbers() -> None:
    for value, text in ((-19.98, "-19.98"), (12.5, " 12.5"), (1.5, "  1.5")):
        lines = format_report(result(value)).splitlines()
        assert lines[2] == f"* cup         3   {text}"
        # An output between 0 and 1, such as this 0, is no probability either.
        assert lines[3] == f"  class 14   14   {'0':>{len(text)}}"


def test_several_methods_and_classes_without_names_are_told_apart() -> None:
    lines = format_report(result(0.5)).splitlines()
    assert lines[0].endswith("a.jpg\x1b[0m   20 x 10   net on cpu   0.2 s")
    assert "  cup     gradcam at layer4 (7 x 7)     →  \x1b[32ma.png\x1b[0m" in lines
    assert "  class 4 hirescam at layer4 (14 x 14)  \x1b[33mno positive evidence\x1b[0m  →  b.png" in lines


@pytest.mark.parametrize(
    ("region", "sentence"),
    [
        ((0, 0, 10, 20), "The model sees the whole image."),
        ((1, 5, 8, 10), f"The model sees a centre crop: 10 x 8 of 20 x 10 pixels (40 %). {ADVICE}"),
        ((0, 0, 10, 19), f"The model sees a centre crop: 19 x 10 of 20 x 10 pixels (95 %). {ADVICE}"),
    ],
)
def test_the_terminal_says_how_much_was_seen(region: tuple[int, int, int, int], sentence: str) -> None:
    assert f"  {sentence}" in format_report(result(0.5, region)).splitlines()


def test_the_terminal_says_how_the_picture_is_shown() -> None:
    plain = result(0.5)
    noted = dataclasses.replace(plain, record=dataclasses.replace(plain.record, note="shown from 40 to\x1b 3200"))
    lines = format_report(noted).splitlines()
    assert lines[-2:] == ["  The model sees the whole image.", r"  Shown from 40 to\x1b 3200."]
    assert format_report(plain).splitlines()[-1] == "  The model sees the whole image."
    assert format_report(noted).endswith("3200.\n")


def test_a_dark_deep_picture_is_shown_with_a_note(run: Command, tmp_path: Path) -> None:
    values = np.linspace(40, 3200, 64 * 80).astype(np.uint16).reshape(64, 80)
    Image.fromarray(values).save(tmp_path / "scan.png")
    outcome = run(tmp_path / "scan.png", "--alpha", "0")
    assert outcome.status == 0
    assert outcome.out.splitlines()[-3:-1] == [
        f"  The model sees a centre crop: 56 x 56 of 80 x 64 pixels (61 %). {ADVICE}",
        "  Showing values from 40 to 3200 of 65535.",
    ]
    overlay = gradcam.read_image("scan-gradcam.png")
    np.testing.assert_array_equal(overlay[..., 0], np.round((values - 40.0) * 255 / 3160))
    for method in ("gradcam", "input-gradients"):
        record = json.loads(run(tmp_path / "scan.png", "--json", "--method", method).out)
        assert record["note"] == "showing values from 40 to 3200 of 65535"


def test_a_picture_as_it_is_has_no_note(run: Command, small: Photo) -> None:
    assert json.loads(run(small("coffee.jpg"), "--json").out)["note"] is None
    assert json.loads(run("missing.dcm", "--json").out)["note"] is None


def test_a_dicom_file_is_explained(run: Command, tmp_path: Path, photo: Photo) -> None:
    """Compare a 12-bit MONOCHROME1 DICOM file with the same image in 8 bits: both get the same class."""
    from tests.images.test_dicom import make
    from tests.images.test_dicom import save as save_dicom

    grey = np.array(Image.open(photo("koala.webp")).convert("L"))
    fields = {"PhotometricInterpretation": "MONOCHROME1", "WindowCenter": 2048, "WindowWidth": 4096}
    stored = np.round((1 - grey / 255) * 4095).astype(np.uint16)
    save_dicom(tmp_path / "koala.dcm", make(stored, BitsStored=12, HighBit=11, **fields))
    Image.fromarray(grey).save(tmp_path / "grey.png")
    records = [json.loads(run(tmp_path / name, "--json").out) for name in ("koala.dcm", "grey.png")]
    assert [record["status"] for record in records] == ["ok", "ok"]
    assert [entry["index"] for entry in records[0]["predictions"]] == [
        entry["index"] for entry in records[1]["predictions"]
    ]
    assert records[0]["predictions"][0]["probability"] == pytest.approx(
        records[1]["predictions"][0]["probability"], abs=0.01
    )
    overlays = [gradcam.read_image(f"{name}-gradcam.png").astype(int) for name in ("koala", "grey")]
    assert abs(overlays[0] - overlays[1]).mean() < 3


@pytest.mark.parametrize("name", ["scan.dcm", "scan.dicom"])
def test_overlays_are_not_written_as_dicom(run: Command, small: Photo, name: str) -> None:
    run(small("coffee.jpg"), "-o", name).check_error(2, "images can only be written as")


# The whole program, in its own process


def start(*arguments: str | Path, **options: object) -> subprocess.Popen[str]:
    """Start `python -m gradcam ...` in its own process, which signals can interrupt."""
    command = [sys.executable, "-m", "gradcam", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **options.pop("env", {})}
    return subprocess.Popen(command, env=environment, **{**pipes, **options})


def finish(process: subprocess.Popen[str]) -> Outcome:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return Outcome(process.returncode, out, err)


def test_the_version_is_the_packages() -> None:
    assert finish(start("--version")) == Outcome(0, f"gradcam, version {gradcam.__version__}\n", "")


@pytest.mark.slow
def test_a_report_of_a_problem_has_all_versions() -> None:
    for typed in (("--version", "--verbose"), ("--verbose", "--version")):
        ended = finish(start(*typed))
        assert (ended.status, ended.err) == (0, "")
        messages = dict(line.split(maxsplit=1) for line in ended.out.splitlines()[1:])
        assert messages["torch"] == torch.__version__
        assert messages["python"] == platform.python_version()
        assert {"torchvision", "opencv", "numpy", "pillow", "system", "gpu"} <= messages.keys()


@pytest.mark.parametrize("arguments", [[], ["run"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from gradcam.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print([name for name in ('torch', 'cv2', 'numpy', 'PIL') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, *arguments, "--help"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Usage: " in completed.stdout
    assert completed.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("encoding", "expected_texts"),
    [
        ("latin-1", ["(7 x 7)  ->  kätzchen-gradcam.png".encode("latin-1"), b"missing-?.jpg: does not exist"]),
        # click treats ASCII as a misconfigured locale, and writes UTF-8.
        ("ascii", ["(7 x 7)  →  kätzchen-gradcam.png".encode(), "missing-猫.jpg: does not exist".encode()]),
    ],
)
def test_a_terminal_without_unicode_causes_no_traceback(
    run: Command, small: Photo, monkeypatch: pytest.MonkeyPatch, encoding: str, expected_texts: list[bytes]
) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in expected_texts]
    for name, stream in zip(("stdout", "stderr"), streams):
        monkeypatch.setattr(sys, name, stream)
    assert run(small("coffee.jpg").rename("kätzchen.png"), "missing-猫.jpg").status == 1
    for stream, text in zip(streams, expected_texts):
        assert text in stream.buffer.getvalue()


@pytest.mark.parametrize(("encoding", "half"), [("cp1252", "#"), ("utf-8", "█")])
def test_a_progress_bar_fits_the_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, half: str) -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    stream = io.TextIOWrapper(Terminal(), encoding=encoding)
    monkeypatch.setattr(sys, "stderr", stream)
    make_streams_safe()
    with show_pass_progress(OutputMode(as_json=False, quiet=False)) as show:
        show(1, 2)
    drawn = stream.buffer.getvalue().decode(encoding)
    assert f" 50 % |{half}" in drawn
    assert "?" not in drawn


@POSIX
def test_a_reader_that_has_seen_enough_causes_no_traceback(small: Photo, folder: Path) -> None:
    process = start("run", *[small("coffee.jpg")] * 30, "--device", "cpu")
    assert process.stdout.readline().startswith("coffee.png ")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=100) == 1
    assert err == ""


def test_standard_output_is_closed(run: Command, small: Photo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # Python does this for `>&-`.
    outcome = run(small("coffee.jpg"))
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == ["coffee-gradcam.png"]


@POSIX
def test_a_name_that_is_no_text_is_kept(run: Command, small: Photo, folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    small("coffee.jpg").rename(folder / name)
    outcome = run(name, "--json")
    assert outcome.status == 0
    assert records(outcome)[0]["image"] == name
    assert sorted(os.listdir(os.fsencode(folder))) == [b"caf\xe9-gradcam.png", b"caf\xe9.png"]


@pytest.mark.parametrize("layout", ["channels-first", "channels first"])
def test_a_layout_can_be_named(run: Command, folder: Path, small: Photo, layout: str) -> None:
    assert run(small("coffee.jpg"), "-o", "plain").status == 0
    assert run(small("coffee.jpg"), "-o", "named", "--reshape", layout, "--method", "gradcam").status == 0
    np.testing.assert_array_equal(
        pixels(folder / "plain" / "coffee-gradcam.png"), pixels(folder / "named" / "coffee-gradcam.png")
    )


def test_a_reshape_that_does_not_fit_is_one_line(run: Command, small: Photo) -> None:
    for method in ("gradcam", "guided-gradcam"):
        outcome = run(small("coffee.jpg"), "--reshape", "7x7", "--method", method)
        assert outcome.status == 1
        assert outcome.err.count("\n") == 1
        assert "but reshape=(7, 7) does not fit this output: pass reshape='channels first'" in outcome.err


@pytest.mark.parametrize("text", ["7", "7x", "0x7", "7x7x7x7", "7 x 7", "channels", "-7x7"])
def test_a_reshape_is_a_grid_or_a_layout(run: Command, small: Photo, text: str) -> None:
    outcome = run(small("coffee.jpg"), f"--reshape={text}")
    assert outcome.status == 2
    assert "expected a grid, such as 14x14, or one of 'channels-first'" in " ".join(outcome.err.split())


def test_a_reshape_where_no_method_has_a_layer(run: Command, small: Photo) -> None:
    run(small("coffee.jpg"), "--reshape", "7x7", "--method", "input-gradients").check_error(
        2, "--reshape does not work with --method input-gradients"
    )


@POSIX
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_a_library_swallows(run: Command, folder: Path, small: Photo, number: int, status: int) -> None:
    (folder / "train.py").write_text(
        "import os\n\ndef build():\n    try:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    except BaseException:\n        pass\n    raise ValueError('of a signal')\n"
    )
    outcome = run(small("coffee.jpg"), "--model", "train.py:build")
    assert (outcome.status, outcome.out) == (status, "")
    assert "of a signal" not in outcome.err


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing_half_written(photo: Photo, folder: Path, number: int, status: int) -> None:
    pictures = [photo("polar_bear.webp")] * 300
    process = start("run", *pictures, "--device", "cpu", "-o", "out")
    assert process.stdout.readline().startswith("polar_bear.webp ")
    time.sleep(0.3)
    process.send_signal(number)
    outcome = finish(process)
    assert outcome.status == status
    assert "Traceback" not in outcome.err
    assert 1 <= len(files(folder)) < 300
    for path in (folder / "out").iterdir():
        assert path.name.startswith("polar_bear-gradcam")
        assert gradcam.read_image(path).shape == (768, 1024, 3)


# Special files, and names with control characters or shell syntax


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    """Create a socket from inside its folder, because the path of a socket has a small length limit."""
    working_folder = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.bind(path.name)
    finally:
        os.chdir(working_folder)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PUT = {"pipe": put_pipe, "socket": put_socket, "device": put_device}
NAMING = {
    "odd.png": ("run",), "odd.dcm": ("run",), "other.png": ("batch", "-o", "out"), "odd.txt": ("batch", "-o", "out"),
    "odd.csv": ("batch", "-o", "out"), "odd.zip": ("batch", "-o", "out"), "odd.tar.gz": ("batch", "-o", "out"),
    "odd.pt": ("run", "PHOTO", "--weights"), "labels.txt": ("run", "PHOTO", "--labels"),
    "boxes.csv": ("evaluate", "PHOTO", "--annotations"), "coco.json": ("evaluate", "PHOTO", "--annotations"),
    "model.py:make": ("run", "PHOTO", "--model"),
}  # fmt: skip


@POSIX
@pytest.mark.parametrize("kind", PUT)
@pytest.mark.parametrize("name", NAMING)
def test_special_files_are_refused(gradcam_command: Command, small: Photo, folder: Path, name: str, kind: str) -> None:
    PUT[kind](folder / name.partition(":")[0])
    command, *arguments = (str(small("coffee.jpg")) if word == "PHOTO" else word for word in NAMING[name])

    def give_up(*_: object) -> None:
        raise AssertionError("it is waited for")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        outcome = gradcam_command(command, "--device", "cpu", *arguments, name)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert outcome.status in (1, 2)
    first, *remaining = [line for line in outcome.err.splitlines() if not line.startswith(("Usage:", "Try "))]
    assert f"{name.partition(':')[0]}" in first
    assert f"a {kind}, not a file" in first or "not a file" in first or "expected a Python file" in first
    assert len(remaining) <= 1
    assert outcome.out.count("\n") <= 3


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x1b[31m\u202egnp\u009b2J\nb\r" + os.fsdecode(b"\x9b\xff") + ".png"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\x1b[31m\u202egnp\u009b2J\nb\r\x9b\xff.png"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize(
    "words",
    [
        ("run",), ("run", "--json"), ("run", "--class", "evil"), ("compare",), ("check",), ("inspect", "activations"),
        ("inspect", "gradients"), ("inspect", "trace"), ("batch", "-o", "out", "--report"), ("batch", "-o", "out", "--json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
def test_names_reach_the_terminal_escaped(
    gradcam_command: Command, small: Photo, folder: Path, words: tuple[str, ...], is_broken: bool
) -> None:
    small("coffee.jpg").rename(folder / HOSTILE)
    if is_broken:
        Path(HOSTILE).write_bytes(b"no picture")
    labels = [f"evil\x1b[2J\u202e {i}" for i in range(1000)]
    labels[7] = "evil"
    Path("labels.json").write_text(json.dumps(labels))
    outcome = gradcam_command(*words, HOSTILE, "--device", "cpu", "--labels", "labels.json")
    assert outcome.status == int(is_broken)
    assert CONTROLS.search(outcome.out + outcome.err) is None
    if "--json" in words:
        assert [record["image"] for record in records(outcome)] == [HOSTILE]
    if is_broken:
        assert SHOWN in outcome.err
        assert all(line.startswith(SHOWN) or "\\n" not in line for line in outcome.err.splitlines())
    elif "--json" not in words and words not in (("inspect", "trace"), ("batch", "-o", "out", "--report")):
        assert SHOWN in outcome.out
        assert r"evil\x1b[2J\u202e" in outcome.out or words in (("run", "--class", "evil"), ("inspect", "activations"))


@POSIX
def test_the_page_escapes_hostile_names_and_links_files(gradcam_command: Command, small: Photo, folder: Path) -> None:
    small("coffee.jpg").rename(folder / HOSTILE)
    assert gradcam_command("batch", "--device", "cpu", ".", "-o", "out", "--report").status == 0
    page = Path("out/index.html").read_text()
    assert CONTROLS.search(page) is None
    assert json.dumps(SHOWN)[1:-1].replace("'", "\\u0027") in page
    details = next(Path("out/report").glob("details-*/0.js")).read_text()
    link = json.loads(details.partition(", ")[2].rpartition(")")[0])[0]["explained"][0]["files"]["overlay"]
    assert (b"out/" + unquote_to_bytes(link)) in [b"out/" + os.fsencode(name) for name in os.listdir("out")]


def test_an_error_is_of_as_many_lines_as_it_was_given_whatever_is_in_them() -> None:
    assert str(gradcam.GradcamError("new\nline\x1b[2J.png: does not exist")) == r"new\nline\x1b[2J.png: does not exist"
    assert str(gradcam.GradcamError("a sentence:", "a\tcommand")) == "a sentence:\na\\tcommand"


def test_colours_and_bars_of_our_own_pass_and_nothing_else_does() -> None:
    stream = io.StringIO()
    formatting = "\x1b[1mbold\x1b[0m \x1b[32mgreen\r\x1b[K\x1b[A\x1b[?25l\n"
    SafeStream(stream).write(formatting + "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\ud800")
    assert stream.getvalue() == formatting + r"\x1b]0;title\x07\x1b[2J\u009b31m\u202e\ud800"


def test_max_pixels_is_what_the_command_reads(run: Command, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run(small("coffee.jpg"), "--max-pixels", "59999")
    assert (refused.status, refused.out) == (1, "")
    assert "has 300 x 200 = 60000 pixels, but --max-pixels or GRADCAM_MAX_PIXELS allows 59999" in refused.err
    assert "GRADCAM_MAX_PIXELS" not in os.environ
    monkeypatch.setenv("GRADCAM_MAX_PIXELS", "59999")
    assert run(small("coffee.jpg")).status == 1
    assert run(small("coffee.jpg"), "--max-pixels", "60000").status == 0
    assert os.environ["GRADCAM_MAX_PIXELS"] == "59999"
