"""`gradcam check`: a verdict on the map of a picture."""

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
from gradcam.cli._job import load_model, make_folder, require_images, print_notes, process_images
from gradcam.cli._settings import OutputMode, find_destination, to_single_target_settings, to_single_target
from gradcam.cli._terminal import custom_code_context, import_torch, show_pass_progress, format_written_path, format_image_name
from gradcam.errors import GradcamError, printable
from gradcam.evaluation.controls import CONTROLS, find_explained
from gradcam.images.files import OutputNames, join_name
from gradcam.options import MAX_SEED
from gradcam.plugins import installed
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.checks.verdict import Verdict
    from gradcam.models.classifier import Classifier

COLOURS = {"passed": "green", "undecided": "yellow", "failed": "red"}
WIDTH = 100  # characters of a line
BESIDE, MOST = 3, 8  # pictures that stand beside one, at least and at most
WORD = len("undecided")


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
        from gradcam.evaluation.checks.findings import PASSED

        verdict = self.verdict
        if verdict is None:
            return ""
        height, width = self.size
        title = [
            format_image_name(self.image),
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
            reason = textwrap.wrap(
                test.reason, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
            lines += [first, *reason, ""]
        meaning = f" {PASSED}" if verdict.outcome == "passed" else ""
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
@options.several(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=list,
    completions=[*METHODS, *CONTROLS, *installed("methods")],
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
    images: tuple[Path, ...], as_json: bool, quiet: bool, fail_on: str | None, **chosen: Any
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
    with custom_code_context(*chosen["methods"]):
        methods: dict[str, Any] = {it.name: it for it in map(find_explained, chosen["methods"])}
    methods = methods or {"": None}  # what suits the model
    settings = to_single_target_settings(chosen, chosen["class_"])
    destination = find_destination(chosen["output"], [*images, *settings.target_choice.files], len(images) * len(methods))
    classifier = load_model(settings.model, layer=chosen["layer"])
    options = {name: chosen[name] for name in ("score", "reshape", "seed")}
    options["target"] = to_single_target(settings, classifier)
    print_notes(classifier.notes, output)
    names = OutputNames(destination.folder, images)

    def claim(image: Path, method: str) -> Path:
        make_folder(destination.folder)
        name = join_name(image.stem, f"-{method}-check{settings.model.suffix}")
        return destination.file or names.claim([name])[0]

    def fail(image: str, error: str) -> CheckResult:
        return CheckResult(image, classifier.name, error=error)

    options["other_images"] = _prepare_some(classifier, images) if len(images) > BESIDE else {}
    looks = [partial(_check, classifier, {**options, "method": it}, claim, output) for it in methods.values()]
    found: list[str] = []

    def look_at(look: Callable[[Path], CheckResult], image: Path) -> CheckResult:
        result = look(image)
        found.extend([] if result.verdict is None else [result.verdict.outcome])
        return result

    status = max(process_images(images, partial(look_at, look), fail, output) for look in looks)
    return status or int(fail_on is not None and any(_is_as_bad(outcome, fail_on) for outcome in found))


def _prepare_some(classifier: Classifier, images: Sequence[Path]) -> dict[Path, Any]:
    """The first pictures that can be read, which stand beside one another."""
    found: dict[Path, Any] = {}
    for image in images:
        with contextlib.suppress(GradcamError, OSError):  # it is told of when its turn comes
            found[image] = classifier.prepare(image)
        if len(found) > MOST:
            break
    return found


def _is_as_bad(outcome: str, limit: str) -> bool:
    from gradcam.evaluation.checks.findings import OUTCOMES

    return [*OUTCOMES].index(outcome) >= [*OUTCOMES].index(limit)  # type: ignore[arg-type]  # both are among them


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
        others = [other for path, other in options["other_images"].items() if path != image]
        verdict = check(classifier, prepared, **{**options, "other_images": others}, progress=progress)
    path = claim(image, verdict.method)
    write_image(path, verdict.panel())
    height, width = prepared.reading.picture.shape[:2]
    seconds, device = time.perf_counter() - start, str(classifier.device)
    return CheckResult(str(image), classifier.name, verdict, str(path), (height, width), device, seconds)
