"""What was asked of a map, what came out, and the verdict on it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from gradcam.errors import GradcamError, ImageError, shorten, show_fields
from gradcam.evaluation.checks.tests import MARKED, find_marked
from gradcam.evaluation.subject import to_unit
from gradcam.images.draw import GAP, colour_bar, overlay, scale, stack
from gradcam.images.read import Pixels
from gradcam.images.sheets import INK, MARGIN, WHITE
from gradcam.inspection.sheets import LABEL, PALE, TEXT, TITLE, find_font, measure_text

if TYPE_CHECKING:
    from gradcam.evaluation.checks.tests import Exhibits


COLUMNS = 6  # the map as it is, or the picture that is covered by it, and five others
LEAST = 900  # pixels of width, for sentences
LINE = 20  # a line of text
BAR = 140  # the length of the colour bar
COLOURS = {"passed": (15, 115, 55), "doubtful": (170, 100, 0), "failed": (190, 25, 25)}


@dataclass(frozen=True)
class _Cell:
    picture: Pixels
    caption: str


def draw_check(verdict: Verdict, *, height: int = 150) -> Pixels:
    """What the verdict is, and for each test its outcome, question, reason and pictures: RGB, uint8 (H,W,3).

    Shown is the part of the picture that the network saw. Raises `ImageError` for a height that is no number of pixels.
    """
    if isinstance(height, bool) or not isinstance(height, int) or height < 1:
        raise ImageError(f"height is {shorten(height)}, expected the height of each picture in pixels, 1 or more.")
    picture = scale(verdict.picture, height)
    rows = {
        "randomisation": _randomised(verdict, picture),
        "classes": _classes(verdict, picture),
        "covering": _covered(verdict, picture),
        "stability": _noisy(verdict, picture),
    }
    width = max(LEAST, COLUMNS * (picture.shape[1] + GAP) - GAP)
    blocks = [_draw_heading(verdict, width)]
    blocks += [_draw_test(test, rows[test.name], width) for test in verdict.tests]
    return np.pad(stack(blocks), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def _randomised(verdict: Verdict, picture: Pixels) -> list[_Cell]:
    found = verdict.exhibits.randomisation
    chosen = _spread(len(found.layers), COLUMNS - 1)
    cells = [
        _Cell(_lay(picture, found.heatmaps[0, i]), f"{found.correlations[0, i]:.2f}   from {found.layers[i]}")
        for i in chosen
    ]
    return [_as_it_is(verdict, picture), *cells]


def _classes(verdict: Verdict, picture: Pixels) -> list[_Cell]:
    found = verdict.exhibits
    cells = []
    for index, heatmap, likeness in zip(found.rivals, found.rival_maps, found.likeness):
        label = f"class {index}" if verdict.labels is None else verdict.labels[index]
        cells.append(_Cell(_lay(picture, heatmap), f"{likeness:.2f}   {label}"))
    return [_as_it_is(verdict, picture), *cells[: COLUMNS - 1]]


def _covered(verdict: Verdict, picture: Pixels) -> list[_Cell]:
    found = verdict.exhibits.covering
    share = min(range(len(found.shares)), key=lambda i: abs(found.shares[i] - MARKED))
    maps = [verdict.exhibits.heatmap, *found.placed[0, : COLUMNS - 1]]
    left = [found.own[0, share], *found.elsewhere[0, : COLUMNS - 1, share]]
    names = [f"its top {found.shares[share]:.0%} covered", *["elsewhere"] * (COLUMNS - 1)]
    return [
        _Cell(_cover(picture, heatmap, found.shares[share], verdict.seed), f"{probability:.2f}   {name}")
        for heatmap, probability, name in zip(maps, left, names)
    ]


def _noisy(verdict: Verdict, picture: Pixels) -> list[_Cell]:
    found = verdict.exhibits
    length = float(found.heatmap.norm()) or 1.0
    changes = (found.noisy_maps - found.heatmap).flatten(1).norm(dim=1) / length
    worst = changes.argsort(descending=True, stable=True)[: COLUMNS - 1].tolist()
    cells = [_Cell(_lay(picture, found.noisy_maps[i]), f"{changes[i]:.2f}   with noise") for i in worst]
    return [_as_it_is(verdict, picture), *cells]


def _as_it_is(verdict: Verdict, picture: Pixels) -> _Cell:
    return _Cell(_lay(picture, verdict.exhibits.heatmap), "the map as it is")


def _lay(picture: Pixels, heatmap: Tensor) -> Pixels:
    return overlay(picture, to_unit(heatmap[None])[0])


def _cover(picture: Pixels, heatmap: Tensor, share: float, seed: int) -> Pixels:
    """The picture with the map's top share in its mean colour, as the network saw it."""
    marked = find_marked(heatmap[None], share, seed)[:, None].float().cpu()
    mask = F.interpolate(marked, size=picture.shape[:2], mode="nearest-exact")[0, 0].numpy() > 0
    covered = picture.copy()
    covered[mask] = picture.mean((0, 1)).round()
    return covered


