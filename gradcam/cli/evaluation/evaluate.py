"""`gradcam evaluate`: which method's maps can be trusted most, on one's own pictures."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from gradcam.choices import SCORES
from gradcam.cli import options
from gradcam.cli.commands import Command
from gradcam.cli.completion import complete, list_classes, list_layers
from gradcam.cli.evaluation.study_files import StudyChoice
from gradcam.cli.evaluation.study_job import judge_all
from gradcam.cli.settings import Output, to_model_choice
from gradcam.cli.waiting import telling_waits
from gradcam.evaluation.metrics import GROUPS, METRICS
from gradcam.evaluation.study.plan import CONTROL_NAMES, DEFAULT_METHODS, METHOD_GROUPS
from gradcam.methods import METHODS


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
