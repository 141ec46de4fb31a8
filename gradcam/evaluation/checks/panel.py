"""The panel of a verdict: each test with its outcome, its reason, and the pictures behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from gradcam.drawing import GAP, colour_bar, overlay, scale, stack
from gradcam.errors import ImageError, shorten
from gradcam.evaluation.checks.covering import MARKED, find_marked
from gradcam.evaluation.heatmaps import to_unit
from gradcam.images import Pixels
from gradcam.inspection.blocks import LABEL, PALE, TEXT, TITLE, find_font, measure_text
from gradcam.panels import INK, MARGIN, WHITE

if TYPE_CHECKING:
    from gradcam.evaluation.checks.verdicts import Test, Verdict

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
