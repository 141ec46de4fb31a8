"""`gradcam check`: test whether a heatmap can be trusted."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS
from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._job import (
    ImageResult,
    find_destination,
    find_suffix,
    list_input_files,
    load_model,
    print_notes,
    print_outcome,
    process_images,
    require_images,
    write_file,
)
from gradcam.cli._settings import OutputMode, to_single_target, to_single_target_settings
from gradcam.errors import GradcamError, escape_controls
from gradcam.evaluation.heatmap_sources import CONTROLS, find_explainable
from gradcam.evaluation.intervals import MIN_IMAGES_FOR_INTERVAL
from gradcam.options import MAX_SEED
from gradcam.plugins import list_entry_points
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.checks.map_evidence import MapEvidence
    from gradcam.evaluation.checks.verdict import Verdict
    from gradcam.models.classifier import Classifier
    from gradcam.models.preprocess import Prepared

CheckedImage = tuple["Verdict", list["MapEvidence"]]
COLOURS = {"passed": "green", "undecided": "yellow", "failed": "red"}
WIDTH = 100  # characters per line
MIN_OTHER_IMAGES, MAX_OTHER_IMAGES = 3, 8  # limits of the number of images to compare with
COLUMN = len("undecided")  # width of the column of outcomes


def _format(title: str, verdict: Verdict, panel: str) -> str:
    """Format the explained class, the outcome and reason of each test, the verdict and the path of the panel."""
    from gradcam.evaluation.checks.findings import PASSED_NOTE

    place = "" if verdict.layer is None else f" at {escape_controls(verdict.layer)}"
    subject = f"  {escape_controls(verdict.class_name)}, {verdict.probability * 100:.0f} %, by {verdict.method}{place}"
    lines = [title, subject, ""]
    for test in verdict.tests:
        padding = " " * (COLUMN - len(test.outcome))
        lines.append(f"  {_style(test.outcome)}{padding}  {click.style(test.question, bold=True)}")
        lines += [*_wrap(test.reason, " " * (COLUMN + 4)), ""]
    meaning = f" {PASSED_NOTE}" if verdict.outcome == "passed" else ""
    lines += [f"  Verdict: {_style(verdict.outcome)}.{meaning}", *_wrap(verdict.summary, "  ")]
    return "\n".join([*lines, terminal.format_written_path(panel), ""])


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _style(outcome: str) -> str:
    return click.style(outcome, fg=COLOURS[outcome])


@click.command("check", cls=Command)
@options.images
@options.model
@options.layer("Target layer (see `gradcam layers`).")
@options.names_option(
    "--method NAME[,NAME]",
    "CAM method to test (see `gradcam methods`); may be repeated. "
    "You can also test maps that are computed without the model, which should not pass: "
    f"{', '.join(f'{control.name} ({control.summary})' for control in CONTROLS.values())}.  "
    "[default: gradcam, or the task's default]",
    name="methods",
    find=list,
    completions=[*METHODS, *CONTROLS, *list_entry_points("methods")],
)
@options.class_("class_", "Class name or index to explain.  [default: top class of each image]")
@options.other_targets
@options.score
@options.number("--seed INTEGER", "Random seed.", 0, minimum=0, maximum=MAX_SEED)
@options.option(
    "--fail-on",
    "Exit with status 1 on this verdict or a worse one.  [default: no verdict changes the exit status]",
    click.Choice(["undecided", "failed"]),
)
@options.output
@options.printing
def check_command(
    images: tuple[Path, ...], as_json: bool, quiet: bool, fail_on: str | None, **params: Any
) -> int:  # fmt: skip
    """Test whether a heatmap can be trusted.

    Up to five tests check the heatmap. The heatmap must also beat control maps, which do not explain the class.
    To beat a control map, the heatmap must locate the evidence for the class better. Control maps are the mirrored and
    the shifted heatmap, smooth noise, a blob in the centre, and the image's edges. The heatmaps of another image,
    of a re-initialised model and of the most probable other class are control maps, too.

    \b
    Passed: the heatmap beats every control map.
    Undecided: a control map is as good as the heatmap, or the image has too little evidence for the class.
    Failed: a control map is better, or the heatmap ignores the weights, the class or the image.

    The rules differ for the heatmap of the most probable other class. If it is as good
    as the tested heatmap, the outcome can still be "passed". If it is better, the outcome is "undecided".

    A passed test does not prove that the heatmap is right.

    A panel with all tests is written to <image>-<method>-check.png. For classes and sentences, one test puts the
    image beside three other images. If you give four or more images, these three are chosen from your images.
    Otherwise, they are photographs that come with gradcam.

    Only one target is tested per image: the first of several boxes, words, keypoints or sentences. By default, this is
    the highest-scoring box, the first word of the answer, or keypoint 0. A box is compared with other boxes instead of
    other classes, and a word with other words of the answer. A word's probability with the image is also divided
    by its probability with a blank image. If the ratio is below 1.5, the verdict is undecided.

    With 6 or more images, a verdict over all images follows. It reports systematic bugs: displaced or mirrored
    heatmaps, a wrong class index, a wrong colour order. The heatmaps of your own function (--method FILE.py:NAME) are
    compared with heatmaps of built-in methods at the same layer.

    Without --fail-on, the exit status is 0 if every image could be tested, whatever the verdict. With --json, the key
    "outcome" holds the verdict. The verdict over all images is one more record, with the key "folder".
    """
    output = OutputMode(as_json, quiet)
    require_images(images, output)
    terminal.import_torch()
    with terminal.custom_code_context(*params["methods"]):
        methods: list[Any] = [*{method.name: method for method in map(find_explainable, params["methods"])}.values()]
    settings = to_single_target_settings(params, params["class_"])
    from gradcam.evaluation.checks.folder import measure_image

    inputs, results = list_input_files(images, settings.target_choice), len(images) * max(1, len(methods))
    destination = find_destination(params["output"], inputs, results)
    classifier = load_model(settings.model, layer=params["layer"])
    options = {name: params[name] for name in ("score", "reshape", "seed")}
    options["target"] = to_single_target(settings, classifier)
    print_notes(classifier.notes, output)
    options["other_images"] = _prepare_other_images(classifier, images) if len(images) > MIN_OTHER_IMAGES else {}
    outcomes: list[str | None] = []
    folders: dict[Any, list[CheckedImage]] = {method: [] for method in methods or [None]}  # None: the default method.

    def process(method: Any, image: Path) -> ImageResult:
        start, prepared = time.perf_counter(), classifier.prepare(image)
        method_options = {**options, "method": method}
        verdict = _check(classifier, prepared, image, method_options, output)
        evidence = measure_image(classifier, prepared, method_options) if len(images) >= MIN_IMAGES_FOR_INTERVAL else []
        folders[method].append((verdict, evidence))
        path = destination.claim(image, f"-{verdict.method}-check{find_suffix(settings.model)}")
        write_file(path, verdict.panel())
        outcomes.append(verdict.outcome)
        size, seconds = prepared.reading.picture.shape, time.perf_counter() - start
        title = terminal.format_title(str(image), size, verdict.model, classifier.device, seconds)
        return {**verdict.to_record(), "panel": str(path)}, partial(_format, title, verdict, str(path))

    status = 0
    for method, checked_images in folders.items():
        status |= process_images(images, partial(process, method), output, classifier.name, {})
        if len(images) > 1:
            outcomes.append(_print_folder(checked_images, params["seed"], output))
    return status or int(fail_on is not None and not {fail_on, "failed"}.isdisjoint(outcomes))


def _prepare_other_images(classifier: Classifier, images: Sequence[Path]) -> dict[Path, Any]:
    """Prepare the first readable images. Each checked image is compared with the other images."""
    prepared: dict[Path, Any] = {}
    for image in images:
        with contextlib.suppress(GradcamError, OSError):  # The error is reported when this image is checked.
            prepared[image] = classifier.prepare(image)
        if len(prepared) > MAX_OTHER_IMAGES:
            break
    return prepared


def _check(
    classifier: Classifier, prepared: Prepared, image: Path, options: dict[str, Any], output: OutputMode
) -> Verdict:
    from gradcam.evaluation.checks.check import check

    other_images = [other for path, other in options["other_images"].items() if path != image]
    with terminal.show_pass_progress(output) as progress:
        return check(classifier, prepared, **{**options, "other_images": other_images}, progress=progress)


def _print_folder(checked_images: Sequence[CheckedImage], seed: int, output: OutputMode) -> str | None:
    """Print the verdict over all images, and return its outcome. Without a verdict, print the reason and return None."""
    from gradcam.evaluation.checks.folder import FolderVerdict, require_images

    verdicts = tuple(verdict for verdict, _ in checked_images)
    try:
        require_images(len(verdicts))
    except GradcamError as error:
        if not output.as_json and not output.quiet:
            click.echo(f"  {error}")
        return None
    folder = FolderVerdict(verdicts, tuple(item for _, evidence in checked_images for item in evidence), seed)
    names = {"schema": SCHEMA, "model": verdicts[0].model, "method": verdicts[0].method}
    lines = [f"{len(verdicts)} images, by {verdicts[0].method}: {_style(folder.outcome)}", *_wrap(folder.summary, "  ")]
    print_outcome(None, lambda: json.dumps({**names, "folder": folder.to_record()}), lambda: "\n".join(lines), output)
    return folder.outcome
