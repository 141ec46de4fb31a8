"""What was asked of a map, what came out, the verdict on it, and the panel that shows it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor, nn

from gradcam.errors import GradcamError, ImageError, shorten, show_fields
from gradcam.evaluation.metrics.soundness import Randomisation
from gradcam.evaluation.subject import count_pixels, rank_pixels, to_unit
from gradcam.images.draw import GAP, colour_bar, overlay, scale, stack
from gradcam.images.read import Pixels
from gradcam.images.sheets import INK, MARGIN, WHITE, find_font, fit_text, measure_text
from gradcam.inspection.sheets import LABEL, PALE, TEXT, TITLE
from gradcam.models.labels import name_class
from gradcam.options import check_count

Cell = tuple[Pixels, str]  # a picture and its caption
Outcome = Literal["passed", "doubtful", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "doubtful", "failed")  # from the best to the worst
PASSED = "passed means that nothing here refuted the map, never that it is correct"
MARKED = 0.3  # the share of the pixels that counts as marked where places are compared
QUESTIONS = {
    "randomisation": "Does the map change when the weights are randomised?",
    "classes": "Does it differ between classes?",
    "covering": "Does covering what it marks lower the score more than covering as much elsewhere?",
    "stability": "Is it stable under noise?",
}

COLUMNS = 6  # the map as it is, or the picture that is covered by it, and five others
LEAST = 900  # pixels of width, for sentences
LINE = 20  # a line of text
BAR = 140  # the length of the colour bar
COLOURS = {"passed": (15, 115, 55), "doubtful": (170, 100, 0), "failed": (190, 25, 25)}


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


@dataclass(frozen=True)
class Occlusion:
    """What is left of N probabilities when shares of the picture are covered in a map's order, and in that of P others.
    `own`: float32 (N,S), by the map. `elsewhere`: float32 (N,P,S), by the same map laid elsewhere. `placed`: these maps
    (N,P,H,W). `rates`: (N,) in [0,1], the share of the P over which the map's own mean is lower; ties count half."""

    shares: tuple[float, ...]
    own: Tensor
    elsewhere: Tensor
    placed: Tensor = field(repr=False)

    @property
    def rates(self) -> Tensor:
        own, elsewhere = self.own.mean(1, keepdim=True), self.elsewhere.mean(2)
        return ((elsewhere > own).float() + (elsewhere == own).float() / 2).mean(1)


@dataclass(frozen=True, eq=False)
class Exhibits:
    """Of one image: its map (H,W), how alike the maps of other classes and other weights are, what occlusion does.
    `rivals`: the most probable other class, and others drawn by chance; `rival_maps` (K,H,W), and `likeness` (K,),
    their rank correlation with the map. `sensitivity`: its largest relative change among `noisy_maps` (S,H,W)."""

    heatmap: Tensor
    randomisation: Randomisation
    rivals: tuple[int, ...]
    rival_maps: Tensor
    likeness: Tensor
    occlusion: Occlusion
    sensitivity: float
    noisy_maps: Tensor

    __repr__ = show_fields

    @property
    def is_constant(self) -> bool:
        """Whether the map is the same everywhere, and marks nothing."""
        return bool(self.heatmap.amax() == self.heatmap.amin())

    @property
    def values(self) -> dict[str, float]:
        """The number of each test. That of classes is of those drawn by chance, where there are any."""
        by_chance = self.likeness[1:] if len(self.likeness) > 1 else self.likeness
        found = self.randomisation.correlations.mean(), by_chance.mean(), self.occlusion.rates
        return dict(zip(QUESTIONS, (*map(float, found), self.sensitivity)))


