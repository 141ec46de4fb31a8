"""Results as files: tables (CSV, JSON, LaTeX with the package booktabs), and pictures of examples and of curves."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.batch.read import read_item
from gradcam.errors import GradcamError, OutputError, join_names, to_pip_command
from gradcam.evaluation.intervals import mean_interval
from gradcam.evaluation.study.plan import Agenda
from gradcam.evaluation.study.results import Judgement, Ranking, Results, compare_methods, describe_shortage
from gradcam.evaluation.study.run import EXAMPLES, Study
from gradcam.evaluation.subject import to_unit
from gradcam.images.draw import overlay
from gradcam.images.files import write_whole
from gradcam.images.read import Pixels, crop
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.labels import name_class
from gradcam.models.preprocess import find_canvas
from gradcam.renames import EVALUATE, add_old_keys
from gradcam.sources.contents import Item

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDEST = 5  # metrics beside one another; more of them are in parts below one another
SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip
SCHEMA = 1  # of the JSON document
ARROWS = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
EXAMPLE_HEIGHT = 168  # pixels of each picture
CURVES = {"insertion": "pixels inserted, highest first", "deletion": "pixels deleted, highest first"}
COLOURS = ("#2b6cb0", "#c2410c", "#0d9488", "#6b21a8", "#84a90f", "#db2777", "#d99a06", "#1e293b", "#38bdf8", "#7f1d1d")
STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # once the colours are used up
GREY_STYLES = ((0, (1, 1.5)), (0, (4, 3)), (0, (4, 2, 1, 2)), "-")
INK, QUIET = "#1f2937", "#9ca3af"
DOTS, HEIGHT, WIDTH = 110, 4.6, 6.6  # per inch; inches of a plot with its legend


def write_results(results: Results, path: Path) -> None:
    """Write a table, of the kind that its suffix says: ``.csv``, ``.json`` or ``.tex``. Raises `OutputError`."""
    forms = {".csv": to_csv, ".json": to_json, ".tex": to_latex}
    form = forms.get(path.suffix.lower())
    if form is None:
        raise OutputError(f"{path}: expected a file that ends in {join_names(forms)}, or a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, form(results).encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


def to_csv(results: Results) -> str:
    """A row for each image, method and metric; what is the same for all rows is in columns of its own."""
    it = results.conditions
    named = ("layer", "score", "target", "resizing", "device", "precision", "seed")
    constant = {"model": it.model, "weights_sha256": it.weights, **{name: getattr(it, name) for name in named}}
    constant |= {"data_sha256": results.data, "annotations_sha256": it.annotations or "", **it.versions}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "method", "metric", "value", "index", "label", *constant])
    for one in results.measurements:
        index = "" if one.index is None else one.index
        row = (one.image, one.method, one.metric, repr(one.value), index, one.label or "")
        writer.writerow([*row, *constant.values()])
    return text.getvalue()


def to_json(results: Results) -> str:
    """A document: conditions, what each method reached by each metric, every number, and what failed."""
    rankings = compare_methods(results)
    shortage = describe_shortage(rankings)
    summaries = [
        {
            "method": it.method,
            "metric": it.metric,
            "better": results.plan.metric(it.metric).better,
            "by_order": results.plan.metric(it.metric).by_order,
            **it.interval.to_fields(),
            "difference_from_best": it.difference and it.difference.to_fields(),
            "best": it.is_best,
            "level_with_best": it.is_level,
            "control": it.is_control,
        }
        for it in rankings.values()
    ]
    found = {
        "schema": SCHEMA,
        "conditions": results.conditions.to_fields(),
        "data_sha256": results.data,
        "images": len(results.judged()),
        "mosaics": len(results.judged("mosaic")),
        "failures": [{"image": entry.image, "error": entry.error} for entry in results.failures],
        "notes": [*results.notes, *filter(None, [shortage])],
        "summaries": summaries,
        "measurements": [vars(measurement) for measurement in results.measurements],
    }
    return json.dumps(add_old_keys(EVALUATE, found), indent=1, allow_nan=False) + "\n"


def to_latex(results: Results) -> str:
    """A `table*` of means with their 95 % intervals, the best of each column bold; needs `\\usepackage{booktabs}`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    rankings = compare_methods(results)
    metrics = [name for name in results.plan.metrics if any(metric == name for _, metric in rankings)]
    groups = [metrics[start : start + WIDEST] for start in range(0, len(metrics), WIDEST)]
    environment = Environment(
        loader=PackageLoader("gradcam.evaluation.study"), undefined=StrictUndefined,
        autoescape=False,  # it is of HTML; `tex` escapes for LaTeX
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, block_start_string="<%", block_end_string="%>",
        variable_start_string="<<", variable_end_string=">>", comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    environment.filters["tex"] = escape
    text = environment.get_template("table.tex.j2").render(
        conditions=results.conditions,
        data=results.data,
        pictures=len(results.judged()),
        mosaics=len(results.judged("mosaic")),
        has_best=any(ranking.is_best for ranking in rankings.values()),
        shortage=describe_shortage(rankings),
        parts=[_to_part(results, rankings, group) for group in groups],
    )
    return str(text)


def escape(text: object) -> str:
    """Any text as LaTeX sets it: its special characters escaped, and what is no character left out."""
    plain = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "?", str(text))
    return "".join(SPECIAL.get(character, character) for character in plain)


