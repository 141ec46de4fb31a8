"""`gradcam diff`: compare the predictions and heatmaps of two models, or of one model and a snapshot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command, to_weights
from gradcam.cli._job import load_model, make_folder, print_notes, to_record, write_file
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.errors import GradcamError, LayerError, ModelError, escape_controls
from gradcam.evaluation.snapshots.gate import CONDITION_NAMES, MIN_ALIKE_CORRELATION, Gate, parse_condition
from gradcam.images.files import READ_SUFFIXES, OutputNames, join_name
from gradcam.models.labels import name_class
from gradcam.options import PRECISIONS

if TYPE_CHECKING:
    from gradcam.evaluation.snapshots.result import Diff, ImageDiff
    from gradcam.evaluation.snapshots.snapshot import Snapshot
    from gradcam.models.classifier import Classifier
    from gradcam.report.cards import Card
    from gradcam.storage.records import Prediction

ROWS = 10  # number of images in the printed table; --json lists all images
MAX_PAGE_IMAGES = 100
MAX_NAME = 28  # largest number of characters of a name in the table
CHANGE_LABELS = {"map": ("different heatmap", "red"), "class": ("different class", "yellow"), "none": ("alike", None)}
ROLES = ("old", "new")
MODEL_OPTIONS = ("weights", "precision", "layer")  # options that can be given for only one of the two models


def _options_for(role: str) -> Callable[[options.Command], options.Command]:
    """Return the options that apply to only one of the two models."""
    name = role.upper()
    return options.combine(
        options.option(f"--weights-{role} FILE|NAME", f"Weights of {name} only.", to_weights),
        options.option(f"--precision-{role}", f"Precision of {name} only.", click.Choice([*PRECISIONS])),
        options.option(f"--layer-{role} NAME", f"Target layer of {name} only."),
    )


def _split_arguments(words: tuple[str, ...], params: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the arguments into models and images. Raise `click.UsageError` if a model or all images are missing."""
    if params["against"] is not None and params["save"] is not None:
        raise click.UsageError(
            "--against compares with a snapshot, but --save takes a snapshot: give only one of them."
        )
    count = 2 if params["against"] is params["save"] is None else 1
    are_images = [word.endswith(("/", os.sep)) or Path(word).suffix.lower() in READ_SUFFIXES for word in words[:count]]
    if any(are_images):
        word = words[are_images.index(True)]
        hint = "" if count == 1 else ". With --against FILE or --save FILE, give one model"
        raise click.UsageError(
            f"{word} is not a model. Give {'two models, OLD NEW,' if count == 2 else 'MODEL'} before the images{hint}."
        )
    if len(words) <= count:
        raise click.UsageError("There are no images: give files or folders after the model names.")
    return words[:count], words[count:]


