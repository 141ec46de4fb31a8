"""`gradcam diff`: two models on the same pictures, or one and a snapshot; where predictions agree and maps do not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command, to_weights
from gradcam.cli._job import load_model, make_folder, print_notes
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.cli._terminal import custom_code_context, format_count, shorten_name, import_torch, show_pass_progress, format_written_path
from gradcam.errors import GradcamError, LayerError, ModelError, OutputError, printable
from gradcam.evaluation.snapshots.gate import ALIKE, NAMES, Gate, read_condition
from gradcam.images.files import READ_SUFFIXES, OutputNames, join_name, write_whole
from gradcam.models.labels import name_class
from gradcam.options import PRECISIONS
from gradcam.storage.disk import describe_os_error
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.snapshots.result import Diff, ImageDiff
    from gradcam.evaluation.snapshots.snapshot import Snapshot
    from gradcam.models.classifier import Classifier
    from gradcam.report.cards import Card
    from gradcam.storage.records import Prediction

ROWS = 10  # of the table on the terminal; all are in --json
MOST = 100  # pictures on a page
LONGEST = 28  # characters of a name in the table
WORDS = {"map": ("different heatmap", "red"), "class": ("different class", "yellow"), "none": ("alike", None)}
ROLES = ("old", "new")
OF_ONE = ("weights", "precision", "layer")  # options that each model has of its own


def _of_one(role: str) -> Callable[[options.Command], options.Command]:
    """The options that say of one of the two models what others say of both."""
    name = role.upper()
    weights = options.ConvertedType("weights", to_weights)
    return options.combine(
        click.option(f"--weights-{role}", metavar="FILE|NAME", type=weights, help=f"Weights of {name} only."),
        click.option(f"--precision-{role}", type=click.Choice([*PRECISIONS]), help=f"Precision of {name} only."),
        click.option(f"--layer-{role}", metavar="NAME", help=f"Target layer of {name} only."),
    )


@dataclass(frozen=True)
class Compared:
    """What was typed: two models, or one and the snapshot that it is compared with or kept in; and the pictures."""

    models: Sequence[str]
    pictures: Sequence[str]
    against: Path | None
    save: Path | None


def _read_words(words: Sequence[str], against: Path | None, save: Path | None) -> Compared:
    """Raises `click.UsageError` where there are too few words, or a picture stands where a model should."""
    if against is not None and save is not None:
        raise click.UsageError(
            "--against compares with a snapshot, but --save takes a snapshot: give only one of them."
        )
    models = 1 if against is not None or save is not None else 2
    is_picture = [it.endswith(("/", os.sep)) or Path(it).suffix.lower() in READ_SUFFIXES for it in words[:models]]
    if any(is_picture):
        word = words[is_picture.index(True)]
        one = "" if models == 1 else ". With --against FILE or --save FILE, give one model"
        raise click.UsageError(
            f"{word} is not a model. Give {'two models, OLD NEW,' if models == 2 else 'MODEL'} before the images{one}."
        )
    if len(words) <= models:
        raise click.UsageError("There are no images: give files or folders after the model names.")
    return Compared(words[:models], words[models:], against, save)


@click.command("diff", cls=Command, main_options=["--against"])
@click.argument("words", nargs=-1, required=True, metavar="OLD NEW IMAGE...", type=click.Path())
@options.model_without_name
@_of_one("old")
@_of_one("new")
@options.layer("Target layer of both models (see `gradcam layers`).  [default: the default layer of OLD]")
@options.method("gradcam, or the snapshot's method")
@click.option(
    "--alike",
    type=options.real(-1, 1),
    default=ALIKE,
    show_default=True,
    metavar="R",
    help="Smallest rank correlation at which two heatmaps count as alike.",
)
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Save a snapshot of one model for a later comparison.",
)
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Compare one model with a snapshot from --save.",
)
@click.option(
    "--fail-if",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    type=options.ConvertedType("condition", read_condition),
    help="Exit with status 1 if the condition is met; may be repeated. 'correlation<0.9' is met if any image meets it. "
    f"'mean agree<1' tests the mean of all images. Names: {', '.join(NAMES)}.",
)
@click.option(
    "--junit", metavar="FILE.xml", type=options.output_file(".xml"), help="Write JUnit XML with one test case per image."
)
@options.html_page(f"{MOST} images")
@options.output_option(
    "Output folder for one panel per image, <image>-diff.png.", type=click.Path(file_okay=False, path_type=Path)
)
@options.printing
def diff_command(words: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Compare the predictions and heatmaps of two models.

    OLD and NEW are model names, as for `gradcam run --model`. Both heatmaps explain the class that OLD predicts. Images
    with the same prediction and different heatmaps are listed first.

    Three numbers compare the heatmaps. "correlation" is the rank correlation of their pixels, from -1 to 1. "top 30 %" is
    the overlap of the highest 30 % of the pixels; unrelated heatmaps overlap by about 30 %. "moved" is the distance between
    the heatmaps' centres of mass, as a percentage of the image diagonal.
    """
    output, start = OutputMode(as_json, quiet), time.perf_counter()
    typed = _read_words(words, chosen["against"], chosen["save"])
    unfit = [it for it in OF_ONE if chosen[f"{it}_old"] is not None]
    if unfit and len(typed.models) == 1:
        raise click.UsageError(
            f"--{unfit[0]}-old needs two models, OLD NEW, but only one is given: remove --{unfit[0]}-old."
        )
    import_torch()
    if typed.save is not None:
        return _save(typed, chosen, output)
    found, titles = _compare(typed, chosen, output)
    gate = found.gate([condition.text for condition in chosen["conditions"]])
    panels = _write_panels(found, chosen["output"], typed) if chosen["output"] else {}
    if chosen["junit"]:
        _write(chosen["junit"], gate.to_junit())
    if chosen["page"]:
        _write_page(chosen["page"], found, titles)
    print_notes(found.notes, output)
    for reason in found.failures.values():
        click.echo(reason, err=True)
    if as_json:
        _print_records(found, gate, panels)
    elif not quiet:
        heading = f"{' → '.join(map(printable, titles))}   {_place(found)}   {time.perf_counter() - start:.1f} s"
        written = [chosen["output"], chosen["page"], chosen["junit"]]
        arrows = [format_written_path(str(path)) for path in written if path]
        click.echo(
            "\n".join(
                [heading, "", *_to_table(found.rows), f"  {found.summary[:1].upper()}{found.summary[1:]}.", *arrows, ""]
            )
        )
    for line in _describe_gate(gate):
        click.echo(line, err=True)
    return int(bool(found.failures) or gate.is_met)


