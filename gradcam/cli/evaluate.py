"""`gradcam evaluate`: compare methods by metrics. Each result is stored immediately, so that a study can be resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, print_notes
from gradcam.cli._settings import OutputMode, Settings, to_single_target, to_single_target_settings
from gradcam.errors import OutputError, StoreError, escape_controls, to_pip_command
from gradcam.evaluation.heatmap_sources import CONTROLS
from gradcam.evaluation.metrics import GROUPS, METRICS
from gradcam.evaluation.study.plan import (
    DEFAULT_METHODS,
    METHOD_GROUPS,
    StudyOptions,
    StudyPlan,
    describe_cost,
    make_plan,
)
from gradcam.options import MAX_SEED
from gradcam.plugins import list_entry_points

if TYPE_CHECKING:
    from gradcam.evaluation.intervals import Interval
    from gradcam.evaluation.study.journal import Journal, Mode
    from gradcam.evaluation.study.results import Ranking, Results, StudyEntry
    from gradcam.evaluation.study.run import Study

Rankings = Mapping[tuple[str, str], "Ranking"]
Cells = Mapping[str, Mapping[str, str]]  # the text of each cell, by method and metric

TABLES = (".csv", ".json", ".tex")
WIDTH = 120  # characters, if the terminal's width is unknown
GAP = "  "
BEST, LEVEL, FOOLED = "*", "=", "!"
LEGEND = {
    BEST: "best method",
    LEVEL: "not distinguished from the best method (Holm correction for all pairs of methods)",
    FOOLED: "a control map does as well as the best method: the metric says little here",
}
# MARKS maps each mark to an attribute of a ranking. If the attribute is true, the mark applies. A cell shows the first
# mark that applies. STYLES maps each mark to the style of the cell.
MARKS = {BEST: "is_best", LEVEL: "is_level", FOOLED: "beats_all"}
STYLES: dict[str, dict[str, Any]] = {
    BEST: {"fg": "green", "bold": True}, LEVEL: {"fg": "green"}, FOOLED: {"fg": "yellow"}
}  # fmt: skip
MAX_LISTED_METHODS = 3  # number of methods in the last printed line


@click.command("evaluate", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.names_option(
    "--method NAME[,NAME]",
    f"CAM method to compare (see `gradcam methods`); may be repeated. FILE.py:NAME is your own method. "
    f"Groups: {', '.join(METHOD_GROUPS)} (one forward pass).  [default: {','.join(DEFAULT_METHODS)}]",
    name="methods",
    find=list,
    completions=[*METHODS, *METHOD_GROUPS, *CONTROLS, *list_entry_points("methods")],
)
@options.names_option(
    "--metric NAME[,NAME]",
    f"Metric or group of metrics; may be repeated. Metrics: {', '.join([*METRICS, *list_entry_points('metrics')])}, or "
    f"FILE.py:NAME. Groups: {', '.join(GROUPS)}, all.  [default: perturbation, grid "
    "and summary; with --annotations, also annotations]",
    name="metrics",
    find=list,
    completions=[*METRICS, *list_entry_points("metrics"), *GROUPS, "all"],
)
@options.option(
    "--annotations PATH",
    "Object annotations for the localisation metrics. Give boxes (.csv), a folder of label masks, or COCO (.json).",
    click.Path(path_type=Path),
)
@options.model
@options.layer("Target layer of all methods.  [default: each method's default]")
@options.class_("class_", "Class to explain in all images.  [default: top class of each image]")
@options.other_targets
@options.score
@click.option(
    "--controls/--no-controls", default=True, help="Also evaluate control maps, which do not explain the class."
)
@options.number("--limit", "Maximum number of images, sampled at random.")
@options.number("--seed", "Random seed.", 0, minimum=0, maximum=MAX_SEED)
@options.output_option(
    "Output folder, or file for one table (.csv, .json or .tex). A folder gets all three tables, curves.png and "
    "examples.png. For --resume, the results of each image are also written: to journal.jsonl in the folder, or to "
    "FILE.journal beside the file."
)
@click.option("--resume", is_flag=True, help="Resume an earlier study. Only missing and failed images are evaluated.")
@click.option("--overwrite", is_flag=True, help="Replace the results of an earlier study.")
@options.printing
def evaluate_command(inputs: tuple[str, ...], *, as_json: bool, quiet: bool, **params: Any) -> int:
    """Compare CAM methods by metrics on your images.

    INPUT is an image file, a folder, a glob, a list or an archive. Annotations are optional.

    For each method, the table shows the mean, the 95 % confidence interval of the mean, and the paired difference from
    the best method. Two methods count as different only if their difference is significant after correction for all
    pairs of methods. Control maps, which do not explain the class, are also evaluated. If a control map does as well as
    the best method, the metric says little about the methods.

    All methods explain the same class, and their heatmaps have the same size. With --layer, all methods also use the
    same layer. With --output, you can stop a study (a run of this command) and continue it with --resume.

    For detectors, the highest-scoring detection of each image is explained. For segmenters, the predicted class with
    the largest area is explained. With --annotations, annotated classes are preferred: a detector's target is then the
    highest-scoring detection of an annotated class.
    """
    resume, overwrite, output = params["resume"], params["overwrite"], OutputMode(as_json, quiet)
    if resume and overwrite:
        raise click.UsageError(
            "--resume continues an earlier study, but --overwrite replaces it: give only one of them."
        )
    if (resume or overwrite) and params["output"] is None:
        raise click.UsageError("--resume and --overwrite need --output: give the folder or file of the earlier study.")
    mode: Mode = "resume" if resume else "overwrite" if overwrite else "new"
    from gradcam.sources.collect import list_inputs

    # Check all arguments before torch is imported and a model is loaded, which takes seconds.
    paths = None if params["output"] is None else _find_paths(params["output"])
    with terminal.report_waits(output):
        with terminal.custom_code_context(*params["methods"], *params["metrics"]):
            methods, metrics = params["methods"] or DEFAULT_METHODS, params["metrics"] or None
            controls, has_annotations = None if params["controls"] else (), params["annotations"] is not None
            plan = make_plan(methods, metrics, controls=controls, has_annotations=has_annotations)
        if paths is not None:
            _check_paths(paths, mode)
        items = list_inputs(inputs, exclude=None if paths is None or paths.file is not None else paths.folder).items
        names = [field.name for field in fields(StudyOptions) if field.name in params]
        study_options = StudyOptions(**{name: params[name] for name in names})
        study = _prepare(items, plan, study_options, to_single_target_settings(params, params["class_"]), output)
        _print_start(study, output)
        with _open(paths, mode, study) as journal:
            print_notes([] if journal is None else journal.notes, output)
            try:
                return _finish(study, study.conclude(_run(study, journal, output)), paths, output)
            except (OutputError, StoreError) as error:  # Results from before the error are already stored.
                click.echo(escape_controls(str(error)), err=True)
                return 1


def _prepare(
    items: Sequence[Any], plan: StudyPlan, study_options: StudyOptions, settings: Settings, output: OutputMode
) -> Study:
    terminal.import_torch()
    from gradcam.evaluation.study.prepare import prepare_study

    classifier = load_model(settings.model, layer=study_options.layer)
    target, target_options = to_single_target(settings, classifier), {*settings.target_choice.option_names}
    if classifier.task == "detection":
        target_options -= {"--text"}  # The texts of a detector are prompts, not a target.
    if classifier.task != "classification" and not target_options:
        # Explain the highest-scoring detection of the chosen class, or of any class if none is chosen.
        target = classifier.find_class(settings.classes[0]) if settings.classes else None
    study_options = replace(study_options, target=target)
    print_notes(classifier.notes, output)
    with contextlib.redirect_stdout(sys.stderr):  # Custom models may print.
        return prepare_study(classifier, items, plan, study_options)


def _open(paths: ResultPaths | None, mode: Mode, study: Study) -> contextlib.AbstractContextManager[Journal | None]:
    from gradcam.evaluation.study.journal import Journal

    run = study.conditions.to_run(len(study.items))
    return contextlib.nullcontext() if paths is None else Journal.open(paths.journal, run, mode=mode)


def _print_start(study: Study, output: OutputMode) -> None:
    print_notes(study.notes, output)
    if output.quiet or output.as_json:
        return
    setup, images, mosaics = study.conditions, len(study.items), len(study.compositions)
    count = terminal.plural(images, "image") + (f", {terminal.plural(mosaics, 'mosaic')} of four" if mosaics else "")
    title = f"{count}   {setup.model} on {setup.device}   layer {setup.layer}   seed {setup.seed}"
    lines = [title, f"{setup.score} of {setup.target}; {setup.resizing}", *describe_cost(study.plan, images, mosaics)]
    click.echo("\n".join(lines), err=True)


def _run(study: Study, journal: Journal | None, output: OutputMode) -> list[StudyEntry]:
    entries: list[StudyEntry] = []
    standard_output = sys.stdout
    try:
        with terminal.show_progress_bar(output, "heatmaps", study.total) as bar:
            for entry in study.run(journal, progress=bar.update):
                entries.append(entry)
                if output.as_json:
                    click.echo(entry.to_json(), file=standard_output)
    except (KeyboardInterrupt, terminal.TerminationSignal, OutputError, StoreError):
        total = len(study.items) + len(study.compositions)
        note = "" if journal is not None else " Without --output, these results are lost."
        click.echo(f"Stopped: {len(entries)} of {total} images and mosaics evaluated.{note}", err=True)
        if journal is not None:
            click.echo(terminal.describe_resume(), err=True)
        raise
    return entries


def _finish(study: Study, results: Results, paths: ResultPaths | None, output: OutputMode) -> int:
    for entry in results.failures:
        click.echo(escape_controls(entry.error or entry.image), err=True)
    if not results.judged():
        click.echo("No image could be evaluated.", err=True)
        return 1
    prints_results = not (output.quiet or output.as_json)
    if prints_results:
        click.echo(format_results(results))
    for path in () if paths is None else _write_all(study, results, paths, output):
        if prints_results:
            click.echo(terminal.format_written_path(str(path)))
    return int(bool(results.failures))


@dataclass(frozen=True)
class ResultPaths:
    """The output of a study: all files in `folder`, or only the table `file`."""

    folder: Path
    file: Path | None = None

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl" if self.file is None else self.file.with_name(f"{self.file.name}.journal")

    @property
    def tables(self) -> list[Path]:
        return [self.folder / f"results{suffix}" for suffix in TABLES] if self.file is None else [self.file]


def _find_paths(output: str) -> ResultPaths:
    path = Path(output)
    if output.endswith(("/", os.sep)) or path.is_dir() or not path.suffix:
        return ResultPaths(path)
    if path.suffix.lower() not in TABLES:
        raise click.UsageError(f"{path}: expected a file that ends in {', '.join(TABLES)}, or a folder: {path}/")
    return ResultPaths(path.parent, path)


def _check_paths(paths: ResultPaths, mode: Mode) -> None:
    from gradcam.evaluation.study.journal import check_journal

    if paths.folder.exists() and not paths.folder.is_dir():
        raise OutputError(f"{paths.folder}: is a file, expected a folder for the results; choose another --output")
    check_journal(paths.journal, mode)
    for path in paths.tables:
        if mode != "overwrite" and path.exists() and not paths.journal.exists():
            raise OutputError(f"{path}: already exists. Give --overwrite to replace it, or choose another --output")


def _write_all(study: Study, results: Results, paths: ResultPaths, output: OutputMode) -> Iterator[Path]:
    from gradcam.evaluation.study.write import draw_curves, draw_examples, list_curves, write_results
    from gradcam.images.write import write_image

    for path in paths.tables:
        write_results(results, path)
        yield path
    if paths.file is not None:
        return
    curves, examples = paths.folder / "curves.png", paths.folder / "examples.png"
    if list_curves(results) and importlib.util.find_spec("matplotlib") is None:
        print_notes([f"curves.png needs matplotlib: {to_pip_command('plots')}"], output)
    elif list_curves(results):
        write_image(curves, draw_curves(results))
        yield curves
    write_image(examples, draw_examples(study, results))
    yield examples


def format_results(results: Results, *, width: int | None = None) -> str:
    """Format the table of means, the table of differences from the best method, a legend and a conclusion."""
    from gradcam.evaluation.study.results import compare_methods, describe_too_few_images

    rankings, plan = compare_methods(results), results.plan
    columns = width or shutil.get_terminal_size((WIDTH, 24)).columns
    metrics = [name for name in plan.metrics if any(metric == name for _, metric in rankings)]
    cells = {key: _cell(ranking.interval) + _find_mark(ranking) for key, ranking in rankings.items()}
    means = {name: {metric: cells[name, metric] for metric in metrics} for name in plan.names}
    lines = [*_format_tables("mean ±95 %", results, rankings, means, columns)]
    ranked_metrics = [metric for metric in metrics if any(rankings[name, metric].is_best for name in plan.methods)]
    if ranked_metrics and len(plan.methods) > 1:
        gaps = {key: ranking.difference for key, ranking in rankings.items()}
        cells = {key: _cell(gap, "+") if gap else "best" for key, gap in gaps.items()}
        differences = {name: {metric: cells[name, metric] for metric in ranked_metrics} for name in plan.methods}
        lines += _format_tables("paired difference from the best method", results, rankings, differences, columns)
    for mark, name in MARKS.items():
        lines += [f"{mark} {LEGEND[mark]}"] if any(getattr(ranking, name) for ranking in rankings.values()) else []
    lines += (describe_too_few_images(rankings) or "").replace(". ", ".\n").splitlines()
    return "\n".join([*lines, *_format_conclusion(results, rankings, ranked_metrics)])


def _format_tables(title: str, results: Results, rankings: Rankings, cells: Cells, columns: int) -> list[str]:
    first, plan = max(map(len, cells)), results.plan
    heads = {}
    for metric in next(iter(cells.values())):
        first_line, _, second_line = metric.partition("-")  # A heading has two lines. The arrow ends the second line.
        arrow = plan.metric(metric).arrow
        heads[metric] = (first_line, f"{second_line} {arrow}") if second_line else ("", f"{first_line} {arrow}")
    widths = {name: max(map(len, (*head, *(row[name] for row in cells.values())))) for name, head in heads.items()}
    lines = [click.style(title, bold=True)]
    for metrics in _split_columns(widths, columns - first):
        counts = [f"n = {max(rankings[name, metric].interval.n for name in cells)}" for metric in metrics]
        for row in ([heads[metric][0] for metric in metrics], [heads[metric][1] for metric in metrics], counts):
            line = GAP.join(f"{text:<{widths[metric]}}" for metric, text in zip(metrics, row))
            if line.strip():
                lines.append(click.style(f"{'':<{first}}{GAP}{line}".rstrip(), dim=True))
        for name, cell in cells.items():
            if name in plan.controls[:1] and plan.methods:
                lines.append(click.style(f"{'controls':-<{first}}", dim=True))
            paddings = [" " * (widths[metric] - len(cell[metric])) for metric in metrics]
            parts = [_colour(cell[metric], rankings[name, metric]) for metric in metrics]
            line = GAP.join(part + padding for part, padding in zip(parts, paddings))
            lines.append(f"{name:<{first}}{GAP}{line}".rstrip())
        lines.append("")
    return lines


def _split_columns(widths: Mapping[str, int], columns: int) -> list[list[str]]:
    parts: list[list[str]] = []
    remaining = 0
    for metric, width in widths.items():
        if not parts or remaining < width + len(GAP):
            parts.append([])
            remaining = columns
        parts[-1].append(metric)
        remaining -= width + len(GAP)
    return parts


def _find_mark(ranking: Ranking) -> str:
    return next((mark for mark, name in MARKS.items() if getattr(ranking, name)), "")


def _cell(interval: Interval, plus: str = "") -> str:
    if not interval.n:
        return "-"
    half = f" ±{_number((interval.high - interval.low) / 2)}" if interval.is_known else ""
    mean = _number(interval.mean)
    return (mean if mean[0] == "-" else plus + mean) + half


def _number(value: float) -> str:
    """Format a number with three digits, without a leading zero: .523, 1.00, -12.3."""
    text = f"{value:.3f}"
    if abs(float(text)) < 1:
        return text.replace("0.", ".", 1) if float(text) else ".000"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _colour(text: str, ranking: Ranking) -> str:
    style = STYLES.get(_find_mark(ranking), {"dim": True} if ranking.is_control else {})
    return click.style(text, **style) if style else text


def _format_conclusion(results: Results, rankings: Rankings, metrics: Sequence[str]) -> list[str]:
    """Count the metrics in which each method is best or not distinguished from the best method, and format the counts.

    Metrics in which a control map does as well as the best method are left out.
    """
    methods, controls = results.plan.methods, results.plan.controls
    valid_metrics = [metric for metric in metrics if not any(rankings[name, metric].beats_all for name in controls)]
    if len(methods) < 2 or not valid_metrics:
        return []
    rows = {name: [rankings[name, metric] for metric in valid_metrics] for name in methods}
    wins = {name: sum(ranking.is_best or ranking.is_level for ranking in row) for name, row in rows.items()}
    ranked = sorted(wins.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {count}" for name, count in ranked[:MAX_LISTED_METHODS])
    left_out = len(metrics) - len(valid_metrics)
    exclusion = f" (not counting {left_out} marked {FOOLED})" if left_out else ""
    title = f"Number of metrics in which a method is marked {BEST} or {LEVEL}, out of {len(valid_metrics)}{exclusion}"
    return [f"{title}: {click.style(listed, bold=True)}"]
