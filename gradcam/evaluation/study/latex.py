"""Results as a table for a paper, with the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradcam.evaluation.metrics import METRICS, Metric
from gradcam.evaluation.study.results import Results
from gradcam.evaluation.study.standings import Standing, compare_methods, describe_shortage

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
