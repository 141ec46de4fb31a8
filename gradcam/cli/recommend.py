"""`gradcam recommend`: which method, score and layer are best for a model, on one's own pictures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gradcam.cam.methods.table import METHODS, find_method
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, say, tell
from gradcam.cli._settings import ModelChoice, Output, to_model_choice, to_word
from gradcam.cli._terminal import count, import_torch, shown_passes, telling_waits, to_command
from gradcam.errors import GradcamError, LayerError, printable
from gradcam.options import SCORES
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.evaluation.intervals import Interval
    from gradcam.evaluation.recommendation import Recommendation, Row
    from gradcam.models.classifier import Classifier
    from gradcam.sources.contents import Item

TITLES = ("method", "score", "layer", "mass ↑", "maximum ↑", "ROAD ↑", "mass, to the most")
MOST_ROWS = 16


def _find_methods(names: Sequence[str]) -> list[str]:
    found = {name: find_method(name) for name in names}
    for method in found.values():
        if not method.has_layer:
            raise GradcamError(f"{method.name} looks at no layer: leave it out.")
    return [method.name if METHODS.get(method.name) == method else name for name, method in found.items()]


def _find_scores(names: Sequence[str]) -> list[str]:
    if unknown := [name for name in names if name.lower() not in SCORES]:
        raise GradcamError(f"There is no score {unknown[0]!r}: choose some of {', '.join(SCORES)}.")
    return [name.lower() for name in names]


@click.command("recommend", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="FOLDER...")
@options.model
@options.layer("Layer to try, as `gradcam layers` lists it; repeatable.  [default: a handful]", "layers", multiple=True)
@options.several(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=_find_methods,
    known=METHODS,
    help="Method to try; repeatable.  [default: those of one forward pass]",
)
@options.several(
    "--score",
    "scores",
    metavar="NAME[,NAME]",
    default=tuple(SCORES),
    find=_find_scores,
    known=SCORES,
    help=f"Score to try; repeatable.  [default: {','.join(SCORES)}]",
)
@options.number("--limit", "Pictures at most; of more, so many are drawn.", 24, least=4)
@click.option(
    "--least",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    metavar="P",
    help="Pictures whose class is less probable are left out.",
)
@options.number("--seed", "Of all that is drawn.", 0, least=0)
@click.option("--all", "show_all", is_flag=True, help="All rows of the table, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as one line of JSON, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def recommend_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Try methods, scores and layers on pictures, and say which are best: no annotations are needed.

    Takes files, folders, globs, lists and archives, as `gradcam batch` does; a dozen pictures of a dozen classes are enough.
    In mosaics of four pictures of four classes it is measured how much of a class's map is on the class's own picture, and
    how often the maximum is; chance is 0.25. Of the combinations that are not clearly worse than the best in that, the one
    with the best ROAD is recommended: covering what it marks lowers the probability most, against covering the rest.

    Intervals hold 95 % of what other pictures like these would give. A picture that cannot be read is named, left out, and
    the status is 1.

    \b
      gradcam recommend photos/
      gradcam recommend photos/ --model resnet50 --method gradcam,layercam -l layer4 -l layer3
    """
    output = Output(as_json, quiet)
    import_torch()
    from gradcam.evaluation.recommendation import check_layers, recommend
    from gradcam.sources.list import list_inputs

    start, choice, layers = time.perf_counter(), to_model_choice(chosen), chosen["layers"]
    with telling_waits(output):
        listing = list_inputs(inputs)
        classifier = _load(choice, layers)
        options = {name: chosen[name] for name in ("scores", "least", "seed", "reshape")}
        options["layers"] = check_layers(classifier.model, layers) if layers else None
        say(classifier.notes, output)
        items = _draw(listing.items, chosen["limit"], chosen["seed"])
        with shown_passes(output) as progress:
            pictures, failed = _read(classifier, items)
            found = recommend(classifier, pictures, methods=chosen["methods"] or None, progress=progress, **options)
    seconds, given, taken = time.perf_counter() - start, len(listing.items), len(items)
    device = str(classifier.device)
    result = RecommendResult(found, choice, chosen["reshape"], device, given, taken, failed, seconds)
    tell(None, result.to_json, partial(result.format, show_all=chosen["show_all"]), output)
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


