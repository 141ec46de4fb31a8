"""`gradcam evaluate`: which method's maps can be trusted most, on one's own pictures."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from gradcam.cli import options
from gradcam.cli.evaluation.study_files import StudyChoice
from gradcam.cli.evaluation.study_job import judge_all
from gradcam.cli.settings import Output, to_model_choice
from gradcam.cli.waiting import telling_waits
from gradcam.evaluation.metrics import GROUPS
from gradcam.evaluation.study.plan import DEFAULT_METHODS
from gradcam.scores import SCORES


class Names(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some versions
    """Names with commas between them."""

    name = "names"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(",") if name.strip())
        if not names:
            self.fail(f"{value!r} holds no name.", parameter, context)
        return names


@click.command("evaluate", short_help="Judge methods by metrics, on a folder of your own pictures.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "--methods",
    type=Names(),
    metavar="all|single-pass|NAME,...",
    help=f"Methods to compare.  [default: {','.join(DEFAULT_METHODS)}]",
)
@click.option(
    "--metrics",
    type=Names(),
    metavar="all|GROUP|NAME,...",
    help=f"Metrics, or groups of them: {', '.join(GROUPS)}.  [default: all that need pictures alone]",
)
@click.option(
    "--annotations",
    metavar="PATH",
    help="Where objects are: boxes (.csv), label masks (a folder) or COCO (.json), for metrics of localisation.",
)
@options.model
@click.option(
    "-l", "--layer", metavar="NAME", help="Layer of all maps, by dotted name; without it, each method's default."
)
@click.option(
    "-c",
    "--class",
    "target",
    metavar="NAME|INDEX",
    help="The class to explain in all pictures.  [default: each one's most probable]",
)
@click.option(
    "--score",
    type=click.Choice(list(SCORES)),
    default="logit",
    show_default=True,
    help="Which number of the class is explained.",
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
