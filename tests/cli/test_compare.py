"""Test `gradcam compare`, `gradcam methods`, and the evidence notes of `gradcam run`."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradcam
from gradcam.attributions.table import ATTRIBUTIONS
from gradcam.cli._terminal import format_report
from gradcam.cli.run import METHODS, SIGNED
from gradcam.storage.records import Explained, ImageOutcome, Prediction, Record
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command, pixels, records, run, small

__all__ = ["folder", "gradcam_command", "run", "small"]  # fixtures


@pytest.fixture
def compare(gradcam_command: Command) -> Command:
    """Return a function that runs `gradcam compare` on the CPU."""
    return lambda *arguments: gradcam_command("compare", "--device", "cpu", *arguments)


def test_every_image_has_a_panel(compare: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    outcome = compare(small("koala.webp"), small("panda.webp"))
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == ["koala-compare.png", "panda-compare.png"]
    explanations = classifier.compare(small("koala.webp"), layers=["layer4"], methods=METHODS)
    assert np.array_equal(pixels(folder / "koala-compare.png"), gradcam.panel(explanations))
    assert f"koala at layer4 (7 x 7)\n  by {', '.join(METHODS)}\n  →  koala-compare.png" in outcome.out


def test_layers_and_classes_go_down(compare: Command, folder: Path, small: Photo) -> None:
    options = ["-l", "layer3", "-l", "layer4", "-c", "koala", "-c", "ice bear", "--method", "hirescam", "--json"]
    (record,) = records(compare(small("koala.webp"), *options))
    panels = [(entry["layer"], entry["label"], entry["method"], entry["overlay"]) for entry in record["explained"]]
    assert panels == [
        (layer, label, "hirescam", "koala-compare.png")
        for layer in ("layer3", "layer4")
        for label in ("koala", "ice bear")
    ]
    assert pixels(folder / "koala-compare.png").shape[0] > 4 * 224


def test_a_file_may_be_named_where_there_is_one_picture(compare: Command, folder: Path, small: Photo) -> None:
    assert compare(small("koala.webp"), "-o", "all.jpg", "--top-k", 2).status == 0
    assert files(folder) == ["all.jpg"]
    compare(small("koala.webp"), small("panda.webp"), "-o", "all.jpg").check_error(2, "all.jpg is one file, but there")


def test_signed_evidence_is_compared_by_the_methods_that_have_it(compare: Command, small: Photo) -> None:
    (record,) = records(compare(small("koala.webp"), "--evidence", "signed", "--json"))
    assert [(entry["method"], entry["evidence"]) for entry in record["explained"]] == [
        (name, "signed") for name in SIGNED
    ]
    assert all(gradcam.METHODS[name].is_signed for name in SIGNED)


def test_blank_maps_are_counted() -> None:
    def entry(method: str, blank: bool) -> Explained:
        return Explained(1, "cat", 1.0, "layer4", method, "a.png", blank, "negative")

    record = Record("a.png", "m", None, [Prediction(1, "cat", 1.0)], [entry("gradcam", True), entry("hirescam", False)])
    record = dataclasses.replace(record, size=(10, 10), region=(0, 0, 10, 10))
    report = format_report(ImageOutcome(record, 0.1, grids=[(7, 7), (7, 7)], device="cpu"))
    assert "no negative evidence in 1 of 2 heatmaps" in report
    assert "cat at layer4 (7 x 7)\n  by gradcam, hirescam" in report


def test_a_score_of_ones_own_is_not_compared_with_another(compare: Command, small: Photo) -> None:
    (record,) = records(compare(small("koala.webp"), "--score", "contrast", "--json"))
    assert [entry["method"] for entry in record["explained"]] == [name for name in METHODS if name != "finercam"]
    compare(small("koala.webp"), "--score", "contrast", "--method", "finercam").check_error(1, "finercam defines its")


# Evidence


@pytest.mark.parametrize("evidence", ["negative", "signed"])
def test_evidence_kinds(
    evidence: str, run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier
) -> None:
    (record,) = records(run(small("koala.webp"), "--evidence", evidence, "--json", "-l", "layer3"))
    assert files(folder) == [f"koala-gradcam-{evidence}.png"]
    assert record["explained"][0]["evidence"] == evidence
    explanation = classifier.explain(small("koala.webp"), "layer3", evidence=evidence)
    assert np.array_equal(pixels(folder / f"koala-gradcam-{evidence}.png"), explanation.overlay())


def test_a_contrast_with_a_named_class(run: Command, small: Photo) -> None:
    options = ["--json", "-c", "koala"]
    (plain,) = records(run(small("koala.webp"), *options))
    (rival,) = records(run(small("koala.webp"), "--json", "-c", "wombat"))
    (contrast,) = records(run(small("koala.webp"), *options, "--score", "contrast", "--against", "wombat"))
    scores = [record["explained"][0]["score"] for record in (plain, rival, contrast)]
    assert scores[2] == pytest.approx(scores[0] - scores[1], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "koala", "--score", "contrast", "--against", "koala"], "--class and --against name the same class"),
        (["--top-k", "1001"], "--top-k is 1001, but this model has 1000 classes"),
        (["--method", "guided-gradcam", "--evidence", "negative"], "--evidence does not work with --method guided"),
        (["--method", "smoothgrad", "--augmentation", "flip"], "--augmentation does not work with"),
        (["--method", "smoothgrad", "--smoothing", "eigen"], "--smoothing does not work with"),
        (["--method", "smoothgrad", "--interpolation", "nearest"], "--interpolation does not work with"),
        (["--method", "input-gradients", "--layer", "layer3"], "--layer does not work with"),
    ],
)
def test_contradicting_options(options: list[str], message: str, run: Command, folder: Path, small: Photo) -> None:
    run(small("koala.webp"), *options).check_error(2, message)
    assert files(folder) == []


def test_a_rival_that_is_explained_by_chance_is_an_error(run: Command, small: Photo) -> None:
    outcome = run(small("koala.webp"), "--score", "contrast", "--against", "koala")  # Koala is the top class.
    outcome.check_error(1, "Class 105 cannot be contrasted with itself")


@pytest.mark.parametrize("options", [{"augmentation": "flip"}, {"smoothing": "eigen"}, {"interpolation": "nearest"}])
def test_options_of_any_method(
    options: dict[str, str], run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier
) -> None:
    ((name, value),) = options.items()
    assert run(small("koala.webp"), "-l", "layer3", f"--{name}", value).status == 0
    expected = classifier.explain(small("koala.webp"), "layer3", **options)  # type: ignore[arg-type]
    assert np.array_equal(pixels(folder / "koala-gradcam.png"), expected.overlay())
    assert not np.array_equal(expected.overlay(), classifier.explain(small("koala.webp"), "layer3").overlay())


# gradcam methods


def test_every_method_has_a_line_with_its_cost(gradcam_command: Command) -> None:
    outcome = gradcam_command("methods")
    assert (outcome.status, outcome.err) == (0, "")
    title, *lines = outcome.out.splitlines()
    assert re.split("  +", title) == ["method", "forward passes", "summary"]
    methods = [*gradcam.METHODS.values(), *ATTRIBUTIONS.values()]
    assert [re.split("  +", line) for line in lines] == [
        [method.name, method.cost, method.summary] for method in methods
    ]


def test_papers_are_listed_with_verbose(gradcam_command: Command) -> None:
    lines = gradcam_command("methods", "gradcam++", "layercam", "--verbose").out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "gradcam-pp", "Chattopadhyay", "layercam", "Jiang"]


def test_bibtex(gradcam_command: Command) -> None:
    outcome = gradcam_command("methods", "--bibtex", "eigengradcam", "elementwise-gradcam", "gradcam")
    entries = re.findall(r"@(\w+)\{(\w+),\n(.*?)\n\}", outcome.out, re.S)
    assert [(kind, key) for kind, key, _ in entries] == [
        ("article", "gildenblat2021pytorchcam"), ("inproceedings", "selvaraju2017gradcam")
    ]  # fmt: skip
    assert "author = {Selvaraju, Ramprasaath R. and Cogswell, Michael and" in entries[1][2]
    assert "year = {2017}" in entries[1][2]
    keys = re.findall(r"^@\w+\{(\w+),", gradcam_command("methods", "--bibtex").out, re.M)
    assert len(keys) == len(set(keys)) > 9


def test_an_unknown_method(gradcam_command: Command) -> None:
    gradcam_command("methods", "gradcm").check_error(2, "There is no method 'gradcm'. Nearest: 'gradcam'")


def test_methods_are_listed_without_torch() -> None:
    code = (
        "import sys; from gradcam.cli import cli; cli(['methods'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# Attributions in input space


def test_run_draws_attributions(run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    (record,) = records(run(small("koala.webp"), "--method", "guided-gradcam", "--class", "wombat", "--json"))
    (entry,) = record["explained"]
    assert files(folder) == ["koala-guided-gradcam-106-wombat.png"]
    attribution = classifier.attribute(small("koala.webp"), "guided-gradcam", target=106)
    assert np.array_equal(pixels(folder / "koala-guided-gradcam-106-wombat.png"), attribution.draw())
    assert (entry["label"], entry["layer"], entry["method"], entry["evidence"]) == (
        "wombat", "layer4", "guided-gradcam", "signed"
    )  # fmt: skip
    assert entry["score"] == pytest.approx(attribution.scores.item(), abs=1e-4)
    assert next(item["label"] for item in record["predictions"]) == "koala"


def test_maps_and_attributions_in_one_call(run: Command, folder: Path, small: Photo) -> None:
    options = [
        "--method", "input-gradients", "--method", "gradcam", "--method", "guided-gradcam", "-l", "layer3", "-l",
        "layer4",
    ]  # fmt: skip
    outcome = run(small("koala.webp"), *options)
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == [
        "koala-gradcam-layer3.png", "koala-gradcam-layer4.png", "koala-guided-gradcam-layer3.png",
        "koala-guided-gradcam-layer4.png", "koala-input-gradients.png"
    ]  # fmt: skip
    assert "koala input-gradients at input (224 x 224)  →  koala-input-gradients.png" in outcome.out
    assert "koala guided-gradcam at layer3 (224 x 224)" in outcome.out


def test_a_panel_is_made_of_maps(compare: Command, folder: Path, small: Photo) -> None:
    compare(small("koala.webp"), "--method", "guided-gradcam").check_error(2, "guided-gradcam makes no heatmap at a")
    assert files(folder) == []