def _read(classifier: Classifier, items: Sequence[Item]) -> tuple[dict[str, Tensor], int]:
    from tqdm import tqdm

    from gradcam.batch.read import read_item

    pictures, failed = {}, 0
    for item in items:
        picture = read_item(classifier, replace(item, wanted=None)).picture  # what a list asks for is not looked at
        if isinstance(picture, GradcamError):
            failed += 1
            tqdm.write(printable(str(picture)), file=sys.stderr)
        else:
            pictures[item.name] = picture.image
    return pictures, failed


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
        numbers = {"given": self.given, "taken": self.taken, "failed": self.failed}
        return json.dumps({"schema": SCHEMA, **self.found.to_dict(), **numbers, "command": self._command()})

    def format(self, *, show_all: bool) -> str:
        """Several lines: what was measured, the table, which combination is the best, and what to type."""
        found = self.found
        height, width = found.size
        title = [f"{click.style(found.model, bold=True)} on {self.device}", self._pictures()]
        title += [
            f"{count(found.mosaics, 'mosaic')} of {width} x {height}",
            f"seed {found.seed}",
            f"{self.seconds:.1f} s",
        ]
        firsts = (row for place, row in enumerate(found.rows) if place < MOST_ROWS or row is found.default)
        rows = found.rows if show_all else tuple(firsts)
        lines = ["   ".join(title), "", *_table(rows, found), ""]
        if len(rows) < len(found.rows):
            lines.append(f"{len(rows)} of {len(found.rows)} combinations; --all shows the others.")
        lines += [f"{it} has no map: {reason}" for it, reason in found.left_out.items()]
        return "\n".join([*lines, self._sentence(), "", f"  {self._command()}"])

    def _pictures(self) -> str:
        taken = len(self.found.pictures)
        left = {
            "not drawn": self.given - self.taken,
            click.style("failed", fg="red"): self.failed,
            "not in a mosaic": self.taken - self.failed - taken,
        }
        said = [f"{it} {why}" for why, it in left.items() if it]
        return ", ".join([f"{taken} of {count(self.given, 'picture')}", *said])

    def _sentence(self) -> str:
        from gradcam.evaluation.intervals import FEWEST

        found = self.found
        if not found.best.mass.is_known:
            few = f"{len(found.pictures)} pictures are too few to recommend anything but the default: that takes"
            return f"{few} {FEWEST}. {found.best.combination} has the best ROAD of these."
        best = f"{found.best.combination} is the best here"
        if found.is_default:
            return f"{best}: it is what is taken where nothing is said."
        if found.default is None or found.gain is None or found.road_gain is None:
            return f"{best}."
        other = f"against the default, {found.default.combination}, its mass is {_compare(found.gain)}"
        return f"{best}: {other}, and its ROAD {_compare(found.road_gain)}."

    def _command(self) -> str:
        """The line that explains a picture with the best combination; of too few pictures, with the default."""
        best = self.found.best
        combination = (best if best.mass.is_known else self.found.default or best).combination
        words = ["gradcam", "run", "photo.jpg", *self.choice.to_words()]
        if self.reshape is not None:
            words += ["--reshape", to_word(self.reshape)]
        words += ["--method", combination.method]
        if combination.score not in (None, "logit"):
            words += ["--score", str(combination.score)]
        return to_command([*words, "--layer", combination.layer])


def _table(rows: Sequence[Row], found: Recommendation) -> list[str]:
    cells = [TITLES, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in cells]
    marked = [f"{'→' if row is found.best else '*' if row is found.default else ' '} " for row in rows]
    table = [f"{mark}{line}" for mark, line in zip(["  ", *marked], lines)]
    return [click.style(line, fg="green", bold=True) if line[0] == "→" else line for line in table]


def _cells(row: Row) -> tuple[str, ...]:
    it = row.combination
    road = "-" if row.road is None else _write(row.road)
    behind = "the most" if row.behind.mean == 0 else _write(row.behind)
    clear = " clear" if row.is_clearly_less else ""
    numbers = (_write(row.mass), f"{row.maximum.mean:.2f}", road, f"{behind}{clear}")
    return (it.method, it.score or "-", it.layer, *numbers)


def _write(interval: Interval) -> str:
    between = f" [{_number(interval.low)}, {_number(interval.high)}]" if interval.is_known else ""
    return _number(interval.mean) + between


def _number(value: float) -> str:
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def _compare(difference: Interval) -> str:
    if not difference.excludes(0):
        return f"not clearly another ({difference.mean:+.3f}, between {difference.low:+.3f} and {difference.high:+.3f})"
    word = "higher" if difference.mean > 0 else "lower"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{word} by {abs(difference.mean):.3f} (between {low:.3f} and {high:.3f})"
