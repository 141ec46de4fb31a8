"""`gradcam check`: a verdict on the map of a picture."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, make_folder, say, tell_each
from gradcam.cli._settings import Output, find_destination, to_judged, to_judged_target
from gradcam.cli._terminal import code_of_the_user, import_torch, shown_passes, to_arrow, to_name
from gradcam.errors import printable
from gradcam.evaluation.controls import CONTROLS, find_explained
from gradcam.images.files import OutputNames, join_name
from gradcam.plugins import installed
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.checks.verdict import Verdict
    from gradcam.models.classifier import Classifier

COLOURS = {"passed": "green", "doubtful": "yellow", "failed": "red"}
WIDTH = 100  # characters of a line
WORD = len("doubtful")


@dataclass(frozen=True)
class CheckResult:
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
        status = "ok" if self.error is None else "failed"
        record: dict[str, Any] = {"schema": SCHEMA, "image": self.image, "status": status}
        record |= {"error": self.error, "model": self.model}
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
        title = [
            to_name(self.image),
            f"{width} x {height}",
            f"{printable(verdict.model)} on {self.device}",
            f"{self.seconds:.1f} s",
        ]
        place = "" if verdict.layer is None else f" at {printable(verdict.layer)}"
        what = f"  {printable(verdict.class_name)}, {verdict.probability * 100:.0f} %, by {verdict.method}{place}"
        lines = ["   ".join(title), what, ""]
        indent = " " * (WORD + 4)
        for test in verdict.tests:
            first = (
                f"  {_style(test.outcome)}{' ' * (WORD - len(test.outcome))}  {click.style(test.question, bold=True)}"
            )
            reason = textwrap.wrap(test.reason, WIDTH, initial_indent=indent, subsequent_indent=indent)
            lines += [first, *reason, f"{indent}{test.name} {test.value:.2f}: {test.thresholds}", ""]
        lines.append(f"  The verdict: {_style(verdict.outcome)}. {PASSED[:1].upper()}{PASSED[1:]}.")
        lines += textwrap.wrap(verdict.caution, WIDTH, initial_indent="  ", subsequent_indent="  ")
        return "\n".join([*lines, to_arrow(self.panel or ""), ""])


def _style(outcome: str) -> str:
    return click.style(outcome, fg=COLOURS[outcome])


@click.command("check", cls=Command)
@options.pictures
@options.model
@options.layer("Layer to look at, as `gradcam layers` lists it.")
@options.several(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=list,
    known=[*METHODS, *CONTROLS, *installed("methods")],
    help=f"One that `gradcam methods` lists, or {', '.join(CONTROLS)}, which must fail; repeatable.  "
    "[default: gradcam, or what suits the task]",
)
@options.class_("class_", "The class.  [default: each picture's most probable]")
@options.things
@options.score
@options.number("--seed", "Of all that is drawn by chance.", 0, least=0, metavar=None)
@options.output
@options.printing
def check_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Check whether the map of a picture can be trusted, as far as tests can refute it.

    Does it change when the weights are randomised, does it differ between classes, does covering what it marks lower the
    score more than covering as much elsewhere, is it stable under noise? Each is passed, doubtful or failed, with the
    reason, and a panel that shows it, <picture>-<method>-check.png. Passed means not refuted, never correct. Thresholds were
    measured on the model that comes with gradcam, and are uncalibrated for others.

    Of a detector a box is judged, and told apart from the picture's others; of several sentences the first.

    The exit status says whether all was done: a map that fails is a result, which --json has as "outcome".
    """
    output = Output(as_json, quiet)
    import_torch()
    with code_of_the_user(*chosen["methods"]):
        methods: dict[str, Any] = {it.name: it for it in map(find_explained, chosen["methods"])}
    methods = methods or {"": None}  # what suits the model
    settings = to_judged(chosen, chosen["class_"])
    destination = find_destination(chosen["output"], [*images, *settings.wanted.files], len(images) * len(methods))
    classifier = load_model(settings.model, layer=chosen["layer"])
    options = {name: chosen[name] for name in ("score", "reshape", "seed")}
    options["target"] = to_judged_target(settings, classifier)
    say(classifier.notes, output)
    names = OutputNames(destination.folder, images)

    def claim(image: Path, method: str) -> Path:
        make_folder(destination.folder)
        name = join_name(image.stem, f"-{method}-check{settings.model.ending}")
        return destination.file or names.claim([name])[0]

    def fail(image: str, error: str) -> CheckResult:
        return CheckResult(image, classifier.name, error=error)

    looks = [partial(_check, classifier, {**options, "method": it}, claim, output) for it in methods.values()]
    return max(tell_each(images, look, fail, output) for look in looks)


def _check(
    classifier: Classifier, options: Mapping[str, Any], claim: Callable[[Path, str], Path], output: Output, image: Path
) -> CheckResult:
    from gradcam.evaluation.checks.check import check
    from gradcam.images.write import write_image

    start = time.perf_counter()
    prepared = classifier.prepare(image)
    with shown_passes(output) as progress:
        verdict = check(classifier, prepared, **options, progress=progress)
    path = claim(image, verdict.method)
    write_image(path, verdict.panel())
    height, width = prepared.reading.picture.shape[:2]
    seconds, device = time.perf_counter() - start, str(classifier.device)
    return CheckResult(str(image), classifier.name, verdict, str(path), (height, width), device, seconds)
