"""Test `--figure` of `gradcam run` and `gradcam compare`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image

import gradcam
from gradcam.cli.run import METHODS
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command, records, run, small
from tests.cli.test_tasks import DETECTOR, models_file, street
from tests.images.test_dicom import make, save
from tests.models.test_figures import check_images, read_svg

__all__ = ["folder", "gradcam_command", "models_file", "run", "small", "street"]  # fixtures


def test_only_the_figure_is_written(run: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    options = ["-c", "koala", "-c", "tabby", "--alpha", "0.3", "--figure", "a.svg"]
    (record,) = records(run(small("koala.webp"), *options, "--json"))
    assert files(folder) == ["a.svg"]
    assert record["figure"] == "a.svg"
    assert [entry["overlay"] for entry in record["explained"]] == [None, None]  # type: ignore[attr-defined]
    texts, embedded = read_svg((folder / "a.svg").read_bytes())
    assert {"koala", "tabby", "image"} <= set(texts)
    explanation = classifier.explain(small("koala.webp"), target=[["koala", "tabby"]])
    check_images(embedded, [explanation.images[0], *(explanation.overlay(0, k, alpha=0.3) for k in range(2))])
    before = (folder / "a.svg").read_bytes()
    outcome = run(small("koala.webp"), *options)
    assert "koala, tabby at layer4 (7 x 7)\n  by gradcam\n  →  a.svg\n" in outcome.out
    assert (folder / "a.svg").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "written"),
    [
        (["--save", "heatmap"], ["a.svg", "koala-gradcam-heatmap.png"]),
        (["--output", "out"], ["a.svg", "out/koala-gradcam.png"]),
        (["--output", "one.png"], ["a.svg", "one.png"]),
    ],
)
def test_other_files_on_request(
    run: Command, folder: Path, small: Photo, options: list[str], written: list[str]
) -> None:
    outcome = run(small("koala.webp"), "--figure", "a.svg", *options)
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == written
    assert f"→  {written[1]}, a.svg" in outcome.out


def test_one_figure_for_images_classes_and_methods(run: Command, folder: Path, small: Photo) -> None:
    (folder / "torn.png").write_bytes(small("koala.webp").read_bytes()[:3000])
    images = [small("koala.webp"), "torn.png", small("panda.webp")]
    outcome = run(*images, "--method", "gradcam,layercam", "-c", "koala", "-c", "tabby", "--figure", "a.svg", "--json")
    assert outcome.status == 1
    assert outcome.err.startswith("torn.png: ")
    rows = records(outcome)
    assert [row.get("figure") for row in rows] == ["a.svg", None, "a.svg"]
    texts, embedded = read_svg((folder / "a.svg").read_bytes())
    assert [texts.count(name) for name in ("gradcam", "layercam", "koala", "tabby")] == [1, 1, 2, 2]
    assert sum(text.endswith(", koala.png") for text in texts) == 2
    assert not any("torn" in text for text in texts)
    assert len(embedded) == 4 * 3 + 1  # and the colour bar


def test_a_comparison(gradcam_command: Command, folder: Path, small: Photo) -> None:
    outcome = gradcam_command("compare", small("koala.webp"), "--device", "cpu", "--figure", "a.svg", "-q")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")
    assert files(folder) == ["a.svg"]
    texts, _ = read_svg((folder / "a.svg").read_bytes())
    assert [text for text in texts if text in METHODS] == list(METHODS)
    assert "image" not in " ".join(texts)


def test_attributions_beside_heatmaps(run: Command, folder: Path, small: Photo) -> None:
    assert run(small("koala.webp"), "--method", "gradcam,guided-gradcam", "--figure", "a.pdf").status == 0
    assert files(folder) == ["a.pdf"]


def test_boxes(run: Command, folder: Path, street: Path, models_file: str) -> None:
    outcome = run(street, *DETECTOR, "--box", "0,1", "--figure", "a.svg", "--json")
    (record,) = records(outcome)
    texts, _ = read_svg((folder / "a.svg").read_bytes())
    labels = [f"{entry['number']} {entry['label']}" for entry in record["explained"]]  # type: ignore[attr-defined]
    assert set(labels) <= set(texts)
    assert any(" %, hirescam at" in text for text in texts)


def test_a_scan_has_a_scale_bar(run: Command, folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 80), dtype=np.uint8)
    for name, fields, has_bar in (
        ("ct", {"PixelSpacing": [0.5, 0.5]}, True),
        ("cr", {"PixelSpacing": [0.5, 0.5], "ImagerPixelSpacing": [0.5, 0.5]}, False),
        ("detector", {"ImagerPixelSpacing": [0.5, 0.5]}, False),
        ("stretched", {"PixelSpacing": [0.5, 1.0]}, False),
        ("plain", {}, False),
    ):
        save(folder / f"{name}.dcm", make(pixels, **fields))
        assert run(f"{name}.dcm", "--figure", f"{name}.svg", "-q").status == 0
        texts, _ = read_svg((folder / f"{name}.svg").read_bytes())
        assert [text for text in texts if text.endswith(" mm")] == ["10 mm"] * has_bar, name
    assert pydicom.dcmread(folder / "ct.dcm").PixelSpacing == [0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "a.jpg"], "'a.jpg' does not end in .pdf or .svg or .png"),
        (["--figure", "no/a.pdf"], "there is no folder no. Create this folder first"),
        (["--figure", "koala.png"], "koala.png is an input file, which is never overwritten"),
        (["--figure", "a.pdf", "--top-k", "60"], "--figure would draw 61 panels, but the limit is 40"),
    ],
)
def test_wrong_figures(run: Command, folder: Path, small: Photo, options: list[str], message: str) -> None:
    (folder / "koala.png").write_bytes(small("koala.webp").read_bytes())
    run("koala.png", *options).check_error(2, message)
    assert files(folder) == ["koala.png"]


def test_many_classes_continue_on_further_rows(run: Command, folder: Path, small: Photo) -> None:
    assert run(small("koala.webp"), "--figure", "a.png", "--top-k", "14").status == 0
    assert run(small("koala.webp"), "--figure", "b.png", "--top-k", "6").status == 0
    heights = [len(gradcam.read_image(folder / name)) for name in ("a.png", "b.png")]
    assert heights[0] > 2 * heights[1]  # 15 panels are on three rows, and 7 panels on one.


def test_a_figure_that_cannot_be_written(run: Command, folder: Path, small: Photo) -> None:
    (folder / "a.pdf").mkdir()
    outcome = run(small("koala.webp"), "--figure", "a.pdf", "--json")
    outcome.check_error(1, "a.pdf: cannot be written (Is a directory)")
    assert '"status": "failed"' in outcome.out
    assert '"figure"' not in outcome.out


def test_no_figure_of_failed_images(run: Command, folder: Path) -> None:
    Image.new("RGB", (40, 40)).save(folder / "a.png")
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:60])
    outcome = run("torn.png", "--figure", "a.pdf")
    outcome.check_error(1, "torn.png: ")
    assert files(folder) == ["a.png", "torn.png"]


def test_without_matplotlib(run: Command, folder: Path, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(small("koala.webp"), "--figure", "a.pdf").check_error(2, 'Figures need matplotlib: pip install ".[plots]"')
    assert files(folder) == []
