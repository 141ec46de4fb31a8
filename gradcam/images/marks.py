"""Draw boxes, masks, points and labels that are visible on any image and at any size."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gradcam.errors import ImageError, escape_controls, format_fields, shorten
from gradcam.images.draw import GAP_PIXELS, join_below, join_rows, resize, scale_to_height
from gradcam.images.opencv import cv2
from gradcam.images.read import Pixels, Region, describe_array, to_numpy
from gradcam.images.sheets import INK, MARGIN, WHITE, draw_legend, find_font, fit_text, measure_text
from gradcam.images.write import check_pixels
from gradcam.options import EDGES, check_choice, check_count

Colour = tuple[int, ...]  # (red, green, blue)
Rectangle = tuple[int, ...]  # (left, top, right, bottom) in whole pixels; right and bottom are exclusive
# The colours of Okabe and Ito, which people with colour blindness can distinguish. Their palette's black is left out,
# because each line already has a dark part.
COLOURS: Sequence[Colour] = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
)  # fmt: skip
# The width of an edge's bar, the length of a dash, and the radius of a ring, as multiples of the finest line's width.
BAR_WIDTH, DASH_LENGTH, RING_RADIUS = 10, 10, 10
# The fraction of white in the colour of a weak (thin) line. A weak line consists of a dark part and a coloured part.
# White increases the contrast between the two parts.
WHITE_IN_WEAK_LINES = 0.6
# On a background of this luminance, dark and white text have the same contrast.
MIDDLE_LUMINANCE = 0.2
# A label's background has the mark's colour. To increase the contrast with dark letters, this fraction of white is
# mixed into the colour. For white letters, the same fraction of the dark colour is mixed in.
LABEL_CONTRAST = 0.25
# The finest lines are one pixel wide for each 640 pixels of the image's mean side.
PIXELS_PER_LINE_WIDTH = 640
# The height of letters is the image's mean side divided by PIXELS_PER_LETTER, but at least MIN_LETTER_SIZE pixels.
PIXELS_PER_LETTER, MIN_LETTER_SIZE = 46, 12
# The maximum width of a panel in pixels, which limits the number of images per row.
MAX_PANEL_WIDTH = 1600


@dataclass(frozen=True, eq=False)
class Mark:
    """One detected or missed object, as drawn on an image.

    Parameters
    ----------
    text : str, default ""
        The label, in one line. A long label is cut at its end: put the most important part, such as the number, first.
    number : int, default None
        The number selects the colour, so that marks with equal numbers have the same colour in all images. None stands
        for the mark's position among the marks.
    box : sequence of 4 numbers, default None
        Left, top, right and bottom, in pixels of the image. Parts outside the image are cut off.
    edge : str, default None
        "left", "top", "right" or "bottom": the edge of the box that is drawn as a bar.
    mask : array or Tensor (H,W), default None
        Bool, of the image's size. Only the border of the mask is drawn.
    point : (number, number), default None
        x and y, in pixels of the image.
    dashed : bool, default False
        Whether the box is dashed, which means that the object was not detected.
    weak : bool, default False
        Whether the lines are thin, which means that the object is not the explained one.

    Raises
    ------
    ImageError
        If the box, edge, mask, point, number or text is invalid.

    Examples
    --------
    >>> from gradcam.images.marks import Mark
    >>> Mark("3 person 98 %", number=3, box=(40, 60, 220, 400)).box
    (40, 60, 220, 400)
    """

    text: str = ""
    number: int | None = None
    box: Sequence[float] | None = None
    edge: str | None = None
    mask: Any = None
    point: Sequence[float] | None = None
    dashed: bool = False
    weak: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ImageError(f"The text of a mark is {shorten(self.text)}, expected a str.")
        if self.number is not None:
            check_count(self.number, "The number of a mark", "a whole number, 0 or more.", least=0, error=ImageError)
        _check_numbers(self.box, "box", "left, top, right, bottom")
        _check_numbers(self.point, "point", "across, down")
        if self.edge is not None:
            check_choice(self.edge, "The edge", EDGES, ImageError)
            if self.box is None:
                raise ImageError(f"The edge {self.edge!r} needs a box: pass box=(left, top, right, bottom).")
        if self.mask is not None:
            values = to_numpy(self.mask)
            if values.dtype != np.bool_ or values.ndim != 2:
                raise ImageError(f"The mask to draw is {describe_array(values)}, expected bool (H,W).")
            object.__setattr__(self, "mask", values)

    __repr__ = format_fields


def draw_marks(picture: Pixels, marks: Iterable[Mark]) -> Pixels:
    """Draw boxes, masks, points and their labels on an image.

    Each line has a dark and a light part, so that it is visible on any image. The sizes of lines and letters grow
    with the image. Marks that are not weak cover weak marks. A label is placed above its box if there is room, and does
    not overlap other labels if possible.

    Parameters
    ----------
    picture : array (H,W,3)
        RGB, uint8. The array is not modified.
    marks : iterable of Mark
        Marks in pixels of this image.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the image is invalid, or the size of a mask differs from the image's.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.images.marks import Mark, draw_marks
    >>> cat = Mark("0 tiger cat 98 %", box=(20, 10, 400, 630), edge="left")
    >>> draw_marks(gradcam.read_image("photo.jpg"), [cat]).shape
    (640, 800, 3)
    """
    canvas = np.array(check_pixels(picture), order="C")
    side = math.sqrt(canvas.shape[0] * canvas.shape[1])
    unit, size = max(1, round(side / PIXELS_PER_LINE_WIDTH)), max(MIN_LETTER_SIZE, round(side / PIXELS_PER_LETTER))
    marks_with_pens = [(mark, _Pen.of(mark, unit)) for mark in _number_marks(marks, canvas)]
    # The labels of explained objects (not weak) get their positions first. Their lines and labels are drawn last, on
    # top of weak marks.
    marks_with_pens.sort(key=lambda pair: pair[0].weak)
    for mark, pen in reversed(marks_with_pens):
        _draw_lines(canvas, mark, pen)
    plates: list[tuple[Pixels, Rectangle]] = []
    for mark, pen in marks_with_pens:
        if mark.text:
            plate = _draw_plate(mark.text, pen.colour, size, canvas.shape[1])
            anchor, occupied = _find_anchor(canvas, mark, pen), [rectangle for _, rectangle in plates]
            plates.append((plate, _find_place(plate, anchor, pen.width, canvas, occupied)))
    for plate, (x0, y0, x1, y1) in reversed(plates):
        area = canvas[y0:y1, x0:x1]
        area[...] = plate[: area.shape[0], : area.shape[1]]
    return canvas


def draw_mark_panel(
    picture: Pixels,
    overlays: Sequence[Pixels],
    marks: Sequence[Mark],
    *,
    height: int = 320,
    signed: bool = False,
    **look: Any,
) -> Pixels:
    """Draw all marks of an image on one panel: the image with all marks, then the overlay of each mark.

    Lines and letters are sized for the panel. On each overlay, the marks of all other overlays are thin.

    Parameters
    ----------
    picture : array (H,W,3)
        RGB, uint8.
    overlays : sequence of array (H,W,3)
        The image with the heatmap of each mark.
    marks : sequence of Mark
        Marks in pixels of the image.
    height : int, default 320
        Height of each image on the panel, in pixels.
    signed : bool, default False
        As in `gradcam.overlay`, for the colour bar at the bottom.
    **look
        The options `alpha`, `colormap`, `base` and `blend` of `gradcam.overlay`, for the colour bar.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the numbers of overlays and marks differ, an image is invalid, a mask has another size than the image, or the
        height is not a number of pixels.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.images.marks import Mark, draw_mark_panel
    >>> image, cat = gradcam.read_image("photo.jpg"), Mark("0 tiger cat 98 %", box=(20, 10, 400, 630))
    >>> draw_mark_panel(image, [image], [cat], height=160).shape
    (226, ..., 3)
    """
    check_count(height, "height", "the height of each image in pixels, 1 or more.", error=ImageError)
    if len(overlays) != len(marks):
        raise ImageError(f"There are {len(overlays)} overlays for {len(marks)} marks, expected one for each.")
    small = scale_to_height(check_pixels(picture), height)
    region = (0, 0, *picture.shape[:2])
    fitted = [replace(fit_mark(mark, region, *small.shape[:2]), weak=False) for mark in _number_marks(marks, picture)]
    weak_marks = [
        replace(mark, weak=True, text="", edge=None, mask=mark.mask if mark.box is None else None) for mark in fitted
    ]
    cells = [draw_marks(small, fitted)]
    for k, overlay in enumerate(overlays):
        small_overlay = scale_to_height(check_pixels(overlay), height)
        cells.append(draw_marks(small_overlay, [*weak_marks[:k], fitted[k], *weak_marks[k + 1 :]]))
    rows = math.ceil(len(cells) / max(1, MAX_PANEL_WIDTH // (small.shape[1] + GAP_PIXELS)))
    per_row = math.ceil(len(cells) / rows)
    images = join_rows([cells[k : k + per_row] for k in range(0, len(cells), per_row)], height)
    panel = join_below([images, draw_legend(signed=signed, **look)])
    return np.pad(panel, ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def fit_mark(mark: Mark, region: Region, height: int, width: int) -> Mark:
    """Convert a mark to pixels of a region (top, left, height, width) after resizing to `height` x `width`."""
    y0, x0, rows, columns = region
    axes = ((x0, width / columns), (y0, height / rows)) * 2

    def fit(numbers: Sequence[float]) -> list[float]:
        return [(float(number) - start) * scale for number, (start, scale) in zip(numbers, axes)]

    mask = mark.mask
    if mask is not None:
        mask = mask[y0 : y0 + rows, x0 : x0 + columns]
        if mask.shape != (rows, columns):
            raise ImageError(
                f"The mask to draw is {describe_array(mark.mask)}, which does not cover the region {region}."
            )
        mask = resize(mask.astype(np.float32), height, width) >= 0.5
    box, point = mark.box, mark.point
    return replace(mark, box=box if box is None else fit(box), point=point if point is None else fit(point), mask=mask)


@dataclass(frozen=True)
class _Pen:
    """A line style: the main colour, and parallel `bands` from the outside inwards.

    Each band has a colour, a distance from the outside, and a width. `unit` is the width of the finest line. Widths
    and distances are in pixels.
    """

    colour: Colour
    bands: Sequence[tuple[Colour, int, int]]
    width: int
    unit: int

    @classmethod
    def of(cls, mark: Mark, unit: int) -> _Pen:
        colour = COLOURS[(mark.number or 0) % len(COLOURS)]
        if not mark.weak:
            return cls(colour, [(INK, 0, unit), (colour, unit, 2 * unit), (WHITE, 3 * unit, unit)], 4 * unit, unit)
        light = _mix(colour, WHITE, WHITE_IN_WEAK_LINES)
        return cls(light, [(INK, 0, unit), (light, unit, unit)], 2 * unit, unit)


def _draw_lines(canvas: Pixels, mark: Mark, pen: _Pen) -> None:
    if mark.mask is not None:
        _draw_contour(canvas, mark.mask, pen)
    if mark.box is not None:
        frame = _find_frame(canvas, mark.box, pen)
        _draw_frame(canvas, frame, pen, mark.dashed)
        if mark.edge is not None:
            bar = _find_bar(canvas, frame, mark.edge, pen)
            for inset, colour in enumerate((INK, WHITE, pen.colour)):
                _fill(canvas, _shrink(bar, inset * pen.unit), colour)
    if mark.point is not None:
        _draw_ring(canvas, mark.point, pen)


def _find_frame(canvas: Pixels, box: Sequence[float], pen: _Pen) -> Rectangle:
    """Return the rectangle around the lines of a box, limited to the image.

    The lines are centred on the box's sides. If a box is too small for its lines, the rectangle is enlarged.
    """
    spans, min_length = [], 2 * (pen.width + pen.unit)
    for axis, size in enumerate(canvas.shape[1::-1]):
        low, high = sorted(min(max(round(float(side)), 0), size) for side in box[axis::2])
        low, high = max(0, low - pen.width // 2), min(size, high + pen.width // 2)
        if high - low < min_length:
            low = max(0, min((low + high - min_length) // 2, size - min_length))
            high = min(size, low + min_length)
        spans.append((low, high))
    return tuple(itertools.chain(*zip(*spans)))


def _draw_frame(canvas: Pixels, frame: Rectangle, pen: _Pen, dashed: bool) -> None:
    spans = (frame[0], frame[2]), (frame[1], frame[3])
    columns, rows = (_find_dashes(*span, DASH_LENGTH * pen.unit) if dashed else [span] for span in spans)
    for colour, inset, width in pen.bands:
        x0, y0, x1, y1 = _shrink(frame, inset)
        for low, high in columns:
            for start in (y0, y1 - width):
                _fill(canvas, (max(x0, low), start, min(x1, high), start + width), colour)
        for low, high in rows:
            for start in (x0, x1 - width):
                _fill(canvas, (start, max(y0, low), start + width, min(y1, high)), colour)


def _find_dashes(low: int, high: int, dash: int) -> list[tuple[int, int]]:
    """Return the dashes along a side, with a dash at each end. Dashes and gaps have the same length."""
    parts = 2 * max(1, round((high - low) / dash / 2)) + 1
    ends = [round(low + (high - low) * part / parts) for part in range(parts + 1)]
    return list(zip(ends[::2], ends[1::2]))


def _find_bar(canvas: Pixels, frame: Rectangle, edge: str, pen: _Pen) -> Rectangle:
    """Return the bar along an edge of a frame."""
    edge_index, bar_width = EDGES.index(edge), BAR_WIDTH * pen.unit
    axis, inwards = edge_index % 2, pen.width // 2 if edge_index < 2 else -(pen.width // 2)
    low = max(0, min(frame[edge_index] + inwards - bar_width // 2, canvas.shape[1 - axis] - bar_width))
    bar = list(frame)
    bar[axis], bar[axis + 2] = low, low + bar_width
    return tuple(bar)


def _draw_contour(canvas: Pixels, mask: NDArray[np.bool_], pen: _Pen) -> None:
    """Draw the border of a mask like the lines of a box: dark outside, light inside."""
    shape = mask.astype(np.uint8)
    contours, _ = cv2.findContours(shape, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    if not contours:
        return
    # At the image's border, move the contour inwards, so that its dark line stays inside the image. To save time,
    # remove corners that are too small to be visible: OpenCV draws a line from each corner to the next.
    margin, size = pen.width // 2, np.array(mask.shape[::-1])
    lowest, highest = np.minimum(margin, size // 2), np.maximum(size - 1 - margin, size // 2)
    simplified = [cv2.approxPolyDP(np.clip(line, lowest, highest).astype(np.int32), 0.5, True) for line in contours]
    shape[:margin] = shape[-margin:] = shape[:, :margin] = shape[:, -margin:] = 0
    x0, y0, x1, y1 = _expand(_find_bounds(mask), pen.width, canvas)
    part, inside = canvas[y0:y1, x0:x1], shape[y0:y1, x0:x1]

    def draw(onto: Pixels, colour: Colour, width: int) -> None:
        cv2.drawContours(onto, simplified, -1, colour, width, cv2.LINE_AA, offset=(-x0, -y0))

    (dark, *_), *middle, (light, *_) = pen.bands
    draw(part, dark, pen.width)
    light_part = part.copy()
    draw(light_part, light, pen.width)
    cv2.copyTo(light_part, inside, part)
    for colour, _, width in middle:
        draw(part, colour, width)


def _draw_ring(canvas: Pixels, point: Sequence[float], pen: _Pen) -> None:
    """Draw a ring around a point, and a dot at the point."""
    x, y = _find_pixel(canvas, point)
    radius = RING_RADIUS * pen.unit
    x0, y0, x1, y1 = _expand((x, y, x + 1, y + 1), radius + 1, canvas)
    distance = np.hypot(*np.ogrid[y0 - y : y1 - y, x0 - x : x1 - x])[..., None]
    part = canvas[y0:y1, x0:x1]
    rings = [(colour, radius - inset, radius - inset - width) for colour, inset, width in pen.bands]
    for colour, outside, inside in [*rings, (INK, 2.5 * pen.unit, 0), (pen.colour, 1.5 * pen.unit, 0)]:
        opacity = np.clip(outside - distance + 0.5, 0, 1) * np.clip(distance - inside + 0.5, 0, 1)
        part[...] = np.rint(part + opacity * (np.array(colour) - part))


def _draw_plate(text: str, colour: Colour, size: int, max_width: int) -> Pixels:
    """Draw a label on a background similar to `colour`. Dark or white text is chosen by contrast."""
    padding = round(size / 3)
    text = fit_text(_simplify(escape_controls(text)), max(1, max_width - 2 * padding), size)
    ink, background = (INK, WHITE) if _find_luminance(colour) > MIDDLE_LUMINANCE else (WHITE, INK)
    ground = _mix(colour, background, LABEL_CONTRAST)
    plate = Image.new("RGB", (measure_text(text, size) + 2 * padding, round(1.3 * size)), ground)
    ImageDraw.Draw(plate).text((padding, round(size * 0.98)), text, ink, find_font(size), anchor="ls")
    return np.array(plate)


def _simplify(text: str) -> str:
    """Replace accented letters by plain letters. For a letter that Pillow's font lacks, Pillow would draw a frame."""
    letters = unicodedata.normalize("NFC", text)
    bare_letters = (unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() for letter in letters)
    return "".join(bare if bare and letter.isalpha() else letter for letter, bare in zip(letters, bare_letters))


