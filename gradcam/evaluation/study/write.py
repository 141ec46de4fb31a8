"""Write results to files: tables (CSV, JSON, LaTeX with the booktabs package), and images of examples and curves."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.batch.read_items import read_item
from gradcam.errors import GradcamError, OutputError, join_names, to_pip_command
from gradcam.evaluation.intervals import mean_interval
from gradcam.evaluation.metrics import Metric
from gradcam.evaluation.study.plan import StudyPlan
from gradcam.evaluation.study.results import Ranking, Results, StudyEntry, compare_methods, describe_too_few_images
from gradcam.evaluation.study.run import MAX_EXAMPLES, Study
from gradcam.evaluation.subject import scale_to_unit
from gradcam.images.draw import overlay
from gradcam.images.files import write_atomically
from gradcam.images.read import Pixels, crop
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.labels import name_class
from gradcam.models.preprocess import find_canvas
from gradcam.renames import EVALUATE, add_old_keys
from gradcam.sources.contents import InputImage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS_PER_TABLE = 5  # Other metrics are written to additional tables below the first table.
LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip
SCHEMA = 1  # version of the JSON document
ARROWS = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
EXAMPLE_HEIGHT_PIXELS = 168
CURVES = {"insertion": "pixels inserted, highest first", "deletion": "pixels deleted, highest first"}
COLOURS = ("#2b6cb0", "#c2410c", "#0d9488", "#6b21a8", "#84a90f", "#db2777", "#d99a06", "#1e293b", "#38bdf8", "#7f1d1d")
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # A style is used in all colours before the next style.
CONTROL_LINE_STYLES = ((0, (1, 1.5)), (0, (4, 3)), (0, (4, 2, 1, 2)), "-")
INK, MUTED = "#1f2937", "#9ca3af"
PLOT_DPI, PLOT_HEIGHT_INCHES, PLOT_WIDTH_INCHES = 110, 4.6, 6.6  # The size includes the legend.


def write_results(results: Results, path: Path) -> None:
    """Write a table to a ``.csv``, ``.json`` or ``.tex`` file. Raise `OutputError` if that fails."""
    writers = {".csv": to_csv, ".json": to_json, ".tex": to_latex}
    to_text = writers.get(path.suffix.lower())
    if to_text is None:
        raise OutputError(f"{path}: expected a file that ends in {join_names(writers)}, or a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_text(results).encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


def to_csv(results: Results) -> str:
    """Return CSV text with one row per image, method and metric. The conditions are repeated in each row."""
    conditions = results.conditions
    fields = ("layer", "score", "target", "resizing", "device", "precision", "seed")
    constant: dict[str, Any] = {"model": conditions.model, "weights_sha256": conditions.weights}
    constant |= {name: getattr(conditions, name) for name in fields}
    constant |= {"data_sha256": results.data, "annotations_sha256": conditions.annotations, **conditions.versions}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "method", "metric", "value", "index", "label", *constant])
    writer.writerows([*vars(measurement).values(), *constant.values()] for measurement in results.measurements)
    return text.getvalue()


def to_json(results: Results) -> str:
    """Return a JSON document with the conditions, a summary of each method and metric, all values, and the failures."""
    rankings = compare_methods(results)
    document = {
        "schema": SCHEMA, "conditions": results.conditions.to_fields(), "data_sha256": results.data,
        "images": len(results.judged()), "mosaics": len(results.judged("mosaic")),
        "failures": [{"image": entry.image, "error": entry.error} for entry in results.failures],
        "notes": [*results.notes, *filter(None, [describe_too_few_images(rankings)])],
        "summaries": [_summarise(results.plan.metric(ranking.metric), ranking) for ranking in rankings.values()],
        "measurements": [vars(measurement) for measurement in results.measurements],
    }  # fmt: skip
    return json.dumps(add_old_keys(EVALUATE, document), indent=1, allow_nan=False) + "\n"


def _summarise(metric: Metric, ranking: Ranking) -> dict[str, Any]:
    return {
        "method": ranking.method, "metric": metric.name, "better": metric.better, "by_order": metric.by_order,
        **ranking.interval.to_fields(),
        "difference_from_best": ranking.difference and ranking.difference.to_fields(),
        "best": ranking.is_best, "level_with_best": ranking.is_level, "control": ranking.is_control,
    }  # fmt: skip


def to_latex(results: Results) -> str:
    """Return a LaTeX `table*` of means with 95 % intervals, the best in bold. LaTeX needs `\\usepackage{booktabs}`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    rankings = compare_methods(results)
    metrics = list(dict.fromkeys(metric for _, metric in rankings))
    groups = [metrics[start : start + METRICS_PER_TABLE] for start in range(0, len(metrics), METRICS_PER_TABLE)]
    environment = Environment(
        loader=PackageLoader("gradcam.evaluation.study"), undefined=StrictUndefined,
        autoescape=False,  # Autoescape is for HTML. The filter `tex` escapes for LaTeX.
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, block_start_string="<%", block_end_string="%>",
        variable_start_string="<<", variable_end_string=">>", comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    environment.filters["tex"] = escape
    text = environment.get_template("table.tex.j2").render(
        conditions=results.conditions, data=results.data, images=len(results.judged()),
        mosaics=len(results.judged("mosaic")), has_best=any(ranking.is_best for ranking in rankings.values()),
        shortage=describe_too_few_images(rankings), parts=[_to_part(results, rankings, group) for group in groups],
    )  # fmt: skip
    return str(text)


def escape(text: object) -> str:
    """Escape LaTeX's special characters, and replace control characters by question marks."""
    printable = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "?", str(text))
    return "".join(LATEX_ESCAPES.get(character, character) for character in printable)


