"""Draw the panel of a verdict: an image with one row per test, with the heatmaps that the test compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from gradcam.errors import ImageError
from gradcam.evaluation.checks.control_maps import ControlMap
from gradcam.evaluation.checks.findings import CheckArtifacts, Outcome, TestResult
from gradcam.evaluation.subject import scale_to_unit
from gradcam.images.draw import GAP_PIXELS, draw_colour_bar, join_below, overlay, scale_to_height
from gradcam.images.read import Pixels
from gradcam.images.sheets import INK, LEGENDS, MARGIN, WHITE, find_font, fit_text, measure_text
from gradcam.inspection.sheets import CAPTION_COLOUR, LABEL, TEXT, TITLE
from gradcam.options import check_count

Cell = tuple[Pixels, str]  # (image, caption)

COLUMNS = 6
MIN_WIDTH_PIXELS = 900  # In narrower panels, sentences would break into many lines.
LINE_PIXELS = 20  # height of a line of text
BAR_PIXELS = 140  # length of the colour bar
MAX_DEVIATION = 1 / 2  # largest possible standard deviation of values in [0,1]
COLOURS = {"passed": (15, 115, 55), "undecided": (170, 100, 0), "failed": (190, 25, 25)}


@dataclass(frozen=True, eq=False)
class PanelData:
    """The contents of a panel: the image, the results of tests and control maps, and the artifacts."""

    image: Pixels
    tests: Sequence[TestResult]
    controls: Sequence[ControlMap]
    artifacts: CheckArtifacts


def draw_verdict(data: PanelData, outcome: Outcome, title: str, summary: str, *, height: int) -> Pixels:
    """Draw a panel whose images have `height` pixels. Raise `ImageError` if the height is invalid."""
    check_count(height, "height", "the height of each image in pixels, 1 or more.", error=ImageError)
    image = scale_to_height(data.image, height)
    width = max(MIN_WIDTH_PIXELS, COLUMNS * (image.shape[1] + GAP_PIXELS) - GAP_PIXELS)
    tests = [_draw_test(test, list(_list_cells(data, test, image, height)), width) for test in data.tests]
    panel = join_below([_draw_heading(outcome, title, summary, width), *tests])
    return np.pad(panel, ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def _list_cells(data: PanelData, test: TestResult, image: Pixels, height: int) -> Iterator[Cell]:
    """Yield the cells of one test: the heatmaps that the test compared, with captions."""
    artifacts, grid, placed_maps = data.artifacts, data.artifacts.grid, data.artifacts.placed_maps
    if test.name == "covering" and grid is not None and placed_maps is not None and data.controls:
        grid_image = to_pixels(grid.images[0], height)
        yield _overlay_heatmap(grid_image, placed_maps[0]), f"{test.value:.2f}   the heatmap"
        for control in data.controls:
            note = "" if control.is_distinguished else ", as good"
            yield _overlay_heatmap(grid_image, control.heatmap), f"{control.effect:.2f}   {control.name}{note}"
        return
    if test.name == "placement" and grid is not None and placed_maps is not None and not grid.is_alone:
        for grid_image, heatmap, value in zip(grid.images, placed_maps, grid.order(placed_maps).diagonal()):
            yield _overlay_heatmap(to_pixels(grid_image, height), heatmap), f"{value:.2f}   in this cell"
        return
    yield _overlay_heatmap(image, artifacts.heatmap), "the original heatmap"
    compared: Iterable[tuple[Tensor, Tensor, str]] = ()
    if test.name == "stability":
        if artifacts.uncertainty is not None:
            # Deviations are scaled to the colours of a heatmap: the largest possible deviation becomes 1.
            deviations = (artifacts.uncertainty / MAX_DEVIATION).clamp(0, 1)
            yield overlay(image, deviations, region=(0, 0, *image.shape[:2])), "uncertainty"
        compared = zip(artifacts.noisy_maps, artifacts.noisy_correlations, repeat("with noise"))
    elif test.name == "classes" and artifacts.rival_maps is not None and artifacts.rival_correlations is not None:
        compared = zip(artifacts.rival_maps, artifacts.rival_correlations, artifacts.rival_names)
    elif test.name == "randomisation" and (randomisation := artifacts.randomisation) is not None:
        names = [f"from {name} on" for name in randomisation.layers]
        compared = zip(randomisation.heatmaps[0], randomisation.correlations[0], names)
    for heatmap, value, name in compared:
        yield _overlay_heatmap(image, heatmap), f"{value:.2f}   {name}"


def to_pixels(image: Tensor, height: int) -> Pixels:
    """Return a preprocessed image (C,H,W) as RGB pixels, resized to `height`. Values are stretched to [0,255]."""
    values = image.detach().float().cpu()
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)  # 1 or 2 channels: grey
    low, high = values.amin(), values.amax()
    unit = (values - low) / (high - low).clamp(min=1e-12)
    return scale_to_height((unit * 255).round().to(torch.uint8).permute(1, 2, 0).numpy(), height)


def _overlay_heatmap(image: Pixels, heatmap: Tensor) -> Pixels:
    values = scale_to_unit((heatmap - heatmap.amin().clamp(max=0)).float()[None])[0]
    return overlay(image, values, region=(0, 0, *image.shape[:2]))


def _draw_heading(outcome: Outcome, title: str, summary: str, width: int) -> Pixels:
    lines = _wrap(summary, width)
    canvas = Image.new("RGB", (width, (len(lines) + 3) * LINE_PIXELS), WHITE)
    draw = ImageDraw.Draw(canvas)
    _write(draw, outcome, fit_text(title, width - measure_text(outcome, TITLE) - 2 * GAP_PIXELS, TITLE), lines)
    baseline = canvas.height - LINE_PIXELS // 2 + 4
    low, high = LEGENDS[False]
    draw.text((0, baseline), low, CAPTION_COLOUR, find_font(LABEL), anchor="ls")
    bar_x, bar = measure_text(low, LABEL) + GAP_PIXELS, draw_colour_bar(BAR_PIXELS, LINE_PIXELS - 8)
    canvas.paste(Image.fromarray(bar), (bar_x, baseline - bar.shape[0] + 1))
    draw.text((bar_x + BAR_PIXELS + GAP_PIXELS, baseline), high, CAPTION_COLOUR, find_font(LABEL), anchor="ls")
    return np.array(canvas)


def _draw_test(test: TestResult, cells: Sequence[Cell], width: int) -> Pixels:
    lines = _wrap(test.reason, width)
    row_height = max(image.shape[0] for image, _ in cells) + LINE_PIXELS + GAP_PIXELS
    top, rows = (len(lines) + 1) * LINE_PIXELS + 2 * GAP_PIXELS, -(-len(cells) // COLUMNS)
    canvas = Image.new("RGB", (width, top + rows * row_height), WHITE)
    draw = ImageDraw.Draw(canvas)
    _write(draw, test.outcome, test.question, lines)
    cell_width = max(cells[0][0].shape[1], (width + GAP_PIXELS) // COLUMNS - GAP_PIXELS)
    for number, (image, caption) in enumerate(cells):
        x, y = number % COLUMNS * (cell_width + GAP_PIXELS), top + number // COLUMNS * row_height
        canvas.paste(Image.fromarray(image), (x, y))
        draw.text((x, y + image.shape[0] + 4), fit_text(caption, cell_width, LABEL), INK, find_font(LABEL))
    return np.array(canvas)


def _write(draw: ImageDraw.ImageDraw, outcome: str, title: str, lines: Sequence[str]) -> None:
    draw.text((0, LINE_PIXELS), outcome, COLOURS[outcome], find_font(TITLE), anchor="ls")
    draw.text((measure_text(outcome, TITLE) + 2 * GAP_PIXELS, LINE_PIXELS), title, INK, find_font(TITLE), anchor="ls")
    for number, line in enumerate(lines):
        draw.text((0, (number + 2) * LINE_PIXELS), line, CAPTION_COLOUR, find_font(TEXT), anchor="ls")


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and measure_text(longer, TEXT) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