def _find_place(
    plate: Pixels, anchor: Rectangle, margin: int, canvas: Pixels, occupied: Sequence[Rectangle]
) -> Rectangle:
    """Return the rectangle of a label: the first candidate inside the image that overlaps no other label.

    The candidates are in this order: above the mark, inside the mark's upper left corner if there is room, below the
    mark, and at the mark's upper edge. The last candidates are directly above or below other labels, nearest first.
    """
    (height, width), (canvas_height, canvas_width) = plate.shape[:2], canvas.shape[:2]
    x0, y0, x1, y1 = anchor
    max_y = max(0, canvas_height - height)
    positions = [(x0, y0 - height), (x0, y1), (x0, min(max(y0, 0), max_y))]
    if x1 - x0 >= width + 2 * margin and y1 - y0 >= 3 * height:
        positions.insert(1, (x0 + margin, y0 + margin))
    adjacent_rows = {y for label in occupied for y in (label[1] - height, label[3])}
    positions += [(x0, y) for y in sorted(adjacent_rows, key=lambda y: abs(y - y0 + height))]
    inside = [(max(0, min(x, canvas_width - width)), y) for x, y in positions if 0 <= y <= max_y]
    candidates = np.array([(x, y, x + width, y + height) for x, y in inside])[:, None]
    labels = np.array(occupied).reshape(-1, 4)
    overlap = np.all((candidates[..., :2] < labels[:, 2:]) & (labels[:, :2] < candidates[..., 2:]), axis=2)
    # `argmin` selects the first position without overlap or, if all positions overlap, the first of all positions.
    x, y = inside[np.any(overlap, axis=1).argmin()]
    return x, y, x + width, y + height


