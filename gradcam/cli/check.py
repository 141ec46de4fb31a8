"""`gradcam check`: test whether a heatmap can be trusted."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, make_folder, print_notes, process_images, require_images
from gradcam.cli._settings import OutputMode, find_destination, to_single_target, to_single_target_settings
from gradcam.cli._terminal import (
    custom_code_context,
    format_image_name,
    format_written_path,
    import_torch,
    show_pass_progress,
)
from gradcam.errors import GradcamError, escape_controls
from gradcam.evaluation.heatmap_sources import CONTROLS, find_explainable
from gradcam.images.files import OutputNames, join_name
from gradcam.options import MAX_SEED
from gradcam.plugins import list_entry_points
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.checks.verdict import Verdict
    from gradcam.models.classifier import Classifier

COLOURS = {"passed": "green", "undecided": "yellow", "failed": "red"}
WIDTH = 100  # characters per line
MIN_OTHER_IMAGES, MAX_OTHER_IMAGES = 3, 8  # number of images to compare an image with
COLUMN = len("undecided")  # width of the column of outcomes


@dataclass(frozen=True)
class CheckResult:
    """The result for one image: a verdict and the file of its panel, or an error. `size`: (height, width)."""

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
        """Format the explained class, the outcome and reason of each test, the verdict and the path of the panel."""
        from gradcam.evaluation.checks.findings import PASSED_NOTE

        verdict = self.verdict
        if verdict is None:
            return ""
        height, width = self.size
        title = [
            format_image_name(self.image),
            f"{width} x {height}",
            f"{escape_controls(verdict.model)} on {self.device}",
            f"{self.seconds:.1f} s",
        ]
        place = "" if verdict.layer is None else f" at {escape_controls(verdict.layer)}"
        subject = (
            f"  {escape_controls(verdict.class_name)}, {verdict.probability * 100:.0f} %, by {verdict.method}{place}"
        )
        lines = ["   ".join(title), subject, ""]
        indent = " " * (COLUMN + 4)
        for test in verdict.tests:
            heading = (
                f"  {_style(test.outcome)}{' ' * (COLUMN - len(test.outcome))}  {click.style(test.question, bold=True)}"
            )
            reason = textwrap.wrap(
                test.reason, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
            lines += [heading, *reason, ""]
        meaning = f" {PASSED_NOTE}" if verdict.outcome == "passed" else ""
        lines.append(f"  Verdict: {_style(verdict.outcome)}.{meaning}")
        lines += textwrap.wrap(
            verdict.summary, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        return "\n".join([*lines, format_written_path(self.panel or ""), ""])


def _style(outcome: str) -> str:
    return click.style(outcome, fg=COLOURS[outcome])


@click.command("check", cls=Command)
@options.images
@options.model
@options.layer("Target layer (see `gradcam layers`).")
@options.names_option(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=list,
    completions=[*METHODS, *CONTROLS, *list_entry_points("methods")],
    help="CAM method to test (see `gradcam methods`); may be repeated. "
    f"You can also test a control map, which should not pass: {', '.join(CONTROLS)}.  "
    "[default: gradcam, or the task's default]",
)
@options.class_("class_", "Class name or index to explain.  [default: top class of each image]")
@options.other_targets
@options.score
@options.number("--seed", "Random seed.", 0, minimum=0, maximum=MAX_SEED, metavar=None)
@click.option(
    "--fail-on",
    type=click.Choice(["undecided", "failed"]),
    help="Exit with status 1 on this verdict or a worse one.  [default: no verdict changes the exit status]",
)
@options.output
@options.printing
def check_command(
    images: tuple[Path, ...], as_json: bool, quiet: bool, fail_on: str | None, **params: Any
) -> int:  # fmt: skip
    """Test whether a heatmap can be trusted.

    Five tests check the heatmap. It must also beat control maps, which explain nothing. Control maps are the mirrored and
    the shifted heatmap, the heatmaps of another image and of a re-initialised model, noise, a blob and edges.

    \b
    Passed: the heatmap beats every control map.
    Undecided: a control map does as well as the heatmap, or there is too little to explain.
    Failed: a control map does better, or the heatmap ignores the weights, the class or the image.

    A passed test does not prove that the heatmap is right.

    A panel with all tests is written to <image>-<method>-check.png. One test puts the image beside three other images.
    These are your images if you give four or more, otherwise photographs that come with gradcam. For detectors, one box is
    tested: its heatmap is compared with the heatmaps of the other boxes, not of other classes. With several --text, only
    the first sentence is tested.

    Without --fail-on, the exit status is 0 if every image could be tested, whatever the verdict is. With --json, the key
    "outcome" holds the verdict.
    """
    output = OutputMode(as_json, quiet)
    require_images(images, output)
    import_torch()
    with custom_code_context(*params["methods"]):
        methods: dict[str, Any] = {method.name: method for method in map(find_explainable, params["methods"])}
    methods = methods or {"": None}  # the default method of the model
    settings = to_single_target_settings(params, params["class_"])
    destination = find_destination(
        params["output"], [*images, *settings.target_choice.files], len(images) * len(methods)
    )
    classifier = load_model(settings.model, layer=params["layer"])
    options = {name: params[name] for name in ("score", "reshape", "seed")}
    options["target"] = to_single_target(settings, classifier)
    print_notes(classifier.notes, output)
    names = OutputNames(destination.folder, images)

    def claim(image: Path, method: str) -> Path:
        make_folder(destination.folder)
        name = join_name(image.stem, f"-{method}-check{settings.model.suffix}")
        return destination.file or names.claim([name])[0]

    def fail(image: str, error: str) -> CheckResult:
        return CheckResult(image, classifier.name, error=error)

    options["other_images"] = _prepare_other_images(classifier, images) if len(images) > MIN_OTHER_IMAGES else {}
    checks = [partial(_check, classifier, {**options, "method": method}, claim, output) for method in methods.values()]
    outcomes: list[str] = []

    def run_check(check: Callable[[Path], CheckResult], image: Path) -> CheckResult:
        result = check(image)
        outcomes.extend([] if result.verdict is None else [result.verdict.outcome])
        return result

    status = max(process_images(images, partial(run_check, check), fail, output) for check in checks)
    return status or int(fail_on is not None and any(_is_as_bad(outcome, fail_on) for outcome in outcomes))


def _prepare_other_images(classifier: Classifier, images: Sequence[Path]) -> dict[Path, Any]:
    """Prepare the first readable images. Each checked image is compared with the other images."""
    prepared: dict[Path, Any] = {}
    for image in images:
        with contextlib.suppress(GradcamError, OSError):  # `_check` reports the error.
            prepared[image] = classifier.prepare(image)
        if len(prepared) > MAX_OTHER_IMAGES:
            break
    return prepared


def _is_as_bad(outcome: str, limit: str) -> bool:
    from gradcam.evaluation.checks.findings import OUTCOMES

    return [*OUTCOMES].index(outcome) >= [*OUTCOMES].index(limit)  # type: ignore[arg-type]  # Both are outcomes.


def _check(
    classifier: Classifier,
    options: Mapping[str, Any],
    claim: Callable[[Path, str], Path],
    output: OutputMode,
    image: Path,
) -> CheckResult:
    from gradcam.evaluation.checks.check import check
    from gradcam.images.write import write_image

    start = time.perf_counter()
    prepared = classifier.prepare(image)
    with show_pass_progress(output) as progress:
        other_images = [prepared_image for path, prepared_image in options["other_images"].items() if path != image]
        verdict = check(classifier, prepared, **{**options, "other_images": other_images}, progress=progress)
    path = claim(image, verdict.method)
    write_image(path, verdict.panel())
    height, width = prepared.reading.picture.shape[:2]
    seconds, device = time.perf_counter() - start, str(classifier.device)
    return CheckResult(str(image), classifier.name, verdict, str(path), (height, width), device, seconds)