def _spread(count: int, most: int) -> list[int]:
    """The first, the last, and evenly between."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _draw_heading(verdict: Verdict, width: int) -> Pixels:
    """What is explained, the verdict, and the colours."""
    place = "" if verdict.layer is None else f" at {verdict.layer}"
    title = f"{verdict.class_name}, {verdict.probability:.0%}, by {verdict.method}{place} in {verdict.model}"
    lines = _wrap(f"Passed means not refuted, never correct. {verdict.caution}", width, TEXT)
    bar = colour_bar(BAR, LINE - 8)
    canvas = Image.new("RGB", (width, 2 * LINE + len(lines) * LINE + LINE), WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((0, LINE), verdict.outcome, COLOURS[verdict.outcome], find_font(TITLE), anchor="ls")
    left = measure_text(verdict.outcome, TITLE) + 2 * GAP
    draw.text((left, LINE), _fit(title, width - left, TITLE), INK, find_font(TITLE), anchor="ls")
    for number, line in enumerate(lines):
        draw.text((0, (number + 2) * LINE), line, PALE, find_font(TEXT), anchor="ls")
    base = canvas.height - LINE // 2 + 4
    draw.text((0, base), "no evidence", PALE, find_font(LABEL), anchor="ls")
    start = measure_text("no evidence", LABEL) + GAP
    canvas.paste(Image.fromarray(bar), (start, base - bar.shape[0] + 1))
    draw.text((start + BAR + GAP, base), "most, in each map by itself", PALE, find_font(LABEL), anchor="ls")
    return np.array(canvas)


def _draw_test(test: Test, cells: Sequence[_Cell], width: int) -> Pixels:
    lines = _wrap(f"{test.reason} ({test.thresholds})", width, TEXT)
    height = max(cell.picture.shape[0] for cell in cells)
    top = LINE + len(lines) * LINE + GAP
    canvas = Image.new("RGB", (width, GAP + top + height + LINE), WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((0, LINE), test.outcome, COLOURS[test.outcome], find_font(TITLE), anchor="ls")
    draw.text((measure_text(test.outcome, TITLE) + 2 * GAP, LINE), test.question, INK, find_font(TITLE), anchor="ls")
    for number, line in enumerate(lines):
        draw.text((0, (number + 2) * LINE), line, PALE, find_font(TEXT), anchor="ls")
    for place, cell in enumerate(cells):
        across = cell.picture.shape[1]
        left = place * (max(across, (width + GAP) // COLUMNS - GAP) + GAP)
        canvas.paste(Image.fromarray(cell.picture), (left, GAP + top))
        caption = _fit(cell.caption, max(across, (width + GAP) // COLUMNS - GAP), LABEL)
        draw.text((left, GAP + top + height + 4), caption, INK, find_font(LABEL))
    return np.array(canvas)


def _wrap(text: str, width: int, size: int) -> list[str]:
    """Lines of words that are no longer than so many pixels, as far as words can be."""
    return [*_lines(text.split(), width, size)]


def _lines(words: Sequence[str], width: int, size: int) -> Iterator[str]:
    line = ""
    for word in words:
        longer = f"{line} {word}".strip()
        if line and measure_text(longer, size) > width:
            yield line
            longer = word
        line = longer
    yield line


def _fit(text: str, width: int, size: int) -> str:
    """The text, or as much of it as so many pixels hold."""
    if measure_text(text, size) <= width:
        return text
    ends = (end for end in range(len(text), 0, -1) if measure_text(f"{text[:end].rstrip()}...", size) <= width)
    return f"{text[: next(ends, 0)].rstrip()}..."


# No torch is imported here: what a verdict says is told where nothing is computed any more.


Outcome = Literal["passed", "doubtful", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "doubtful", "failed")  # from the best to the worst
PASSED = "passed means that nothing here refuted the map, never that it is correct"

QUESTIONS = {
    "randomisation": "Does the map change when the weights are randomised?",
    "classes": "Does it differ between classes?",
    "covering": "Does covering what it marks lower the score more than covering as much elsewhere?",
    "stability": "Is it stable under noise?",
}


@dataclass(frozen=True)
class Thresholds:
    """From where on a value passes, and from where on it fails; between them it is doubtful."""

    passes: float
    fails: float

    def judge(self, value: float) -> Outcome:
        """The outcome of this value; what is no number fails."""
        sign = 1 if self.passes < self.fails else -1
        if sign * value <= sign * self.passes:
            return "passed"
        return "doubtful" if sign * value < sign * self.fails else "failed"

    def __str__(self) -> str:
        passes, fails = ("up to", "from") if self.passes < self.fails else ("from", "up to")
        return f"passes {passes} {self.passes:.2f}, fails {fails} {self.fails:.2f}"


@dataclass(frozen=True)
class Test:
    """One question, and how the map fared: `value` is what the thresholds are for, `reason` says it in a sentence."""

    name: str
    question: str
    outcome: Outcome
    value: float
    thresholds: Thresholds
    reason: str

    __repr__ = show_fields


@dataclass(frozen=True, eq=False)
class Verdict:
    """What four tests make of one explanation of one picture. "passed" means not refuted, never correct.

    `tests`: in the order of `QUESTIONS`. `calibrated`: whether the thresholds were measured on this very model.
    `index`, `label`, `probability`: of the class that is explained. `layer`: None where the method looks at none, or nobody
    knows. `labels`: of all classes. `picture`: what the network saw of it. `exhibits`: what the panel shows. `doubt`: why
    the map may lie in wrong places, None where nothing says so.
    """

    tests: tuple[Test, ...]
    calibrated: bool
    model: str
    method: str
    layer: str | None
    score: str
    index: int
    label: str | None
    probability: float
    seed: int
    labels: Sequence[str] | None = field(repr=False)
    picture: Pixels = field(repr=False)
    exhibits: Exhibits = field(repr=False)
    doubt: str | None = None

    def __repr__(self) -> str:
        tests = ", ".join(f"{test.name} {test.outcome} ({test.value:.2g})" for test in self.tests)
        place = "" if self.layer is None else f" at {self.layer}"
        doubt = f"; {shorten(self.doubt)}" if self.doubt else ""
        return f"Verdict({self.outcome}: {shorten(self.class_name)} by {self.method}{place}; {tests}{doubt})"

    @property
    def outcome(self) -> Outcome:
        """The worst of the tests'; of a map that may lie in wrong places it is failed."""
        return "failed" if self.doubt else max((test.outcome for test in self.tests), key=OUTCOMES.index)

    @property
    def class_name(self) -> str:
        """The class's label and index."""
        return f"class {self.index}" if self.label is None else f"{self.label} ({self.index})"

    @property
    def caution(self) -> str:
        """Why the map may lie in wrong places, if it may, and how far the thresholds are to be trusted, in sentences."""
        return " ".join(filter(None, (self.doubt, self._calibration)))

    @property
    def _calibration(self) -> str:
        known = read_calibration()
        if self.calibrated:
            return f"The thresholds were calibrated on this model, with {known['method']} at {known['layer']}."
        measured = f"they were measured on {known['model']}, as it comes with gradcam"
        return f"The thresholds are uncalibrated for this model: {measured}. Take them as a guide."

    def panel(self, *, height: int = 150) -> Pixels:
        """A picture that shows each test: RGB, uint8 (H,W,3), with cells of `height` pixels.

        Raises `ImageError` for a height that is not a number of pixels.
        """

        return draw_check(self, height=height)

    def to_record(self) -> dict[str, Any]:
        """All of it but the exhibits, as what JSON has."""
        names = ("model", "method", "layer", "score", "index", "label", "probability", "seed", "calibrated", "outcome")
        tests = [
            {
                "name": test.name,
                "outcome": test.outcome,
                "value": test.value,
                "passes": test.thresholds.passes,
                "fails": test.thresholds.fails,
                "reason": test.reason,
            }
            for test in self.tests
        ]
        return {**{name: getattr(self, name) for name in names}, "doubt": self.doubt, "tests": tests}


@functools.cache
def read_calibration() -> dict[str, Any]:
    """What `scripts/calibrate_check` wrote: the model, its weights' hash, the thresholds, and the values behind them."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("thresholds.json").read_text("utf-8"))
    return found


def read_thresholds() -> dict[str, Thresholds]:
    """The calibrated thresholds of each test."""
    return {name: Thresholds(**found) for name, found in read_calibration()["thresholds"].items()}


def set_thresholds(knowing: Sequence[float], ignorant: Sequence[float]) -> Thresholds:
    """Thresholds between the values of maps that know the model and of those that do not, where lower is better.

    The worst of the former and the best of the latter leave a gap: its first third passes, its last one fails. Rounded to
    two digits. Raises `GradcamError` where there is no gap.
    """
    worst, best = max(knowing), min(ignorant)
    gap = best - worst
    if gap <= 0:
        raise GradcamError(
            f"Maps that know the model have up to {worst:.4g}, those that do not from {best:.4g}: no gap."
        )
    return Thresholds(round(best - gap * 2 / 3, 2), round(best - gap / 3, 2))
