"""`gradcam recommend`: which method, score and layer are best for a model, on one's own pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click

from gradcam.cam.methods.table import METHODS, find_method
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, print_notes, print_outcome
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice, to_word
from gradcam.cli._terminal import format_count, import_torch, print_above_bar, show_pass_progress, report_waits, quote_command
from gradcam.errors import GradcamError, LayerError
from gradcam.evaluation.intervals import ENOUGH
from gradcam.options import MAX_SEED, SCORES
from gradcam.renames import RECOMMEND, REMOVED_IN, add_old_keys
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.evaluation.annotations import Annotations
    from gradcam.evaluation.intervals import Interval
    from gradcam.evaluation.recommendation import Answer, Recommendation, Row
    from gradcam.models.classifier import Classifier
    from gradcam.models.preprocess import Prepared
    from gradcam.sources.contents import Item

COLUMNS = {"order": "order ↑", "objects": "on objects ↑", "road": "ROAD ↑", "mass": "mass", "maximum": "maximum"}
NUMBERS = {"order": "order in mosaics", "road": "ROAD", "objects": "order on annotated objects"}
ONE, SEVERAL = "Where is the object?", "Which of several objects belongs to the class?"
MOST_ROWS = 16


def _find_methods(names: Sequence[str]) -> list[str]:
    found = {name: find_method(name) for name in names}
    for method in found.values():
        if not method.has_layer:
            raise GradcamError(f"{method.name} uses no target layer: remove it from --method.")
    return [method.name if METHODS.get(method.name) == method else name for name, method in found.items()]


def _find_scores(names: Sequence[str]) -> list[str]:
    if unknown := [name for name in names if name.lower() not in SCORES]:
        raise GradcamError(f"There is no score {unknown[0]!r}. Choose from {', '.join(SCORES)}.")
    return [name.lower() for name in names]


@click.command("recommend", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="FOLDER...")
@options.model
@options.layer(
    "Layer to try (see `gradcam layers`); may be repeated.  [default: up to seven layers of the model]",
    "layers",
    multiple=True,
)
@options.several(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=_find_methods,
    completions=METHODS,
    help="CAM method to try; may be repeated.  [default: methods with one forward pass]",
)
@options.several(
    "--score",
    "scores",
    metavar="NAME[,NAME]",
    default=tuple(SCORES),
    find=_find_scores,
    completions=SCORES,
    help=f"Score to try; may be repeated.  [default: {','.join(SCORES)}]",
)
@options.number("--limit", "Largest number of images. Larger sets are sampled at random.", 24, minimum=4)
@click.option(
    "--min-probability",
    type=options.real(0, 1),
    default=0.5,
    show_default=True,
    metavar="P",
    help="Smallest probability of the top class. Images with a lower probability are left out.",
)
@click.option("--least", type=options.real(0, 1), hidden=True)
@options.number("--seed", "Random seed.", 0, minimum=0, maximum=MAX_SEED)
@click.option(
    "--annotations",
    metavar="PATH",
    help="Object annotations, to test localisation. Give boxes (.csv), a folder of label masks, or COCO (.json).",
)
@click.option("--all", "show_all", is_flag=True, help="Print all rows of the table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def recommend_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Find the best method, score and layer for a model on your images.

    FOLDER can also be an image file, a glob, a list or an archive, as for `gradcam batch`. About 24 images of different
    classes are enough, and annotations are optional. The command answers two questions.

    Which of several objects belongs to the class? The test images are mosaics of four images of four classes. "order"
    is how often a pixel in the image of the explained class has a higher value than a pixel in the other three images.
    By chance, it is 0.5.

    Where is the object? "ROAD" compares two removals: of the most relevant pixels, and of the least relevant pixels. It is
    high if the probability is much lower without the most relevant pixels. With --annotations, "order" on the annotated
    objects is used instead of "ROAD".

    A combination other than the default is recommended only if it is significantly better on 8 images or more, after
    correction for all combinations. "mass" is not used, because sharpening a heatmap raises it. Unreadable images are
    reported and left out, and the exit status is 1.
    """
    output = OutputMode(as_json, quiet)
    import_torch()
    from gradcam.evaluation.annotations import read_annotations
    from gradcam.evaluation.recommendation import check_layers, recommend
    from gradcam.sources.list import list_inputs

    if (least := chosen.pop("least")) is not None:
        click.echo(f"--least is now --min-probability. The old name will be removed in gradcam {REMOVED_IN}.", err=True)
        chosen["min_probability"] = least
    start, choice, layers = time.perf_counter(), to_model_choice(chosen), chosen["layers"]
    with report_waits(output):
        listing = list_inputs(inputs)
        classifier = _load(choice, layers)
        options = {name: chosen[name] for name in ("scores", "min_probability", "seed", "reshape")}
        options["layers"] = check_layers(classifier.model, layers) if layers else None
        print_notes(classifier.notes, output)
        names, path = [item.name for item in listing.items], chosen["annotations"]
        annotations = None if path is None else read_annotations(path, names=names, find_class=classifier.find_class)
        items = _draw(listing.items, chosen["limit"], chosen["seed"])
        with show_pass_progress(output) as progress:
            pictures, options["objects"], failed = _read(classifier, items, annotations)
            found = recommend(classifier, pictures, methods=chosen["methods"] or None, progress=progress, **options)
    seconds, given, taken = time.perf_counter() - start, len(listing.items), len(items)
    device = str(classifier.device)
    result = RecommendResult(found, choice, chosen["reshape"], device, given, taken, failed, seconds)
    print_outcome(None, result.to_json, partial(result.format, show_all=chosen["show_all"]), output)
    return int(failed > 0)