def _load(role: str, name: str, chosen: dict[str, Any], layer: str | None = None) -> tuple[Classifier, str]:
    """The model in that role, and what it is called. Raises an error that says which of the two it is of."""
    own = {it: chosen[f"{it}_{role}"] for it in OF_ONE}
    choice = replace(to_model_choice(chosen), model=name, task="auto")
    choice = replace(choice, **{it: own[it] for it in ("weights", "precision") if own[it] is not None})
    layer = own["layer"] or chosen["layer"] or layer
    try:
        classifier = load_model(choice, layer=layer)
        if classifier.task != "classification":
            raise ModelError(f"gradcam diff compares classifiers, but this model is for {classifier.task}.")
        return classifier, _title(choice)
    except GradcamError as error:
        hint = f" Set the layer of {role.upper()} with --layer-{role}." if isinstance(error, LayerError) else ""
        raise type(error)(f"{role.upper()}, {name}: {error}{hint}") from error


def _title(choice: ModelChoice) -> str:
    weights = [] if choice.weights is None else [choice.weights.name]
    return " ".join([str(choice.model), *weights, *([] if choice.precision == "fp32" else [choice.precision])])


def _save(typed: Compared, chosen: dict[str, Any], output: OutputMode) -> int:
    from gradcam.evaluation.snapshots.snapshot import check_place, take_snapshot

    if chosen["conditions"] or chosen["junit"] or chosen["page"] or chosen["output"]:
        raise click.UsageError("--save compares nothing: remove --fail-if, --junit, --page and --output.")
    path: Any = typed.save
    check_place(path)
    classifier, title = _load("new", typed.models[0], chosen)
    print_notes(classifier.notes, output)
    with custom_code_context(chosen["method"]), show_pass_progress(output) as progress:
        options: Any = {"method": chosen["method"], "reshape": chosen["reshape"], "progress": progress}
        found = take_snapshot(classifier, typed.pictures, **options)
    found.save(path)
    for reason in found.failures.values():
        click.echo(reason, err=True)
    if output.as_json:
        for seen in found.entries:
            top = {
                "index": seen.predicted,
                "label": found.origin.label(seen.predicted),
                "probability": seen.probability,
            }
            click.echo(_to_json(seen.name, found.origin.model, predictions=[top]))
        for name, reason in found.failures.items():
            click.echo(_to_json(name, found.origin.model, reason))
    elif not output.quiet:
        origin = found.origin
        click.echo(
            f"{printable(title)}   {origin.method} at {printable(origin.layer)}   {format_count(len(found.entries), 'image')}"
        )
        click.echo(format_written_path(str(path)))
    return int(bool(found.failures))


