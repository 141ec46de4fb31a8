"""The results of a study as tables for the terminal: means, then how far the others are from the best."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gradcam.cli._job import say
from gradcam.cli._settings import Output
from gradcam.errors import OutputError
from gradcam.evaluation.metrics import METRICS

if TYPE_CHECKING:
    from gradcam.evaluation.intervals import Interval
    from gradcam.evaluation.study.results import Results, Standing
    from gradcam.evaluation.study.run import Study


Standings = Mapping[tuple[str, str], "Standing"]

WIDTH = 120  # characters, where nobody says how wide the terminal is
GAP = "  "
BEST, LEVEL, FOOLED = "*", "=", "!"
LEGEND = {
    BEST: "best method",
    LEVEL: "not told apart from the best: the interval of their difference holds zero",
    FOOLED: "a map that knows nothing does as well as the best method: the metric says little here",
}
NAMED = 3  # methods in the last line


def format_results(results: Results, standings: Standings, *, width: int | None = None) -> str:
    """Several lines: for as many metrics as fit side by side, means with the half-widths of their 95 % intervals; then the
    same for differences from the best method; what the marks mean, and who is best by most metrics."""
    from gradcam.evaluation.study.results import describe_shortage

    columns = width or shutil.get_terminal_size((WIDTH, 24)).columns
    metrics = [name for name in results.plan.metrics if any(metric == name for _, metric in standings)]
    rows = results.plan.names
    means = {name: {metric: _mean_cell(standings[name, metric]) for metric in metrics} for name in rows}
    lines = [*_tables("mean ±95 %", results, standings, means, columns)]
    judged = [metric for metric in metrics if any(standings[name, metric].is_best for name in results.plan.methods)]
    if judged and len(results.plan.methods) > 1:
        differences = {
            name: {metric: _difference_cell(standings[name, metric]) for metric in judged}
            for name in results.plan.methods
        }
        lines += _tables("difference from the best, picture by picture", results, standings, differences, columns)
    shortage = (describe_shortage(standings) or "").replace(". ", ".\n").splitlines()
    return "\n".join([*lines, *_legend(standings), *shortage, *_conclude(results, standings, judged)])


def _tables(
    title: str,
    results: Results,
    standings: Standings,
    cells: Mapping[str, Mapping[str, str]],
    columns: int,
) -> list[str]:
    """A table for each group of metrics that fits."""
    name_width = max(map(len, cells))
    widths = {metric: _column_width(metric, cells) for metric in next(iter(cells.values()))}
    lines = [click.style(title, bold=True)]
    for metrics in _fit(widths, columns - name_width):
        counts = {metric: max(standings[name, metric].interval.n for name in cells) for metric in metrics}
        lines += [click.style(line, dim=True) for line in _head(metrics, counts, widths, name_width)]
        for name, row in cells.items():
            if name in results.plan.controls[:1] and results.plan.methods:
                lines.append(click.style(f"{'controls':-<{name_width}}", dim=True))
            parts = (
                _colour(standings[name, metric])(row[metric]) + " " * (widths[metric] - len(row[metric]))
                for metric in metrics
            )
            lines.append(f"{name:<{name_width}}{GAP}{GAP.join(parts)}".rstrip())
        lines.append("")
    return lines


def _fit(widths: Mapping[str, int], columns: int) -> list[list[str]]:
    """Metrics in parts that are no wider than that, of one each at least."""
    parts: list[list[str]] = []
    left = 0
    for metric, width in widths.items():
        if not parts or left < width + len(GAP):
            parts.append([])
            left = columns
        parts[-1].append(metric)
        left -= width + len(GAP)
    return parts


def _column_width(metric: str, cells: Mapping[str, Mapping[str, str]]) -> int:
    return max(*(len(part) for part in _title(metric)), *(len(row[metric]) for row in cells.values()))


def _title(metric: str) -> tuple[str, str]:
    """In two lines, with the arrow at its end."""
    first, _, second = metric.partition("-")
    arrow = METRICS[metric].arrow
    return (first, f"{second} {arrow}") if second else ("", f"{first} {arrow}")


def _head(metrics: Sequence[str], counts: Mapping[str, int], widths: Mapping[str, int], name_width: int) -> list[str]:
    rows = [[_title(metric)[line] for metric in metrics] for line in (0, 1)]
    rows.append([f"n = {counts[metric]}" for metric in metrics])
    lines = [GAP.join(f"{text:<{widths[metric]}}" for metric, text in zip(metrics, row)) for row in rows]
    return [f"{'':<{name_width}}{GAP}{line}".rstrip() for line in lines if line.strip()]


def _mean_cell(standing: Standing) -> str:
    mark = BEST if standing.is_best else LEVEL if standing.is_level else FOOLED if standing.beats_all else ""
    return _cell(standing.interval, _number) + mark


def _difference_cell(standing: Standing) -> str:
    return "best" if standing.difference is None else _cell(standing.difference, _signed)


def _cell(interval: Interval, show: Callable[[float], str]) -> str:
    """A mean, and half of its interval's width, where there is one."""
    if not interval.n:
        return "-"
    half = f" ±{_number((interval.high - interval.low) / 2)}" if interval.is_known else ""
    return show(interval.mean) + half


