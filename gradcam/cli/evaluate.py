"""What `gradcam evaluate` does: all is checked before the first picture, and whatever ends it, what is judged is kept."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_classes, list_layers
from gradcam.cli._evaluate_files import Place, StudyChoice, check_place, find_place, format_results, write_all
from gradcam.cli._job import load_model, say
from gradcam.cli._settings import ModelChoice, Output, to_model_choice
from gradcam.cli._terminal import Terminated, count, how_to_go_on, import_torch, telling_waits
from gradcam.errors import OutputError, StoreError, printable
from gradcam.evaluation.metrics import GROUPS, METRICS
from gradcam.evaluation.study.plan import CONTROL_NAMES, DEFAULT_METHODS, METHOD_GROUPS, Plan, make_plan
from gradcam.options import SCORES

if TYPE_CHECKING:
    from gradcam.evaluation.study.journal import Journal
    from gradcam.evaluation.study.results import Entry, Results
    from gradcam.evaluation.study.run import Study
    from gradcam.sources.contents import Item


SHAPE = "{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} maps   {remaining} left{postfix}"  # of a bar


def judge_all(inputs: Sequence[str], choice: StudyChoice, model: ModelChoice, output: Output) -> int:
    """Judge the pictures, say what was found, and give the exit status.

    Raises `GradcamError` and `click.UsageError`, both before the first picture.
    """
    from gradcam.sources.list import list_inputs

    # Before torch is imported, and a model loaded.
    plan = make_plan(
        choice.methods or DEFAULT_METHODS,
        choice.metrics or None,
        controls=None if choice.controls else (),
        has_annotations=choice.annotations is not None,
    )
    place = None if choice.output is None else find_place(choice.output)
    check_place(place, choice)
    excluded = None if place is None or place.file is not None else place.folder
    items = list_inputs(inputs, exclude=excluded).items
    study = _prepare(items, plan, choice, model, output)
    _tell_beginning(study, output)
    with _open(place, choice, study) as journal:
        say([] if journal is None else journal.notes, output)
        try:
            return _finish(study, study.conclude(_run(study, journal, output)), place, output)
        except (OutputError, StoreError) as error:  # what is judged is kept, as far as the disk took it
            click.echo(printable(str(error)), err=True)
            return 1


def _prepare(items: Sequence[Item], plan: Plan, choice: StudyChoice, model: ModelChoice, output: Output) -> Study:
    import_torch()
    from gradcam.evaluation.study.prepare import Wish, prepare_study

    classifier = load_model(model, layer=choice.layer)
    say(classifier.notes, output)
    wish = Wish(
        layer=choice.layer,
        target=choice.target,
        score=choice.score,
        reshape=choice.reshape,
        annotations=None if choice.annotations is None else Path(choice.annotations),
        limit=choice.limit,
        seed=choice.seed,
    )
    with contextlib.redirect_stdout(sys.stderr):  # what a model of the user's prints
        return prepare_study(classifier, items, plan, wish)


@contextlib.contextmanager
def _open(place: Place | None, choice: StudyChoice, study: Study) -> Iterator[Journal | None]:
    from gradcam.evaluation.study.journal import Journal

    if place is None:
        yield None
        return
    with Journal.open(place.journal, study.conditions.to_run(len(study.items)), mode=choice.mode) as journal:
        yield journal


def _tell_beginning(study: Study, output: Output) -> None:
    """What is the same for all methods, what was left out, and what it costs."""
    from gradcam.evaluation.study.plan import describe_cost

    say(study.notes, output)
    if output.quiet or output.as_json:
        return
    it = study.conditions
    what = [count(len(study.items), "picture")]
    if study.compositions:
        what.append(count(len(study.compositions), "mosaic") + " of four")
    click.echo(f"{', '.join(what)}   {it.model} on {it.device}   layer {it.layer}   seed {it.seed}", err=True)
    click.echo(f"{it.score} of {it.target}; {it.resizing}", err=True)
    for line in describe_cost(study.judge.plan, len(study.items), len(study.compositions)):
        click.echo(line, err=True)


def _run(study: Study, journal: Journal | None, output: Output) -> list[Entry]:
    """Judge all; a bar on standard error, and records on standard output where they are asked for."""
    from tqdm import tqdm

    entries: list[Entry] = []
    out = sys.stdout
    try:
        with tqdm(
            total=study.total, unit=" maps", bar_format=SHAPE, dynamic_ncols=True,
            disable=True if output.quiet else None, file=sys.stderr, leave=False,
        ) as bar, contextlib.redirect_stdout(sys.stderr):  # fmt: skip

            def show(done: int, total: int) -> None:
                bar.update(done - bar.n)

            for entry in study.run(journal, progress=show):
                entries.append(entry)
                if output.as_json:
                    click.echo(entry.to_json(), file=out)
    except (KeyboardInterrupt, Terminated, OutputError, StoreError) as error:
        _tell_stop(error, entries, study, journal)
        raise
    return entries


def _tell_stop(error: BaseException, entries: Sequence[Entry], study: Study, journal: Journal | None) -> None:
    """How far it came, and the line to go on with."""
    total = len(study.items) + len(study.compositions)
    kept = "" if journal is not None else ", which are lost without --output"
    click.echo(f"Stopped: {len(entries)} of {total} pictures and mosaics are judged{kept}.", err=True)
    if journal is not None:
        click.echo(how_to_go_on(), err=True)


def _finish(study: Study, results: Results, place: Place | None, output: Output) -> int:
    """Name what failed, print the table and write the files; gives the exit status."""
    from gradcam.evaluation.study.results import compare_methods

    for entry in results.failures:
        click.echo(printable(entry.error or entry.image), err=True)
    if not results.judged():
        click.echo("No picture could be judged.", err=True)
        return 1
    is_told = not (output.quiet or output.as_json)
    if is_told:
        click.echo(format_results(results, compare_methods(results)))
    for path in () if place is None else write_all(study, results, place, output):
        if is_told:
            click.echo(f"  →  {click.style(printable(str(path)), fg='green')}")
    return int(bool(results.failures))


@click.command("evaluate", cls=Command, short_help="Judge methods by metrics, on a folder of your own pictures.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.several(
    "--method",
    "methods",
    find=list,
    known=[*METHODS, *METHOD_GROUPS, *CONTROL_NAMES],
    metavar="NAME[,NAME]",
    help=f"Method to compare, or {' or '.join(METHOD_GROUPS)}; repeatable.  [default: {','.join(DEFAULT_METHODS)}]",
)
@options.several(
    "--metric",
    "metrics",
    find=list,
    known=[*METRICS, *GROUPS, "all"],
    metavar="NAME[,NAME]",
    help=f"{', '.join(METRICS)}; or all of a group, {', '.join(GROUPS)}; repeatable.  "
    "[default: those that need pictures alone]",
)
@click.option(
    "--annotations",
    metavar="PATH",
    help="Where objects are: boxes (.csv), label masks (a folder) or COCO (.json), for metrics of localisation.",
)
@options.model
@click.option(
    "-l",
    "--layer",
    metavar="NAME",
    help="Layer of all maps.  [default: each method's own]",
    shell_complete=complete(list_layers),
)
@click.option(
    "-c",
    "--class",
    "target",
    metavar="NAME|INDEX",
    help="The class to explain in all pictures.  [default: each one's most probable]",
    shell_complete=complete(list_classes),
)
@click.option(
    "--score",
    type=click.Choice(list(SCORES)),
    default="logit",
    show_default=True,
    help="The class's number that is explained.",
)
@click.option("--controls/--no-controls", default=True, help="Whether maps that know nothing are judged as well.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most so many pictures, drawn by the seed.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of all that is drawn."
)
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="A .csv, .json or .tex file, or a folder for all of these, curves.png and examples.png.",
)
@click.option("--resume", is_flag=True, help="Go on with an earlier study: judge what is missing, or failed.")
@click.option("--overwrite", is_flag=True, help="Start anew, over what an earlier study wrote.")
@options.printing
def evaluate_command(inputs: tuple[str, ...], *, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Judge methods by metrics over pictures: files, folders, globs, lists and archives; no annotations are needed.

    The table has each method's mean with its 95 % interval by bootstrap over the pictures, and how far it is from the best,
    picture by picture. Maps that know nothing of the model are judged as well: what does not beat them says little. All
    methods have the same class and resizing, and with --layer the same layer. With --output, a stopped study goes on with
    --resume.
    """
    names = {field.name for field in fields(StudyChoice)}
    choice = StudyChoice(**{name: value for name, value in chosen.items() if name in names})
    if choice.resume and choice.overwrite:
        raise click.UsageError("--resume goes on with an earlier study, and --overwrite removes it: give one of them.")
    if (choice.resume or choice.overwrite) and choice.output is None:
        raise click.UsageError("Without --output nothing is kept that --resume or --overwrite could be about.")
    output = Output(as_json, quiet)
    with telling_waits(output):
        return judge_all(inputs, choice, to_model_choice(chosen), output)