def _compare(typed: Compared, chosen: dict[str, Any], output: OutputMode) -> tuple[Diff, list[str]]:
    """What `diff` gives, and what both models are called."""
    from gradcam.evaluation.snapshots.diff import diff
    from gradcam.evaluation.snapshots.snapshot import read_snapshot

    old: Classifier | Snapshot
    if typed.against is not None:
        old = read_snapshot(typed.against)
        title, layer = f"{old.origin.model} in {typed.against.name}", old.origin.layer
    else:
        old, title = _load("old", typed.models[0], chosen)
        print_notes(old.notes, output)
        with custom_code_context(chosen["method"]):
            layer = old.layer_for(chosen["method"] or old.default_method)
    try:
        new, new_title = _load("new", typed.models[-1], chosen, layer)
    except LayerError:
        # At its own layer, as a note will say. A layer that was named fails again.
        new, new_title = _load("new", typed.models[-1], chosen)
    print_notes([note for note in new.notes if typed.against or note not in getattr(old, "notes", ())], output)
    with custom_code_context(chosen["method"]), show_pass_progress(output) as progress:
        options: Any = {"method": chosen["method"], "reshape": chosen["reshape"], "alike": chosen["alike"]}
        return diff(old, new, typed.pictures, **options, progress=progress), [title, new_title]


def _place(found: Diff) -> str:
    layers = dict.fromkeys(printable(it.layer) for it in (found.old, found.new))
    return f"{found.new.method} at {' → '.join(layers)}"