def _find_anchor(canvas: Pixels, mark: Mark, pen: _Pen) -> Rectangle:
    """Return the rectangle around a mark, beside which the label is placed.

    If the mark has no shape, return the image's upper left corner.
    """
    if mark.box is not None:
        frame = _find_frame(canvas, mark.box, pen)
        if mark.edge is None:
            return frame
        bar = _find_bar(canvas, frame, mark.edge, pen)
        return min(frame[0], bar[0]), min(frame[1], bar[1]), max(frame[2], bar[2]), max(frame[3], bar[3])
    if mark.mask is not None and mark.mask.any():
        return _expand(_find_bounds(mark.mask), pen.width // 2, canvas)
    if mark.point is not None:
        x, y = _find_pixel(canvas, mark.point)
        return _expand((x, y, x + 1, y + 1), RING_RADIUS * pen.unit, canvas)
    return 0, 0, 0, 0


def _mix(colour: Colour, target_colour: Colour, weight: float) -> Colour:
    return tuple(round(start + weight * (end - start)) for start, end in zip(colour, target_colour))


def _find_luminance(colour: Colour) -> float:
    """Return a colour's relative luminance (0 to 1), as the Web Content Accessibility Guidelines define it."""
    values = (value / 255 for value in colour)
    linear = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))


