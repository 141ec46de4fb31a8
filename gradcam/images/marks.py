"""Boxes, masks, points and words on pictures: they show on any picture, at any size."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gradcam.errors import ImageError, join_names, printable, shorten, show_fields
from gradcam.images.draw import GAP, resize, scale, sheet, stack
from gradcam.images.opencv import cv2
from gradcam.images.read import Pixels, Region, describe_array, to_numpy
from gradcam.images.sheets import INK, MARGIN, WHITE, draw_legend, find_font, fit_text, measure_text
from gradcam.images.write import check_pixels
from gradcam.options import EDGES, check_count

Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # left, top, right, bottom: whole pixels, the last two exclusive
# Okabe and Ito's, which people who do not see all colours tell apart. Black is left out: each line has it beside it.
COLOURS: Sequence[Colour] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
# The width of an edge's bar, the length of a dash, and the radius of a ring, in widths of the finest line.
BAR, DASH, RING = 10, 10, 10
PALE = 0.6  # of a weak line's colour is white, so that it shows beside ink without a white line of its own
DIM = 0.2  # the luminance to which white has as much contrast as ink
AWAY = 0.25  # of a label's ground is the opposite of its ink: letters are thin, and need more contrast than lines
FINE = 640  # pixels of a picture's side for each that its finest lines are wide
LETTERS, SMALLEST = 46, 12  # a picture's side to its letters' size, and the least of that in pixels
WIDEST = 1600  # pixels of a panel, which decide how many pictures are side by side


@dataclass(frozen=True, eq=False)
class Mark:
    """What is drawn on a picture for one thing that was found in it, or missed.

    Parameters
    ----------
    text : str, default ""
        Its label, in one line. What matters comes first, the number above all: a long one is cut at its end.
    number : int, default None
        Which decides its colour, so that a box has the same one in all pictures; None for its place among the marks.
    box : sequence of 4 numbers, default None
        Left, top, right and bottom, in pixels of the picture. What lies outside of it is cut off.
    edge : str, default None
        "left", "top", "right" or "bottom": the edge of the box that is drawn as a bar.
    mask : array or Tensor (H,W), default None
        Bool, of the picture's size. Its border is drawn; what it covers stays as it is.
    point : (number, number), default None
        Across and down, in pixels of the picture.
    dashed : bool, default False
        Whether the box is drawn in dashes: nothing was found there.
    weak : bool, default False
        Whether its lines are thin: it is not the one that is explained.

    Raises
    ------
    ImageError
        For a box, an edge, a mask, a point, a number or a text of another form.

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
        _check_numbers(self.box, "box", ("left", "top", "right", "bottom"))
        _check_numbers(self.point, "point", ("across", "down"))
        if self.edge is not None and (self.edge not in EDGES or self.box is None):
            raise ImageError(
                f"The edge is {shorten(self.edge)}, expected one of {join_names(EDGES)}, in a mark with a box."
            )
        if self.mask is not None:
            values = to_numpy(self.mask)
            if values.dtype != np.bool_ or values.ndim != 2:
                raise ImageError(f"The mask of a mark is {describe_array(values)}, expected bool (H,W).")
            object.__setattr__(self, "mask", values)

    def __repr__(self) -> str:
        return show_fields(self)