def _number(value: float) -> str:
    """Three digits, without the zero that says nothing: .523, 1.00, -12.3."""
    text = f"{value:.3f}"
    if abs(float(text)) < 1:
        return text.replace("0.", ".", 1) if float(text) else ".000"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _signed(value: float) -> str:
    text = _number(value)
    return text if text[0] == "-" else f"+{text}"


def _colour(standing: Standing) -> Callable[[str], str]:
    if standing.is_best:
        return lambda text: click.style(text, fg="green", bold=True)
    if standing.is_level:
        return lambda text: click.style(text, fg="green")
    if standing.beats_all:
        return lambda text: click.style(text, fg="yellow")
    return lambda text: click.style(text, dim=True) if standing.is_control else text


def _legend(standings: Standings) -> list[str]:
    found = {
        BEST: any(it.is_best for it in standings.values()),
        LEVEL: any(it.is_level for it in standings.values()),
        FOOLED: any(it.beats_all for it in standings.values()),
    }
    return [f"{mark} {LEGEND[mark]}" for mark, is_used in found.items() if is_used]


def _conclude(results: Results, standings: Standings, metrics: Sequence[str]) -> list[str]:
    """Who is best, or not told apart from it, by most metrics of those that tell a method from what knows nothing."""
    telling = [metric for metric in metrics if not any(standings[it, metric].beats_all for it in results.plan.controls)]
    if len(results.plan.methods) < 2 or not telling:
        return []
    wins = {
        name: sum(standings[name, metric].is_best or standings[name, metric].is_level for metric in telling)
        for name in results.plan.methods
    }
    ranked = sorted(wins, key=lambda name: -wins[name])[:NAMED]
    listed = ", ".join(f"{name} {wins[name]}" for name in ranked)
    what = "metric" if len(telling) == 1 else "metrics"
    left_out = len(metrics) - len(telling)
    but = f" (without {left_out} marked {FOOLED})" if left_out else ""
    return [f"Best or level with it by, of {len(telling)} {what}{but}: {click.style(listed, bold=True)}"]


TABLES = (".csv", ".json", ".tex")


@dataclass(frozen=True)
class StudyChoice:
    """What was chosen beside the model, as typed."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    annotations: str | None
    layer: str | None
    target: str | None
    score: str
    reshape: str | tuple[int, ...] | None
    controls: bool
    limit: int | None
    seed: int
    output: str | None
    resume: bool
    overwrite: bool

    @property
    def mode(self) -> Literal["new", "resume", "overwrite"]:
        """What is done about an earlier study."""
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"


@dataclass(frozen=True)
class Place:
    """Where results go: a folder, or one table in it."""

    folder: Path
    file: Path | None = None

    @property
    def journal(self) -> Path:
        """The file that a stopped study goes on with."""
        return self.folder / "journal.jsonl" if self.file is None else self.file.with_name(f"{self.file.name}.journal")

    @property
    def tables(self) -> list[Path]:
        """The tables that are written."""
        return [self.folder / f"results{suffix}" for suffix in TABLES] if self.file is None else [self.file]


def find_place(output: str) -> Place:
    """Where results go. Raises `click.UsageError` for a file of another kind than a table."""
    path = Path(output)
    if output.endswith(("/", os.sep)) or path.is_dir() or not path.suffix:
        return Place(path)
    if path.suffix.lower() not in TABLES:
        raise click.UsageError(f"{path}: results are written as {', '.join(TABLES)}, or into a folder: {path}/")
    return Place(path.parent, path)


def check_place(place: Place | None, choice: StudyChoice) -> None:
    """What can be told before torch is imported, and a model loaded. Raises `OutputError` for what is in the way."""
    from gradcam.evaluation.study.journal import check_journal

    if place is None:
        return
    if place.folder.exists() and not place.folder.is_dir():
        raise OutputError(f"{place.folder}: is a file, expected a folder for the results; choose another --output")
    check_journal(place.journal, choice.mode)
    for path in place.tables:
        if choice.mode != "overwrite" and path.exists() and not place.journal.exists():
            raise OutputError(f"{path}: is there already; give --overwrite to replace it, or another --output")


def write_all(study: Study, results: Results, place: Place, output: Output) -> Iterator[Path]:
    """Write all that belongs there, and give the path of each. Raises `GradcamError`."""
    from gradcam.evaluation.study.plots import PLOTS, draw_curves, draw_examples, list_curves
    from gradcam.evaluation.study.write import write_results
    from gradcam.images.read import write_image

    for path in place.tables:
        write_results(results, path)
        yield path
    if place.file is not None:
        return
    if list_curves(results) and importlib.util.find_spec("matplotlib") is None:
        say([f"there is no curves.png without matplotlib: {PLOTS}"], output)
    elif list_curves(results):
        write_image(place.folder / "curves.png", draw_curves(results))
        yield place.folder / "curves.png"
    write_image(place.folder / "examples.png", draw_examples(study, results))
    yield place.folder / "examples.png"
