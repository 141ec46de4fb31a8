"""`gradcam check`: a verdict on the map of a picture."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_classes, list_layers
from gradcam.cli._job import load_model, make_folder, say, tell_each
from gradcam.cli._settings import Destination, Output, find_destination, to_model_choice
from gradcam.cli._terminal import import_torch, shown_passes
from gradcam.errors import printable
from gradcam.evaluation.study.plan import CONTROL_NAMES
from gradcam.images.files import OutputNames, join_name
from gradcam.options import SCORES
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.checks.verdict import Test, Verdict
    from gradcam.models.classifier import Classifier


COLOURS = {"passed": "green", "doubtful": "yellow", "failed": "red"}
WIDTH = 100  # characters of a line
WORD = len("doubtful")


@dataclass(frozen=True)
class Outcome:
    """What became of one picture: a verdict and the file of its panel, or an error. `size`: its (height, width)."""

    image: str
    model: str
    verdict: Verdict | None = None
    panel: str | None = None
    size: tuple[int, int] = (0, 0)
    device: str = ""
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "image": self.image,
            "status": "ok" if self.error is None else "failed",
            "error": self.error,
            "model": self.model,
        }
        if self.verdict is not None:
            record |= {**self.verdict.to_record(), "panel": self.panel}
        return json.dumps(record, allow_nan=False)

    def format(self) -> str:
        """Several lines: what is explained, each test with its outcome and its reason, the verdict and the panel."""
        from gradcam.evaluation.checks.verdict import PASSED

        verdict = self.verdict
        if verdict is None:
            return ""
        height, width = self.size
        name = click.style(printable(self.image.replace("\\", "/").rpartition("/")[2]), bold=True)
        title = [name, f"{width} x {height}", f"{printable(verdict.model)} on {self.device}", f"{self.seconds:.1f} s"]
        place = "" if verdict.layer is None else f" at {printable(verdict.layer)}"
        what = f"  {printable(verdict.class_name)}, {verdict.probability * 100:.0f} %, by {verdict.method}{place}"
        lines = ["   ".join(title), what, ""]
        for test in verdict.tests:
            lines += [*_format_test(test), ""]
        lines.append(f"  The verdict: {_style(verdict.outcome)}. {PASSED[:1].upper()}{PASSED[1:]}.")
        lines += textwrap.wrap(verdict.caution, WIDTH, initial_indent="  ", subsequent_indent="  ")
        return "\n".join([*lines, f"  →  {click.style(printable(self.panel or ''), fg='green')}", ""])


def _format_test(test: Test) -> list[str]:
    indent = " " * (WORD + 4)
    first = f"  {_style(test.outcome)}{' ' * (WORD - len(test.outcome))}  {click.style(test.question, bold=True)}"
    reason = textwrap.wrap(test.reason, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [first, *reason, f"{indent}{test.name} {test.value:.2f}: {test.thresholds}"]


def _style(outcome: str) -> str:
    return click.style(outcome, fg=COLOURS[outcome])


@dataclass(frozen=True)
class _Job:
    """What is asked of each picture."""

    classifier: Classifier
    method: str
    index: int | None
    score: str
    reshape: Any
    seed: int
    destination: Destination
    names: OutputNames
    ending: str


@click.command("check", cls=Command, short_help="A verdict on a map: four tests that it can fail.")
@options.pictures
@options.model
@click.option(
    "-l",
    "--layer",
    metavar="NAME",
    help="Layer to look at, as `gradcam layers` lists it.",
    shell_complete=complete(list_layers),
)
@options.several(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=list,
    known=[*METHODS, *CONTROL_NAMES],
    default=("gradcam",),
    help=f"One that `gradcam methods` lists, or {', '.join(CONTROL_NAMES)}, which must fail; repeatable.  "
    "[default: gradcam]",
)
@click.option(
    "-c",
    "--class",
    "wanted",
    metavar="NAME|INDEX",
    help="The class.  [default: each picture's most probable]",
    shell_complete=complete(list_classes),
)
@click.option(
    "--score",
    type=click.Choice(list(SCORES)),
    default="logit",
    show_default=True,
    help="The class's number that is explained.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all that is drawn by chance."
)
@options.output
@options.printing
def check_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Check whether the map of a picture can be trusted, as far as tests can refute it.

    Does it change when the weights are randomised, does it differ between classes, does covering what it marks lower the
    score more than covering as much elsewhere, is it stable under noise? Each is passed, doubtful or failed, with the
    reason, and a panel that shows it, <picture>-<method>-check.png. Passed means not refuted, never correct. Thresholds were
    measured on the model that comes with gradcam, and are uncalibrated for others.

    The exit status says whether all was done: a map that fails is a result, which --json has as "outcome".
    """
    output = Output(as_json, quiet)
    jobs = _prepare(images, output, chosen)
    name = jobs[0].classifier.name
    return max(
        tell_each(images, partial(_look, job, output), lambda it, error: Outcome(it, name, error=error), output)
        for job in jobs
    )


def _prepare(images: Sequence[Path], output: Output, chosen: dict[str, Any]) -> list[_Job]:
    """Load the model and check all that was typed; one job for each method. Raises `GradcamError` and `click.UsageError`."""
    import_torch()
    from gradcam.evaluation.explainers import find_explained

    methods = dict.fromkeys(map(find_explained, chosen["methods"]))
    destination = find_destination(chosen["output"], images, len(images) * len(methods))
    choice = to_model_choice(chosen)
    classifier = load_model(choice, layer=chosen["layer"])
    index = None if chosen["wanted"] is None else classifier.find_class(chosen["wanted"])
    say(classifier.notes, output)
    names = OutputNames(destination.folder, images)
    score, reshape, seed, ending = chosen["score"], chosen["reshape"], chosen["seed"], choice.ending
    return [_Job(classifier, it, index, score, reshape, seed, destination, names, ending) for it in methods]


def _look(job: _Job, output: Output, image: Path) -> Outcome:
    """Judge one picture's map and draw the panel."""
    from gradcam.evaluation.checks.check import check
    from gradcam.images.read import write_image

    start = time.perf_counter()
    prepared = job.classifier.prepare(image)
    with shown_passes(output) as progress:
        verdict = check(
            job.classifier,
            prepared,
            method=job.method,
            target=job.index,
            score=job.score,
            reshape=job.reshape,
            seed=job.seed,
            progress=progress,
        )
    make_folder(job.destination.folder)
    path = job.destination.file or job.names.claim([join_name(image.stem, f"-{job.method}-check{job.ending}")])[0]
    write_image(path, verdict.panel())
    height, width = prepared.reading.picture.shape[:2]
    return Outcome(
        image=str(image),
        model=job.classifier.name,
        verdict=verdict,
        panel=str(path),
        size=(height, width),
        device=str(job.classifier.device),
        seconds=time.perf_counter() - start,
    )
