"""Test `gradcam inspect gradients`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import gradcam
from gradcam.cli.inspect.gradients import MAX_ROWS
from gradcam.inspection.flow import gradients
from gradcam.inspection.plot import draw_gradients
from gradcam.targets import ClassTarget
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command, pixels, records, small

__all__ = ["folder", "gradcam_command", "small"]  # fixtures

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing")

SICK = """
from torch import nn
def sick():
    layers = []
    for _ in range(30):
        layers += [nn.Conv2d(3, 3, 1), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
"""


@pytest.fixture
def inspect(gradcam_command: Command) -> Command:
    """Return a function that runs `gradcam inspect gradients` on the CPU."""
    return lambda *arguments: gradcam_command("inspect", "gradients", "--device", "cpu", *arguments)


@needs_matplotlib
def test_a_table_and_a_plot(inspect: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("koala.webp")
    outcome = inspect(path, "-c", "koala")
    assert (outcome.status, outcome.err) == (0, "")
    assert files(folder) == ["koala-gradients.png"]
    prepared = classifier.prepare(path)
    index = classifier.find_class("koala")
    flow = gradients(classifier.model, prepared.image[None], target=ClassTarget(index))
    lines = outcome.out.splitlines()
    assert lines[1] == f"norms of the gradient of koala ({index}), score {flow.scores.item():.4g}"
    first = flow.layers[0]
    assert first.activations is not None
    (row,) = [line for line in lines if line.split()[:1] == [first.name]]
    assert row.split()[1] == f"{first.activations.norm:.1e}"
    assert row.split()[-2:] == [f"{int(first.activations.zeros * 100)}", "%"]
    assert f"  {MAX_ROWS} of {len(flow.layers)} layers are listed. Use --all or --layer PATTERN for more." in lines
    assert "  No gradient vanishes or explodes." in lines
    assert lines[-2] == "  →  koala-gradients.png"
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


@needs_matplotlib
def test_records_of_layers_and_a_failed_image(inspect: Command, small: Photo, classifier: gradcam.Classifier) -> None:
    path = small("koala.webp")
    broken, record = records(inspect("missing.png", path, "--json", "-l", "stem", "-l", "head.*"))
    assert (broken["status"], broken["error"]) == ("failed", "missing.png: does not exist")
    assert list(broken) == list(record)
    assert [broken[key] for key in ("index", "label", "score", "plot", "reference", "layers")] == [None] * 5 + [[]]
    flow = gradients(classifier.model, classifier.prepare(path).image[None], layers=["stem", "head.*"])
    assert (record["schema"], record["status"], record["label"]) == (1, "ok", "koala")
    assert record["plot"] == "koala-gradients.png"
    assert [layer["name"] for layer in record["layers"]] == [layer.name for layer in flow.layers]
    for layer, expected in zip(record["layers"], flow.layers):
        assert layer["activations"]["norm"] == pytest.approx(expected.activations.norm, rel=1e-5)
        assert [item["ratio"] for item in layer["parameters"]] == pytest.approx(
            [parameter.ratio for parameter in expected.parameters], rel=1e-5
        )


def test_sick_layers_are_seen_in_the_terminal(inspect: Command, folder: Path, small: Photo) -> None:
    Path("net.py").write_text(SICK)
    outcome = inspect(small("koala.webp"), "-m", "net.py:sick", "-c", "1")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    vanishing = [line.split()[0] for line in lines if line.endswith("vanishing")]
    assert vanishing[0] == "0"
    (summary,) = [line for line in lines if line.startswith("  vanishing:")]
    assert summary.endswith(f"first 0, last {vanishing[-1]}")
    bars = [line.count("█") for line in lines if "%" in line]
    assert bars[0] < bars[len(bars) // 2] < bars[-1]


def test_layers_by_pattern_and_all_of_them(inspect: Command, small: Photo) -> None:
    path = small("koala.webp")
    (record,) = records(inspect(path, "--json", "-l", "head.*", "-l", "stem.0"))
    names = [layer["name"] for layer in record["layers"]]
    assert names[0] == "stem.0"
    assert all(name.startswith("head.") for name in names[1:])
    Path("net.py").write_text(SICK)
    assert 32 < sum("%" in line for line in inspect(path, "-m", "net.py:sick").out.splitlines()) <= MAX_ROWS
    assert sum("%" in line for line in inspect(path, "-m", "net.py:sick", "--all").out.splitlines()) == 63
    inspect(path, "-l", "hed").check_error(2, "There is no layer 'hed'")


@needs_matplotlib
def test_a_broken_picture_does_not_stop_the_others(inspect: Command, small: Photo) -> None:
    outcome = inspect("missing.png", small("koala.webp"), "-l", "head.*")
    assert outcome.status == 1
    assert outcome.err == "missing.png: does not exist\n"
    assert outcome.out.startswith("koala.png   ")


@needs_matplotlib
def test_where_plots_go(inspect: Command, folder: Path, small: Photo, classifier: gradcam.Classifier) -> None:
    koala, panda = small("koala.webp"), small("panda.webp")
    assert inspect(koala, panda, "-o", "plots", "-q", "-l", "head.*").out == ""
    assert files(folder) == ["plots/koala-gradients.png", "plots/panda-gradients.png"]
    flow = gradients(classifier.model, classifier.prepare(koala).image[None], layers="head.*")
    title = f"koala.png: gradient of koala, score {flow.scores.item():.4g}, in efficientnet_lite0"
    np.testing.assert_array_equal(pixels(folder / "plots/koala-gradients.png"), draw_gradients(flow, title=title))
    assert inspect(koala, "-o", "one.jpg", "-q", "-l", "head.*").status == 0
    assert "one.jpg" in files(folder)
    inspect(koala, panda, "-o", "one.jpg").check_error(2, "one.jpg is one file, but there are several results")


def test_a_table_needs_no_plots(inspect: Command, folder: Path, small: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "matplotlib" else find_spec(name, *args)
    )
    path = small("koala.webp")
    outcome = inspect(path, "-l", "head.*")
    assert outcome.status == 0
    assert outcome.err == 'Note: plots need matplotlib: pip install ".[plots]" in a clone of gradcam\n'
    assert "params" in outcome.out
    assert files(folder) == []
    assert records(inspect(path, "--json", "-l", "head.*"))[0]["plot"] is None
    inspect(path, "-o", "here").check_error(2, "--output writes plots, which need matplotlib")


def test_wrong_usage(inspect: Command, small: Photo) -> None:
    inspect(small("koala.webp"), "--reshape", "7x7").check_error(2, "does not use --reshape")
    assert inspect(small("koala.webp"), "-c", "kola").status == 2