def draw_marks(picture: Pixels, marks: Iterable[Mark]) -> Pixels:
    """Draw boxes, masks, points and their labels on a picture.

    Each line has a dark and a light part, so that it shows on any picture; lines and letters grow with the picture. Weak
    marks lie below the others. A label stands above its box where there is room, and moves where another one is.

    Parameters
    ----------
    picture : array (H,W,3)
        RGB, uint8. It is left as it is.
    marks : iterable of Mark
        In the pixels of this picture.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        For a picture of another form, and a mask of another size.

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
    unit, size = max(1, round(side / FINE)), max(SMALLEST, round(side / LETTERS))
    drawn = [
        (mark, _Pen.of(place if mark.number is None else mark.number, unit, mark.weak))
        for place, mark in enumerate(_check_masks(marks, canvas))
    ]
    drawn.sort(key=lambda it: it[0].weak)  # what is explained has the first choice of places, and lies on top
    for mark, pen in reversed(drawn):
        _draw_lines(canvas, mark, pen)
    plates: list[tuple[Pixels, Rectangle]] = []
    for mark, pen in drawn:
        if mark.text:
            plate = _draw_plate(mark.text, pen.colour, size, canvas.shape[1])
            anchor, taken = _find_anchor(canvas, mark, pen), [place for _, place in plates]
            plates.append((plate, _find_place(plate, anchor, pen.width, canvas, taken)))
    for plate, (left, top, right, bottom) in reversed(plates):
        shown = canvas[top:bottom, left:right]
        shown[...] = plate[: shown.shape[0], : shown.shape[1]]
    return canvas


def draw_mark_panel(
    picture: Pixels,
    overlays: Sequence[Pixels],
    marks: Sequence[Mark],
    *,
    height: int = 320,
    colormap: str = "turbo",
    signed: bool = False,
) -> Pixels:
    """Draw all boxes of a picture on one panel: the picture with all of them, then the overlay of each with its own.

    Lines and letters are of the size that fits the panel. On each overlay the boxes of the others are thin.

    Parameters
    ----------
    picture : array (H,W,3)
        RGB, uint8.
    overlays : sequence of array (H,W,3)
        The picture with the heatmap of each mark.
    marks : sequence of Mark
        In the pixels of the picture.
    height : int, default 320
        Of each picture on the panel, in pixels.
    colormap, signed
        Of the heatmaps, for the bar of their colours below.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        For another number of overlays than of marks, pictures of another form, a mask of another size, and a height that
        is not a number of pixels.

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
    small = scale(check_pixels(picture), height)
    whole = (0, 0, *picture.shape[:2])
    fitted = [
        replace(fit_mark(mark, whole, *small.shape[:2]), number=k if mark.number is None else mark.number, weak=False)
        for k, mark in enumerate(_check_masks(marks, picture))
    ]
    others = [replace(it, weak=True, text="", edge=None, mask=it.mask if it.box is None else None) for it in fitted]
    cells = [draw_marks(small, fitted)]
    for k, drawn in enumerate(overlays):
        cells.append(draw_marks(scale(check_pixels(drawn), height), [*others[:k], fitted[k], *others[k + 1 :]]))
    rows = math.ceil(len(cells) / max(1, WIDEST // (small.shape[1] + GAP)))
    across = math.ceil(len(cells) / rows)
    pictures = sheet([cells[k : k + across] for k in range(0, len(cells), across)], height)
    panel = stack([pictures, draw_legend(colormap=colormap, signed=signed)])
    return np.pad(panel, ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)


def fit_mark(mark: Mark, region: Region, height: int, width: int) -> Mark:
    """The mark on another picture: on a region (top, left, height, width) of its own that is scaled to this size."""
    top, left, rows, columns = region
    down, across = height / rows, width / columns
    box, point, mask = mark.box, mark.point, mark.mask
    if box is not None:
        box = [(float(it) - start) * by for it, start, by in zip(box, (left, top) * 2, (across, down) * 2)]
    if point is not None:
        point = [(float(it) - start) * by for it, start, by in zip(point, (left, top), (across, down))]
    if mask is not None:
        mask = mask[top : top + rows, left : left + columns]
        if mask.shape != (rows, columns):
            raise ImageError(f"The mask of a mark is {describe_array(mark.mask)}, too small for the region {region}.")
        mask = resize(mask.astype(np.float32), height, width) >= 0.5
    return replace(mark, box=box, point=point, mask=mask)


@dataclass(frozen=True)
class _Pen:
    """A line's colour; `bands` are all its colours with their widths, the outermost first, in pixels; `unit` is the
    width of the finest."""

    colour: Colour
    bands: Sequence[tuple[Colour, int]]
    unit: int

    @classmethod
    def of(cls, number: int, unit: int, weak: bool) -> _Pen:
        colour = COLOURS[number % len(COLOURS)]
        if not weak:
            return cls(colour, [(INK, unit), (colour, 2 * unit), (WHITE, unit)], unit)
        light = _mix(colour, WHITE, PALE)
        return cls(light, [(INK, unit), (light, unit)], unit)

    @property
    def width(self) -> int:
        return sum(width for _, width in self.bands)


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
    """What the lines of a box cover, within the picture: the box's sides run in their middle. A box without an area is
    shown as a small one."""
    (left, right), (top, bottom) = (
        _find_span(box[axis], box[axis + 2], canvas.shape[1 - axis], pen.width // 2, 2 * pen.width + 2 * pen.unit)
        for axis in (0, 1)
    )
    return left, top, right, bottom


def _find_span(start: float, end: float, size: int, margin: int, least: int) -> tuple[int, int]:
    low, high = sorted(min(max(round(float(it)), 0), size) for it in (start, end))
    low, high = max(0, low - margin), min(size, high + margin)
    if high - low < least:
        low = max(0, min((low + high - least) // 2, size - least))
        high = min(size, low + least)
    return low, high


def _draw_frame(canvas: Pixels, frame: Rectangle, pen: _Pen, dashed: bool) -> None:
    left, top, right, bottom = frame
    columns, rows = ([(low, high)] for low, high in ((left, right), (top, bottom)))
    if dashed:
        columns, rows = (_find_dashes(low, high, DASH * pen.unit) for low, high in ((left, right), (top, bottom)))
    inset = 0
    for colour, width in pen.bands:
        left, top, right, bottom = _shrink(frame, inset)
        for low, high in columns:
            for start in (top, bottom - width):
                _fill(canvas, (max(left, low), start, min(right, high), start + width), colour)
        for low, high in rows:
            for start in (left, right - width):
                _fill(canvas, (start, max(top, low), start + width, min(bottom, high)), colour)
        inset += width


def _find_dashes(low: int, high: int, dash: int) -> list[tuple[int, int]]:
    """Dashes along a side, with gaps of their length between them; one at each end."""
    parts = 2 * max(1, round((high - low) / dash / 2)) + 1
    ends = [round(low + (high - low) * part / parts) for part in range(parts + 1)]
    return list(zip(ends[::2], ends[1::2]))


def _find_bar(canvas: Pixels, frame: Rectangle, edge: str, pen: _Pen) -> Rectangle:
    """The bar along an edge of a frame."""
    side, width = EDGES.index(edge), BAR * pen.unit
    axis, inwards = side % 2, pen.width // 2 if side < 2 else -(pen.width // 2)
    low = max(0, min(frame[side] + inwards - width // 2, canvas.shape[1 - axis] - width))
    bar = list(frame)
    bar[axis], bar[axis + 2] = low, low + width
    left, top, right, bottom = bar
    return left, top, right, bottom


def _draw_contour(canvas: Pixels, mask: NDArray[np.bool_], pen: _Pen) -> None:
    """The border of a mask, as a box's lines are: dark outside, light inside."""
    shape = mask.astype(np.uint8)
    found, _ = cv2.findContours(shape, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    if not found:
        return
    # Along the picture's border it moves inwards, so that its dark line is on the picture. Corners that nobody can see
    # are left out: each would be drawn by itself.
    margin, size = pen.width // 2, np.array(mask.shape[::-1])
    low, high = np.minimum(margin, size // 2), np.maximum(size - 1 - margin, size // 2)
    lines = [cv2.approxPolyDP(np.clip(line, low, high).astype(np.int32), 0.5, True) for line in found]
    shape[:margin] = shape[-margin:] = shape[:, :margin] = shape[:, -margin:] = 0
    left, top, right, bottom = _grow(_bounds(mask), pen.width, canvas)
    part, inside = canvas[top:bottom, left:right], shape[top:bottom, left:right]

    def draw(onto: Pixels, colour: Colour, width: int) -> None:
        cv2.drawContours(onto, lines, -1, colour, width, cv2.LINE_AA, offset=(-left, -top))

    (dark, _), *middle, (light, _) = pen.bands
    draw(part, dark, pen.width)
    lit = part.copy()
    draw(lit, light, pen.width)
    cv2.copyTo(lit, inside, part)
    for colour, width in middle:
        draw(part, colour, width)


def _draw_ring(canvas: Pixels, point: Sequence[float], pen: _Pen) -> None:
    """A ring around a point, and its centre."""
    x, y = _find_pixel(canvas, point)
    left, top, right, bottom = _grow((x, y, x + 1, y + 1), RING * pen.unit + 1, canvas)
    distance = np.hypot(*np.ogrid[top - y : bottom - y, left - x : right - x])[..., None]
    part = canvas[top:bottom, left:right]
    outer: float = RING * pen.unit
    rings = []
    for colour, thick in pen.bands:
        rings.append((colour, outer, outer - thick))
        outer -= thick
    for colour, outside, inside in [*rings, (INK, 2.5 * pen.unit, 0), (pen.colour, 1.5 * pen.unit, 0)]:
        cover = np.clip(outside - distance + 0.5, 0, 1) * np.clip(distance - inside + 0.5, 0, 1)
        part[...] = np.rint(part + cover * (np.array(colour) - part))


def _draw_plate(text: str, colour: Colour, size: int, widest: int) -> Pixels:
    """A text on a plate of about this colour, in the ink that has more contrast to it."""
    padding = round(size / 3)
    text = fit_text(_simplify(printable(text)), max(1, widest - 2 * padding), size)
    ink, other = (INK, WHITE) if _find_luminance(colour) > DIM else (WHITE, INK)
    ground = _mix(colour, other, AWAY)
    plate = Image.new("RGB", (measure_text(text, size) + 2 * padding, round(1.3 * size)), ground)
    ImageDraw.Draw(plate).text((padding, round(size * 0.98)), text, ink, find_font(size), anchor="ls")
    return np.array(plate)


def _simplify(text: str) -> str:
    """A text without accents, which Pillow's font does not have; it shows a frame for other letters that it lacks."""
    letters = unicodedata.normalize("NFC", text)
    bare = (unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() for letter in letters)
    return "".join(plain if plain and letter.isalpha() else letter for letter, plain in zip(letters, bare))


def _find_place(plate: Pixels, anchor: Rectangle, margin: int, canvas: Pixels, taken: Sequence[Rectangle]) -> Rectangle:
    """Where a label is: above its mark, in its upper corner, below it, or as near as there is room beside the others."""
    (height, width), (tall, wide) = plate.shape[:2], canvas.shape[:2]
    left, top, right, bottom = anchor
    lowest = max(0, tall - height)
    places = [(left, top - height), (left, bottom), (left, min(max(top, 0), lowest))]
    if right - left >= width + 2 * margin and bottom - top >= 3 * height:
        places.insert(1, (left + margin, top + margin))
    beside = {low for other in taken for low in (other[1] - height, other[3])}
    places += [(left, low) for low in sorted(beside, key=lambda low: abs(low - top + height))]
    fitting = [(max(0, min(start, wide - width)), low) for start, low in places if 0 <= low <= lowest]
    offers = np.array([(start, low, start + width, low + height) for start, low in fitting])[:, None]
    others = np.array(taken).reshape(-1, 4)
    overlap = np.all((offers[..., :2] < others[:, 2:]) & (others[:, :2] < offers[..., 2:]), axis=2)
    start, low = fitting[np.any(overlap, axis=1).argmin()]  # the first free one, or the first of all
    return start, low, start + width, low + height


def _find_anchor(canvas: Pixels, mark: Mark, pen: _Pen) -> Rectangle:
    """What a mark covers, which its label is beside; the picture's corner for a label alone."""
    if mark.box is not None:
        frame = _find_frame(canvas, mark.box, pen)
        if mark.edge is None:
            return frame
        bar = _find_bar(canvas, frame, mark.edge, pen)
        return min(frame[0], bar[0]), min(frame[1], bar[1]), max(frame[2], bar[2]), max(frame[3], bar[3])
    if mark.mask is not None and mark.mask.any():
        return _grow(_bounds(mark.mask), pen.width // 2, canvas)
    if mark.point is not None:
        x, y = _find_pixel(canvas, mark.point)
        return _grow((x, y, x + 1, y + 1), RING * pen.unit, canvas)
    return 0, 0, 0, 0


def _mix(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(it + share * (to - it)) for it, to in zip(colour, other))
    return red, green, blue


def _find_luminance(colour: Colour) -> float:
    """From 0 to 1, as the Web Content Accessibility Guidelines define it."""
    shares = (it / 255 for it in colour)
    linear = (it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in shares)
    return sum(weight * it for weight, it in zip((0.2126, 0.7152, 0.0722), linear))


def _find_pixel(canvas: Pixels, point: Sequence[float]) -> tuple[int, int]:
    """The pixel (across, down) that a point lies in, or the nearest one."""
    height, width = canvas.shape[:2]
    return min(max(math.floor(float(point[0])), 0), width - 1), min(max(math.floor(float(point[1])), 0), height - 1)


def _bounds(mask: NDArray[np.bool_]) -> Rectangle:
    left, top, width, height = cv2.boundingRect(mask.astype(np.uint8))
    return left, top, left + width, top + height


def _grow(rectangle: Rectangle, by: int, canvas: Pixels) -> Rectangle:
    left, top, right, bottom = rectangle
    return max(0, left - by), max(0, top - by), min(canvas.shape[1], right + by), min(canvas.shape[0], bottom + by)


def _shrink(rectangle: Rectangle, by: int) -> Rectangle:
    left, top, right, bottom = rectangle
    return left + by, top + by, right - by, bottom - by


def _fill(canvas: Pixels, rectangle: Rectangle, colour: Colour) -> None:
    left, top, right, bottom = rectangle
    if left < right and top < bottom:
        cv2.rectangle(canvas, (left, top), (right - 1, bottom - 1), colour, cv2.FILLED)


def _check_numbers(values: Any, what: str, names: Sequence[str]) -> None:
    if values is None:
        return
    try:
        numbers = [float(it) for it in values]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if len(numbers) != len(names) or not all(map(math.isfinite, numbers)):
        raise ImageError(f"The {what} of a mark is {shorten(values)}, expected ({', '.join(names)}): finite numbers.")


def _check_masks(marks: Iterable[Mark], picture: Pixels) -> list[Mark]:
    """The marks, whose masks are of the picture's size. Raises `ImageError` for other ones."""
    marks = list(marks)
    for mark in marks:
        if not isinstance(mark, Mark):
            raise ImageError(f"The mark is {shorten(mark)}, expected a Mark.")
        if mark.mask is not None and tuple(mark.mask.shape) != picture.shape[:2]:
            sizes = " x ".join(map(str, mark.mask.shape[::-1])), " x ".join(map(str, picture.shape[1::-1]))
            raise ImageError(f"The mask of a mark is {sizes[0]}, but the image is {sizes[1]}: expected the same size.")
    return marks