@dataclass(frozen=True, eq=False)
class Verdict:
    """What four tests make of one explanation of one picture. "passed" means not refuted, never correct.

    Attributes
    ----------
    tests : tuple of Test
        In the order of their questions; each has a `name`, `outcome`, `value` and `reason`.
    calibrated : bool
        Whether the thresholds were measured on this very model.
    model : str
        The classifier's name.
    method : str
        The method's name.
    layer : str or None
        None where the method looks at none, or nobody knows.
    score : str
        Which number of the class was explained.
    index : int or None
        The explained class; None where something else than a class is explained.
    label : str or None
        Its name.
    probability : float
        Its probability.
    seed : int
        Of all that was drawn.
    labels : sequence of str or None
        Of all classes.
    picture : array (H,W,3)
        What the network saw of it: RGB, uint8.
    exhibits : Exhibits
        What the panel shows.
    doubt : str or None
        Why the map may lie in wrong places; None where nothing says so.
    title : str or None
        What is explained in place of a class, as people call it: "box 0, person".
    thing : mapping
        The same by the keys that a record has for it: "box", "number", "text" and so on.

    Examples
    --------
    >>> import gradcam
    >>> verdict = gradcam.evaluation.check(gradcam.load_classifier(), "photos/coffee.jpg", method="centre")
    >>> verdict.outcome, verdict.class_name
    ('failed', 'espresso (967)')
    >>> verdict.caution
    'The thresholds were calibrated on this model, with gradcam at layer4.'
    >>> verdict.to_record()["tests"][0]["outcome"]
    'failed'
    >>> gradcam.write_image("verdict.png", verdict.panel())
    """

    tests: tuple[Test, ...]
    calibrated: bool
    model: str
    method: str
    layer: str | None
    score: str
    index: int | None
    label: str | None
    probability: float
    seed: int
    labels: Sequence[str] | None = field(repr=False)
    picture: Pixels = field(repr=False)
    exhibits: Exhibits = field(repr=False)
    doubt: str | None = None
    title: str | None = None
    thing: Mapping[str, Any] = field(default_factory=dict)

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
        """The explained class, by its label and index, or what else is explained."""
        return self.title or name_class(self.index, self.label, with_index=True)

    @property
    def caution(self) -> str:
        """Why the map may lie in wrong places, if it may, and how far the thresholds are to be trusted, in sentences."""
        known = read_calibration()
        measured = f"they were measured on {known['model']}, as it comes with gradcam"
        said = f"The thresholds are uncalibrated for this model: {measured}. Take them as a guide."
        if self.calibrated:
            said = f"The thresholds were calibrated on this model, with {known['method']} at {known['layer']}."
        return f"{self.doubt} {said}" if self.doubt else said

    def panel(self, *, height: int = 150) -> Pixels:
        """Draw each test in a row.

        Parameters
        ----------
        height : int, default 150
            Of each cell, in pixels. Shown is the part that the network saw.

        Returns
        -------
        array (H,W,3)
            RGB, uint8.

        Raises
        ------
        ImageError
            For a height that is not a number of pixels.
        """
        check_count(height, "height", "the height of each picture in pixels, 1 or more.", error=ImageError)
        picture = scale(self.picture, height)
        cells = _list_cells(self, picture)
        width = max(LEAST, COLUMNS * (picture.shape[1] + GAP) - GAP)
        blocks = [_draw_heading(self, width), *(_draw_test(test, cells[test.name], width) for test in self.tests)]
        return np.pad(stack(blocks), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)

    def to_record(self) -> dict[str, Any]:
        """Write all of it but the exhibits, as what JSON has."""
        names = ("model", "method", "layer", "score", "index", "label", "probability", "seed", "calibrated", "outcome")
        tests = [
            {"name": it.name, "outcome": it.outcome, "value": it.value, **vars(it.thresholds), "reason": it.reason}
            for it in self.tests
        ]
        return {**{name: getattr(self, name) for name in names}, **self.thing, "doubt": self.doubt, "tests": tests}


@functools.cache
def read_calibration() -> dict[str, Any]:
    """What `scripts/calibrate_check` wrote: the model, its weights' hash, the thresholds, and the values behind them."""
    return json.loads(resources.files(__package__).joinpath("thresholds.json").read_text("utf-8"))


def read_thresholds() -> dict[str, Thresholds]:
    """The calibrated thresholds of each test."""
    return {name: Thresholds(**found) for name, found in read_calibration()["thresholds"].items()}


def set_thresholds(knowing: Sequence[float], ignorant: Sequence[float]) -> Thresholds:
    """Thresholds between the values of maps that know the model and of those that do not, where lower is better. The
    worst of the former and the best of the latter leave a gap: its first third passes, its last one fails. Rounded to
    two digits. Raises `GradcamError` where there is no gap."""
    low, high = max(knowing), min(ignorant)
    gap = high - low
    if gap <= 0:
        raise GradcamError(f"Maps that know the model have up to {low:.4g}, those that do not from {high:.4g}: no gap.")
    return Thresholds(round(high - gap * 2 / 3, 2), round(high - gap / 3, 2))


def find_marked(heatmaps: Tensor, share: float, seed: int = 0) -> Tensor:
    """The most relevant share of the pixels, bool (N,H,W)."""
    return rank_pixels(heatmaps, seed) < count_pixels(share, heatmaps[0].numel())


