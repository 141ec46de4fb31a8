"""`gradcam recommend`: find the best method, score and layer for a model, on the user's images."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click

from gradcam.cam.methods.table import METHODS, find_method
from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, print_notes, print_outcome
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice, to_word
from gradcam.errors import GradcamError, LayerError
from gradcam.evaluation.intervals import MIN_IMAGES_TO_COMPARE
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
    from gradcam.sources.contents import InputImage

COLUMNS = {"order": "order ↑", "objects": "on objects ↑", "road": "ROAD ↑", "mass": "mass", "maximum": "maximum"}
NUMBERS = {"order": "order in mosaics", "road": "ROAD", "objects": "order on annotated objects"}
SINGLE_QUESTION, SEVERAL_QUESTION = "Where is the object?", "Which of several objects belongs to the class?"
MAX_ROWS = 16


def _find_methods(names: Sequence[str]) -> list[str]:
    methods = {name: find_method(name) for name in names}
    for method in methods.values():
        if not method.has_layer:
            raise GradcamError(f"{method.name} uses no target layer: remove this method.")
    return [method.name if METHODS.get(method.name) == method else name for name, method in methods.items()]


def _find_scores(names: Sequence[str]) -> list[str]:
    if unknown := [name for name in names if name.lower() not in SCORES]:
        raise GradcamError(f"There is no score {unknown[0]!r}. Choose from {', '.join(SCORES)}.")
    return [name.lower() for name in names]


@click.command("recommend", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="FOLDER...")
@options.model
@options.layer(
    "Layer to try (see `gradcam layers`); may be repeated.  [default: up to seven layers of the model]",
    name="layers",
    multiple=True,
)
@options.names_option(
    "--method NAME[,NAME]",
    "CAM method to try; may be repeated.  [default: methods with one forward pass]",
    name="methods",
    find=_find_methods,
    completions=METHODS,
)
@options.names_option(
    "--score NAME[,NAME]",
    f"Score to try; may be repeated.  [default: {','.join(SCORES)}]",
    name="scores",
    default=tuple(SCORES),
    find=_find_scores,
    completions=SCORES,
)
@options.number("--limit", "Maximum number of images. Larger sets are sampled at random.", 24, minimum=4)
@options.option(
    "--min-probability P",
    "Minimum probability of the top class. Images with a lower probability are left out.",
    options.real(0, 1),
    default=0.5,
)
@click.option("--least", type=options.real(0, 1), hidden=True)
@options.number("--seed", "Random seed.", 0, minimum=0, maximum=MAX_SEED)
@options.option(
    "--annotations PATH",
    "Object annotations, to test localisation. Give boxes (.csv), a folder of label masks, or COCO (.json).",
)
@click.option("--all", "show_all", is_flag=True, help="Print all rows of the table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def recommend_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Find the best method, score and layer for a model on your images.

    FOLDER can also be an image file, a glob, a list or an archive, as for `gradcam batch`. About 24 images of different
    classes are enough, and annotations are optional. The command measures how well heatmaps answer two questions.

    Which of several objects belongs to the class? The test images are mosaics of four images of four classes. "order"
    is how often a pixel in the image of the explained class has a higher value than a pixel in the other three images.
    A random heatmap has an "order" of 0.5.

    Where is the object? "ROAD" is high if removing the most relevant pixels lowers the probability much more than
    removing the least relevant pixels. With --annotations, "on objects" replaces "ROAD". "on objects" is how often a
    pixel on the annotated object has a higher value than a pixel outside the object.

    A combination of method, score and layer replaces the default only if it is significantly better, after correction
    for all combinations. This test needs 8 images or more. "mass", the share of the heatmap in the class's image,
    does not affect the choice, because sharpening a heatmap raises "mass". Unreadable images are reported and left out,
    and the exit status is 1.
    """
    output = OutputMode(as_json, quiet)
    terminal.import_torch()
    from gradcam.evaluation.annotations import read_annotations
    from gradcam.evaluation.recommendation import recommend, resolve_layer_names
    from gradcam.sources.collect import list_inputs

    if (old_value := params.pop("least")) is not None:
        click.echo(f"--least is now --min-probability. The old name will be removed in gradcam {REMOVED_IN}.", err=True)
        params["min_probability"] = old_value
    start, choice, layers = time.perf_counter(), to_model_choice(params), params["layers"]
    with terminal.report_waits(output):
        listing = list_inputs(inputs)
        classifier = _load(choice, layers)
        options = {name: params[name] for name in ("scores", "min_probability", "seed", "reshape")}
        options["layers"] = resolve_layer_names(classifier.model, layers) if layers else None
        print_notes(classifier.notes, output)
        names, path = [item.name for item in listing.items], params["annotations"]
        annotations = None if path is None else read_annotations(path, names=names, find_class=classifier.find_class)
        items = _sample(listing.items, params["limit"], params["seed"])
        with terminal.show_pass_progress(output) as progress:
            images, options["objects"], failed = _read(classifier, items, annotations)
            options["methods"] = params["methods"] or None
            recommendation = recommend(classifier, images, progress=progress, **options)
    counts = {"input_count": len(listing.items), "sampled_count": len(items), "failed": failed}
    words = ["gradcam", "run", "photo.jpg", *choice.to_words()]
    words += [] if params["reshape"] is None else ["--reshape", to_word(params["reshape"])]
    title = f"{click.style(recommendation.model, bold=True)} on {classifier.device}"
    seconds = f"{time.perf_counter() - start:.1f} s"
    format_text = partial(_format, recommendation, words, counts, title, seconds, show_all=params["show_all"])
    print_outcome(None, partial(_to_json, recommendation, words, counts), format_text, output)
    return int(failed > 0)