@click.command("diff", cls=Command, main_options=["--against"])
@click.argument("words", nargs=-1, required=True, metavar="OLD NEW IMAGE...", type=click.Path())
@options.model_without_name
@_options_for("old")
@_options_for("new")
@options.layer("Target layer of both models (see `gradcam layers`).  [default: the default layer of OLD]")
@options.method("gradcam, or the snapshot's method")
@options.option(
    "--alike R",
    "Smallest rank correlation at which two heatmaps count as alike.",
    options.real(-1, 1),
    default=MIN_ALIKE_CORRELATION,
)
@options.option(
    "--save FILE", "Save the predictions and heatmaps of one model (a snapshot).", click.Path(path_type=Path)
)
@options.option("--against FILE", "Compare one model with a snapshot from --save.", click.Path(path_type=Path))
@options.option(
    "--fail-if CONDITION",
    "Exit with status 1 if the condition is met; may be repeated. 'correlation<0.9' is met if the correlation of any "
    "image is below 0.9. "
    f"'mean agree<1' tests the mean of all images. Names: {'; '.join(map(': '.join, CONDITION_NAMES.items()))}.",
    parse_condition,
    name="conditions",
    multiple=True,
)
@options.option("--junit FILE.xml", "Write JUnit XML with one test case per image.", options.output_file(".xml"))
@options.html_page(f"{MAX_PAGE_IMAGES} images")
@options.output_option(
    "Output folder for one panel per image, <image>-diff.png.", click.Path(file_okay=False, path_type=Path)
)
@options.printing
def diff_command(words: tuple[str, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Compare the predictions and heatmaps of two models.

    OLD and NEW are model names, as for `gradcam run --model`. With --save or --against, give one model instead of two.
    Both heatmaps of an image explain the class that OLD predicts. Images with the same prediction and different heatmaps
    are listed first.

    Three numbers compare the heatmaps. "correlation" is the rank correlation of their pixels, from -1 to 1. "top 30 %" is
    the overlap of the highest 30 % of the pixels; unrelated heatmaps overlap by about 30 %. "moved" is the distance between
    the heatmaps' centres of mass, as a percentage of the image diagonal.
    """
    output, start = OutputMode(as_json, quiet), time.perf_counter()
    models, images = _split_arguments(words, params)
    unfit = [name for name in MODEL_OPTIONS if params[f"{name}_old"] is not None]
    if unfit and len(models) == 1:
        raise click.UsageError(
            f"--{unfit[0]}-old needs two models, OLD NEW, but only one is given: remove --{unfit[0]}-old."
        )
    terminal.import_torch()
    if params["save"] is not None:
        return _save(models[0], images, params, output)
    diff, titles = _compare(models, images, params, output)
    gate = diff.gate([condition.text for condition in params["conditions"]])
    panels = _write_panels(diff, params["output"], images) if params["output"] else {}
    if params["junit"]:
        write_file(params["junit"], gate.to_junit())
    if params["page"]:
        _write_page(params["page"], diff, titles)
    print_notes(diff.notes, output)
    for reason in diff.failures.values():
        click.echo(reason, err=True)
    if as_json:
        _print_records(diff, gate, panels)
    elif not quiet:
        title, seconds = " → ".join(map(escape_controls, titles)), time.perf_counter() - start
        layers = " → ".join(dict.fromkeys(escape_controls(origin.layer) for origin in (diff.old, diff.new)))
        heading = f"{title}   {diff.new.method} at {layers}   {seconds:.1f} s"
        summary = f"  {diff.summary[:1].upper()}{diff.summary[1:]}."
        written = [params["output"], params["page"], params["junit"]]
        arrows = [terminal.format_written_path(str(path)) for path in written if path]
        click.echo("\n".join([heading, "", *_to_table(diff.rows), summary, *arrows, ""]))
    for line in _describe_gate(gate):
        click.echo(line, err=True)
    return int(bool(diff.failures) or gate.is_met)


def _load(role: str, name: str, params: dict[str, Any], layer: str | None = None) -> tuple[Classifier, str]:
    """Load the old or the new model, and return it with its title. Errors name the role of the model."""
    from gradcam.adapters import find_family_classes
    from gradcam.layers.find import unwrap

    values = {option: params[f"{option}_{role}"] for option in MODEL_OPTIONS}
    layer = values.pop("layer") or params["layer"] or layer
    changes = {option: value for option, value in values.items() if value is not None}
    choice = replace(to_model_choice(params), model=name, task="auto", **changes)
    try:
        classifier = load_model(choice, layer=layer)
        if classifier.task != "classification":
            # Keypoint R-CNN has an adapter for boxes and an adapter for keypoints.
            adapters = find_family_classes(type(unwrap(classifier.model)))
            tasks = " and ".join(dict.fromkeys([classifier.task, *(adapter.task for adapter in adapters)]))
            raise ModelError(f"gradcam diff compares classifiers, but this model is for {tasks}.")
        return classifier, _title(choice)
    except GradcamError as error:
        hint = f" Set the layer of {role.upper()} with --layer-{role}." if isinstance(error, LayerError) else ""
        raise type(error)(f"{role.upper()}, {name}: {error}{hint}") from error


def _title(choice: ModelChoice) -> str:
    weights = [] if choice.weights is None else [choice.weights.name]
    return " ".join([str(choice.model), *weights, *([] if choice.precision == "fp32" else [choice.precision])])


def _save(model: str, images: Sequence[str], params: dict[str, Any], output: OutputMode) -> int:
    from gradcam.evaluation.snapshots.snapshot import check_snapshot_path, take_snapshot

    if params["conditions"] or params["junit"] or params["page"] or params["output"]:
        raise click.UsageError("--save compares nothing: remove --fail-if, --junit, --page and --output.")
    check_snapshot_path(params["save"])
    classifier, title = _load("new", model, params)
    print_notes(classifier.notes, output)
    with terminal.custom_code_context(params["method"]), terminal.show_pass_progress(output) as progress:
        options: Any = {"method": params["method"], "reshape": params["reshape"], "progress": progress}
        snap = take_snapshot(classifier, images, **options)
    snap.save(params["save"])
    origin = snap.origin
    for reason in snap.failures.values():
        click.echo(reason, err=True)
    if output.as_json:
        for entry in snap.entries:
            label = origin.label(entry.predicted)
            prediction = {"index": entry.predicted, "label": label, "probability": entry.probability}
            click.echo(to_record(entry.name, origin.model, None, {"predictions": [prediction]}))
        for name, reason in snap.failures.items():
            click.echo(to_record(name, origin.model, reason, {}))
    elif not output.quiet:
        count, layer = terminal.plural(len(snap.entries), "image"), escape_controls(origin.layer)
        click.echo(f"{escape_controls(title)}   {origin.method} at {layer}   {count}")
        click.echo(terminal.format_written_path(str(params["save"])))
    return int(bool(snap.failures))


def _compare(
    models: Sequence[str], images: Sequence[str], params: dict[str, Any], output: OutputMode
) -> tuple[Diff, list[str]]:
    """Compare the models, and return the result and the titles of both models."""
    from gradcam.evaluation.snapshots.diff import diff
    from gradcam.evaluation.snapshots.snapshot import read_snapshot

    old: Classifier | Snapshot
    if params["against"] is not None:
        old = read_snapshot(params["against"])
        title, layer = f"{old.origin.model} in {params['against'].name}", old.origin.layer
    else:
        old, title = _load("old", models[0], params)
        print_notes(old.notes, output)
        with terminal.custom_code_context(params["method"]):
            layer = old.layer_for(params["method"] or old.default_method)
    try:
        new, new_title = _load("new", models[-1], params, layer)
    except LayerError:
        # NEW has no layer with the name of OLD's layer. Use the default layer of NEW. If --layer was given, this call
        # uses that layer again, and raises the same error.
        new, new_title = _load("new", models[-1], params)
    print_notes([note for note in new.notes if params["against"] or note not in getattr(old, "notes", ())], output)
    with terminal.custom_code_context(params["method"]), terminal.show_pass_progress(output) as progress:
        options: Any = {"method": params["method"], "reshape": params["reshape"], "alike": params["alike"]}
        return diff(old, new, images, **options, progress=progress), [title, new_title]


def _to_table(rows: Sequence[ImageDiff]) -> Iterator[str]:
    """Format a table of the first rows, and the number of the remaining rows."""
    if not rows:
        return
    listed = rows[:ROWS]
    cells: list[tuple[str, ...]] = [("image", "old", "new", "correlation", "top 30 %", "moved")]
    cells += [(_shorten_start(row.image), *_to_cells(row)) for row in listed]
    labels = ["", *(click.style(label, fg=colour) for label, colour in (CHANGE_LABELS[row.change] for row in listed))]
    for line, label in zip(terminal.align(cells, right=(3, 4, 5)), labels):
        yield f"  {line}   {label}".rstrip()
    if len(rows) > ROWS:
        more = sum(row.change != "none" for row in rows[ROWS:])
        count, alike = terminal.plural(len(rows) - ROWS, "more image"), f"{more} not alike" if more else "all alike"
        yield f"  and {count}, {alike} (use --json to list all images)"
    yield ""


def _to_cells(row: ImageDiff) -> tuple[str, ...]:
    """Format both predictions, the correlation, the overlap of the highest 30 % and the distance moved."""
    predictions = _format_prediction(row.old), _format_prediction(row.new)
    return *predictions, f"{row.correlation:.3f}", f"{100 * row.overlap:.0f} %", f"{100 * row.moved:.1f} %"


def _shorten_start(name: str) -> str:
    """Shorten an image's name at the start, because image names differ mostly at the end."""
    plain = escape_controls(name)
    return plain if len(plain) <= MAX_NAME else f"…{plain[1 - MAX_NAME :]}"


def _format_prediction(top: Prediction) -> str:
    name = terminal.shorten_name(escape_controls(name_class(top.index, top.label)), MAX_NAME)
    return f"{name} {100 * top.probability:.0f} %"


def _describe_gate(gate: Gate) -> Iterator[str]:
    """Return a line for each condition that is met."""
    for condition in gate.conditions:
        cases = [case for case in gate.cases if condition in case.met]
        if cases:
            parsed = parse_condition(condition)
            worst = sorted(cases, key=lambda case: case.values[parsed.name], reverse=parsed.sign == ">")[0]
            example = f"{parsed.name} is {worst.values[parsed.name]:.4g} for {escape_controls(worst.name)}"
            image_count = "" if parsed.of_mean else f" in {terminal.plural(len(cases), 'image')}"
            yield f"Failed: {condition}{image_count}: {example}"


def _print_records(diff: Diff, gate: Gate, panels: dict[str, str]) -> None:
    met = {case.name: list(case.met) for case in gate.cases}
    for row in diff.rows:
        fields = {"against": diff.old.model, **row.to_record(), "met": met[row.image], "panel": panels.get(row.image)}
        click.echo(to_record(row.image, diff.new.model, None, fields))
    for name, reason in diff.failures.items():
        click.echo(to_record(name, diff.new.model, reason, {}))


def _write_panels(diff: Diff, folder: Path, images: Sequence[str]) -> dict[str, str]:
    """Write a panel for each image. Return the paths by image name."""
    from gradcam.images.write import write_image

    make_folder(folder)
    names, paths = OutputNames(folder, map(Path, images)), {}
    for row in diff.rows:
        (path,) = names.claim([join_name(PurePosixPath(row.image).stem, "-diff.png")])
        write_image(path, row.panel())
        paths[row.image] = str(path)
    return paths


def _write_page(path: Path, diff: Diff, titles: Sequence[str]) -> None:
    from gradcam.report.cards import CardPage

    lines = [f"{diff.summary[:1].upper()}{diff.summary[1:]}.", *diff.notes]
    if len(diff.rows) > MAX_PAGE_IMAGES:
        lines.append(f"This page shows the first {MAX_PAGE_IMAGES} of {len(diff.rows)} images.")
    lines.append(
        "Both heatmaps explain the class that the old model predicts. Correlation: the rank correlation of their pixels; 1 "
        "means that the pixels have the same order. Top 30 %: the overlap of the highest 30 % of the pixels; unrelated "
        "heatmaps overlap by about 30 %. Moved: the distance between the heatmaps' centres of mass, as a percentage of "
        "the image diagonal. In the difference image, red marks pixels where the new heatmap is stronger. Blue marks "
        "pixels where the old heatmap is stronger."
    )
    page = CardPage(
        title=" → ".join(Path(title).name if os.path.isabs(title) else title for title in titles),
        summary=[("Method", diff.new.method), ("Images", str(len(diff.rows))), ("Failed", str(len(diff.failures)))],
        lines=lines,
        facts=[(role, _list_facts(origin)) for role, origin in zip(ROLES, (diff.old, diff.new))],
        failures=list(diff.failures.values()),
    )
    page.write(path, map(_to_card, diff.rows[:MAX_PAGE_IMAGES]))


def _list_facts(origin: Any) -> list[tuple[str, str]]:
    facts = {name: str(value) for name, value in vars(origin).items() if name not in ("labels", "versions", "model")}
    return [*facts.items(), *origin.versions.items()]


def _to_card(row: ImageDiff) -> Card:
    from gradcam.report.cards import Card

    try:
        images = row.draw()
    except GradcamError:  # If the image has been deleted, its numbers are still useful.
        images = {}
    facts = [*zip(("Old", "New", "Correlation", "Top 30 %", "Moved"), _to_cells(row))]
    return Card(row.image, CHANGE_LABELS[row.change][0], facts, images, is_bad=row.change != "none")
