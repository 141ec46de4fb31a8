"""Insertion and deletion as a picture: the mean curve of each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gradcam.batch.read import read_item
from gradcam.errors import GradcamError
from gradcam.evaluation.intervals import Interval, mean_interval
from gradcam.evaluation.metrics import METRICS
from gradcam.evaluation.study.results import Entry, Results
from gradcam.evaluation.study.run import EXAMPLES, Study
from gradcam.images.draw import overlay
from gradcam.images.read import Pixels
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.classifier import Prepared
from gradcam.sources.contents import Item

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


EXAMPLE_HEIGHT = 168  # pixels of each picture


def draw_examples(study: Study, results: Results) -> Pixels:
    """Up to five pictures below one another, and beside each its maps by all methods: RGB, uint8 (H,W,3).

    Maps are on the part of the picture that the network saw.

    Maps that were not computed in this run are computed again. Raises `GradcamError` where no picture was judged, and
    where one cannot be read any more.
    """
    items = {item.name: item for item in study.items}
    rows = [_to_row(study, items[entry.image], entry) for entry in results.judged()[:EXAMPLES]]
    if not rows:
        raise GradcamError("There are no examples: no picture was judged.")
    return draw_panel(["picture", *study.judge.plan.names], rows, height=EXAMPLE_HEIGHT)


def _to_row(study: Study, item: Item, entry: Entry) -> PanelRow:
    read = read_item(study.classifier, item)
    if isinstance(read.picture, GradcamError):
        raise read.picture
    picture = read.picture.reading.picture
    heatmaps = study.kept.get(entry.image) or _explain(study, read.picture, entry)
    top, left, height, width = study.classifier.region(*picture.shape[:2])
    seen = picture[top : top + height, left : left + width]
    drawn = [overlay(seen, heatmaps[name][0]) for name in study.judge.plan.names]
    label = f"class {entry.index}" if entry.label is None else entry.label
    return PanelRow(f"{entry.image}: {label}, {100 * (entry.probability or 0):.0f} %", [picture, *drawn])


def _explain(study: Study, prepared: Prepared, entry: Entry) -> Mapping[str, Tensor]:
    subject = study.judge.look(prepared, entry.index)
    found = study.judge.explain(subject.images, subject.classes[:, None], entry.sha256 or "")
    return {name: maps[:, 0].cpu() for name, maps in found.items()}


PLOTS = 'pip install "gradcam-torch[plots]"'
CURVES = {"insertion": "pixels shown, highest of the map first", "deletion": "pixels hidden, highest of the map first"}
COLOURS = ("#2b6cb0", "#c2410c", "#0d9488", "#6b21a8", "#84a90f", "#db2777", "#d99a06", "#1e293b", "#38bdf8", "#7f1d1d")
STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # once the colours are used up
INK, QUIET = "#1f2937", "#9ca3af"
DOTS, HEIGHT, WIDTH = 110, 4.6, 6.6  # per inch; inches of a plot with its legend


def list_curves(results: Results) -> list[str]:
    """The metrics of which there are curves."""
    names = results.plan.names
    return [metric for metric in CURVES if any(results.curves(name, metric) for name in names)]


def draw_curves(results: Results) -> Pixels:
    """Mean probability along insertion and deletion, a line for each method: RGB, uint8 (H,W,3).

    The band is the 95 % interval of the best method's mean, by the same bootstrap as in the tables, and the legend has
    those of the areas, the best first; of too few pictures there is neither. More bands would cover one another: pictures
    differ more than methods do, which the tables compare picture by picture. Controls are grey.
    Raises `GradcamError` where matplotlib is missing, and where neither metric was measured.
    """
    metrics = list_curves(results)
    if not metrics:
        raise GradcamError("There are no curves: neither insertion nor deletion was measured.")
    figure, plots = _new_plots(len(metrics))
    for axes, metric in zip(plots, metrics):
        _draw(axes, results, metric)
    return _render(figure)


def _new_plots(count: int) -> tuple[Figure, list[Axes]]:
    """A figure by itself: pyplot would keep it, and choose a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GradcamError(f"Drawing curves needs matplotlib: {PLOTS}. The numbers need nothing.") from error
    figure = Figure(figsize=(WIDTH * count, HEIGHT), dpi=DOTS, facecolor="white", layout="constrained")
    plots = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axes in plots:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(QUIET)
        axes.grid(axis="y", color="#e5e7eb", lw=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(color=QUIET, labelcolor=INK, length=3)
    return figure, plots


def _draw(axes: Axes, results: Results, metric: str) -> None:
    sign = 1 if METRICS[metric].better == "higher" else -1
    seed = results.conditions.seed
    areas = {name: mean_interval(results.values(name, metric), seed=seed) for name in results.plan.names}
    methods = sorted(results.plan.methods, key=lambda name: -sign * areas[name].mean)
    has_band = bool(methods) and areas[methods[0]].is_known
    for name in (*methods, *results.plan.controls):
        style = _style(results.plan.methods.index(name)) if name in results.plan.methods else _grey(results, name)
        curves = np.array(results.curves(name, metric))
        shares = np.linspace(0, 100, curves.shape[1])
        axes.plot(shares, curves.mean(0), label=_label(name, areas[name]), zorder=3 if name in methods else 2, **style)
        if name in methods[:1] and has_band:
            means = [mean_interval(column, seed=seed) for column in curves.T]
            low, high = [it.low for it in means], [it.high for it in means]
            axes.fill_between(shares, low, high, color=style["color"], alpha=0.15, lw=0, zorder=1)
    count = len(results.curves(results.plan.names[0], metric))
    axes.set_title(
        f"{metric} {METRICS[metric].arrow}   mean of {count} picture{'s' * (count != 1)}",
        loc="left", fontsize=12, color=INK, parse_math=False,
    )  # fmt: skip
    axes.set_xlabel(f"% of {CURVES[metric]}", color=INK)
    axes.set_ylabel("probability of the class", color=INK)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, min(1.0, axes.get_ylim()[1]))
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5, alignment="left",
        title="area ±95 %, band: the best's" if has_band else "area", borderaxespad=0.2, handlelength=2.2,
    )  # fmt: skip


def _style(place: int) -> dict[str, Any]:
    """Of the method at this place of the plan: the same in both plots."""
    style = STYLES[place // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[place % len(COLOURS)], "ls": style, "lw": 1.5}


def _grey(results: Results, name: str) -> dict[str, Any]:
    styles = ((0, (1, 1.5)), (0, (4, 3)), (0, (4, 2, 1, 2)), "-")
    return {"color": QUIET, "ls": styles[results.plan.controls.index(name) % len(styles)], "lw": 1.2}


def _label(name: str, area: Interval) -> str:
    half = f" ±{(area.high - area.low) / 2:.3f}" if area.is_known else ""
    return f"{area.mean:.3f}{half}  {name}"


def _render(figure: Figure) -> Pixels:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3])