def _load(choice: ModelChoice, layers: Sequence[str]) -> Classifier:
    """Load the model with its default layer, which is the baseline. Without a default, use the first given layer."""
    try:
        return load_model(choice)
    except LayerError:
        if not layers:
            raise
        return load_model(choice, layer=layers[0])


def _sample(items: Sequence[InputImage], limit: int, seed: int) -> list[InputImage]:
    """Sample images at random, because the first images of a folder may all belong to one class. Keep the order."""
    import torch

    from gradcam.evaluation.subject import make_generator

    if len(items) <= limit:
        return list(items)
    generator = make_generator(seed, "pictures")
    indices = torch.randperm(len(items), generator=generator, dtype=torch.int64, device="cpu")[:limit]
    return [items[index] for index in sorted(indices.tolist())]


def _read(
    classifier: Classifier, items: Sequence[InputImage], annotations: Annotations | None
) -> tuple[dict[str, Tensor], dict[str, dict[int, Tensor]], int]:
    """Read the images. Return their tensors, the masks of their annotated objects, and the number of failures."""
    from gradcam.batch.read_items import read_item

    images, objects, failed = {}, {}, 0
    for item in items:
        prepared = read_item(classifier, replace(item, wanted=None)).picture  # Classes in an image list are ignored.
        if isinstance(prepared, GradcamError):
            failed += 1
            terminal.print_above_bar(str(prepared))
        else:
            images[item.name] = prepared.image
            if annotations is not None:
                objects[item.name] = _find_objects(classifier, annotations, item.name, prepared)
    return images, objects, failed


def _find_objects(classifier: Classifier, annotations: Annotations, name: str, prepared: Prepared) -> dict[int, Tensor]:
    """Return a mask for each class that is annotated in an image, in pixels of the model's input."""
    from gradcam.models.preprocess import find_canvas

    canvas, size = find_canvas(classifier.preprocess, prepared), prepared.reading.picture.shape[:2]
    masks = {}
    for label in annotations.classes(name):
        masks[label] = annotations.truth(name, canvas, prepared.image.shape[1:], label, image_size=size)
    return {label: truth.masks[0] for label, truth in masks.items() if truth is not None}


def _to_json(recommendation: Recommendation, words: Sequence[str], counts: dict[str, int]) -> str:
    record = recommendation.to_dict()
    for name in ("single_object", "several_objects"):
        record[name] |= {"command": _to_command(getattr(recommendation, name), words)}
    return json.dumps({"schema": SCHEMA, **add_old_keys(RECOMMEND, record | counts)})