def _load(choice: ModelChoice, layers: Sequence[str]) -> Classifier:
    """The model with its own layer, so that others are compared with that; where it has none, with the first named one."""
    try:
        return load_model(choice)
    except LayerError:
        if not layers:
            raise
        return load_model(choice, layer=layers[0])


def _draw(items: Sequence[Item], limit: int, seed: int) -> list[Item]:
    """So many of the pictures, by chance, in their order: the first ones of a folder may all be of one class."""
    import torch

    from gradcam.evaluation.subject import draw

    if len(items) <= limit:
        return list(items)
    places = torch.randperm(len(items), generator=draw(seed, "pictures"), dtype=torch.int64, device="cpu")[:limit]
    return [items[place] for place in sorted(places.tolist())]


def _read(
    classifier: Classifier, items: Sequence[Item], annotations: Annotations | None
) -> tuple[dict[str, Tensor], dict[str, dict[int, Tensor]], int]:
    """The pictures, masks of the objects that are annotated there, and how many could not be read."""
    from gradcam.batch.read import read_item

    pictures, objects, failed = {}, {}, 0
    for item in items:
        picture = read_item(classifier, replace(item, wanted=None)).picture  # what a list asks for is not looked at
        if isinstance(picture, GradcamError):
            failed += 1
            print_above_bar(str(picture))
        else:
            pictures[item.name] = picture.image
            if annotations is not None:
                objects[item.name] = _find_objects(classifier, annotations, item.name, picture)
    return pictures, objects, failed


def _find_objects(classifier: Classifier, annotations: Annotations, name: str, prepared: Prepared) -> dict[int, Tensor]:
    """Return a mask for each class that is annotated in an image, in pixels of the model's input."""
    from gradcam.models.preprocess import find_canvas

    canvas, size = find_canvas(classifier.preprocess, prepared), prepared.reading.picture.shape[:2]
    masks = {}
    for label in annotations.classes(name):
        masks[label] = annotations.truth(name, canvas, prepared.image.shape[1:], label, image_size=size)
    return {label: truth.masks[0] for label, truth in masks.items() if truth is not None}