def _to_table(rows: Sequence[ImageDiff]) -> Iterator[str]:
    """The first rows, in columns, and how many more there are."""
    if not rows:
        return
    shown = rows[:ROWS]
    cells = [("image", "old", "new", "correlation", "top 30 %", "moved", "")]
    cells += [
        (
            _end(row.image),
            _say(row.old),
            _say(row.new),
            f"{row.correlation:.3f}",
            f"{100 * row.overlap:.0f} %",
            f"{100 * row.moved:.1f} %",
            WORDS[row.change][0],
        )
        for row in shown
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for i, line in enumerate(cells):
        texts = [it.ljust(width) for it, width in zip(line[:3], widths)]
        numbers = [it.rjust(width) for it, width in zip(line[3:6], widths[3:6])]
        word = click.style(line[6], fg=WORDS[shown[i - 1].change][1]) if i else ""
        yield f"  {'   '.join([*texts, *numbers, word])}".rstrip()
    if len(rows) > ROWS:
        more = sum(row.change != "none" for row in rows[ROWS:])
        yield f"  and {len(rows) - ROWS} more, {f'{more} of them not alike' if more else 'all alike'} (--json lists them)"
    yield ""


def _end(name: str) -> str:
    """The end of a picture's name, which tells it from others."""
    plain = printable(name)
    return plain if len(plain) <= LONGEST else f"…{plain[1 - LONGEST :]}"


def _say(found: Prediction) -> str:
    return f"{shorten_name(printable(name_class(found.index, found.label)), LONGEST)} {100 * found.probability:.0f} %"


def _describe_gate(gate: Gate) -> Iterator[str]:
    """A line for each condition that is met."""
    for condition in gate.conditions:
        cases = [case for case in gate.cases if condition in case.met]
        if cases:
            found = read_condition(condition)
            worst = sorted(cases, key=lambda case: case.values[found.name], reverse=found.sign == ">")[0]
            said = f"{printable(worst.name)} has {worst.values[found.name]:.4g}"
            of = "" if found.of_mean else f" in {format_count(len(cases), 'image')}"
            yield f"Failed: {condition}{of}: {said}"


def _to_json(image: str, model: str, error: str | None = None, **more: Any) -> str:
    record = {"schema": SCHEMA, "image": image, "status": "ok" if error is None else "failed", "error": error}
    return json.dumps({**record, "model": model, **more}, allow_nan=False)


def _print_records(found: Diff, gate: Gate, panels: dict[str, str]) -> None:
    met = {case.name: list(case.met) for case in gate.cases}
    for row in found.rows:
        more = {"against": found.old.model, **row.to_record(), "met": met[row.image], "panel": panels.get(row.image)}
        click.echo(_to_json(row.image, found.new.model, **more))
    for name, reason in found.failures.items():
        click.echo(_to_json(name, found.new.model, reason))


def _write_panels(found: Diff, folder: Path, typed: Compared) -> dict[str, str]:
    """A panel of each picture, by the picture's name."""
    from gradcam.images.write import write_image

    make_folder(folder)
    names, written = OutputNames(folder, map(Path, typed.pictures)), {}
    for row in found.rows:
        (path,) = names.claim([join_name(PurePosixPath(row.image).stem, "-diff.png")])
        write_image(path, row.panel())
        written[row.image] = str(path)
    return written


def _write_page(path: Path, found: Diff, titles: Sequence[str]) -> None:
    from gradcam.report.cards import CardPage

    shown = len(found.rows[:MOST])
    lines = [f"{found.summary[:1].upper()}{found.summary[1:]}.", *found.notes]
    lines += [f"This page shows the first {shown} of {len(found.rows)} images."] if shown < len(found.rows) else []
    lines.append(
        "Both heatmaps explain the class that the old model predicts. Correlation: the rank correlation of their pixels; 1 "
        "means that the pixels have the same order. Top 30 %: the overlap of the highest 30 % of the pixels; unrelated "
        "heatmaps overlap by about 30 %. Moved: the distance between the heatmaps' centres of mass, as a percentage of "
        "the image diagonal. In the difference image, red marks pixels where the new heatmap is stronger. Blue marks "
        "pixels where the old heatmap is stronger."
    )
    page = CardPage(
        title=" → ".join(Path(title).name if os.path.isabs(title) else title for title in titles),
        summary=[
            ("Method", found.new.method),
            ("Images", str(len(found.rows))),
            ("Failed", str(len(found.failures))),
        ],
        lines=lines,
        facts=[(role, _list_facts(origin)) for role, origin in zip(ROLES, (found.old, found.new))],
        failures=list(found.failures.values()),
    )
    page.write(path, map(_to_card, found.rows[:MOST]))


def _list_facts(origin: Any) -> list[tuple[str, str]]:
    kept = {name: str(value) for name, value in vars(origin).items() if name not in ("labels", "versions", "model")}
    return [*kept.items(), *origin.versions.items()]


def _to_card(row: ImageDiff) -> Card:
    from gradcam.report.cards import Card

    try:
        drawn = row.draw()
    except GradcamError:  # the picture is gone meanwhile: its numbers are still worth reading
        drawn = {}
    facts = [("Old", _say(row.old)), ("New", _say(row.new)), ("Correlation", f"{row.correlation:.3f}")]
    facts += [("Top 30 %", f"{100 * row.overlap:.0f} %"), ("Moved", f"{100 * row.moved:.1f} %")]
    return Card(row.image, WORDS[row.change][0], facts, drawn, is_bad=row.change != "none")


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({describe_os_error(error)})") from error
