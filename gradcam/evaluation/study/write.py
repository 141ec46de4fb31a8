"""Results as a table for a paper, with the package booktabs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcam.errors import OutputError, join_names
from gradcam.evaluation.metrics import METRICS, Metric
from gradcam.evaluation.study.results import Results, Standing, compare_methods, describe_shortage
from gradcam.images.files import write_whole

WIDEST = 5  # metrics beside one another; more of them are in parts below one another
SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip
ARROWS = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}


@dataclass(frozen=True)
class Part:
    """Some of the columns: their titles, how many images each has, and the rows of methods and of controls."""

    titles: Sequence[str]
    counts: Sequence[int]
    methods: Mapping[str, Sequence[str]]
    controls: Mapping[str, Sequence[str]]


def to_latex(results: Results) -> str:
    """A `table*` of means with their 95 % intervals, the best of each column bold; needs `\\usepackage{booktabs}`."""
    standings = compare_methods(results)
    metrics = [name for name in results.plan.metrics if any(metric == name for _, metric in standings)]
    groups = [metrics[start : start + WIDEST] for start in range(0, len(metrics), WIDEST)]
    return (
        _environment()
        .get_template("table.tex.j2")
        .render(
            conditions=results.conditions,
            data=results.data,
            pictures=len(results.judged()),
            mosaics=len(results.judged("mosaic")),
            has_best=any(standing.is_best for standing in standings.values()),
            shortage=describe_shortage(standings),
            parts=[_to_part(results, standings, group) for group in groups],
        )
    )


def escape(text: object) -> str:
    """Any text as LaTeX sets it: its special characters escaped, and what is no character left out."""
    plain = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "?", str(text))
    return "".join(SPECIAL.get(character, character) for character in plain)


def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gradcam.evaluation.study"),
        autoescape=False,  # it is of HTML; `tex` escapes for LaTeX
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters["tex"] = escape
    return environment


def _to_part(results: Results, standings: Mapping[tuple[str, str], Standing], metrics: Sequence[str]) -> Part:
    rows = {name: [_to_cell(standings[name, metric]) for metric in metrics] for name in results.plan.names}
    return Part(
        titles=[_to_title(METRICS[name]) for name in metrics],
        counts=[max(standings[name, metric].interval.n for name in rows) for metric in metrics],
        methods={name: rows[name] for name in results.plan.methods},
        controls={name: rows[name] for name in results.plan.controls},
    )


def _to_title(metric: Metric) -> str:
    return f"{escape(metric.name)} {ARROWS[metric.better]}"


def _to_cell(standing: Standing) -> str:
    found = standing.interval
    if not found.n:
        return "--"
    mean = _to_text(found.mean)
    mean = rf"\textbf{{{mean}}}" if standing.is_best else rf"\underline{{{mean}}}" if standing.is_level else mean
    if not found.is_known:
        return mean
    return rf"{mean} {{\scriptsize [{_to_text(found.low)}, {_to_text(found.high)}]}}"


def _to_text(number: float) -> str:
    """Three decimals; the hyphen of a negative number is a minus."""
    return f"{number:.3f}".replace("-", "$-$")


SCHEMA = 1


def to_csv(results: Results) -> str:
    """A row for each image, method and metric; what is the same for all rows is in columns of its own."""
    conditions = results.conditions
    constant = {
        "model": conditions.model,
        "weights_sha256": conditions.weights,
        "layer": conditions.layer,
        "score": conditions.score,
        "target": conditions.target,
        "resizing": conditions.resizing,
        "device": conditions.device,
        "precision": conditions.precision,
        "seed": conditions.seed,
        "data_sha256": results.data,
        "annotations_sha256": conditions.annotations or "",
        **conditions.versions,
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "method", "metric", "value", "index", "label", *constant])
    for it in results.measurements:
        index = "" if it.index is None else it.index
        row = (it.image, it.method, it.metric, repr(it.value), index, it.label or "")
        writer.writerow([*row, *constant.values()])
    return text.getvalue()


def to_json(results: Results) -> str:
    """A document: conditions, what each method reached by each metric, every number, and what failed."""
    standings = compare_methods(results)
    shortage = describe_shortage(standings)
    found = {
        "schema": SCHEMA,
        "conditions": results.conditions.to_fields(),
        "data_sha256": results.data,
        "pictures": len(results.judged()),
        "mosaics": len(results.judged("mosaic")),
        "failures": [{"image": entry.image, "error": entry.error} for entry in results.failures],
        "notes": [*results.notes, *filter(None, [shortage])],
        "summaries": [_to_fields(standing) for standing in standings.values()],
        "measurements": [vars(measurement) for measurement in results.measurements],
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _to_fields(standing: Standing) -> dict[str, Any]:
    return {
        "method": standing.method,
        "metric": standing.metric,
        "better": METRICS[standing.metric].better,
        **standing.interval.to_fields(),
        "difference_from_best": None if standing.difference is None else standing.difference.to_fields(),
        "best": standing.is_best,
        "level_with_best": standing.is_level,
        "control": standing.is_control,
    }


FORMATS: Mapping[str, Callable[[Results], str]] = {".csv": to_csv, ".json": to_json, ".tex": to_latex}


def write_results(results: Results, path: Path) -> None:
    """Write a table, of the kind that its suffix says: `.csv`, `.json` or `.tex`. Raises `OutputError`."""
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise OutputError(f"{path}: results are written as {join_names(FORMATS)}, or as all of these into a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, form(results).encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