def _to_part(results: Results, rankings: Mapping[tuple[str, str], Ranking], metrics: Sequence[str]) -> dict[str, Any]:
    """Some of the columns: their titles, how many images each has, and the rows of methods and of controls."""
    rows = {name: [_to_cell(rankings[name, metric]) for metric in metrics] for name in results.plan.names}
    return {
        "titles": [f"{escape(name)} {ARROWS[results.plan.metric(name).better]}" for name in metrics],
        "counts": [max(rankings[name, metric].interval.n for name in rows) for metric in metrics],
        "methods": {name: rows[name] for name in results.plan.methods},
        "controls": {name: rows[name] for name in results.plan.controls},
    }


def _to_cell(ranking: Ranking) -> str:
    found = ranking.interval
    if not found.n:
        return "--"
    # Three decimals; the hyphen of a negative number is a minus.
    mean, low, high = (f"{it:.3f}".replace("-", "$-$") for it in (found.mean, found.low, found.high))
    mean = rf"\textbf{{{mean}}}" if ranking.is_best else rf"\underline{{{mean}}}" if ranking.is_level else mean
    return rf"{mean} {{\scriptsize [{low}, {high}]}}" if found.is_known else mean


def draw_examples(study: Study, results: Results) -> Pixels:
    """Up to five pictures below one another, and beside each its maps by all methods: RGB, uint8 (H,W,3). Maps are on
    the part that the network saw; those that were not computed in this run are computed again. Raises `GradcamError`
    where no picture was judged, and where one cannot be read any more."""
    items = {item.name: item for item in study.items}
    rows = [_to_row(study, items[entry.image], entry) for entry in results.judged()[:EXAMPLES]]
    if not rows:
        raise GradcamError("There are no examples: no image was evaluated.")
    return draw_panel(["image", *study.plan.names], rows, height=EXAMPLE_HEIGHT)


def _to_row(study: Study, item: Item, entry: Judgement) -> PanelRow:
    read = read_item(study.classifier, item)
    if isinstance(read.picture, GradcamError):
        raise read.picture
    picture = read.picture.reading.picture
    heatmaps = study.kept.get(entry.image)
    if heatmaps is None:
        evaluator, subject, _ = study.look(item, read.picture, read.wanted)
        heatmaps = evaluator.explain(subject, entry.sha256 or "")
    seen = crop(picture, find_canvas(study.classifier.preprocess, read.picture))
    whole = (0, 0, *seen.shape[:2])
    drawn = [overlay(seen, to_unit(heatmaps[name])[0], region=whole) for name in study.plan.names]
    label = name_class(entry.index, entry.label)
    return PanelRow(f"{entry.image}: {label}, {100 * (entry.probability or 0):.0f} %", [picture, *drawn])


def list_curves(results: Results) -> list[str]:
    """The metrics of which there are curves."""
    names = results.plan.names
    return [metric for metric in CURVES if any(results.curves(name, metric) for name in names)]


def draw_curves(results: Results) -> Pixels:
    """Mean probability along insertion and deletion, a line for each method, controls in grey: RGB, uint8 (H,W,3). The
    band is the 95 % interval of the best method's mean, and the legend has those of the areas, the best first; of too
    few pictures there is neither. More bands would cover one another: pictures differ more than methods do. Raises
    `GradcamError` where matplotlib is missing, and where neither metric was measured."""
    metrics = list_curves(results)
    if not metrics:
        raise GradcamError("There are no curves: evaluate the metric insertion or deletion (--metric).")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GradcamError(f"Drawing curves needs matplotlib: {to_pip_command('plots')}") from error
    count = len(metrics)
    # A figure by itself: pyplot would keep it, and choose a display.
    figure = Figure(figsize=(WIDTH * count, HEIGHT), dpi=DOTS, facecolor="white", layout="constrained")
    for place, metric in enumerate(metrics, 1):
        _draw(figure.add_subplot(1, count, place), results, metric)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3])


def _draw(axes: Axes, results: Results, metric: str) -> None:
    plan = results.plan
    sign = 1 if plan.metric(metric).better == "higher" else -1
    areas = {name: mean_interval(results.values(name, metric)) for name in plan.names}
    methods = sorted(plan.methods, key=lambda name: -sign * areas[name].mean)
    has_band = bool(methods) and areas[methods[0]].is_known
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.grid(axis="y", color="#e5e7eb", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(color=QUIET, labelcolor=INK, length=3)
    for name in (*methods, *plan.controls):
        style, area = _style(plan, name), areas[name]
        label = f"{area.mean:.3f}{f' ±{(area.high - area.low) / 2:.3f}' if area.is_known else ''}  {name}"
        curves = np.array(results.curves(name, metric))
        shares = np.linspace(0, 100, curves.shape[1])
        axes.plot(shares, curves.mean(0), label=label, zorder=3 if name in methods else 2, **style)
        if name in methods[:1] and has_band:
            low, high = zip(*((it.low, it.high) for it in (mean_interval(column) for column in curves.T)))
            axes.fill_between(shares, low, high, color=style["color"], alpha=0.15, lw=0, zorder=1)
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


def _style(plan: Agenda, name: str) -> dict[str, Any]:
    if name in plan.controls:
        return {"color": QUIET, "ls": GREY_STYLES[plan.controls.index(name) % len(GREY_STYLES)], "lw": 1.2}
    place = plan.methods.index(name)
    return {"color": COLOURS[place % len(COLOURS)], "ls": STYLES[place // len(COLOURS) % len(STYLES)], "lw": 1.5}