def _to_part(results: Results, rankings: Mapping[tuple[str, str], Ranking], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the contents of one LaTeX table: column titles, image counts, and the rows of methods and controls."""
    rows = {name: [_to_cell(rankings[name, metric]) for metric in metrics] for name in results.plan.names}
    return {
        "titles": [f"{escape(name)} {ARROWS[results.plan.metric(name).better]}" for name in metrics],
        "counts": [max(rankings[name, metric].interval.n for name in rows) for metric in metrics],
        "methods": {name: rows[name] for name in results.plan.methods},
        "controls": {name: rows[name] for name in results.plan.controls},
    }


def _to_cell(ranking: Ranking) -> str:
    interval = ranking.interval
    if not interval.n:
        return "--"
    # LaTeX needs $-$ for a minus sign.
    mean, low, high = (f"{number:.3f}".replace("-", "$-$") for number in (interval.mean, interval.low, interval.high))
    mean = rf"\textbf{{{mean}}}" if ranking.is_best else rf"\underline{{{mean}}}" if ranking.is_level else mean
    return rf"{mean} {{\scriptsize [{low}, {high}]}}" if interval.is_known else mean


def draw_examples(study: Study, results: Results) -> Pixels:
    """Draw up to five images, each in a row with the heatmaps of all methods: RGB, uint8 (H,W,3).

    Heatmaps cover the part of the image that the model saw. Heatmaps that were not computed in this run are computed
    again. Raise `GradcamError` if no image was evaluated, or if an image can no longer be read.
    """
    items = {item.name: item for item in study.items}
    rows = [_to_row(study, items[entry.image], entry) for entry in results.judged()[:MAX_EXAMPLES]]
    if not rows:
        raise GradcamError("There are no examples: no image was evaluated.")
    return draw_panel(["image", *study.plan.names], rows, height=EXAMPLE_HEIGHT_PIXELS)


def _to_row(study: Study, item: InputImage, entry: StudyEntry) -> PanelRow:
    read = read_item(study.classifier, item)
    if isinstance(read.picture, GradcamError):
        raise read.picture
    image = read.picture.reading.picture
    heatmaps = study.example_heatmaps.get(entry.image)
    if heatmaps is None:
        evaluator, subject, _ = study.make_subject(item, read.picture, read.wanted)
        heatmaps = evaluator.explain(subject, entry.sha256 or "")
    view = crop(image, find_canvas(study.classifier.preprocess, read.picture))
    region = (0, 0, *view.shape[:2])
    overlays = [overlay(view, scale_to_unit(heatmaps[name])[0], region=region) for name in study.plan.names]
    label = name_class(entry.index, entry.label)
    return PanelRow(f"{entry.image}: {label}, {100 * (entry.probability or 0):.0f} %", [image, *overlays])


def list_curves(results: Results) -> list[str]:
    """List the metrics that have curves."""
    return [metric for metric in CURVES if any(results.curves(name, metric) for name in results.plan.names)]


def draw_curves(results: Results) -> Pixels:
    """Plot the mean probability along insertion and deletion, with controls in grey: RGB, uint8 (H,W,3).

    The band is the 95 % interval of the best method's mean. Only the best method has a band. Images differ more than
    methods, so the bands of several methods would overlap. The legend lists the areas with their intervals, the best
    area first. With too few images, there are no intervals. Raise `GradcamError` if matplotlib is missing, or if
    neither metric was measured.
    """
    metrics = list_curves(results)
    if not metrics:
        raise GradcamError("There are no curves: evaluate the metric 'insertion' or 'deletion' (--metric).")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GradcamError(f"Drawing curves needs matplotlib: {to_pip_command('plots')}") from error
    count = len(metrics)
    # pyplot is not used, because pyplot would keep a reference to the figure, and select a display backend.
    size = PLOT_WIDTH_INCHES * count, PLOT_HEIGHT_INCHES
    figure = Figure(figsize=size, dpi=PLOT_DPI, facecolor="white", layout="constrained")
    for position, metric in enumerate(metrics, 1):
        _draw(figure.add_subplot(1, count, position), results, metric)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3])


def _draw(axes: Axes, results: Results, metric: str) -> None:
    plan = results.plan
    areas = {name: mean_interval(results.values(name, metric)) for name in plan.names}
    is_reversed = plan.metric(metric).better == "higher"
    methods = sorted(plan.methods, key=lambda name: areas[name].mean, reverse=is_reversed)
    has_band = bool(methods) and areas[methods[0]].is_known
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.grid(axis="y", color="#e5e7eb", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(color=MUTED, labelcolor=INK, length=3)
    for name in (*methods, *plan.controls):
        style, area = _style(plan, name), areas[name]
        label = f"{area.mean:.3f}{f' ±{(area.high - area.low) / 2:.3f}' if area.is_known else ''}  {name}"
        curves = np.array(results.curves(name, metric))
        percentages = np.linspace(0, 100, curves.shape[1])
        axes.plot(percentages, curves.mean(0), label=label, zorder=3 if name in methods else 2, **style)
        if name in methods[:1] and has_band:
            bands = [mean_interval(column) for column in curves.T]
            low, high = [band.low for band in bands], [band.high for band in bands]
            axes.fill_between(percentages, low, high, color=style["color"], alpha=0.15, lw=0, zorder=1)
    count = len(results.curves(plan.names[0], metric))
    axes.set_title(
        f"{metric} {plan.metric(metric).arrow}   mean of {count} image{'s' * (count != 1)}",
        loc="left", fontsize=12, color=INK, parse_math=False,
    )  # fmt: skip
    axes.set_xlabel(f"% of {CURVES[metric]}", color=INK)
    axes.set_ylabel("probability of the class", color=INK)
    axes.set(xlim=(0, 100), ylim=(0, min(1.0, axes.get_ylim()[1])))
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5, alignment="left",
        title="area ±95 % (band: best method)" if has_band else "area", borderaxespad=0.2, handlelength=2.2,
    )  # fmt: skip


def _style(plan: StudyPlan, name: str) -> dict[str, Any]:
    if name in plan.controls:
        style = CONTROL_LINE_STYLES[plan.controls.index(name) % len(CONTROL_LINE_STYLES)]
        return {"color": MUTED, "ls": style, "lw": 1.2}
    i = plan.methods.index(name)
    return {"color": COLOURS[i % len(COLOURS)], "ls": LINE_STYLES[i // len(COLOURS) % len(LINE_STYLES)], "lw": 1.5}
