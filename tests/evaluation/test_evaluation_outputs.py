"""Test the outputs of a study: CSV, JSON, tables for papers and terminals, curves and examples."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import gradcam
from gradcam.cli.evaluate import _number, format_results
from gradcam.errors import GradcamError, OutputError
from gradcam.evaluation.metrics import METRICS
from gradcam.evaluation.study.plan import SINGLE_PASS, StudyOptions, StudyPlan, make_plan
from gradcam.evaluation.study.prepare import prepare_study
from gradcam.evaluation.study.results import Conditions, Results, StudyEntry, compare_methods
from gradcam.evaluation.study.write import draw_curves, draw_examples, escape, to_csv, to_json, to_latex, write_results
from gradcam.images.draw import scale_to_height
from gradcam.sources.collect import list_inputs
from tests.colour_model import load, paint_all

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing")

CONDITIONS = Conditions(
    model="net_v2", weights="ab" * 32, device="cpu", precision="float32", layer="layer4.0", score="logit",
    target="the most probable class", resizing="shorter side to 256, centre crop 224 x 224, bicubic", seed=3,
    annotations=None, versions={"gradcam": "1.2", "torch": "2.3"}, settings={},
)  # fmt: skip


def make_results(table: dict[str, dict[str, list[float | None]]], controls: tuple[str, ...] = ()) -> Results:
    """Return results from values by method and metric, one value per image."""
    count = max(len(row) for numbers in table.values() for row in numbers.values())
    metrics = tuple(name for name in METRICS if any(name in numbers for numbers in table.values()))
    entries = []
    for i in range(count):
        values = {name: {metric: row[i] for metric, row in numbers.items()} for name, numbers in table.items()}
        known = {name: {key: value for key, value in row.items() if value is not None} for name, row in values.items()}
        entries.append(StudyEntry(f"{i}.png", "image", f"{i}", None, i, f"label {i}", 0.5, known))
    plan = StudyPlan(tuple(name for name in table if name not in controls), controls, metrics)
    return Results(plan, CONDITIONS, entries)


EXAMPLE = make_results(
    {
        "gradcam": {"iou": [0.5, 0.7, 0.6, 0.8] * 2, "deletion": [0.2, 0.3, 0.2, 0.1] * 2},
        "layercam": {"iou": [0.4, 0.8, 0.7, 0.6] * 2, "deletion": [0.4, 0.5, 0.4, 0.35] * 2},
        "constant": {"iou": [0.1, 0.1, 0.1, 0.1] * 2, "deletion": [0.0, 0.1, 0.2, 0.1] * 2},
    },
    controls=("constant",),
)


# Rankings


def test_means_the_best_and_paired_differences_from_it() -> None:
    standings = compare_methods(EXAMPLE)
    best = standings["gradcam", "iou"]
    assert best.interval.mean == pytest.approx(0.65)
    assert (best.is_best, best.difference, best.interval.n) == (True, None, 8)
    second = standings["layercam", "iou"]
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(-0.025)
    assert (second.is_best, second.is_level) == (False, True)
    # Lower is better. The smallest of the four differences is 0.2.
    assert standings["gradcam", "deletion"].is_best
    worse = standings["layercam", "deletion"]
    assert worse.difference is not None
    assert worse.difference.mean == pytest.approx(0.2125)
    assert worse.difference.low >= 0.19
    assert not worse.is_level


def test_a_control_is_never_the_best_and_is_marked_where_it_beats_all() -> None:
    standings = compare_methods(EXAMPLE)
    assert standings["constant", "deletion"].beats_all
    assert not standings["constant", "iou"].beats_all
    constants = [standings["constant", metric] for metric in ("iou", "deletion")]
    assert not any(constant.is_best or constant.is_level for constant in constants)
    only = compare_methods(make_results({"constant": {"iou": [0.1, 0.2] * 3}}, controls=("constant",)))
    assert only["constant", "iou"].difference is None
    assert not only["constant", "iou"].beats_all


def test_equal_up_to_rounding_the_first_is_best_and_the_other_is_level() -> None:
    tiny = 1e-8
    both = {"gradcam": {"iou": [0.5, 0.25] * 4}, "layercam": {"iou": [0.5 + tiny, 0.25 + tiny] * 4}}
    standings = compare_methods(make_results(both))
    assert standings["gradcam", "iou"].is_best
    assert standings["layercam", "iou"].is_level


def test_pictures_without_a_number_count_for_neither() -> None:
    results = make_results({"gradcam": {"iou": [0.5, None, 0.7] * 4}, "layercam": {"iou": [0.1, None, 0.5] * 4}})
    standings = compare_methods(results)
    assert standings["gradcam", "iou"].interval.n == 8
    difference = standings["layercam", "iou"].difference
    assert difference is not None
    assert (difference.n, difference.mean) == (8, pytest.approx(-0.3))
    assert compare_methods(make_results({"gradcam": {"iou": [None, None], "deletion": [0.1, 0.2]}})).keys() == {
        ("gradcam", "deletion")
    }


# Files


def test_the_csv_has_a_row_for_each_image_method_and_metric() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(EXAMPLE))))
    assert len(rows) == 8 * 3 * 2
    assert rows[0] == {
        "image": "0.png", "method": "gradcam", "metric": "iou", "value": "0.5", "index": "0", "label": "label 0",
        "model": "net_v2", "weights_sha256": "ab" * 32, "layer": "layer4.0", "score": "logit",
        "target": "the most probable class", "resizing": CONDITIONS.resizing, "device": "cpu", "precision": "float32",
        "seed": "3", "data_sha256": EXAMPLE.data, "annotations_sha256": "", "gradcam": "1.2", "torch": "2.3",
    }  # fmt: skip
    values = {(row["image"], row["method"], row["metric"]): float(row["value"]) for row in rows}
    assert values == {
        (measurement.image, measurement.method, measurement.metric): measurement.value
        for measurement in EXAMPLE.measurements
    }
    assert values["3.png", "layercam", "deletion"] == 0.35


def test_names_with_commas_quotes_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    odd = 'a, "b"\udce9.png'
    entry = replace(EXAMPLE.entries[0], image=odd, label=None)
    results = replace(EXAMPLE, entries=[entry])
    write_results(results, tmp_path / "new" / "results.csv")
    text = (tmp_path / "new" / "results.csv").read_bytes().decode("utf-8", "surrogateescape")
    row = next(csv.DictReader(io.StringIO(text)))
    assert (row["image"], row["label"]) == (odd, "")
    write_results(results, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_bytes())["measurements"][0]["image"] == odd


def test_the_json_document_has_conditions_summaries_and_every_number() -> None:
    failed = StudyEntry("broken.png", error="broken.png: is empty")
    document = json.loads(to_json(replace(EXAMPLE, entries=[*EXAMPLE.entries, failed], notes=["a note"])))
    assert document["conditions"]["layer"] == "layer4.0"
    assert document["conditions"]["versions"] == {"gradcam": "1.2", "torch": "2.3"}
    assert (document["data_sha256"], document["images"], document["mosaics"]) == (EXAMPLE.data, 8, 0)
    assert document["failures"] == [{"image": "broken.png", "error": "broken.png: is empty"}]
    assert document["notes"] == ["a note"]
    assert len(document["measurements"]) == 48
    (best,) = [
        summary for summary in document["summaries"] if (summary["method"], summary["metric"]) == ("gradcam", "iou")
    ]
    standing = compare_methods(EXAMPLE)["gradcam", "iou"].interval
    assert {name: best[name] for name in ("mean", "low", "high", "n")} == vars(standing)
    assert (best["best"], best["difference_from_best"], best["better"]) == (True, None, "higher")
    assert {summary["metric"]: summary["by_order"] for summary in document["summaries"]} == {
        "iou": False,
        "deletion": True,
    }


@pytest.mark.parametrize("count", [1, 2, 5])
def test_too_few_images_give_means_without_a_best_method(count: int) -> None:
    """With too few images there are no intervals and no best method, even if the methods differ much.

    A note says why.
    """
    rows = {"gradcam": {"iou": [0.5] * count}, "layercam": {"iou": [0.25] * count}, "random": {"iou": [0.75] * count}}
    results = make_results(rows, controls=("random",))
    document = json.loads(to_json(results))
    for summary in document["summaries"]:
        assert (summary["n"], summary["low"], summary["high"]) == (count, None, None)
        assert (summary["best"], summary["level_with_best"], summary["difference_from_best"]) == (False, False, None)
    (note,) = document["notes"]
    assert note.startswith("Too few images (n): naming a best method needs 8 images")
    lines = table(results, 110)
    assert [" ".join(line.split()) for line in lines if line.startswith(("gradcam", "layercam", "random"))] == [
        "gradcam .500", "layercam .250", "random .750",
    ]  # fmt: skip
    assert " ".join(lines[-2:]) == note
    assert max(map(len, lines)) <= 110
    assert not any("best" in line for line in lines[:-2])
    text = to_latex(results)
    assert r"gradcam & 0.500 \\" in text
    assert "Too few images (n): naming a best method needs 8 images" in text
    assert "Bold" not in text
    enough = make_results({name: {"iou": numbers["iou"] * 8} for name, numbers in rows.items()}, controls=("random",))
    assert not any("Too few" in output for output in (to_json(enough), to_latex(enough), *table(enough, 110)))


def test_a_metric_of_too_few_images_has_no_best_method() -> None:
    few, many = [0.5, 0.4, *[None] * 6], [0.5, 0.4, 0.3, 0.5, 0.6, 0.7, 0.5, 0.6]
    results = make_results({"gradcam": {"iou": few, "road": many}, "layercam": {"iou": few, "road": many[::-1]}})
    standings = compare_methods(results)
    assert [standing.is_best for standing in standings.values()].count(True) == 1
    lines = table(results, 110)
    start = next(number for number, line in enumerate(lines) if line.startswith("paired difference from the best"))
    assert lines[start + 1].split() == ["road", "↑"]
    assert "out of 1: " in lines[-1]
    assert lines[-3].startswith("Too few images (n): ")


def test_results_are_written_by_suffix(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"expected a file that ends in '\.csv', '\.json', '\.tex'"):
        write_results(EXAMPLE, tmp_path / "results.xlsx")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_results(EXAMPLE, tmp_path / "file" / "results.csv")


# For papers


def test_the_latex_table_is_of_booktabs_with_n_and_intervals() -> None:
    text = to_latex(EXAMPLE)
    low, high = (getattr(compare_methods(EXAMPLE)["gradcam", "iou"].interval, end) for end in ("low", "high"))
    assert text.count(r"\begin{tabular}{lll}") == text.count(r"\end{tabular}") == 1
    assert r"method & iou $\uparrow$ & deletion $\downarrow$ \\" in text or (
        r"method & deletion $\downarrow$ & iou $\uparrow$ \\" in text
    )
    assert r"n & 8 & 8 \\" in text
    assert rf"\textbf{{0.650}} {{\scriptsize [{low:.3f}, {high:.3f}]}}" in text
    assert r"\underline{0.625}" in text
    marks = (r"\toprule", r"\midrule", "gradcam &", "layercam &", "constant &", r"\bottomrule")
    order = [text.index(mark) for mark in marks]
    assert order == sorted(order)
    assert text.count(r"\midrule") == 2
    assert r"net\_v2" in text
    assert "layer4.0" in text
    assert "seed 3" in text
    assert text.count("{") == text.count("}")
    rows = re.findall(r"^ {4}(.*?) \\\\$", text, re.M)
    assert {row.count("&") for row in rows} == {2}


def test_more_metrics_than_fit_on_a_page_are_in_parts_below_one_another() -> None:
    names = ["average-drop", "increase", "insertion", "deletion", "road", "adcc", "coherency"]
    text = to_latex(make_results({"gradcam": {name: [-0.1, -0.2] for name in names}}))
    assert [len(spec) for spec in re.findall(r"\\begin\{tabular\}\{(l+)\}", text)] == [6, 3]
    assert text.count("$-$0.150") == 7
    assert "-0.150" not in text.replace("$-$", "")


def test_special_characters_of_latex_are_escaped() -> None:
    assert escape(r"50% of_a\b {x} #1 & $2 ~ ^") == (
        r"50\% of\_a\textbackslash{}b \{x\} \#1 \& \$2 \textasciitilde{} \textasciicircum{}"
    )
    assert escape("a\nb\udce9") == "a?b?"
    odd = replace(EXAMPLE, conditions=replace(CONDITIONS, model="a_b%{", target="50% & more"))
    assert r"a\_b\%\{" in to_latex(odd)
    assert r"50\% \& more" in to_latex(odd)


# For terminals


def table(results: Results, width: int) -> list[str]:
    return click.unstyle(format_results(results, width=width)).splitlines()


def test_the_table_marks_the_best_what_is_level_and_what_the_metric_cannot_tell() -> None:
    lines = table(EXAMPLE, 120)
    half_widths = {
        key: (standing.interval.high - standing.interval.low) / 2 for key, standing in compare_methods(EXAMPLE).items()
    }

    def cell(method: str, metric: str, mean: str, mark: str = "") -> str:
        return f"{mean} ±{half_widths[method, metric]:.3f}{mark}".replace("±0.", "±.")

    means = {line.split()[0]: line for line in lines[: lines.index("")] if line}
    assert cell("gradcam", "iou", ".650", "*") in means["gradcam"]
    assert cell("gradcam", "deletion", ".200", "*") in means["gradcam"]
    assert cell("layercam", "iou", ".625", "=") in means["layercam"]
    assert means["layercam"].count("*") == 0
    assert cell("constant", "deletion", ".100", "!") in means["constant"]
    assert lines[0] == "mean ±95 %"
    assert [line for line in lines if "n = 8" in line]
    assert [line for line in lines if "iou ↑" in line]
    assert [line for line in lines if "deletion ↓" in line]
    start = next(number for number, line in enumerate(lines) if line.startswith("paired difference from the best"))
    differences = {line.split()[0]: line for line in lines[start + 1 :] if line}
    assert re.search(r"-\.025 ±\.\d{3}", differences["layercam"])
    assert re.search(r"\+\.213 ±\.\d{3}|\+\.212 ±\.\d{3}", differences["layercam"])
    assert differences["gradcam"].split() == ["gradcam", "best", "best"]
    assert lines[-1].endswith("out of 1 (not counting 1 marked !): gradcam 1, layercam 1")


@pytest.mark.parametrize("width", [80, 110, 160])
def test_twenty_methods_and_ten_metrics_fit_the_terminal(width: int) -> None:
    generator = np.random.default_rng(0)
    metrics = [name for name in METRICS if METRICS[name].group in ("perturbation", "grid", "summary")]
    methods = [*SINGLE_PASS, "ablationcam", "scorecam", "rise", "smoothgradcam-pp", "random", "constant"]
    rows = {name: {metric: list(generator.normal(0.3, 0.5, 12)) for metric in metrics} for name in methods}
    results = make_results(rows, controls=("random", "constant"))
    lines = table(results, width)
    end = next(number for number, line in enumerate(lines) if line.startswith("* best"))
    assert max(map(len, lines[:end])) <= width
    assert max(map(len, lines[end:])) <= 110
    assert [line for line in lines if line != line.rstrip()] == []
    titles = " ".join(lines)
    for metric in metrics:
        assert all(part in titles for part in metric.split("-"))
    means = lines[: next(i for i, line in enumerate(lines) if line.startswith("paired difference"))]
    parts = [re.findall(r"(-?[\d.]+) ±", line) for line in means if line.startswith("rise ")]
    expected = [np.mean(rows["rise"][metric]) for metric in metrics]
    assert [float(value) for part in parts for value in part] == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, ".500"), (-0.0304, "-.030"), (0.9996, "1.00"), (1.0, "1.00"), (12.345, "12.3"), (0.0, ".000"), (-0.0001, ".000")],
)  # fmt: skip
def test_numbers_take_little_room(value: float, text: str) -> None:
    assert _number(value) == text


# Images


def with_curves(results: Results, curves: dict[str, dict[str, list[list[float]]]]) -> Results:
    entries = []
    for i, entry in enumerate(results.entries):
        rows = {name: {metric: rows[i] for metric, rows in by_metric.items()} for name, by_metric in curves.items()}
        entries.append(replace(entry, curves=rows))
    return replace(results, entries=entries)


@needs_matplotlib
@pytest.mark.parametrize("count", [2, 6])
def test_curves_are_means_and_the_band_is_the_tables_interval(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the best method has a band, and only with enough images: a mean of two curves has no interval."""
    from matplotlib.axes import Axes

    drawn: dict[str, Any] = {}
    bands: list[Any] = []
    plot, fill = Axes.plot, Axes.fill_between

    def record(self: Axes, x: Any, y: Any, *arguments: Any, **options: Any) -> Any:
        drawn[options["label"]] = (np.asarray(x), np.asarray(y), options["color"])
        return plot(self, x, y, *arguments, **options)

    def record_band(self: Axes, x: Any, low: Any, high: Any, **options: Any) -> Any:
        bands.append((np.asarray(low), np.asarray(high), options["color"]))
        return fill(self, x, low, high, **options)

    monkeypatch.setattr(Axes, "plot", record)
    monkeypatch.setattr(Axes, "fill_between", record_band)
    ends = np.linspace(0.2, 1, count)
    curves = {"gradcam": [[end / 2, end, end] for end in ends], "layercam": [[0.0, 0.1, 0.2]] * count}
    areas = {"gradcam": [0.875 * end for end in ends], "layercam": [0.1] * count}
    results = with_curves(
        make_results({name: {"insertion": list(rows)} for name, rows in areas.items()}),
        {name: {"insertion": rows} for name, rows in curves.items()},
    )
    picture = draw_curves(results)
    assert (picture.dtype, picture.shape[2]) == (np.uint8, 3)
    interval = compare_methods(results)["gradcam", "insertion"].interval
    if count == 2:
        assert bands == []
        assert set(drawn) == {"0.525  gradcam", "0.100  layercam"}
        return
    label = f"0.525 ±{(interval.high - interval.low) / 2:.3f}  gradcam"
    assert set(drawn) == {label, "0.100 ±0.000  layercam"}
    shares, mean, colour = drawn[label]
    np.testing.assert_allclose(shares, [0, 50, 100])
    np.testing.assert_allclose(mean, [0.3, 0.6, 0.6])
    ((low, high, band_colour),) = bands
    assert band_colour == colour
    # The area of each curve is 7/8 of its last value. The same factor holds for the ends of its interval.
    np.testing.assert_allclose(0.875 * low, [interval.low / 2, interval.low, interval.low])
    np.testing.assert_allclose(0.875 * high, [interval.high / 2, interval.high, interval.high])
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    assert (np.abs(picture.astype(int) - rgb).max(axis=2) < 20).sum() > 100


