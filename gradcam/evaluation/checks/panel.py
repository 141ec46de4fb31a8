"""The picture of a verdict: each test in a row, with what it looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.evaluation.checks.findings import Exhibits, Outcome, Test
from gradcam.evaluation.checks.shams import ControlMap
from gradcam.evaluation.subject import to_unit
from gradcam.images.draw import GAP, colour_bar, overlay, scale, stack
from gradcam.images.read import Pixels
from gradcam.images.sheets import INK, LEGENDS, MARGIN, WHITE, find_font, fit_text, measure_text
from gradcam.inspection.sheets import LABEL, PALE, TEXT, TITLE
from gradcam.models.labels import name_class
from gradcam.options import check_count

Cell = tuple[Pixels, str]  # a picture and its caption

COLUMNS = 6
LEAST = 900  # pixels of width, for sentences
LINE = 20  # a line of text
BAR = 140  # the length of the colour bar
MOST = 1 / 2  # of a standard deviation of values from 0 to 1
COLOURS = {"passed": (15, 115, 55), "undecided": (170, 100, 0), "failed": (190, 25, 25)}


@dataclass(frozen=True, eq=False)
class Shown:
    """What a panel is of: the picture, the tests, the shams, what was looked at, and the classes' names."""

    picture: Pixels
    tests: Sequence[Test]
    shams: Sequence[ControlMap]
    exhibits: Exhibits
    labels: Sequence[str] | None


def draw_verdict(shown: Shown, outcome: Outcome, title: str, said: str, *, height: int) -> Pixels:
    """A panel with cells of this height. Raises `ImageError` for one that is no number of pixels."""
    check_count(height, "height", "the height of each image in pixels, 1 or more.", error=ImageError)
    picture = scale(shown.picture, height)
    width = max(LEAST, COLUMNS * (picture.shape[1] + GAP) - GAP)
    rows = [(test, _list_cells(shown, test, picture, height)) for test in shown.tests]
    blocks = [_draw_heading(outcome, title, said, width), *(_draw_test(test, cells, width) for test, cells in rows)]
    return np.pad(stack(blocks), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def _list_cells(shown: Shown, test: Test, picture: Pixels, height: int) -> list[Cell]:
    """What one test looked at: rows of six cells."""
    found = shown.exhibits
    own = _lay(picture, found.heatmap), "the original heatmap"
    if test.name == "stability":
        unsure = [] if found.uncertainty is None else [(_lay_as_it_is(picture, found.uncertainty), "uncertainty")]
        pairs = zip(found.noisy_maps, found.noisy_likeness)
        return [own, *unsure, *((_lay(picture, each), f"{value:.2f}   with noise") for each, value in pairs)][:COLUMNS]
    if test.name == "classes" and found.rival_maps is not None and found.likeness is not None:
        names = [name_class(it, None if shown.labels is None else shown.labels[it]) for it in found.rivals]
        each = zip(found.rival_maps, found.likeness, names)
        return [own, *((_lay(picture, heatmap), f"{value:.2f}   {name}") for heatmap, value, name in each)]
    if test.name == "randomisation" and found.randomisation is not None:
        drawn = found.randomisation
        stages = zip(drawn.heatmaps[0], drawn.correlations[0], drawn.layers)
        return [own, *((_lay(picture, heatmap), f"{value:.2f}   from {name} on") for heatmap, value, name in stages)]
    if (
        test.name == "placement"
        and found.ground is not None
        and found.placed is not None
        and found.ground.cells is not None
    ):
        order = found.ground.order(found.placed)[:, 0]
        trials = zip(found.ground.images, found.placed, order)
        return [
            (_lay(to_pixels(image, height), heatmap), f"{value:.2f}   in this cell") for image, heatmap, value in trials
        ]
    if test.name == "covering" and found.ground is not None and shown.shams:
        seen = to_pixels(found.ground.images[0], height)
        assert found.placed is not None  # it is there with a ground
        marks = {
            sham.name: f"{sham.effect:.2f}   {sham.name}{'' if sham.is_distinguished else ', as good'}"
            for sham in shown.shams
        }
        laid = [
            (found.placed[0], f"{test.value:.2f}   the heatmap"),
            *((it.heatmap, marks[it.name]) for it in shown.shams),
        ]
        return [(_lay(seen, heatmap), caption) for heatmap, caption in laid]
    return [own]


def to_pixels(image: Tensor, height: int) -> Pixels:
    """What a network is given, (C,H,W), as a picture of this height: its range from black to white."""
    values = image.detach().float().cpu()
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)  # red, green, blue
    low, high = values.amin(), values.amax()
    unit = (values - low) / (high - low).clamp(min=1e-12)
    return scale((unit * 255).round().to(torch.uint8).permute(1, 2, 0).numpy(), height)


def _lay(picture: Pixels, heatmap: Tensor) -> Pixels:
    values = to_unit((heatmap - heatmap.amin().clamp(max=0)).float()[None])[0]
    return overlay(picture, values, region=(0, 0, *picture.shape[:2]))


def _lay_as_it_is(picture: Pixels, deviations: Tensor) -> Pixels:
    """Standard deviations, of which one half is the most that there can be."""
    return overlay(picture, (deviations / MOST).clamp(0, 1), region=(0, 0, *picture.shape[:2]))


def _draw_heading(outcome: Outcome, title: str, said: str, width: int) -> Pixels:
    lines = _wrap(said, width, TEXT)
    canvas = Image.new("RGB", (width, 2 * LINE + len(lines) * LINE + LINE), WHITE)
    draw = ImageDraw.Draw(canvas)
    _write(draw, outcome, fit_text(title, width - measure_text(outcome, TITLE) - 2 * GAP, TITLE), lines)
    base = canvas.height - LINE // 2 + 4
    low, high = LEGENDS[False]
    draw.text((0, base), low, PALE, find_font(LABEL), anchor="ls")
    start, bar = measure_text(low, LABEL) + GAP, colour_bar(BAR, LINE - 8)
    canvas.paste(Image.fromarray(bar), (start, base - bar.shape[0] + 1))
    draw.text((start + BAR + GAP, base), high, PALE, find_font(LABEL), anchor="ls")
    return np.array(canvas)


def _draw_test(test: Test, cells: Sequence[Cell], width: int) -> Pixels:
    lines = _wrap(test.reason, width, TEXT)
    height = max(picture.shape[0] for picture, _ in cells) + LINE + GAP
    top, rows = LINE + len(lines) * LINE + 2 * GAP, -(-len(cells) // COLUMNS)
    canvas = Image.new("RGB", (width, top + rows * height), WHITE)
    draw = ImageDraw.Draw(canvas)
    _write(draw, test.outcome, test.question, lines)
    across = max(cells[0][0].shape[1], (width + GAP) // COLUMNS - GAP)
    for place, (picture, caption) in enumerate(cells):
        left, down = place % COLUMNS * (across + GAP), top + place // COLUMNS * height
        canvas.paste(Image.fromarray(picture), (left, down))
        draw.text((left, down + picture.shape[0] + 4), fit_text(caption, across, LABEL), INK, find_font(LABEL))
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
