"""Test custom metrics, methods and functions in a study, from Python and from the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError
from gradcam.evaluation import Subject, evaluate, metric
from tests.cli.test_cli import Command
from tests.cli.test_evaluate import command, folder, gradcam_command
from tests.evaluation.test_study import colours, pictures

__all__ = ["colours", "command", "folder", "gradcam_command", "pictures"]  # fixtures

FILE = """
import gradcam
from gradcam.evaluation import metric

@metric("spread", summary="share of bright pixels", better="lower")
def spread(subject, heatmaps):
    return (heatmaps >= {least}).float().mean((1, 2))

@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)

def everywhere(model, images, classes):
    return images.new_ones(len(images), *images.shape[2:])

number = 3
"""
MetricFunction = Callable[[Any, Any], Any]


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(FILE.format(least=0.5))
    monkeypatch.chdir(tmp_path)


@metric("spread", summary="share of bright pixels", better="lower")
def spread(subject: Subject, heatmaps: torch.Tensor) -> torch.Tensor:
    return (heatmaps >= 0.5).float().mean((1, 2))


def corner(model: Any, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    images.zero_()  # the function receives a copy
    maps = images.new_zeros(len(images), *images.shape[2:])
    maps[:, :8, :8] = 4 * (1 + classes[:, None, None])
    return maps


def test_a_metric_and_a_function_of_ones_own_in_python(colours: gradcam.Classifier, pictures: Path) -> None:
    rise = METHODS["rise"].using(masks=20)
    methods = ["gradcam", corner, rise]
    results = evaluate(colours, pictures, methods=methods, metrics=[spread, "complexity", "grid-mass"], controls=[])
    assert results.plan.methods == ("gradcam", "rise", "corner")
    assert results.plan.metrics == ("grid-mass", "complexity", "spread")
    assert not results.failures
    assert results.values("corner", "spread")[:7] == results.values("corner", "complexity")[:7] == [64 / 1024] * 7
    image = colours.prepare(pictures / "0-red.png").image[None]
    for name, method in (("gradcam", "gradcam"), ("rise", rise)):
        heatmaps = gradcam.explain(colours.model, image, "relu", method=method, target=0).heatmaps[:, 0]
        assert results.entries[0].values[name]["spread"] == float(spread(None, heatmaps))
    assert results.conditions.settings["own"]["method rise"]["masks"] == "20"
    assert results.conditions.settings["own"]["metric spread"]["file"] == Path(__file__).name


def test_in_the_shell_a_journal_knows_the_file(command: Command, folder: Path, pictures: Path, colours: Any) -> None:
    (folder / "mine.py").write_text(FILE.format(least=0.5))
    methods, metrics = "gradcam,mine.py:mycam,mine.py:everywhere", "complexity,mine.py:spread"
    arguments = (pictures, "--methods", methods, "--metrics", metrics, "--no-controls", "-q", "-o", "out/")
    outcome = command(*arguments)
    assert outcome.status == 0, outcome.err
    rows = list(csv.DictReader((folder / "out/results.csv").read_text().splitlines()))
    values = {(row["image"], row["method"]): float(row["value"]) for row in rows if row["metric"] == "spread"}
    assert {method for _, method in values} == {"gradcam", "mycam", "everywhere"}
    assert {value for (_, method), value in values.items() if method == "everywhere"} == {1}
    image = colours.prepare(pictures / "2-blue.png").image[None]
    heatmaps = gradcam.explain(colours.model, image, "relu").heatmaps[:, 0]
    assert values["2-blue.png", "gradcam"] == float(spread(None, heatmaps))
    summaries = json.loads((folder / "out/results.json").read_text())["summaries"]
    assert {summary["better"] for summary in summaries if summary["metric"] == "spread"} == {"lower"}
    assert r"spread $\downarrow$" in (folder / "out/results.tex").read_text()
    assert command(*arguments, "--resume").status == 0
    (folder / "mine.py").write_text(FILE.format(least=0.25))
    changed = command(*arguments, "--resume")
    assert changed.status == 2
    assert "the earlier study had other settings: own." in changed.err


def test_ones_own_method_is_recommended_and_checked_too(
    colours: gradcam.Classifier, pictures: Path, user_file: None
) -> None:
    from gradcam.evaluation import check, recommend

    report = check(colours, pictures / "0-red.png", method="mine.py:mycam")
    assert (report.method, report.layer) == ("mycam", "relu")
    images = {path.name: path for path in sorted(pictures.iterdir())}
    rows = recommend(colours, images, methods=["mine.py:mycam"], scores=["logit"], layers=["relu"]).rows
    assert {row.combination.method for row in rows} == {"gradcam", "mycam"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda subject, heatmaps: heatmaps, r"returned torch.float32 \(1, 32, 32\), expected floats \(1,\)"),
        (lambda subject, heatmaps: heatmaps.mean(), r"returned torch.float32 \(\), expected floats \(1,\)"),
        (lambda subject, heatmaps: torch.ones(1, dtype=torch.int64), r"returned torch.int64 \(1,\), expected floats"),
        (lambda subject, heatmaps: None, "returned None, expected floats"),
        (lambda subject, heatmaps: ["a"], r"returned \['a'\], expected floats"),
        (lambda subject, heatmaps: heatmaps.mean((1, 2)) * float("nan"), "odd is nan: check"),
        (lambda subject, heatmaps: 1 / 0, "The metric 'odd' failed: ZeroDivisionError"),
        (lambda subject, heatmaps: heatmaps.zero_().sum((1, 2)), None),  # a metric receives a copy
        (lambda subject, heatmaps: [0.5], None),
    ],
)
def test_what_a_metric_gives_is_checked(
    colours: Any, pictures: Path, function: MetricFunction, message: str | None
) -> None:
    odd = metric("odd", summary="", better="higher")(function)
    picture = pictures / "0-red.png"
    results = evaluate(colours, picture, methods=["gradcam"], metrics=[odd, "insertion"], controls=[])
    if message is None:
        assert results.entries[0].values["gradcam"]["insertion"] > 0.1
    else:
        with pytest.raises(GradcamError, match=message):
            raise GradcamError(results.failures[0].error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metric("road", summary="", better="higher"), "There is already a metric or group 'road'"),
        (lambda: metric("a b", summary="", better="higher"), "'a b' is not a valid metric name"),
        (lambda: metric("odd", summary="", better="up"), "better= is 'up', expected 'higher' or 'lower'"),
        (lambda: metric("odd", summary="", better="lower", needs=["maps"]), r"'odd' are \['maps'\], expected some"),
        (
            lambda: metric("odd", summary="", better="lower", needs=["grid-mass", "heatmaps"]),
            "'odd' needs grid-mass, which is only computed for mosaics",
        ),
        (lambda: metric("odd", summary="", better="lower")(lambda maps: maps), r"has the parameters \(maps\)"),
        (lambda: metric("odd", summary="", better="lower")(3), "The metric 'odd' is 3, expected a function"),
    ],
)
def test_metrics_that_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": [corner]}, "expected a function decorated with @gradcam.evaluation.metric"),
        ({"metrics": ["mine.py:number"]}, "mine.py:number is 3, expected a function decorated"),
        ({"metrics": ["mine.py:spreads"]}, "There is no 'spreads' in mine.py. Nearest: 'spread'"),
        ({"metrics": ["none.py:spread"]}, "none.py"),
        ({"metrics": [spread, "mine.py:spread"]}, "There are two metrics 'spread'"),
        ({"methods": ["mine.py:number"]}, "mine.py:number is 3, expected a method or a function"),
        ({"methods": [corner, lambda *_: None, lambda *_: None]}, "There are two methods '<lambda>'"),
        ({"methods": [lambda images: images]}, "<lambda> failed: TypeError"),
        ({"methods": [lambda model, images, classes: images]}, "<lambda>: The heatmaps have the shape"),
        ({"methods": [METHODS["gradcam"].name, type("gradcam", (), {"__call__": corner})()]}, "already"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(
    colours: gradcam.Classifier, pictures: Path, user_file: None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GradcamError, match=message) as caught:
        evaluate(colours, pictures / "0-red.png", **{"methods": ["gradcam"], "metrics": ["complexity"], **options})
    assert "\n" not in str(caught.value)