def _list_cells(verdict: Verdict, picture: Pixels) -> dict[str, list[Cell]]:
    exhibits, most = verdict.exhibits, COLUMNS - 1

    def lay(heatmap: Tensor, caption: str) -> Cell:
        return overlay(picture, to_unit(heatmap[None])[0]), caption

    drawn = exhibits.randomisation
    count = len(drawn.layers)
    # The first, the last, and evenly between.
    chosen = range(count) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
    tops = [(drawn.heatmaps[0, i], f"{drawn.correlations[0, i]:.2f}   from {drawn.layers[i]}") for i in chosen]
    labels = [name_class(it, None if verdict.labels is None else verdict.labels[it]) for it in exhibits.rivals[:most]]
    of_classes = zip(exhibits.rival_maps, exhibits.likeness, labels)
    changes = (exhibits.noisy_maps - exhibits.heatmap).flatten(1).norm(dim=1) / (float(exhibits.heatmap.norm()) or 1.0)
    worst = changes.argsort(descending=True, stable=True)[:most].tolist()
    found = exhibits.occlusion
    place = min(range(len(found.shares)), key=lambda i: abs(found.shares[i] - MARKED))
    share, left = found.shares[place], [found.own[0, place], *found.elsewhere[0, :most, place]]
    names = [f"its top {share:.0%} covered", *["elsewhere"] * most]
    own = lay(exhibits.heatmap, "the map as it is")
    return {
        "randomisation": [own, *(lay(heatmap, caption) for heatmap, caption in tops)],
        "classes": [own, *(lay(heatmap, f"{likeness:.2f}   {label}") for heatmap, likeness, label in of_classes)],
        "covering": [
            (_cover(picture, heatmap, share, verdict.seed), f"{probability:.2f}   {name}")
            for heatmap, probability, name in zip([exhibits.heatmap, *found.placed[0, :most]], left, names)
        ],
        "stability": [own, *(lay(exhibits.noisy_maps[i], f"{changes[i]:.2f}   with noise") for i in worst)],
    }


def _cover(picture: Pixels, heatmap: Tensor, share: float, seed: int) -> Pixels:
    """The picture with the map's top share in its mean colour, as the network saw it."""
    marked = find_marked(heatmap[None], share, seed)[:, None].float().cpu()
    mask = nn.functional.interpolate(marked, size=picture.shape[:2], mode="nearest-exact")[0, 0].numpy() > 0
    return np.where(mask[..., None], picture.mean((0, 1)).round(), picture).astype(np.uint8)


def _draw_heading(verdict: Verdict, width: int) -> Pixels:
    place = "" if verdict.layer is None else f" at {verdict.layer}"
    title = f"{verdict.class_name}, {verdict.probability:.0%}, by {verdict.method}{place} in {verdict.model}"
    lines = _wrap(f"Passed means not refuted, never correct. {verdict.caution}", width, TEXT)
    canvas = Image.new("RGB", (width, 2 * LINE + len(lines) * LINE + LINE), WHITE)
    draw = ImageDraw.Draw(canvas)
    _write(draw, verdict.outcome, fit_text(title, width - measure_text(verdict.outcome, TITLE) - 2 * GAP, TITLE), lines)
    base = canvas.height - LINE // 2 + 4
    draw.text((0, base), "no evidence", PALE, find_font(LABEL), anchor="ls")
    start, bar = measure_text("no evidence", LABEL) + GAP, colour_bar(BAR, LINE - 8)
    canvas.paste(Image.fromarray(bar), (start, base - bar.shape[0] + 1))
    draw.text((start + BAR + GAP, base), "most, in each map by itself", PALE, find_font(LABEL), anchor="ls")
    return np.array(canvas)


def _draw_test(test: Test, cells: Sequence[Cell], width: int) -> Pixels:
    lines = _wrap(f"{test.reason} ({test.thresholds})", width, TEXT)
    height = max(picture.shape[0] for picture, _ in cells)
    top = LINE + len(lines) * LINE + 2 * GAP
    canvas = Image.new("RGB", (width, top + height + LINE), WHITE)
    draw = ImageDraw.Draw(canvas)
    _write(draw, test.outcome, test.question, lines)
    for place, (picture, caption) in enumerate(cells):
        across = max(picture.shape[1], (width + GAP) // COLUMNS - GAP)
        left = place * (across + GAP)
        canvas.paste(Image.fromarray(picture), (left, top))
        draw.text((left, top + height + 4), fit_text(caption, across, LABEL), INK, find_font(LABEL))
    return np.array(canvas)


def _write(draw: ImageDraw.ImageDraw, outcome: str, title: str, lines: Sequence[str]) -> None:
    draw.text((0, LINE), outcome, COLOURS[outcome], find_font(TITLE), anchor="ls")
    draw.text((measure_text(outcome, TITLE) + 2 * GAP, LINE), title, INK, find_font(TITLE), anchor="ls")
    for number, line in enumerate(lines):
        draw.text((0, (number + 2) * LINE), line, PALE, find_font(TEXT), anchor="ls")


def _wrap(text: str, width: int, size: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and measure_text(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