def _find_pixel(canvas: Pixels, point: Sequence[float]) -> tuple[int, int]:
    """Return the pixel (x, y) that contains a point, or the nearest pixel if the point is outside the image."""
    height, width = canvas.shape[:2]
    return min(max(math.floor(float(point[0])), 0), width - 1), min(max(math.floor(float(point[1])), 0), height - 1)


def _find_bounds(mask: NDArray[np.bool_]) -> Rectangle:
    x0, y0, width, height = cv2.boundingRect(mask.astype(np.uint8))
    return x0, y0, x0 + width, y0 + height


def _expand(rectangle: Rectangle, margin: int, canvas: Pixels) -> Rectangle:
    (x0, y0, x1, y1), (height, width) = rectangle, canvas.shape[:2]
    return max(0, x0 - margin), max(0, y0 - margin), min(width, x1 + margin), min(height, y1 + margin)


def _shrink(rectangle: Rectangle, inset: int) -> Rectangle:
    x0, y0, x1, y1 = rectangle
    return x0 + inset, y0 + inset, x1 - inset, y1 - inset


def _fill(canvas: Pixels, rectangle: Rectangle, colour: Colour) -> None:
    x0, y0, x1, y1 = rectangle
    if x0 < x1 and y0 < y1:
        cv2.rectangle(canvas, (x0, y0), (x1 - 1, y1 - 1), colour, cv2.FILLED)


def _check_numbers(values: Any, subject: str, names: str) -> None:
    if values is None:
        return
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if len(numbers) != len(names.split()) or not all(map(math.isfinite, numbers)):
        raise ImageError(f"The {subject} of a mark is {shorten(values)}, expected ({names}): finite numbers.")


def _number_marks(marks: Iterable[Mark], image: Pixels) -> list[Mark]:
    """Return all marks as a list. A mark without a number gets its position as the number.

    Raises `ImageError` if a mask has another size than the image.
    """
    numbered = []
    for position, mark in enumerate(marks):
        if not isinstance(mark, Mark):
            raise ImageError(f"The mark is {shorten(mark)}, expected a Mark.")
        if mark.mask is not None and mark.mask.shape != image.shape[:2]:
            sizes = " x ".join(map(str, mark.mask.shape[::-1])), " x ".join(map(str, image.shape[1::-1]))
            raise ImageError(f"The mask to draw is {sizes[0]}, but the image is {sizes[1]}: expected the same size.")
        numbered.append(replace(mark, number=position) if mark.number is None else mark)
    return numbered