@dataclass(frozen=True)
class RecommendResult:
    """What was found, of which model, and in how many of the pictures."""

    found: Recommendation
    choice: ModelChoice
    reshape: str | tuple[int, ...] | None
    device: str
    given: int
    taken: int
    failed: int
    seconds: float

    def to_json(self) -> str:
        record = self.found.to_dict()
        for name in ("single_object", "several_objects"):
            record[name] |= {"command": self._command(getattr(self.found, name))}
        numbers = {"input_count": self.given, "sampled_count": self.taken, "failed": self.failed}
        return json.dumps({"schema": SCHEMA, **add_old_keys(RECOMMEND, record | numbers)})

    def format(self, *, show_all: bool) -> str:
        """Several lines: what was measured, the table, which combination is the best, and what to type."""
        found = self.found
        height, width = found.size
        title = [f"{click.style(found.model, bold=True)} on {self.device}", self._pictures()]
        title += [
            f"{format_count(found.mosaics, 'mosaic')} of {width} x {height}",
            f"seed {found.seed}",
            f"{self.seconds:.1f} s",
        ]
        named = (found.default, found.single_object.row, found.several_objects.row)
        firsts = (row for place, row in enumerate(found.rows) if place < MOST_ROWS or any(row is it for it in named))
        rows = found.rows if show_all else tuple(firsts)
        lines = ["   ".join(title), "", *_table(rows, found), ""]
        if len(rows) < len(found.rows):
            lines.append(f"{len(rows)} of {len(found.rows)} combinations are listed. Use --all to list them all.")
        lines += [f"{it} cannot be used: {reason}" for it, reason in found.left_out.items()]
        return "\n".join([*lines, *self._sentences()])

    def _pictures(self) -> str:
        taken = len(self.found.images)
        left = {
            "not sampled": self.given - self.taken,
            click.style("failed", fg="red"): self.failed,
            "not in a mosaic": self.taken - self.failed - taken,
        }
        said = [f"{it} {why}" for why, it in left.items() if it]
        return ", ".join([f"{taken} of {format_count(self.given, 'image')}", *said])

    def _sentences(self) -> Iterator[str]:
        """What to take for each question, why, and the line to type."""
        found = self.found
        if len(found.images) < ENOUGH:
            yield f"{len(found.images)} images are too few: with fewer than {ENOUGH}, only the default is recommended."
        for title, answer in ((ONE, found.single_object), (SEVERAL, found.several_objects)):
            yield f"{click.style(title, bold=True)} {_explain(answer, found)}"
            yield f"  {self._command(answer)}"

    def _command(self, answer: Answer) -> str:
        """The line that explains a picture with a combination."""
        combination = answer.row.combination
        words = ["gradcam", "run", "photo.jpg", *self.choice.to_words()]
        if self.reshape is not None:
            words += ["--reshape", to_word(self.reshape)]
        words += ["--method", combination.method]
        if combination.score not in (None, "logit"):
            words += ["--score", str(combination.score)]
        return quote_command([*words, "--layer", combination.layer])


def _explain(answer: Answer, found: Recommendation) -> str:
    """Which combination an answer is, and why it is that."""
    number, leader = NUMBERS[answer.measure], answer.leader
    if found.default is None or answer.gain is None:
        return f"{answer.row.combination} has the best {number}. The default cannot be used."
    if leader is found.default:
        return f"The default, {leader.combination}: no other combination has a better {number}."
    if answer.is_clear:
        faithful = (
            ""
            if answer.measure == "road" or answer.road_gain is None
            else f" and its ROAD is {_compare(answer.road_gain)}"
        )
        default = f"the default, {found.default.combination}"
        return f"{leader.combination}: compared with {default}, its {number} is {_compare(answer.gain)}{faithful}."
    stays = f"Keep the default, {found.default.combination}. {leader.combination} has the best {number}"
    if answer.is_unfaithful and answer.gain.low > 0:
        return f"{stays}, {_compare(answer.gain)}, but its ROAD is {_compare(cast('Interval', answer.road_gain))}."
    compared = "compared with the default, and after correction for all combinations"
    return f"{stays}, but {compared}, its {number} is {_compare(answer.gain)}."


def _table(rows: Sequence[Row], found: Recommendation) -> list[str]:
    shown = [it for it in COLUMNS if it != "objects" or rows[0].objects is not None]
    titles = ("method", "score", "layer", *(COLUMNS[it] for it in shown))
    cells = [titles, *([*_name(row), *(_cell(row, it) for it in shown)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in cells]
    marks = {"1": found.single_object.row, "4": found.several_objects.row, "*": found.default}
    marked = ["".join(mark if row is of else " " for mark, of in marks.items()) for row in rows]
    table = [f"{mark} {line}" for mark, line in zip(["   ", *marked], lines)]
    chosen = [click.style(line, fg="green", bold=True) if {*line[:2]} != {" "} else line for line in table]
    return [*chosen, "", "1: best for one object   4: best for several objects   *: default"]


def _name(row: Row) -> tuple[str, ...]:
    return row.combination.method, row.combination.score or "-", row.combination.layer


def _cell(row: Row, name: str) -> str:
    interval: Interval | None = getattr(row, name)
    if interval is None or not interval.n:
        return "-"
    return f"{interval.mean:.2f}" if name in ("mass", "maximum") else _write(interval)


def _write(interval: Interval) -> str:
    between = f" [{_number(interval.low)}, {_number(interval.high)}]" if interval.is_known else ""
    return _number(interval.mean) + between


def _number(value: float) -> str:
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def _compare(difference: Interval) -> str:
    if not difference.excludes(0):
        interval = f"{difference.mean:+.3f}, between {difference.low:+.3f} and {difference.high:+.3f}"
        return f"not significantly different ({interval})"
    word = "higher" if difference.mean > 0 else "lower"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{word} by {abs(difference.mean):.3f} (between {low:.3f} and {high:.3f})"
