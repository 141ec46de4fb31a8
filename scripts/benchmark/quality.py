"""Evaluate methods by the metrics of `gradcam evaluate`, on the photographs in assets/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

if TYPE_CHECKING:
    from gradcam.evaluation.study.results import Ranking

PICTURES = ROOT / "assets" / "evaluation.txt"
# All single-pass methods, and the fast methods with several passes. Other methods need hundreds of passes per map.
METHODS = ("single-pass", "ablationcam", "reciprocam", "fasterscorecam")
METRICS = (
    *("average-drop", "average-gain", "insertion", "deletion", "road", "sufficiency"),
    *("grid-order", "grid-mass", "grid-maximum", "adcc"),
)
SEED = 0


def compare_quality(settings: Settings) -> Iterator[Table]:
    """Run one study. One device is enough, because no time is measured."""
    import gradcam
    from gradcam.evaluation import METRICS as KNOWN
    from gradcam.evaluation import evaluate
    from gradcam.evaluation.study.results import compare_methods

    classifier = gradcam.load_classifier(device=settings.devices[0])
    report_progress("quality", settings.devices[0], f"{len(METHODS)} kinds of methods, several minutes")
    results = evaluate(classifier, PICTURES, methods=METHODS, metrics=METRICS, seed=SEED)
    standings = compare_methods(results)
    header = ["", *(f"{KNOWN[name].name} {KNOWN[name].arrow}" for name in results.plan.metrics)]
    rows = [
        [name if name in results.plan.methods else f"*{name}*"]
        + [format_standing(standings.get((name, metric))) for metric in results.plan.metrics]
        for name in results.plan.names
    ]
    pictures, mosaics = len(results.judged()), len(results.judged("mosaic"))
    notes = [
        f"{pictures} images and {mosaics} mosaics of {PICTURES.name}, {classifier.name}, {results.conditions.layer}, "
        f"logit of the most probable class, seed {SEED}, data {results.data[:12]}.",
        "Means, and half the 95 % interval. Bold: the best method. =: not significantly different from the best, with all "
        "pairs compared at once. !: a control map that is as good as the best method.",
    ]
    raw = [
        {"method": standing.method, "metric": standing.metric, "mean": standing.interval.mean}
        for standing in standings.values()
    ]
    yield Table("quality", "Methods by metrics", header, rows, notes, raw)


def format_standing(standing: Ranking | None) -> str:
    if standing is None:
        return "-"
    interval = standing.interval
    text = f"{interval.mean:.2f} ± {(interval.high - interval.low) / 2:.2f}"
    if standing.is_best:
        return f"**{text}**"
    return text + (" =" if standing.is_level else " !" if standing.beats_all else "")