@needs_matplotlib
def test_without_insertion_and_deletion_there_are_no_curves() -> None:
    with pytest.raises(GradcamError, match="evaluate the metric 'insertion' or 'deletion'"):
        draw_curves(EXAMPLE)


def find_inside(picture: np.ndarray, part: np.ndarray) -> list[tuple[int, int]]:
    """Return the positions of an exact copy of the part in the image. Compare the corner pixel first, for speed."""
    height, width = part.shape[:2]
    results = []
    for y0, x0 in np.argwhere((picture[: -height + 1, : -width + 1] == part[0, 0]).all(axis=2)):
        if (picture[y0 : y0 + height : 20, x0 : x0 + width : 20] == part[::20, ::20]).all():
            assert (picture[y0 : y0 + height, x0 : x0 + width] == part).all()
            results.append((int(y0), int(x0)))
    return results


def test_the_sheet_shows_the_maps_that_were_judged(tmp_path: Path) -> None:
    classifier = load()
    folder = paint_all(tmp_path / "pictures")
    plan = make_plan(["gradcam"], ["complexity"], controls=["edges"])
    paths = sorted(folder.iterdir())[:2]

    study = prepare_study(classifier, list_inputs(paths).items, plan, StudyOptions())
    results = study.conclude(list(study.run()))
    sheet = draw_examples(study, results)
    study.example_heatmaps.clear()
    np.testing.assert_array_equal(draw_examples(study, results), sheet)
    for path in paths:
        # The image has 36 x 40 pixels, and the network sees the 36 columns in the middle.
        overlay = np.ascontiguousarray(classifier.explain(path).overlay(outline=False)[:, 2:38])
        assert len(find_inside(sheet, scale_to_height(overlay, 168))) == 1


def test_a_sheet_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_text("no picture")
    items = list_inputs(tmp_path / "broken.png").items
    study = prepare_study(load(), items, make_plan(["gradcam"], ["complexity"]), StudyOptions())
    with pytest.raises(GradcamError, match="no image was evaluated"):
        draw_examples(study, study.conclude(list(study.run())))


def test_intervals_hold_their_means() -> None:
    for standing in compare_methods(EXAMPLE).values():
        assert standing.interval.low <= standing.interval.mean <= standing.interval.high
        assert math.isfinite(standing.interval.low)


def test_public_names() -> None:
    assert gradcam.evaluation.Measurement("a", "gradcam", "iou", 0.5, None, None).value == 0.5
    assert gradcam.evaluation.evaluate.__doc__