def _format(
    result: Recommendation, words: Sequence[str], counts: dict[str, int], model: str, seconds: str, *, show_all: bool
) -> str:
    """Format the title, the table, the best combination for each question, and the commands to use it."""
    height, width = result.size
    size = f"{terminal.plural(result.mosaics, 'mosaic')} of {width} x {height}"
    title = [model, _count_images(len(result.images), *counts.values()), size, f"seed {result.seed}", seconds]
    special_rows = {id(row) for row in (result.default, result.single_object.row, result.several_objects.row)}
    rows = enumerate(result.rows)
    listed = [row for rank, row in rows if show_all or rank < MAX_ROWS or id(row) in special_rows]
    lines = ["   ".join(title), "", *_table(listed, result), ""]
    if len(listed) < len(result.rows):
        lines.append(f"{len(listed)} of {len(result.rows)} combinations are listed. Use --all to list them all.")
    lines += [f"{name} cannot be used: {reason}" for name, reason in result.left_out.items()]
    if len(result.images) < MIN_IMAGES_TO_COMPARE:
        few = f"{len(result.images)} images are too few to compare: {MIN_IMAGES_TO_COMPARE} or more are needed."
        lines.append(f"{few} The default is therefore recommended.")
    for question, answer in ((SINGLE_QUESTION, result.single_object), (SEVERAL_QUESTION, result.several_objects)):
        lines += [f"{click.style(question, bold=True)} {_explain(answer, result)}", f"  {_to_command(answer, words)}"]
    return "\n".join(lines)


def _count_images(used: int, given: int, sampled: int, failed: int) -> str:
    red_failed = click.style("failed", fg="red")
    excluded = {"not sampled": given - sampled, red_failed: failed, "not in a mosaic": sampled - failed - used}
    exclusions = [f"{count} {reason}" for reason, count in excluded.items() if count]
    return ", ".join([f"{used} of {terminal.plural(given, 'image')}", *exclusions])


def _to_command(answer: Answer, words: Sequence[str]) -> str:
    """Return the command that explains an image with the recommended combination."""
    combination = answer.row.combination
    score = [] if combination.score in (None, "logit") else ["--score", str(combination.score)]
    return terminal.quote_command([*words, "--method", combination.method, *score, "--layer", combination.layer])


def _explain(answer: Answer, result: Recommendation) -> str:
    """Describe the recommended combination and the reason for it."""
    number, leader = NUMBERS[answer.measure], answer.leader
    if result.default is None or answer.gain is None:
        return f"{answer.row.combination} has the best {number}. The default cannot be used."
    if leader is result.default:
        return f"The default, {leader.combination}: no other combination has a better {number}."
    if answer.is_clear:
        road_gain = None if answer.measure == "road" else answer.road_gain
        faithful = "" if road_gain is None else f" and its ROAD is {_describe(road_gain)}"
        default = f"the default, {result.default.combination}"
        return f"{leader.combination}: compared with {default}, its {number} is {_describe(answer.gain)}{faithful}."
    keep = f"Keep the default, {result.default.combination}. {leader.combination} has the best {number}"
    if answer.is_unfaithful and answer.gain.low > 0:
        return f"{keep}, {_describe(answer.gain)}, but its ROAD is {_describe(cast('Interval', answer.road_gain))}."
    comparison = "compared with the default, after correction for all combinations"
    return f"{keep}. This {number} is {_describe(answer.gain)}, {comparison}."


def _table(rows: Sequence[Row], recommendation: Recommendation) -> list[str]:
    columns = [name for name in COLUMNS if name != "objects" or rows[0].objects is not None]
    titles = ("method", "score", "layer", *(COLUMNS[name] for name in columns))
    cells = [titles]
    for row in rows:
        names = row.combination.method, row.combination.score or "-", row.combination.layer
        cells.append((*names, *(_cell(row, name) for name in columns)))
    single, several = recommendation.single_object.row, recommendation.several_objects.row
    marks = {"1": single, "4": several, "*": recommendation.default}
    prefixes = ["".join(mark if row is marked_row else " " for mark, marked_row in marks.items()) for row in rows]
    table = [f"{mark} {line}" for mark, line in zip(["   ", *prefixes], terminal.align(cells, "  "))]
    styled = [click.style(line, fg="green", bold=True) if {*line[:2]} != {" "} else line for line in table]
    return [*styled, "", "1: best for one object   4: best for several objects   *: default"]


def _cell(row: Row, name: str) -> str:
    interval: Interval | None = getattr(row, name)
    if interval is None or not interval.n:
        return "-"
    if name in ("mass", "maximum"):
        return f"{interval.mean:.2f}"
    between = f" [{_number(interval.low)}, {_number(interval.high)}]" if interval.is_known else ""
    return _number(interval.mean) + between


def _number(value: float) -> str:
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def _describe(difference: Interval) -> str:
    if not difference.excludes(0):
        interval = f"{difference.mean:+.3f}, between {difference.low:+.3f} and {difference.high:+.3f}"
        return f"not significantly different ({interval})"
    word = "higher" if difference.mean > 0 else "lower"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{word} by {abs(difference.mean):.3f} (between {low:.3f} and {high:.3f})"
